"""Certify that decoding is lossless, by exact arithmetic through the code that decodes.

    python -m rheo.certify          # less than a minute
    python -m rheo.certify --full   # all settings, 4 to 30 minutes

For small vocabularies the certifier walks every outcome of every draw of pool, tree and
verification. It compares the distribution of the output with the target's, after one cycle and
after several. In fractions the difference must be 0. In float64 it is rounding, at most 1e-12.

Larger trees are enumerated by merging the draws whose outcome cannot be seen in the kept tree.
That they cannot be seen is tested for every tree. For small trees, merging is also compared with
walking every draw.

If a distribution differs, the program prints a small counterexample and ends with exit code 1.

Begin with ``main``, then read ``rheo.certify.certificates``.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TextIO

from tqdm import tqdm

from rheo.certify.certificates import certify, check_merging, smallest_failure
from rheo.certify.enumeration import MergeError
from rheo.certify.report import Row, describe_failure, record, show_table1
from rheo.certify.settings import Setting, full_settings, quick_settings, settings_to_merge


class NotLossless(Exception):
    """A counterexample was found; the message describes it."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m rheo.certify",
        description="Certify by exact enumeration that decoding is lossless.",
        allow_abbrev=False,
    )
    full = "certify all settings, not only the quick ones; takes 4 to 30 minutes"
    parser.add_argument("--full", action="store_true", help=full)
    parser.add_argument("--table1", action="store_true", help="print only Table 1 of the paper")
    output = "write all output distributions to this file, one JSON object per line"
    parser.add_argument("--output", help=output)
    parser.add_argument("--model", "--head", dest="pair", help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Print Table 1 and the report.

    Returns:
        The exit code: 0 if everything is lossless, else 1.
    """
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if args.pair is not None:  # this package knows no models
        command = "python -m evaluation.checks.black_box --model B --head E"
        parser.error(f"to test a pair of models, run: {command}")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    print(show_table1(), flush=True)
    if args.table1:
        return 0
    settings = list(full_settings() if args.full else quick_settings())
    try:
        with open(args.output or os.devnull, "w", encoding="utf-8") as output:
            rows = certify_all(settings, output)
        compared = check_merging(settings_to_merge())
    except NotLossless as error:
        print(error)
        return 1
    except MergeError as error:
        print(f"NOT CERTIFIED: {error}")
        return 1
    print(Row.HEAD)
    for group, row in rows.items():
        print(row.show(group))
    print(f"merging draws against walking every draw: {compared} distributions, all equal")
    print("Lossless: every output distribution is the target's.")
    return 0


def certify_all(settings: Sequence[Setting], output: TextIO) -> dict[str, Row]:
    """Certify settings.

    Args:
        settings: what to certify.
        output: gets one JSON object per certificate.

    Returns:
        One line of the report per group of settings.

    Raises:
        NotLossless: for the first distribution that differs.
        MergeError: if a merged draw changes a kept tree.
    """
    rows: dict[str, Row] = {}
    for setting in tqdm(settings, unit="setting", desc="certify"):
        for certificate in certify(setting):
            output.write(json.dumps(record(certificate)) + "\n")
            if not certificate.lossless:
                raise NotLossless(describe_failure(smallest_failure(certificate)))
            rows.setdefault(setting.group, Row()).add(certificate)
    return rows


if __name__ == "__main__":
    sys.exit(main())
