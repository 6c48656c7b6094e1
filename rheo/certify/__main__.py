"""Is decoding lossless? ``python -m rheo.certify`` answers with exact arithmetic, through the code that decodes.

For small vocabularies it walks every outcome of every draw of pool, tree and verification (``rheo.enumeration``) and compares the
law of what is emitted with the target's law, after one cycle and after several in a row. In fractions the difference is exactly 0;
where the code runs on float64 tensors it is rounding, at most 1e-12. Larger trees are enumerated by merging draws whose outcome
cannot be seen in the kept tree; that is tried out at every leaf, and compared with walking every draw where both are possible.

    python -m rheo.certify                      about a minute
    python -m rheo.certify --full               every m, budget and verification up to vocabulary 4, K 3, depth 2; some minutes
    python -m rheo.certify --model B --head E   a statistical test of whole generations of a real pair

Exit code 1, and a small counterexample, where a law differs.
"""

import argparse
import contextlib
import json
import sys
from dataclasses import replace

from tqdm import tqdm

from rheo.certify.certificates import certify, merging_against_every_draw, smallest_failure
from rheo.certify.enumeration import MergeError
from rheo.certify.report import Row, describe_failure, record, show_table1
from rheo.certify.settings import full_settings, quick_settings


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rheo.certify",
        description="Certify losslessness by exact enumeration.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", "--head", dest="pair", help=argparse.SUPPRESS)
    parser.add_argument(
        "--full", action="store_true", help="all settings, not the quick ones only; 4 to 30 minutes"
    )
    parser.add_argument(
        "--table1", action="store_true", help="Table 1 of the paper, and nothing else"
    )
    parser.add_argument(
        "--output",
        help="write the laws of every configuration to this file, one JSON object a line",
    )
    known = parser.parse_args(arguments)
    if known.pair is not None:
        # This package knows no models.
        parser.error(
            "a pair of models is tested by: python -m evaluation.checks.black_box --model B --head E"
        )
    print(show_table1(), flush=True)
    if known.table1:
        return 0
    settings = list(full_settings() if known.full else quick_settings())
    rows: dict[str, Row] = {}
    with (
        open(known.output, "w", encoding="utf-8")
        if known.output
        else contextlib.nullcontext() as output
    ):
        try:
            for setting in tqdm(settings, unit="setting", desc="certify"):
                for certificate in certify(setting):
                    if output:
                        output.write(json.dumps(record(certificate)) + "\n")
                    if not certificate.lossless:
                        print(describe_failure(smallest_failure(certificate)), flush=True)
                        return 1
                    rows.setdefault(setting.group, Row()).add(certificate)
            small = (
                s
                for s in quick_settings()
                if s.depth == s.cycles == 1
                and s.arithmetic == "fractions"
                and s.distributions in (0, 6)
            )
            compared = merging_against_every_draw(replace(s, budgets=s.budgets[:4]) for s in small)
        except MergeError as error:
            print(f"NOT CERTIFIED: {error}", flush=True)
            return 1
    print(Row.HEAD)
    for group, row in rows.items():
        print(row.show(group))
    print(f"merging draws against walking every draw: {compared} laws, all equal")
    print("Lossless: every output law is the target's.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
