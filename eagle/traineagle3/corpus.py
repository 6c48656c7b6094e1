"""Training conversations: JSON Lines, gzipped where the name ends in ``.gz``, one exchange a line.

p   prompt ids, the chat template's answer header included
r   answer ids, the end-of-turn token included where the target wrote one
T   temperature at which the target wrote the answer
"""

import gzip
import hashlib
import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Conversation:
    """Token ids of one exchange; ``temperature`` is that of the answer."""

    prompt: Sequence[int]
    answer: Sequence[int]
    temperature: float

    @property
    def ids(self) -> Sequence[int]:
        return self.prompt + self.answer

    def to_json(self) -> str:
        """One line of a corpus file, without its end."""
        return json.dumps(
            {"p": list(self.prompt), "r": list(self.answer), "T": self.temperature},
            separators=(",", ":"),
        )


def digest(ids: Iterable[Sequence[int]]) -> str:
    """A hash of some texts in their order."""
    found = hashlib.sha256()
    for text in ids:
        found.update(array("i", text).tobytes() + b"|")
    return found.hexdigest()


def read_corpus(paths: Sequence[str | Path], vocab_size: int) -> list[Conversation]:
    """All conversations of some files, in order.

    Raises:
        ValueError: naming the line that is not a conversation, has an empty side, or holds ids outside the vocabulary; or the file
            that is cut off.
    """
    conversations = []
    for path in map(Path, paths):
        opened = (
            gzip.open(path, "rt", encoding="utf-8")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8")
        )
        try:
            with opened as file:
                conversations += [
                    _parse(line, f"{path}, line {number}", vocab_size)
                    for number, line in enumerate(file, 1)
                ]
        except EOFError as error:
            raise ValueError(
                f"{path} is cut off: it is still being written, or its end is lost"
            ) from error
    if not conversations:
        raise ValueError(f"no conversations in {', '.join(map(str, paths))}")
    return conversations


def _parse(line: str, where: str, vocab_size: int) -> Conversation:
    try:
        record = json.loads(line)
        # Arrays, since a hundred thousand lists of Python integers fill gigabytes.
        conversation = Conversation(array("i", record["p"]), array("i", record["r"]), record["T"])
    except (json.JSONDecodeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{where}: not a conversation with p, r and T ({error!r})") from error
    if not conversation.prompt or not conversation.answer:
        raise ValueError(f"{where}: an empty prompt or answer")
    lowest, highest = min(conversation.ids), max(conversation.ids)
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(
            f"{where}: ids {lowest}..{highest} outside the vocabulary 0..{vocab_size - 1}"
        )
    return conversation
