"""The paper's experiments as grids of settings, its models, and the values that it reports.

Source: arXiv 2609.21827, section 5.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

BENCHES = ("alpaca", "gsm8k", "humaneval", "mt_bench", "qa", "sum")
BENCH_LABELS = dict(zip(BENCHES, ("Alpaca", "Math", "Code", "MT", "QA", "Sum")))
MEAN = "mean"  # stands for the unweighted mean of the benches where a bench is named


@dataclass(frozen=True)
class Pair:
    """A target and its draft head.

    Attributes:
        label: the paper's abbreviation.
        base_model_path: target, a Hub id or a folder.
        ea_model_path: draft head, likewise; None if the target brings its own.
        template: chat template, see ``evaluation.common.prompts``.
        dtype: name of the default dtype.
    """

    label: str
    base_model_path: str
    ea_model_path: str | None
    template: str
    dtype: str


PAIRS = {
    "demo": Pair("demo", "smollm2-demo", None, "auto", "auto"),
    "vicuna-13b": Pair(
        label="V-13B",
        base_model_path="lmsys/vicuna-13b-v1.3",
        ea_model_path="yuhuili/EAGLE3-Vicuna1.3-13B",
        template="vicuna_v1.1",
        dtype="fp16",
    ),
    "llama31-8b": Pair(
        label="L31-8B",
        base_model_path="meta-llama/Llama-3.1-8B-Instruct",
        ea_model_path="yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        template="llama-3.1",
        dtype="fp16",
    ),
    "dsl-8b": Pair(
        label="DSL-8B",
        base_model_path="deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
        ea_model_path="yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B",
        template="auto",
        dtype="fp16",
    ),
}


@dataclass(frozen=True)
class Method:
    """One way to decode, as keywords of ``EaModel.options``; None means their default."""

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


def rheo(m: int, verification: str | None = None, support: int | None = None) -> Method:
    """RheoSampling with m lead slots."""
    return Method("rheo", m, verification, support)


@dataclass(frozen=True)
class Cell:
    """One run: a method on a question set at a temperature with a seed."""

    bench: str
    method: Method
    temperature: float
    seed: int

    def folder(self, root: Path) -> Path:
        """Folder of its answers, below the folder of the experiment."""
        return root / self.bench / f"{self.method.name}-T{self.temperature:g}-seed{self.seed}"


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper.

    Attributes:
        title: the paper's number, and what is shown.
        methods: the methods that are compared.
        benches: the question sets.
        temperatures: the decoding temperatures.
        tree: ``total_token``, ``depth``, ``top_k``.
        seeds: number of seeds.
        timing: whether to time the phases of a cycle on a GPU too. The GPU then runs without CUDA
            graphs and waits after each phase.
    """

    title: str
    methods: tuple[Method, ...]
    benches: tuple[str, ...] = BENCHES
    temperatures: tuple[float, ...] = (1.0,)
    tree: tuple[int, int, int] = (60, 7, 10)
    seeds: int = 1
    timing: bool = False

    @property
    def drafting(self) -> tuple[Method, ...]:
        """All methods but plain decoding; each is compared to the first of them."""
        return tuple(method for method in self.methods if method != PLAIN)

    def cells(self, benches: Iterable[str], seeds: Iterable[int]) -> list[Cell]:
        """All runs on some of the benches, with some seeds."""
        grid = itertools.product(benches, self.temperatures, seeds, self.methods)
        return [Cell(bench, method, temperature, seed) for bench, temperature, seed, method in grid]


EXPERIMENTS = {
    "table2": Experiment(
        title="Table 2: tau and speedup of Top-K and RheoSampling",
        methods=(PLAIN, TOPK, rheo(1)),
        seeds=3,
    ),
    "table3": Experiment(
        title="Table 3: RheoVerification against RRSw on the same pools",
        methods=(TOPK, rheo(1, verification="rrsw"), rheo(1)),
        seeds=3,
    ),
    "table5": Experiment(
        title="Table 5: size of the support",
        methods=(TOPK, *(rheo(1, support=support) for support in (128, 256, 512, 1024, 0))),
        benches=("mt_bench",),
        timing=True,
    ),
    "figure3": Experiment(
        title="Figure 3: tau against m",
        methods=(TOPK, *(rheo(m) for m in range(5))),
        benches=("gsm8k", "humaneval", "qa", "mt_bench"),
    ),
    "figure4": Experiment(
        title="Figure 4: tau against temperature",
        methods=(TOPK, rheo(0), rheo(1)),
        benches=("mt_bench", "gsm8k", "humaneval"),
        temperatures=(0.0, 0.25, 0.5, 0.75, 1.0),
    ),
}

ONE_LEVEL = Experiment(
    title="Table 4: acceptance of one level of three candidates",
    methods=(TOPK, rheo(1, verification="rrsw"), rheo(1)),
    benches=("mt_bench",),
    tree=(4, 0, 3),
)


@dataclass(frozen=True)
class Reported:
    """What the paper reports for one method.

    Attributes:
        tau: by bench; under ``MEAN`` the unweighted mean over all six benches.
        speedup: over plain decoding, for all six benches.
        draft_ms: milliseconds of drafting a cycle, on an A6000.
    """

    tau: dict[str, float]
    speedup: float | None = None
    draft_ms: float | None = None


def taus(*tau: float, speedup: float | None = None) -> Reported:
    """The values of a table with all benches: tau of each, then its mean."""
    return Reported(dict(zip((*BENCHES, MEAN), tau)), speedup)


def mt_bench(tau: float, draft_ms: float) -> Reported:
    """The values of a table with MT-bench only."""
    return Reported({"mt_bench": tau}, draft_ms=draft_ms)


# By experiment, label of the pair and name of the method.
PAPER = {
    ("table2", "V-13B", "topk"): taus(5.59, 5.85, 6.66, 5.69, 4.91, 5.80, 5.75, speedup=3.37),
    ("table2", "V-13B", "rheo-m1"): taus(5.92, 5.87, 6.72, 5.88, 5.00, 5.94, 5.89, speedup=3.43),
    ("table2", "L31-8B", "topk"): taus(5.68, 5.50, 6.11, 4.60, 3.89, 4.49, 5.04, speedup=2.84),
    ("table2", "L31-8B", "rheo-m1"): taus(6.03, 5.60, 6.23, 4.84, 4.14, 4.66, 5.25, speedup=2.93),
    ("table2", "DSL-8B", "topk"): taus(4.48, 6.70, 5.43, 4.93, 4.08, 4.32, 4.99, speedup=2.89),
    ("table2", "DSL-8B", "rheo-m1"): taus(4.79, 6.71, 5.79, 5.16, 4.35, 4.47, 5.21, speedup=2.99),
    ("table3", "L31-8B", "topk"): taus(5.68, 5.50, 6.11, 4.60, 3.89, 4.49, 5.04),
    ("table3", "L31-8B", "rheo-m1-rrsw"): taus(5.88, 5.47, 6.18, 4.67, 4.09, 4.58, 5.15),
    ("table3", "L31-8B", "rheo-m1"): taus(6.03, 5.60, 6.23, 4.84, 4.14, 4.66, 5.25),
    ("table5", "L31-8B", "topk"): mt_bench(4.60, draft_ms=12.9),
    ("table5", "L31-8B", "rheo-m1-support128"): mt_bench(4.84, draft_ms=13.1),
    ("table5", "L31-8B", "rheo-m1-support256"): mt_bench(4.85, draft_ms=13.2),
    ("table5", "L31-8B", "rheo-m1-support512"): mt_bench(4.78, draft_ms=13.3),
    ("table5", "L31-8B", "rheo-m1-support1024"): mt_bench(4.83, draft_ms=13.3),
    ("table5", "L31-8B", "rheo-m1-support0"): mt_bench(4.89, draft_ms=18.8),
}
