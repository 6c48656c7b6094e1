"""Answer a question set with plain decoding: ``python -m evaluation.gen_baseline_answer``."""

import argparse
from functools import partial

from eagle.program import program
from evaluation.gen_ea_answer import build_parser, run


@program(partial(build_parser, drafting=False))
def main(args: argparse.Namespace) -> None:
    """Answer the questions."""
    run(args, drafting=False)


if __name__ == "__main__":
    main()
