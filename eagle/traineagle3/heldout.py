"""The measure that training is judged by: expected tokens a cycle on conversations that it never sees."""

import torch
from torch import Tensor

from eagle.model.draft.network import DraftModel
from eagle.model.options import DecodingOptions
from eagle.model.sampling import WarperOptions
from eagle.model.target import TargetModel
from eagle.model.tuning.contexts import contexts
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
        positions: contexts of each conversation.
        max_length: tokens of a conversation; the rest is cut off.
        tree: ``total_token``, ``depth`` and ``top_k``.
    """

    def __init__(
        self,
        target: TargetModel,
        conversations: list[Conversation],
        positions: int,
        max_length: int,
        tree: dict[str, int],
    ):
        self.target, self.texts = target, []
        warpers = WarperOptions(temperature=1.0)
        self.methods = {
            "topk": DecodingOptions(warpers=warpers, sampling="topk", **tree),
            "rheo": DecodingOptions(warpers=warpers, sampling="rheo", m=1, **tree),
        }
        for conversation in conversations:
            ids = conversation.ids[:max_length]
            start, end = len(conversation.prompt), len(ids) - 1
            step = max((end - start) // positions, 1)
            where = list(range(start, end, step))[:positions]
            if where:
                self.texts.append((torch.tensor(ids, dtype=torch.long), where))

    def sums(self, draft: DraftModel, process: int = 0, processes: int = 1) -> Tensor:
        """float64 ``[methods + 1]`` of every ``processes``-th conversation: the sum of tau by method, and the number of contexts."""
        found = torch.zeros(len(self.methods) + 1, dtype=torch.float64)
        for text, where in self.texts[process::processes]:
            found[-1] += len(where)
            for context in contexts(self.target, draft, text, where, list(self.methods.values())):
                found[context.method] += context.tau
        return found

    def tau(self, sums: Tensor) -> dict[str, float]:
        """Mean over all contexts, by method, from the ``sums`` of all processes."""
        return dict(zip(self.methods, (sums[:-1] / sums[-1]).tolist()))
