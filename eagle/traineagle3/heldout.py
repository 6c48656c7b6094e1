"""Expected tokens per cycle on conversations that training never sees."""

import torch
from torch import Tensor

from eagle.model.draft.network import DraftModel
from eagle.model.options import DecodingOptions
from eagle.model.sampling import WarperOptions
from eagle.model.target import TargetModel
from eagle.model.tuning.contexts import contexts
from eagle.traineagle3.corpus import Conversation, digest

HELD_OUT_ONE_IN = 50  # one prompt in so many is held out


def split(corpus: list[Conversation], one_in: int) -> tuple[list[Conversation], list[Conversation]]:
    """Split conversations into those to train on and those to hold out.

    A hash of the prompt decides. So all answers to a prompt are on the same side, and stay there
    when the corpus grows.

    Args:
        corpus: all conversations.
        one_in: one prompt in so many is held out, on average.
    """
    train, held_out = [], []
    for conversation in corpus:
        prompt_hash = int(digest([conversation.prompt])[:16], 16)
        (held_out if prompt_hash % one_in == 0 else train).append(conversation)
    return train, held_out


class HeldOut:
    """Measures tau (accepted + 1 per cycle) of Top-K and of Rheo with m = 1, at temperature 1.

    It is the exact expectation at positions that are spread evenly over each answer.

    Args:
        target: the target.
        conversations: the held-out conversations. One without an answer token after the first
            within ``max_length`` is left out.
        positions: number of positions in each conversation.
        max_length: number of tokens of a conversation that are used; the rest is cut off.
        tree: ``total_token``, ``depth`` and ``tree_top_k`` of ``DecodingOptions``.

    Attributes:
        methods: decoding options by method.
        texts: int64 token ids of each conversation, and its positions.
    """

    def __init__(
        self,
        target: TargetModel,
        conversations: list[Conversation],
        positions: int,
        max_length: int,
        tree: dict[str, int],
    ):
        self.target = target
        warpers = WarperOptions(temperature=1.0)
        self.methods = {
            "topk": DecodingOptions(warpers=warpers, sampling="topk", **tree),
            "rheo": DecodingOptions(warpers=warpers, sampling="rheo", m=1, **tree),
        }
        self.texts: list[tuple[Tensor, list[int]]] = []
        for conversation in conversations:
            ids = conversation.ids[:max_length]
            start, end = len(conversation.prompt), len(ids) - 1
            spacing = max((end - start) // positions, 1)
            spread = list(range(start, end, spacing))[:positions]
            if spread:
                self.texts.append((torch.tensor(ids, dtype=torch.long), spread))

    def sums(self, draft: DraftModel, process: int = 0, processes: int = 1) -> Tensor:
        """Measure a process's share of the conversations.

        Returns:
            float64 ``[methods + 1]``: the sum of tau for each method, then the number of positions.
        """
        sums = torch.zeros(len(self.methods) + 1, dtype=torch.float64)
        methods = list(self.methods.values())
        for text, positions in self.texts[process::processes]:
            sums[-1] += len(positions)
            for context in contexts(self.target, draft, text, positions, methods):
                sums[context.method] += context.tau
        return sums

    def tau(self, sums: Tensor) -> dict[str, float]:
        """Mean tau by method, from the ``sums`` of all processes added up."""
        return dict(zip(self.methods, (sums[:-1] / sums[-1]).tolist()))
