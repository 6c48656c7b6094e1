"""The closed forms of acceptance, against the enumerated acceptance of the real code and a linear program."""

import itertools
from fractions import Fraction

import pytest
import torch

from rheo.analysis import one_level as theory
from rheo.certify.certificates import Setting, enumerator
from rheo.certify.enumeration import RandomDistributions

CASES = list(itertools.product(range(9), (1, 2, 3), (0.5, 1.0, 2.0)))  # laws, n, temperature


def enumerated(distributions, n, m, temperature, verification):
    """Probability that one level emits a drafted token, all n slots surviving: exactly, by ``rheo.verify``."""
    setting = Setting(
        "",
        4,
        distributions,
        n,
        m,
        0,
        (n,),
        temperature=temperature,
        verification=verification,
        walk="merged",
    )
    work = enumerator(setting)
    probs = work.emitted((), work.kept_trees((), (n,))[n])
    return sum((w for tokens, w in probs.items() if len(tokens) > 1), Fraction(0))


def tensors(distributions, n, m, temperature):
    """p, q, q_tail in float64; None where the draft's law has fewer than n tokens or no tail, so that slots are missing."""
    tables = RandomDistributions(4, distributions)
    p = torch.tensor([float(x) for x in tables.target(())], dtype=torch.float64)
    q = torch.tensor([float(x) for x in tables.draft(())], dtype=torch.float64)
    q = q / q.sum()
    q_tail = theory.tail_probs(q, m, temperature)
    return None if q_tail.isnan().any() or (q > 0).sum() < n else (p, q, q_tail)


def test_theorem_3_and_the_rrsw_formula_equal_the_enumerated_acceptance():
    checked = 0
    for (distributions, n, temperature), m in itertools.product(CASES, range(3)):
        if m >= n or (given := tensors(distributions, n, m, temperature)) is None:
            continue
        checked += 1
        expected = [
            float(enumerated(distributions, n, m, temperature, v)) for v in ("rheo", "rrsw")
        ]
        found = [
            theory.rheo_acceptance(*given, n).item(),
            theory.rrsw_acceptance(*given, n, m).item(),
        ]
        assert found == pytest.approx(expected, abs=1e-12), (distributions, n, m, temperature)
    assert checked > 50


def test_top_k_acceptance_equals_the_enumerated_one():
    for distributions, n in itertools.product(range(12), (1, 2, 3)):
        if (given := tensors(distributions, n, 0, 1.0)) is not None:
            p, q, _ = given
            assert theory.top_k_acceptance(p, q, n).item() == pytest.approx(
                float(enumerated(distributions, n, None, 1.0, "rheo")), abs=1e-12
            )


def test_no_verifier_exceeds_the_transport_bound_and_its_closed_form():
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        p, q = (
            torch.empty(7, dtype=torch.float64).exponential_(generator=generator) ** 2
            for _ in range(2)
        )
        p, q = p / p.sum(), q / q.sum()
        for n, m in ((1, 0), (2, 1), (4, 0), (4, 2), (6, 5)):
            q_tail = theory.tail_probs(q, m)
            best = theory.best_acceptance(p, q, q_tail, n).item()
            assert best == pytest.approx(
                theory.transport_bound(p, q, q_tail, n), abs=1e-9
            )  # the solver's own tolerance
            rheo = theory.rheo_acceptance(p, q, q_tail, n).item()
            assert theory.rrsw_acceptance(p, q, q_tail, n, m).item() <= best + 1e-12
            assert rheo <= min(best, theory.rheo_upper_bound(p, q, q_tail, n).item()) + 1e-12
            assert rheo >= theory.top_k_acceptance(p, q, n - 1).item() - 1e-12


def test_rrsw_with_no_lead_token_is_the_same_as_rheo():
    p, q = (
        torch.empty(5, 6, dtype=torch.float64).exponential_(
            generator=torch.Generator().manual_seed(s)
        )
        for s in (0, 1)
    )
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    q_tail = theory.tail_probs(q, 0)
    torch.testing.assert_close(
        theory.rheo_acceptance(p, q, q_tail, 3),
        theory.rrsw_acceptance(p, q, q_tail, 3, 0),
        atol=1e-14,
        rtol=0,
    )


def test_approximate_gap_and_upper_bound_of_a_case_worked_by_hand():
    """q_tail = 0, 1/3, 1/4, 1/6, 2/15, 7/60; outside Top_2 min(p, q_tail) sums to 7/12, and with (1 - A) q_tail, A = 1/6, to 37/72."""
    q = torch.tensor([0.4, 0.2, 0.15, 0.1, 0.08, 0.07], dtype=torch.float64)
    p = torch.full((6,), 1 / 6, dtype=torch.float64)
    q_tail = theory.tail_probs(q, 1)
    assert theory.approximate_gap(p, q, q_tail, 2, 1).item() == pytest.approx(5 / 72)
    assert theory.rheo_upper_bound(p, q, q_tail, 2).item() == pytest.approx(1 / 3 + 7 / 12)
    assert theory.approximate_gap(p, q, theory.tail_probs(q, 0), 2, 0).item() == 0


def test_the_tail_law_has_its_digits_at_low_temperatures():
    q = torch.tensor([[0.9, 2e-30, 1e-30, 1e-30], [0.5, 0.3, 0.2, 0.0]], dtype=torch.float64)
    assert torch.allclose(
        theory.tail_probs(q, 1, 0.1)[0, 1:],
        torch.tensor([1024.0, 1, 1], dtype=torch.float64) / 1026,
    )
    assert theory.tail_probs(q, 1, 1e-3)[0].tolist() == pytest.approx([0, 1, 0, 0])
    assert theory.tail_probs(q, 1, 0.0).tolist() == [[0, 1, 0, 0], [0, 1, 0, 0]]
    assert theory.tail_probs(torch.tensor([[1.0, 0.0]]), 1, 0.0).isnan().all()
