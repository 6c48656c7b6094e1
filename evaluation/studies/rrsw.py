"""How often does RheoVerification accept more than RRSw? ``python -m evaluation.studies.rrsw``.

Both are lossless, and both have a closed form (``rheo.theory``), so the paper's "almost always" can be counted: over pairs of laws from
named families, over pool sizes n and lead slots m, and over real nodes of the demo pair. Prints a Markdown table.
"""

import argparse
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from eagle.model.ea_model import EaModel
from eagle.model.tuning.contexts import paired_logits
from evaluation.common.prompts import build_prompt
from evaluation.common.questions import load_questions, question_file
from rheo.analysis import one_level as theory

SLOTS = (2, 3, 4, 6, 10)
LEADS = (1, 2, 3)  # with m = 0 the two are the same
EQUAL = 1e-12
VOCAB = 64


def tried(pairs: int, generator: torch.Generator) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, p, q) of each family, ``[pairs, 64]`` float64; p and q at temperature 1."""

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def dirichlet(concentration):
        torch.manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
        return torch.distributions.Dirichlet(
            torch.full((VOCAB,), concentration, dtype=torch.float64)
        ).sample((pairs,))

    for concentration in (0.05, 0.3, 1.0):
        yield (
            f"Dirichlet {concentration}, p and q unrelated",
            dirichlet(concentration),
            dirichlet(concentration),
        )
    rank = torch.arange(1, VOCAB + 1, dtype=torch.float64).log()
    for spread in (0.2, 1.0):
        exponents = 0.5 + 1.5 * torch.rand(2, pairs, 1, generator=generator, dtype=torch.float64)
        p, q = (-(e * (rank + spread * normal(pairs, VOCAB))) for e in exponents)
        yield f"Zipf, exponents 0.5 to 2, log ranks off by {spread}", p.softmax(-1), q.softmax(-1)
    for noise in (0.1, 0.3, 1.0, 3.0):
        shared = 2.5 * normal(pairs, VOCAB)
        yield (
            f"softmax of shared logits (2.5) + noise {noise}",
            shared.softmax(-1),
            (shared + noise * normal(pairs, VOCAB)).softmax(-1),
        )


def demo_nodes(questions: int, tokens: int, support: int = 128) -> Iterator[tuple[Tensor, Tensor]]:
    """(p, q) ``[nodes, V]`` of the demo pair after every token of its own answers at T = 1, q over the draft's support."""
    model = EaModel.from_pretrained("smollm2-demo")
    ids = model.draft.target_ids()
    for question in tqdm(
        load_questions(question_file("demo"), None, questions), unit="question", desc="demo pair"
    ):
        prompt = build_prompt("auto", model.tokenizer, [question.turns[0]], [])
        text = model.naivegenerate(
            prompt, temperature=1.0, max_new_tokens=tokens, seed=question.question_id
        )
        target, draft = paired_logits(model.target, model.draft, text[0])
        start = prompt.shape[1] - 1
        p = target[start:].double().softmax(-1)
        values, positions = draft[start - 1 :].double().topk(support)
        yield p, torch.zeros_like(p).scatter_(1, ids[positions], values.softmax(-1))


class Tally:
    """Counts of one family."""

    def __init__(self):
        self.n, self.more, self.equal, self.less, self.gain, self.gap_to_best = 0, 0, 0, 0, 0.0, 0.0
        self.worst = (0.0, None)

    def add(self, p: Tensor, q: Tensor) -> None:
        """Every n and m on a batch of laws; a pool whose tail is empty is none with a sampled slot and is left out."""
        for n, m in itertools.product(SLOTS, LEADS):
            if m >= n:
                continue
            q_tail = theory.tail_probs(q, m)
            rows = ~q_tail.isnan().any(-1) & ((q > 0).sum(-1) >= n)
            given = p[rows], q[rows], q_tail[rows]
            rheo, rrsw = theory.rheo_acceptance(*given, n), theory.rrsw_acceptance(*given, n, m)
            gain = rheo - rrsw
            self.n += gain.numel()
            self.more += int((gain > EQUAL).sum())
            self.less += int((gain < -EQUAL).sum())
            self.equal += int((gain.abs() <= EQUAL).sum())
            self.gain += gain.sum().item()
            self.gap_to_best += (theory.best_acceptance(*given, n) - rheo).sum().item()
            if gain.numel() and gain.min().item() < self.worst[0]:
                self.worst = gain.min().item(), (n, m)

    def row(self, name: str) -> str:
        worst = (
            "none"
            if self.worst[1] is None
            else f"{self.worst[0]:.4f} (n = {self.worst[1][0]}, m = {self.worst[1][1]})"
        )
        shares = " | ".join(
            f"{100 * count / self.n:.2f} %" for count in (self.more, self.equal, self.less)
        )
        return f"| {name} | {self.n:,} | {shares} | {self.gain / self.n:+.4f} | {worst} | {self.gap_to_best / self.n:.4f} |"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m evaluation.studies.rrsw", description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    parser.add_argument(
        "--pairs", type=int, default=2000, help="pairs (p, q) a family; each with every n and m"
    )
    parser.add_argument(
        "--questions", type=int, default=24, help="questions of the demo pair; 0 leaves it out"
    )
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    print(
        "| laws | (p, q, n, m) | Rheo more | equal | RRSw more | mean gain | largest loss | mean distance to the best verifier |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    total = Tally()
    for name, p, q in tried(args.pairs, torch.Generator().manual_seed(args.seed)):
        tally = Tally()
        for one in (tally, total):
            one.add(p, q)
        print(tally.row(name), flush=True)
    print(total.row("all families"), flush=True)
    if args.questions:
        tally = Tally()
        for p, q in demo_nodes(args.questions, args.tokens):
            tally.add(p, q)
        print(tally.row("real nodes of the demo pair, T = 1"), flush=True)


if __name__ == "__main__":
    main()
