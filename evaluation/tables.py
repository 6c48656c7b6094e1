"""Tables and figures of the paper's experiments from their answers: ``python -m evaluation.tables table2 --pair demo``.

Writes ``<name>.md``, ``<name>.csv`` and ``<name>.json``, and for figures ``<name>.png`` and ``<name>.svg``, beside the paper's values. Only
questions that every arm has answered count, so that differences between arms are paired by question, in a run that is not finished too.
"""

import argparse
import csv
import io
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from eagle.files import replace_text, replacing
from eagle.program import one_line_errors
from evaluation import flags
from evaluation.answers import read_answers
from evaluation.grids import BENCH_LABELS, EXPERIMENTS, PAIRS, PAPER, Arm, Experiment, settings_folder
from evaluation.report import phase_seconds, totals
from evaluation.statistics import Estimate, Statistic
from rheo import KIND_NAMES

MEAN = "mean"


@dataclass(frozen=True)
class Row:
    """One arm at one temperature on one bench, or on the unweighted mean of the benches.

    Attributes:
        tau: accepted + 1 a cycle; None for plain decoding.
        difference, p_value: tau minus that of the first drafting arm at this temperature, paired by question.
        tokens_per_sec: of the whole request, prefill included; None for the mean of benches.
        speedup: tokens/s over plain decoding's, where the experiment has it.
        draft_ms: drafting a cycle; None where it was not timed.
        paper: the paper's tau.
        paper_speedup: the paper's speedup, on the mean only.
    """

    arm: str
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
    draft_ms: float | None
    paper: float | None
    paper_speedup: float | None


def exponential(statistic: Statistic | None) -> Estimate | None:
    """A statistic on the log scale as a ratio with its interval."""
    if statistic is None:
        return None
    log = statistic.estimate()
    return Estimate(math.exp(log.value), *(None if x is None else math.exp(x) for x in (log.low, log.high)), log.questions)


class Results:
    """The answers of an experiment, reduced to the questions that all its arms have."""

    def __init__(self, name: str, pair: str, folder: Path):
        self.name, self.label, self.experiment = name, PAIRS[pair].label, EXPERIMENTS[name]
        found: dict[str, set] = {}
        for path in folder.glob("*/*"):
            found.setdefault(path.parent.name, set()).add(int(path.name.rpartition("-seed")[2]))
        if not found:
            raise ValueError(f"{folder} holds no answers; python -m evaluation.experiment {name} makes them")
        self.benches = [bench for bench in BENCH_LABELS if bench in found]
        self.records: dict[tuple[str, Arm, float], list[dict]] = {}
        self.seeds: dict[str, set[int]] = {}
        for bench in self.benches:
            cells = self.experiment.cells((bench,), sorted(found[bench]))
            answers = {}
            for cell in cells:  # processes and machines do not show: the order is that of the questions
                records = read_answers(sorted(cell.folder(folder).glob("*.jsonl")))
                answers[cell] = {record["question_id"]: record for record in records}
            common = set.intersection(*(set(a) for a in answers.values()))
            if not common:
                raise ValueError(f"no question of {bench} is answered by every arm yet; give python -m evaluation.experiment {name} again")
            self.seeds[bench] = found[bench]
            for cell in cells:
                kept = [answers[cell][question] for question in sorted(common, key=str)]
                self.records.setdefault((bench, cell.arm, cell.temperature), []).extend(kept)

    def drafted(self) -> Iterator[tuple[Arm, float, list[dict]]]:
        """The records of each drafting arm at each temperature, of all benches."""
        for temperature in self.experiment.temperatures:
            for arm in self.experiment.arms:
                if arm.sampling != "none":
                    yield arm, temperature, [record for bench in self.benches for record in self.records[bench, arm, temperature]]

    def rows(self) -> list[Row]:
        """All arms, temperatures and benches, the mean over benches last."""
        rows = []
        for temperature in self.experiment.temperatures:
            sums = {
                (bench, arm): totals(self.records[bench, arm, temperature]) for bench in self.benches for arm in self.experiment.arms
            }
            tau = {key: Statistic.ratio(s["accepted"], s["cycles"]) for key, s in sums.items()}
            speed = {key: Statistic.ratio(s["tokens"], s["seconds"]) for key, s in sums.items()}
            first = next(arm for arm in self.experiment.arms if arm.sampling != "none")
            plain = next((arm for arm in self.experiment.arms if arm.sampling == "none"), None)
            for arm in self.experiment.arms:
                paper = PAPER.get((self.name, self.label, arm.name))
                for bench in [*self.benches, MEAN]:
                    here = self.benches if bench == MEAN else [bench]
                    drafting = arm.sampling != "none"
                    own = Statistic.mean({b: tau[b, arm] for b in here}) if drafting else None
                    gain = own.minus(Statistic.mean({b: tau[b, first] for b in here})) if drafting and arm != first else None
                    faster = None
                    if plain and arm != plain:
                        faster = Statistic.mean({b: speed[b, arm].log().minus(speed[b, plain].log()) for b in here})
                    records = [record for b in here for record in self.records[b, arm, temperature]]
                    rows.append(Row(
                        arm=arm.name, temperature=temperature, bench=bench,
                        questions=len({(record["run"]["bench_name"], record["question_id"]) for record in records}),
                        seeds=len(set.union(*(self.seeds[b] for b in here))),
                        cycles=int(sum(sum(sums[b, arm]["cycles"].values()) for b in here)),
                        tau=own and own.estimate(), difference=gain and gain.estimate(), p_value=gain and gain.p_value(),
                        tokens_per_sec=speed[bench, arm].estimate() if bench != MEAN else None,
                        speedup=exponential(faster),
                        draft_ms=1000 * seconds if drafting and (seconds := phase_seconds(records).get("draft")) else None,
                        paper=paper and (paper[6] if bench == MEAN else paper[list(BENCH_LABELS).index(bench)]),
                        paper_speedup=paper[7] if paper and bench == MEAN else None,
                    ))  # fmt: skip
        return rows


def show(estimate: Estimate | None, sign: bool = False, digits: int = 2) -> str:
    """``2.13 ± 0.05``."""
    if estimate is None:
        return ""
    value = f"{estimate.value:{'+' if sign else ''}.{digits}f}"
    return value if estimate.low is None else f"{value} ± {(estimate.high - estimate.low) / 2:.{digits}f}"


def markdown(rows: list[Row], experiment: Experiment) -> str:
    """tau by arm and bench, then the differences to the first drafting arm."""
    benches = list(dict.fromkeys(row.bench for row in rows))
    labels = [BENCH_LABELS.get(bench, bench) for bench in benches]
    timed = any(row.speedup for row in rows)
    extra = ["speedup", "draft ms"] if timed else ["draft ms"]
    lines = [f"| arm | T | {' | '.join(labels + extra)} |", "| --- " * (2 + len(labels + extra)) + "|"]
    differences = []
    for arm, temperature in dict.fromkeys((row.arm, row.temperature) for row in rows):
        here = {row.bench: row for row in rows if (row.arm, row.temperature) == (arm, temperature)}
        mean = here[MEAN]
        draft = "" if mean.draft_ms is None else f"{mean.draft_ms:.1f}"
        taus = " | ".join(show(here[bench].tau) for bench in benches)
        lines.append(f"| {arm} | {temperature:g} | {taus} |{f' {show(mean.speedup)} |' if timed else ''} {draft} |")
        if any(row.paper for row in here.values()):
            values = " | ".join("" if here[b].paper is None else f"{here[b].paper:.2f}" for b in benches)
            lines.append(f"| {arm}, paper | {temperature:g} | {values} |{f' {mean.paper_speedup or str()} |' if timed else ''} |")
        if mean.difference:
            gains = " | ".join(f"{show(here[b].difference, True)} (p {here[b].p_value:.2g})" for b in benches)
            differences.append(f"| {arm} | {temperature:g} | {gains} |" + " |" * len(extra))
    first = next(arm.name for arm in experiment.arms if arm.sampling != "none")
    lines += [f"| **minus {first}** |" + " |" * (1 + len(labels + extra)), *differences]
    counts = f"{rows[-1].questions} questions, {rows[-1].seeds} seed(s)"
    return f"# {experiment.title}\n\n" + "\n".join(lines) + f"\n\n± half of the 95 % interval, clustered by question; {counts}.\n"


@dataclass(frozen=True)
class Sources:
    """Where the accepted tokens of an arm come from, over all benches.

    Attributes:
        kinds: accepted tokens a cycle by slot kind.
        levels: share of the cycles with k - 1 accepted tokens that accept another one, k = 1, 2, ...
        survival: share of the visited nodes with children whose sampled child is among them; None for Top-K.
    """

    arm: str
    temperature: float
    kinds: dict[str, float]
    levels: list[float]
    survival: float | None

    @classmethod
    def of(cls, arm: Arm, temperature: float, records: list[dict]) -> "Sources":
        choices = [choice for record in records for choice in record["choices"]]
        cycles = [cycle for choice in choices for turn in choice["accepted_kinds"] for cycle in turn]
        families = "".join(family for choice in choices for turn in choice.get("survivals", ()) for family in turn)
        reached = [sum(len(cycle) >= level for cycle in cycles) for level in range(max(map(len, cycles), default=0) + 1)]
        return cls(
            arm.name, temperature, {kind: sum(cycle.count(kind[0]) for cycle in cycles) / max(len(cycles), 1) for kind in KIND_NAMES},
            [b / a for a, b in zip(reached, reached[1:])],
            families.count("1") / len(families) if families and arm.sampling == "rheo" else None,
        )  # fmt: skip


def sources_table(found: list[Sources]) -> str:
    """One line an arm."""
    lines = [f"| arm | T | {' | '.join(KIND_NAMES)} | sampled slot survives | acceptance at level 1, 2, ... |", "| --- " * 7 + "|"]
    for row in found:
        kinds = " | ".join(f"{value:.3f}" for value in row.kinds.values())
        survival = "" if row.survival is None else f"{row.survival:.3f}"
        lines.append(f"| {row.arm} | {row.temperature:g} | {kinds} | {survival} | {' '.join(f'{value:.2f}' for value in row.levels)} |")
    return "Accepted tokens a cycle by kind of slot, and how often another level is accepted:\n\n" + "\n".join(lines) + "\n"


def as_csv(rows: list[Row]) -> str:
    """One line a row; an estimate takes three columns."""
    text = io.StringIO()
    flat = []
    for row in rows:
        line = {}
        for name, value in vars(row).items():
            if name in ("tau", "difference", "tokens_per_sec", "speedup"):
                parts = (value.value, value.low, value.high) if value else (None,) * 3
                line |= dict(zip((name, f"{name}_low", f"{name}_high"), parts))
            else:
                line[name] = value
        flat.append(line)
    writer = csv.DictWriter(text, flat[0])
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def draw(rows: list[Row], experiment: Experiment, pictures: list[Path]) -> None:
    """tau against m (one temperature) or against temperature, one panel a bench."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    benches = [bench for bench in dict.fromkeys(row.bench for row in rows) if bench != MEAN]
    figure, axes = pyplot.subplots(1, len(benches), figsize=(3.6 * len(benches), 3.4), sharey=False, layout="constrained", squeeze=False)
    for axis, bench in zip(axes[0], benches):
        here = [row for row in rows if row.bench == bench and row.tau]
        if len(experiment.temperatures) > 1:
            for arm in dict.fromkeys(row.arm for row in here):
                points = [row for row in here if row.arm == arm]
                errors = [0 if p.tau.low is None else p.tau.high - p.tau.value for p in points]
                axis.errorbar([p.temperature for p in points], [p.tau.value for p in points], errors, marker="o", capsize=3, label=arm)
            axis.set_xlabel("temperature")
        else:
            sampled = [row for row in here if row.arm.startswith("rheo")]
            errors = [0 if p.tau.low is None else p.tau.high - p.tau.value for p in sampled]
            leads = [int(p.arm[len("rheo-m")]) for p in sampled]
            axis.errorbar(leads, [p.tau.value for p in sampled], errors, marker="o", capsize=3, label="rheo")
            top = next(row for row in here if row.arm == "topk")
            axis.axhline(top.tau.value, color="gray", linestyle="--", label="topk")
            if top.tau.low is not None:
                axis.axhspan(top.tau.low, top.tau.high, color="gray", alpha=0.15)
            axis.set_xlabel("m")
            axis.set_xticks(leads)
        axis.set_title(BENCH_LABELS[bench])
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("tau")
    axes[0][0].legend()
    for picture in pictures:
        with replacing(picture) as scratch:
            figure.savefig(scratch, dpi=160)
    pyplot.close(figure)


def write(name: str, pair: str, folder: Path, output: Path) -> None:
    """Write the table or figure of the answers in ``folder`` to ``output``, and print it."""
    results = Results(name, pair, folder)
    rows = results.rows()
    sources = [Sources.of(arm, temperature, records) for arm, temperature, records in results.drafted()]
    text = markdown(rows, results.experiment) + "\n" + sources_table(sources)
    replace_text(output / f"{name}.md", text)
    replace_text(output / f"{name}-sources.json", json.dumps([asdict(row) for row in sources], indent=1) + "\n")
    replace_text(output / f"{name}.csv", as_csv(rows))
    replace_text(output / f"{name}.json", json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if name.startswith("figure"):
        draw(rows, results.experiment, [output / f"{name}.{kind}" for kind in ("png", "svg")])
    print(text)
    print(f"The same as CSV, JSON and, for figures, pictures: {output}")


def main(argv: list[str] | None = None) -> None:
    """Entry point; bad input ends with one line, not a traceback."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.tables", description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    parser.add_argument("name", choices=EXPERIMENTS)
    flags.add_pair(parser)
    parser.add_argument("--max-new-token", type=int, default=1024)
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--output", type=Path, help="folder; default: beside the answers")
    args = parser.parse_args(argv)
    with one_line_errors():
        folder = settings_folder(args.results, args.name, flags.pair_folder(args), args.max_new_token)
        write(args.name, args.pair, folder, args.output or folder)


if __name__ == "__main__":
    main()
