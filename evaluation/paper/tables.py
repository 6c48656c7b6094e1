"""Tables and figures of the paper's experiments: ``python -m evaluation.paper.tables table2``.

For an experiment it writes ``<name>.md``, ``<name>.csv`` and ``<name>.json`` from the answers, with
the paper's values beside ours. For a figure it also plots ``<name>.png``. If the answers record it,
``<name>-calibration.png`` shows how often slots are accepted, by their proxy.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from eagle.program import program
from evaluation.common.markdown import table
from evaluation.common.statistics import show
from evaluation.contexts import calibration
from evaluation.paper import figures
from evaluation.paper.grids import BENCH_LABELS, EXPERIMENTS, MEAN
from evaluation.paper.results import Results
from evaluation.paper.rows import Row, Sources, compute_rows, compute_sources
from evaluation.paper.study import check_counts, study_folder, study_parser
from evaluation.paper.table_files import write_table
from rheo import KIND_NAMES


def tau_table(rows: list[Row], reference: str) -> str:
    """The values of tau, then their differences to the reference method, as Markdown."""
    benches = list(dict.fromkeys(row.bench for row in rows))
    timed = any(row.speedup for row in rows)
    labels = [BENCH_LABELS.get(bench, bench) for bench in benches]
    columns = ["method", "T", *labels, *(["speedup"] if timed else []), "draft ms"]

    def line(name: str, temperature: float, taus: list, speedup=None, draft_ms=None) -> list:
        times = [speedup, draft_ms] if timed else [draft_ms]
        return [name, f"{temperature:g}", *taus, *times]

    lines, differences = [], []
    for method, temperature in dict.fromkeys((row.method, row.temperature) for row in rows):
        here = [row for row in rows if (row.method, row.temperature) == (method, temperature)]
        mean = next(row for row in here if row.bench == MEAN)
        taus = [show(row.tau) for row in here]
        times = show(mean.speedup), show(mean.draft_ms, digits=1)
        lines.append(line(method, temperature, taus, *times))
        if any(row.paper for row in here):
            taus = ["" if row.paper is None else f"{row.paper:.2f}" for row in here]
            times = mean.paper_speedup, mean.paper_draft_ms
            lines.append(line(f"{method}, paper", temperature, taus, *times))
        if mean.difference:
            differences.append(line(method, temperature, [show_difference(row) for row in here]))
    heading = [f"**minus {reference}**", *[None] * (len(columns) - 1)]
    return table(columns, [*lines, heading, *differences])


def show_difference(row: Row) -> str:
    """A difference with its p-value, as ``+0.12 ± 0.03 (p 0.01)``."""
    p_value = "" if row.p_value is None else f" (p {row.p_value:.2g})"
    return show(row.difference, sign=True) + p_value


def notes(rows: list[Row], threads: list[int]) -> str:
    """What a reader of the table must know.

    Args:
        rows: of the table.
        threads: all numbers of threads that answers were made with.
    """
    warning = geometric = ""
    if len(threads) > 1:
        numbers = " and ".join(map(str, threads))
        warning = f"Answers were made with {numbers} threads: their times cannot be compared. "
    if any(row.speedup for row in rows):
        geometric = "; for the speedup it is the geometric mean"
    return (
        f"{warning}± half of the 95 % interval, clustered by question; "
        f"{rows[-1].questions} questions, {rows[-1].seeds} seed(s). "
        f"The mean is the unweighted mean of the benches{geometric}."
    )


def sources_table(found: list[Sources]) -> str:
    """Where the accepted tokens of each method come from, as Markdown."""
    columns = ["method", "T", *KIND_NAMES, "sampled slot survives", "acceptance at level 1, 2, ..."]
    lines = [
        [
            row.method,
            f"{row.temperature:g}",
            *(f"{value:.3f}" for value in row.kinds.values()),
            None if row.survival is None else f"{row.survival:.3f}",
            " ".join(f"{value:.2f}" for value in row.levels),
        ]
        for row in found
    ]
    return table(columns, lines)


def write(results: Results, output: Path) -> None:
    """Write the table or figure of an experiment to a folder, and print it."""
    name, experiment = results.name, results.experiment
    rows, sources = compute_rows(results), compute_sources(results)
    text = (
        f"# {experiment.title}\n\n"
        f"{tau_table(rows, experiment.drafting[0].name)}\n\n"
        f"{notes(rows, results.settings.get('threads', []))}\n\n"
        "Accepted tokens per cycle by kind of slot, and how often each level is accepted if the "
        "level above it was:\n\n"
        f"{sources_table(sources)}\n"
    )
    content = [vars(row) for row in rows]
    more = [asdict(row) for row in sources]
    write_table(output / name, text, content, results.settings, sources=more)
    if name.startswith("figure"):
        figures.plot(rows, output / f"{name}.png")
    curves = {
        f"{row.method}, T = {row.temperature:g}": row.calibration
        for row in sources
        if row.calibration
    }
    if curves:
        calibration.plot(curves, output / f"{name}-calibration.png")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = study_parser(
        "evaluation.paper.tables",
        "Write the table or figure of one of the paper's experiments from its answers.",
        max_new_token=1024,
        benches="all that have answers",
        seeds="all that have answers",
    )
    parser.add_argument("name", choices=EXPERIMENTS)
    parser.add_argument("--output", type=Path, help="folder; default: that of the answers")
    return parser


@program(build_parser)
def main(args: argparse.Namespace) -> None:
    """Read the answers, write the table."""
    check_counts(args)
    folder = study_folder(args, args.name)
    seeds = None if args.seeds is None else range(args.seeds)
    results = Results(args.name, args.pair, folder, args.bench_name, seeds, args.limit)
    write(results, args.output or folder)


if __name__ == "__main__":
    main()
