"""Verification: accept one path of the tree and sample the bonus token (paper section 3.3).

The emitted tokens have exactly the target's distribution.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rheo.draws import Draws
from rheo.pool import AUTO, LEAD
from rheo.tree import Tree

VERIFICATIONS = ("rheo", "rrsw")


@dataclass(frozen=True)
class VerifyResult:
    """The result of one verification; L is ``tree.max_levels``.

    Attributes:
        path: int64 ``[L + 1]`` visited nodes, the root first; only the first ``count`` entries
            have a meaning.
        tokens: int64 ``[L + 1]`` the token emitted at each visited node: first the accepted
            drafted tokens, then, at index ``count - 1``, the bonus token.
        count: int64 ``[]`` number of emitted tokens: accepted + 1.
        finite: bool ``[]``, False if the target's probabilities at a visited node held NaN or were
            all 0. Then nothing may be committed.
    """

    path: Tensor
    tokens: Tensor
    count: Tensor
    finite: Tensor


def check_verification(verification: str, m: int | str | None) -> None:
    """Check that a verification exists and is lossless with pools of this m.

    Raises:
        ValueError: if it is not.
    """
    if verification not in VERIFICATIONS:
        choices = ", ".join(VERIFICATIONS)
        raise ValueError(f"verification is {verification!r}; choose one of {choices}")
    if m == AUTO and verification == "rrsw":
        raise ValueError(
            "m='auto' with verification 'rrsw' is not lossless: whether a lead token survives may "
            "depend on the sampled token; give m a number"
        )


def verify(
    tree: Tree,
    target_probs: Callable[[Tensor], Tensor],
    draws: Draws,
    verification: str = "rheo",
    at_once: bool = False,
) -> VerifyResult:
    """Emit tokens along one path of the tree, losslessly (section 3.3, Algorithm 1).

    At each node the sampled child Y is accepted with probability ``min(1, p(Y) / q_tail(Y))``. If
    it is rejected, one token is sampled from the residual ``norm(max(0, p - q_tail))``. That one
    sample has the same distribution as testing the other children, which are point masses, one by
    one. If the token is a child, the walk goes on there. If not, it is the bonus token.

    "rrsw" is the paper's baseline (Appendices A and D.2): the lead children are tried under p
    first, then Y against q_tail under the rest of p, then the fill children.

    Args:
        tree: the draft tree.
        target_probs: maps a node index (int64 ``[]``) to the target's probabilities ``[V]`` there,
            after temperature and filters. With ``at_once`` it maps all nodes ``[N]`` to ``[N, V]``.
        draws: makes the random decisions.
        verification: "rheo" is lossless for every tree. "rrsw" is lossless only if the sampled
            slot never ranks before a lead slot; the tree does not say so, ``check_verification``
            does.
        at_once: decide at all nodes in one pass and then follow the path. This takes a fixed
            number of operations, in which a GPU never waits for the CPU. If False, decide node by
            node, at the visited nodes only. The distribution is the same, since decisions at
            different nodes are independent.

    Raises:
        ValueError: for an unknown ``verification``.
    """
    check_verification(verification, None)

    def decide(node: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        return next_token(tree, node, p, draws, verification, at_once), p.sum() > 0

    def emit(nodes: Tensor) -> tuple[Tensor, Tensor]:
        run = torch.vmap(decide, randomness="different") if at_once else decide
        return run(nodes, target_probs(nodes))

    return walk(tree, emit, at_once)


def verify_greedily(
    tree: Tree, logits: Callable[[Tensor], Tensor], at_once: bool = False
) -> VerifyResult:
    """Verify at temperature 0: emit the target's most likely token at each node.

    Args:
        tree: the draft tree.
        logits: maps nodes to the target's logits there, as ``target_probs`` of ``verify`` does.
        at_once: as in ``verify``.
    """

    def emit(nodes: Tensor) -> tuple[Tensor, Tensor]:
        rows = logits(nodes).float()
        return rows.argmax(-1), rows.abs().amax(-1).isfinite()

    return walk(tree, emit, at_once)


def walk(
    tree: Tree, emit: Callable[[Tensor], tuple[Tensor, Tensor]], at_once: bool
) -> VerifyResult:
    """Follow the emitted tokens from the root down, as long as they are drafted.

    Args:
        tree: the draft tree.
        emit: maps a node (int64 ``[]``), or with ``at_once`` all nodes (``[N]``), to the token
            emitted there and whether the target's probabilities are finite there.
        at_once: as in ``verify``.
    """

    def step(nodes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Emit at nodes; the third value is the next node, or the same one if the walk ends."""
        tokens, finite = emit(nodes)
        hit = tree.children(nodes[..., None]) & (tree.tokens == tokens[..., None])
        child = (tree.indices * hit).amax(-1)  # 0 if no child holds the token
        return tokens, finite, torch.maximum(child, nodes)  # a child's index exceeds its parent's

    root = tree.indices[0]
    if at_once:
        all_tokens, all_finite, following = step(tree.indices)
        nodes = [root]
        for _ in range(tree.max_levels):
            nodes.append(pick(following, nodes[-1]))
        path = torch.stack(nodes)
        count = 1 + (path.diff() != 0).sum()
        return VerifyResult(path, all_tokens[path], count, all_finite[path].all())

    node, nodes, tokens, finite = root, [], [], torch.ones_like(root, dtype=torch.bool)
    for _ in range(tree.max_levels + 1):
        token, finite_here, following = step(node)
        nodes.append(node)
        tokens.append(token)
        finite = finite & finite_here
        if following == node:
            break
        node = following
    # The root is the int64 tensor 0: adding to it keeps dtype and device.
    count, missing = root + len(nodes), tree.max_levels + 1 - len(nodes)
    path = torch.stack(nodes + nodes[-1:] * missing)
    return VerifyResult(path, torch.stack(tokens + tokens[-1:] * missing), count, finite)


def next_token(
    tree: Tree, node: Tensor, p: Tensor, draws: Draws, verification: str, at_once: bool
) -> Tensor:
    """The token emitted at a node (int64 ``[]``). Averaged over all draws, its distribution is p.

    Args:
        tree: the draft tree.
        node: int64 ``[]``.
        p: ``[V]`` target probabilities at the node.
        draws: makes the random decisions.
        verification: "rheo" or "rrsw".
        at_once: if True, compute all branches and select the result without a read by the CPU. If
            False, return as soon as the token is known.
    """
    first = is_lead = None
    if verification == "rrsw":
        lead = lead_tokens(tree, node, p)
        first = draws.token(p)
        is_lead = pick(lead, first) > 0
        if not at_once and is_lead:
            return first
        p = normalised(p.masked_fill(lead > 0, 0), otherwise=p)

    sampled, tail, q_tail = sampled_child(tree, node, p)
    accepted = draws.accept(acceptance_ratio(p, tail, q_tail, sampled))
    if not at_once and accepted:
        return sampled
    token = torch.where(accepted, sampled, draws.token(residual(p, tail, q_tail)))
    if first is None or is_lead is None:
        return token
    return torch.where(is_lead, first, token)


def sampled_child(tree: Tree, node: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sampled child of a node and the distribution that its token was drawn from.

    Returns:
        The token ``[]``, the target ids of the tail ``[S - m]``, and their probabilities q_tail
        ``[S - m]`` in the dtype of p. If the sampled child did not survive, q_tail is all 0 and
        the token has no meaning.
    """
    is_child = (tree.parents == node) & tree.sampled
    child = (tree.indices * is_child).amax()  # 0, the root, if there is none
    row = pick(tree.pool_rows, node)
    q_tail = pick(tree.q_tail, row).to(p.dtype) * (child > 0)
    return pick(tree.tokens, child), pick(tree.tail, row), q_tail


def acceptance_ratio(p: Tensor, tail: Tensor, q_tail: Tensor, sampled: Tensor) -> Tensor:
    """``p / q_tail`` at the sampled token, ``[]``; 0 if the sampled child did not survive."""
    drawn_from = (q_tail * (tail == sampled)).sum()
    return torch.where(drawn_from > 0, pick(p, sampled) / drawn_from, 0)


def residual(p: Tensor, tail: Tensor, q_tail: Tensor) -> Tensor:
    """Weights ``[V]`` of ``norm(max(0, p - q_tail))``; p if their sum underflows to 0."""
    return unless_zero(p.scatter_add(0, tail, -q_tail).clamp_min(0), otherwise=p)


def lead_tokens(tree: Tree, node: Tensor, like: Tensor) -> Tensor:
    """``[V]``, positive for the tokens of a node's surviving lead children."""
    lead = tree.children(node) & (tree.kinds == LEAD)
    return torch.zeros_like(like).scatter_add_(0, tree.tokens, lead.to(like.dtype))


def pick(tensor: Tensor, index: Tensor) -> Tensor:
    """``tensor[index]`` for an index int64 ``[]``, without waiting for the GPU."""
    return tensor.index_select(0, index.reshape(1)).squeeze(0)


def unless_zero(weights: Tensor, otherwise: Tensor) -> Tensor:
    """``weights``, or ``otherwise`` if their sum is 0."""
    return torch.where(weights.sum() > 0, weights, otherwise)


def normalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    """``unless_zero(weights, otherwise)``, divided by its sum."""
    weights = unless_zero(weights, otherwise)
    return weights / weights.sum()
