"""The measure that training is judged by: expected tokens a cycle on conversations that it never sees."""

import torch
from torch import Tensor

from eagle.model.acceptance import contexts
from eagle.model.decoding import DecodingOptions
from eagle.model.draft import DraftModel
from eagle.model.law import SamplingOptions
from eagle.model.target import TargetModel
from eagle.traineagle3.corpus import Conversation, digest


def split(corpus: list[Conversation], one_in: int) -> tuple[list[Conversation], list[Conversation]]:
    """(to train on, held out), one prompt in ``one_in`` held out, by a hash of its ids.

    A prompt stays on its side when the corpus grows, with all its answers.
    """
    sides: tuple[list, list] = [], []
    for conversation in corpus:
        sides[int(digest([conversation.prompt])[:16], 16) % one_in == 0].append(conversation)
    return sides


class HeldOut:
    """Expected accepted + 1 of Top-K and Rheo m = 1 at evenly spread places of held-out answers, at temperature 1.

    Args:
        places: contexts of each conversation.
        max_length: tokens of a conversation; the rest is cut off.
        tree: ``total_token``, ``depth`` and ``top_k``.
    """

    def __init__(self, target: TargetModel, conversations: list[Conversation], places: int, max_length: int, tree: dict[str, int]):
        self.target, self.texts = target, []
        law = SamplingOptions(temperature=1.0)
        self.arms = {
            "topk": DecodingOptions(law=law, sampling="topk", **tree),
            "rheo": DecodingOptions(law=law, sampling="rheo", m=1, **tree),
        }
        for conversation in conversations:
            ids = conversation.ids[:max_length]
            start, end = len(conversation.prompt), len(ids) - 1
            step = max((end - start) // places, 1)
            where = list(range(start, end, step))[:places]
            if where:
                self.texts.append((torch.tensor(ids, dtype=torch.long), where))

    def sums(self, draft: DraftModel, process: int = 0, processes: int = 1) -> Tensor:
        """float64 ``[arms + 1]`` of every ``processes``-th conversation: the sum of tau by arm, and the number of contexts."""
        found = torch.zeros(len(self.arms) + 1, dtype=torch.float64)
        for text, where in self.texts[process::processes]:
            found[-1] += len(where)
            for context in contexts(self.target, draft, text, where, list(self.arms.values())):
                found[context.arm] += context.tau
        return found

    def tau(self, sums: Tensor) -> dict[str, float]:
        """Mean over all contexts, by arm, from the ``sums`` of all processes."""
        return dict(zip(self.arms, (sums[:-1] / sums[-1]).tolist()))
