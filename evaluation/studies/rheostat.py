"""Measure what any choice of m could gain: ``python -m evaluation.studies.rheostat --help``.

One level is considered, with a pool of K slots that all survive, after every token of the target's
own answers. There p and q are both known, so the acceptance of Top-K and of each m has a closed
form (``rheo.analysis.one_level``). Three limits are shown beside them:

- the best of these methods at each node, chosen with knowledge of p;
- the best verifier for the pool of m = 1 (optimal transport);
- the K likeliest tokens of p: no K chosen tokens accept more, but a sampled slot can.

docs/RHEOSTAT.md holds the results.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from eagle.files import replace_text
from eagle.model.ea_model import EaModel
from eagle.model.sampling import TargetProbs
from eagle.model.tuning.contexts import paired_logits
from eagle.program import new_parser, program
from evaluation.common import flags
from evaluation.common.markdown import table
from evaluation.common.prompts import check_template
from evaluation.common.questions import load_questions, question_file
from evaluation.common.run_info import device_name, git_revision
from evaluation.common.statistics import Statistic, show
from evaluation.contexts.compare import continuation
from rheo import PoolOptions
from rheo.analysis import one_level

LEADS = (0, 1, 2, 3)
TOP_K, ORACLE = "Top-K", "best at each node"
VERIFIER, POOL = "best verifier, m = 1", "K likeliest of p"
SUPPORT = PoolOptions().support


def acceptances(
    p: Tensor, draft_logits: Tensor, target_ids: Tensor | None, slots: int, temperature: float
) -> dict[str, Tensor]:
    """Probabilities that one level accepts a drafted token, by method and limit, ``[nodes]``.

    Args:
        p: target probs ``[nodes, V]``.
        draft_logits: ``[nodes, draft V]``.
        target_ids: target id of each draft id; None if they are the same.
        slots: K, at most ``SUPPORT`` and the size of the draft vocabulary.
        temperature: temperature of the sampled slot.
    """
    p = p.double()
    values, positions = draft_logits.double().topk(min(SUPPORT, draft_logits.shape[-1]))
    inside = p.gather(1, positions if target_ids is None else target_ids[positions])
    # All tokens outside the support count as one token with q = 0: no formula tells them apart.
    rest = (p.sum(-1, keepdim=True) - inside.sum(-1, keepdim=True)).clamp_min(0)
    lumped = torch.cat((inside, rest), 1)
    q = torch.cat((values.softmax(-1), torch.zeros_like(rest)), 1)
    found = {TOP_K: one_level.top_k_acceptance(lumped, q, slots)}
    for m in LEADS[:slots]:
        # An empty tail samples nothing.
        q_tail = one_level.tail_probs(q, m, temperature).nan_to_num(0.0)
        found[f"m = {m}"] = one_level.rheo_acceptance(lumped, q, q_tail, slots)
        if m == 1:
            found[VERIFIER] = one_level.best_acceptance(lumped, q, q_tail, slots)
    methods = [value for name, value in found.items() if name != VERIFIER]
    found[ORACLE] = torch.stack(methods).amax(0)
    found[POOL] = p.topk(slots).values.sum(-1)
    return found


def measure(
    model: EaModel, args: argparse.Namespace, temperature: float
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The id of each question and the ``acceptances`` along its answer."""
    warpers = {"temperature": temperature}
    probs, target_ids = TargetProbs(model.options(**warpers).warpers), model.draft.target_ids()
    questions = [
        (name, question)
        for name in args.bench_name
        for question in load_questions(question_file(name), None, args.question_end)
    ]
    for name, question in tqdm(questions, unit="question", desc=f"T = {temperature:g}"):
        length = args.max_new_token
        text, start = continuation(model, question, args.template, warpers, length, args.seed)
        if text.numel() - start < 2:
            continue
        target, draft = paired_logits(model.target, model.draft, text)
        p, draft_logits = probs(target[start:-1]), draft[start - 1 : -1]
        found = acceptances(p, draft_logits, target_ids, args.top_k, temperature)
        yield f"{name}/{question.question_id}", found


def render(found: dict[float, dict[str, Statistic]]) -> str:
    """A Markdown table of Top-K's acceptance and the differences of the others to it."""
    names = [name for name in next(iter(found.values())) if name != TOP_K]
    rows = []
    for temperature, row in found.items():
        differences = [show(row[name].minus(row[TOP_K]).estimate(), True, 3) for name in names]
        rows.append((f"{temperature:g}", show(row[TOP_K].estimate(), digits=3), *differences))
    return table(("T", TOP_K, *names), rows) + "\n"


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = new_parser(
        "evaluation.studies.rheostat",
        "Measure what any choice of m could gain.",
    )
    add, temperatures = parser.add_argument, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.3]
    add("--base-model-path", required=True)
    add("--ea-model-path", help="default: the demo's draft head")
    add("--bench-name", nargs="+", default=["demo"])
    add("--question-end", type=int, help="end of the questions of each set; default: all")
    add("--max-new-token", type=int, default=64)
    add("--temperature", type=float, nargs="+", default=temperatures)
    add("--top-k", type=int, default=10, help="slots of a pool (K)")
    add("--seed", type=int, default=0)
    add("--output", type=Path, help="path of the table (.md) and of its numbers (.json)")
    flags.add_model(parser)
    return parser


@program(build_parser)
def main(args: argparse.Namespace) -> None:
    """Measure, print the table, and write it."""
    model = EaModel.from_pretrained(
        base_model_path=args.base_model_path,
        ea_model_path=args.ea_model_path,
        **flags.model(args),
    )
    if model.draft is None:
        raise ValueError("--ea-model-path is missing: the study needs a draft head")
    most = min(SUPPORT, model.draft.config.draft_vocab_size)
    if not 1 <= args.top_k <= most:
        raise ValueError(f"--top-k is {args.top_k}; it must lie in 1..{most}")
    check_template(args.template, model.tokenizer)
    found, nodes = {}, {}
    for t in args.temperature:
        by_question = dict(measure(model, args, t))
        if not by_question:
            raise ValueError(
                f"no answer at temperature {t:g} has two tokens; raise --max-new-token"
            )
        nodes[t] = {question: len(part[TOP_K]) for question, part in by_question.items()}
        found[t] = {}
        for name in next(iter(by_question.values())):
            sums = {question: part[name].sum().item() for question, part in by_question.items()}
            found[t][name] = Statistic.ratio(sums, nodes[t])
    count = sum(sum(counts.values()) for counts in nodes.values())
    text = render(found) + (
        f"\n{count} nodes of {len(set().union(*nodes.values()))} questions, K = {args.top_k}. "
        "Acceptance of one level of Top-K, then differences to it; "
        "± is half of the 95 % interval, clustered by question.\n"
    )
    print(text)
    if args.output is None:
        return
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    settings |= {"commit": git_revision(), "device": device_name(model.target.device)}
    numbers = {
        t: {name: {"value": x.value, "error": x.error} for name, x in row.items()}
        for t, row in found.items()
    }
    content = {"settings": settings, "table": numbers, "nodes": nodes}
    replace_text(args.output.with_suffix(".md"), text)
    replace_text(args.output.with_suffix(".json"), json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
