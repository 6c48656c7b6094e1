"""Time the cycles of a pair: ``python -m evaluation.bench --base-model-path smollm2-demo``.

Plain decoding, Top-K and RheoSampling answer the same questions and take turns cycle by cycle, so
that a slow moment of the machine affects all of them. The table holds medians over cycles and
ratios paired by question.

"Outside the networks" is the part of a cycle that is not spent inside the modules of target and
draft head: it is what the method itself costs. It is measured on a CPU only. On a GPU the modules
return before their work is done, so only whole phases and cycles are timed.

The last line of the output is one JSON object. ``evaluation.speed.growth`` measures how the cost
grows with the sizes of trees, contexts and vocabularies.
"""

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median

import torch
from scipy.stats import trim_mean
from tqdm import tqdm

from eagle.files import replace_text
from eagle.model.ea_model import EaModel
from eagle.model.tuning.tree_size import verification_seconds
from eagle.program import new_parser, program
from evaluation.common import flags
from evaluation.common.answers import turn_seed
from evaluation.common.markdown import table
from evaluation.common.prompts import build_prompt, check_template
from evaluation.common.questions import load_questions, question_file
from evaluation.common.run_info import device_name, git_revision
from evaluation.common.statistics import Estimate, ratio, ratio_of_ratios, show
from evaluation.speed.memory import bandwidth, cycle_bytes
from evaluation.speed.operations import Operations
from evaluation.speed.timing import PHASES, Clock, Sample, networks, take_turns, timed_answer
from rheo import AUTO

METHODS = {"plain": {"sampling": "none"}, "topk": {"sampling": "topk"}} | {
    f"rheo m={m}": {"sampling": "rheo", "m": m} for m in (0, 1, 2, AUTO)
}
COUNTED = 10  # cycles whose operations are counted, at least
COUNTED_TOKENS = 24  # largest length of an answer whose operations are counted
NODES = (1, 4, 8, 12, 16, 24, 32, 60)  # tree sizes whose forward is timed


def count_operations(
    model: EaModel, prompts: list[torch.Tensor], settings: dict
) -> tuple[float, float | None]:
    """Operations outside the target's forward, and reads by the CPU, per cycle.

    Args:
        model: the pair.
        prompts: answered one after the other until ``COUNTED`` cycles have been seen.
        settings: keywords of ``EaModel.options``.

    Returns:
        Two means over cycles. The second is None on a CPU, which reads its own memory.
    """
    operations, cycles = Operations(), 0
    for prompt in prompts:
        # With timing no CUDA graph is used; a graph would hide its operations.
        stream = model.stream(prompt, model.options(**settings), timing=True)
        next(stream)  # buffers are made in the first cycle
        with operations, operations.leaving_out(model.target):
            cycles += sum(1 for _ in stream)
        if cycles >= COUNTED:
            break
    cycles = max(cycles, 1)
    reads = None if model.target.device.type == "cpu" else operations.reads / cycles
    return operations.counts.total() / cycles, reads


def paired(samples: list[Sample], method: str, base: str) -> dict[int | str, tuple[Sample, Sample]]:
    """The samples of two methods by question, if both have timed cycles."""
    ours, theirs = (
        {sample.question: sample for sample in samples if sample.method == name and sample.cycles}
        for name in (method, base)
    )
    return {key: (ours[key], theirs[key]) for key in ours if key in theirs}


def compare_speeds(samples: list[Sample], method: str, base: str) -> Estimate | None:
    """Tokens per second of ``method`` over those of ``base``, paired by question."""
    pairs = paired(samples, method, base)
    sums = [
        {question: value(pair[side]) for question, pair in pairs.items()}
        for side in (0, 1)
        for value in (lambda sample: sample.tokens, lambda sample: sum(sample.cycles))
    ]
    return ratio_of_ratios(*sums)


def compare_cycles(samples: list[Sample], method: str, base: str) -> Estimate | None:
    """Seconds of a cycle of ``method`` over those of ``base``.

    Only rounds in which both methods took a turn are compared. The value of a question is the
    geometric mean over its rounds, without the lowest and the highest fifth: a disturbance as short
    as a cycle affects one method alone.
    """
    means, rounds = {}, {}
    for question, (ours, theirs) in paired(samples, method, base).items():
        logs = [math.log(a / b) for a, b in zip(ours.cycles, theirs.cycles)]
        rounds[question] = len(logs)
        means[question] = len(logs) * math.exp(trim_mean(logs, 0.2))
    return ratio(means, rounds)


def summarise(samples: list[Sample], method: str, floor: float) -> dict:
    """The results of one method.

    Args:
        samples: of all methods.
        method: its name.
        floor: seconds that a cycle needs to read its bytes from memory.

    Raises:
        ValueError: if no answer of the method has two cycles.
    """
    own = [sample for sample in samples if sample.method == method]
    cycles = [seconds for sample in own for seconds in sample.cycles]
    if not cycles:
        raise ValueError(
            f"no answer of {method} has two cycles, and the first one is a warm-up; "
            "raise --max-new-token"
        )
    tokens = sum(sample.tokens for sample in own)
    inside = [seconds for sample in own for seconds in sample.inside]
    outside = [whole - part for whole, part in zip(cycles, inside)]
    phases = {
        phase: [seconds for sample in own for seconds in sample.phases[phase]] for phase in PHASES
    }
    return {
        "method": method,
        "cycles": len(cycles),
        "tau": tokens / len(cycles),
        "cycle_ms": 1e3 * median(cycles),
        "phases_ms": {phase: 1e3 * median(seconds) for phase, seconds in phases.items()},
        "outside_ms": 1e3 * median(outside) if any(inside) else None,
        "tokens_per_sec": tokens / sum(cycles),
        "times_plain": compare_speeds(samples, method, "plain"),
        "cycle_over_topk": compare_cycles(samples, method, "topk"),
        "floor_ms": 1e3 * floor,
        "bandwidth_share": floor / median(cycles),
    }


def render(rows: list[dict], forward: dict[int, float]) -> str:
    """The report as Markdown.

    Args:
        rows: results by method.
        forward: seconds of the target's forward, by tree nodes.
    """
    methods = {
        "method": lambda row: row["method"],
        "cycles": lambda row: row["cycles"],
        "tau": lambda row: f"{row['tau']:.2f}",
        "cycle, ms": lambda row: f"{row['cycle_ms']:.1f}",
        **{name: lambda row, name=name: f"{row['phases_ms'][name]:.2f}" for name in PHASES},
        "outside the networks": lambda row: (
            None if row["outside_ms"] is None else f"{row['outside_ms']:.2f}"
        ),
        "over Top-K's": lambda row: show(row["cycle_over_topk"]),
        "tokens/s": lambda row: f"{row['tokens_per_sec']:.2f}",
        "times plain": lambda row: show(row["times_plain"]),
        "share of the memory's bandwidth": lambda row: f"{100 * row['bandwidth_share']:.0f} %",
        "operations": lambda row: f"{row['operations']:.0f}",
        "reads by the CPU": lambda row: row["reads"],
    }
    sizes = [
        (nodes, f"{1e3 * seconds:.1f}", f"{seconds / forward[1]:.2f}")
        for nodes, seconds in forward.items()
    ]
    return "\n".join(
        (
            table(list(methods), [[cell(row) for cell in methods.values()] for row in rows]),
            "",
            table(("nodes", "forward of the target, ms", "over one node's"), sizes),
            "",
        )
    )


def circumstances(args: argparse.Namespace, model: EaModel) -> dict:
    """What a measured time holds for: the settings, the machine and the source code."""
    given = {k: str(v) for k, v in vars(args).items() if v is not None and k != "output"}
    return given | {
        "dtype": str(model.target.dtype),
        "device": device_name(model.target.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": git_revision(),
    }


def write_report(folder: Path, name: str, text: str, settings: dict, result: str) -> None:
    """Write ``name.md``, a text with the settings below it, and ``name.json``."""
    settings_line = ", ".join(f"{key} {value}" for key, value in settings.items())
    replace_text(folder / f"{name}.md", f"{text}\n{settings_line}\n")
    replace_text(folder / f"{name}.json", result + "\n")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = new_parser(
        "evaluation.bench",
        "Time the phases of a cycle.",
    )
    add = parser.add_argument
    add("--base-model-path", required=True)
    add("--ea-model-path", help="default: the demo's draft head")
    add("--bench-name", default="demo")
    add("--question-file", type=Path)
    add("--limit", type=int, help="number of questions; default: all")
    add("--max-new-token", type=int, default=48)
    add("--temperature", type=float, default=1.0)
    which = "methods that take turns; with fewer, each has more turns in the same time"
    names = ("--methods", "--arms")
    add(*names, dest="methods", nargs="+", choices=METHODS, default=list(METHODS), help=which)
    add("--rounds", type=int, default=15, help="forwards of each tree size")
    add("--seed", type=int, default=0)
    add("--output", type=Path, help="folder for bench.md and bench.json")
    flags.add_tree(parser)
    flags.add_model(parser)
    return parser


@program(build_parser)
def main(args: argparse.Namespace) -> None:
    """Measure, print the report, and write it."""
    if args.rounds < 1:
        raise ValueError(f"--rounds is {args.rounds}; it must be at least 1")
    model = EaModel.from_pretrained(
        base_model_path=args.base_model_path,
        ea_model_path=args.ea_model_path,
        **flags.tree(args),
        **flags.model(args),
    )
    if model.draft is None:
        raise ValueError("--ea-model-path is missing: a cycle needs a draft head")
    check_template(args.template, model.tokenizer)
    file = args.question_file or question_file(args.bench_name)
    questions = load_questions(file, None, args.limit)
    turns = [question.turns[:1] for question in questions]
    prompts = [build_prompt(args.template, model.tokenizer, turn, []) for turn in turns]

    settings = {"temperature": args.temperature, "max_new_tokens": args.max_new_token}
    methods = {name: settings | METHODS[name] for name in args.methods}
    short = {"max_new_tokens": min(COUNTED_TOKENS, args.max_new_token)}
    counts = {
        name: count_operations(model, prompts, keys | short) for name, keys in methods.items()
    }

    clock = Clock(networks(model)) if model.target.device.type == "cpu" else None
    samples = []
    for question, prompt in tqdm(list(zip(questions, prompts)), unit="question"):
        seed = turn_seed(args.seed, question.question_id, 0, 0)
        answers = []
        for name, keys in methods.items():
            samples.append(Sample(name, question.question_id))
            options = model.options(**keys, seed=seed)
            answers.append(timed_answer(model, prompt, options, samples[-1], clock))
        take_turns(answers)

    context = round(mean(prompt.numel() for prompt in prompts) + args.max_new_token / 2)
    speed = bandwidth(model.target.device)
    rows = []
    for name, (operations, reads) in counts.items():
        floor = cycle_bytes(model, name != "plain", context) / speed
        row = summarise(samples, name, floor)
        rows.append(row | {"operations": operations, "reads": reads})
    times = verification_seconds(model.target, NODES, context, args.rounds)
    forward = {nodes: median(seconds) for nodes, seconds in times.items()}

    about = circumstances(args, model) | model.tree_defaults
    about |= {
        "questions": len(questions),
        "context": context,
        "bandwidth_gb_per_sec": round(speed / 1e9, 1),
    }
    text = render(rows, forward)
    print(text)
    forward_ms = {nodes: 1e3 * seconds for nodes, seconds in forward.items()}
    content = {"settings": about, "methods": rows, "forward_ms": forward_ms}
    result = json.dumps(content, default=asdict)
    if args.output:
        write_report(args.output, "bench", text, about, result)
    print(result)


if __name__ == "__main__":
    main()
