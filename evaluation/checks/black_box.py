"""Test statistically whether generation with a given pair is lossless.

Run as ``python -m evaluation.checks.black_box --model B --head E``. Two tests compare the output of
``EaModel.generate`` with the target's exact distribution. That comes from plain forwards of
transformers' own model, without cache and tree; only the warpers are shared.

1. Many continuations of one prompt, three tokens each. The first token comes from the prefill, so
   everything is conditioned on it. The second and the third token are the first two that can be
   drafted; a chi-square test compares their joint distribution with the exact one. A token that the
   filters ban fails at once.
2. A few longer texts. They show what many cycles in a row leave in the caches. The rank of a token
   is the probability of all likelier tokens, plus a uniformly random part of its own probability.
   Ranks are uniform and independent if the tokens have the target's distribution.
"""

import argparse
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, replace

import numpy as np
import torch
from tqdm import tqdm

from eagle.model.ea_model import EaModel
from eagle.model.options import DecodingOptions
from eagle.model.sampling import TargetProbs
from eagle.program import new_parser, program
from evaluation.checks.greedy import TIE
from evaluation.common import flags
from evaluation.common.prompts import build_prompt, check_template
from evaluation.common.statistics import Fit, goodness_of_fit

# Nominal: the chi-square distribution is an approximation, better for larger expected counts.
FALSE_ALARM = 1e-6
FEW = 10.0  # smallest expected count of a cell
GROUP = 20  # fewest continuations with the same first token that are tested
LENGTH = 3  # tokens of a continuation
RANK_CELLS = 10  # cells of the ranks, equally likely
LONG_TEXT_SEEDS = 10**6  # first seed of the longer texts, far from the others
PROMPT = "Write one sentence about the sea."

Text = tuple[int, ...]


@dataclass(frozen=True)
class ShortTexts:
    """What the test of the continuations found.

    Attributes:
        fit: the chi-square test.
        used: number of continuations behind it.
        impossible: continuations that the target never emits.
        accepted: share of the tokens of all cycles that were drafted and accepted.
    """

    fit: Fit
    used: int
    impossible: list[Text]
    accepted: float


class ExactProbs:
    """The target's next-token distribution after the prompt and a few tokens, by plain forwards.

    Args:
        model: the pair, of which only the target is used.
        prompt: int64 ``[1, L]``.
        options: decoding options, whose temperature and filters hold.
    """

    def __init__(self, model: EaModel, prompt: torch.Tensor, options: DecodingOptions):
        self.model, self.prompt, self.target_probs = model, prompt, TargetProbs(options.warpers)
        self.known: dict[Text, torch.Tensor] = {}  # float32 logits [V]

    @torch.inference_mode()
    def look_up(self, texts: list[Text], batch: int = 16) -> None:
        """Run the target on all ``texts``, which have the same length, and keep the logits."""
        texts = [text for text in dict.fromkeys(texts) if text not in self.known]
        for start in range(0, len(texts), batch):
            part = texts[start : start + batch]
            tails = torch.tensor(part, dtype=torch.long).reshape(len(part), -1)
            ids = torch.cat((self.prompt.expand(len(part), -1), tails), 1)
            ids = ids.to(self.model.target.device)
            output = self.model.base_model(input_ids=ids, logits_to_keep=1, use_cache=False)
            for text, row in zip(part, output.logits[:, -1]):
                self.known[text] = row.float().cpu()

    def __getitem__(self, text: Text) -> torch.Tensor:
        """Probabilities after ``text``, float64 ``[V]``."""
        self.look_up([text])
        p = self.target_probs(self.known[text]).double()
        return p / p.sum()

    def bans(self, text: Text, token: int) -> bool:
        """Whether the filters ban ``token`` by more than the rounding of a forward."""
        p = self[text]
        if p[token] > 0:
            return False
        logits = self.known[text]
        return (logits[p > 0].min() - logits[token]).item() > TIE[self.model.target.dtype]


def cells_after(
    first: int, n: int, probs: ExactProbs, stops: frozenset[int]
) -> dict[tuple[int, ...], float]:
    """The cells of ``n`` continuations that begin with ``first``, and their expected counts.

    A cell is a second token, ``(second,)``, or a second and a third one, ``(second, third)``.
    Tokens are told apart if their cells are expected at least ``FEW`` times. All other third tokens
    are the cell ``(second, -1)``, all other second tokens the cell ``(-1,)``.

    Args:
        first: the first token.
        n: number of continuations.
        probs: the exact distribution.
        stops: stop tokens, after which there is no third token.
    """
    p = probs[(first,)]
    frequent = n * p >= FEW
    second = frequent.nonzero()[:, 0].tolist()
    split = [token for token in second if n * p[token] >= 2 * FEW and token not in stops]
    probs.look_up([(first, token) for token in split])
    cells: dict[tuple[int, ...], float] = {}
    for token in second:
        expected = n * p[token].item()
        if token not in split:
            cells[(token,)] = expected
            continue
        thirds = expected * probs[(first, token)]
        large = thirds >= FEW
        cells |= {(token, third): thirds[third].item() for third in large.nonzero()[:, 0].tolist()}
        cells[(token, -1)] = thirds[~large].sum().item()
    cells[(-1,)] = n * p[~frequent].sum().item()
    return cells


def cell_of(rest: Text, cells: dict) -> tuple[int, ...]:
    """The cell of a second and a third token."""
    return next(cell for cell in (rest, rest[:1], (*rest[:1], -1), (-1,)) if cell in cells)


def check_short_texts(
    model: EaModel, prompt: torch.Tensor, options: DecodingOptions, samples: int
) -> ShortTexts:
    """Sample continuations with seeds 0, 1, ... and test their distribution."""
    probs = ExactProbs(model, prompt, options)
    texts, lengths = [], []
    for seed in tqdm(range(samples), unit="continuation", desc="continuations"):
        request = replace(options, max_new_tokens=LENGTH, max_length=None, seed=seed)
        generation = model.generate(prompt, request)
        texts.append(tuple(generation.token_ids))
        lengths += generation.accept_lengths
    by_first: dict[int, list[Text]] = defaultdict(list)
    for text in texts:
        if len(text) > 1:
            by_first[text[0]].append(text[1:])
    groups, used = [], 0
    for first, rests in sorted(by_first.items()):
        if len(rests) < GROUP:
            continue
        cells = cells_after(first, len(rests), probs, model.stop_ids)
        counts = Counter(cell_of(rest, cells) for rest in rests)
        groups.append((np.array([counts[cell] for cell in cells]), np.array(list(cells.values()))))
        used += len(rests)
    fit = goodness_of_fit(groups, FALSE_ALARM, pool_below=FEW)
    accepted = 1 - len(lengths) / max(sum(lengths), 1)
    return ShortTexts(fit, used, find_impossible(texts, probs, options), accepted)


def find_impossible(texts: list[Text], probs: ExactProbs, options: DecodingOptions) -> list[Text]:
    """The texts that the target never emits. Without a filter there are none."""
    filters = options.warpers
    if not (filters.top_k or filters.top_p or filters.min_p or filters.greedy):
        return []
    distinct = sorted(set(texts))
    for length in range(LENGTH):
        probs.look_up([text[:length] for text in distinct if len(text) > length])
    return [
        text for text in distinct if any(probs.bans(text[:i], text[i]) for i in range(len(text)))
    ]


@torch.inference_mode()
def check_long_texts(
    model: EaModel, prompt: torch.Tensor, options: DecodingOptions, texts: int, length: int
) -> Fit:
    """Sample longer texts and test that the ranks of their tokens are uniform."""
    probs, chance = TargetProbs(options.warpers), torch.Generator().manual_seed(0)
    counts = np.zeros(RANK_CELLS)
    for number in tqdm(range(texts), unit="text", desc="longer texts"):
        seed = LONG_TEXT_SEEDS + number
        request = replace(options, max_new_tokens=length, max_length=None, seed=seed)
        generation = model.generate(prompt, request)
        ids = generation.output_ids[:, :-1].to(model.target.device)
        # The first new token is left out: it comes from the prefill.
        logits = model.base_model(input_ids=ids, use_cache=False).logits[0, prompt.shape[1] :]
        for row, token in zip(logits, generation.token_ids[1:]):
            p = probs(row).double().cpu()
            likelier = p[p > p[token]].sum() + p[:token][p[:token] == p[token]].sum()
            part = torch.rand((), generator=chance, dtype=torch.float64)
            rank = (likelier + part * p[token]) / p.sum()
            counts[min(int(rank * RANK_CELLS), RANK_CELLS - 1)] += 1
    expected = np.full(RANK_CELLS, counts.sum() / RANK_CELLS)
    return goodness_of_fit([(counts, expected)], FALSE_ALARM, pool_below=FEW)


def describe(args: argparse.Namespace) -> str:
    """The settings, for the user to read before the test starts."""
    method = "topk"
    if args.sampling != "topk":
        m = 1 if args.m is None else args.m
        method = f"rheo m {m}, verification {args.verification or 'rheo'}"
    return f"{method}, T {args.temperature}, tree {args.total_token} x {args.depth}"


def report_test(name: str, fit: Fit) -> str:
    """The numbers of a chi-square test."""
    return (
        f"{name}: chi-square {fit.statistic:.1f} with {fit.degrees} degrees of freedom, "
        f"p = {fit.p_value:.3g}"
    )


def report_short_texts(found: ShortTexts, samples: int) -> str:
    """The result for the continuations, and how large a fault the test would have found."""
    fit, impossible = found.fit, found.impossible
    lines = [
        f"{found.accepted:.0%} of the tokens of the cycles were drafted and accepted",
        f"{found.used} of {samples} continuations are tested: those that share their first token "
        f"with at least {GROUP - 1} others",
    ]
    if impossible:
        shown = ", ".join(str(list(text)) for text in impossible[:5])
        count = len(impossible)
        lines.append(f"NOT LOSSLESS: {count} texts that the target never emits, such as {shown}")
    if fit.degrees == 0:
        lines.append(
            "No test: these continuations leave a single cell. "
            "Raise --samples or --temperature, or change --prompt."
        )
        return "\n".join(lines)
    lines.append(report_test("second and third token", fit))
    if fit.p_value < FALSE_ALARM:
        lines.append("NOT LOSSLESS: the output does not have the target's distribution.")
        return "\n".join(lines)
    lines.append(
        f"An output distribution off by {fit.detectable:.3f} or more in total variation over these "
        f"cells would fail with probability 0.9 (false alarms: {FALSE_ALARM:g}, by the chi-square "
        "approximation)."
    )
    if not found.accepted:
        lines.append("No test of acceptance: no drafted token was accepted.")
    elif not impossible:
        lines.append("Nothing speaks against the target's distribution.")
    return "\n".join(lines)


def report_long_texts(fit: Fit) -> str:
    """The result for the longer texts."""
    if fit.degrees == 0:
        return "No test of longer texts: too few tokens. Raise --texts or --text-length."
    result = "NOT LOSSLESS: the tokens of longer texts do not have the target's distribution."
    if fit.p_value >= FALSE_ALARM:
        result = (
            f"Nothing speaks against it; a distribution off by {fit.detectable:.3f} or more over "
            "these cells would fail with probability 0.9."
        )
    return f"{report_test('ranks of the tokens of longer texts', fit)}\n{result}"


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = new_parser(
        "evaluation.checks.black_box",
        "Test statistically whether generation with a given pair is lossless.",
        epilog="Exit status: 0 if nothing speaks against it, 1 if a test fails, 2 if the test "
        "could not have failed. Prefer --dtype fp32: in half precision the forward of a tree "
        "rounds differently from that of a text.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, help="target: Hub id, folder, .gguf file, or smollm2-demo")
    add("--head", help="EAGLE-3 head: Hub id or folder; smollm2-demo has its own")
    samples = "continuations to sample; the smallest fault found is proportional to 1 / sqrt(N)"
    add("--samples", type=int, default=400, metavar="N", help=samples)
    add("--texts", type=int, default=40, help="longer texts to sample; 0 for none")
    add("--text-length", type=int, default=16, help="tokens of each longer text")
    add("--prompt", default=PROMPT)
    flags.add_warpers(parser)
    flags.add_sampling(parser, "rheo")
    flags.add_tree(parser, total_token=12, depth=2)  # three tokens need no more than three levels
    flags.add_model(parser)
    return parser


@program(build_parser)
def main(args: argparse.Namespace) -> int:
    """Run both tests and print their results; returns the exit status."""
    if args.samples < GROUP:
        raise ValueError(f"--samples is {args.samples}; at least {GROUP} are needed")
    model = EaModel.from_pretrained(
        base_model_path=args.model,
        ea_model_path=args.head,
        **flags.tree(args),
        **flags.model(args),
    )
    check_template(args.template, model.tokenizer)
    options = model.options(**flags.warpers(args), **flags.sampling(args))
    prompt = build_prompt(args.template, model.tokenizer, [args.prompt], [])
    print(
        f"{args.samples} continuations of {LENGTH} tokens of {args.prompt!r} "
        f"({prompt.shape[1]} tokens), {describe(args)}",
        flush=True,
    )
    short = check_short_texts(model, prompt, options, args.samples)
    print(report_short_texts(short, args.samples), flush=True)
    failed = short.impossible or short.fit.p_value < FALSE_ALARM
    if args.texts:
        long = check_long_texts(model, prompt, options, args.texts, args.text_length)
        print(report_long_texts(long))
        failed = failed or long.p_value < FALSE_ALARM
    if failed:
        return 1
    return 0 if short.fit.degrees and short.accepted else 2


if __name__ == "__main__":
    sys.exit(main())
