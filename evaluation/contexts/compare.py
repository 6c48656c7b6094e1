"""Compare methods and draft heads on the same contexts: ``python -m evaluation.acceptance --help``.

Whole generations are a noisy comparison: each method soon writes a text of its own. Here the target
writes one continuation of each question. Every few tokens of it, each method drafts a tree, and the
expected number of accepted tokens plus 1 is computed exactly. So the differences between methods
are paired by context. Only the tokens of the sampled slots are random; with ``--draws`` several
trees per context are averaged.
"""

import argparse
import json
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
from eagle.program import new_parser, program
from evaluation.common import flags
from evaluation.common.answers import turn_seed
from evaluation.common.markdown import table
from evaluation.common.prompts import build_prompt, check_template
from evaluation.common.questions import Question, load_questions, question_file
from evaluation.common.run_info import device_name, git_revision
from evaluation.common.statistics import Estimate, Statistic, show
from evaluation.contexts import calibration
from evaluation.contexts.calibration import Calibration
from rheo import AUTO, NORMALISERS, VERIFICATIONS, parse_m

# By draft head and method.
Calibrations = dict[tuple[str, str], Calibration]


def parse_method(text: str) -> dict:
    """The method that a text names, as keywords of ``EaModel.options``.

    Args:
        text: ``topk``, or ``rheo:M`` with a number or auto for M. After it may stand a verification
            and a normaliser, each behind a colon.

    Raises:
        ValueError: for anything else.
    """
    if text == "topk":
        return {"sampling": "topk"}
    known = {"verification": VERIFICATIONS, "normaliser": NORMALISERS}
    sampling, _, rest = text.partition(":")
    m, *more = rest.split(":")
    given = {name: value for value in more for name, values in known.items() if value in values}
    if sampling == "rheo" and (m.isdecimal() or m == AUTO) and len(given) == len(more):
        return {"sampling": "rheo", "m": parse_m(m), **given}
    choices = ", ".join(value for values in known.values() for value in values)
    raise ValueError(
        f"method is {text!r}; write topk, rheo:M or rheo:M:OPTION "
        f"with a number or {AUTO} for M and one of {choices} for OPTION"
    )


def continuation(
    model: EaModel, question: Question, template: str, warpers: dict, tokens: int, seed: int
) -> tuple[Tensor, int]:
    """The target's own answer to the first turn of a question.

    Args:
        model: the pair, of which only the target is used.
        question: the question.
        template: chat template.
        warpers: temperature and filters, as keywords of ``EaModel.naivegenerate``.
        tokens: largest number of new tokens.
        seed: the run's seed.

    Returns:
        Prompt and answer ``[L]``, and the index of the answer's first token.
    """
    prompt = build_prompt(template, model.tokenizer, [question.turns[0]], [])
    seed = turn_seed(seed, question.question_id, 0, 0)
    caps = {"max_new_tokens": tokens, "max_length": None}
    text = model.naivegenerate(prompt, **warpers, **caps, seed=seed)
    return text[0], prompt.shape[1]


def measure(
    model: EaModel,
    heads: list[str],
    questions: list[Question],
    methods: dict[str, DecodingOptions],
    args: argparse.Namespace,
) -> tuple[list[dict], Calibrations]:
    """Measure all methods of all draft heads on the same contexts.

    Returns:
        One row per question, context, head, method and tree, where ``draw`` numbers the trees; and
        where acceptance comes from.
    """
    target = model.target
    shape = target.hidden_size, target.vocab_size, len(target.layers)
    drafts = {path: load_draft(path, *shape).to(target.device, target.dtype) for path in heads}
    trees = [(name, number) for name in methods for number in range(args.draws)]
    options = [replace(methods[name], seed=number) for name, number in trees]
    rows: list[dict] = []
    found: Calibrations = {}
    for question in tqdm(questions, unit="question"):
        length, warpers = args.max_new_token, flags.warpers(args)
        text, start = continuation(model, question, args.template, warpers, length, args.seed)
        positions = list(range(start, text.numel() - 1, args.every))
        if not positions:
            continue
        for path, draft in drafts.items():
            for context in contexts(target, draft, text, positions, options):
                name, number = trees[context.method]
                found.setdefault((path, name), Calibration()).add(context)
                rows.append(
                    {
                        "question_id": question.question_id,
                        "position": context.position - start,
                        "head": path,
                        "method": name,
                        "draw": number,
                        "tau": context.tau,
                    }
                )
    return rows, found


def taus(rows: list[dict]) -> dict[tuple[str, str], Statistic]:
    """Mean tau by head and method, clustered by question."""
    sums: dict[tuple[str, str], tuple[dict, dict]] = {}
    for row in rows:
        totals, counts = sums.setdefault((row["head"], row["method"]), ({}, {}))
        question = row["question_id"]
        totals[question] = totals.get(question, 0.0) + row["tau"]
        counts[question] = counts.get(question, 0) + 1
    return {key: Statistic.ratio(*both) for key, both in sums.items()}


def count_contexts(rows: list[dict]) -> int:
    """Number of different contexts."""
    return len({(row["question_id"], row["position"]) for row in rows})


def summarise(rows: list[dict]) -> list[dict]:
    """By head and method: tau, its difference to the first method, and to the first head."""
    found, positions = taus(rows), count_contexts(rows)
    first_head, first_method = next(iter(found))

    def minus(tau: Statistic, head: str, method: str) -> Estimate | None:
        other = found[head, method]
        return None if other is tau else tau.minus(other).estimate()

    return [
        {
            "head": head,
            "method": method,
            "contexts": positions,
            "tau": tau.estimate(),
            "to_first_method": minus(tau, head, first_method),
            "to_first_head": minus(tau, first_head, method),
        }
        for (head, method), tau in found.items()
    ]


def render(summary: list[dict]) -> str:
    """The summary as a Markdown table; differences as ``+0.120 ± 0.030`` (95 %)."""
    columns = (
        "head",
        "method",
        "contexts",
        "tau [95 %]",
        "to the first method",
        "to the first head",
    )
    rows = []
    for row in summary:
        tau = row["tau"]
        interval = "" if tau.low is None else f" [{tau.low:.2f}, {tau.high:.2f}]"
        differences = [show(row[name], True, 3) for name in ("to_first_method", "to_first_head")]
        names = row["head"], row["method"], row["contexts"]
        rows.append((*names, f"{tau.value:.3f}{interval}", *differences))
    return table(columns, rows)


def read_questions(args: argparse.Namespace) -> list[Question]:
    """The questions asked for, with the name of their set in their ids.

    Raises:
        ValueError: if two questions have the same id.
    """
    files = args.question_file or [question_file(name) for name in args.bench_name]
    questions = [
        replace(question, question_id=f"{file.parent.name}/{question.question_id}")
        for file in files
        for question in load_questions(file, args.question_begin, args.question_end)
    ]
    if len({question.question_id for question in questions}) < len(questions):
        raise ValueError(
            "two question files are in folders of the same name and share question ids; "
            "measure them one by one"
        )
    return questions


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = new_parser(
        "evaluation.acceptance",
        "Compare methods and draft heads on the same contexts.",
    )
    add = parser.add_argument
    target = "target: Hub id, folder, .gguf file, or smollm2-demo"
    add("--base-model-path", required=True, help=target)
    add("--ea-model-path", nargs="+", help="one or more draft heads; default: the demo's")
    names, default = ("--methods", "--arms"), ["topk", "rheo:1"]
    which = "topk, rheo:M, rheo:M:rrsw or rheo:M:full; the others are compared to the first"
    add(*names, dest="methods", nargs="+", default=default, help=which)
    add("--bench-name", nargs="+", default=["demo"], help="question sets")
    add("--question-file", type=Path, nargs="+", help="question files, instead of --bench-name")
    add("--question-begin", type=int, help="first question of each set, counted from 0")
    add("--question-end", type=int, help="end of the questions, not included")
    add("--max-new-token", type=int, default=96, help="length of the continuation")
    add("--every", type=int, default=6, help="tokens between two contexts")
    add("--draws", type=int, default=1, help="trees that each method samples at each context")
    support = "draft tokens that carry q, 0 for all; for rheo only, where the default is 128"
    add("--support", type=int, help=support)
    add("--seed", type=int, default=0)
    flags.add_warpers(parser)
    flags.add_tree(parser)
    flags.add_model(parser)
    add("--output", type=Path, help="JSON file for settings, table, rows and calibration")
    add("--plot", type=Path, help="PNG file for a plot of the share accepted over the proxy")
    return parser


@program(build_parser)
def main(args: argparse.Namespace) -> None:
    """Measure, print the tables, and write the results."""
    for name in ("every", "draws"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    questions = read_questions(args)
    methods = {text: parse_method(text) for text in args.methods}
    heads = args.ea_model_path or ([demo_head_path()] if args.base_model_path == DEMO_NAME else [])
    if not heads:
        raise ValueError("--ea-model-path is missing; only the demo target has its own draft head")
    model = EaModel.from_pretrained(
        base_model_path=args.base_model_path,
        ea_model_path=heads[0],
        **flags.model(args),
        **flags.tree(args),
    )
    check_template(args.template, model.tokenizer)
    for method in methods.values():
        if args.support is not None and method["sampling"] == "rheo":
            method["support"] = args.support
    warpers = flags.warpers(args)
    options = {text: model.options(**warpers, **method) for text, method in methods.items()}

    rows, found = measure(model, heads, questions, options, args)
    if not rows:
        raise ValueError(
            f"there is no context: the continuations of all {len(questions)} questions are "
            "shorter than two tokens"
        )
    summary = summarise(rows)
    print(render(summary))
    by_name = {
        f"{Path(head).parent.name}/{Path(head).name} {method}" if len(heads) > 1 else method: part
        for (head, method), part in found.items()
    }
    print("\nAccepted tokens per cycle by slot kind and level, and the share of visited parents")
    print("whose sampled slot is in the tree\n")
    print(calibration.render(by_name))
    print(
        f"{len(questions)} questions, T = {args.temperature}, a context every {args.every} tokens; "
        "95 % intervals, clustered by question"
    )
    if args.plot is not None:
        calibration.plot({name: part.curves() for name, part in by_name.items()}, args.plot)
    if args.output is not None:
        settings = {key: value for key, value in vars(args).items() if key != "output"}
        content = {
            "settings": settings
            | {
                "commit": git_revision(),
                "device": device_name(model.target.device),
                "dtype": str(model.target.dtype),
            },
            "table": summary,
            "rows": rows,
            "calibration": [
                {"head": head, "method": method, **part.to_json()}
                for (head, method), part in found.items()
            ],
        }
        text = json.dumps(
            content, default=lambda x: asdict(x) if isinstance(x, Estimate) else str(x)
        )
        replace_text(args.output, text + "\n")


if __name__ == "__main__":
    main()
