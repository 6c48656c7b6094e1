"""Count how often RheoVerification accepts more than RRSw: ``python -m evaluation.studies.rrsw``.

Both are lossless and have a closed form (``rheo.analysis.one_level``), so the paper's "almost
always" can be counted: over random distributions, over pool sizes n and numbers m of lead slots,
and over real nodes of the demo pair. Prints a Markdown table; docs/RRSW.md holds the results.
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from eagle.model.ea_model import EaModel
from eagle.model.tuning.contexts import paired_logits
from eagle.program import new_parser, program
from evaluation.common.markdown import table
from evaluation.common.prompts import build_prompt
from evaluation.common.questions import load_questions, question_file
from rheo.analysis import one_level

SETTINGS = [(n, m) for n in (2, 3, 4, 6, 10) for m in (1, 2, 3) if m < n]  # same for m = 0
EQUAL = 1e-12
VOCAB = 64
SUPPORT = 128
COLUMNS = (
    "p and q",
    "(p, q, n, m)",
    "Rheo more",
    "equal",
    "RRSw more",
    "mean gain",
    "largest loss",
    "mean distance to the best verifier",
)

# n, m, gain of Rheo over RRSw ``[pairs]``, distance of Rheo to the best verifier ``[pairs]``.
Comparison = tuple[int, int, Tensor, Tensor]


def random_pairs(pairs: int, generator: torch.Generator) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Several kinds of random p and q, float64 ``[pairs, VOCAB]`` each, with their names."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def dirichlet(concentration: float) -> Tensor:
        torch.manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
        parameters = torch.full((VOCAB,), concentration, dtype=torch.float64)
        return torch.distributions.Dirichlet(parameters).sample((pairs,))

    for a in (0.05, 0.3, 1.0):
        yield f"Dirichlet {a}, p and q unrelated", dirichlet(a), dirichlet(a)
    rank = torch.arange(1, VOCAB + 1, dtype=torch.float64).log()
    for spread in (0.2, 1.0):
        exponents = 0.5 + 1.5 * torch.rand(2, pairs, 1, generator=generator, dtype=torch.float64)
        p, q = (-(e * (rank + spread * normal(pairs, VOCAB))) for e in exponents)
        yield f"Zipf 0.5 to 2, log ranks off by {spread}", p.softmax(-1), q.softmax(-1)
    for noise in (0.1, 0.3, 1.0, 3.0):
        shared = 2.5 * normal(pairs, VOCAB)
        q = shared + noise * normal(pairs, VOCAB)
        name = f"softmax of shared logits (2.5), noise {noise}"
        yield name, shared.softmax(-1), q.softmax(-1)


def demo_nodes(questions: int, tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The demo pair's p and q ``[nodes, V]`` along its own answers at T = 1."""
    model = EaModel.from_pretrained(base_model_path="smollm2-demo")
    ids = model.draft.target_ids()
    chosen = load_questions(question_file("demo"), None, questions)
    for question in tqdm(chosen, unit="question", desc="demo pair"):
        prompt = build_prompt("auto", model.tokenizer, [question.turns[0]], [])
        settings = {"temperature": 1.0, "max_new_tokens": tokens, "seed": question.question_id}
        text = model.naivegenerate(prompt, **settings)
        target, draft = paired_logits(model.target, model.draft, text[0])
        start = prompt.shape[1] - 1
        p = target[start:].double().softmax(-1)
        values, positions = draft[start - 1 :].double().topk(SUPPORT)
        yield p, torch.zeros_like(p).scatter_(1, ids[positions], values.softmax(-1))


def compare(p: Tensor, q: Tensor) -> Iterator[Comparison]:
    """Compare both verifications for every n and m. Pools without a sampled slot are left out."""
    for n, m in SETTINGS:
        q_tail = one_level.tail_probs(q, m)
        rows = ~q_tail.isnan().any(-1) & ((q > 0).sum(-1) >= n)
        given = p[rows], q[rows], q_tail[rows]
        rheo = one_level.rheo_acceptance(*given, n)
        gain = rheo - one_level.rrsw_acceptance(*given, n, m)
        yield n, m, gain, one_level.best_acceptance(*given, n) - rheo


def summarise(name: str, found: list[Comparison]) -> list[str]:
    """A row of the table."""
    gain = torch.cat([gains for _, _, gains, _ in found])
    distance = torch.cat([distances for *_, distances in found])
    more, less = gain > EQUAL, gain < -EQUAL
    shares = [f"{100 * x.double().mean():.2f} %" for x in (more, ~(more | less), less)]
    loss, n, m = min((gains.min().item(), n, m) for n, m, gains, _ in found if gains.numel())
    worst = f"{loss:.4f} (n = {n}, m = {m})" if loss < 0 else "none"
    return [name, f"{len(gain):,}", *shares, f"{gain.mean():+.4f}", worst, f"{distance.mean():.4f}"]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = new_parser(
        "evaluation.studies.rrsw",
        "Count how often RheoVerification accepts more than RRSw.",
    )
    add = parser.add_argument
    add("--pairs", type=int, default=2000, help="pairs (p, q) of each kind, for every n and m")
    add("--questions", type=int, default=24, help="questions of the demo pair; 0 leaves it out")
    add("--tokens", type=int, default=48, help="tokens of each answer")
    add("--seed", type=int, default=0)
    return parser


@program(build_parser)
def main(args: argparse.Namespace) -> None:
    """Compare and print the table."""
    rows, synthetic = [], []
    for name, p, q in random_pairs(args.pairs, torch.Generator().manual_seed(args.seed)):
        found = list(compare(p, q))
        rows.append(summarise(name, found))
        synthetic += found
    rows.append(summarise("all synthetic rows", synthetic))
    if args.questions:
        nodes = demo_nodes(args.questions, args.tokens)
        found = [comparison for p, q in nodes for comparison in compare(p, q)]
        rows.append(summarise("real nodes of the demo pair", found))
    print(table(COLUMNS, rows))


if __name__ == "__main__":
    main()
