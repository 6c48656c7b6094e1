"""Training conversations: JSON Lines, gzipped where the name ends in ``.gz``, one exchange a line.

    p   prompt ids, the chat template's answer header included
    r   answer ids, the end-of-turn token included where the target wrote one
    T   temperature at which the target wrote the answer
"""

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Conversation:
    """Token ids of one exchange; ``temperature`` is that of the answer."""

    prompt: list[int]
    answer: list[int]
    temperature: float

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.answer

    def to_json(self) -> str:
        """One line of a corpus file, without its end."""
        return json.dumps({"p": self.prompt, "r": self.answer, "T": self.temperature}, separators=(",", ":"))


def read_corpus(paths: Iterable[Path], vocab_size: int) -> list[Conversation]:
    """All conversations of some files, in order.

    Raises:
        ValueError: naming the line that is not a conversation, or holds ids outside the vocabulary.
    """
    conversations = []
    for path in map(Path, paths):
        opened = gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")
        with opened as file:
            for number, line in enumerate(file, 1):
                try:
                    record = json.loads(line)
                    conversation = Conversation(record["p"], record["r"], record["T"])
                    lowest, highest = min(conversation.ids), max(conversation.ids)
                except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
                    raise ValueError(f"{path}, line {number}: not a conversation with p, r and T ({error!r})") from error
                if lowest < 0 or highest >= vocab_size:
                    raise ValueError(f"{path}, line {number}: ids {lowest}..{highest} outside the vocabulary 0..{vocab_size - 1}")
                conversations.append(conversation)
    if not conversations:
        raise ValueError(f"no conversations in {', '.join(map(str, paths))}")
    return conversations
