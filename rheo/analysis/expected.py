"""How much of a given tree verification accepts on average: no coin is tossed, every outcome is weighed by its probability."""

from collections.abc import Callable

import torch
from torch import Tensor

from rheo.tree import Tree
from rheo.verification import acceptance_ratio, lead_tokens, normalised, residual, sampled_child


def reach_probabilities(
    tree: Tree, target_probs: Callable[[Tensor], Tensor], verification: str = "rheo"
) -> Tensor:
    """The probability ``[N]`` that verification visits each node of a tree that has been drawn; 1 for the root.

    Their sum is the expected number of tokens of the cycle, accepted + 1.

    Args:
        probs: maps a node index (int64 ``[]``) to the target's law ``[V]`` there.
        verification: as in ``rheo.verification.verify``.
    """
    reach = torch.zeros(tree.tokens.numel(), dtype=torch.float64, device=tree.tokens.device)
    reach[0] = 1
    for node in torch.arange(
        tree.tokens.numel(), device=tree.tokens.device
    ):  # parents stand before their children
        children = tree.children(node)
        if children.any():
            emitted = emitted_probs(tree, node, target_probs(node), verification).double()
            reach = torch.where(children, reach[node] * emitted[tree.tokens], reach)
    return reach


def emitted_probs(tree: Tree, node: Tensor, p: Tensor, verification: str) -> Tensor:
    """Law ``[V]`` of the token that verification emits at ``node``, given what was drafted there."""
    lead_mass, left = torch.zeros_like(p), p
    if verification == "rrsw":
        is_lead = lead_tokens(tree, node, p) > 0
        lead_mass = p * is_lead
        left = p.masked_fill(is_lead, 0)
    total = left.sum()
    p = normalised(left, otherwise=p)
    sampled, tail, q_tail = sampled_child(tree, node, p)
    accept = acceptance_ratio(p, tail, q_tail, sampled).clamp_max(1)
    rest = residual(p, tail, q_tail)
    emitted = (1 - accept) * rest / rest.sum()
    emitted[sampled] += accept
    return lead_mass + total * emitted
