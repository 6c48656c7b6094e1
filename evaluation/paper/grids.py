"""The paper's experiments as grids of settings, its models, and the values it reports (arXiv 2609.21827, section 5)."""

import itertools
from dataclasses import dataclass
from pathlib import Path

BENCHES = ("alpaca", "gsm8k", "humaneval", "mt_bench", "qa", "sum")
BENCH_LABELS = dict(zip(BENCHES, ("Alpaca", "Math", "Code", "MT", "QA", "Sum")))


@dataclass(frozen=True)
class Pair:
    """A target and its head; ``label`` is the paper's abbreviation."""

    label: str
    base_model_path: str
    ea_model_path: str | None
    template: str
    dtype: str


PAIRS = {
    "demo": Pair("demo", "smollm2-demo", None, "auto", "auto"),
    "vicuna-13b": Pair(
        "V-13B", "lmsys/vicuna-13b-v1.3", "yuhuili/EAGLE3-Vicuna1.3-13B", "vicuna_v1.1", "fp16"
    ),
    "llama31-8b": Pair(
        "L31-8B",
        "meta-llama/Llama-3.1-8B-Instruct",
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        "llama-3.1",
        "fp16",
    ),
    "dsl-8b": Pair(
        "DSL-8B",
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
        "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B",
        "auto",
        "fp16",
    ),
}


@dataclass(frozen=True)
class Method:
    """One way to decode; None where a setting does not belong to the sampling."""

    sampling: str
    m: int | None = None
    verification: str | None = None
    support: int | None = None

    @property
    def name(self) -> str:
        """Short and unique: ``topk``, ``rheo-m1``, ``rheo-m1-rrsw``, ``rheo-m1-support512``."""
        parts = [self.sampling]
        parts += [] if self.m is None else [f"m{self.m}"]
        parts += [] if self.verification is None else [self.verification]
        parts += [] if self.support is None else [f"support{self.support}"]
        return "-".join(parts)


PLAIN, TOPK = Method("none"), Method("topk")


def rheo(m: int, **more) -> Method:
    return Method("rheo", m, **more)


@dataclass(frozen=True)
class Cell:
    """One run: a method on a question set at a temperature with a seed."""

    bench: str
    method: Method
    temperature: float
    seed: int

    def folder(self, root: Path) -> Path:
        """Where its answers lie below the folder of an experiment."""
        return root / self.bench / f"{self.method.name}-T{self.temperature:g}-seed{self.seed}"


@dataclass(frozen=True)
class Experiment:
    """A table or figure.

    Attributes:
        title: what it shows, with the paper's number.
        methods: the first drafting one is what others are compared to.
        tree: ``total_token``, ``depth``, ``top_k``.
        timing: whether the phases of a cycle are timed on a GPU too, which makes it wait and go without CUDA graphs.
    """

    title: str
    methods: tuple[Method, ...]
    benches: tuple[str, ...] = BENCHES
    temperatures: tuple[float, ...] = (1.0,)
    tree: tuple[int, int, int] = (60, 7, 10)
    seeds: int = 1
    timing: bool = False

    def cells(self, benches: tuple[str, ...], seeds: range) -> list[Cell]:
        """All runs on some of the benches."""
        grid = itertools.product(benches, self.temperatures, seeds, self.methods)
        return [Cell(bench, method, temperature, seed) for bench, temperature, seed, method in grid]


EXPERIMENTS = {
    "table2": Experiment(
        "Table 2: tau and speedup of Top-K and RheoSampling", (PLAIN, TOPK, rheo(1)), seeds=3
    ),
    "table3": Experiment(
        "Table 3: RheoVerification against RRSw on the same pools",
        (TOPK, rheo(1, verification="rrsw"), rheo(1)),
        seeds=3,
    ),
    "table5": Experiment(
        "Table 5: size of the support",
        (TOPK, *(rheo(1, support=s) for s in (128, 256, 512, 1024, 0))),
        ("mt_bench",),
        timing=True,
    ),
    "figure3": Experiment(
        "Figure 3: tau against m",
        (TOPK, *(rheo(m) for m in range(5))),
        ("gsm8k", "humaneval", "qa", "mt_bench"),
    ),
    "figure4": Experiment(
        "Figure 4: tau against temperature",
        (TOPK, rheo(0), rheo(1)),
        ("mt_bench", "gsm8k", "humaneval"),
        (0.0, 0.25, 0.5, 0.75, 1.0),
    ),
}

ONE_LEVEL = Experiment(
    "Table 4: acceptance of one level of three candidates",
    (TOPK, rheo(1, verification="rrsw"), rheo(1)),
    ("mt_bench",),
    tree=(4, 0, 3),
)

# tau by bench (in the order of BENCHES), its mean over all six, and the speedup; None where the paper gives none.
PAPER = {
    ("table2", "V-13B", "topk"): (5.59, 5.85, 6.66, 5.69, 4.91, 5.80, 5.75, 3.37),
    ("table2", "V-13B", "rheo-m1"): (5.92, 5.87, 6.72, 5.88, 5.00, 5.94, 5.89, 3.43),
    ("table2", "L31-8B", "topk"): (5.68, 5.50, 6.11, 4.60, 3.89, 4.49, 5.04, 2.84),
    ("table2", "L31-8B", "rheo-m1"): (6.03, 5.60, 6.23, 4.84, 4.14, 4.66, 5.25, 2.93),
    ("table2", "DSL-8B", "topk"): (4.48, 6.70, 5.43, 4.93, 4.08, 4.32, 4.99, 2.89),
    ("table2", "DSL-8B", "rheo-m1"): (4.79, 6.71, 5.79, 5.16, 4.35, 4.47, 5.21, 2.99),
    ("table3", "L31-8B", "topk"): (5.68, 5.50, 6.11, 4.60, 3.89, 4.49, 5.04, None),
    ("table3", "L31-8B", "rheo-m1-rrsw"): (5.88, 5.47, 6.18, 4.67, 4.09, 4.58, 5.15, None),
    ("table3", "L31-8B", "rheo-m1"): (6.03, 5.60, 6.23, 4.84, 4.14, 4.66, 5.25, None),
} | {
    ("table5", "L31-8B", method): (None, None, None, tau, None, None, None, None)
    for method, tau in {
        "topk": 4.60, "rheo-m1-support128": 4.84, "rheo-m1-support256": 4.85, "rheo-m1-support512": 4.78, "rheo-m1-support1024": 4.83,
        "rheo-m1-support0": 4.89,
    }.items()
}  # fmt: skip

# Table 5: milliseconds of drafting a cycle, Llama-3.1-8B-Instruct on an A6000.
PAPER_DRAFT_MS = {
    ("table5", "L31-8B", method): ms
    for method, ms in {
        "topk": 12.9, "rheo-m1-support128": 13.1, "rheo-m1-support256": 13.2, "rheo-m1-support512": 13.3, "rheo-m1-support1024": 13.3,
        "rheo-m1-support0": 18.8,
    }.items()
}  # fmt: skip
