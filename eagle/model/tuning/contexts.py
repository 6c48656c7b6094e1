"""Expected tokens per cycle at given contexts, the same contexts for every method.

This compares methods whose difference is smaller than the noise of whole generations.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle.model.cache import TargetCache
from eagle.model.draft import DraftModel, DraftState
from eagle.model.draft.network import causal
from eagle.model.options import DecodingOptions
from eagle.model.sampling import TargetProbs
from eagle.model.target import TargetModel, TargetOutput
from rheo.analysis.expected import reach_probabilities
from rheo.draws import Draws
from rheo.tree import Tree, build_tree


@dataclass(frozen=True)
class Context:
    """The draft tree of one cycle at a position of a text.

    Attributes:
        position: number of tokens of the text before the root.
        method: index of the method's options.
        tree: the draft tree.
        reach: ``[N]`` probability that verification visits each node.
    """

    position: int
    method: int
    tree: Tree
    reach: Tensor

    @property
    def tau(self) -> float:
        """Expected number of tokens of the cycle, accepted + 1."""
        return self.reach.sum().item()


@torch.inference_mode()
def paired_logits(target: TargetModel, draft: DraftModel, text: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of the target and of the draft head along a text.

    Args:
        target: the target.
        draft: its draft head.
        text: int64 ``[L]``.

    Returns:
        The target's logits ``[L, V]`` and the head's ``[L - 1, draft_vocab]``. Row t of the target
        and row t - 1 of the head predict the same token, t + 1.
    """
    text = text.to(target.device)
    output = run_text(target, text, target.new_cache(text.numel()), draft.aux_layers)
    features = draft.fuse(output.features[:-1].to(draft.dtype))
    positions = torch.arange(text.numel() - 1, device=text.device)
    angles = draft.angles(positions, features)
    hidden = draft(text[None, 1:], features[None], angles, causal, target.embedding)
    return output.logits, draft.logits(hidden[0])


@torch.inference_mode()
def contexts(
    target: TargetModel,
    draft: DraftModel,
    text: Tensor,
    positions: list[int],
    methods: list[DecodingOptions],
    watch: Callable[[int, Tensor], None] = lambda method, logits: None,
) -> Iterator[Context]:
    """Draft at some positions of a text under several options, and compute expected acceptance.

    At position t the committed tokens are ``text[:t]`` and the root is ``text[t]``, as in the
    cycle that would begin there. Nothing is sampled in verification: every outcome is weighted by
    its probability.

    Args:
        target: the target.
        draft: its draft head.
        text: int64 ``[L]``.
        positions: rising, each in 1..L-1.
        methods: the options. Each method samples its trees with a generator of its own, seeded by
            ``options.seed`` and the position.
        watch: called with the index of the method and the draft logits ``[P, draft_vocab]`` of
            nodes that get a pool, once for every call of the head.

    Yields:
        For each position in turn, one context per method.

    Raises:
        ValueError: for other positions.
    """
    length = text.numel()
    rising = positions == sorted(set(positions))
    if not positions or not rising or not 1 <= positions[0] <= positions[-1] < length:
        raise ValueError(f"positions are {positions}; they must rise and lie in 1..{length - 1}")
    text = text.to(target.device)
    cache = target.new_cache(length + max(options.total_token for options in methods))
    tree_rows = max(options.depth * (options.tree_top_k + 1) for options in methods)
    state = DraftState(draft, target.embedding, length + tree_rows)
    target_ids = draft.target_ids()
    done = 0
    for position in positions:
        output = run_text(target, text[done:position], cache, draft.aux_layers, logits_to_keep=1)
        root_logits = state.commit(text[done + 1 : position + 1], output.features)
        done = position
        for method, options in enumerate(methods):
            generator = torch.Generator(device=text.device)
            generator.manual_seed(options.seed * 1_000_003 + position)

            def expand(tokens: Tensor, parent_ranks: Tensor, level: int, method=method) -> Tensor:
                logits = state.expand(tokens, parent_ranks, level)
                watch(method, logits)
                return logits

            state.forget_tree()
            watch(method, root_logits[None])
            root = text[position]
            draws = Draws(generator)
            tree = build_tree(root, root_logits, expand, options.tree, draws, target_ids)
            logits = target.tree_forward(tree.tokens, tree.levels, tree.mask, cache, []).logits
            yield Context(position, method, tree, visit_probabilities(tree, logits, options))


def run_text(
    target: TargetModel,
    tokens: Tensor,
    cache: TargetCache,
    aux_layers: list[int],
    logits_to_keep: int = 0,
) -> TargetOutput:
    """Run tokens ``[n]`` of a text behind the committed ones, and commit them."""
    rows = torch.arange(tokens.numel(), device=tokens.device)
    causal_mask = rows <= rows[:, None]
    output = target.tree_forward(tokens, rows, causal_mask, cache, aux_layers, logits_to_keep)
    cache.advance(tokens.numel())
    return output


def visit_probabilities(tree: Tree, logits: Tensor, options: DecodingOptions) -> Tensor:
    """Probability ``[N]`` that verification visits each node, from target logits ``[N, V]``."""
    probs = TargetProbs(options.warpers)
    return reach_probabilities(
        tree, lambda node: probs(logits[node]), options.verification or "rheo"
    )
