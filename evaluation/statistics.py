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


def ratio(numerators: dict, denominators: dict) -> Estimate | None:
    """``sum(numerators) / sum(denominators)`` over questions; None where the denominator is 0.

    The interval is the linearised ("sandwich") one with the question as the cluster: its variance is
    ``G/(G-1) * sum_g (y_g - r x_g)^2 / (sum x)^2`` over G questions, with a t quantile of G-1 degrees.

    Args:
        numerators, denominators: per question id, summed over everything that belongs to the question.
    """
    keys = list(denominators)
    y = np.array([numerators[k] for k in keys], dtype=float)
    x = np.array([denominators[k] for k in keys], dtype=float)
    if x.sum() == 0:
        return None
    value = y.sum() / x.sum()
    half = _half_width((y - value * x) / x.sum())
    return Estimate(float(value), *_around(value, half), len(keys))


def ratio_of_ratios(y1: dict, x1: dict, y0: dict, x0: dict) -> Estimate | None:
    """``(sum y1 / sum x1) / (sum y0 / sum x0)``, paired by question; interval on the log scale, clustered by question.

    The same numbers in both arms give exactly 1 with an interval of width 0.
    """
    keys = list(x1)
    a, b, c, d = (np.array([s[k] for k in keys], dtype=float) for s in (y1, x1, y0, x0))
    if min(a.sum(), b.sum(), c.sum(), d.sum()) == 0:
        return None
    value = (a.sum() / b.sum()) / (c.sum() / d.sum())
    influence = (a / a.sum() - b / b.sum()) - (c / c.sum() - d / d.sum())
    half = _half_width(influence)
    if half is None:
        return Estimate(float(value), None, None, len(keys))
    return Estimate(float(value), float(value * math.exp(-half)), float(value * math.exp(half)), len(keys))


def _half_width(influence: np.ndarray) -> float | None:
    """Half the 95 % interval of a sum of per-question influences."""
    n = influence.size
    if n < 2:
        return None
    return float(stats.t.ppf(0.975, n - 1) * math.sqrt(n / (n - 1) * np.square(influence).sum()))


def _around(value: float, half: float | None) -> tuple[float | None, float | None]:
    return (None, None) if half is None else (float(value - half), float(value + half))


@dataclass(frozen=True)
class Fit:
    """Pearson's chi-square of counts against a known law; ``detectable`` as in ``goodness_of_fit``."""

    statistic: float
    degrees: int
    p_value: float
    detectable: float


def goodness_of_fit(
    groups: list[tuple[np.ndarray, np.ndarray]], false_alarm: float, power: float = 0.9, pool_below: float = 5.0
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
        if expected.size > 1 and expected[-1] < pool_below:  # the pool itself is small: into the smallest cell
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
    return Fit(statistic, degrees, float(stats.chi2.sf(statistic, degrees)), min(1.0, math.sqrt(noncentrality / n) / 2))
