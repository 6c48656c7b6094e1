"""Files that are replaced as a whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A scratch path beside ``path`` to write to; it takes ``path``'s place when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.stem}.part{path.suffix}")
    try:
        yield scratch
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write a text file, all or nothing; its folder is made."""
    with replacing(path) as scratch:
        scratch.write_text(text, encoding="utf-8")
