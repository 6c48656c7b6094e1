"""Verification: walk down the tree and emit tokens with exactly the target's law (paper section 3.3, Algorithm 1)."""

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
    """What one verification decided; L = ``tree.max_levels``.

    Attributes:
        path: int64 ``[L + 1]`` visited nodes, the root first; entries from ``count`` on are meaningless.
        tokens: int64 ``[L + 1]`` the token emitted at each visited node: first the accepted drafted ones,
            then, at index ``count - 1``, the bonus token.
        count: int64 ``[]`` number of emitted tokens, accepted + 1.
        finite: bool ``[]`` False where a visited node had NaN in its law, or nothing but zeros; then nothing may be committed.
    """

    path: Tensor
    tokens: Tensor
    count: Tensor
    finite: Tensor


def check_verification(verification: str, m: int | str | None) -> None:
    """Raise a ValueError for an unknown verification, or one that is not lossless with this m of the pools."""
    if verification not in VERIFICATIONS:
        raise ValueError(
            f"verification is {verification!r}; choose one of {', '.join(VERIFICATIONS)}"
        )
    if m == AUTO and verification == "rrsw":
        raise ValueError(
            "m='auto' with verification 'rrsw' is not lossless: a lead token's place may hang on the token drawn; give m a number"
        )


def verify(
    tree: Tree,
    target_probs: Callable[[Tensor], Tensor],
    draws: Draws,
    verification: str = "rheo",
    at_once: bool = False,
) -> VerifyResult:
    """Emit tokens down one path of the tree, losslessly.

    At each node the sampled child Y is accepted with probability ``min(1, p(Y) / q_tail(Y))``; else one
    token is drawn from the residual ``norm(max(0, p - q_tail))``. That one draw has the same law as
    testing the other children, which are point masses, one by one. Where the token drawn is a
    child, the walk goes on there; where it is not, it is the bonus token and the walk ends.

    ``verification="rrsw"`` is the paper's baseline (Appendices A and D.2): the lead children are tried under p
    first, then Y against q_tail under what is left of p, then the fill children.

    Args:
        probs: maps a node index (int64 ``[]``) to the target's law ``[V]`` there, after temperature and filters; with ``at_once`` all nodes
            (``[N]``) to theirs (``[N, V]``).
        at_once: decide at all nodes in one pass and then follow the path, in a fixed number of operations for which a GPU never waits for
            the host; else node by node, the visited ones only. Draws at different nodes are independent, so the law is the same.

    Raises:
        ValueError: for an unknown ``verification``.
    """
    check_verification(verification, None)

    def decide(node: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        return next_token(tree, node, p, draws, verification, at_once), p.sum() > 0

    def emit(nodes: Tensor) -> tuple[Tensor, Tensor]:
        return (torch.vmap(decide, randomness="different") if at_once else decide)(
            nodes, target_probs(nodes)
        )

    return walk(tree, emit, at_once)


def verify_greedily(
    tree: Tree, logits: Callable[[Tensor], Tensor], at_once: bool = False
) -> VerifyResult:
    """Temperature 0: the law is certain of the target's most likely token, which is emitted whatever was drafted.

    Args:
        logits: maps a node index to the target's logits there, as ``probs`` of ``verify`` does.
        at_once: as in ``verify``.
    """

    def emit(nodes: Tensor) -> tuple[Tensor, Tensor]:
        rows = logits(nodes).float()
        return rows.argmax(-1), rows.abs().amax(-1).isfinite()

    return walk(tree, emit, at_once)


def walk(
    tree: Tree, emit: Callable[[Tensor], tuple[Tensor, Tensor]], at_once: bool
) -> VerifyResult:
    """Follow the tokens that are emitted from the root down, as far as they were drafted.

    Args:
        emit: maps a node (int64 ``[]``), or with ``at_once`` all of them (``[N]``), to the token emitted there and whether its law is finite.
    """

    def step(nodes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What ``emit`` says, and the nodes that follow: themselves where the walk ends."""
        tokens, finite = emit(nodes)
        hit = tree.children(nodes[..., None]) & (tree.tokens == tokens[..., None])
        return (
            tokens,
            finite,
            torch.maximum((tree.indices * hit).amax(-1), nodes),
        )  # children stand behind their parent

    root = tree.indices[0]
    if at_once:
        tokens, finite, following = step(tree.indices)
        path = [root]
        for _ in range(tree.max_levels):
            path.append(pick(following, path[-1]))
        path = torch.stack(path)
        return VerifyResult(path, tokens[path], 1 + (path.diff() != 0).sum(), finite[path].all())

    node, path, tokens, finite = root, [], [], torch.ones_like(root, dtype=torch.bool)
    for _ in range(tree.max_levels + 1):
        token, sound, following = step(node)
        path.append(node)
        tokens.append(token)
        finite = finite & sound
        if following == node:
            break
        node = following
    missing = tree.max_levels + 1 - len(path)
    return VerifyResult(
        torch.stack(path + path[-1:] * missing),
        torch.stack(tokens + tokens[-1:] * missing),
        root + len(path),
        finite,
    )


def next_token(
    tree: Tree, node: Tensor, p: Tensor, draws: Draws, verification: str, at_once: bool
) -> Tensor:
    """The token emitted at ``node`` (int64 ``[]``); over all draws its law is p.

    Args:
        p: ``[V]`` target law at the node.
        at_once: nothing may be read before all is decided; else what an acceptance makes needless is left out.
    """
    first, hit = None, None
    if verification == "rrsw":
        lead = lead_tokens(tree, node, p)
        first = draws.token(p)
        hit = pick(lead, first) > 0
        if not at_once and hit:
            return first
        p = normalised(p.masked_fill(lead > 0, 0), otherwise=p)

    sampled, tail, q_tail = sampled_child(tree, node, p)
    accepted = draws.accept(acceptance_ratio(p, tail, q_tail, sampled))
    if not at_once and accepted:
        return sampled
    token = torch.where(accepted, sampled, draws.token(residual(p, tail, q_tail)))
    return token if first is None else torch.where(hit, first, token)


def sampled_child(tree: Tree, node: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sampled child's token ``[]``, and the ids ``[S - m]`` and law ``[S - m]`` that it was drawn from; a law of zeros where no such child survived."""
    child = (
        tree.indices * ((tree.parents == node) & tree.sampled)
    ).amax()  # the root, 0, is nobody's
    row = pick(tree.pool_rows, node)
    return (
        pick(tree.tokens, child),
        pick(tree.tail, row),
        pick(tree.q_tail, row).to(p.dtype) * (child > 0),
    )


def acceptance_ratio(p: Tensor, tail: Tensor, q_tail: Tensor, sampled: Tensor) -> Tensor:
    """``p / q_tail`` at the sampled token; 0 where it did not survive."""
    drawn_from = (q_tail * (tail == sampled)).sum()
    return torch.where(drawn_from > 0, pick(p, sampled) / drawn_from, 0)


def residual(p: Tensor, tail: Tensor, q_tail: Tensor) -> Tensor:
    """Weights ``[V]`` of ``norm(max(0, p - q_tail))``; p where nothing is left of it."""
    return unless_zero(p.scatter_add(0, tail, -q_tail).clamp_min(0), otherwise=p)


def lead_tokens(tree: Tree, node: Tensor, like: Tensor) -> Tensor:
    """``[V]``, positive on the tokens of a node's surviving lead children."""
    lead = tree.children(node) & (tree.kinds == LEAD)
    return torch.zeros_like(like).scatter_add_(0, tree.tokens, lead.to(like.dtype))


def pick(tensor: Tensor, index: Tensor) -> Tensor:
    """``tensor[index]`` for an index that is a tensor (int64 ``[]``), without the host reading it."""
    return tensor.index_select(0, index.reshape(1)).squeeze(0)


def unless_zero(weights: Tensor, otherwise: Tensor) -> Tensor:
    """``weights``, or ``otherwise`` where their sum underflowed to 0."""
    return torch.where(weights.sum() > 0, weights, otherwise)


def normalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    """The law that ``unless_zero`` weighs."""
    weights = unless_zero(weights, otherwise)
    return weights / weights.sum()
