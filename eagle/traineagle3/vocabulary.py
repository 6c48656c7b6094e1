"""The draft vocabulary: the target ids that a head can propose."""

import torch
from torch import Tensor

from eagle.traineagle3.corpus import Conversation


def choose_draft_ids(corpus: list[Conversation], size: int, vocab_size: int) -> Tensor:
    """int64 ``[size]``, rising: the ``size`` most frequent answer tokens.

    Where the answers hold fewer different tokens, the lowest unseen ids fill the rest. Should these be the ids 0..size-1, the last of
    them gives way to the next id: offsets that are all 0 look like a mapping that was never saved, and loaders refuse it.

    Raises:
        ValueError: for a size outside 1..vocab_size.
    """
    if not 1 <= size <= vocab_size:
        raise ValueError(
            f"draft_vocab_size is {size}; it must lie in 1..{vocab_size}, the target's vocabulary"
        )
    counts = torch.bincount(
        torch.cat([torch.tensor(conversation.answer) for conversation in corpus]),
        minlength=vocab_size,
    )
    order = counts.sort(descending=True, stable=True).indices
    ids = order[:size].sort().values
    if size < vocab_size and torch.equal(ids, torch.arange(size)):
        ids = torch.cat((order[: size - 1], order[size : size + 1])).sort().values
    return ids


def coverage(corpus: list[Conversation], ids: Tensor, vocab_size: int) -> float:
    """Share of the answer tokens that the draft vocabulary holds."""
    held = torch.zeros(vocab_size, dtype=torch.bool)
    held[ids] = True
    answers = torch.cat([torch.tensor(conversation.answer) for conversation in corpus])
    return held[answers].double().mean().item()
