"""Compare this project with EAGLE, cycle by cycle: ``scripts/diff_upstream.sh PATH_TO_EAGLE``.

EAGLE runs in a process and an environment of its own. For each of its cycles this project drafts
its Top-K tree at the same context, and the two trees are compared: tokens, parents, mask, positions
and scores. At temperature 0 the texts and accept lengths are compared, too. At other temperatures
tau is compared, which must agree within its error.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from eagle.model.demo import DEMO_NAME, demo_head_path, demo_target_path
from eagle.model.ea_model import EaModel
from eagle.model.options import DecodingOptions
from eagle.model.tuning.contexts import contexts
from eagle.program import new_parser
from evaluation.checks.greedy import top2_gap
from evaluation.common.markdown import table
from evaluation.common.prompts import build_prompt
from evaluation.common.questions import load_questions, question_file
from evaluation.common.statistics import Statistic, show
from evaluation.speed.timing import Clock, networks
from evaluation.upstream.checkpoints import save_for_eagle, tiny_pair
from evaluation.upstream.names import names_table
from evaluation.upstream.trees import TIE, compare_trees

COMMIT = "cb7e084"
TINY = "tiny"
FALSE_ALARM = 1e-6  # of the comparison of tau
METHODS = {"Top-K": {"sampling": "topk"}, "RheoSampling m = 1": {"sampling": "rheo", "m": 1}}


def run_eagle(python: Path, job: dict, program: str = "worker.py") -> list[dict]:
    """Run EAGLE in a process of its own.

    Args:
        python: Python of EAGLE's environment.
        job: the program's input.
        program: a program in this folder that imports nothing of this project.

    Returns:
        The records that it prints.

    Raises:
        OSError: with the end of the program's output, if it fails.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(job, file)
        file.flush()
        command = [str(python), str(Path(__file__).with_name(program)), file.name]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"EAGLE's process failed:\n{done.stderr[-3000:]}")
    start = "RECORD "
    lines = [line for line in done.stdout.splitlines() if line.startswith(start)]
    return [json.loads(line.removeprefix(start)) for line in lines]


def accept_lengths(record: dict) -> list[int]:
    """EAGLE's accepted tokens plus 1, for each cycle after which another tree was drafted."""
    positions = [cycle["context"] for cycle in record["cycles"]]
    return [after - before for before, after in zip(positions, positions[1:])]


def compare_record(
    record: dict,
    model: EaModel,
    prompt: list[int],
    options: DecodingOptions,
    report: Callable[[str], None],
) -> int:
    """Compare one run of EAGLE with this project.

    Args:
        record: the run.
        model: the pair.
        prompt: token ids.
        options: decoding options of this project.
        report: is called with each line of the report.

    Returns:
        Number of faults.
    """
    cycles = record["cycles"][: record["cycles_run"]]
    positions = [cycle["context"] for cycle in cycles]
    text = torch.tensor(record["output"])
    met = contexts(model.target, model.draft, text, positions, [options])
    ties = faults = 0
    for number, (cycle, context) in enumerate(zip(cycles, met)):
        found = compare_trees(cycle, context.tree)
        for line in found.ties[:3]:
            report(f"  tie in cycle {number}: {line}")
        for line in found.faults[:3]:
            report(f"  FAULT in cycle {number}: {line}")
        ties, faults = ties + bool(found.ties), faults + bool(found.faults)
    report(
        f"prompt {record['prompt']}, seed {record['seed']}: {len(cycles)} trees compared, "
        f"{ties} with ties, {faults} with faults"
    )
    if not options.warpers.greedy:
        return faults
    result = model.generate(torch.tensor([prompt]), options)
    ours, theirs = result.token_ids, record["output"][len(prompt) :]
    for i, (mine, other) in enumerate(zip(ours, theirs)):
        if mine != other:
            gap = top2_gap(model, text[None, : len(prompt) + i])
            kind = "tie" if gap <= TIE else "FAULT"
            where = f"token {i} is {other} in EAGLE and {mine} here"
            report(f"  {kind}: {where}, top two logits {gap:.1e} apart")
            return faults + (kind == "FAULT")
    if ties or faults:
        return faults
    # EAGLE passes its cap by a cycle or two, so only the cycles that both have are compared.
    lengths = accept_lengths(record | {"cycles": cycles})
    if any(a != b for a, b in zip(lengths, result.accept_lengths)):
        report(f"  FAULT: accept lengths {lengths} in EAGLE and {result.accept_lengths} here")
        faults += 1
    return faults


def compare_tau(
    records: list[dict], model: EaModel, prompts: list[list[int]], args: argparse.Namespace
) -> int:
    """Compare tau over the same prompts and seeds, and print it; returns the number of faults.

    Every run is a cluster of its own, since the implementations share no random numbers.
    """
    sums: list[dict] = [{}, {}, {}, {}]
    for record in records:
        options = decoding_options(model, args, record["seed"])
        prompt = torch.tensor([prompts[record["prompt"]]])
        theirs, ours = accept_lengths(record), model.generate(prompt, options).accept_lengths
        for values, value in zip(sums, (sum(theirs), len(theirs), sum(ours), len(ours))):
            values[record["prompt"], record["seed"]] = value
    theirs, ours = Statistic.ratio(*sums[:2]), Statistic.ratio(*sums[2:])
    difference = ours.minus(theirs)
    p = difference.p_value()
    print(
        f"tau: EAGLE {show(theirs.estimate())}, here {show(ours.estimate())}, "
        f"difference {show(difference.estimate(), True)}, p {p}"
    )
    if p is None or p >= FALSE_ALARM:
        return 0
    print(f"FAULT: equal distributions give so large a difference with probability {p:.1e}")
    return 1


def decoding_options(
    model: EaModel, args: argparse.Namespace, seed: int, **method
) -> DecodingOptions:
    """Decoding options of this project for one run."""
    return model.options(
        temperature=args.temperature,
        max_new_tokens=args.max_new_token,
        max_length=None,
        seed=seed,
        **method,
    )


def speed_table(
    records: list[dict], model: EaModel, prompts: list[list[int]], args: argparse.Namespace
) -> str:
    """A Markdown table of speeds on the same prompts and seeds, in float32.

    Whole requests are timed, prefill included. "Outside the networks" is the time that is not spent
    inside the modules of target and draft head.
    """
    names = ("cycles_run", "new_token", "seconds", "inside")
    sums = {"EAGLE, Top-K": [sum(record[name] for record in records) for name in names]}
    clock = Clock(networks(model))
    warm_up = model.options(temperature=args.temperature, max_new_tokens=4)
    model.generate(torch.tensor([prompts[0]]), warm_up)
    for name, method in METHODS.items():
        cycles, tokens, seconds, clock.seconds = 0, 0, 0.0, 0.0
        for record in records:
            options = decoding_options(model, args, record["seed"], **method)
            start = time.perf_counter()
            result = model.generate(torch.tensor([prompts[record["prompt"]]]), options)
            seconds += time.perf_counter() - start
            cycles, tokens = cycles + result.cycles, tokens + result.new_tokens
        sums[f"here, {name}"] = [cycles, tokens, seconds, clock.seconds]
    rows = []
    for name, (cycles, tokens, seconds, inside) in sums.items():
        cycle, outside = (1e3 * x / max(cycles, 1) for x in (seconds, seconds - inside))
        rows.append((name, cycles, f"{cycle:.1f}", f"{outside:.2f}", f"{tokens / seconds:.2f}"))
    columns = ("", "cycles", "ms a cycle", "of these outside the networks", "tokens/s")
    return table(columns, rows)


def faults_table(eagle: Path, python: Path) -> str:
    """A Markdown table of the faults of the checkout that ``faults`` could provoke."""
    with tempfile.TemporaryDirectory() as scratch:
        base, head = tiny_pair(Path(scratch), 512, 384)
        model = EaModel.from_pretrained(base_model_path=base, ea_model_path=head, dtype="fp32")
        target, copy = save_for_eagle(model, head, Path(scratch))
        job = {
            "eagle": str(eagle),
            "base": str(target),
            "head": str(copy),
            "plain_head": head,
            "scratch": scratch,
        }
        records = run_eagle(python, job, "faults.py")
    rows = [(r["about"], r["seen"] or "not seen", f"`{r['fault']}`") for r in records]
    return table(("EAGLE", "seen", "in evaluation/upstream/faults.py"), rows)


def find_pair(args: argparse.Namespace, scratch: Path) -> tuple[str, str]:
    """Paths of target and draft head.

    Args:
        args: the command line.
        scratch: where the tiny pair is saved if it is asked for.

    Raises:
        ValueError: if no draft head is given for a target that has none of its own.
    """
    if args.base_model_path == TINY:
        return tiny_pair(scratch)
    if args.base_model_path == DEMO_NAME:
        return demo_target_path(), args.ea_model_path or demo_head_path()
    if args.ea_model_path is None:
        raise ValueError(
            f"--ea-model-path is missing; only {DEMO_NAME} and {TINY} have their own draft heads"
        )
    return args.base_model_path, args.ea_model_path


def run(args: argparse.Namespace) -> int:
    """Run both, compare and print; returns the number of faults."""
    for file in ("eagle/model/ea_model.py", "eagle/model/cnets.py"):
        if not (args.eagle / file).is_file():
            raise ValueError(
                f"{args.eagle} is no checkout of EAGLE: {file} is missing "
                f"(this program was made for commit {COMMIT})"
            )
    if args.faults:
        print(faults_table(args.eagle, args.python))
        return 0
    questions = load_questions(args.question_file or question_file("demo"), None, args.limit)
    texts = [question.turns[0] for question in questions]
    if args.base_model_path == TINY:
        lengths = range(6, 6 + len(texts))
        texts = [
            " ".join(f"w{(7 * i + 3 * j) % 61}" for j in range(length))
            for i, length in enumerate(lengths)
        ]
    size = {"total_token": args.total_token, "depth": args.depth, "top_k": args.top_k}
    with tempfile.TemporaryDirectory() as scratch:
        base, head = find_pair(args, Path(scratch))
        model = EaModel.from_pretrained(
            base_model_path=base, ea_model_path=head, dtype="fp32", **size
        )
        if model.tokenizer is None:
            raise ValueError("the target has no tokenizer, and EAGLE needs one")
        prompts = [build_prompt("auto", model.tokenizer, [text], [])[0].tolist() for text in texts]
        target, copy = save_for_eagle(model, head, Path(scratch))
        longest = max(map(len, prompts)) + args.max_new_token
        job = {
            "eagle": str(args.eagle),
            "base": str(target),
            "head": str(copy),
            "prompts": prompts,
            "seeds": list(range(args.seeds)),
            "temperature": args.temperature,
            "max_new_tokens": args.max_new_token,
            "threads": torch.get_num_threads(),
            "max_length": longest + 2 * args.total_token + 32,
            **size,
        }
        print(
            f"EAGLE: {len(prompts)} prompts x {args.seeds} seeds, T = {args.temperature:g}, "
            f"tree {args.total_token}x{args.depth}",
            flush=True,
        )
        records = run_eagle(args.python, job)
    options, faults = decoding_options(model, args, seed=0), 0
    for record in tqdm(records, unit="run"):
        prompt = prompts[record["prompt"]]
        faults += compare_record(record, model, prompt, options, tqdm.write)
    if not options.warpers.greedy:
        faults += compare_tau(records, model, prompts, args)
    if args.names:
        print(names_table(args.eagle))
    print(speed_table(records, model, prompts, args))
    print("The same" if not faults else f"{faults} faults", flush=True)
    return faults


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = new_parser(
        "evaluation.diff_upstream",
        "Compare this project with a checkout of EAGLE, cycle by cycle.",
        epilog="Exit status: 0 if both do the same, up to ties of score, which are listed; 1 for a "
        "difference that is no tie; 2 for bad input.",
    )
    add = parser.add_argument
    add("eagle", type=Path, help=f"checkout of SafeAILab/EAGLE (made for commit {COMMIT})")
    python = "Python of EAGLE's environment, which scripts/diff_upstream.sh makes"
    add("--python", type=Path, required=True, help=python)
    target = f"a target that EAGLE supports (Llama, Qwen2, Qwen3), {DEMO_NAME}, or {TINY}"
    add("--base-model-path", default=DEMO_NAME, help=target)
    add("--ea-model-path", help=f"its EAGLE-3 head; {DEMO_NAME} and {TINY} have their own")
    add("--question-file", type=Path, help="prompts; default: the demo's questions")
    add("--limit", type=int, default=4, help="number of prompts")
    add("--seeds", type=int, default=1, help="runs of each prompt")
    add("--temperature", type=float, default=0.0)
    add("--max-new-token", type=int, default=32)
    add("--total-token", type=int, default=60)
    add("--depth", type=int, default=7)
    add("--top-k", type=int, default=10)
    faults = "provoke the checkout's faults on a tiny pair, and do nothing else"
    add("--faults", action="store_true", help=faults)
    add("--names", action="store_true", help="print the table of method and flag names, too")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Exit with status 0, 1 or 2 (see the end of the help)."""
    args = build_parser().parse_args(argv)
    try:
        faults = run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
