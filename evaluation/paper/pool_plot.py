"""The plot of the README: what a pool of chosen tokens accepts, and one with a sampled slot.

    python -m evaluation.paper.pool_plot --output docs/pool.png

One level, four slots, a draft that is close to the target. A bar is a token. Its outline is the
target's probability p, its filled part the probability that the level emits the token as an
accepted one, by the kind of slot that accepts it. Everything is computed exactly.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from eagle.plotting import saved_plot
from eagle.program import program
from rheo.analysis.one_level import rheo_acceptance, tail_probs, top, top_k_acceptance

SLOTS = 4
COLOURS = {"lead": "#3b6fb6", "sampled": "#e08a1e", "fill": "#4d9a5b"}


def example() -> tuple[Tensor, Tensor]:
    """(p, q), float64 ``[16]``: a flat draft distribution, and a target close to it."""
    rank = torch.arange(1, 17, dtype=torch.float64)
    q = (-0.22 * rank).softmax(0)
    p = (q.log() + 0.8 * torch.cos(2.1 * rank)).softmax(0)
    return p, q


def accepted_by_kind(p: Tensor, q: Tensor, q_tail: Tensor) -> dict[str, Tensor]:
    """Probability ``[V]`` that each token is emitted from each kind of slot, with m = 1.

    All sampled tokens are gone through: the sampled token is accepted with probability
    ``min(1, p / q_tail)``; if it is rejected, a token of the pool is accepted if the residual
    gives it.
    """
    residual = (p - q_tail).clamp_min(0)
    residual = residual / residual.sum()
    parts = {kind: torch.zeros_like(p) for kind in COLOURS}
    for y in q_tail.nonzero()[:, 0].tolist():
        accept = (p[y] / q_tail[y]).clamp_max(1)
        parts["sampled"][y] += q_tail[y] * accept
        others = [x for x in q.argsort(descending=True, stable=True).tolist() if x != y]
        rejected = q_tail[y] * (1 - accept)
        parts["sampled"][y] += rejected * residual[y]
        for slot, x in enumerate(others[: SLOTS - 1]):
            parts["lead" if slot == 0 else "fill"][x] += rejected * residual[x]
    return parts


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.paper.pool_plot", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--output", type=Path, default=Path("docs/pool.png"), help="PNG file")
    return parser


@program(build_parser)
def main(args: argparse.Namespace) -> None:
    """Compute and plot."""
    p, q = example()
    q_tail = tail_probs(q, 1)
    chosen = {"lead": p * top(q, SLOTS)}
    sampled = accepted_by_kind(p, q, q_tail)
    totals = top_k_acceptance(p, q, SLOTS), rheo_acceptance(p, q, q_tail, SLOTS)
    titles = "EAGLE: four chosen tokens", "RheoSampling: lead, sampled, fill"
    with saved_plot(args.output, 1, 2, figsize=(9.6, 3.1), sharey=True) as (_, panels):
        for panel, parts, total, title in zip(panels[0], (chosen, sampled), totals, titles):
            found = sum(part.sum() for part in parts.values())
            if abs(found - total) > 1e-12:
                raise ArithmeticError(f"{title}: {found} accepted, the closed form says {total}")
            tokens, bottom = range(1, len(p) + 1), torch.zeros_like(p)
            for kind, part in parts.items():
                label = "chosen" if len(parts) == 1 else kind
                panel.bar(tokens, part, bottom=bottom, color=COLOURS[kind], label=label)
                bottom = bottom + part
            panel.bar(tokens, p, fill=False, edgecolor="black", linewidth=0.9, label="target p")
            panel.set_title(f"{title}\naccepts {100 * total:.0f} %", fontsize=11)
            panel.set_xlabel("tokens by falling draft probability q")
            panel.set_xticks([])
            panel.legend(frameon=False, fontsize=9)
        panels[0, 0].set_ylabel("probability")
    print(f"Top-K accepts {totals[0]:.4f}, RheoSampling {totals[1]:.4f}; plot: {args.output}")


if __name__ == "__main__":
    main()
