"""Ratios of sums with confidence intervals clustered by question, and a goodness-of-fit test."""

import math
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % confidence interval.

    Attributes:
        value: the estimate itself.
        low: lower end of the interval; None if there are fewer than two questions.
        high: upper end, likewise.
        questions: number of questions (clusters).
    """

    value: float
    low: float | None
    high: float | None
    questions: int


def show(estimate: Estimate | None, sign: bool = False, digits: int = 2) -> str:
    """An estimate with half the width of its interval, as ``2.13 ± 0.05``; empty for None.

    Args:
        estimate: what to show.
        sign: whether a positive value gets a plus sign, as differences should.
        digits: decimal places.
    """
    if estimate is None:
        return ""
    value = f"{estimate.value:{'+' if sign else ''}.{digits}f}"
    if estimate.low is None:
        return value
    return f"{value} ± {(estimate.high - estimate.low) / 2:.{digits}f}"


@dataclass(frozen=True)
class Statistic:
    """A value, and the influence of each question on it.

    The variance is that of the first-order expansion (linearised or "sandwich" variance). Since
    influences add up, differences and means of statistics count a question that they share as one
    cluster.

    Attributes:
        value: the statistic itself.
        influence: by question, its first-order contribution to the error; the contributions to a
            ratio sum to 0.
    """

    value: float
    influence: dict

    @classmethod
    def ratio(cls, numerators: dict, denominators: dict) -> "Statistic | None":
        """``sum(numerators) / sum(denominators)``, or None if the denominator is 0.

        Args:
            numerators: by question.
            denominators: by question; its keys decide which questions count.
        """
        total = float(sum(denominators.values()))
        if total == 0:
            return None
        value = float(sum(numerators[k] for k in denominators)) / total
        return cls(value, {k: (numerators[k] - value * x) / total for k, x in denominators.items()})

    @classmethod
    def mean(cls, parts: dict) -> "Statistic | None":
        """The unweighted mean of statistics with different questions; None if one of them is None.

        Args:
            parts: statistics by name. Equal question ids in two of them are different questions.
        """
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
        """The unweighted mean of statistics of the same questions; each question is one cluster."""
        n = len(parts)
        questions = {question for part in parts for question in part.influence}
        influence = {k: sum(part.influence.get(k, 0.0) for part in parts) / n for k in questions}
        return cls(sum(part.value for part in parts) / n, influence)

    def times(self, factor: float) -> "Statistic":
        """The statistic times a number."""
        return Statistic(self.value * factor, {k: u * factor for k, u in self.influence.items()})

    def minus(self, other: "Statistic") -> "Statistic":
        """The difference to another statistic of the same questions, paired by question."""
        influence = {k: u - other.influence[k] for k, u in self.influence.items()}
        return Statistic(self.value - other.value, influence)

    def log(self) -> "Statistic":
        """The natural logarithm of the statistic."""
        influence = {k: u / self.value for k, u in self.influence.items()}
        return Statistic(math.log(self.value), influence)

    @property
    def error(self) -> float | None:
        """Standard error of the value; None for fewer than two questions.

        With G questions it is ``sqrt(G / (G - 1) * sum of squared influences)``.
        """
        n = len(self.influence)
        if n < 2:
            return None
        return math.sqrt(n / (n - 1) * sum(u * u for u in self.influence.values()))

    def estimate(self) -> Estimate:
        """The value with its interval, from the t distribution with G - 1 degrees of freedom."""
        n, error = len(self.influence), self.error
        if error is None:
            return Estimate(self.value, None, None, n)
        half = float(stats.t.ppf(0.975, n - 1)) * error
        return Estimate(self.value, self.value - half, self.value + half, n)

    def p_value(self) -> float | None:
        """Two-sided t test that the value is 0; None for fewer than two questions."""
        error = self.error
        if error is None:
            return None
        if error == 0:
            return 1.0 if self.value == 0 else 0.0
        return float(2 * stats.t.sf(abs(self.value) / error, len(self.influence) - 1))


def exponential(log: Statistic) -> Estimate:
    """The estimate of a ratio from the statistic of its logarithm."""
    found = log.estimate()
    low, high = (None if x is None else math.exp(x) for x in (found.low, found.high))
    return Estimate(math.exp(found.value), low, high, found.questions)


def ratio(numerators: dict, denominators: dict) -> Estimate | None:
    """``sum(numerators) / sum(denominators)``, or None if the denominator is 0.

    Args:
        numerators: by question id, summed over everything that belongs to the question.
        denominators: by question id, likewise.
    """
    found = Statistic.ratio(numerators, denominators)
    return found and found.estimate()


def ratio_of_ratios(y1: dict, x1: dict, y0: dict, x0: dict) -> Estimate | None:
    """``(sum y1 / sum x1) / (sum y0 / sum x0)``, paired by question; None if a sum is 0.

    The interval is made on the log scale. Equal numbers in both methods give exactly 1 with an
    interval of width 0.

    Args:
        y1: numerators of the first ratio, by question.
        x1: its denominators; their keys decide which questions count.
        y0: numerators of the second ratio.
        x0: its denominators.
    """
    first, second = (Statistic.ratio(y, {k: x[k] for k in x1}) for y, x in ((y1, x1), (y0, x0)))
    if not (first and second and first.value and second.value):
        return None
    log = first.log().minus(second.log()).estimate()
    value = first.value / second.value
    if log.low is None:
        return Estimate(value, None, None, log.questions)
    low, high = (value * math.exp(end - log.value) for end in (log.low, log.high))
    return Estimate(value, low, high, log.questions)


@dataclass(frozen=True)
class Fit:
    """Pearson's chi-square test of counts against a known distribution.

    Attributes:
        statistic: chi-square.
        degrees: degrees of freedom.
        p_value: probability of a statistic at least this large, if the distribution is right.
        detectable: smallest total variation distance that the test detects, see
            ``goodness_of_fit``.
    """

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
    """Test whether counts follow their distribution, by one chi-square over independent groups.

    ``detectable`` is the total variation distance (over the merged cells, averaged over the
    samples of all groups) from which on a wrong distribution fails the test with probability
    ``power``. The sum of ``|a - b|`` is at most the root of the sum of ``(a - b)^2 / b``, so
    the distance is half the root of noncentrality over samples. It is 1 if no deviation would be
    detected.

    Args:
        groups: for each group its counts and its expected counts, over the same cells and with
            the same total. A count in a cell with expectation 0 makes the p-value 0.
        false_alarm: probability that the right distribution fails the test.
        power: probability that a distribution at the detectable distance fails the test.
        pool_below: cells with a smaller expected count are merged into one.
    """
    statistic, degrees, samples = 0.0, 0, 0.0
    for counts, expected in groups:
        counts, expected = np.asarray(counts, float), np.asarray(expected, float)
        if counts[expected == 0].any():
            return Fit(math.inf, max(degrees, 1), 0.0, 0.0)
        counts, expected = merge_small_cells(counts, expected, pool_below)
        statistic += float(((counts - expected) ** 2 / expected).sum())
        degrees, samples = degrees + expected.size - 1, samples + expected.sum()
    if degrees == 0:
        return Fit(statistic, 0, 1.0, 1.0)
    critical = stats.chi2.isf(false_alarm, degrees)

    def excess_power(noncentrality: float) -> float:
        return stats.ncx2.sf(critical, degrees, noncentrality) - power

    noncentrality = optimize.brentq(excess_power, 1e-9, 20 * critical + 100)
    detectable = min(1.0, math.sqrt(noncentrality / samples) / 2)
    return Fit(statistic, degrees, float(stats.chi2.sf(statistic, degrees)), detectable)


def merge_small_cells(
    counts: np.ndarray, expected: np.ndarray, pool_below: float
) -> tuple[np.ndarray, np.ndarray]:
    """Counts and expected counts, all cells with a small expectation merged into a last one.

    If that last cell is still small, it is merged into the smallest of the others.
    """
    small = expected < pool_below
    counts, expected = (np.append(x[~small], x[small].sum()) for x in (counts, expected))
    if expected.size > 1 and expected[-1] < pool_below:
        smallest = expected[:-1].argmin()
        counts[smallest] += counts[-1]
        expected[smallest] += expected[-1]
        counts, expected = counts[:-1], expected[:-1]
    return counts, expected
