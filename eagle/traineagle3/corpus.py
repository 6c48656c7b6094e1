"""Training conversations in JSON Lines files, gzipped if the name ends in ``.gz``.

Each line holds one prompt and one answer:

p   prompt ids, up to and including the chat template's header of the answer
r   answer ids, including the end-of-turn token if the target wrote one
T   temperature at which the target wrote the answer
"""

import gzip
import hashlib
import json
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Conversation:
    """A prompt and its answer.

    Attributes:
        prompt: token ids.
        answer: token ids.
        temperature: at which the answer was sampled.
    """

    prompt: Sequence[int]
    answer: Sequence[int]
    temperature: float

    @property
    def ids(self) -> Sequence[int]:
        """Token ids of the prompt and the answer."""
        return self.prompt + self.answer

    def to_json(self) -> str:
        """The line of a corpus file, without the newline."""
        record = {"p": list(self.prompt), "r": list(self.answer), "T": self.temperature}
        return json.dumps(record, separators=(",", ":"))


def digest(texts: Iterable[Sequence[int]]) -> str:
    """SHA-256 of the token ids of some texts, in hexadecimal; their order counts."""
    found = hashlib.sha256()
    for ids in texts:
        found.update(array("i", ids).tobytes() + b"|")
    return found.hexdigest()


def read_corpus(paths: Sequence[str | Path], vocab_size: int) -> list[Conversation]:
    """All conversations of some files, in order.

    Args:
        paths: corpus files.
        vocab_size: number of tokens of the target.

    Raises:
        ValueError: naming the line that is not a conversation, has an empty prompt or answer, or
            holds ids outside the vocabulary. Also for a gzipped file without its end, and if there
            is no conversation at all.
    """
    conversations = []
    for path in map(Path, paths):
        open_text = gzip.open if path.suffix == ".gz" else open
        try:
            with open_text(path, "rt", encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    conversations.append(_parse(line, f"{path}, line {number}", vocab_size))
        except EOFError as error:
            message = f"{path} is cut off: it is still being written, or its end is lost"
            raise ValueError(message) from error
        except (zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
    if not conversations:
        raise ValueError(f"no conversations in {', '.join(map(str, paths))}")
    return conversations


def _parse(line: str, where: str, vocab_size: int) -> Conversation:
    """The conversation of a line; ``where`` names the line in error messages."""
    try:
        record = json.loads(line)
        # Arrays, because a hundred thousand lists of Python integers fill gigabytes.
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
