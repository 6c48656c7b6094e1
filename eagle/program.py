"""What all command-line programs share: how they end on bad input."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps

from eagle.model.cycle import NonFiniteLogits


def new_parser(name: str, description: str, **keywords) -> argparse.ArgumentParser:
    """A parser whose help shows the defaults.

    Args:
        name: the module that is run.
        description: what the program does, in one sentence.
        keywords: for ``argparse.ArgumentParser``.
    """
    return argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        **keywords,
    )


@contextmanager
def one_line_errors(*more: type[Exception]) -> Iterator[None]:
    """End the program with one line, not a traceback, on bad input.

    Args:
        more: further types of errors, besides ValueError, OSError and NonFiniteLogits.
    """
    try:
        yield
    except (ValueError, OSError, NonFiniteLogits, *more) as error:
        sys.exit(f"error: {error}")


def program(
    build_parser: Callable[[], argparse.ArgumentParser], *more: type[Exception]
) -> Callable[[Callable], Callable]:
    """Make a ``main(argv=None)`` of a function that takes the parsed arguments.

    Args:
        build_parser: makes the program's parser.
        more: see ``one_line_errors``.
    """

    def decorate(run: Callable[[argparse.Namespace], object]) -> Callable:
        @wraps(run)
        def main(argv: list[str] | None = None):
            args = build_parser().parse_args(argv)
            with one_line_errors(*more):
                return run(args)

        return main

    return decorate
