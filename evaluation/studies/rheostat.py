"""What could any choice of m gain? ``python -m evaluation.studies.rheostat --base-model-path smollm2-demo``.

One level, a pool of K slots that all survive, after every token of the target's own answers: the acceptance of Top-K and of each m in closed
form (``rheo.theory``), with p and q both known. Then what limits a rule that sets m itself: the best of these at each node, chosen by someone
who knows p; the best verifier for the pool of m = 1 (optimal transport); and, beside, the K likeliest tokens of p, the most that K chosen tokens
accept (a sampled slot can pass it).
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
from eagle.program import one_line_errors
from evaluation.common import flags
from evaluation.common.answers import commit, device_name
from evaluation.common.prompts import check_template
from evaluation.common.questions import load_questions, question_file
from evaluation.common.statistics import Statistic
from evaluation.contexts.compare import continuation
from evaluation.paper.tables import show
from rheo import PoolOptions
from rheo.analysis import one_level as theory

LEADS = (0, 1, 2, 3)
TOP_K, ORACLE, VERIFIER, POOL = (
    "Top-K",
    "best at each node",
    "best verifier, m = 1",
    "K likeliest of p",
)
SUPPORT = PoolOptions().support


def acceptances(
    p: Tensor, draft_logits: Tensor, target_ids: Tensor | None, slots: int, temperature: float
) -> dict[str, Tensor]:
    """Probabilities ``[nodes]`` that one level emits a drafted token, by name.

    Args:
        p: ``[nodes, V]`` target laws.
        draft_logits: ``[nodes, draft V]``.
        slots: K, at most SUPPORT and the tokens of the draft.
    """
    values, positions = draft_logits.double().topk(min(SUPPORT, draft_logits.shape[-1]))
    ids = positions if target_ids is None else target_ids[positions]
    inside = p.double().gather(1, ids)
    rest = (p.double().sum(-1, keepdim=True) - inside.sum(-1, keepdim=True)).clamp_min(0)
    # What the draft cannot name is one token more, of q = 0: no formula tells its parts apart.
    p_here, q = (
        torch.cat((inside, rest), 1),
        torch.cat((values.softmax(-1), torch.zeros_like(rest)), 1),
    )
    found = {TOP_K: theory.top_k_acceptance(p_here, q, slots)}
    for m in LEADS[:slots]:
        q_tail = theory.tail_probs(q, m, temperature).nan_to_num(
            0.0
        )  # an empty tail samples nothing
        found[f"m = {m}"] = theory.rheo_acceptance(p_here, q, q_tail, slots)
        if m == 1:
            found[VERIFIER] = theory.best_acceptance(p_here, q, q_tail, slots)
    fixed = [value for name, value in found.items() if name != VERIFIER]
    found[ORACLE] = torch.stack(fixed).amax(0)
    found[POOL] = p.double().topk(slots).values.sum(-1)
    return found


def measure(
    model: EaModel, args: argparse.Namespace, temperature: float
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Per question its id and its ``acceptances``."""
    probs, target_ids = (
        TargetProbs(model.options(temperature=temperature).warpers),
        model.draft.target_ids(),
    )
    questions = [
        (name, q)
        for name in args.bench_name
        for q in load_questions(question_file(name), None, args.question_end)
    ]
    for name, question in tqdm(questions, unit="question", desc=f"T = {temperature:g}"):
        text, start = continuation(
            model,
            question,
            args.template,
            {"temperature": temperature},
            args.max_new_token,
            args.seed,
        )
        if text.numel() - start < 2:
            continue
        target, draft = paired_logits(model.target, model.draft, text)
        yield (
            f"{name}/{question.question_id}",
            acceptances(
                probs(target[start:-1]), draft[start - 1 : -1], target_ids, args.top_k, temperature
            ),
        )


def render(found: dict[float, dict[str, Statistic]]) -> str:
    """One row a temperature: acceptance of Top-K, and what the others have beyond it."""
    names = [name for name in next(iter(found.values())) if name != TOP_K]
    lines = [f"| T | {TOP_K} | {' | '.join(names)} |", "| --- " * (2 + len(names)) + "|"]
    for temperature, row in found.items():
        differences = [show(row[name].minus(row[TOP_K]).estimate(), True, 3) for name in names]
        lines.append(
            f"| {temperature:g} | {show(row[TOP_K].estimate(), digits=3)} | {' | '.join(differences)} |"
        )
    return "\n".join(lines) + "\n"


def run(args: argparse.Namespace) -> None:
    """Measure, print."""
    model = EaModel.from_pretrained(args.base_model_path, args.ea_model_path, **flags.model(args))
    if model.draft is None:
        raise ValueError("--ea-model-path is missing: there is nothing to draft with")
    most = min(SUPPORT, model.draft.config.draft_vocab_size)
    if not 1 <= args.top_k <= most:
        raise ValueError(f"--top-k is {args.top_k}; it must lie in 1..{most}")
    check_template(args.template, model.tokenizer)
    found, nodes = {}, {}
    for temperature in args.temperature:
        by_question = dict(measure(model, args, temperature))
        if not by_question:
            raise ValueError(
                f"no answer at temperature {temperature:g} has two tokens; raise --max-new-token"
            )
        nodes[temperature] = counts = {
            question: len(part[TOP_K]) for question, part in by_question.items()
        }
        names = next(iter(by_question.values()))
        found[temperature] = {
            name: Statistic.ratio(
                {q: part[name].sum().item() for q, part in by_question.items()}, counts
            )
            for name in names
        }
    text = render(found) + (
        f"\n{sum(sum(counts.values()) for counts in nodes.values())} nodes of {len(set().union(*nodes.values()))} questions, K = {args.top_k}; "
        "acceptance of one level, then differences to Top-K; ± half of the 95 % interval, clustered by question\n"
    )
    print(text)
    if args.output is not None:
        settings = {k: v for k, v in vars(args).items() if k != "output"} | {
            "commit": commit(),
            "device": device_name(model.target.device),
        }
        table = {
            t: {name: {"value": x.value, "error": x.error} for name, x in row.items()}
            for t, row in found.items()
        }
        replace_text(args.output.with_suffix(".md"), text)
        replace_text(
            args.output.with_suffix(".json"),
            json.dumps({"settings": settings, "table": table, "nodes": nodes}) + "\n",
        )


def main(argv: list[str] | None = None) -> None:
    """Entry point; bad input ends with one line, not a traceback."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.studies.rheostat", description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add("--base-model-path", required=True)
    add("--ea-model-path", help="default: the demo's head")
    add("--bench-name", nargs="+", default=["demo"])
    add("--question-end", type=int, help="end of the questions of each set; default: all")
    add("--max-new-token", type=int, default=64)
    add("--temperature", type=float, nargs="+", default=[0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.3])
    add("--top-k", type=int, default=10, help="slots of a pool")
    add("--seed", type=int, default=0)
    add("--output", type=Path, help="table (.md) and its numbers (.json)")
    flags.add_model(parser)
    with one_line_errors():
        run(parser.parse_args(argv))


if __name__ == "__main__":
    main()
