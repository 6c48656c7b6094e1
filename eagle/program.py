"""What all command-line programs share."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from eagle.model.cycle import NonFiniteLogits


@contextmanager
def one_line_errors(*more: type[Exception]) -> Iterator[None]:
    """Bad input, a missing file and broken logits, and errors of the types ``more``, end the program with one line, not a traceback."""
    try:
        yield
    except (ValueError, OSError, NonFiniteLogits, *more) as error:
        sys.exit(f"error: {error}")
