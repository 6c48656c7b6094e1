"""Dynamic draft trees: expand, rerank, prune, under one total order (paper section 3.1, EAGLE-2)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from rheo.draws import Draws
from rheo.pool import SAMPLED, PoolOptions, Pools, build_pools, in_target_vocabulary

NO_KIND = -1  # of what was not drafted: the root and padding


@dataclass(frozen=True)
class TreeOptions:
    """Size of the draft tree.

    Attributes:
        pool: how each expanded node gets its candidates.
        total_token: nodes of the tree, the root included.
        depth: expansions after the root's own pool; the tree has at most ``depth + 1`` drafted levels.

    Raises:
        ValueError: for a tree without a drafted node or a negative depth.
    """

    pool: PoolOptions
    total_token: int = 60
    depth: int = 7

    def __post_init__(self):
        if self.total_token < 2:
            raise ValueError(
                f"total_token is {self.total_token}; it must be at least 2 (the root and one drafted node)"
            )
        if self.depth < 0:
            raise ValueError(f"depth is {self.depth}; it must be at least 0")


@dataclass(frozen=True)
class Tree:
    """A draft tree of N nodes in level order; node 0 is the root, the last committed token.

    N is fixed by the options, so that shapes are static; where fewer candidates exist, some nodes are
    padding (``valid`` False): they see only themselves and verification never reaches them.

    Attributes:
        tokens: int64 ``[N]`` ids in the target vocabulary.
        parents: int64 ``[N]`` node index of the parent; 0 for the root itself.
        levels: int64 ``[N]`` distance from the root.
        kinds: int64 ``[N]`` slot kind (rheo.pool), NO_KIND for the root and padding.
        valid: bool ``[N]``.
        log_scores: ``[N]`` path score; 0 for the root.
        mask: bool ``[N, N]``, ``mask[i, j]`` where j is i or an ancestor of i.
        pool_rows: int64 ``[N]`` row of ``tail`` and ``q_tail`` that holds the node's pool; 0 where never expanded.
        tail: int64 ``[R, S - m]`` ids in the target vocabulary, and q_tail ``[R, S - m]``: the law of every expanded node's sampled slot.
        max_levels: drafted levels that the options allow.
    """

    tokens: Tensor
    parents: Tensor
    levels: Tensor
    kinds: Tensor
    valid: Tensor
    log_scores: Tensor
    mask: Tensor
    pool_rows: Tensor
    tail: Tensor
    q_tail: Tensor
    max_levels: int

    @cached_property
    def drafted(self) -> Tensor:
        """bool ``[N]``: neither the root nor padding."""
        return self.kinds != NO_KIND

    @cached_property
    def sampled(self) -> Tensor:
        """bool ``[N]``: in a sampled slot."""
        return self.kinds == SAMPLED

    @cached_property
    def indices(self) -> Tensor:
        """int64 ``[N]``: 0, 1, ..., N - 1."""
        return torch.arange(self.tokens.numel(), device=self.tokens.device)

    def children(self, node: Tensor | int) -> Tensor:
        """bool ``[N]``: the surviving children of a node; of several, ``[n, 1]``, bool ``[n, N]``."""
        return (self.parents == node) & self.drafted


# Called with the tokens of the nodes to expand [F], the rank of each one's parent among the nodes of the call
# before [F], and the level of the nodes (1 for the root's children); returns their draft logits [F, V].
Expand = Callable[[Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class Growth:
    """The root and all candidates of a tree before pruning.

    Attributes:
        levels: the pools of each level, one row per expanded parent.
        scores: ``[1 + C]`` path scores of the root and of all candidates, level by level, left to right.
        expanded: per expansion the expanded nodes ``[F]`` in rank order, as indices among the candidates of their level.
        target_ids: as in ``build_tree``.
    """

    levels: list[Pools]
    scores: Tensor
    expanded: list[Tensor]
    target_ids: Tensor | None


def build_tree(
    root: Tensor,
    root_logits: Tensor,
    expand: Expand,
    options: TreeOptions,
    draws: Draws,
    target_ids: Tensor | None = None,
) -> Tree:
    """Grow a tree level by level and keep its best ``total_token - 1`` candidates.

    One total order decides both which nodes of a level are expanded and which candidates are kept:
    path score descending, then shallower first, then left to right. Candidates are laid out in just
    that left-to-right order, so a stable sort by score is the order. The kept set is closed under
    parents, since no proxy exceeds 1.

    Args:
        root: int64 ``[]`` last committed token.
        root_logits: ``[V]`` draft logits at the root.
        expand: runs the draft on nodes of the newest level (see ``Expand``).
        target_ids: int64 ``[V]`` target id of each draft id; None where the vocabularies agree.
    """
    return prune(root, grow(root_logits, expand, options, draws, target_ids), options.total_token)


def grow(
    root_logits: Tensor,
    expand: Expand,
    options: TreeOptions,
    draws: Draws,
    target_ids: Tensor | None = None,
) -> Growth:
    """Level 1 is the root's pool; then, ``depth`` times, the K best nodes of the newest level get theirs.

    Where fewer than K nodes exist, the call is filled up with padding, so that shapes are static; the pools of
    padding score -inf and are never kept.
    """
    pool = options.pool
    if pool.random:
        vocab = root_logits.shape[0]
        draws = draws.ahead(
            1 + options.depth * pool.size, min(pool.support or vocab, vocab), root_logits.device
        )
    levels = [build_pools(root_logits[None], pool, draws, target_ids)]
    scores = [torch.zeros(1, device=root_logits.device), levels[0].log_proxy.flatten()]
    expanded = []
    for level in range(1, options.depth + 1):
        parents, (best, order) = levels[-1], best_first(scores[-1], pool.size)
        logits = expand(
            parents.tokens.flatten().index_select(0, order), order // parents.tokens.shape[1], level
        )
        levels.append(build_pools(logits, pool, draws, target_ids))
        expanded.append(order)
        scores.append((best[:, None] + levels[-1].log_proxy).flatten())
    return Growth(levels, torch.cat(scores), expanded, target_ids)


def prune(root: Tensor, growth: Growth, total_token: int) -> Tree:
    """Keep the root and the best ``total_token - 1`` candidates of all levels, and lay them out as a ``Tree``.

    The root is the first of all: no score is above its own, and it stands before its equals.
    """
    levels, expanded = growth.levels, growth.expanded
    shapes = tuple(tuple(pools.tokens.shape) for pools in levels)
    positions, offsets, rows = layout(shapes, levels[0].kinds, growth.scores.device)
    nodes = (
        best_first(growth.scores, total_token)[1].sort().values
    )  # back to level order: parents first
    row, level, kind = positions[:, nodes]
    log_scores = growth.scores[nodes]
    valid = log_scores > -torch.inf

    weights = torch.cat([pools.tail_weights for pools in levels])
    owners = torch.cat([offsets[:1], *expanded]) + offsets
    row_of = torch.zeros_like(positions[0])
    row_of[owners] = rows
    parents = torch.where(valid, torch.searchsorted(nodes, owners[row]), 0)
    return Tree(
        tokens=torch.cat([root.reshape(1), *(pools.tokens.flatten() for pools in levels)])[nodes],
        parents=parents,
        levels=level,
        kinds=torch.where(valid, kind, NO_KIND),
        valid=valid,
        log_scores=log_scores,
        mask=ancestor_mask(parents, valid, len(levels)),
        pool_rows=row_of[nodes],
        tail=in_target_vocabulary(
            torch.cat([pools.draft_tail for pools in levels]), growth.target_ids
        ),
        q_tail=torch.nan_to_num(
            weights / weights.sum(-1, keepdim=True)
        ),  # a tail without mass has no sampled child
        max_levels=len(levels),
    )


@lru_cache(maxsize=None)  # a CUDA graph reads it where it is
def layout(
    shapes: tuple[tuple[int, int], ...], kinds: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the root and the candidates stand; it follows from the options, and so is made once.

    Args:
        shapes: (parents, slots of a pool) of each level.
        kinds: of the slots of a pool.

    Returns:
        positions: int64 ``[3, 1 + C]`` row of its parent's pool, level and kind of the root and of each candidate, level by level, left to right.
        offsets: int64 ``[R]`` of the owner of each pool row, where the candidates of its level begin among all; 0 for the root.
        rows: int64 ``[R]`` 0, 1, ..., R - 1.
    """
    columns, offsets, row, start, end = (
        [torch.tensor([[0], [0], [NO_KIND]])],
        [torch.zeros(1, dtype=torch.long)],
        0,
        0,
        1,
    )
    for level, (parents, width) in enumerate(shapes, 1):
        if level > 1:
            offsets.append(torch.full((parents,), start))
        start, end = end, end + parents * width
        rows = torch.arange(row, row + parents).repeat_interleave(width)
        columns.append(
            torch.stack((rows, torch.full_like(rows, level), torch.tensor(kinds).repeat(parents)))
        )
        row += parents
    return (
        torch.cat(columns, 1).to(device),
        torch.cat(offsets).to(device),
        torch.arange(row, device=device),
    )


def best_first(scores: Tensor, count: int | None = None) -> tuple[Tensor, Tensor]:
    """The highest ``count`` scores (None: all) by fall, and their indices, ties in index order (``topk`` leaves the order of ties open)."""
    values, indices = scores.sort(descending=True, stable=True)
    return values[:count], indices[:count]


def ancestor_mask(parents: Tensor, valid: Tensor, max_levels: int) -> Tensor:
    """bool ``[N, N]``: which nodes each node sees, itself included; padding sees only itself.

    Doubling: a relation that reaches d levels up, composed with itself, reaches 2d.
    """
    itself = torch.eye(parents.numel(), dtype=torch.bool, device=parents.device)
    reach = (itself | (itself[parents] & valid[:, None])).float()
    for _ in range(max(max_levels - 1, 0).bit_length()):
        reach = (reach @ reach).clamp_max(1)
    return reach > 0
