"""Expected tokens a cycle at given contexts, the same for every arm: what whole generations are too noisy to tell apart."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle.model.decoding import DecodingOptions
from eagle.model.draft import DraftModel, DraftState, causal
from eagle.model.law import TargetLaw
from eagle.model.target import TargetModel
from rheo.acceptance import reach_probabilities
from rheo.draws import Draws
from rheo.tree import Tree, build_tree


@dataclass(frozen=True)
class Context:
    """One cycle's tree at a place of a text.

    Attributes:
        place: tokens of the text before the root.
        arm: index of the options.
        tree: the tree drawn.
        reach: ``[N]`` probability that verification visits each node; the sum is the expected accepted + 1.
    """

    place: int
    arm: int
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
    output = target.tree_forward(text, rows, rows <= rows[:, None], target.new_cache(text.numel()), draft.taps)
    features = draft.fuse(output.features[:-1].to(draft.dtype))
    hidden = draft(text[None, 1:], features[None], draft.angles(rows[:-1], features), causal, target.embedding)
    return output.logits, draft.logits(hidden[0])


@torch.inference_mode()
def contexts(
    target: TargetModel,
    draft: DraftModel,
    text: Tensor,
    places: list[int],
    arms: list[DecodingOptions],
    watch: Callable[[int, Tensor], None] = lambda arm, logits: None,
) -> Iterator[Context]:
    """Draft at some places of a text under several options, and weigh every outcome of the verification.

    At a place t the committed tokens are ``text[:t]`` and the root is ``text[t]``, as in the cycle that would begin there.

    Args:
        text: int64 ``[L]``.
        places: rising, each in 1..L-1.
        arms: each draws its trees from a generator of its own, seeded by ``options.seed`` and the place.
        watch: is shown the arm and the draft logits ``[P, draft_vocab]`` of all nodes that get a pool, call by call.
    """
    if not places or places != sorted(set(places)) or not 1 <= places[0] <= places[-1] < text.numel():
        raise ValueError(f"places are {places}; they must rise and lie in 1..{text.numel() - 1}")
    text = text.to(target.device)
    room = max(options.total_token for options in arms)
    cache = target.new_cache(text.numel() + room)
    state = DraftState(draft, target.embedding, text.numel() + max(o.depth * (o.top_k + 1) for o in arms))
    target_ids = draft.target_ids()
    done = 0
    for place in places:
        block = text[done:place]
        count = block.numel()
        before = torch.ones(count, count, dtype=torch.bool, device=text.device).tril()
        output = target.tree_forward(block, torch.arange(count, device=text.device), before, cache, draft.taps, 1)
        cache.advance(count)
        root = text[place]
        root_logits = state.commit(text[done + 1 : place + 1], output.features)
        for arm, options in enumerate(arms):
            state.forget_tree()
            draws = Draws(torch.Generator(device=text.device).manual_seed(options.seed * 1_000_003 + place))

            def expand(tokens, ranks, level, arm=arm):
                logits = state.expand(tokens, ranks, level)
                watch(arm, logits)
                return logits

            watch(arm, root_logits[None])
            tree = build_tree(root, root_logits, expand, options.tree, draws, target_ids)
            logits = target.tree_forward(tree.tokens, tree.levels, tree.mask, cache, []).logits
            law = TargetLaw(options.law)
            yield Context(place, arm, tree, reach_probabilities(tree, lambda node: law(logits[node]), options.verification or "rheo"))
        done = place
