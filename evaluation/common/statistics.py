"""Ratios of sums with confidence intervals clustered by question."""

import math
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval; the interval is None where fewer than two questions stand behind it."""

    value: float
    low: float | None
    high: float | None
    questions: int


@dataclass(frozen=True)
class Statistic:
    """A value with what each question contributes to its error, to first order (the linearised, or "sandwich", variance).

    So differences, logarithms and means of ratios keep what their parts share: the same question in two methods is one cluster.

    Attributes:
        influence: per question; the contributions sum to 0 for a ratio.
    """

    value: float
    influence: dict

    @classmethod
    def ratio(cls, numerators: dict, denominators: dict) -> "Statistic | None":
        """``sum(numerators) / sum(denominators)``, each given per question; None where the denominator is 0."""
        total = float(sum(denominators.values()))
        if total == 0:
            return None
        value = float(sum(numerators[k] for k in denominators)) / total
        return cls(value, {k: (numerators[k] - value * x) / total for k, x in denominators.items()})

    @classmethod
    def mean(cls, parts: dict) -> "Statistic | None":
        """The unweighted mean of several statistics, by name, whose questions have nothing to do with each other; None where one is None."""
        if None in parts.values():
            return None
        influence = {
            (name, k): u / len(parts)
            for name, part in parts.items()
            for k, u in part.influence.items()
        }
        return cls(sum(part.value for part in parts.values()) / len(parts), influence)

    @classmethod
    def mean_of_same(cls, parts: list["Statistic"]) -> "Statistic":
        """The unweighted mean of several statistics of the same questions, each of which stays one cluster."""
        questions = {question for part in parts for question in part.influence}
        influence = {
            k: sum(part.influence.get(k, 0.0) for part in parts) / len(parts) for k in questions
        }
        return cls(sum(part.value for part in parts) / len(parts), influence)

    def times(self, factor: float) -> "Statistic":
        return Statistic(self.value * factor, {k: u * factor for k, u in self.influence.items()})

    def minus(self, other: "Statistic") -> "Statistic":
        """The difference to ``other`` on the same questions."""
        return Statistic(
            self.value - other.value, {k: u - other.influence[k] for k, u in self.influence.items()}
        )

    def log(self) -> "Statistic":
        return Statistic(
            math.log(self.value), {k: u / self.value for k, u in self.influence.items()}
        )

    @property
    def error(self) -> float | None:
        """Standard error: ``sqrt(G / (G-1) * sum of squares)`` over G questions; None for fewer than two."""
        n = len(self.influence)
        return (
            None if n < 2 else math.sqrt(n / (n - 1) * sum(u * u for u in self.influence.values()))
        )

    def estimate(self) -> Estimate:
        """The value with its interval, by a t quantile of G - 1 degrees."""
        n, error = len(self.influence), self.error
        if error is None:
            return Estimate(self.value, None, None, n)
        half = float(stats.t.ppf(0.975, n - 1)) * error
        return Estimate(self.value, self.value - half, self.value + half, n)

    def p_value(self) -> float | None:
        """Two-sided t test of the value being 0; None for fewer than two questions."""
        if self.error is None:
            return None
        if self.error == 0:
            return 1.0 if self.value == 0 else 0.0
        return float(2 * stats.t.sf(abs(self.value) / self.error, len(self.influence) - 1))


def ratio(numerators: dict, denominators: dict) -> Estimate | None:
    """``sum(numerators) / sum(denominators)`` over questions; None where the denominator is 0.

    Args:
        numerators, denominators: per question id, summed over everything that belongs to the question.
    """
    found = Statistic.ratio(numerators, denominators)
    return found and found.estimate()


def ratio_of_ratios(y1: dict, x1: dict, y0: dict, x0: dict) -> Estimate | None:
    """``(sum y1 / sum x1) / (sum y0 / sum x0)``, paired by question; interval on the log scale, clustered by question.

    The same numbers in both methods give exactly 1 with an interval of width 0.
    """
    first, second = (Statistic.ratio(y, {k: x[k] for k in x1}) for y, x in ((y1, x1), (y0, x0)))
    if not (first and second and first.value and second.value):
        return None
    log = first.log().minus(second.log()).estimate()
    value = first.value / second.value
    if log.low is None:
        return Estimate(value, None, None, log.questions)
    return Estimate(
        value,
        value * math.exp(log.low - log.value),
        value * math.exp(log.high - log.value),
        log.questions,
    )


@dataclass(frozen=True)
class Fit:
    """Pearson's chi-square of counts against a known law; ``detectable`` as in ``goodness_of_fit``."""

    statistic: float
    degrees: int
    p_value: float
    detectable: float


def goodness_of_fit(
    groups: list[tuple[np.ndarray, np.ndarray]],
    false_alarm: float,
    power: float = 0.9,
    pool_below: float = 5.0,
) -> Fit:
    """Do counts follow their law? One chi-square over independent groups, each with its own total.

    Args:
        groups: per group (counts, expected counts) over the same cells, both with the same total. Cells expected less than
            ``pool_below`` times are pooled. A count in a cell of expectation 0 makes the p-value 0.
        false_alarm, power: of the test that ``detectable`` is about.

    Returns:
        ``detectable``: every law whose total variation distance to the expected one is at least this (over the pooled cells,
        averaged over the groups' draws) fails the test with probability ``power``. Since the sum of |a - b| is at most the root of the sum
        of (a - b)^2 / b, it is half the root of noncentrality over draws. 1 where no deviation would.
    """
    statistic, degrees, n = 0.0, 0, 0.0
    for counts, expected in groups:
        counts, expected = np.asarray(counts, float), np.asarray(expected, float)
        if counts[expected == 0].any():
            return Fit(math.inf, max(degrees, 1), 0.0, 0.0)
        small = expected < pool_below
        counts, expected = (np.append(x[~small], x[small].sum()) for x in (counts, expected))
        if (
            expected.size > 1 and expected[-1] < pool_below
        ):  # the pool itself is small: into the smallest cell
            smallest = expected[:-1].argmin()
            counts[smallest] += counts[-1]
            expected[smallest] += expected[-1]
            counts, expected = counts[:-1], expected[:-1]
        statistic += float(((counts - expected) ** 2 / expected).sum())
        degrees, n = degrees + expected.size - 1, n + expected.sum()
    if degrees == 0:
        return Fit(statistic, 0, 1.0, 1.0)
    critical = stats.chi2.isf(false_alarm, degrees)

    def missing(noncentrality):
        return stats.ncx2.sf(critical, degrees, noncentrality) - power

    noncentrality = optimize.brentq(missing, 1e-9, 20 * critical + 100)
    return Fit(
        statistic,
        degrees,
        float(stats.chi2.sf(statistic, degrees)),
        min(1.0, math.sqrt(noncentrality / n) / 2),
    )
