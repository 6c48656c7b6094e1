"""The acceptance probability of one level in closed form (Theorem 3 of the paper).

Each function returns the probability that the level emits a drafted token. The functions are
batched over leading dimensions and exact up to rounding; pass float64. They share these arguments,
distributions over the same V tokens:

    p       ``[..., V]`` target probabilities
    q       ``[..., V]`` draft probabilities at temperature 1; they rank the tokens, ties by id
    q_tail  ``[..., V]`` distribution of the sampled token (``tail_probs``), 0 on the lead tokens
    n       number of slots of the pool, all of which survive; 1 <= n <= number of tokens of q > 0
    m       number of lead slots, 0 <= m < n

``Top_n`` stands for the n tokens of highest q.
"""

import numpy as np
import torch
from torch import Tensor

from rheo.pool import GREEDY_BELOW


def tail_probs(q: Tensor, m: int, temperature: float = 1.0) -> Tensor:
    """``q_tail``: q without its m highest tokens, tempered and normalised.

    Returns:
        ``[..., V]``; NaN where q has no mass outside the m tokens.
    """
    tail = q.masked_fill(top(q, m), 0)
    if temperature < GREEDY_BELOW:
        return (top(tail, 1) & (tail > 0)).to(q.dtype) / (tail > 0).any(-1, keepdim=True)
    # Divide by the highest weight first: a power of a small number has no digits left.
    weights = (tail / tail.amax(-1, keepdim=True)) ** (1 / temperature)
    return weights / weights.sum(-1, keepdim=True)


def top(q: Tensor, n: int) -> Tensor:
    """``Top_n``, the n highest tokens of q, ties by token id; bool ``[..., V]``."""
    order = q.sort(dim=-1, descending=True, stable=True).indices[..., :n]
    return torch.zeros_like(q, dtype=torch.bool).scatter(-1, order, True)


def top_k_acceptance(p: Tensor, q: Tensor, n: int) -> Tensor:
    """Acceptance of Top-K, without a sampled slot: the mass of ``Top_n`` under p."""
    return _mass(p, top(q, n))


def rheo_acceptance(p: Tensor, q: Tensor, q_tail: Tensor, n: int) -> Tensor:
    """Acceptance of a pool with the sampled slot, under RheoVerification (Theorem 3).

    The m lead tokens matter through ``q_tail`` only.
    """
    before, with_last = top(q, n - 1), top(q, n)
    residual = _normalised((p - q_tail).clamp_min(0))
    # If the sampled token is in Top_{n-1}, the last fill slot holds the n-th token.
    last = _mass(residual, with_last & ~before)
    excess = _mass((q_tail - p).clamp_min(0), before)
    return _mass(p, before) + _mass(torch.minimum(p, q_tail), ~before) + last * excess


def rrsw_acceptance(p: Tensor, q: Tensor, q_tail: Tensor, n: int, m: int) -> Tensor:
    """Acceptance of the same pool under RRSw (Appendices A and D.2).

    RRSw tries the lead tokens first, then the sampled token, then the fill tokens.
    """
    before, with_last, lead = top(q, n - 1), top(q, n), top(q, m)
    left = _mass(p, ~lead)[..., None]  # 1 - A; summing the rest of p loses no digits
    p_left = _normalised(p.masked_fill(lead, 0))
    residual = _normalised((p_left - q_tail).clamp_min(0))
    last = _mass(residual, with_last & ~before)
    excess = _mass((q_tail - p_left).clamp_min(0), before)
    sampled = _mass(torch.minimum(p, left * q_tail), ~before)
    return _mass(p, before) + sampled + left[..., 0] * last * excess


def rheo_upper_bound(p: Tensor, q: Tensor, q_tail: Tensor, n: int) -> Tensor:
    """The paper's upper bound of ``rheo_acceptance``.

    It is the mass of ``Top_n`` under p, plus the sum of min(p, q_tail) over all other tokens.
    """
    inside = top(q, n)
    return _mass(p, inside) + _mass(torch.minimum(p, q_tail), ~inside)


def approximate_gap(p: Tensor, q: Tensor, q_tail: Tensor, n: int, m: int) -> Tensor:
    """Approximately ``rheo_acceptance`` minus ``rrsw_acceptance`` (Appendix D.3)."""
    rest = ~top(q, n)
    left = 1 - _mass(p, top(q, m))[..., None]
    return _mass(torch.minimum(p, q_tail), rest) - _mass(torch.minimum(p, left * q_tail), rest)


def best_acceptance(p: Tensor, q: Tensor, q_tail: Tensor, n: int) -> Tensor:
    """The highest acceptance that a lossless verifier can reach with this pool.

    It is the value of ``transport_bound`` in closed form. ``Top_{n-1}`` is always in the pool. The
    n-th token is in it if the sampled token is in ``Top_n``. Any other token is in it only if it
    is the sampled token.
    """
    before, with_last = top(q, n - 1), top(q, n)
    last = torch.minimum(_mass(p, with_last & ~before), _mass(q_tail, with_last))
    return _mass(p, before) + last + _mass(torch.minimum(p, q_tail), ~with_last)


def transport_bound(p: Tensor, q: Tensor, q_tail: Tensor, n: int) -> float:
    """``best_acceptance`` by optimal transport, as a linear program.

    The sampled token Y with distribution q_tail makes the pool. The program chooses the joint
    distribution of Y and the output, which has distribution p, and maximises the probability that
    the output is in the pool.

    Args:
        p: ``[V]``, as in the module.
        q: ``[V]``.
        q_tail: ``[V]``.
        n: as in the module.

    Raises:
        ArithmeticError: if the solver fails.
    """
    # scipy is needed here alone; it is not among the package's requirements.
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    before = top(q, n - 1)
    last = (top(q, n) & ~before).nonzero()[:, 0].tolist()
    sampled, emitted = [], []  # each pair of a sampled and an emitted token is one variable
    for y in q_tail.nonzero()[:, 0].tolist():
        pool = before.nonzero()[:, 0].tolist() + (last if before[y] else [y])
        sampled += [y] * len(pool)
        emitted += pool
    v, n_pairs = p.numel(), len(sampled)
    # Row y limits the pairs with sampled token y, row V + x those with emitted token x.
    rows = np.concatenate((np.array(sampled), v + np.array(emitted)))
    columns = np.concatenate((np.arange(n_pairs), np.arange(n_pairs)))
    limits = coo_array((np.ones(2 * n_pairs), (rows, columns)), shape=(2 * v, n_pairs))
    capacity = np.concatenate((q_tail.double().numpy(), p.double().numpy()))
    result = linprog(-np.ones(n_pairs), A_ub=limits.tocsr(), b_ub=capacity, method="highs")
    if not result.success:
        raise ArithmeticError(f"the linear program of the transport bound failed: {result.message}")
    return -result.fun


def _mass(probs: Tensor, where: Tensor) -> Tensor:
    """The sum of probabilities over a mask."""
    return (probs * where).sum(-1)


def _normalised(weights: Tensor) -> Tensor:
    """Weights divided by their sum; 0 if the sum is 0 (then they are multiplied by 0 anyway)."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, 0)
