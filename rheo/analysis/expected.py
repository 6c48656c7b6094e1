"""The expected number of accepted tokens of a given tree, computed exactly and not sampled."""

from collections.abc import Callable

import torch
from torch import Tensor

from rheo.tree import Tree
from rheo.verification import acceptance_ratio, lead_tokens, normalised, residual, sampled_child


def reach_probabilities(
    tree: Tree, target_probs: Callable[[Tensor], Tensor], verification: str = "rheo"
) -> Tensor:
    """The probability that verification visits each node of a given tree.

    The sum over all nodes is the expected number of emitted tokens of the cycle: accepted + 1.

    Args:
        tree: the draft tree.
        target_probs: maps a node index (int64 ``[]``) to the target's probabilities ``[V]`` there.
        verification: as in ``rheo.verification.verify``.

    Returns:
        float64 ``[N]``; 1 for the root.
    """
    nodes = torch.arange(tree.tokens.numel(), device=tree.tokens.device)
    reach = (nodes == 0).double()
    for node in nodes:  # parents come before their children
        children = tree.children(node)
        if children.any():
            emitted = emitted_probs(tree, node, target_probs(node), verification).double()
            reach = torch.where(children, reach[node] * emitted[tree.tokens], reach)
    return reach


def emitted_probs(tree: Tree, node: Tensor, p: Tensor, verification: str) -> Tensor:
    """The distribution of the token that verification emits at a node, given the drafted children.

    Args:
        tree: the draft tree.
        node: int64 ``[]``.
        p: ``[V]`` target probabilities at the node.
        verification: as in ``rheo.verification.verify``.

    Returns:
        ``[V]``.
    """
    lead_mass, rest = torch.zeros_like(p), p
    if verification == "rrsw":
        is_lead = lead_tokens(tree, node, p) > 0
        lead_mass, rest = p * is_lead, p.masked_fill(is_lead, 0)
    rest_probs = normalised(rest, otherwise=p)
    sampled, tail, q_tail = sampled_child(tree, node, rest_probs)
    accept = acceptance_ratio(rest_probs, tail, q_tail, sampled).clamp_max(1)
    after_rejection = residual(rest_probs, tail, q_tail)
    emitted = (1 - accept) * after_rejection / after_rejection.sum()
    emitted[sampled] += accept
    return lead_mass + rest.sum() * emitted
