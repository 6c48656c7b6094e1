"""The statistical test that users point at their own pair: it passes on the right code, and fails where it should."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from support.tiny import PROMPT, tiny_pair

import rheo.verification
from eagle.model.cache import TargetCache
from eagle.model.tuning.contexts import paired_logits
from evaluation.checks import black_box
from evaluation.checks.black_box import (
    FALSE_ALARM,
    cell_of,
    draw_and_rank,
    draw_and_test,
    report,
    report_texts,
)
from evaluation.common.statistics import goodness_of_fit
from evaluation.studies.rrsw import Tally
from rheo.certify import __main__ as certifier


@pytest.fixture(scope="module")
def model():
    return tiny_pair(
        vocab=8,
        draft_vocab=6,
        layers=2,
        aux_layers=(0, 1),
        hidden=8,
        total_token=6,
        depth=1,
        top_k=3,
        seed=2,
    )


METHODS = [
    {"sampling": "topk"},
    {"sampling": "rheo", "m": 1},
    {"sampling": "rheo", "m": 1, "verification": "rrsw"},
]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_right_code_passes_and_says_what_it_could_have_seen(model, method):
    fit, facts = draw_and_test(model, PROMPT, model.options(temperature=1.0, **method), 400)
    assert (
        fit.p_value > FALSE_ALARM
        and fit.degrees > 8
        and facts["used"] > 300
        and 0 < fit.detectable < 0.3
    )
    assert "Nothing speaks against" in report(fit, facts, 400) and facts["accepted"] > 0


def test_verification_without_its_residual_fails(model, monkeypatch):
    monkeypatch.setattr(rheo.verification, "unless_zero", lambda weights, otherwise: otherwise)
    fit, facts = draw_and_test(
        model, PROMPT, model.options(temperature=1.0, sampling="rheo", m=1), 600
    )
    assert fit.p_value < FALSE_ALARM and "NOT LOSSLESS" in report(fit, facts, 600)


def test_longer_texts_pass_and_a_cache_that_keeps_the_wrong_rows_fails(model, monkeypatch):
    """What is left in the cache after an acceptance decides later tokens only: three tokens never show it."""
    options = model.options(temperature=1.0, sampling="rheo", m=1)
    fit = draw_and_rank(model, PROMPT, options, 60, 24)
    assert fit.p_value > FALSE_ALARM and fit.degrees == 9 and "Nothing speaks" in report_texts(fit)
    keep = TargetCache.keep
    monkeypatch.setattr(
        TargetCache,
        "keep",
        lambda self, rows: keep(self, torch.arange(rows.numel())),
    )
    fit = draw_and_rank(model, PROMPT, options, 60, 24)
    assert fit.p_value < FALSE_ALARM and "NOT LOSSLESS" in report_texts(fit)


def test_a_token_that_the_filter_bans_fails_at_once(model, monkeypatch):
    options = model.options(temperature=1.0, top_k=2, sampling="rheo", m=1)
    assert draw_and_test(model, PROMPT, options, 60)[1]["impossible"] == []
    unfiltered, generate = (
        replace(options, warpers=replace(options.warpers, top_k=0)),
        model.generate,
    )
    monkeypatch.setattr(
        model,
        "generate",
        lambda ids, given: generate(
            ids, replace(unfiltered, seed=given.seed, max_new_tokens=given.max_new_tokens)
        ),
    )
    fit, facts = draw_and_test(model, PROMPT, options, 60)
    assert facts["impossible"] and "NOT LOSSLESS" in report(fit, facts, 60)


def test_a_certain_continuation_is_reported_as_no_test(model):
    fit, facts = draw_and_test(
        model, PROMPT, model.options(temperature=1.0, top_k=1, sampling="rheo", m=1), 30
    )
    assert fit.degrees == 0 and "No test" in report(fit, facts, 30) and not facts["impossible"]


def test_every_text_has_one_cell():
    cells = {(3,): 6.0, (1, 2): 7.0, (1, -1): 2.0, (-1,): 4.0}
    assert [cell_of(rest, cells) for rest in ((3, 9), (3,), (1, 2), (1, 5), (1,), (7, 1))] == [
        (3,),
        (3,),
        (1, 2),
        (1, -1),
        (1, -1),
        (-1,),
    ]


def test_the_certifier_names_the_command_that_tests_a_pair(capsys):
    with pytest.raises(SystemExit):
        certifier.main(["--model", "smollm2-demo"])
    assert "python -m evaluation.checks.black_box --model B" in capsys.readouterr().err


def test_too_few_samples_are_refused():
    with pytest.raises(SystemExit) as stop:
        black_box.main(["--model", "smollm2-demo", "--samples", "3"])
    assert "--samples is 3; at least 20 are needed" in str(stop.value)


def test_command_line_takes_m_and_says_what_it_takes(capsys, monkeypatch, model):
    seen = {}
    monkeypatch.setattr(
        "evaluation.checks.black_box.EaModel.from_pretrained", lambda *args, **kwargs: model
    )
    monkeypatch.setattr("evaluation.checks.black_box.check_template", lambda *args: None)
    monkeypatch.setattr("evaluation.checks.black_box.build_prompt", lambda *args: PROMPT)
    draw = draw_and_test

    def spy(model, prompt, options, samples):
        seen["m"] = options.m
        return draw(model, prompt, options, samples)

    monkeypatch.setattr("evaluation.checks.black_box.draw_and_test", spy)
    assert black_box.main(["--model=x", "--m", "0", "--samples", "150", "--texts", "8"]) == 0
    assert (
        seen["m"] == 0
        and "150 continuations" in (out := capsys.readouterr().out)
        and "longer texts" in out
    )
    with pytest.raises(SystemExit):
        black_box.main(["--model", "x", "--full"])
    assert "unrecognized arguments: --full" in capsys.readouterr().err


def test_goodness_of_fit_equals_scipy_and_its_power_is_what_it_says():
    expected = np.array([50.0, 30.0, 20.0])
    counts = np.array([60.0, 25.0, 15.0])
    fit, theirs = goodness_of_fit([(counts, expected)], 1e-6), stats.chisquare(counts, expected)
    assert fit.degrees == 2 and (fit.statistic, fit.p_value) == pytest.approx(
        (theirs.statistic, theirs.pvalue)
    )
    pooled = goodness_of_fit([(np.append(counts, [3, 0]), np.append(expected, [1.5, 1.5]))], 1e-6)
    assert pooled.degrees == 2  # 3 expected: too few for a cell of their own
    assert goodness_of_fit([(np.array([9.0, 1.0]), np.array([10.0, 0.0]))], 1e-6).p_value == 0

    n, generator = 2000, np.random.default_rng(0)
    p = np.full(10, 0.1)
    fit = goodness_of_fit([(generator.multinomial(n, p), n * p)], 1e-3)
    shifted = p + fit.detectable / 5 * np.array(
        [1, -1] * 5
    )  # total variation fit.detectable, the hardest direction
    failed = sum(
        goodness_of_fit([(generator.multinomial(n, shifted), n * p)], 1e-3).p_value < 1e-3
        for _ in range(400)
    )
    assert 0.84 < failed / 400 < 0.96  # 0.9, give or take four standard errors


def test_laws_of_a_text_are_those_that_decoding_meets():
    """Teacher-forced logits of the head equal the root logits of a cycle, the target's a plain forward."""
    model = tiny_pair()
    text = model.naivegenerate(PROMPT, temperature=1.0, max_new_tokens=6, seed=1)[0]
    target, draft = paired_logits(model.target, model.draft, text)
    with torch.inference_mode():
        torch.testing.assert_close(
            target, model.base_model(text[None]).logits[0], atol=1e-4, rtol=1e-4
        )
        from eagle.model.draft.state import DraftState

        cache = model.target.new_cache(text.numel())
        prefill = model.target.prefill(text[:-1], cache, model.draft.aux_layers)
        state = DraftState(model.draft, model.target.embedding, text.numel())
        torch.testing.assert_close(
            draft[-1], state.commit(text[1:], prefill.features), atol=1e-4, rtol=1e-4
        )


def test_tally_counts_each_setting_once():
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    tally = Tally()
    tally.add(probs, probs)
    assert (
        tally.n == tally.more + tally.equal + tally.less == 6
    )  # n in 2, 3, 4 with m below n; larger n have no tokens left
    assert tally.less == 0 and tally.gain >= 0
