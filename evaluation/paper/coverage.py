"""Table 5: how much of the draft's law a support holds. ``python -m evaluation.paper.coverage --pair demo``

The mass of the full-vocabulary softmax that lies on the highest S draft logits, averaged over all nodes that get a pool in the trees of
RheoSampling with m = 1 along the target's own answers.
"""

import argparse
from collections import defaultdict

import torch
from torch import Tensor
from tqdm import tqdm

from eagle.model.ea_model import EaModel
from eagle.model.tuning.contexts import contexts
from eagle.program import one_line_errors
from evaluation.common import flags
from evaluation.common.prompts import check_template
from evaluation.common.questions import Question
from evaluation.common.statistics import Statistic
from evaluation.contexts.compare import continuation
from evaluation.paper.grids import BENCH_LABELS, EXPERIMENTS
from evaluation.paper.tables import show, write_table

SUPPORTS = (128, 256, 512, 1024)
PAPER = {128: 0.910, 256: 0.918, 512: 0.922, 1024: 0.941}  # Llama-3.1-8B-Instruct on MT-bench


def mass(logits: Tensor, support: int) -> Tensor:
    """``[P]`` mass of the highest ``support`` of logits ``[P, V]``."""
    logits = logits.float()
    return (
        logits.topk(min(support, logits.shape[-1])).values.logsumexp(-1) - logits.logsumexp(-1)
    ).exp()


def measure(
    model: EaModel, questions: list[Question], template: str, tokens: int, seeds: int, every: int
) -> tuple[dict, dict[int, dict]]:
    """By question: the nodes met, and by support the sum of its mass over them."""
    counts: dict = defaultdict(int)
    sums: dict[int, dict] = {support: defaultdict(float) for support in SUPPORTS}
    for question, seed in tqdm(
        [(question, seed) for question in questions for seed in range(seeds)], unit="answer"
    ):
        text, start = continuation(model, question, template, {"temperature": 1.0}, tokens, seed)
        positions = list(range(start, text.numel() - 1, every))
        met: list[Tensor] = []
        if not positions:
            continue
        options = model.options(temperature=1.0, sampling="rheo", m=1, seed=seed)
        for _ in contexts(
            model.target,
            model.draft,
            text,
            positions,
            [options],
            lambda method, logits: met.append(logits),
        ):
            pass
        logits = torch.cat(met)
        counts[question.question_id] += len(logits)
        for support in SUPPORTS:
            sums[support][question.question_id] += mass(logits, support).sum().item()
    return counts, sums


def run(args: argparse.Namespace) -> None:
    """Measure, print and write the table."""
    flags.check_study(args)
    if args.every < 1:
        raise ValueError(f"--every is {args.every}; it must be at least 1")
    pair, experiment = flags.pair(args), EXPERIMENTS["table5"]
    questions = flags.study_questions(args, experiment.benches)
    model = EaModel.from_pretrained(
        pair.base_model_path, pair.ea_model_path, *experiment.tree, dtype=pair.dtype
    )
    check_template(pair.template, model.tokenizer)
    seeds, table = args.seeds or experiment.seeds, []
    for bench, of_bench in questions.items():
        counts, sums = measure(
            model, of_bench, pair.template, args.max_new_token, seeds, args.every
        )
        if not counts:
            raise ValueError(f"no answer to {bench} has two tokens; raise --max-new-token")
        for support in SUPPORTS:
            estimate = Statistic.ratio(sums[support], counts).estimate()
            paper = PAPER[support] if bench == "mt_bench" else None
            table.append(
                {
                    "bench": bench,
                    "support": support,
                    "nodes": sum(counts.values()),
                    "coverage": estimate,
                    "paper": paper,
                }
            )
    lines = [
        "# Table 5: mass of q on the support",
        "",
        "| bench | support | nodes | coverage of q | paper, L31-8B |",
        "| --- " * 5 + "|",
    ]
    for row in table:
        paper = "" if row["paper"] is None else f"{row['paper']:.3f}"
        coverage = show(row["coverage"], digits=3)
        lines.append(
            f"| {BENCH_LABELS[row['bench']]} | {row['support']} | {row['nodes']:,} | {coverage} | {paper} |"
        )
    text = "\n".join(lines) + "\n\nT = 1; ± half of the 95 % interval, clustered by question.\n"
    settings = flags.study_settings(args, model, seeds) | {"every": args.every}
    write_table(flags.study_folder(args, "table5") / "coverage", text, table, settings)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m evaluation.paper.coverage", allow_abbrev=False, description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    flags.add_study(parser, 1024, "mt_bench", "1")
    parser.add_argument("--every", type=int, default=12, help="tokens between two trees")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Entry point; bad input ends with one line, not a traceback."""
    with one_line_errors():
        run(build_parser().parse_args(argv))


if __name__ == "__main__":
    main()
