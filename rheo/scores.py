"""Score rules: the score (proxy) of each slot while the tree is built (paper section 3.2).

A score rule is a function ``(q, tail_weights) -> (own, sampled)``:

    q             ``[P, S]`` draft probabilities of the support's tokens, in descending order
    tail_weights  ``[P, S - m]`` weights of the tail tokens, from which the sampled token is drawn:
                  proportional to q_tail. They sum to 1 only if T is not 1 or m is "auto"; divide
                  by the sum if the rule needs probabilities
    own           ``[P, S]`` score of each token of the support in a lead or fill slot
    sampled       ``[P, 1]`` score of the sampled slot

The output is lossless if

1. no score depends on the sampled token;
2. the sampled slot scores at least as high as every token of the tail;
3. no score exceeds 1.

Then whether the sampled slot survives pruning does not depend on the token in it. RRSw needs one
more: the sampled slot scores no higher than any lead slot.
"""

import torch
from torch import Tensor

AGREEMENT = 0.3  # weight of the first estimate of ``acceptance_scores``, by measurement


def paper_scores(q: Tensor, tail_weights: Tensor) -> tuple[Tensor, Tensor]:
    """The paper's scores: each token's q, and ``sampled_proxy`` for the sampled slot."""
    n_lead = q.shape[1] - tail_weights.shape[1]
    return q, sampled_proxy(q, n_lead)


def sampled_proxy(q: Tensor, n_lead: int) -> Tensor:
    """The paper's proxy of the sampled slot (section 3.2).

    It is ``max(min(q(x_m), z), q(x_{m+1}))``, where z is the probability outside the lead tokens.
    For m = 0 it is ``q(x_1)``.

    z is summed over the tail. One minus the lead tokens would round to 0 behind a near-certain
    lead. The outer maximum keeps the score at or above every fill slot after rounding, too.

    Args:
        q: ``[P, S]`` draft probabilities of the support's tokens, in descending order.
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
    """Scores that estimate how often each slot is accepted (for m = "auto"; docs/RHEOSTAT.md).

    Verification gives a token x to the sampled slot with probability ``min(p(x), q_tail(x))``,
    and the rest of p(x) to the slot that x has for itself. p is unknown while drafting, so there
    are two estimates of the first part. If p equals q, it is ``min(q, q_tail)``. If the target is
    certain of one token, and that token is distributed as q, it is ``q * q_tail``. The estimate
    used is AGREEMENT times the first plus 1 - AGREEMENT times the second.

    Args:
        q: ``[P, S]`` draft probabilities of the support's tokens, in descending order.
        q_tail: ``[P, S - m]`` the distribution of the sampled token.

    Returns:
        own ``[P, S]`` and sampled ``[P, 1]`` (see the module).
    """
    n_lead = q.shape[1] - q_tail.shape[1]
    lead, q = q[:, :n_lead], q[:, n_lead:]
    certain = q * q_tail
    common = certain + (torch.minimum(q, q_tail) - certain) * AGREEMENT
    own = (q - common).clamp_min(0)
    sampled = common.sum(-1, keepdim=True).clamp_max(1)
    return torch.cat((lead, own), 1), torch.maximum(sampled, own.amax(-1, keepdim=True))
