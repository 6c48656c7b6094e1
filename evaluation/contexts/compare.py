"""Compare methods and heads on the same contexts: ``python -m evaluation.acceptance --help``.

Whole generations are noisy: each method soon writes a text of its own. Here the target writes one continuation of each
question, and every few tokens of it each method drafts a tree, whose expected accepted + 1 is computed exactly. So the
differences between methods are paired by context; only which token the sampled slots drew is still chance (``--draws`` averages it).
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from torch import Tensor
from tqdm import tqdm

from eagle.files import replace_text
from eagle.model.demo import DEMO_NAME, demo_head_path
from eagle.model.draft.checkpoint import load_draft
from eagle.model.ea_model import EaModel
from eagle.model.options import DecodingOptions
from eagle.model.tuning.contexts import contexts
from eagle.program import one_line_errors
from evaluation.common import flags
from evaluation.common.answers import commit, device_name, turn_seed
from evaluation.common.prompts import build_prompt, check_template
from evaluation.common.questions import Question, load_questions, question_file
from evaluation.common.statistics import Estimate, Statistic
from evaluation.contexts import calibration
from evaluation.contexts.calibration import Calibration
from rheo import AUTO, NORMALISERS, VERIFICATIONS, parse_m


def parse_method(text: str) -> dict:
    """``topk``, or ``rheo:M`` with a number or auto, and behind it a verification or a normaliser, as keywords of ``EaModel.options``.

    Raises:
        ValueError: for anything else.
    """
    sampling, *rest = text.split(":")
    if sampling == "topk" and not rest:
        return {"sampling": "topk"}
    known = {"verification": VERIFICATIONS, "normaliser": NORMALISERS}
    more = {name: value for value in rest[1:] for name, values in known.items() if value in values}
    if (
        sampling == "rheo"
        and rest
        and (rest[0].isdecimal() or rest[0] == AUTO)
        and len(more) == len(rest) - 1
    ):
        return {"sampling": "rheo", "m": parse_m(rest[0]), **more}
    choices = ", ".join(value for values in known.values() for value in values)
    raise ValueError(
        f"method is {text!r}; write topk, rheo:M or rheo:M:OPTION with a number or {AUTO} for M and one of {choices}"
    )


def continuation(
    model: EaModel, question: Question, template: str, probs: dict, tokens: int, seed: int
) -> tuple[Tensor, int]:
    """The target's own answer to the first turn, prompt included ``[L]``, and where the answer begins."""
    prompt = build_prompt(template, model.tokenizer, [question.turns[0]], [])
    seed = turn_seed(seed, question.question_id, 0, 0)
    text = model.naivegenerate(prompt, **probs, max_new_tokens=tokens, max_length=None, seed=seed)
    return text[0], prompt.shape[1]


def measure(
    model: EaModel,
    heads: list[str],
    questions: list[Question],
    methods: dict[str, DecodingOptions],
    args: argparse.Namespace,
    calibrations: dict[tuple[str, str], Calibration],
) -> Iterator[dict]:
    """One row per question, context, head, method and draw; every tree is also taken into ``calibrations`` by (head, method)."""
    target = model.target
    shape = target.hidden_size, target.vocab_size, len(target.layers)
    drafts = {path: load_draft(path, *shape).to(target.device, target.dtype) for path in heads}
    options = [replace(o, seed=draw) for o in methods.values() for draw in range(args.draws)]
    names = [(name, draw) for name in methods for draw in range(args.draws)]
    for question in tqdm(questions, unit="question"):
        text, start = continuation(
            model, question, args.template, flags.warpers(args), args.max_new_token, args.seed
        )
        positions = list(range(start, text.numel() - 1, args.every))
        if not positions:
            continue
        for path, draft in drafts.items():
            for context in contexts(target, draft, text, positions, options):
                name, draw = names[context.method]
                calibrations.setdefault((path, name), Calibration()).add(context)
                position = {
                    "question_id": question.question_id,
                    "position": context.position - start,
                }
                yield {**position, "head": path, "method": name, "draw": draw, "tau": context.tau}


def taus(rows: list[dict]) -> dict[tuple[str, str], Statistic]:
    """tau by head and method, clustered by question."""
    sums: dict[tuple[str, str], tuple[dict, dict]] = {}
    for row in rows:
        totals, counts = sums.setdefault((row["head"], row["method"]), ({}, {}))
        question = row["question_id"]
        totals[question], counts[question] = (
            totals.get(question, 0.0) + row["tau"],
            counts.get(question, 0) + 1,
        )
    return {key: Statistic.ratio(*both) for key, both in sums.items()}


def count_contexts(rows: list[dict]) -> int:
    """Different contexts, however often each was drawn."""
    return len({(row["question_id"], row["position"]) for row in rows})


def summarise(rows: list[dict]) -> list[dict]:
    """Per head and method: tau, and its difference to the first method and to the same method of the first head."""
    found, positions = taus(rows), count_contexts(rows)
    first_head, first_method = next(iter(found))

    def over(key: tuple[str, str], other: tuple[str, str]) -> Estimate:
        return found[key].minus(found[other]).estimate()

    return [
        {
            "head": head,
            "method": method,
            "contexts": positions,
            "tau": tau.estimate(),
            "to_first_method": None
            if method == first_method
            else over((head, method), (head, first_method)),
            "to_first_head": None
            if head == first_head
            else over((head, method), (first_head, method)),
        }
        for (head, method), tau in found.items()
    ]


def render(summary: list[dict]) -> str:
    """A Markdown table; differences as ``+0.12 ± 0.03`` (95 %)."""
    lines = [
        "| head | method | contexts | tau [95 %] | to the first method | to the first head |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in summary:
        tau = row["tau"]
        shown = f"{tau.value:.3f}" + (
            "" if tau.low is None else f" [{tau.low:.2f}, {tau.high:.2f}]"
        )
        differences = [
            ""
            if e is None
            else f"{e.value:+.3f}" + ("" if e.low is None else f" ± {e.high - e.value:.3f}")
            for e in (row["to_first_method"], row["to_first_head"])
        ]
        lines.append(
            f"| {row['head']} | {row['method']} | {row['contexts']} | {shown} | {' | '.join(differences)} |"
        )
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.acceptance", description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add(
        "--base-model-path",
        required=True,
        help="target: Hub id, folder, .gguf file, or smollm2-demo",
    )
    add("--ea-model-path", nargs="+", help="one or more heads; default: the demo's")
    add(
        "--methods",
        "--arms",
        dest="methods",
        nargs="+",
        default=["topk", "rheo:1"],
        help="topk, rheo:M, rheo:M:rrsw, rheo:M:full; the first is what others are compared to",
    )
    add("--bench-name", nargs="+", default=["demo"], help="question sets")
    add("--question-file", type=Path, nargs="+", help="question files in place of --bench-name")
    add("--question-begin", type=int, help="first question of each set, counted from 0")
    add("--question-end", type=int, help="end of the questions, not included")
    add("--max-new-token", type=int, default=96, help="length of the continuation")
    add("--every", type=int, default=6, help="tokens between two contexts")
    add("--draws", type=int, default=1, help="trees drawn at each context by each method")
    add(
        "--support",
        type=int,
        help="draft tokens that carry q, 0 for all (rheo; 128 where not given)",
    )
    add("--seed", type=int, default=0)
    flags.add_warpers(parser)
    flags.add_tree(parser)
    flags.add_model(parser)
    add("--output", type=Path, help="JSON file with settings, table, calibration and raw rows")
    add("--plot", type=Path, help="picture (.png, .svg) of proxies against what was accepted")
    return parser


def run(args: argparse.Namespace) -> None:
    """Measure, print the table, write the rows."""
    for name in ("every", "draws"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    files = args.question_file or [question_file(name) for name in args.bench_name]
    questions = [
        replace(q, question_id=f"{file.parent.name}/{q.question_id}")
        for file in files
        for q in load_questions(file, args.question_begin, args.question_end)
    ]
    if len({q.question_id for q in questions}) < len(questions):
        raise ValueError(
            "two question files lie in folders of one name and share question ids; measure them one by one"
        )
    methods = {text: parse_method(text) for text in args.methods}
    heads = args.ea_model_path or ([demo_head_path()] if args.base_model_path == DEMO_NAME else [])
    if not heads:
        raise ValueError("--ea-model-path is missing; only the demo target brings its own head")
    model = EaModel.from_pretrained(
        args.base_model_path, heads[0], **flags.model(args), **flags.tree(args)
    )
    check_template(args.template, model.tokenizer)
    support = {} if args.support is None else {"support": args.support}
    options = {
        text: model.options(
            **flags.warpers(args), **method, **(support if method["sampling"] == "rheo" else {})
        )
        for text, method in methods.items()
    }
    calibrations: dict[tuple[str, str], Calibration] = {}
    rows = list(measure(model, heads, questions, options, args, calibrations))
    if not rows:
        raise ValueError(
            f"no context: the continuations of {len(questions)} questions are shorter than two tokens"
        )
    summary = summarise(rows)
    print(render(summary))
    by_name = {
        f"{Path(head).parent.name}/{Path(head).name} {method}" if len(heads) > 1 else method: c
        for (head, method), c in calibrations.items()
    }
    print(
        "\nAccepted tokens a cycle by slot kind and level, and how often a visited parent's sampled slot is in the tree\n"
    )
    print(calibration.render(by_name))
    print(
        f"{len(questions)} questions, T = {args.temperature}, a context every {args.every} tokens; 95 %, clustered by question"
    )
    if args.plot is not None:
        calibration.plot({name: c.curves() for name, c in by_name.items()}, [args.plot])
    if args.output is not None:
        settings = {k: v for k, v in vars(args).items() if k != "output"}
        settings |= {
            "commit": commit(),
            "device": device_name(model.target.device),
            "dtype": str(model.target.dtype),
        }
        content = {"settings": settings, "table": summary, "rows": rows}
        content["calibration"] = [
            {"head": head, "method": method, **c.to_json()}
            for (head, method), c in calibrations.items()
        ]
        replace_text(
            args.output,
            json.dumps(content, default=lambda x: asdict(x) if isinstance(x, Estimate) else str(x))
            + "\n",
        )


def main(argv: list[str] | None = None) -> None:
    """Entry point; bad input ends with one line, not a traceback."""
    with one_line_errors():
        run(build_parser().parse_args(argv))


if __name__ == "__main__":
    main()
