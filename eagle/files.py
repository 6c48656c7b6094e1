"""Write files all or nothing, and compare the settings of a resumed run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace a file as a whole, or leave it as it is if the block raises.

    Args:
        path: the file. Its folder is created if it is missing.

    Yields:
        A temporary path in the same folder, to be written to. It becomes ``path`` when the block
        ends without an error.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.stem}.part{path.suffix}")
    try:
        yield scratch
        with scratch.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, all or nothing. Its folder is created if it is missing."""
    with replacing(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def differences(before: dict, now: dict) -> list[str]:
    """The entries in which two settings differ, each as ``name 'old' then, 'new' now``."""
    changed = sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k))
    return [f"{k} {before.get(k)!r} then, {now.get(k)!r} now" for k in changed]
