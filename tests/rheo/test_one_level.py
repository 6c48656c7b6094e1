"""The closed forms of acceptance against the enumerated acceptance and a linear program."""

import itertools
from dataclasses import replace

import pytest
import torch

from rheo.analysis import one_level
from rheo.certify.certificates import enumerator
from rheo.certify.distributions import RandomDistributions
from rheo.certify.settings import Setting

CASES = list(itertools.product(range(9), (1, 2, 3), (0.5, 1.0, 2.0)))  # seed, n, temperature


def enumerated(seed, n, m, temperature, *verifications):
    """The exact probability that one level of n surviving slots emits a drafted token."""
    setting = Setting("", 4, seed, n, m, 0, (n,), temperature=temperature, walk="by node")
    work = enumerator(setting)
    trees = work.kept_trees((), (n,))[n]
    found = []
    for verification in verifications:
        probs = replace(work, verification=verification).emitted((), trees)
        found.append(float(sum(p for text, p in probs.items() if len(text) > 1)))
    return found


def tensors(seed, n, m, temperature):
    """p, q and q_tail in float64.

    None if slots are missing: the draft has fewer than n tokens, or its tail has no mass.
    """
    tables = RandomDistributions(4, seed)
    p, q = (
        torch.tensor([float(x) for x in table], dtype=torch.float64)
        for table in (tables.target(()), tables.draft(()))
    )
    q = q / q.sum()
    q_tail = one_level.tail_probs(q, m, temperature)
    return None if q_tail.isnan().any() or (q > 0).sum() < n else (p, q, q_tail)


def random_probs(generator, *shape, power=1):
    """Random probabilities in float64; a higher power makes them more peaked."""
    weights = torch.empty(*shape, dtype=torch.float64).exponential_(generator=generator) ** power
    return weights / weights.sum(-1, keepdim=True)


def test_theorem_3_and_the_rrsw_formula_equal_the_enumerated_acceptance():
    checked = 0
    for (seed, n, temperature), m in itertools.product(CASES, range(3)):
        if m >= n or (given := tensors(seed, n, m, temperature)) is None:
            continue
        checked += 1
        rheo = one_level.rheo_acceptance(*given, n).item()
        rrsw = one_level.rrsw_acceptance(*given, n, m).item()
        expected = enumerated(seed, n, m, temperature, "rheo", "rrsw")
        assert [rheo, rrsw] == pytest.approx(expected, abs=1e-12), (seed, n, m, temperature)
    assert checked > 50


def test_top_k_acceptance_equals_the_enumerated_one():
    for seed, n in itertools.product(range(12), (1, 2, 3)):
        if (given := tensors(seed, n, 0, 1.0)) is not None:
            p, q, _ = given
            (expected,) = enumerated(seed, n, None, 1.0, "rheo")
            assert one_level.top_k_acceptance(p, q, n).item() == pytest.approx(expected, abs=1e-12)


def test_no_verifier_exceeds_the_transport_bound_and_its_closed_form():
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        p, q = (random_probs(generator, 7, power=2) for _ in range(2))
        for n, m in ((1, 0), (2, 1), (4, 0), (4, 2), (6, 5)):
            q_tail = one_level.tail_probs(q, m)
            best = one_level.best_acceptance(p, q, q_tail, n).item()
            bound = one_level.transport_bound(p, q, q_tail, n)
            assert best == pytest.approx(bound, abs=1e-9)  # the solver's own tolerance
            upper = one_level.rheo_upper_bound(p, q, q_tail, n).item()
            rheo = one_level.rheo_acceptance(p, q, q_tail, n).item()
            rrsw = one_level.rrsw_acceptance(p, q, q_tail, n, m).item()
            top_k = one_level.top_k_acceptance(p, q, n - 1).item()
            assert rrsw <= best + 1e-12
            assert top_k - 1e-12 <= rheo <= min(best, upper) + 1e-12


def test_rrsw_without_lead_tokens_equals_rheo():
    p, q = (random_probs(torch.Generator().manual_seed(seed), 5, 6) for seed in (0, 1))
    q_tail = one_level.tail_probs(q, 0)
    rheo = one_level.rheo_acceptance(p, q, q_tail, 3)
    rrsw = one_level.rrsw_acceptance(p, q, q_tail, 3, 0)
    torch.testing.assert_close(rheo, rrsw, atol=1e-14, rtol=0)


def test_approximate_gap_and_upper_bound_of_a_case_worked_by_hand():
    """q_tail is 0, 1/3, 1/4, 1/6, 2/15, 7/60, and A is 1/6.

    Outside Top_2, min(p, q_tail) sums to 7/12, and min(p, (1 - A) q_tail) sums to 37/72.
    """
    q = torch.tensor([0.4, 0.2, 0.15, 0.1, 0.08, 0.07], dtype=torch.float64)
    p = torch.full((6,), 1 / 6, dtype=torch.float64)
    q_tail = one_level.tail_probs(q, 1)
    assert one_level.approximate_gap(p, q, q_tail, 2, 1).item() == pytest.approx(5 / 72)
    assert one_level.rheo_upper_bound(p, q, q_tail, 2).item() == pytest.approx(1 / 3 + 7 / 12)
    assert one_level.approximate_gap(p, q, one_level.tail_probs(q, 0), 2, 0).item() == 0


def test_the_tail_distribution_keeps_its_digits_at_low_temperatures():
    q = torch.tensor([[0.9, 2e-30, 1e-30, 1e-30], [0.5, 0.3, 0.2, 0.0]], dtype=torch.float64)
    expected = torch.tensor([1024.0, 1, 1], dtype=torch.float64) / 1026
    assert torch.allclose(one_level.tail_probs(q, 1, 0.1)[0, 1:], expected)
    assert one_level.tail_probs(q, 1, 1e-3)[0].tolist() == pytest.approx([0, 1, 0, 0])
    assert one_level.tail_probs(q, 1, 0.0).tolist() == [[0, 1, 0, 0], [0, 1, 0, 0]]
    assert one_level.tail_probs(torch.tensor([[1.0, 0.0]]), 1, 0.0).isnan().all()
