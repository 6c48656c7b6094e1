"""Is decoding at temperature 0 the target's own greedy decoding? ``python -m evaluation.greedy_check --help``.

Compares plain and speculative decoding token by token. In float32 they agree up to ties; in half
precision a tree's forward rounds differently from a single token's, so the first difference of a question is
shown with the gap between the target's two highest logits there: a small gap is a tie, a large one a fault.
"""

import argparse
import sys
from pathlib import Path

import torch

from eagle.model.ea_model import EaModel
from eagle.program import one_line_errors
from evaluation.common import flags
from evaluation.common.prompts import build_prompt, check_template
from evaluation.common.questions import load_questions, question_file

# Largest gap of the two highest logits that counts as a tie: the rounding of a forward, by dtype.
TIE = {torch.float32: 1e-5, torch.float16: 0.05, torch.bfloat16: 0.5}


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first token that differs (an end counts as one); None where the lists are equal."""
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


@torch.inference_mode()
def top2_gap(model: EaModel, ids: torch.Tensor) -> float:
    """Gap between the target's two highest logits after ``ids`` ``[1, L]``."""
    cache = model.target.new_cache(ids.shape[1])
    logits = model.target.prefill(ids[0].to(model.target.device), cache, []).logits[0].float()
    high, low = logits.topk(2).values.tolist()
    return high - low


def check(
    model: EaModel, prompt: torch.Tensor, max_new_tokens: int, **sampling
) -> tuple[int, int, float] | None:
    """(index, position in the sequence, gap) of the first difference between plain and speculative decoding, or None."""
    plain = model.naivegenerate(prompt, max_new_tokens=max_new_tokens, max_length=None)
    fast = model.eagenerate(prompt, max_new_tokens=max_new_tokens, max_length=None, **sampling)
    start = prompt.shape[1]
    index = first_difference(plain[0, start:].tolist(), fast[0, start:].tolist())
    if index is None:
        return None
    return index, start + index, top2_gap(model, plain[:, : start + index])


def main(argv: list[str] | None = None) -> None:
    """Exit status 0 where all agree or differ in ties only, 1 where a difference is no tie."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.greedy_check", description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    parser.add_argument("--base-model-path", required=True)
    parser.add_argument("--ea-model-path")
    parser.add_argument("--bench-name", default="demo")
    parser.add_argument("--question-file", type=Path)
    parser.add_argument("--question-end", type=int, default=4)
    parser.add_argument("--max-new-token", type=int, default=64)
    flags.add_model(parser, dtype="fp32")
    args = parser.parse_args(argv)
    with one_line_errors():
        questions = load_questions(
            args.question_file or question_file(args.bench_name), None, args.question_end
        )
        model = EaModel.from_pretrained(
            args.base_model_path, args.ea_model_path, **flags.model(args)
        )
        check_template(args.template, model.tokenizer)
    tie, faults = TIE[model.target.dtype], 0
    for question in questions:
        prompt = build_prompt(args.template, model.tokenizer, [question.turns[0]], [])
        for name, sampling in (
            ("topk", {"sampling": "topk"}),
            ("rheo m=1", {"sampling": "rheo", "m": 1}),
        ):
            found = check(model, prompt, args.max_new_token, **sampling)
            verified = "identical"
            if found is not None:
                kind = "tie" if found[2] <= tie else "FAULT"
                faults += kind == "FAULT"
                verified = f"{kind}: first difference at new token {found[0]}, top-2 logit gap {found[2]:.2e} (tie: at most {tie:g})"
            print(f"question {question.question_id}, {name}: {verified}", flush=True)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
