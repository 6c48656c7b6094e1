"""Table 5: how much of the draft's law a support holds. ``python -m evaluation.coverage --pair demo``

The mass of the full-vocabulary softmax that lies on the highest S draft logits, averaged over all nodes that get a pool in the trees of
RheoSampling with m = 1 along the target's own answers.
"""

import argparse

import torch
from torch import Tensor
from tqdm import tqdm

from eagle.files import replace_text
from eagle.model.acceptance import contexts
from eagle.model.ea_model import EaModel
from eagle.program import one_line_errors
from evaluation import flags
from evaluation.acceptance import continuation
from evaluation.grids import EXPERIMENTS
from evaluation.prompts import check_template
from evaluation.questions import load_questions, question_file
from evaluation.statistics import Statistic
from evaluation.tables import show

SUPPORTS = (128, 256, 512, 1024)
PAPER = {128: 0.910, 256: 0.918, 512: 0.922, 1024: 0.941}  # Llama-3.1-8B-Instruct on MT-bench


def mass(logits: Tensor, support: int) -> Tensor:
    """``[P]`` mass of the highest ``support`` of logits ``[P, V]``."""
    logits = logits.float()
    return (logits.topk(min(support, logits.shape[-1])).values.logsumexp(-1) - logits.logsumexp(-1)).exp()


def run(args: argparse.Namespace) -> None:
    """Measure, print and write the table."""
    pair, tree = flags.pair(args), EXPERIMENTS["table5"].tree
    questions = load_questions(question_file(args.bench_name), None, args.limit)
    model = EaModel.from_pretrained(pair.base_model_path, pair.ea_model_path, *tree, dtype=pair.dtype)
    check_template(pair.template, model.tokenizer)
    options = model.options(temperature=1.0, sampling="rheo", m=1, seed=args.seed)
    sums: dict[int, dict] = {support: {} for support in SUPPORTS}
    counts: dict = {}
    for question in tqdm(questions, unit="question"):
        text, start = continuation(model, question, pair.template, {"temperature": 1.0}, args.max_new_token, args.seed)
        places = list(range(start, text.numel() - 1, args.every))
        met: list[Tensor] = []
        if not places:
            continue
        for _ in contexts(model.target, model.draft, text, places, [options], lambda arm, logits: met.append(logits)):
            pass
        logits = torch.cat(met)
        counts[question.question_id] = len(logits)
        for support in SUPPORTS:
            sums[support][question.question_id] = mass(logits, support).sum().item()
    if not counts:
        raise ValueError(f"no answer of {len(questions)} questions has two tokens")
    lines = ["| support | coverage of q | paper, L31-8B on MT-bench |", "| --- | --- | --- |"]
    for support in SUPPORTS:
        estimate = Statistic.ratio(sums[support], counts).estimate()
        lines.append(f"| {support} | {show(estimate, digits=3)} | {PAPER[support]:.3f} |")
    setting = f"{pair.label}, {len(counts)} questions of {args.bench_name}, {sum(counts.values()):,} nodes, T = 1"
    text = "\n".join(lines) + f"\n\n{setting}; ± half of the 95 % interval, clustered by question.\n"
    print(text)
    replace_text(args.results / "table5" / flags.pair_folder(args) / "coverage.md", text)


def main(argv: list[str] | None = None) -> None:
    """Entry point; bad input ends with one line, not a traceback."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.coverage", description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    flags.add_study(parser, 96)
    parser.add_argument("--every", type=int, default=12, help="tokens between two trees")
    args = parser.parse_args(argv)
    with one_line_errors():
        if args.every < 1:
            raise ValueError(f"--every is {args.every}; it must be at least 1")
        run(args)


if __name__ == "__main__":
    main()
