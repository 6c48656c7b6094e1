"""Tables and figures of the paper's experiments from their answers: ``python -m evaluation.paper.tables table2 --pair demo``.

Writes ``<name>.md``, ``<name>.csv`` and ``<name>.json``, for figures ``<name>.png`` and ``<name>.svg``, and ``<name>-calibration.png`` and ``.svg`` (how
often slots are accepted, by proxy), beside the paper's values. Only questions that every method has answered count, so that differences between methods
are paired by question, in a run that is not finished too.
"""

import argparse
import csv
import io
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from eagle.files import replace_text, replacing
from eagle.program import one_line_errors
from evaluation.common import flags
from evaluation.common.answers import CIRCUMSTANCES, read_answers
from evaluation.common.questions import load_questions, question_file
from evaluation.common.statistics import Estimate, Statistic
from evaluation.contexts import calibration
from evaluation.paper.grids import (
    BENCH_LABELS,
    BENCHES,
    EXPERIMENTS,
    PAIRS,
    PAPER,
    PAPER_DRAFT_MS,
    Experiment,
    Method,
)
from evaluation.report import totals
from rheo import KIND_NAMES

MEAN = "mean"
# What differs from cell to cell; all else in the run blocks of an experiment is the same (plain decoding lacks some of it).
OF_A_CELL = (
    "bench_name",
    "sampling",
    "m",
    "support",
    "verification",
    "normaliser",
    "temperature",
    "seed",
)


@dataclass(frozen=True)
class Row:
    """One method at one temperature on one bench, or on the unweighted mean of the benches.

    Attributes:
        tau: accepted + 1 a cycle; None for plain decoding.
        difference, p_value: tau minus that of the first drafting method at this temperature, paired by question.
        tokens_per_sec: of the whole request, prefill included; None for the mean of benches.
        speedup: tokens/s over plain decoding's, where the experiment has it; the mean over benches is the geometric one.
        draft_ms: drafting a cycle; None where it was not timed.
        paper: the paper's tau.
        paper_speedup, paper_draft_ms: the paper's, on the mean only.
    """

    method: str
    temperature: float
    bench: str
    questions: int
    seeds: int
    cycles: int
    tau: Estimate | None
    difference: Estimate | None
    p_value: float | None
    tokens_per_sec: Estimate | None
    speedup: Estimate | None
    draft_ms: Estimate | None
    paper: float | None
    paper_speedup: float | None
    paper_draft_ms: float | None


def exponential(statistic: Statistic | None) -> Estimate | None:
    """A statistic on the log scale as a ratio with its interval."""
    if statistic is None:
        return None
    log = statistic.estimate()
    return Estimate(
        math.exp(log.value),
        *(None if x is None else math.exp(x) for x in (log.low, log.high)),
        log.questions,
    )


class Results:
    """The answers of an experiment, reduced to the questions that all its methods have.

    Args:
        benches, seeds: those that count; None for all that the folder holds.
        limit: the first so many questions of each bench; None for all.

    Attributes:
        settings: what all answers share.

    Raises:
        ValueError: where there are no answers, a question is answered twice in a cell, or answers were made with different settings.
    """

    def __init__(
        self,
        name: str,
        pair: str,
        folder: Path,
        benches: Iterable[str] | None = None,
        seeds: Iterable[int] | None = None,
        limit: int | None = None,
    ):
        self.name, self.label, self.experiment = name, PAIRS[pair].label, EXPERIMENTS[name]
        found: dict[str, set] = {}
        for path in folder.glob("*/*-seed*"):
            found.setdefault(path.parent.name, set()).add(int(path.name.rpartition("-seed")[2]))
        self.seeds = {
            b: found.get(b, set()) if seeds is None else set(seeds)
            for b in BENCH_LABELS
            if b in (found if benches is None else benches)
        }
        self.benches, self.blocks = list(self.seeds), []
        self.records: dict[tuple[str, Method, float], list[dict]] = {}
        if not self.benches:
            raise ValueError(
                f"{folder} holds no answers; python -m evaluation.experiment {name} makes them"
            )
        for bench in self.benches:
            answers = {
                cell: self.read(cell.folder(folder))
                for cell in self.experiment.cells((bench,), sorted(self.seeds[bench]))
            }
            common = set.intersection(*(set(a) for a in answers.values()))
            if not common:
                raise ValueError(
                    f"no question of {bench} is answered by every method yet; give python -m evaluation.experiment {name} again"
                )
            order = [question for question in next(iter(answers.values())) if question in common]
            if limit is not None:
                first = {
                    question.question_id
                    for question in load_questions(question_file(bench), None, limit)
                }
                order = [question for question in order if question in first]
            for cell in answers:
                self.records.setdefault((bench, cell.method, cell.temperature), []).extend(
                    answers[cell][question] for question in order
                )
        self.settings = {"experiment": name, "pair": pair} | self.shared()

    def read(self, cell: Path) -> dict:
        """The records of a cell by question id; which process or machine answered does not show."""
        answers = {}
        for path in sorted(cell.glob("*.jsonl")):
            for record in read_answers([path], growing=True):
                if record["question_id"] in answers:
                    raise ValueError(
                        f"{path}: question {record['question_id']!r} is answered twice in this folder"
                    )
                answers[record["question_id"]] = record
                block = record.get("run") or {}
                if block not in self.blocks:
                    self.blocks.append(block)
        return dict(sorted(answers.items(), key=lambda item: (isinstance(item[0], str), item[0])))

    def shared(self) -> dict:
        """The settings that all answers share; of what does not decide them (``CIRCUMSTANCES``), all values."""
        settings: dict = {}
        for block in self.blocks:
            drafting = (
                {} if block.get("sampling") == "none" else {"head": None}
            )  # a head that is not named is another one
            for key, value in (drafting | block).items():
                if key in CIRCUMSTANCES:
                    settings[key] = sorted({*settings.get(key, ()), value}, key=str)
                elif key not in OF_A_CELL and settings.setdefault(key, value) != value:
                    raise ValueError(
                        f"answers with {key} {settings[key]!r} and {value!r} lie in one folder; they are not comparable"
                    )
        return settings

    def drafted(self) -> Iterator[tuple[Method, float, list[dict]]]:
        """The records of each drafting method at each temperature, of all benches."""
        for temperature in self.experiment.temperatures:
            for method in self.experiment.methods:
                if method.sampling != "none":
                    yield (
                        method,
                        temperature,
                        [
                            record
                            for bench in self.benches
                            for record in self.records[bench, method, temperature]
                        ],
                    )

    def rows(self) -> list[Row]:
        """All methods, temperatures and benches, the mean over benches last."""
        rows, complete = [], self.benches == list(BENCHES)  # the paper's mean is over all six
        for temperature in self.experiment.temperatures:
            sums = {
                (bench, method): totals(self.records[bench, method, temperature])
                for bench in self.benches
                for method in self.experiment.methods
            }
            tau = {key: Statistic.ratio(s["accepted"], s["cycles"]) for key, s in sums.items()}
            speed = {key: Statistic.ratio(s["tokens"], s["seconds"]) for key, s in sums.items()}
            drafting = {key: Statistic.ratio(s["drafting"], s["cycles"]) for key, s in sums.items()}
            first = next(method for method in self.experiment.methods if method.sampling != "none")
            plain = next(
                (method for method in self.experiment.methods if method.sampling == "none"), None
            )
            for method in self.experiment.methods:
                paper = PAPER.get((self.name, self.label, method.name))
                for bench in [*self.benches, MEAN]:
                    here = self.benches if bench == MEAN else [bench]
                    own = (
                        Statistic.mean({b: tau[b, method] for b in here})
                        if method != plain
                        else None
                    )
                    base = Statistic.mean({b: tau[b, first] for b in here})
                    gain = own.minus(base) if own and base and method != first else None
                    drafted = (
                        Statistic.mean({b: drafting[b, method] for b in here})
                        if method != plain
                        else None
                    )
                    faster = None
                    if plain and method != plain:
                        faster = Statistic.mean(
                            {b: speed[b, method].log().minus(speed[b, plain].log()) for b in here}
                        )
                    records = [
                        record for b in here for record in self.records[b, method, temperature]
                    ]
                    rows.append(Row(
                        method=method.name, temperature=temperature, bench=bench,
                        questions=len({(record["run"]["bench_name"], record["question_id"]) for record in records}),
                        seeds=len(set.union(*(self.seeds[b] for b in here))),
                        cycles=int(sum(sum(sums[b, method]["cycles"].values()) for b in here)),
                        tau=own and own.estimate(), difference=gain and gain.estimate(), p_value=gain and gain.p_value(),
                        tokens_per_sec=speed[bench, method].estimate() if bench != MEAN else None,
                        speedup=exponential(faster),
                        draft_ms=drafted.times(1000).estimate() if drafted and drafted.value else None,
                        paper=paper and (paper[6] if bench == MEAN else paper[BENCHES.index(bench)]) if complete or bench != MEAN else None,
                        paper_speedup=paper[7] if paper and bench == MEAN and complete else None,
                        paper_draft_ms=PAPER_DRAFT_MS.get((self.name, self.label, method.name)) if bench == MEAN else None,
                    ))  # fmt: skip
        return rows


def show(estimate: Estimate | None, sign: bool = False, digits: int = 2) -> str:
    """``2.13 ± 0.05``."""
    if estimate is None:
        return ""
    value = f"{estimate.value:{'+' if sign else ''}.{digits}f}"
    return (
        value
        if estimate.low is None
        else f"{value} ± {(estimate.high - estimate.low) / 2:.{digits}f}"
    )


def markdown(rows: list[Row], experiment: Experiment, threads: list) -> str:
    """tau by method and bench, then the differences to the first drafting method.

    Args:
        threads: with how many the answers were made.
    """
    benches = list(dict.fromkeys(row.bench for row in rows))
    labels = [BENCH_LABELS.get(bench, bench) for bench in benches]
    timed = any(row.speedup for row in rows)
    extra = ["speedup", "draft ms"] if timed else ["draft ms"]
    lines = [
        f"| method | T | {' | '.join(labels + extra)} |",
        "| --- " * (2 + len(labels + extra)) + "|",
    ]
    differences = []
    for method, temperature in dict.fromkeys((row.method, row.temperature) for row in rows):
        here = {
            row.bench: row for row in rows if (row.method, row.temperature) == (method, temperature)
        }
        mean = here[MEAN]
        taus = " | ".join(show(here[bench].tau) for bench in benches)
        lines.append(
            f"| {method} | {temperature:g} | {taus} |{f' {show(mean.speedup)} |' if timed else ''} {show(mean.draft_ms, digits=1)} |"
        )
        if any(row.paper for row in here.values()):
            values = " | ".join(
                "" if here[b].paper is None else f"{here[b].paper:.2f}" for b in benches
            )
            ends = ([mean.paper_speedup] if timed else []) + [mean.paper_draft_ms]
            lines.append(
                f"| {method}, paper | {temperature:g} | {values} | {' | '.join('' if x is None else str(x) for x in ends)} |"
            )
        if mean.difference:
            gains = " | ".join(gain(here[b]) for b in benches)
            differences.append(f"| {method} | {temperature:g} | {gains} |" + " |" * len(extra))
    warning = (
        ""
        if len(threads) < 2
        else f"Answers were made with {' and '.join(map(str, threads))} threads: their times do not compare. "
    )
    first = next(method.name for method in experiment.methods if method.sampling != "none")
    lines += [f"| **minus {first}** |" + " |" * (1 + len(labels + extra)), *differences]
    notes = (
        f"{warning}± half of the 95 % interval, clustered by question; {rows[-1].questions} questions, {rows[-1].seeds} seed(s). "
        f"The mean is that of the benches, unweighted{', for the speedup the geometric one' if timed else ''}."
    )
    return f"# {experiment.title}\n\n" + "\n".join(lines) + f"\n\n{notes}\n"


def gain(row: Row) -> str:
    """``+0.12 ± 0.03 (p 0.01)``."""
    return show(row.difference, True) + ("" if row.p_value is None else f" (p {row.p_value:.2g})")


@dataclass(frozen=True)
class Sources:
    """Where the accepted tokens of a method come from, over all benches.

    Attributes:
        kinds: accepted tokens a cycle by slot kind.
        levels: share of the cycles with k - 1 accepted tokens that accept another one, k = 1, 2, ...
        survival: share of the visited nodes with children whose sampled child is among them; None for Top-K.
        calibration: how often slots are accepted, by kind and proxy; None where the answers do not say.
    """

    method: str
    temperature: float
    kinds: dict[str, float]
    levels: list[float]
    survival: float | None
    calibration: calibration.Curves | None

    @classmethod
    def of(cls, method: Method, temperature: float, records: list[dict]) -> "Sources":
        choices = [choice for record in records for choice in record["choices"]]
        cycles = [
            cycle for choice in choices for turn in choice["accepted_kinds"] for cycle in turn
        ]
        tried = "".join(
            family for choice in choices for turn in choice.get("survivals", ()) for family in turn
        )
        tallies = [turn for choice in choices for turn in choice.get("calibration", ())]
        reached = [
            sum(len(cycle) >= level for cycle in cycles)
            for level in range(max(map(len, cycles), default=0) + 1)
        ]
        return cls(
            method.name, temperature, {kind: sum(cycle.count(kind[0]) for cycle in cycles) / max(len(cycles), 1) for kind in KIND_NAMES},
            [b / a for a, b in zip(reached, reached[1:])],
            tried.count("1") / len(tried) if tried and method.sampling == "rheo" else None,
            calibration.curves(tallies) if tallies else None,
        )  # fmt: skip


def sources_table(found: list[Sources]) -> str:
    """One line a method."""
    lines = [
        f"| method | T | {' | '.join(KIND_NAMES)} | sampled slot survives | acceptance at level 1, 2, ... |",
        "| --- " * 7 + "|",
    ]
    for row in found:
        kinds = " | ".join(f"{value:.3f}" for value in row.kinds.values())
        survival = "" if row.survival is None else f"{row.survival:.3f}"
        lines.append(
            f"| {row.method} | {row.temperature:g} | {kinds} | {survival} | {' '.join(f'{value:.2f}' for value in row.levels)} |"
        )
    return (
        "Accepted tokens a cycle by kind of slot, and how often another level is accepted:\n\n"
        + "\n".join(lines)
        + "\n"
    )


def as_csv(rows: list[dict]) -> str:
    """One line a row; an estimate takes three columns, and what is None one or three empty ones."""
    estimates = {name for row in rows for name, value in row.items() if isinstance(value, Estimate)}
    flat = []
    for row in rows:
        line = {}
        for name, value in row.items():
            if name in estimates:
                parts = (value.value, value.low, value.high) if value else (None,) * 3
                line |= dict(zip((name, f"{name}_low", f"{name}_high"), parts))
            else:
                line[name] = value
        flat.append(line)
    text = io.StringIO()
    writer = csv.DictWriter(text, flat[0])
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def write_table(output: Path, text: str, rows: list[dict], settings: dict, **more) -> None:
    """A table as Markdown, CSV and JSON, each all or nothing, with the settings that made it; also printed.

    Args:
        output: path without its ending.
        rows: of the table; values may be Estimates.
        more: goes into the JSON as well.
    """
    said = ", ".join(
        f"{k} {' '.join(map(str, v)) if isinstance(v, list) else v}"
        for k, v in settings.items()
        if not isinstance(v, dict)
    )
    replace_text(output.with_name(f"{output.name}.md"), f"{text}\nSettings: {said}\n")
    replace_text(output.with_name(f"{output.name}.csv"), as_csv(rows))
    content = {"settings": settings, "rows": rows, **more}
    replace_text(
        output.with_name(f"{output.name}.json"),
        json.dumps(content, indent=1, default=asdict) + "\n",
    )
    print(text)
    print(f"The same as CSV and JSON, with all settings: {output.parent}")


def plot(rows: list[Row], experiment: Experiment, pictures: list[Path]) -> None:
    """tau against m (one temperature) or against temperature, one panel a bench."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    benches = [bench for bench in dict.fromkeys(row.bench for row in rows) if bench != MEAN]
    figure, axes = pyplot.subplots(
        1,
        len(benches),
        figsize=(3.6 * len(benches), 3.4),
        sharey=False,
        layout="constrained",
        squeeze=False,
    )
    for axis, bench in zip(axes[0], benches):
        here = [row for row in rows if row.bench == bench and row.tau]
        if len(experiment.temperatures) > 1:
            for method in dict.fromkeys(row.method for row in here):
                points = [row for row in here if row.method == method]
                errors = [0 if p.tau.low is None else p.tau.high - p.tau.value for p in points]
                axis.errorbar(
                    [p.temperature for p in points],
                    [p.tau.value for p in points],
                    errors,
                    marker="o",
                    capsize=3,
                    label=method,
                )
            greedy = [
                row.tau.value for row in here if row.temperature == 0 and row.method == "topk"
            ]
            if greedy:
                axis.axhline(greedy[0], color="gray", linestyle="--", label="topk, greedy")
            axis.set_xlabel("temperature")
        else:
            sampled = [row for row in here if row.method.startswith("rheo")]
            errors = [0 if p.tau.low is None else p.tau.high - p.tau.value for p in sampled]
            leads = [int(p.method[len("rheo-m")]) for p in sampled]
            axis.errorbar(
                leads, [p.tau.value for p in sampled], errors, marker="o", capsize=3, label="rheo"
            )
            for top in (row for row in here if row.method == "topk"):
                axis.axhline(top.tau.value, color="gray", linestyle="--", label="topk")
                if top.tau.low is not None:
                    axis.axhspan(top.tau.low, top.tau.high, color="gray", alpha=0.15)
            axis.set_xlabel("m")
            axis.set_xticks(leads)
        axis.set_title(BENCH_LABELS[bench])
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("tau")
    if axes[0][0].get_legend_handles_labels()[0]:
        axes[0][0].legend()
    for picture in pictures:
        with replacing(picture) as scratch:
            figure.savefig(scratch, dpi=160)
    pyplot.close(figure)


def write(results: Results, output: Path) -> None:
    """Write the table or figure of an experiment to a folder, and print it."""
    name, rows = results.name, results.rows()
    sources = [
        Sources.of(method, temperature, records)
        for method, temperature, records in results.drafted()
    ]
    text = (
        markdown(rows, results.experiment, results.settings.get("threads", []))
        + "\n"
        + sources_table(sources)
    )
    write_table(
        output / name,
        text,
        [vars(row) for row in rows],
        results.settings,
        sources=[asdict(row) for row in sources],
    )
    if name.startswith("figure"):
        plot(rows, results.experiment, [output / f"{name}.{kind}" for kind in ("png", "svg")])
    found = {
        f"{row.method}, T = {row.temperature:g}": row.calibration
        for row in sources
        if row.calibration
    }
    if found:
        calibration.plot(found, [output / f"{name}-calibration.{kind}" for kind in ("png", "svg")])


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m evaluation.paper.tables", allow_abbrev=False, description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    parser.add_argument("name", choices=EXPERIMENTS)
    flags.add_study(parser, 1024, "all there are", "all there are")
    parser.add_argument("--output", type=Path, help="folder; default: beside the answers")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Entry point; bad input ends with one line, not a traceback."""
    args = build_parser().parse_args(argv)
    with one_line_errors():
        flags.check_study(args)
        folder = flags.study_folder(args, args.name)
        seeds = None if args.seeds is None else range(args.seeds)
        write(
            Results(args.name, args.pair, folder, args.bench_name, seeds, args.limit),
            args.output or folder,
        )


if __name__ == "__main__":
    main()
