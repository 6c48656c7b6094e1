"""Expected tokens a cycle at given contexts, the same for every method: what whole generations are too noisy to tell apart."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle.model.draft.network import DraftModel, causal
from eagle.model.draft.state import DraftState
from eagle.model.options import DecodingOptions
from eagle.model.sampling import TargetProbs
from eagle.model.target import TargetModel
from rheo.analysis.expected import reach_probabilities
from rheo.draws import Draws
from rheo.tree import Tree, build_tree


@dataclass(frozen=True)
class Context:
    """One cycle's tree at a place of a text.

    Attributes:
        position: tokens of the text before the root.
        method: index of the options.
        tree: the tree drawn.
        reach: ``[N]`` probability that verification visits each node; the sum is the expected accepted + 1.
    """

    position: int
    method: int
    tree: Tree
    reach: Tensor

    @property
    def tau(self) -> float:
        return self.reach.sum().item()


@torch.inference_mode()
def paired_logits(target: TargetModel, draft: DraftModel, text: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of target ``[L, V]`` and head ``[L - 1, draft V]`` along a text ``[L]``.

    Row t of the target and row t - 1 of the head are about the same token, t + 1.
    """
    text = text.to(target.device)
    rows = torch.arange(text.numel(), device=text.device)
    output = target.tree_forward(
        text, rows, rows <= rows[:, None], target.new_cache(text.numel()), draft.aux_layers
    )
    features = draft.fuse(output.features[:-1].to(draft.dtype))
    hidden = draft(
        text[None, 1:], features[None], draft.angles(rows[:-1], features), causal, target.embedding
    )
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
    """Draft at some places of a text under several options, and weigh every outcome of the verification.

    At a place t the committed tokens are ``text[:t]`` and the root is ``text[t]``, as in the cycle that would begin there.

    Args:
        text: int64 ``[L]``.
        positions: rising, each in 1..L-1.
        methods: each draws its trees from a generator of its own, seeded by ``options.seed`` and the place.
        watch: is shown the method and the draft logits ``[P, draft_vocab]`` of all nodes that get a pool, call by call.
    """
    if (
        not positions
        or positions != sorted(set(positions))
        or not 1 <= positions[0] <= positions[-1] < text.numel()
    ):
        raise ValueError(f"places are {positions}; they must rise and lie in 1..{text.numel() - 1}")
    text = text.to(target.device)
    room = max(options.total_token for options in methods)
    cache = target.new_cache(text.numel() + room)
    state = DraftState(
        draft, target.embedding, text.numel() + max(o.depth * (o.tree_top_k + 1) for o in methods)
    )
    target_ids = draft.target_ids()
    done = 0
    for position in positions:
        block = text[done:position]
        count = block.numel()
        before = torch.ones(count, count, dtype=torch.bool, device=text.device).tril()
        output = target.tree_forward(
            block, torch.arange(count, device=text.device), before, cache, draft.aux_layers, 1
        )
        cache.advance(count)
        root = text[position]
        root_logits = state.commit(text[done + 1 : position + 1], output.features)
        for method, options in enumerate(methods):
            state.forget_tree()
            draws = Draws(
                torch.Generator(device=text.device).manual_seed(options.seed * 1_000_003 + position)
            )

            def expand(tokens, ranks, level, method=method):
                logits = state.expand(tokens, ranks, level)
                watch(method, logits)
                return logits

            watch(method, root_logits[None])
            tree = build_tree(root, root_logits, expand, options.tree, draws, target_ids)
            logits = target.tree_forward(tree.tokens, tree.levels, tree.mask, cache, []).logits
            probs = TargetProbs(options.warpers)
            yield Context(
                position,
                method,
                tree,
                reach_probabilities(
                    tree, lambda node: probs(logits[node]), options.verification or "rheo"
                ),
            )
        done = position
