"""Compare decoding at temperature 0 with the target's own greedy decoding.

Run as ``python -m evaluation.greedy_check``. Plain and speculative decoding are compared token
by token. In float32 they agree up to ties. In half precision the forward of a tree rounds
differently from that of a single token. So at the first difference of a question the gap between
the target's two highest logits is printed: a small gap is a tie, a large one is a fault.
"""

import argparse
import sys
from pathlib import Path

import torch

from eagle.model.ea_model import EaModel
from eagle.program import new_parser, program
from evaluation.common import flags
from evaluation.common.prompts import build_prompt, check_template
from evaluation.common.questions import load_questions, question_file

# Largest gap between the two highest logits that counts as a tie: the rounding of a forward.
TIE = {torch.float32: 1e-5, torch.float16: 0.05, torch.bfloat16: 0.5}
METHODS = {"topk": {"sampling": "topk"}, "rheo m=1": {"sampling": "rheo", "m": 1}}


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first token that differs, or where the shorter list ends; None if equal."""
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


@torch.inference_mode()
def top2_gap(model: EaModel, ids: torch.Tensor) -> float:
    """Gap between the target's two highest logits after ``ids``, int64 ``[1, L]``."""
    cache = model.target.new_cache(ids.shape[1])
    logits = model.target.prefill(ids[0].to(model.target.device), cache, []).logits[0].float()
    high, low = logits.topk(2).values.tolist()
    return high - low


def check(
    model: EaModel, prompt: torch.Tensor, max_new_tokens: int, **sampling
) -> tuple[int, float] | None:
    """Compare plain and speculative decoding after one prompt.

    Returns:
        Index of the first new token that differs, and the ``top2_gap`` there; None if all agree.
    """
    caps = {"max_new_tokens": max_new_tokens, "max_length": None}
    plain = model.naivegenerate(prompt, **caps)
    fast = model.eagenerate(prompt, **caps, **sampling)
    start = prompt.shape[1]
    index = first_difference(plain[0, start:].tolist(), fast[0, start:].tolist())
    if index is None:
        return None
    return index, top2_gap(model, plain[:, : start + index])


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = new_parser(
        "evaluation.greedy_check",
        "Compare decoding at temperature 0 with the target's own greedy decoding.",
        epilog="Exit status: 0 if all tokens agree or differ in ties only, 1 otherwise.",
    )
    add = parser.add_argument
    add("--base-model-path", required=True)
    add("--ea-model-path", help="default: the demo's draft head")
    add("--bench-name", default="demo")
    add("--question-file", type=Path)
    add("--question-end", type=int, default=4, help="number of questions")
    add("--max-new-token", type=int, default=64)
    flags.add_model(parser, dtype="fp32")
    return parser


@program(build_parser)
def main(args: argparse.Namespace) -> None:
    """Compare, print, and exit with status 1 if a difference is no tie, else with 0."""
    file = args.question_file or question_file(args.bench_name)
    questions = load_questions(file, None, args.question_end)
    model = EaModel.from_pretrained(
        base_model_path=args.base_model_path,
        ea_model_path=args.ea_model_path,
        **flags.model(args),
    )
    check_template(args.template, model.tokenizer)
    tie, faults = TIE[model.target.dtype], 0
    for question in questions:
        prompt = build_prompt(args.template, model.tokenizer, [question.turns[0]], [])
        for name, sampling in METHODS.items():
            difference = check(model, prompt, args.max_new_token, **sampling)
            found = "identical"
            if difference is not None:
                index, gap = difference
                kind = "tie" if gap <= tie else "FAULT"
                faults += kind == "FAULT"
                found = (
                    f"{kind}: first difference at new token {index}, "
                    f"top-2 logit gap {gap:.2e} (tie: at most {tie:g})"
                )
            print(f"question {question.question_id}, {name}: {found}", flush=True)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
