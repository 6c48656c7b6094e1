"""Table 5: how much of the draft distribution the support holds.

``python -m evaluation.paper.coverage --pair demo`` measures the mass of the draft head's softmax
over its full vocabulary that lies on the S highest logits. It is averaged over all nodes that get
a pool, in the trees of RheoSampling with m = 1 along the target's own answers.
"""

import argparse
from collections import defaultdict

import torch
from torch import Tensor
from tqdm import tqdm

from eagle.model.ea_model import EaModel
from eagle.model.tuning.contexts import contexts
from eagle.program import program
from evaluation.common.markdown import table
from evaluation.common.questions import Question
from evaluation.common.statistics import Statistic, show
from evaluation.contexts.compare import continuation
from evaluation.paper.grids import BENCH_LABELS, EXPERIMENTS
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

SUPPORTS = (128, 256, 512, 1024)
PAPER = {128: 0.910, 256: 0.918, 512: 0.922, 1024: 0.941}  # Llama-3.1-8B-Instruct on MT-bench


def mass(logits: Tensor, support: int) -> Tensor:
    """Softmax mass of the highest ``support`` logits, float32 ``[P]``, of logits ``[P, V]``."""
    logits = logits.float()
    highest = logits.topk(min(support, logits.shape[-1])).values
    return (highest.logsumexp(-1) - logits.logsumexp(-1)).exp()


def pool_logits(model: EaModel, text: Tensor, positions: list[int], seed: int) -> Tensor:
    """Draft logits ``[nodes, draft V]`` of all nodes that get a pool, in the trees at positions."""
    found: list[Tensor] = []
    options = model.options(temperature=1.0, sampling="rheo", m=1, seed=seed)
    trees = contexts(
        model.target,
        model.draft,
        text,
        positions,
        [options],
        lambda _, logits: found.append(logits),
    )
    for _ in trees:
        pass
    return torch.cat(found)


def measure(
    model: EaModel, questions: list[Question], template: str, tokens: int, seeds: int, every: int
) -> tuple[dict, dict[int, dict]]:
    """Measure the mass of each support along answers of the target.

    Args:
        model: the pair.
        questions: the questions that the target answers.
        template: chat template.
        tokens: cap on the tokens of an answer.
        seeds: answers per question.
        every: number of tokens from one tree to the next.

    Returns:
        By question the number of nodes; by support and question the sum of the mass over them.
    """
    counts: dict = defaultdict(int)
    sums: dict[int, dict] = {support: defaultdict(float) for support in SUPPORTS}
    work = [(question, seed) for question in questions for seed in range(seeds)]
    for question, seed in tqdm(work, unit="answer"):
        text, start = continuation(model, question, template, {"temperature": 1.0}, tokens, seed)
        positions = list(range(start, text.numel() - 1, every))
        if not positions:
            continue
        logits = pool_logits(model, text, positions, seed)
        counts[question.question_id] += len(logits)
        for support in SUPPORTS:
            sums[support][question.question_id] += mass(logits, support).sum().item()
    return counts, sums


def render(rows: list[dict]) -> str:
    """The table as Markdown."""
    columns = ["bench", "support", "nodes", "coverage of q", "paper, L31-8B"]
    lines = [
        [
            BENCH_LABELS[row["bench"]],
            row["support"],
            f"{row['nodes']:,}",
            show(row["coverage"], digits=3),
            None if row["paper"] is None else f"{row['paper']:.3f}",
        ]
        for row in rows
    ]
    return (
        f"# Table 5: mass of q on the support\n\n{table(columns, lines)}\n\n"
        "T = 1; ± half of the 95 % interval, clustered by question.\n"
    )


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = study_parser(
        "evaluation.paper.coverage",
        "Table 5: how much of the draft distribution the support holds.",
        max_new_token=1024,
        benches="mt_bench",
        seeds="1",
    )
    parser.add_argument("--every", type=int, default=12, help="tokens from one tree to the next")
    return parser


@program(build_parser)
def main(args: argparse.Namespace) -> None:
    """Measure, print and write the table."""
    check_counts(args, "every")
    experiment, template = EXPERIMENTS["table5"], chosen_pair(args).template
    questions = chosen_questions(args, experiment)
    model, seeds = load_pair(args, experiment), args.seeds or experiment.seeds
    rows = []
    for bench, of_bench in questions.items():
        counts, sums = measure(model, of_bench, template, args.max_new_token, seeds, args.every)
        if not counts:
            raise ValueError(f"no answer to {bench} has two tokens; raise --max-new-token")
        for support in SUPPORTS:
            row = {
                "bench": bench,
                "support": support,
                "nodes": sum(counts.values()),
                "coverage": Statistic.ratio(sums[support], counts).estimate(),
                "paper": PAPER[support] if bench == "mt_bench" else None,
            }
            rows.append(row)
    settings = study_settings(args, model, seeds) | {"every": args.every}
    write_table(study_folder(args, "table5") / "coverage", render(rows), rows, settings)


if __name__ == "__main__":
    main()
