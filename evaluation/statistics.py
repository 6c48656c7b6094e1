"""Ratios of sums with confidence intervals clustered by question."""

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats


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
