"""Table 4: how often a tree of one level is accepted, counted and predicted.

``python -m evaluation.paper.one_level --pair demo`` drafts a pool of three with each method at
every token of the target's own answers, and verifies it. The share of accepted tokens stands
beside the closed form for the same p and q (``rheo.analysis.one_level``: Theorem 3, RRSw, Top-K).
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from eagle.model.ea_model import EaModel
from eagle.model.options import DecodingOptions
from eagle.model.sampling import TargetProbs
from eagle.model.tuning.contexts import paired_logits
from eagle.program import program
from evaluation.common.answers import turn_seed
from evaluation.common.markdown import table
from evaluation.common.questions import Question
from evaluation.common.statistics import Statistic, show
from evaluation.contexts.compare import continuation
from evaluation.paper.grids import BENCH_LABELS, ONE_LEVEL, Method
from evaluation.paper.study import (
    check_counts,
    chosen_pair,
    chosen_questions,
    load_pair,
    study_folder,
    study_parser,
    study_settings,
)
from evaluation.paper.table_files import write_table
from rheo import Draws, TreeOptions, build_tree, verify
from rheo.analysis import one_level as theory

# On MT-bench; the paper does not say with which model.
PAPER = {"topk": 0.800, "rheo-m1-rrsw": 0.835, "rheo-m1": 0.854}


def predicted(
    p: Tensor, draft_logits: Tensor, target_ids: Tensor | None, method: Method, tree: TreeOptions
) -> Tensor:
    """The probability that a drafted token is accepted, in closed form, float64 ``[rows]``.

    Args:
        p: target probs, float64 ``[rows, V]``.
        draft_logits: ``[rows, draft V]``.
        target_ids: target id of each draft id; None if they are the same.
        method: how the tree is filled and verified.
        tree: options of the tree.
    """
    n, everything = tree.pool.size, draft_logits.shape[-1]
    support = n if method.sampling == "topk" else tree.pool.support or everything
    values, positions = draft_logits.topk(min(support, everything))
    ids = positions if target_ids is None else target_ids[positions]
    # Put the support first, in the pool's own order. So the pool and the closed forms mean the
    # same tokens where logits tie.
    ranks = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    rank_of_id = torch.full(p.shape, everything, device=ids.device).scatter_(1, ids, ranks)
    order = rank_of_id.sort(dim=-1, stable=True).indices
    p, q = p.gather(1, order), torch.zeros_like(p)
    q[:, : ids.shape[1]] = values.double().softmax(-1)
    if method.sampling == "topk":
        return theory.top_k_acceptance(p, q, n)
    q_tail = theory.tail_probs(q, method.m, tree.pool.temperature)
    if method.verification == "rrsw":
        return theory.rrsw_acceptance(p, q, q_tail, n, method.m)
    return theory.rheo_acceptance(p, q, q_tail, n)


def count_accepted(
    p: Tensor,
    draft_logits: Tensor,
    roots: Tensor,
    target_ids: Tensor | None,
    options: DecodingOptions,
    draws: Draws,
) -> int:
    """Draft and verify a tree of one level in each row; returns the number of accepted tokens.

    Args:
        p: target probs ``[rows, V]``.
        draft_logits: ``[rows, draft V]``.
        roots: int64 ``[rows]``, the token before each tree.
        target_ids: target id of each draft id; None if they are the same.
        options: how the trees are filled and verified.
        draws: source of randomness.
    """
    accepted = 0
    for row_p, logits, root in zip(p, draft_logits, roots):
        tree = build_tree(root, logits, no_expansion, options.tree, draws, target_ids)
        verified = verify(tree, lambda node, p=row_p: p, draws, options.verification or "rheo")
        accepted += verified.count.item() - 1
    return accepted


def no_expansion(*_):
    """Expand nodes; a tree of one level must not call it."""
    raise AssertionError("a tree of one level expands nothing")


def measure(
    model: EaModel,
    questions: dict[str, list[Question]],
    template: str,
    temperature: float,
    tokens: int,
    seeds: int,
) -> Iterator[dict]:
    """Count and predict acceptances along answers of the target.

    Args:
        model: the pair.
        questions: by bench, the questions that the target answers.
        template: chat template.
        temperature: the decoding temperature.
        tokens: cap on the tokens of an answer.
        seeds: answers per question.

    Yields:
        For each bench, question, seed and method: the number of contexts, the acceptances that
        were counted, and the sum of the predicted probabilities.
    """
    options = {
        method: model.options(
            temperature=temperature,
            sampling=method.sampling,
            m=method.m,
            verification=method.verification,
        )
        for method in ONE_LEVEL.methods
    }
    target_ids = model.draft.target_ids()
    work = [
        (bench, question, seed)
        for bench, of_bench in questions.items()
        for question in of_bench
        for seed in range(seeds)
    ]
    for bench, question, seed in tqdm(work, unit="answer"):
        text, start = continuation(
            model, question, template, {"temperature": temperature}, tokens, seed
        )
        if text.numel() - start < 2:
            continue
        roots = text[start:-1]
        target_logits, draft_logits = paired_logits(model.target, model.draft, text)
        target_logits, draft_logits = target_logits[start:-1], draft_logits[start - 1 : -1]
        for method, chosen in options.items():
            p = TargetProbs(chosen.warpers)(target_logits)
            generator = torch.Generator(device=text.device)
            generator.manual_seed(turn_seed(seed, question.question_id, 0, 0))
            accepted = count_accepted(p, draft_logits, roots, target_ids, chosen, Draws(generator))
            expected = predicted(p.double(), draft_logits, target_ids, method, chosen.tree)
            yield {
                "bench": bench,
                "question_id": question.question_id,
                "seed": seed,
                "method": method.name,
                "contexts": len(p),
                "accepted": accepted,
                "predicted": expected.sum().item(),
            }


def summarise(rows: list[dict]) -> list[dict]:
    """For each bench and method: acceptance counted, predicted, and their paired difference."""
    summary = []
    for bench, method in dict.fromkeys((row["bench"], row["method"]) for row in rows):
        contexts, accepted, expected = (defaultdict(float) for _ in range(3))
        for row in rows:
            if (row["bench"], row["method"]) == (bench, method):
                contexts[row["question_id"]] += row["contexts"]
                accepted[row["question_id"]] += row["accepted"]
                expected[row["question_id"]] += row["predicted"]
        share, prediction = (Statistic.ratio(x, contexts) for x in (accepted, expected))
        line = {
            "bench": bench,
            "method": method,
            "contexts": int(sum(contexts.values())),
            "counted": share.estimate(),
            "predicted": prediction.estimate(),
            "difference": share.minus(prediction).estimate(),
            "paper": PAPER[method] if bench == "mt_bench" else None,
        }
        summary.append(line)
    return summary


def render(summary: list[dict]) -> str:
    """The table as Markdown."""
    columns = ["bench", "method", "contexts", "accepted", "closed form", "difference", "paper"]
    lines = [
        [
            BENCH_LABELS[row["bench"]],
            row["method"],
            row["contexts"],
            show(row["counted"], digits=3),
            show(row["predicted"], digits=3),
            show(row["difference"], sign=True, digits=3),
            None if row["paper"] is None else f"{row['paper']:.3f}",
        ]
        for row in summary
    ]
    return (
        f"# {ONE_LEVEL.title}\n\n{table(columns, lines)}\n\n"
        "± half of the 95 % interval, clustered by question.\n"
    )


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = study_parser(
        "evaluation.paper.one_level",
        "Table 4: how often a tree of one level is accepted, counted and predicted.",
        max_new_token=128,
        benches="mt_bench",
        seeds="1",
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    return parser


@program(build_parser)
def main(args: argparse.Namespace) -> None:
    """Measure, print the table, write the rows."""
    check_counts(args)
    questions, template = chosen_questions(args, ONE_LEVEL), chosen_pair(args).template
    model, seeds = load_pair(args, ONE_LEVEL), args.seeds or ONE_LEVEL.seeds
    answers = measure(model, questions, template, args.temperature, args.max_new_token, seeds)
    rows = list(answers)
    if not rows:
        raise ValueError("no answer has two tokens; raise --max-new-token")
    summary = summarise(rows)
    settings = study_settings(args, model, seeds) | {"temperature": args.temperature}
    name = "table4" if args.temperature == 1 else f"table4-T{args.temperature:g}"
    output = study_folder(args, "table4") / name
    write_table(output, render(summary), summary, settings, answers=rows)


if __name__ == "__main__":
    main()
