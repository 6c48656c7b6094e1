"""The statistical test of a user's own pair passes on correct code, and fails on faults."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from support.tiny import PROMPT, tiny_pair

import rheo.verification
from eagle.model.cache import TargetCache
from evaluation.checks import black_box
from evaluation.checks.black_box import (
    FALSE_ALARM,
    cell_of,
    check_long_texts,
    check_short_texts,
    report_long_texts,
    report_short_texts,
)
from evaluation.common.statistics import goodness_of_fit
from rheo.certify import __main__ as certifier

RHEO = {"temperature": 1.0, "sampling": "rheo", "m": 1}


@pytest.fixture(scope="module")
def model():
    networks = {"vocab": 8, "draft_vocab": 6, "layers": 2, "aux_layers": (0, 1), "hidden": 8}
    return tiny_pair(**networks, total_token=6, depth=1, top_k=3, seed=2)


@pytest.mark.parametrize(
    "method",
    [
        {"sampling": "topk"},
        {"sampling": "rheo", "m": 1},
        {"sampling": "rheo", "m": 1, "verification": "rrsw"},
    ],
    ids=str,
)
def test_correct_code_passes_and_the_detectable_fault_is_reported(model, method):
    found = check_short_texts(model, PROMPT, model.options(temperature=1.0, **method), 400)
    assert found.fit.p_value > FALSE_ALARM and found.fit.degrees > 8
    assert 0 < found.fit.detectable < 0.3
    assert found.used > 300 and found.accepted > 0
    assert "Nothing speaks against" in report_short_texts(found, 400)


def test_verification_without_its_residual_fails(model, monkeypatch):
    monkeypatch.setattr(rheo.verification, "unless_zero", lambda weights, otherwise: otherwise)
    found = check_short_texts(model, PROMPT, model.options(**RHEO), 600)
    assert found.fit.p_value < FALSE_ALARM and "NOT LOSSLESS" in report_short_texts(found, 600)


def test_longer_texts_pass_and_a_cache_that_keeps_the_wrong_rows_fails(model, monkeypatch):
    """The rows that stay in the cache matter for later tokens only; three tokens do not show it."""
    options = model.options(**RHEO)
    fit = check_long_texts(model, PROMPT, options, 60, 24)
    assert fit.p_value > FALSE_ALARM and fit.degrees == 9
    assert "Nothing speaks" in report_long_texts(fit)

    keep = TargetCache.keep

    def keep_the_first(cache, rows):
        keep(cache, torch.arange(rows.numel()))

    monkeypatch.setattr(TargetCache, "keep", keep_the_first)
    fit = check_long_texts(model, PROMPT, options, 60, 24)
    assert fit.p_value < FALSE_ALARM and "NOT LOSSLESS" in report_long_texts(fit)


def test_a_token_that_the_filter_bans_fails_at_once(model, monkeypatch):
    options = model.options(**RHEO, top_k=2)
    assert check_short_texts(model, PROMPT, options, 60).impossible == []
    generate, unfiltered = model.generate, replace(options.warpers, top_k=0)

    def generate_unfiltered(ids, given):
        return generate(ids, replace(given, warpers=unfiltered))

    monkeypatch.setattr(model, "generate", generate_unfiltered)
    found = check_short_texts(model, PROMPT, options, 60)
    assert found.impossible and "NOT LOSSLESS" in report_short_texts(found, 60)


def test_a_certain_continuation_is_reported_as_no_test(model):
    found = check_short_texts(model, PROMPT, model.options(**RHEO, top_k=1), 30)
    assert found.fit.degrees == 0 and not found.impossible
    assert "No test" in report_short_texts(found, 30)


def test_every_text_has_one_cell():
    cells = {(3,): 6.0, (1, 2): 7.0, (1, -1): 2.0, (-1,): 4.0}
    expected = {
        (3, 9): (3,),
        (3,): (3,),
        (1, 2): (1, 2),
        (1, 5): (1, -1),
        (1,): (1, -1),
        (7, 1): (-1,),
    }
    assert {rest: cell_of(rest, cells) for rest in expected} == expected


def test_the_certifier_names_the_command_that_tests_a_pair(capsys):
    with pytest.raises(SystemExit):
        certifier.main(["--model", "smollm2-demo"])
    assert "python -m evaluation.checks.black_box --model B" in capsys.readouterr().err


def test_too_few_samples_are_refused():
    with pytest.raises(SystemExit) as stop:
        black_box.main(["--model", "smollm2-demo", "--samples", "3"])
    assert "--samples is 3; at least 20 are needed" in str(stop.value)


def test_the_command_line_passes_m_on_and_reports_both_tests(capsys, monkeypatch, model):
    seen = []
    monkeypatch.setattr(black_box.EaModel, "from_pretrained", lambda **settings: model)
    monkeypatch.setattr(black_box, "check_template", lambda *args: None)
    monkeypatch.setattr(black_box, "build_prompt", lambda *args: PROMPT)

    def recorded(model, prompt, options, samples):
        seen.append(options.m)
        return check_short_texts(model, prompt, options, samples)

    monkeypatch.setattr(black_box, "check_short_texts", recorded)
    assert black_box.main(["--model=x", "--m", "0", "--samples", "150", "--texts", "8"]) == 0
    out = capsys.readouterr().out
    assert seen == [0] and "150 continuations" in out and "longer texts" in out


def test_an_abbreviated_or_unknown_flag_is_refused(capsys):
    with pytest.raises(SystemExit):
        black_box.main(["--model", "x", "--full"])
    assert "unrecognized arguments: --full" in capsys.readouterr().err


def test_goodness_of_fit_equals_scipys_chi_square():
    expected, counts = np.array([50.0, 30.0, 20.0]), np.array([60.0, 25.0, 15.0])
    fit, theirs = goodness_of_fit([(counts, expected)], 1e-6), stats.chisquare(counts, expected)
    assert fit.degrees == 2
    assert (fit.statistic, fit.p_value) == pytest.approx((theirs.statistic, theirs.pvalue))


def test_goodness_of_fit_pools_small_cells_and_refuses_impossible_counts():
    # Three expected counts are too few for a cell of their own.
    counts, expected = np.array([60.0, 25, 15, 3, 0]), np.array([50.0, 30, 20, 1.5, 1.5])
    assert goodness_of_fit([(counts, expected)], 1e-6).degrees == 2
    assert goodness_of_fit([(np.array([9.0, 1.0]), np.array([10.0, 0.0]))], 1e-6).p_value == 0


def test_goodness_of_fit_detects_a_deviation_as_often_as_it_says():
    n, generator, p = 2000, np.random.default_rng(0), np.full(10, 0.1)
    fit = goodness_of_fit([(generator.multinomial(n, p), n * p)], 1e-3)
    # The hardest direction, at a total variation of fit.detectable.
    shifted = p + fit.detectable / 5 * np.array([1, -1] * 5)
    fits = [goodness_of_fit([(generator.multinomial(n, shifted), n * p)], 1e-3) for _ in range(400)]
    failed = sum(fit.p_value < 1e-3 for fit in fits)
    assert 0.84 < failed / 400 < 0.96  # 0.9 up to four standard errors
