"""The numbers of an experiment's table, computed from its answers."""

from collections.abc import Iterable
from dataclasses import dataclass

from evaluation.common.answer_file import totals
from evaluation.common.statistics import Estimate, Statistic, exponential
from evaluation.contexts import calibration
from evaluation.paper.grids import BENCHES, MEAN, PAPER, PLAIN, Method, Reported
from evaluation.paper.results import Results
from rheo import KIND_NAMES


@dataclass(frozen=True)
class Row:
    """One method at one temperature on one bench, or on the unweighted mean of the benches.

    Attributes:
        method: its name.
        temperature: the decoding temperature.
        bench: a question set, or ``MEAN``.
        questions: number of questions.
        seeds: number of seeds.
        cycles: number of cycles.
        tau: accepted + 1 per cycle; None for plain decoding.
        difference: tau minus that of the first drafting method at this temperature, paired by
            question.
        p_value: t test that the difference is 0.
        tokens_per_sec: of whole requests, prefill included; None for the mean.
        speedup: tokens per second over those of plain decoding, if the experiment has it. The mean
            over benches is the geometric one.
        draft_ms: milliseconds of drafting per cycle; None if it was not timed.
        paper: the paper's tau.
        paper_speedup: the paper's speedup, for the mean only.
        paper_draft_ms: the paper's milliseconds of drafting, for the mean only.
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


class Measured:
    """What was measured at one temperature, as statistics by method and bench.

    Args:
        results: the answers.
        temperature: the decoding temperature.
    """

    def __init__(self, results: Results, temperature: float):
        self.sums = {
            (method, bench): totals(results.records[bench, method, temperature])
            for method in results.experiment.methods
            for bench in results.benches
        }

    def total(self, quantity: str, method: Method, benches: Iterable[str]) -> float:
        """The sum of a quantity over all questions."""
        return sum(sum(self.sums[method, bench][quantity].values()) for bench in benches)

    def questions(self, method: Method, benches: Iterable[str]) -> int:
        """Number of questions."""
        return sum(len(self.sums[method, bench]["tokens"]) for bench in benches)

    def ratio(self, above: str, below: str, method: Method, bench: str) -> Statistic | None:
        """The ratio of two quantities on one bench."""
        sums = self.sums[method, bench]
        return Statistic.ratio(sums[above], sums[below])

    def mean_ratio(
        self, above: str, below: str, method: Method, benches: Iterable[str]
    ) -> Statistic | None:
        """The unweighted mean over benches of the ratio of two quantities."""
        return Statistic.mean({b: self.ratio(above, below, method, b) for b in benches})

    def log_speedup(self, method: Method, benches: Iterable[str]) -> Statistic:
        """The logarithm of the speedup over plain decoding, its mean over benches."""
        logs = {
            bench: [self.ratio("tokens", "seconds", m, bench).log() for m in (method, PLAIN)]
            for bench in benches
        }
        return Statistic.mean({bench: log.minus(plain) for bench, (log, plain) in logs.items()})


def compute_rows(results: Results) -> list[Row]:
    """All temperatures, methods and benches, the mean over benches last."""
    rows = []
    for temperature in results.experiment.temperatures:
        measured = Measured(results, temperature)
        for method in results.experiment.methods:
            for bench in [*results.benches, MEAN]:
                rows.append(compute_row(results, measured, method, temperature, bench))
    return rows


def compute_row(
    results: Results, measured: Measured, method: Method, temperature: float, bench: str
) -> Row:
    """One row of the table."""
    benches = results.benches if bench == MEAN else [bench]
    reference = results.experiment.drafting[0]
    tau = difference = drafting = speedup = None
    if method != PLAIN:
        tau = measured.mean_ratio("accepted", "cycles", method, benches)
        drafting = measured.mean_ratio("drafting", "cycles", method, benches)
        if PLAIN in results.experiment.methods:
            speedup = measured.log_speedup(method, benches)
        base = measured.mean_ratio("accepted", "cycles", reference, benches)
        if tau and base and method != reference:
            difference = tau.minus(base)
    speed = None if bench == MEAN else measured.ratio("tokens", "seconds", method, bench)
    reported = PAPER.get((results.name, results.label, method.name), Reported({}))
    of_paper = bench != MEAN or results.benches == list(BENCHES)  # its mean is over all six benches
    return Row(
        method=method.name,
        temperature=temperature,
        bench=bench,
        questions=measured.questions(method, benches),
        seeds=len(set.union(*(results.seeds[b] for b in benches))),
        cycles=int(measured.total("cycles", method, benches)),
        tau=tau and tau.estimate(),
        difference=difference and difference.estimate(),
        p_value=difference and difference.p_value(),
        tokens_per_sec=speed and speed.estimate(),
        speedup=speedup and exponential(speedup),
        draft_ms=drafting.times(1000).estimate() if drafting and drafting.value else None,
        paper=reported.tau.get(bench) if of_paper else None,
        paper_speedup=reported.speedup if bench == MEAN and of_paper else None,
        paper_draft_ms=reported.draft_ms if bench == MEAN else None,
    )


@dataclass(frozen=True)
class Sources:
    """Where the accepted tokens of a method come from, over all benches.

    Attributes:
        method: its name.
        temperature: the decoding temperature.
        kinds: accepted tokens per cycle, by slot kind.
        levels: for k = 1, 2, ...: of the cycles that accept at least k - 1 tokens, the share that
            accepts at least k.
        survival: share of the visited nodes with children whose sampled slot is among the children;
            None for Top-K.
        calibration: how often slots are accepted, by kind and proxy; None if the answers do not
            record it.
    """

    method: str
    temperature: float
    kinds: dict[str, float]
    levels: list[float]
    survival: float | None
    calibration: calibration.Curves | None


def compute_sources(results: Results) -> list[Sources]:
    """The sources of each drafting method at each temperature."""
    found = []
    for temperature in results.experiment.temperatures:
        for method in results.experiment.drafting:
            records = (results.records[bench, method, temperature] for bench in results.benches)
            choices = [c for of_bench in records for record in of_bench for c in record["choices"]]
            found.append(sources_of(method, temperature, choices))
    return found


def sources_of(method: Method, temperature: float, choices: list[dict]) -> Sources:
    """The sources of one method at one temperature."""
    cycles = [cycle for choice in choices for turn in choice["accepted_kinds"] for cycle in turn]
    n, longest = len(cycles), max(map(len, cycles), default=0)
    kinds = {kind: sum(c.count(kind[0]) for c in cycles) / max(n, 1) for kind in KIND_NAMES}
    reached = [sum(len(cycle) >= level for cycle in cycles) for level in range(longest + 1)]
    levels = [deeper / here for here, deeper in zip(reached, reached[1:])]
    visited = [cycle for c in choices for turn in c.get("survivals", ()) for cycle in turn]
    survived, nodes = sum(cycle.count("1") for cycle in visited), sum(map(len, visited))
    tallies = [turn for choice in choices for turn in choice.get("calibration", ())]
    return Sources(
        method=method.name,
        temperature=temperature,
        kinds=kinds,
        levels=levels,
        survival=survived / nodes if nodes and method.sampling == "rheo" else None,
        calibration=calibration.curves(tallies) if tallies else None,
    )
