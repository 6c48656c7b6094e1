"""Is generation with *this* pair lossless? ``python -m rheo.certify --model B --head E``.

Draws many continuations of three tokens of one prompt through ``EaModel.generate`` and compares them with the target's exact law,
which a plain forward of transformers' own model gives: no cache, no tree, nothing of ours but the warpers. The first token
comes from the prefill and proves nothing, so all is conditioned on it; the law of the second and third tokens, the first two that
are drafted, is tested by chi-square. A token that the filters ban fails at once.

A few longer texts then test what many cycles in a row leave in the caches: the probability that the target gave to what is likelier than
the token emitted (plus a random part of that token's own) is uniform, independently at every place, if and only if the tokens have
the target's law in the order of likelihood.
"""

import argparse
import sys
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import torch
from tqdm import tqdm

from eagle.model.ea_model import EaModel
from eagle.model.sampling import TargetProbs
from eagle.program import one_line_errors
from evaluation.checks.greedy import TIE
from evaluation.common import flags
from evaluation.common.prompts import build_prompt, check_template
from evaluation.common.statistics import Fit, goodness_of_fit

FALSE_ALARM = 1e-6  # nominal: the chi-square law is an approximation, the better the more draws a cell expects
FEW = 10.0
LENGTH = 3
CELLS = 10
TEXT_SEEDS = 10**6  # apart from those of the short continuations
PROMPT = "Write one sentence about the sea."


class ExactProbs:
    """The target's next-token law after the prompt and a few tokens, by plain forwards.

    Args:
        prompt: int64 ``[1, L]``.
        options: decoding options whose law is meant.
    """

    def __init__(self, model: EaModel, prompt: torch.Tensor, options):
        self.model, self.prompt, self.target_probs = model, prompt, TargetProbs(options.warpers)
        self.known: dict[tuple[int, ...], torch.Tensor] = {}  # float32 logits [V]

    @torch.inference_mode()
    def look_up(self, texts: list[tuple[int, ...]], batch: int = 16) -> None:
        """Run the target on ``texts``, all of one length, so that their laws are known."""
        texts = [t for t in dict.fromkeys(texts) if t not in self.known]
        for start in range(0, len(texts), batch):
            part = texts[start : start + batch]
            tails = torch.tensor(part, dtype=torch.long).reshape(len(part), -1)
            ids = torch.cat((self.prompt.expand(len(part), -1), tails), 1).to(
                self.model.target.device
            )
            logits = self.model.base_model(input_ids=ids, logits_to_keep=1, use_cache=False).logits[
                :, -1
            ]
            for text, row in zip(part, logits):
                self.known[text] = row.float().cpu()

    def __getitem__(self, text: tuple[int, ...]) -> torch.Tensor:
        """float64 ``[V]``, its sum 1, after ``text``."""
        self.look_up([text])
        p = self.target_probs(self.known[text]).double()
        return p / p.sum()

    def bans(self, text: tuple[int, ...], token: int) -> bool:
        """Whether the filters leave ``token`` no probability, and clearly so: by more than the rounding of a forward."""
        p = self[text]
        if p[token] > 0:
            return False
        logits = self.known[text]
        return (logits[p > 0].min() - logits[token]).item() > TIE[self.model.target.dtype]


def cells_after(
    first: int, n: int, probs: ExactProbs, stops: frozenset[int]
) -> dict[tuple[int, ...], float]:
    """{(second,) or (second, third): expected count} of n draws after ``first``, the cells that n draws can tell apart.

    A second token is split by its third where that gives cells of at least ``FEW`` expected draws; what is left of a split cell
    is the cell ``(second, -1)``, what is left of all is ``(-1,)``.
    """
    p = probs[(first,)]
    frequent = n * p >= FEW
    split = [t for t in frequent.nonzero()[:, 0].tolist() if n * p[t] >= 2 * FEW and t not in stops]
    probs.look_up([(first, t) for t in split])
    cells: dict[tuple[int, ...], float] = {}
    for token in frequent.nonzero()[:, 0].tolist():
        expected = n * p[token].item()
        if token not in split:
            cells[(token,)] = expected
            continue
        thirds = expected * probs[(first, token)]
        inside = thirds >= FEW
        cells |= {(token, t): thirds[t].item() for t in inside.nonzero()[:, 0].tolist()}
        cells[(token, -1)] = thirds[~inside].sum().item()
    cells[(-1,)] = n * p[~frequent].sum().item()
    return cells


def cell_of(rest: tuple[int, ...], cells: dict) -> tuple[int, ...]:
    """The cell of a second and third token."""
    return next(c for c in (rest, rest[:1], (*rest[:1], -1), (-1,)) if c in cells)


def draw_and_test(model: EaModel, prompt: torch.Tensor, options, samples: int) -> tuple[Fit, dict]:
    """Draw ``samples`` continuations with seeds 0, 1, ... and test their law.

    Returns:
        The fit, and what there is to say about it: ``used`` continuations behind it, ``impossible`` texts, and the share of
        the cycles' tokens that were ``accepted`` drafted ones.
    """
    probs = ExactProbs(model, prompt, options)
    texts, lengths = [], []
    for seed in tqdm(range(samples), unit="continuation", desc="draw"):
        generation = model.generate(
            prompt, replace(options, max_new_tokens=LENGTH, max_length=None, seed=seed)
        )
        texts.append(tuple(generation.token_ids))
        lengths += generation.accept_lengths
    impossible = find_impossible(texts, probs, options)
    by_first = defaultdict(list)
    for text in texts:
        if len(text) > 1:
            by_first[text[0]].append(text[1:])
    groups, used = [], 0
    for first, rests in sorted(by_first.items()):
        if len(rests) < 20:  # too few draws to tell two cells apart
            continue
        cells = cells_after(first, len(rests), probs, model.stop_ids)
        counts = Counter(cell_of(rest, cells) for rest in rests)
        groups.append((np.array([counts[c] for c in cells]), np.array(list(cells.values()))))
        used += len(rests)
    fit = goodness_of_fit(groups, FALSE_ALARM, pool_below=FEW)
    return fit, {
        "used": used,
        "impossible": impossible,
        "accepted": 1 - len(lengths) / max(sum(lengths), 1),
    }


@torch.inference_mode()
def draw_and_rank(model: EaModel, prompt: torch.Tensor, options, texts: int, length: int) -> Fit:
    """Draw ``texts`` longer continuations and test that the ranks of their tokens are uniform (ten cells, equally likely)."""
    probs, chance = TargetProbs(options.warpers), torch.Generator().manual_seed(0)
    counts = np.zeros(CELLS)
    for seed in tqdm(range(texts), unit="text", desc="longer texts"):
        generation = model.generate(
            prompt, replace(options, max_new_tokens=length, max_length=None, seed=TEXT_SEEDS + seed)
        )
        ids = generation.output_ids.to(model.target.device)
        logits = model.base_model(input_ids=ids[:, :-1], use_cache=False).logits[
            0, prompt.shape[1] :
        ]  # not the prefill's
        for row, token in zip(logits, generation.token_ids[1:]):
            p = probs(row).double().cpu()
            ahead = p[p > p[token]].sum() + p[:token][p[:token] == p[token]].sum()
            rank = (
                ahead + torch.rand((), generator=chance, dtype=torch.float64) * p[token]
            ) / p.sum()
            counts[min(int(rank * CELLS), CELLS - 1)] += 1
    return goodness_of_fit(
        [(counts, np.full(CELLS, counts.sum() / CELLS))], FALSE_ALARM, pool_below=FEW
    )


def find_impossible(
    texts: list[tuple[int, ...]], probs: ExactProbs, options
) -> list[tuple[int, ...]]:
    """Texts that the target never emits; without a filter no token is impossible, and nothing is computed."""
    filters = options.warpers
    if not (filters.top_k or filters.top_p or filters.min_p or filters.greedy):
        return []
    distinct = sorted(set(texts))
    for length in range(LENGTH):
        probs.look_up([text[:length] for text in distinct if len(text) > length])
    return [
        text for text in distinct if any(probs.bans(text[:i], text[i]) for i in range(len(text)))
    ]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.checks.black_box", description="Statistical test of whole generations of a pair.",
                                     allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add("--model", required=True, help="target: Hub id, folder, .gguf file, or smollm2-demo")
    add("--head", help="EAGLE-3 head: Hub id or folder (smollm2-demo brings its own)")
    add(
        "--samples",
        type=int,
        default=400,
        help="continuations to draw; the detectable deviation falls with their root",
    )
    add("--texts", type=int, default=40, help="longer texts to draw; 0 for none")
    add("--text-length", type=int, default=16, help="tokens of each")
    add("--prompt", default=PROMPT)
    flags.add_warpers(parser)
    flags.add_sampling(parser, "rheo")
    flags.add_tree(parser, total_token=12, depth=2)  # three levels are as many as three tokens need
    flags.add_model(
        parser
    )  # float32 is the cleanest: half precision rounds a tree's forward differently from a text's
    return parser


def main(argv: list[str] | None = None) -> int:
    """0 where nothing speaks against the law, 1 where the test fails, 2 where it could not have failed."""
    args = build_parser().parse_args(argv)
    with one_line_errors():
        if args.samples < 20:
            raise ValueError(f"--samples is {args.samples}; at least 20 are needed")
        model = EaModel.from_pretrained(
            args.model, args.head, **flags.tree(args), **flags.model(args)
        )
        check_template(args.template, model.tokenizer)
        options = model.options(**flags.warpers(args), **flags.sampling(args))
        prompt = build_prompt(args.template, model.tokenizer, [args.prompt], [])
        print(
            f"{args.samples} continuations of {LENGTH} tokens of {args.prompt!r} ({prompt.shape[1]} tokens), {describe(args)}",
            flush=True,
        )
        fit, facts = draw_and_test(model, prompt, options, args.samples)
        print(report(fit, facts, args.samples), flush=True)
        longer = (
            draw_and_rank(model, prompt, options, args.texts, args.text_length)
            if args.texts
            else None
        )
    if longer:
        print(report_texts(longer))
    if (
        facts["impossible"]
        or fit.p_value < FALSE_ALARM
        or (longer and longer.p_value < FALSE_ALARM)
    ):
        return 1
    return 0 if fit.degrees and facts["accepted"] else 2


def describe(args: argparse.Namespace) -> str:
    """The settings in words."""
    rheo = f"rheo m {1 if args.m is None else args.m}, verification {args.verification or 'rheo'}"
    method = "topk" if args.sampling == "topk" else rheo
    return f"{method}, T {args.temperature}, tree {args.total_token} x {args.depth}"


def report(fit: Fit, facts: dict, samples: int) -> str:
    """The verdict, and how large a fault it could have seen."""
    lines = [
        f"{facts['accepted']:.0%} of the tokens of the cycles were drafted ones that verification accepted"
    ]
    lines.append(
        f"{facts['used']} of {samples} continuations share their first token with at least 19 others; the law given it is tested"
    )
    if facts["impossible"]:
        shown = ", ".join(str(list(text)) for text in facts["impossible"][:5])
        lines.append(
            f"NOT LOSSLESS: {len(facts['impossible'])} texts that the target never emits, among them {shown}"
        )
    if fit.degrees == 0:
        lines.append(
            "No test: the law of these continuations has a single cell. Raise --samples or --temperature, or change --prompt."
        )
        return "\n".join(lines)
    lines.append(
        f"law of the second and third token: chi-square {fit.statistic:.1f} with {fit.degrees} degrees of freedom, p = {fit.p_value:.3g}"
    )
    if fit.p_value < FALSE_ALARM:
        lines.append("NOT LOSSLESS: the law of the output is not the target's.")
        return "\n".join(lines)
    lines.append(
        f"A law off by {fit.detectable:.3f} in total variation over these cells, or more, would fail with probability 0.9 "
        f"(false alarms: {FALSE_ALARM:g}, by the chi-square approximation)."
    )
    if not facts["accepted"]:
        lines.append("No test of acceptance: nothing that was drafted was accepted.")
    elif not facts["impossible"]:
        lines.append("Nothing speaks against the target's law.")
    return "\n".join(lines)


def report_texts(fit: Fit) -> str:
    """The verdict on the longer texts."""
    verified = "NOT LOSSLESS: the tokens of longer texts do not have the target's law." if fit.p_value < FALSE_ALARM else (
        f"Nothing speaks against it; a law off by {fit.detectable:.3f} over these cells, or more, would fail with probability 0.9."
    )  # fmt: skip
    return f"ranks of the tokens of longer texts: chi-square {fit.statistic:.1f} with {fit.degrees} degrees of freedom, p = {fit.p_value:.3g}\n{verified}"


if __name__ == "__main__":
    sys.exit(main())
