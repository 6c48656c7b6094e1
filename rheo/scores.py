"""Score rules: what each slot of a pool is worth while the tree is built (paper section 3.2)."""

import torch
from torch import Tensor

AGREEMENT = 0.3  # see ``acceptance_scores``


def sampled_proxy(q: Tensor, n_lead: int) -> Tensor:
    """The sampled slot's score: ``max(min(q(x_m), z), q(x_{m+1}))``, and ``q(x_1)`` for m = 0 (section 3.2).

    z is the mass of the tail, summed and not 1 minus the head, which rounds to 0 for a near-certain lead. The clamp keeps the
    score at or above that of every fill slot after rounding too. Nothing here may depend on the token drawn.

    Args:
        q: ``[P, S]`` probabilities of the support, falling.
        n_lead: m, smaller than S.

    Returns:
        ``[P, 1]``.
    """
    tail = q[:, n_lead:]
    if n_lead == 0:
        return tail[:, :1]
    z = tail.sum(-1, keepdim=True)
    return z.clamp(tail[:, :1], q[:, n_lead - 1 : n_lead])


def acceptance_scores(q: Tensor, q_tail: Tensor) -> tuple[Tensor, Tensor]:
    """Scores that estimate how often each slot is accepted (with m AUTO; docs/RHEOSTAT.md).

    Verification gives token x to the sampled slot with probability min(p(x), q_tail(x)), and what p(x) has beyond it to x's own slot,
    where it has one. What draft and target have in common so is estimated from q: if the target's law were q, it would be min(q, q_tail),
    and if the target were certain of one token that follows q, q times q_tail. AGREEMENT says how far towards the first.

    Nothing here depends on the token drawn, and the sampled slot's score is at least that of every token of the tail.

    Args:
        q: ``[P, S]`` probabilities of the support, falling.
        q_tail: ``[P, S - m]``.

    Returns:
        Scores of the support's tokens in lead and fill slots ``[P, S]``, and of the sampled slot ``[P, 1]``.
    """
    n_lead = q.shape[1] - q_tail.shape[1]
    lead, q = q[:, :n_lead], q[:, n_lead:]
    certain = q * q_tail
    common = certain + (torch.minimum(q, q_tail) - certain) * AGREEMENT
    own = (q - common).clamp_min(0)
    return torch.cat((lead, own), 1), torch.maximum(
        common.sum(-1, keepdim=True).clamp_max(1), own.amax(-1, keepdim=True)
    )
