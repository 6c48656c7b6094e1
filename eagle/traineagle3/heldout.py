"""The measure that training is judged by: expected tokens a cycle on conversations that it never sees."""

import hashlib
import json
from collections import defaultdict

import torch

from eagle.model.acceptance import contexts
from eagle.model.decoding import DecodingOptions
from eagle.model.draft import DraftModel
from eagle.model.law import SamplingOptions
from eagle.model.target import TargetModel
from eagle.traineagle3.corpus import Conversation


def split(corpus: list[Conversation], one_in: int) -> tuple[list[Conversation], list[Conversation]]:
    """(to train on, held out), one conversation in ``one_in`` held out, by a hash of its ids.

    A conversation stays on its side when the corpus grows, and a repeated one is on one side only.
    """
    sides: tuple[list, list] = [], []
    for conversation in corpus:
        digest = hashlib.sha256(json.dumps(conversation.ids).encode()).digest()
        sides[int.from_bytes(digest[:8], "big") % one_in == 0].append(conversation)
    return sides


class HeldOut:
    """Expected accepted + 1 of Top-K and Rheo m = 1 at evenly spread places of held-out answers, at temperature 1.

    Args:
        places: contexts of each conversation.
        tree: ``total_token``, ``depth`` and ``top_k``.
    """

    def __init__(self, target: TargetModel, conversations: list[Conversation], places: int, tree: dict[str, int]):
        self.target, self.texts = target, []
        law = SamplingOptions(temperature=1.0)
        self.arms = {
            "topk": DecodingOptions(law=law, sampling="topk", **tree),
            "rheo": DecodingOptions(law=law, sampling="rheo", m=1, **tree),
        }
        for conversation in conversations:
            start, end = len(conversation.prompt), len(conversation.ids) - 1
            step = max((end - start) // places, 1)
            where = list(range(start, end, step))[:places]
            if where:
                self.texts.append((torch.tensor(conversation.ids), where))

    def tau(self, draft: DraftModel) -> dict[str, float]:
        """Mean over all contexts, by arm."""
        sums, counts = defaultdict(float), defaultdict(int)
        names = list(self.arms)
        for text, where in self.texts:
            for context in contexts(self.target, draft, text, where, list(self.arms.values())):
                sums[names[context.arm]] += context.tau
                counts[names[context.arm]] += 1
        return {name: sums[name] / counts[name] for name in sums}
