"""Write a corpus batch by batch, so that a killed run can continue."""

import gzip
import json
import os
from pathlib import Path

from eagle.files import differences, replace_text
from eagle.traineagle3.corpus import Conversation


class CorpusWriter:
    """Appends batches of conversations to a corpus file.

    Beside the corpus stands ``<name>.settings.json``: what decides the conversations, and how much
    of the corpus consists of complete batches. When an existing corpus is opened, what was written
    of an incomplete batch is cut off.

    Args:
        path: the corpus file, gzipped if its name ends in ``.gz``.
        recipe: what decides the conversations, in the types of JSON.

    Attributes:
        conversations: number of conversations in the file.
        batches: number of batches in the file, counting empty ones.

    Raises:
        ValueError: if the file was not made by this program or was made with other settings, or if
            its end is missing.
    """

    def __init__(self, path: Path, recipe: dict):
        self.path, self.recipe = path, recipe
        self.settings = path.with_name(path.name + ".settings.json")
        self.conversations = self.batches = 0
        size = path.stat().st_size if path.exists() else 0
        if self.settings.exists():
            self._resume(size)
        elif size:
            raise ValueError(
                f"{path} exists and {self.settings.name} does not: it was not made by this "
                "program; choose another --output"
            )

    def _resume(self, size: int) -> None:
        """Read the settings file, and cut off an incomplete batch from a file of ``size`` bytes."""
        state = json.loads(self.settings.read_text())
        changed = differences(state["recipe"], self.recipe)
        if changed:
            raise ValueError(
                f"{self.path} was made with other settings ({', '.join(changed)}); choose another "
                "--output"
            )
        if size < state["bytes"]:
            raise ValueError(
                f"{self.path} has {size} bytes and should have {state['bytes']}; restore it, or "
                f"delete {self.settings.name} to start again"
            )
        with self.path.open("ab") as file:
            file.truncate(state["bytes"])
        self.conversations, self.batches = state["conversations"], state["batches"]

    def append(self, batch: list[Conversation]) -> None:
        """Add a batch, which may be empty, and then record it in the settings file."""
        text = "".join(conversation.to_json() + "\n" for conversation in batch).encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(gzip.compress(text) if self.path.suffix == ".gz" and text else text)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        self.conversations += len(batch)
        self.batches += 1
        state = {
            "recipe": self.recipe,
            "batches": self.batches,
            "bytes": size,
            "conversations": self.conversations,
        }
        replace_text(self.settings, json.dumps(state, indent=1) + "\n")
