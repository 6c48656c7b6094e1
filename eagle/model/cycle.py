"""One cycle of decoding: draft a tree, verify it, commit the accepted path."""

from dataclasses import dataclass
from math import exp
from typing import NamedTuple

import torch
from torch import Tensor

from eagle.model.cache import TargetCache
from eagle.model.draft import DraftModel, DraftState
from eagle.model.options import DecodingOptions
from eagle.model.sampling import TargetProbs
from eagle.model.target import TargetModel, TargetOutput
from rheo import (
    KIND_NAMES,
    Draws,
    Tree,
    VerifyResult,
    build_tree,
    pick,
    verify,
    verify_greedily,
)
from rheo.tree import NO_KIND


class NonFiniteLogits(RuntimeError):
    """The target produced NaN or infinite logits; no token was emitted from them.

    Args:
        dtype: the target's dtype.
    """

    def __init__(self, dtype: torch.dtype):
        super().__init__(
            f"the target's logits hold NaN or infinity in {dtype}: nothing was committed from "
            "them. Load the model with dtype='bf16' or dtype='fp32'."
        )


class Slot(NamedTuple):
    """A drafted child of a node that verification visited.

    Attributes:
        kind: slot kind (one of rheo.KIND_NAMES).
        proxy: score in the pool, an estimate of how often the slot is accepted.
        accepted: whether it was accepted.
    """

    kind: str
    proxy: float
    accepted: bool


@dataclass(frozen=True)
class Outcome:
    """What the CPU learns of a cycle.

    Attributes:
        tokens: emitted tokens: the accepted ones, then the bonus token.
        kinds: slot kinds (rheo.KIND_NAMES) of the accepted tokens.
        tried: for each visited node that has children, these children.
        finite: False where the target's logits were NaN or infinite at a visited node; then
            nothing may be emitted.
    """

    tokens: list[int]
    kinds: list[str]
    tried: list[list[Slot]]
    finite: bool


class Cycle:
    """The state that a request keeps from cycle to cycle, and the three phases of a cycle.

    Between two cycles ``root`` is the last emitted token. Neither cache holds it yet.

    Args:
        target: the target.
        draft: the draft head; not used for plain decoding, where every tree is a lone root.
        options: options of the request.
        length: the largest number of positions that the request can commit.

    Attributes:
        root: int64 ``[]`` the last emitted token.
        root_logits: ``[draft_vocab]`` draft logits at the root.
        tree: the draft tree of this cycle.
        output: the target's output over the tree.
        verified: which path was accepted.
    """

    root: Tensor
    root_logits: Tensor
    tree: Tree
    output: TargetOutput
    verified: VerifyResult

    def __init__(
        self,
        target: TargetModel,
        draft: DraftModel | None,
        options: DecodingOptions,
        length: int,
    ):
        self.target, self.draft_head, self.options, self.length = target, draft, options, length
        self.tree_options = options.tree
        self.target_probs = TargetProbs(options.warpers)
        self.generator = torch.Generator(device=target.device)
        self.draws = Draws(self.generator)
        # A GPU decides at all nodes in one pass, so that it never waits for the CPU.
        self.at_once = target.device.type != "cpu"
        self.cache = self.new_cache(length + max(options.total_token, options.depth + 2))
        self.aux_layers: list[int] = []
        self.state: DraftState | None = None
        self.target_ids: Tensor | None = None
        if options.sampling != "none":
            if draft is None:
                raise ValueError(f"sampling {options.sampling!r} needs a draft head")
            self.state = self.new_state(draft, length + options.depth * (options.tree_top_k + 1))
            self.aux_layers, self.target_ids = draft.aux_layers, draft.target_ids()
        self.pending: tuple | None = None  # arguments of ``DraftState.commit``, not yet run

    def new_cache(self, capacity: int) -> TargetCache:
        """An empty cache of the target."""
        return self.target.new_cache(capacity)

    def new_state(self, draft: DraftModel, capacity: int) -> DraftState:
        """An empty state of the draft head."""
        return DraftState(draft, self.target.embedding, capacity)

    def begin(self, seed: int) -> None:
        """Forget the last request, and seed the generator of this one."""
        self.generator.manual_seed(seed)
        self.cache.clear()
        if self.state is not None:
            self.state.buffer.clear()

    def prefill(self, prompt: Tensor) -> Tensor:
        """Run the prompt (int64 ``[L]``) through the target and sample the first token.

        Returns:
            The token, int64 ``[]``: the root of the first cycle.

        Raises:
            NonFiniteLogits: where the target's logits after the prompt are not finite.
        """
        output = self.target.prefill(prompt, self.cache, self.aux_layers)
        p = self.target_probs(output.logits[0])
        self.root = self.draws.token(p)
        if p.isnan().any():
            raise NonFiniteLogits(self.target.dtype)
        self.pending = torch.cat((prompt[1:], self.root[None])), output.features
        return self.root

    def prefill_draft(self) -> None:
        """Run the newly committed tokens through the head, with the target's true features."""
        if self.state is not None and self.pending is not None:
            self.root_logits = self.state.commit(*self.pending)
        self.pending = None

    def draft(self) -> None:
        """Grow a tree below the root."""
        self.prefill_draft()
        if self.state is None:
            self.tree = lone_root(self.root)
        else:
            self.tree = build_tree(
                self.root,
                self.root_logits,
                self.state.expand,
                self.tree_options,
                self.draws,
                self.target_ids,
            )

    def verify(self) -> None:
        """Run the target over the tree, then find the accepted path and the bonus token."""
        tree, at_once = self.tree, self.at_once
        self.output = output = self.target.tree_forward(
            tree.tokens, tree.levels, tree.mask, self.cache, self.aux_layers
        )

        def logits(node: Tensor) -> Tensor:
            return output.logits if at_once else pick(output.logits, node)

        if self.target_probs.greedy:
            self.verified = verify_greedily(tree, logits, at_once)
        else:
            self.verified = verify(
                tree,
                lambda node: self.target_probs(logits(node)),
                self.draws,
                self.options.verification or "rheo",
                at_once,
            )

    def commit(self, count: int) -> None:
        """Keep the accepted path in the target's cache.

        Args:
            count: number of emitted tokens.
        """
        path, tokens = self.verified.path[:count], self.verified.tokens[:count]
        self.cache.keep(path)
        self.root = tokens[-1]
        if self.state is not None:
            self.pending = tokens, self.output.features[path]


def summarise(tree: Tree, verified: VerifyResult) -> Tensor:
    """Everything that the CPU has to know of a cycle in one tensor (see ``to_cpu``).

    Returns:
        float64 ``[2 S + 2 + 3 N]`` for a path of at most S nodes and a tree of N nodes.
    """
    path = verified.tokens, verified.path, verified.count.reshape(1), verified.finite.reshape(1)
    return torch.cat((*path, tree.parents, tree.kinds, tree.log_scores.double()))


def to_cpu(summary: Tensor, nodes: int) -> Outcome:
    """Copy a cycle's summary to the CPU, the only copy of a cycle, and read it.

    Args:
        summary: from ``summarise``.
        nodes: number of nodes of the tree.
    """
    numbers = summary.tolist()
    walk, rest = numbers[: -3 * nodes], numbers[-3 * nodes :]
    *walk, count, finite = map(int, walk)
    steps = len(walk) // 2
    tokens, path = walk[:steps][:count], walk[steps:][:count]
    parents, kinds, scores = rest[:nodes], rest[nodes : 2 * nodes], rest[2 * nodes :]
    children: dict[int, list[Slot]] = {node: [] for node in path}
    for node, (parent, kind) in enumerate(zip(parents, kinds)):
        if kind != NO_KIND and parent in children:
            proxy = exp(scores[node] - scores[int(parent)])
            children[parent].append(Slot(KIND_NAMES[int(kind)], proxy, node in path))
    accepted_kinds = [KIND_NAMES[int(kinds[node])] for node in path[1:]]
    tried = [slots for slots in children.values() if slots]
    return Outcome(tokens, accepted_kinds, tried, bool(finite))


def lone_root(root: Tensor) -> Tree:
    """The tree of plain decoding: nothing is drafted, and verification samples one token from p."""
    zero = torch.zeros_like(root).reshape(1)
    true = torch.ones(1, dtype=torch.bool, device=root.device)
    nothing = torch.zeros(1, 1, device=root.device)
    return Tree(
        tokens=root.reshape(1),
        parents=zero,
        levels=zero,
        kinds=zero + NO_KIND,
        valid=true,
        log_scores=nothing[0],
        mask=true[None],
        pool_rows=zero,
        tail=zero[None],
        q_tail=nothing,
        max_levels=0,
    )
