"""Estimates clustered by question against their literal definitions."""

import pytest
import torch
from scipy import stats

from evaluation.common.statistics import Statistic, ratio, ratio_of_ratios


def test_interval_of_a_ratio_equals_its_literal_definition():
    y, x = {1: 10.0, 2: 3.0, 3: 8.0}, {1: 5.0, 2: 2.0, 3: 3.0}
    estimate = ratio(y, x)
    r = 21 / 10
    variance = 3 / 2 * sum((y[k] - r * x[k]) ** 2 for k in y) / 10**2
    quantile = 4.302652729696142  # of the t distribution with 2 degrees of freedom
    assert estimate.value == pytest.approx(r)
    assert estimate.high - estimate.value == pytest.approx(quantile * variance**0.5)


def test_interval_of_a_ratio_covers_the_true_value():
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(400):
        counts = torch.randint(1, 9, (40,), generator=generator)
        sums = counts * 2.5 + torch.randn(40, generator=generator) * 3
        found = ratio(dict(enumerate(sums.tolist())), dict(enumerate(counts.tolist())))
        hits += found.low <= 2.5 <= found.high
    assert 360 <= hits <= 396  # 95 % of 400 is 380; 4.6 standard deviations either way


def test_ratio_of_ratios_is_paired_by_question():
    y, x = {1: 10.0, 2: 30.0}, {1: 5.0, 2: 6.0}
    double = {k: 2 * v for k, v in y.items()}
    estimate = ratio_of_ratios(double, x, y, x)
    assert (estimate.value, estimate.low, estimate.high) == (2.0, 2.0, 2.0)


def test_a_mean_of_benches_and_a_paired_difference_have_their_literal_errors():
    a, b = {1: 4.0, 2: 9.0, 3: 2.0}, {1: 2.0, 2: 3.0, 3: 2.0}
    c, d = {1: 3.0, 2: 9.0, 3: 1.0}, {1: 2.0, 2: 4.0, 3: 1.0}
    first, second = Statistic.ratio(a, b), Statistic.ratio(c, d)
    difference = first.minus(second)
    r, s = 15 / 7, 13 / 7
    u = [(a[k] - r * b[k]) / 7 - (c[k] - s * d[k]) / 7 for k in a]
    assert difference.value == pytest.approx(r - s)
    assert difference.error == pytest.approx((3 / 2 * sum(x * x for x in u)) ** 0.5)
    mean = Statistic.mean({"x": first, "y": second})
    assert mean.value == pytest.approx((r + s) / 2) and len(mean.influence) == 6
    assert first.minus(first).p_value() == 1.0
    assert Statistic(1.0, {1: 0.0, 2: 0.0}).p_value() == 0.0
    assert difference.p_value() == pytest.approx(2 * stats.t.sf((r - s) / difference.error, 2))
