"""The certifier: its verdict on the real code, and its own parts against independent definitions."""

import itertools
import json
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from support import literal
from support.patched import load_rheo

from eagle.model.sampling import TargetProbs, WarperOptions
from rheo import AUTO, FILL, LEAD, SAMPLED
from rheo.certify.__main__ import main
from rheo.certify.certificates import certify, enumerator, merging_against_every_draw
from rheo.certify.enumeration import (
    Arithmetic,
    ConstantDistributions,
    RandomDistributions,
    Replay,
    compare,
    outcomes,
)
from rheo.certify.rational import RationalTensor
from rheo.certify.report import table1
from rheo.certify.settings import Setting, all_budgets, full_settings
from rheo.tree import NO_KIND, TreeOptions, build_tree
from rheo.verification import verify

SETTINGS = [
    Setting(
        "", vocab, distributions, size, m, depth, budgets, support, temperature, draft_ids=draft_ids
    )
    for vocab, distributions, size, depth, budgets, support, temperature, draft_ids in (
        (4, 0, 3, 0, (1, 2, 3), 0, 1.0, None),
        (4, 1, 3, 0, (1, 2, 3), 2, 0.5, None),
        (3, 2, 2, 1, (1, 2, 3, 4, 6), 0, 2.0, None),
        (3, 3, 3, 1, (3, 5), 2, 1.0, None),
        (3, 4, 2, 1, (2, 3, 5), 0, 1.0, (2, 0)),
        (2, 5, 2, 2, (3, 5, 8), 0, 0.5, None),
    )
    for m in (None, 0, 1, AUTO)
]


def test_every_quick_setting_is_lossless_and_the_report_says_so(capsys, tmp_path):
    assert main(["--output", str(tmp_path / "laws.jsonl")]) == 0
    printed = capsys.readouterr().out
    assert "Lossless: every output law is the target's." in printed and "all equal" in printed
    records = [json.loads(line) for line in (tmp_path / "laws.jsonl").read_text().splitlines()]
    exact = [r for r in records if r["setting"]["arithmetic"] == "fractions"]
    assert len(exact) > 200 and all(r["difference"] == "0" for r in exact)
    assert all(ours == targets for r in exact for ours, targets in r["laws"].values())
    assert {r["setting"]["m"] for r in records} == {None, 0, 1, 2, AUTO}
    for group in {
        r["setting"]["group"] for r in records
    }:  # no group is about trees without a sampled slot
        sampled = [
            r for r in records if r["setting"]["group"] == group and r["setting"]["m"] is not None
        ]
        assert sum(r["sampled"] > 1 for r in sampled) >= len(sampled) / 3, group


@pytest.mark.full
def test_every_setting_is_lossless():
    assert main(["--full"]) == 0


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_kept_trees_and_output_law_equal_the_literal_method(setting):
    """Written down a second time, on lists, with the children tested one by one: the same trees, the same laws, as fractions."""
    distributions = RandomDistributions(setting.vocab, setting.distributions, setting.draft_ids)
    work = enumerator(setting)
    for budget, trees in work.kept_trees((), setting.budgets).items():
        arguments = (
            distributions,
            setting.size,
            setting.m,
            setting.support,
            setting.temperature,
            setting.depth,
            budget,
        )
        expected, kept, found = (
            literal.trees_of(*arguments),
            defaultdict(Fraction),
            defaultdict(Fraction),
        )
        for (nodes, _), weight in expected.items():
            kept[frozenset(nodes)] += weight
        for weight, tree, paths in trees:
            found[
                frozenset(
                    (path, kind)
                    for path, kind in zip(paths, tree.kinds.tolist())
                    if kind != NO_KIND
                )
            ] += weight
        assert found == kept
        for verification in ("rheo", "rrsw"):
            assert replace(work, verification=verification).emitted(
                (), trees
            ) == literal.emitted_of(distributions, expected, verification)


def test_a_certain_draft_is_certified_in_fractions_to_the_end():
    """Its tail has no mass: whatever is drawn there, no probability may become a float."""
    distributions = ConstantDistributions(
        (Fraction(1, 3),) * 3, (Fraction(0), Fraction(0), Fraction(1))
    )
    for m, depth in ((0, 0), (1, 0), (1, 1), (AUTO, 0)):
        for certificate in certify(Setting("", 3, 0, 2, m, depth, (1, 2)), distributions):
            assert certificate.comparison.difference == 0
            assert all(
                isinstance(x, (int, Fraction)) for x in certificate.comparison.observed.values()
            )


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_merging_draws_gives_the_law_of_walking_every_draw(setting):
    assert merging_against_every_draw([setting, replace(setting, verification="rrsw")]) == 2 * len(
        setting.budgets
    )


@pytest.mark.parametrize("setting", SETTINGS[::4], ids=str)
def test_float64_replay_and_fractions_agree(setting):
    """On the texts that both compare: torch.topk may order tied draft tokens otherwise, and then other trees are kept."""
    exact, rounded = (
        {c.budget: c.comparison.observed for c in certify(replace(setting, arithmetic=name))}
        for name in Arithmetic.NAMES
    )
    for budget, probs in exact.items():
        shared = probs.keys() & rounded[budget].keys()
        assert len(shared) > setting.vocab
        assert [rounded[budget][text] for text in shared] == pytest.approx(
            [float(probs[text]) for text in shared], abs=1e-12
        )


@pytest.mark.parametrize(
    "m, verification",
    [(None, "rheo"), (0, "rheo"), (1, "rheo"), (AUTO, "rheo"), (0, "rrsw"), (1, "rrsw")],
)
def test_deciding_at_all_nodes_at_once_gives_the_same_law(m, verification, monkeypatch):
    """As a GPU does; every draw of every node, visited or not, is walked. ``torch.vmap`` does not take fractions: a loop stands in for it."""
    monkeypatch.setattr(
        torch,
        "vmap",
        lambda step, randomness: (
            lambda nodes, distributions: [
                torch.stack(x) for x in zip(*map(step, nodes, distributions))
            ]
        ),
    )

    def at_once(tree, probs, draws, verification):
        return verify(
            tree, lambda nodes: [probs(node) for node in nodes], draws, verification, at_once=True
        )

    lazily = enumerator(Setting("", 3, 4, 2, m, 1, (2, 3), verification=verification))
    for trees in lazily.kept_trees((), (2, 3)).values():
        expected = lazily.emitted((), trees)
        with monkeypatch.context() as patch:
            patch.setattr("rheo.certify.enumeration.verify", at_once)
            assert lazily.emitted((), trees) == expected
        assert len(expected) > 3


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 2},
        {"top_p": 0.7},
        {"min_p": 0.3},
        {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_output_law_under_filters_is_the_law_of_transformers_warpers(filters):
    """Target laws made by the warpers that decoding uses (equal to those of ``generate``: test_law12), taken as fractions."""
    probs = TargetProbs(WarperOptions(**({"temperature": 1.0} | filters)))

    class Warped(RandomDistributions):
        def target(self, path):
            logits = torch.tensor([float(x) for x in super().target(path)]).clamp_min(1e-3).log()
            p = [Fraction(x) for x in probs(logits).tolist()]
            return tuple(x / sum(p) for x in p)

    for m, verification in ((None, "rheo"), (0, "rheo"), (1, "rheo"), (1, "rrsw")):
        setting = Setting("", 4, 0, 3, m, 1, (2, 5), verification=verification, walk="merged")
        for certificate in certify(setting, Warped(4, 7)):
            assert certificate.comparison.difference == 0
            assert 0 in certificate.comparison.expected.values()  # the filter did remove something


def test_two_cycles_composed_have_the_law_of_two_cycles_walked_jointly():
    setting = Setting("", 2, 5, 2, 1, 0, (2,))
    work, distributions = enumerator(setting), RandomDistributions(2, 5)

    class Joint(Replay):  # names draws by their number, so that those of two cycles are told apart
        def token(self, weights):
            rows = weights.tolist() if len(weights.shape) == 2 else [weights.tolist()]
            return torch.tensor([self._choose(len(self.drawn), row) for row in rows]).reshape(
                weights.shape[:-1]
            )

    def run(draws):
        text = ()
        for _ in range(2):
            logits, root = (
                work.arithmetic.logits([distributions.draft(text)])[0],
                torch.tensor(text[-1] if text else 0),
            )
            tree = build_tree(root, logits, None, TreeOptions(work.pool, 3, 0), draws)
            paths = [(), *((t,) for t in tree.tokens[1:].tolist())]
            verified = verify(
                tree,
                lambda node: work.arithmetic.probs(distributions.target((*text, *paths[node]))),
                draws,
            )
            text = (*text, *verified.tokens[: verified.count].tolist())
        return text

    joint = defaultdict(Fraction)
    for weight, text, _ in outcomes(run, source=Joint):
        joint[text] += weight
    assert dict(joint) == work.after_cycles(2, 2)[0]


def test_outcomes_sum_to_one_and_unseen_draws_stay_open():
    def run(draws):
        return draws.token(torch.tensor([0.25, 0.0, 0.75])).item(), draws.accept(
            torch.tensor(0.5)
        ).item()

    every = {result: weight for weight, result, _ in outcomes(run)}
    assert every == {(0, False): 0.125, (0, True): 0.125, (2, False): 0.375, (2, True): 0.375}
    merged = {
        result[0]: weight for weight, result, _ in outcomes(run, lambda result, name: name == 0)
    }
    assert merged == {0: 0.25, 2: 0.75}


def test_compare_finds_the_largest_difference_of_a_wrong_law():
    distributions = ConstantDistributions(
        p=(Fraction(1, 2), Fraction(1, 2)), q=(Fraction(1), Fraction(1))
    )
    half = Fraction(1, 2)
    right = {(0, 0): half * half, (0, 1): half * half, (1,): half}
    assert compare(right, distributions, Arithmetic("fractions")).difference == 0
    wrong = compare(
        {(0, 0): Fraction(3, 8), (0, 1): Fraction(1, 8), (1,): half},
        distributions,
        Arithmetic("fractions"),
    )
    assert wrong.difference == Fraction(1, 8) and wrong.worst in ((0, 0), (0, 1))
    lost = compare(
        {(0,): half}, distributions, Arithmetic("fractions")
    )  # half of the mass is missing
    assert lost.difference == half


def test_table1_of_the_paper_in_fractions():
    (right, kept), (wrong, broken) = table1().values()
    assert right == {1: Fraction(3, 5), 2: Fraction(2, 5)} and kept.lossless
    assert wrong == {1: Fraction(1)} and not broken.lossless
    # p = 1/5, 3/10, 1/2. The slot survives with x_2 only, where it is accepted with (3/10) / (3/5), and else the residual 2/7, 0, 5/7 is
    # drawn from; with x_3 in the sampled slot p itself.
    expected = Fraction(3, 5) * Fraction(1, 2) + Fraction(2, 5) * Fraction(3, 10)
    assert broken.comparison.observed[(1,)] == expected != Fraction(3, 10)


def test_table1_survivors_and_kinds():
    q = (Fraction(5), Fraction(3), Fraction(2))
    trees = enumerator(Setting("", 3, 0, 3, 1, 0, (2,)), ConstantDistributions(q, q)).kept_trees(
        (), (2,)
    )[2]
    kept = {
        (*tree.tokens[1:].tolist(), *tree.kinds[1:].tolist()): weight for weight, tree, _ in trees
    }
    assert (
        kept == {(0, 1, LEAD, SAMPLED): Fraction(3, 5), (0, 2, LEAD, SAMPLED): Fraction(2, 5)}
        and FILL not in kept
    )


def test_a_law_that_differs_is_an_exit_code_and_a_small_counterexample(capsys):
    wrong = load_rheo({"verification": [("p.scatter_add(0, tail, -q_tail).clamp_min(0)", "p")]})
    assert wrong.main([]) == 1
    printed = capsys.readouterr().out
    assert "NOT LOSSLESS: vocabulary 2, K 1, m 0" in printed and "the target's is" in printed
    assert (
        "root: target" in printed and "(sampled): target" in printed and "Lossless:" not in printed
    )


def test_a_draw_outside_the_kept_tree_that_changes_it_is_reported(capsys):
    """Score 1 unless the sampled token is the most likely one: with that one, tried first, the slot is not kept."""
    peeking = load_rheo(
        {
            "pool": [
                (
                    "(q, sampled_proxy(q, n_lead))",
                    "(q, torch.where(ranks[:, n_lead : n_lead + 1] > n_lead, 1, q[:, -1:]))",
                )
            ]
        }
    )
    distributions = ConstantDistributions(
        (Fraction(1, 4),) * 4, (Fraction(9), Fraction(4), Fraction(1), Fraction(1))
    )
    with pytest.raises(peeking.MergeError, match="hangs on a draw outside of it"):
        list(
            peeking.certify(peeking.Setting("", 4, 0, 3, 1, 0, (1,), walk="merged"), distributions)
        )


def test_rational_tensors_compute_as_float64_tensors_do():
    weights = [[Fraction(4), Fraction(0), Fraction(9)], [Fraction(1), Fraction(1), Fraction(16)]]
    exact, real = Arithmetic("fractions").logits(weights), Arithmetic("float64").logits(weights)
    for temperature in (0.5, 1.0, 2.0):
        pair = [(x / temperature).softmax(-1).tolist() for x in (exact, real)]
        for a, b in zip(*pair):
            assert [float(x) for x in a] == pytest.approx(b, abs=1e-14)
    ids = [x.topk(2)[1].tolist() for x in (exact, real)]
    assert ids[0] == [[2, 0], [2, 0]] and ids[1][0] == ids[0][0]
    assert exact.log_softmax(-1).exp().sum(-1).tolist() == [1, 1]
    assert (
        exact.masked_fill(torch.tensor([True, False, False]), -torch.inf).exp().tolist()[0][0] == 0
    )
    with pytest.raises(ValueError, match="2 has no rational root"):
        RationalTensor([Fraction(2)], log=True) / 2.0
    with pytest.raises(TypeError, match="logarithm"):
        exact * exact
    with pytest.raises(NotImplementedError, match="no exact counterpart"):
        torch.cos(exact)


def test_budgets_and_settings_are_what_they_say():
    assert all_budgets(4, 3, 1)[-1] == 12 and all_budgets(2, 3, 0) == (1, 2)
    full = list(full_settings())
    shapes = {(s.vocab, s.size, s.depth) for s in full if s.vocab <= 4 and s.cycles == 1}
    assert shapes >= set(itertools.product((2, 3, 4), (1, 2, 3), (0, 1, 2)))
    with pytest.raises(
        ValueError, match="arithmetic is 'float16'; choose one of fractions, float64"
    ):
        Arithmetic("float16")
