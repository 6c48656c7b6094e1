"""The draft vocabulary: the target ids that a draft head can propose."""

import torch
from torch import Tensor

from eagle.traineagle3.corpus import Conversation


def choose_draft_ids(corpus: list[Conversation], size: int, vocab_size: int) -> Tensor:
    """The most frequent answer tokens, int64 ``[size]`` in rising order.

    If the answers hold fewer different tokens, the lowest unseen ids are added. The result is never
    0..size-1 unless it is the whole vocabulary: then all offsets ``d2t`` would be 0, which looks
    like a mapping that was never saved, and loaders refuse it. The least frequent of these ids is
    then replaced by the next id in the order of frequency.

    Args:
        corpus: the conversations.
        size: number of ids.
        vocab_size: number of tokens of the target.

    Raises:
        ValueError: if ``size`` is outside 1..vocab_size.
    """
    if not 1 <= size <= vocab_size:
        raise ValueError(
            f"draft_vocab_size is {size}; it must lie in 1..{vocab_size}, the target's vocabulary"
        )
    counts = torch.bincount(_answer_tokens(corpus), minlength=vocab_size)
    order = counts.sort(descending=True, stable=True).indices
    ids = order[:size].sort().values
    if size < vocab_size and torch.equal(ids, torch.arange(size)):
        ids = torch.cat((order[: size - 1], order[size : size + 1])).sort().values
    return ids


def coverage(corpus: list[Conversation], ids: Tensor, vocab_size: int) -> float:
    """Share of the answer tokens that are in the draft vocabulary.

    Args:
        corpus: the conversations.
        ids: int64 ``[draft_vocab]`` target ids of the draft vocabulary.
        vocab_size: number of tokens of the target.
    """
    held = torch.zeros(vocab_size, dtype=torch.bool)
    held[ids] = True
    return held[_answer_tokens(corpus)].double().mean().item()


def _answer_tokens(corpus: list[Conversation]) -> Tensor:
    """All answers in one row, int64 ``[tokens]``."""
    return torch.cat([torch.tensor(c.answer, dtype=torch.long) for c in corpus])
