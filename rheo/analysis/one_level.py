"""Acceptance of one level in closed form: Theorem 3 of the paper, its RRSw baseline, Top-K, and what no verifier can exceed.

Each function takes laws over the same V tokens and returns the probability that the level emits a drafted token. All are
batched over leading dimensions and exact up to rounding; pass float64.

    p       ``[..., V]`` target law
    q       ``[..., V]`` draft law at temperature 1; it ranks the tokens, ties by token id
    q_tail  ``[..., V]`` law of the sampled token (``tail_probs``): 0 on the lead tokens, sum 1
    n       slots of the pool, all of which survive; at least 1, at most the tokens with q > 0
    m       lead slots, 0 <= m < n
"""

import numpy as np
import torch
from scipy.optimize import linprog
from scipy.sparse import coo_array
from torch import Tensor

from rheo.pool import GREEDY_BELOW


def tail_probs(q: Tensor, m: int, temperature: float = 1.0) -> Tensor:
    """``q_tail``: q without its m highest tokens, tempered, renormalised; NaN where nothing is left of it."""
    tail = q.masked_fill(top(q, m), 0)
    if temperature < GREEDY_BELOW:
        return (top(tail, 1) & (tail > 0)).to(q.dtype) / (tail > 0).any(-1, keepdim=True)
    # Over its highest weight first: a power of a small number has no digits left.
    weights = (tail / tail.amax(-1, keepdim=True)) ** (1 / temperature)
    return weights / weights.sum(-1, keepdim=True)


def top(q: Tensor, n: int) -> Tensor:
    """bool ``[..., V]``: the n highest tokens of q (``Top_n``), ties by token id."""
    order = q.sort(dim=-1, descending=True, stable=True).indices[..., :n]
    return torch.zeros_like(q, dtype=torch.bool).scatter(-1, order, True)


def top_k_acceptance(p: Tensor, q: Tensor, n: int) -> Tensor:
    """Top-K, no sampled slot: the mass of ``Top_n`` under p."""
    return _mass(p, top(q, n))


def rheo_acceptance(p: Tensor, q: Tensor, q_tail: Tensor, n: int) -> Tensor:
    """Theorem 3: a pool with the sampled slot, under RheoVerification (the sampled token first, the others under the residual).

    The m lead tokens enter through ``q_tail`` alone.
    """
    before, with_last = top(q, n - 1), top(q, n)
    residual = _normalised((p - q_tail).clamp_min(0))
    # Where the sampled token is itself one of Top_{n-1}, the last fill slot holds x_n.
    last = _mass(residual, with_last & ~before)
    return (
        _mass(p, before)
        + _mass(torch.minimum(p, q_tail), ~before)
        + last * _mass((q_tail - p).clamp_min(0), before)
    )


def rrsw_acceptance(p: Tensor, q: Tensor, q_tail: Tensor, n: int, m: int) -> Tensor:
    """The same pool under RRSw (Appendices A and D.2): lead tokens first, then the sampled token, then the fill."""
    before, with_last, lead = top(q, n - 1), top(q, n), top(q, m)
    left = _mass(p, ~lead)[..., None]  # 1 - A, summed, so that nothing cancels
    p_left = _normalised(p.masked_fill(lead, 0))
    residual = _normalised((p_left - q_tail).clamp_min(0))
    last = _mass(residual, with_last & ~before)
    excess = _mass((q_tail - p_left).clamp_min(0), before)
    return (
        _mass(p, before)
        + _mass(torch.minimum(p, left * q_tail), ~before)
        + left[..., 0] * last * excess
    )


def rheo_upper_bound(p: Tensor, q: Tensor, q_tail: Tensor, n: int) -> Tensor:
    """The paper's upper bound of ``rheo_acceptance``: ``Top_n`` under p, and min(p, q_tail) on the rest."""
    inside = top(q, n)
    return _mass(p, inside) + _mass(torch.minimum(p, q_tail), ~inside)


def approximate_gap(p: Tensor, q: Tensor, q_tail: Tensor, n: int, m: int) -> Tensor:
    """Appendix D.3: roughly what ``rheo_acceptance`` has over ``rrsw_acceptance``."""
    rest = ~top(q, n)
    left = 1 - _mass(p, top(q, m))[..., None]
    return _mass(torch.minimum(p, q_tail), rest) - _mass(torch.minimum(p, left * q_tail), rest)


def best_acceptance(p: Tensor, q: Tensor, q_tail: Tensor, n: int) -> Tensor:
    """The most that any lossless verifier can accept from this pool: the value of ``transport_bound`` in closed form.

    ``Top_{n-1}`` is in the pool whatever is sampled, x_n where the sampled token is in ``Top_n``, any other token where it is the
    sampled one.
    """
    before, with_last = top(q, n - 1), top(q, n)
    last = torch.minimum(_mass(p, with_last & ~before), _mass(q_tail, with_last))
    return _mass(p, before) + last + _mass(torch.minimum(p, q_tail), ~with_last)


def transport_bound(p: Tensor, q: Tensor, q_tail: Tensor, n: int) -> float:
    """The same by optimal transport between the sampled token and the output, as a linear program.

    Maximises the probability that the output, with law p, lies in the pool that the sampled token Y, with law q_tail, makes.

    Args:
        p, q, q_tail: ``[V]``.
    """
    before = top(q, n - 1)
    last = (top(q, n) & ~before).nonzero()[:, 0].tolist()
    sampled, emitted = [], []
    for y in q_tail.nonzero()[:, 0].tolist():
        pool = before.nonzero()[:, 0].tolist() + (last if before[y] else [y])
        sampled += [y] * len(pool)
        emitted += pool
    v, flows = p.numel(), len(sampled)
    columns = np.arange(flows)
    rows = np.concatenate((np.array(sampled), v + np.array(emitted)))
    limits = coo_array(
        (np.ones(2 * flows), (rows, np.concatenate((columns, columns)))), shape=(2 * v, flows)
    )
    capacity = np.concatenate((q_tail.double().numpy(), p.double().numpy()))
    result = linprog(-np.ones(flows), A_ub=limits.tocsr(), b_ub=capacity, method="highs")
    if not result.success:
        raise ArithmeticError(f"the linear program of the transport bound failed: {result.message}")
    return -result.fun


def _mass(probs: Tensor, where: Tensor) -> Tensor:
    return (probs * where).sum(-1)


def _normalised(weights: Tensor) -> Tensor:
    """Weights over their sum; 0 where that sum is 0 (what multiplies it is then 0 as well)."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, 0)


__all__ = [
    "approximate_gap", "best_acceptance", "rheo_acceptance", "rheo_upper_bound", "rrsw_acceptance", "tail_probs", "top",
    "top_k_acceptance", "transport_bound",
]  # fmt: skip
