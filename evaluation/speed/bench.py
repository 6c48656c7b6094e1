"""What a cycle costs and where it goes: ``python -m evaluation.bench --base-model-path smollm2-demo``.

Plain decoding, Top-K and RheoSampling answer the same questions, a cycle of each in turn, so that a slow moment of the machine meets all
alike; what is written is a median over cycles, or a ratio paired by question; cycles are compared where both methods took turns. "Networks" is
the time inside the modules of target and head, the rest is what the method costs (on a CPU; a GPU's launches return before the work is done,
so that only phases and cycles are timed there). The last line is one JSON object. How cost grows with the size of trees, contexts and
vocabularies: ``evaluation.speed.growth``.
"""

import argparse
import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median

import torch
from scipy.stats import trim_mean
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from eagle.files import replace_text
from eagle.model.ea_model import EaModel
from eagle.model.linear import PackedLinear
from eagle.model.tuning.tree_size import verification_seconds
from eagle.program import one_line_errors
from evaluation.common import flags
from evaluation.common.answers import commit, device_name, turn_seed
from evaluation.common.prompts import build_prompt, check_template
from evaluation.common.questions import load_questions, question_file
from evaluation.common.statistics import Estimate, ratio, ratio_of_ratios
from evaluation.paper.tables import show
from rheo import AUTO

METHODS = {"plain": {"sampling": "none"}, "topk": {"sampling": "topk"}} | {
    f"rheo m={m}": {"sampling": "rheo", "m": m} for m in (0, 1, 2, AUTO)
}
PHASES = ("draft", "verify", "commit")
COUNTED = 10  # cycles, at least, whose operations are counted
NODES = (1, 4, 8, 12, 16, 24, 32, 60)


class Operations(TorchDispatchMode):
    """Counts operations that make or change data, and reads of data by the host; views are free.

    Attributes:
        counts: by name.
        reads: numbers that the host reads from another device, and copies from there to the CPU.
        paused: True while nothing is counted.
    """

    def __init__(self):
        super().__init__()
        self.counts, self.reads, self.paused = Counter(), 0, False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if self.paused:
            return result
        made, given = (
            [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and not x.is_mkldnn]
            for tree in (result, (args, kwargs))
        )
        name = function.overloadpacket.__name__
        elsewhere = any(x.device.type not in ("cpu", "meta") for x in given)
        self.reads += elsewhere and (
            name == "_local_scalar_dense" or any(x.device.type == "cpu" for x in made)
        )
        before = {
            x.untyped_storage()._cdata for x in given
        }  # not its address, which tensors without data lack
        view = (
            all(x.untyped_storage()._cdata in before for x in made)
            and not function._schema.is_mutable
        )
        if made and not view:
            self.counts[name] += 1
        return result

    @contextmanager
    def leaving_out(self, target) -> Iterator[None]:
        """Within, the forwards of a ``TargetModel`` are not counted."""
        forward = target._forward

        def uncounted(*args, **kwargs):
            self.paused = True
            try:
                return forward(*args, **kwargs)
            finally:
                self.paused = False

        target._forward = uncounted
        try:
            yield
        finally:
            del target._forward


class Clock:
    """Seconds spent inside some modules, none of which holds another."""

    def __init__(self, modules: list[nn.Module]):
        self.seconds, self.started = 0.0, 0.0
        for module in modules:
            module.register_forward_pre_hook(self.start)
            module.register_forward_hook(self.stop)

    def start(self, *_):
        self.started = time.perf_counter()

    def stop(self, *_):
        self.seconds += time.perf_counter() - self.started


def networks(model: EaModel) -> list[nn.Module]:
    """The modules of target and head whose time is that of the networks."""
    return [model.base_model, *(module for part in head_parts(model) for module in part)]


def head_parts(model: EaModel) -> tuple[list[nn.Module], list[nn.Module]]:
    """The modules of the head that run once a cycle, and those that run at every draft call."""
    head = model.draft
    return [head.fc], [head.midlayer, head.norm, head.lm_head]


@dataclass
class Sample:
    """One request: seconds of each cycle but the first.

    Attributes:
        tokens: emitted by these cycles.
        cycles: whole cycles.
        phases: by phase.
        inside: in the networks.
    """

    method: str
    question: int
    tokens: int = 0
    cycles: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    inside: list[float] = field(default_factory=list)


def sample(
    model: EaModel,
    prompt: torch.Tensor,
    method: str,
    question: int,
    settings: dict,
    clock: Clock | None,
) -> Iterator[Sample]:
    """Answer one prompt and watch its cycles, whatever is done between them; the first one is a warm-up.

    Args:
        clock: of the networks; None on a GPU, where every phase is waited for instead.

    Yields:
        What was found so far, the same object after every cycle.
    """
    found = Sample(method, question)
    stream = iter(model.stream(prompt, model.options(**settings, **METHODS[method]), timing=True))
    seconds = None
    while True:
        start, inside = time.perf_counter(), clock.seconds if clock else 0.0
        generation = next(stream, None)
        end = time.perf_counter()
        if generation is None:
            return
        if seconds is not None:
            found.tokens += generation.accept_lengths[-1]
            found.cycles.append(end - start)
            for phase in PHASES:
                found.phases[phase].append(
                    generation.seconds.get(phase, 0.0) - seconds.get(phase, 0.0)
                )
            found.inside.append((clock.seconds if clock else 0.0) - inside)
        seconds = dict(generation.seconds)
        yield found


def in_turn(answers: dict[str, Iterator[Sample]]) -> list[Sample]:
    """Answers by method, a cycle of each in turn until all have ended, so that a slow moment of the machine meets all alike.

    The order changes from round to round: what runs behind a cheap cycle finds a cooler processor.
    """
    last, chance = {}, random.Random(0)
    while answers:
        for method in chance.sample(list(answers), len(answers)):
            found = next(answers[method], None)
            if found is None:
                del answers[method]
            else:
                last[method] = found
    return list(last.values())


def count(
    model: EaModel, prompts: list[torch.Tensor], method: str, settings: dict
) -> tuple[float, float | None]:
    """Operations outside the target's forward, and reads by the host (of a GPU's memory; None on a CPU), of a mean cycle."""
    operations, cycles = Operations(), 0
    for prompt in prompts:
        stream = model.stream(
            prompt, model.options(**settings, **METHODS[method]), timing=True
        )  # so that no graph hides them
        next(stream)  # lays out what is laid out once
        with operations, operations.leaving_out(model.target):
            for _ in stream:
                cycles += 1
        if cycles >= COUNTED:
            break
    reads = None if model.target.device.type == "cpu" else operations.reads / max(cycles, 1)
    return operations.counts.total() / max(cycles, 1), reads


def bandwidth(device: torch.device) -> float:
    """Bytes a second that the device reads from its memory, the best of ten tries."""
    block = torch.ones(2**26, device=device)  # 256 MiB, beyond any cache
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(4):  # so that on a GPU the one wait at the end weighs little
            total = block.sum()
        total.item()
        seconds.append(time.perf_counter() - start)
    return 4 * block.nbytes / min(seconds)


def weight_bytes(module: nn.Module) -> int:
    """Bytes of a module's weights, packed ones too."""
    packed = (part.packed for part in module.modules() if isinstance(part, PackedLinear))
    return sum(weight.numel() * weight.element_size() for weight in (*module.parameters(), *packed))


def cycle_bytes(model: EaModel, drafting: bool, context: int) -> int:
    """Bytes that a cycle must read: weights and cache of the target, and of the head its fusion once and its layer and output per draft call.

    Of embeddings a cycle reads a few rows; they are not counted.
    """
    target = model.target
    weights = weight_bytes(target.model)
    if getattr(target.output_head, "weight", None) is not target.embedding.weight:
        weights -= target.embedding.weight.nbytes
    cache = (
        sum(buffer.data[..., :1, :].nbytes for buffer in target.new_cache(1).buffers.values())
        * context
    )
    once, per_call = (sum(map(weight_bytes, part)) for part in head_parts(model))
    return weights + cache + drafting * (once + (model.tree_defaults["depth"] + 1) * per_call)


def compare(samples: list[Sample], method: str, base: str, value) -> Estimate | None:
    """Ratio of a value of two methods, paired by question; ``value`` maps a sample to (numerator, denominator)."""
    sides = paired(samples, method, base)
    (y1, x1), (y0, x0) = (
        [{k: value(pair[side])[part] for k, pair in sides.items()} for part in (0, 1)]
        for side in (0, 1)
    )
    return ratio_of_ratios(y1, x1, y0, x0)


def compare_cycles(samples: list[Sample], method: str, base: str) -> Estimate | None:
    """How many times as long as a cycle of ``base`` one of ``method`` takes, over the rounds in which both took turns.

    Of each question the geometric mean over its rounds, a fifth of them left out at either end: what disturbs the machine for the length of a
    cycle hits one method alone.
    """
    means, rounds = {}, {}
    for question, (found, other) in paired(samples, method, base).items():
        logs = [math.log(a / b) for a, b in zip(found.cycles, other.cycles)]
        rounds[question] = len(logs)
        means[question] = len(logs) * math.exp(trim_mean(logs, 0.2))
    return ratio(means, rounds)


def paired(samples: list[Sample], method: str, base: str) -> dict[int, tuple[Sample, Sample]]:
    """The samples of two methods by question, where both have cycles."""
    sides = [
        {found.question: found for found in samples if found.method == name and found.cycles}
        for name in (method, base)
    ]
    return {k: (sides[0][k], sides[1][k]) for k in sides[0] if k in sides[1]}


def summarise(
    model: EaModel, samples: list[Sample], counts: dict, context: int, speed: float
) -> list[dict]:
    """One row a method.

    Args:
        speed: of the memory, bytes a second.

    Raises:
        ValueError: naming a method none of whose answers has two cycles.
    """
    rows = []
    for method in counts:
        mine = [found for found in samples if found.method == method]
        cycles = [second for found in mine for second in found.cycles]
        if not cycles:
            raise ValueError(
                f"no answer of {method} has two cycles, and the first one is a warm-up; raise --max-new-token"
            )
        floor = cycle_bytes(model, method != "plain", context) / speed
        inside = [second for found in mine for second in found.inside]
        rows.append({
            "method": method, "cycles": len(cycles), "tau": sum(found.tokens for found in mine) / len(cycles), "cycle_ms": 1e3 * median(cycles),
            "phases_ms": {phase: 1e3 * median(second for found in mine for second in found.phases[phase]) for phase in PHASES},
            "outside_ms": 1e3 * median(a - b for a, b in zip(cycles, inside)) if any(inside) else None,
            "tokens_per_sec": sum(found.tokens for found in mine) / sum(cycles),
            "times_plain": compare(samples, method, "plain", lambda found: (found.tokens, sum(found.cycles))),
            "cycle_over_topk": compare_cycles(samples, method, "topk"),
            "floor_ms": 1e3 * floor, "bandwidth_share": floor / median(cycles), "operations": counts[method][0], "reads": counts[method][1],
        })  # fmt: skip
    return rows


def render(rows: list[dict], forward: dict[int, float]) -> str:
    """The report as Markdown."""
    columns = (
        "method", "cycles", "tau", "cycle, ms", *PHASES, "outside the networks", "over Top-K's", "tokens/s", "times plain",
        "share of the memory's bandwidth", "operations", "host reads",
    )  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for row in rows:
        phases = " | ".join(f"{row['phases_ms'][phase]:.2f}" for phase in PHASES)
        outside = "" if row["outside_ms"] is None else f"{row['outside_ms']:.2f}"
        lines.append(
            f"| {row['method']} | {row['cycles']} | {row['tau']:.2f} | {row['cycle_ms']:.1f} | {phases} | {outside} | {show(row['cycle_over_topk'])} | "
            f"{row['tokens_per_sec']:.2f} | {show(row['times_plain'])} | {100 * row['bandwidth_share']:.0f} % | {row['operations']:.0f} | {row['reads']} |"
        )
    lines += ["", "| nodes | forward of the target, ms | over one node's |", "| --- | --- | --- |"]
    lines += [
        f"| {nodes} | {1e3 * second:.1f} | {second / forward[1]:.2f} |"
        for nodes, second in forward.items()
    ]
    return "\n".join(lines) + "\n"


def circumstances(args: argparse.Namespace, model: EaModel) -> dict:
    """What a time holds for: the settings given, but not where the results go, and the machine."""
    return {k: str(v) for k, v in vars(args).items() if v is not None and k != "output"} | {
        "dtype": str(model.target.dtype), "device": device_name(model.target.device), "threads": torch.get_num_threads(),
        "torch": torch.__version__, "commit": commit(),
    }  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Measure, print, write."""
    if args.rounds < 1:
        raise ValueError(f"--rounds is {args.rounds}; it must be at least 1")
    model = EaModel.from_pretrained(
        args.base_model_path, args.ea_model_path, **flags.tree(args), **flags.model(args)
    )
    if model.draft is None:
        raise ValueError("--ea-model-path is missing: a cycle needs a head")
    check_template(args.template, model.tokenizer)
    questions = load_questions(
        args.question_file or question_file(args.bench_name), None, args.limit
    )
    settings = {"temperature": args.temperature, "max_new_tokens": args.max_new_token}
    clock = Clock(networks(model)) if model.target.device.type == "cpu" else None
    prompts = [
        build_prompt(args.template, model.tokenizer, question.turns[:1], [])
        for question in questions
    ]
    counts = {
        method: count(
            model, prompts, method, settings | {"max_new_tokens": min(24, args.max_new_token)}
        )
        for method in args.methods
    }
    samples = []
    for question, prompt in tqdm(list(zip(questions, prompts)), unit="question"):
        seed = turn_seed(args.seed, question.question_id, 0, 0)
        samples += in_turn(
            {
                method: sample(
                    model, prompt, method, question.question_id, settings | {"seed": seed}, clock
                )
                for method in args.methods
            }
        )
    context = round(mean(prompt.numel() for prompt in prompts) + args.max_new_token / 2)
    speed = bandwidth(model.target.device)
    rows = summarise(model, samples, counts, context, speed)
    forward = {
        nodes: median(seconds)
        for nodes, seconds in verification_seconds(
            model.target, NODES, context, args.rounds
        ).items()
    }
    about = circumstances(args, model) | model.tree_defaults
    about |= {
        "questions": len(questions),
        "context": context,
        "bandwidth_gb_per_sec": round(speed / 1e9, 1),
    }
    text = render(rows, forward)
    print(text)
    result = json.dumps(
        {
            "settings": about,
            "methods": rows,
            "forward_ms": {k: 1e3 * v for k, v in forward.items()},
        },
        default=asdict,
    )
    if args.output:
        replace_text(
            args.output / "bench.md",
            text + "\n" + ", ".join(f"{k} {v}" for k, v in about.items()) + "\n",
        )
        replace_text(args.output / "bench.json", result + "\n")
    print(result)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.bench",
        description="Time the phases of a cycle.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--base-model-path", required=True)
    add("--ea-model-path", help="default: the demo's head")
    add("--bench-name", default="demo")
    add("--question-file", type=Path)
    add("--limit", type=int, help="questions; default: all")
    add("--max-new-token", type=int, default=48)
    add("--temperature", type=float, default=1.0)
    add(
        "--methods",
        "--arms",
        dest="methods",
        nargs="+",
        choices=METHODS,
        default=list(METHODS),
        help="those that take turns; of fewer each has more of them in the same time",
    )
    add("--rounds", type=int, default=15, help="forwards of each tree size")
    add("--seed", type=int, default=0)
    add("--output", type=Path, help="folder for bench.md and bench.json")
    flags.add_tree(parser)
    flags.add_model(parser)
    return parser


def main(argv: list[str] | None = None) -> None:
    """Entry point; bad input ends with one line, not a traceback."""
    with one_line_errors():
        run(build_parser().parse_args(argv))


if __name__ == "__main__":
    main()
