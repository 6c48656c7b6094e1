"""Table 4: acceptance of one level, counted and predicted on the same laws. ``python -m evaluation.paper.one_level --pair demo``

At every token of the target's own answers each method drafts a pool of three (no deeper level) and verifies it; how often a drafted token
is accepted stands beside what the closed forms give for the same p and q (``rheo.theory``: Theorem 3, RRSw, Top-K).
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from eagle.model.ea_model import EaModel
from eagle.model.sampling import TargetProbs
from eagle.model.tuning.contexts import paired_logits
from eagle.program import one_line_errors
from evaluation.common import flags
from evaluation.common.answers import turn_seed
from evaluation.common.prompts import check_template
from evaluation.common.questions import Question
from evaluation.common.statistics import Statistic
from evaluation.contexts.compare import continuation
from evaluation.paper.grids import BENCH_LABELS, ONE_LEVEL, Method
from evaluation.paper.tables import show, write_table
from rheo import Draws, TreeOptions, build_tree, verify
from rheo.analysis import one_level as theory

# On MT-bench; the paper does not say with which model.
PAPER = {"topk": 0.800, "rheo-m1-rrsw": 0.835, "rheo-m1": 0.854}


def predicted(
    p: Tensor, draft_logits: Tensor, target_ids: Tensor | None, method: Method, tree: TreeOptions
) -> Tensor:
    """Acceptance in closed form ``[rows]`` from target laws ``[rows, V]`` and draft logits ``[rows, draft V]``."""
    n, everything = tree.pool.size, draft_logits.shape[-1]
    support = n if method.sampling == "topk" else tree.pool.support or everything
    values, positions = draft_logits.topk(min(support, everything))
    ids = positions if target_ids is None else target_ids[positions]
    # The support first, in the pool's own order: where logits tie, the pool and the closed forms then mean the same tokens.
    ranks = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    order = (
        torch.full(p.shape, everything, device=ids.device)
        .scatter_(1, ids, ranks)
        .sort(dim=-1, stable=True)
        .indices
    )
    p, q = p.gather(1, order), torch.zeros_like(p)
    q[:, : ids.shape[1]] = values.double().softmax(-1)
    if method.sampling == "topk":
        return theory.top_k_acceptance(p, q, n)
    q_tail = theory.tail_probs(q, method.m, tree.pool.temperature)
    if method.verification == "rrsw":
        return theory.rrsw_acceptance(p, q, q_tail, n, method.m)
    return theory.rheo_acceptance(p, q, q_tail, n)


def measure(
    model: EaModel,
    questions: dict[str, list[Question]],
    template: str,
    temperature: float,
    tokens: int,
    seeds: int,
) -> Iterator[dict]:
    """Per bench, question, seed and method: contexts, acceptances counted, and the sum of those predicted."""
    methods = {
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
        target_logits, draft_logits = paired_logits(model.target, model.draft, text)
        target_logits, draft_logits = target_logits[start:-1], draft_logits[start - 1 : -1]
        for method, options in methods.items():
            distributions = TargetProbs(options.warpers)(target_logits)
            generator = torch.Generator(device=text.device).manual_seed(
                turn_seed(seed, question.question_id, 0, 0)
            )
            draws = Draws(generator)
            accepted = 0
            for p, logits, root in zip(distributions, draft_logits, text[start:-1]):
                tree = build_tree(root, logits, no_expansion, options.tree, draws, target_ids)
                accepted += (
                    verify(
                        tree, lambda node, p=p: p, draws, options.verification or "rheo"
                    ).count.item()
                    - 1
                )
            expected = (
                predicted(distributions.double(), draft_logits, target_ids, method, options.tree)
                .sum()
                .item()
            )
            place = {
                "bench": bench,
                "question_id": question.question_id,
                "seed": seed,
                "method": method.name,
            }
            yield {
                **place,
                "contexts": len(distributions),
                "accepted": accepted,
                "predicted": expected,
            }


def no_expansion(*_):
    raise AssertionError("a tree of one level expands nothing")


def summarise(rows: list[dict]) -> list[dict]:
    """Per bench and method: acceptance counted, predicted, and their paired difference."""
    table = []
    for bench, method in dict.fromkeys((row["bench"], row["method"]) for row in rows):
        sums: dict[str, dict] = {
            name: defaultdict(float) for name in ("contexts", "accepted", "predicted")
        }
        for row in rows:
            if (row["bench"], row["method"]) == (bench, method):
                for name, by_question in sums.items():
                    by_question[row["question_id"]] += row[name]
        counted, expected = (
            Statistic.ratio(sums[name], sums["contexts"]) for name in ("accepted", "predicted")
        )
        table.append({
            "bench": bench, "method": method, "contexts": int(sum(sums["contexts"].values())), "counted": counted.estimate(),
            "predicted": expected.estimate(), "difference": counted.minus(expected).estimate(), "paper": PAPER[method] if bench == "mt_bench" else None,
        })  # fmt: skip
    return table


def run(args: argparse.Namespace) -> None:
    """Measure, print the table, write the rows."""
    flags.check_study(args)
    pair = flags.pair(args)
    questions = flags.study_questions(args, ONE_LEVEL.benches)
    model = EaModel.from_pretrained(
        pair.base_model_path, pair.ea_model_path, *ONE_LEVEL.tree, dtype=pair.dtype
    )
    check_template(pair.template, model.tokenizer)
    seeds = args.seeds or ONE_LEVEL.seeds
    rows = list(
        measure(model, questions, pair.template, args.temperature, args.max_new_token, seeds)
    )
    if not rows:
        raise ValueError("no answer has two tokens; raise --max-new-token")
    table = summarise(rows)
    lines = [
        f"# {ONE_LEVEL.title}",
        "",
        "| bench | method | contexts | accepted | closed form | difference | paper |",
        "| --- " * 7 + "|",
    ]
    for row in table:
        values = " | ".join(
            show(row[name], name == "difference", 3)
            for name in ("counted", "predicted", "difference")
        )
        paper = "" if row["paper"] is None else f"{row['paper']:.3f}"
        lines.append(
            f"| {BENCH_LABELS[row['bench']]} | {row['method']} | {row['contexts']} | {values} | {paper} |"
        )
    text = "\n".join(lines) + "\n\n± half of the 95 % interval, clustered by question.\n"
    settings = flags.study_settings(args, model, seeds) | {"temperature": args.temperature}
    name = "table4" if args.temperature == 1 else f"table4-T{args.temperature:g}"
    write_table(flags.study_folder(args, "table4") / name, text, table, settings, answers=rows)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m evaluation.paper.one_level", allow_abbrev=False, description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    flags.add_study(parser, 128, "mt_bench", "1")
    parser.add_argument("--temperature", type=float, default=1.0)
    return parser


def main(argv: list[str] | None = None) -> None:
    """Entry point; bad input ends with one line, not a traceback."""
    with one_line_errors():
        run(build_parser().parse_args(argv))


if __name__ == "__main__":
    main()
