"""Table 4: acceptance of one level, counted and predicted on the same laws. ``python -m evaluation.one_level --pair demo``

At every token of the target's own answers each arm drafts a pool of three (no deeper level) and verifies it; how often a drafted token
is accepted stands beside what the closed forms give for the same p and q (``rheo.theory``: Theorem 3, RRSw, Top-K).
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict

import torch
from torch import Tensor
from tqdm import tqdm

from eagle.files import replace_text
from eagle.model.acceptance import paired_logits
from eagle.model.ea_model import EaModel
from eagle.model.law import TargetLaw
from eagle.program import one_line_errors
from evaluation import flags
from evaluation.acceptance import continuation
from evaluation.answers import commit, turn_seed
from evaluation.grids import EXPERIMENTS, Arm
from evaluation.prompts import check_template
from evaluation.questions import Question, load_questions, question_file
from evaluation.statistics import Statistic
from evaluation.tables import show
from rheo import Draws, TreeOptions, build_tree, theory, verify

PAPER = {"topk": 0.800, "rheo-m1-rrsw": 0.835, "rheo-m1": 0.854}


def predicted(p: Tensor, draft_logits: Tensor, target_ids: Tensor | None, arm: Arm, tree: TreeOptions) -> Tensor:
    """Acceptance in closed form ``[rows]`` from target laws ``[rows, V]`` and draft logits ``[rows, draft V]``."""
    n, everything = tree.pool.size, draft_logits.shape[-1]
    support = everything if arm.sampling == "topk" else tree.pool.support or everything
    values, places = draft_logits.double().topk(min(support, everything))
    ids = places if target_ids is None else target_ids[places]
    q = torch.zeros_like(p).scatter_(1, ids, values.softmax(-1))
    if arm.sampling == "topk":
        return theory.top_k_acceptance(p, q, n)
    q_tail = theory.tail_law(q, arm.m, tree.pool.temperature)
    if arm.verification == "rrsw":
        return theory.rrsw_acceptance(p, q, q_tail, n, arm.m)
    return theory.rheo_acceptance(p, q, q_tail, n)


def measure(model: EaModel, questions: list[Question], template: str, temperature: float, tokens: int, seed: int) -> Iterator[dict]:
    """Per question and arm: contexts, acceptances counted, and the sum of those predicted."""
    arms = {
        arm: model.options(temperature=temperature, sampling=arm.sampling, m=arm.m, verification=arm.verification)
        for arm in EXPERIMENTS["table4"].arms
    }
    target_ids = model.draft.target_ids()
    for question in tqdm(questions, unit="question"):
        text, start = continuation(model, question, template, {"temperature": temperature}, tokens, seed)
        if text.numel() - start < 2:
            continue
        target_logits, draft_logits = paired_logits(model.target, model.draft, text)
        target_logits, draft_logits = target_logits[start:-1], draft_logits[start - 1 : -1]
        for arm, options in arms.items():
            law = TargetLaw(options.law)
            laws = torch.stack([law(row) for row in target_logits])
            generator = torch.Generator(device=text.device).manual_seed(turn_seed(seed, question.question_id, 0, 0))
            draws = Draws(generator)
            accepted = 0
            for p, logits, root in zip(laws, draft_logits, text[start:-1]):
                tree = build_tree(root, logits, no_expansion, options.tree, draws, target_ids)
                accepted += verify(tree, lambda node, p=p: p, draws, options.verification or "rheo").count.item() - 1
            expected = predicted(laws.double(), draft_logits, target_ids, arm, options.tree).sum().item()
            yield {"question_id": question.question_id, "arm": arm.name, "contexts": len(laws), "accepted": accepted, "predicted": expected}


def no_expansion(*_):
    raise AssertionError("a tree of one level expands nothing")


def summarise(rows: list[dict]) -> list[dict]:
    """Per arm: acceptance counted, predicted, and their paired difference."""
    table = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        here = {row["question_id"]: row for row in rows if row["arm"] == arm}
        counts = {k: row["contexts"] for k, row in here.items()}
        counted, expected = (Statistic.ratio({k: row[name] for k, row in here.items()}, counts) for name in ("accepted", "predicted"))
        table.append({
            "arm": arm, "contexts": sum(counts.values()), "counted": counted.estimate(), "predicted": expected.estimate(),
            "difference": counted.minus(expected).estimate(), "paper": PAPER[arm],
        })  # fmt: skip
    return table


def run(args: argparse.Namespace) -> None:
    """Measure, print the table, write the rows."""
    pair, tree = flags.pair(args), EXPERIMENTS["table4"].tree
    questions = load_questions(question_file(args.bench_name), None, args.limit)
    model = EaModel.from_pretrained(pair.base_model_path, pair.ea_model_path, *tree, dtype=pair.dtype)
    check_template(pair.template, model.tokenizer)
    rows = list(measure(model, questions, pair.template, args.temperature, args.max_new_token, args.seed))
    if not rows:
        raise ValueError(f"no answer of {len(questions)} questions has two tokens")
    table = summarise(rows)
    lines = ["| arm | contexts | accepted | closed form | difference | paper |", "| --- " * 6 + "|"]
    for row in table:
        values = " | ".join(show(row[name], name == "difference", 3) for name in ("counted", "predicted", "difference"))
        lines.append(f"| {row['arm']} | {row['contexts']} | {values} | {row['paper']:.3f} |")
    setting = f"{pair.label}, {len(questions)} questions of {args.bench_name}, T = {args.temperature:g}"
    text = "\n".join(lines) + f"\n\n{setting}; ± half of the 95 % interval, clustered by question.\n"
    print(text)
    output = args.results / "table4" / flags.pair_folder(args)
    replace_text(output / "one_level.md", text)
    settings = {k: str(v) for k, v in vars(args).items()} | {"commit": commit()}
    replace_text(output / "one_level.json", json.dumps({"settings": settings, "table": table, "rows": rows}, default=asdict) + "\n")


def main(argv: list[str] | None = None) -> None:
    """Entry point; bad input ends with one line, not a traceback."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.one_level", description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    flags.add_study(parser, 128)
    parser.add_argument("--temperature", type=float, default=1.0)
    with one_line_errors():
        run(parser.parse_args(argv))


if __name__ == "__main__":
    main()
