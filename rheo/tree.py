"""Dynamic draft trees: expand, rerank, prune (paper section 3.1, after EAGLE-2)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from rheo.draws import Draws
from rheo.pool import SAMPLED, PoolOptions, Pools, build_pools, in_target_vocabulary

NO_KIND = -1  # kind of what was not drafted: the root and padding


@dataclass(frozen=True)
class TreeOptions:
    """Size of the draft tree.

    Attributes:
        pool: how each expanded node gets its candidates.
        total_token: number of nodes of the tree, the root included.
        depth: number of expansions after the root's own pool. The tree has at most ``depth + 1``
            levels below the root.

    Raises:
        ValueError: for a tree without a drafted node, or a negative depth.
    """

    pool: PoolOptions
    total_token: int = 60
    depth: int = 7

    def __post_init__(self):
        if self.total_token < 2:
            raise ValueError(
                f"total_token is {self.total_token}; "
                "it must be at least 2 (the root and one drafted node)"
            )
        if self.depth < 0:
            raise ValueError(f"depth is {self.depth}; it must be at least 0")


@dataclass(frozen=True)
class Tree:
    """A draft tree of N nodes in level order. Node 0 is the root, the last emitted token.

    N is fixed by the options, so that shapes are static. If there are fewer candidates, some
    nodes are padding: ``valid`` is False, they see only themselves, and verification never
    reaches them.

    Attributes:
        tokens: int64 ``[N]`` ids in the target vocabulary.
        parents: int64 ``[N]`` node index of the parent; 0 for the root itself.
        levels: int64 ``[N]`` distance from the root.
        kinds: int64 ``[N]`` slot kind (see ``rheo.pool``); NO_KIND for the root and padding.
        valid: bool ``[N]``, False for padding.
        log_scores: ``[N]`` log path score: the sum of the log scores from the root down.
        mask: bool ``[N, N]``; ``mask[i, j]`` is True if j is i or an ancestor of i.
        pool_rows: int64 ``[N]`` row of ``tail`` and ``q_tail`` of the node's own pool; 0 if the
            node was never expanded.
        tail: int64 ``[R, S - m]`` target ids of the tail of each of R expanded nodes.
        q_tail: ``[R, S - m]`` probabilities of ``tail``: the distribution of the sampled token.
        max_levels: number of levels below the root that the options allow.
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
        """False for the root and padding, bool ``[N]``."""
        return self.kinds != NO_KIND

    @cached_property
    def sampled(self) -> Tensor:
        """True for nodes from a sampled slot, bool ``[N]``."""
        return self.kinds == SAMPLED

    @cached_property
    def indices(self) -> Tensor:
        """Node indices 0, 1, ..., N - 1, int64 ``[N]``."""
        return torch.arange(self.tokens.numel(), device=self.tokens.device)

    def children(self, node: Tensor | int) -> Tensor:
        """The surviving children: bool ``[N]`` of one node, ``[n, N]`` of nodes ``[n, 1]``."""
        return (self.parents == node) & self.drafted


# Runs the draft head on F nodes of the newest level. Its arguments are their tokens [F], the rank
# of each node's parent among the nodes of the call before [F], and their level (1 for the root's
# children). It returns their draft logits [F, V].
Expand = Callable[[Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class Growth:
    """The root and all C candidates of a tree before pruning.

    Attributes:
        levels: the pools of each level, one row per expanded parent.
        scores: ``[1 + C]`` path scores of the root and of all candidates, level by level, left to
            right.
        expanded: per expansion the expanded nodes ``[F]`` in rank order, as indices among the
            candidates of their level.
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

    One total order decides which nodes are expanded and which candidates are kept: the higher path
    score first, then the shallower node, then the one further left. Candidates are stored level by
    level and left to right, so a stable sort by score is this order. No score exceeds 1, so the
    parent of a kept node is kept, too.

    Args:
        root: int64 ``[]`` the last emitted token.
        root_logits: ``[V]`` draft logits at the root.
        expand: runs the draft head on nodes of the newest level.
        options: size of the tree and of its pools.
        draws: samples the tokens of the sampled slots.
        target_ids: int64 ``[V]`` target id of each draft id; None if the vocabularies are equal.
    """
    growth = grow(root_logits, expand, options, draws, target_ids)
    return prune(root, growth, options.total_token)


def grow(
    root_logits: Tensor,
    expand: Expand,
    options: TreeOptions,
    draws: Draws,
    target_ids: Tensor | None = None,
) -> Growth:
    """Make the root's pool; then, ``depth`` times, the pools of the K best nodes of the last level.

    If a level has fewer than K nodes, the call is filled up with padding, so that shapes are
    static. The pools of padding score -inf and are never kept. Arguments as in ``build_tree``.
    """
    pool, device = options.pool, root_logits.device
    if pool.random:
        vocab = root_logits.shape[0]
        rows = 1 + options.depth * pool.size
        draws = draws.ahead(rows, min(pool.support or vocab, vocab), device)
    levels = [build_pools(root_logits[None], pool, draws, target_ids)]
    scores = [torch.zeros(1, device=device), levels[0].log_proxy.flatten()]
    expanded = []
    for level in range(1, options.depth + 1):
        parents = levels[-1]
        best, order = best_first(scores[-1], pool.size)
        tokens = parents.tokens.flatten().index_select(0, order)
        logits = expand(tokens, order // parents.tokens.shape[1], level)
        levels.append(build_pools(logits, pool, draws, target_ids))
        expanded.append(order)
        scores.append((best[:, None] + levels[-1].log_proxy).flatten())
    return Growth(levels, torch.cat(scores), expanded, target_ids)


def prune(root: Tensor, growth: Growth, total_token: int) -> Tree:
    """Keep the root and the best ``total_token - 1`` candidates, and store them as a ``Tree``.

    The root always ranks first: no score exceeds its own, and it comes before its equals.
    """
    levels, expanded = growth.levels, growth.expanded
    shapes = tuple(tuple(pools.tokens.shape) for pools in levels)
    table, offsets, rows = layout(shapes, levels[0].kinds, growth.scores.device)
    best = best_first(growth.scores, total_token)[1]
    nodes = best.sort().values  # back to level order: parents before children
    row, level, kind = table[:, nodes]
    log_scores = growth.scores[nodes]
    valid = log_scores > -torch.inf

    # Index of the candidate below which each pool stands (row 0: the root).
    owners = torch.cat([offsets[:1], *expanded]) + offsets
    row_of = torch.zeros_like(table[0])
    row_of[owners] = rows
    parents = torch.where(valid, torch.searchsorted(nodes, owners[row]), 0)
    tokens = torch.cat([root.reshape(1), *(pools.tokens.flatten() for pools in levels)])
    draft_tail = torch.cat([pools.draft_tail for pools in levels])
    weights = torch.cat([pools.tail_weights for pools in levels])
    q_tail = weights / weights.sum(-1, keepdim=True)
    return Tree(
        tokens=tokens[nodes],
        parents=parents,
        levels=level,
        kinds=torch.where(valid, kind, NO_KIND),
        valid=valid,
        log_scores=log_scores,
        mask=ancestor_mask(parents, valid, len(levels)),
        pool_rows=row_of[nodes],
        tail=in_target_vocabulary(draft_tail, growth.target_ids),
        q_tail=torch.nan_to_num(q_tail),  # a tail without mass has no sampled child
        max_levels=len(levels),
    )


@cache  # one tensor for all calls: a CUDA graph reads it at a fixed address
def layout(
    shapes: tuple[tuple[int, int], ...], kinds: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """How the root and the C candidates are stored. It follows from the options alone.

    Args:
        shapes: (parents, slots of a pool) of each level.
        kinds: kinds of the slots of a pool.
        device: where the tensors are made.

    Returns:
        table: int64 ``[3, 1 + C]``. For the root and each candidate: the pool row that it comes
            from, its level, its kind.
        offsets: int64 ``[R]``. For each pool row: the index at which the level of its owner begins
            among all candidates; 0 for the root.
        rows: int64 ``[R]`` 0, 1, ..., R - 1.
    """
    columns = [torch.tensor([[0], [0], [NO_KIND]])]
    offsets = [torch.zeros(1, dtype=torch.long)]
    row, start, end = 0, 0, 1
    for level, (parents, width) in enumerate(shapes, 1):
        if level > 1:
            offsets.append(torch.full((parents,), start))
        start, end = end, end + parents * width
        rows = torch.arange(row, row + parents).repeat_interleave(width)
        kind = torch.tensor(kinds).repeat(parents)
        columns.append(torch.stack((rows, torch.full_like(rows, level), kind)))
        row += parents
    table = torch.cat(columns, 1).to(device)
    return table, torch.cat(offsets).to(device), torch.arange(row, device=device)


def best_first(scores: Tensor, count: int | None = None) -> tuple[Tensor, Tensor]:
    """The highest ``count`` scores (None: all), falling, and their indices.

    Ties stay in index order. ``topk`` would leave their order open.
    """
    values, indices = scores.sort(descending=True, stable=True)
    return values[:count], indices[:count]


def ancestor_mask(parents: Tensor, valid: Tensor, max_levels: int) -> Tensor:
    """Which nodes each node sees: itself and its ancestors; padding sees only itself.

    Computed by doubling: a relation that reaches d levels up, applied twice, reaches 2d levels up.

    Returns:
        bool ``[N, N]``.
    """
    itself = torch.eye(parents.numel(), dtype=torch.bool, device=parents.device)
    reach = (itself | (itself[parents] & valid[:, None])).float()
    for _ in range(max(max_levels - 1, 0).bit_length()):
        reach = (reach @ reach).clamp_max(1)
    return reach > 0
