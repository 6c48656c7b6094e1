"""Dynamic draft trees: expand, rerank, prune, under one total order (paper section 3.1, EAGLE-2)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from rheo.draws import Draws
from rheo.pool import SAMPLED, PoolOptions, Pools, build_pools

NO_KIND = -1  # the root was not drafted


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
            raise ValueError(f"total_token is {self.total_token}; it must be at least 2 (the root and one drafted node)")
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
        kinds: int64 ``[N]`` slot kind (rheo.pool), NO_KIND for the root.
        valid: bool ``[N]``.
        log_scores: ``[N]`` path score; 0 for the root.
        mask: bool ``[N, N]``, ``mask[i, j]`` where j is i or an ancestor of i.
        pool_rows: int64 ``[N]`` row of ``tail`` and ``q_tail`` that holds the node's pool; 0 where never expanded.
        tail: int64 ``[R, S - m]``, and q_tail ``[R, S - m]``: the law of every expanded node's sampled slot (rheo.pool.Pools).
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
        return self.valid & (self.levels > 0)

    @cached_property
    def sampled(self) -> Tensor:
        """bool ``[N]``: in a sampled slot."""
        return self.drafted & (self.kinds == SAMPLED)

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
    """All candidates of a tree before pruning.

    Attributes:
        levels: the pools of each level, one row per expanded parent.
        scores: ``[C]`` path scores of all candidates, level by level, left to right.
        expanded: per expansion the expanded nodes ``[F]`` in rank order, as indices among the candidates of their level.
    """

    levels: list[Pools]
    scores: Tensor
    expanded: list[Tensor]


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
    root_logits: Tensor, expand: Expand, options: TreeOptions, draws: Draws, target_ids: Tensor | None = None
) -> Growth:
    """Level 1 is the root's pool; then, ``depth`` times, the K best nodes of the newest level get theirs.

    Where fewer than K nodes exist, the call is filled up with padding, so that shapes are static; the pools of
    padding score -inf and are never kept.
    """
    pool = options.pool
    if pool.random:
        vocab = root_logits.shape[0]
        draws = draws.ahead(1 + options.depth * pool.size, min(pool.support or vocab, vocab), root_logits.device)
    levels = [build_pools(root_logits[None], pool, draws, target_ids)]
    scores = [levels[0].log_proxy.flatten()]
    expanded = []
    for level in range(1, options.depth + 1):
        parents, (best, order) = levels[-1], best_first(scores[-1], pool.size)
        logits = expand(parents.tokens.flatten().index_select(0, order), order // parents.tokens.shape[1], level)
        levels.append(build_pools(logits, pool, draws, target_ids))
        expanded.append(order)
        scores.append((best[:, None] + levels[-1].log_proxy).flatten())
    return Growth(levels, torch.cat(scores), expanded)


def prune(root: Tensor, growth: Growth, total_token: int) -> Tree:
    """Keep the best ``total_token - 1`` candidates of all levels and lay them out as a ``Tree``.

    The root stands behind the C candidates, at index C, wherever something is looked up by candidate.
    """
    levels, scores, expanded = growth.levels, growth.scores, growth.expanded
    device, n_candidates = scores.device, scores.numel()
    keep = best_first(scores, total_token - 1)[1].sort().values  # back to level order: parents first
    nodes = pad(keep, (1, 0), value=n_candidates)
    places, first = layout(tuple(tuple(pools.tokens.shape) for pools in levels), device)
    parent_row, depth, slot = places[:, nodes]
    log_scores = pad(scores, (0, 1))[nodes]
    valid = log_scores > -torch.inf

    # Pool row 0 belongs to the root, row r to the r-th expanded candidate.
    row_owner = pad(torch.cat([keep[:0], *expanded]), (1, 0)) + first  # of depth 0 nothing is expanded
    node_of = torch.zeros(n_candidates + 1, dtype=torch.long, device=device)
    node_of[nodes] = torch.arange(nodes.numel(), device=device)
    row_of = torch.zeros(n_candidates + 1, dtype=torch.long, device=device)
    row_of[row_owner] = torch.arange(row_owner.numel(), device=device)
    parents = torch.where(valid, node_of[row_owner[parent_row]], 0)
    return Tree(
        tokens=torch.cat([*(pools.tokens.flatten() for pools in levels), root.reshape(1)])[nodes],
        parents=parents,
        levels=depth,
        kinds=pad(levels[0].kinds, (0, 1), value=NO_KIND)[slot],
        valid=valid,
        log_scores=log_scores,
        mask=ancestor_mask(parents, valid, len(levels)),
        pool_rows=row_of[nodes],
        tail=torch.cat([pools.tail for pools in levels]),
        q_tail=torch.cat([pools.q_tail for pools in levels]),
        max_levels=len(levels),
    )


@lru_cache(maxsize=None)  # a CUDA graph reads it where it is
def layout(shapes: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Where candidates stand; it follows from the options, and so is made once.

    Args:
        shapes: (parents, slots of a pool) of each level.

    Returns:
        int64 ``[3, C + 1]``, row of its parent's pool, level and slot of each candidate, level by level, left to right; then the root's, which is
        of level 0 and in a slot of its own, behind those of a pool. And int64 ``[R]``, for each pool row the first candidate of the
        level that its owner is of; for row 0 the root.
    """
    columns, first, row, start, end = [], [], 0, 0, 0
    for level, (parents, width) in enumerate(shapes, 1):
        if level > 1:
            first.append(torch.full((parents,), start))
        start, end = end, end + parents * width
        rows = torch.arange(row, row + parents).repeat_interleave(width)
        columns.append(torch.stack((rows, torch.full_like(rows, level), torch.arange(width).repeat(parents))))
        row += parents
    columns.append(torch.tensor([[0], [0], [shapes[0][1]]]))
    return torch.cat(columns, 1).to(device), torch.cat([torch.tensor([end]), *first]).to(device)


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
