"""The demo: write one answer, then compare three ways to decode, question by question.

    python -m evaluation.demo

The methods take turns at every question, in an order that rotates, so that a slow moment of the
machine hits all of them alike. Options: ``--help``.
"""

import argparse
import time
from collections import defaultdict
from pathlib import Path

from eagle.files import replace_text
from eagle.model.ea_model import EaModel
from eagle.program import new_parser, program
from evaluation.common.answers import turn_seed
from evaluation.common.markdown import table
from evaluation.common.prompts import build_prompt
from evaluation.common.questions import Question, load_questions, question_file
from evaluation.common.statistics import Estimate, Statistic, exponential, show

METHODS = {
    "plain": {"sampling": "none"},
    "EAGLE-3 (Top-K)": {"sampling": "topk"},
    "RheoSampling, m = 1": {"sampling": "rheo", "m": 1},
}
PLAIN, TOP_K, RHEO = METHODS
SHOWN = "Why does ice float on water?"


def show_an_answer(model: EaModel, question: str, temperature: float, tokens: int) -> None:
    """Print an answer of RheoSampling while it is being written."""
    print(f"\nQuestion: {question}\n\nAnswer (temperature {temperature}): ", end="", flush=True)
    prompt = build_prompt("auto", model.tokenizer, [question], [])
    shown = ""
    for ids in model.ea_generate(
        prompt, temperature=temperature, max_new_tokens=tokens, **METHODS[RHEO]
    ):
        text = model.tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # half of a character so far
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print("\n")


class Sums:
    """Sums of one method, by question."""

    def __init__(self):
        self.accepted: dict = defaultdict(float)
        self.cycles: dict = defaultdict(float)
        self.tokens: dict = defaultdict(float)
        self.seconds: dict = defaultdict(float)

    @property
    def tau(self) -> Statistic:
        """Emitted tokens per cycle."""
        return Statistic.ratio(self.accepted, self.cycles)

    @property
    def speed(self) -> Statistic:
        """Tokens per second of the cycles; the prefill does not count."""
        return Statistic.ratio(self.tokens, self.seconds)


def answer(model: EaModel, question: Question, method: str, sums: Sums, tokens: int) -> None:
    """Answer one question and add what it took to the sums."""
    prompt = build_prompt("auto", model.tokenizer, [question.turns[0]], [])
    seed = turn_seed(0, question.question_id, 0, 0)
    options = model.options(temperature=1.0, max_new_tokens=tokens, seed=seed, **METHODS[method])
    result = model.generate(prompt, options, timing=True)
    name = question.question_id
    sums.accepted[name] += sum(result.accept_lengths)
    sums.cycles[name] += result.cycles
    sums.tokens[name] += result.new_tokens - 1  # the first token comes from the prefill
    sums.seconds[name] += sum(s for phase, s in result.seconds.items() if phase != "prefill")


def compare(
    model: EaModel, questions: list[Question], tokens: int, seconds: float
) -> dict[str, Sums]:
    """Answer the questions with all methods in turn, for at most about ``seconds``."""
    sums = {method: Sums() for method in METHODS}
    for method in METHODS:  # a warm-up that does not count
        answer(model, questions[0], method, Sums(), 8)
    start = time.perf_counter()
    for number, question in enumerate(questions):
        order = list(METHODS)
        for method in order[number % 3 :] + order[: number % 3]:
            answer(model, question, method, sums[method], tokens)
        print(f"\r{number + 1} of {len(questions)} questions answered", end="", flush=True)
        if time.perf_counter() - start > seconds and number > 0:
            print(f"; stopped after {seconds:.0f} s", end="")
            break
    print("\n")
    return sums


def times(a: Statistic, b: Statistic) -> Estimate:
    """The ratio of two statistics of the same questions."""
    return exponential(a.log().minus(b.log()))


def report(sums: dict[str, Sums]) -> str:
    """The table, the paired differences, and what they say."""
    plain = sums[PLAIN].speed
    rows = []
    for method, found in sums.items():
        tau, speed = show(found.tau.estimate()), show(found.speed.estimate(), digits=1)
        rows.append([method, tau, speed, show(times(found.speed, plain))])
    lines = [table(["method", "tau (tokens per cycle)", "tokens/s", "times plain"], rows), ""]
    gain = sums[RHEO].tau.minus(sums[TOP_K].tau).estimate()
    faster = times(sums[RHEO].speed, sums[TOP_K].speed)
    lines += [
        f"RheoSampling against Top-K, paired by question: tau {show(gain, sign=True)}, "
        f"speed {show(faster)} times.",
        "(± is half of the 95 % interval, clustered by question.)",
        "",
        conclusion(gain, times(sums[RHEO].speed, plain).value),
    ]
    return "\n".join(lines)


def conclusion(gain: Estimate, times_plain: float) -> str:
    """One sentence on what the figures say."""
    if gain.low is not None and gain.low > 0:
        accepts = "RheoSampling accepts more tokens per cycle than Top-K"
    elif gain.high is not None and gain.high < 0:
        accepts = "RheoSampling accepts fewer tokens per cycle than Top-K"
    else:
        accepts = "These answers are too few to tell RheoSampling and Top-K apart"
    return f"{accepts}; it decodes {times_plain:.2f} times as fast as plain decoding."


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = new_parser(
        "evaluation.demo",
        __doc__.split("\n")[0],
    )
    add = parser.add_argument
    add("--base-model-path", default="smollm2-demo", help="target")
    add("--ea-model-path", help="draft head; the demo target brings its own")
    add("--dtype", default="fast", help="dtype of both networks")
    # What --total-token -1 --depth -1 chooses for the demo pair on 2 CPU cores.
    add("--total-token", type=int, default=6, help="nodes of the tree, the root included")
    add("--depth", type=int, default=1, help="expansions after the first level")
    add("--top-k", type=int, default=4, help="slots of a pool")
    add("--max-new-token", type=int, default=96, help="tokens of an answer")
    add("--limit", type=int, default=24, help="number of questions")
    add("--seconds", type=float, default=170, help="begin no further question after this time")
    add("--output", type=Path, default=Path("answers/demo/demo.md"), help="file for the report")
    return parser


@program(build_parser)
def main(args: argparse.Namespace) -> None:
    """Show one answer, compare the methods, print and write the report."""
    questions = load_questions(question_file("demo"), None, args.limit)
    model = EaModel.from_pretrained(
        args.base_model_path,
        args.ea_model_path,
        args.total_token,
        args.depth,
        args.top_k,
        dtype=args.dtype,
    )
    if model.draft is None:
        raise ValueError("--ea-model-path is missing: the comparison needs a draft head")
    show_an_answer(model, SHOWN, 0.5, args.max_new_token)
    print(
        f"Now {len(questions)} questions, each answered by {', '.join(METHODS)} in turn: "
        f"temperature 1, at most {args.max_new_token} tokens, a tree of {args.total_token} nodes."
    )
    text = report(compare(model, questions, args.max_new_token, args.seconds))
    print(text)
    replace_text(args.output, text + "\n")
    print(f"\nWritten to {args.output}")


if __name__ == "__main__":
    main()
