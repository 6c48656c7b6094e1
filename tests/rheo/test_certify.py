"""The certifier: its result on the real code, and its parts against independent definitions."""

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
from rheo import AUTO, LEAD, SAMPLED
from rheo.certify.__main__ import main
from rheo.certify.certificates import certify, check_merging, compare, enumerator
from rheo.certify.distributions import ConstantDistributions, RandomDistributions
from rheo.certify.enumeration import Replay, outcomes
from rheo.certify.rational import Arithmetic, RationalTensor
from rheo.certify.report import table1
from rheo.certify.settings import Setting, all_budgets, full_settings
from rheo.tree import NO_KIND, TreeOptions, build_tree
from rheo.verification import verify

SETTINGS = [
    replace(setting, m=m)
    for setting in (
        Setting("", 4, 0, 3, 0, 0, (1, 2, 3)),
        Setting("", 4, 1, 3, 0, 0, (1, 2, 3), support=2, temperature=0.5),
        Setting("", 3, 2, 2, 0, 1, (1, 2, 3, 4, 6), temperature=2.0),
        Setting("", 3, 3, 3, 0, 1, (3, 5), support=2),
        Setting("", 3, 4, 2, 0, 1, (2, 3, 5), draft_ids=(2, 0)),
        Setting("", 2, 5, 2, 0, 2, (3, 5, 8), temperature=0.5),
    )
    for m in (None, 0, 1, AUTO)
]
AT_ONCE = [  # m, verification, budgets
    (None, "rheo", (2, 3)),
    (0, "rheo", (2, 3)),
    (1, "rheo", (2, 3)),
    (AUTO, "rheo", (2, 3)),
    (1, "rrsw", (2, 3)),
    (0, "rrsw", (2,)),
    pytest.param(0, "rrsw", (2, 3), marks=pytest.mark.full),
]
FILTERS = [
    {"top_k": 2},
    {"top_p": 0.7},
    {"min_p": 0.3},
    {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.05},
]


def fractions(*numbers):
    """Whole numbers divided by their sum."""
    return tuple(Fraction(n, sum(numbers)) for n in numbers)


def test_every_quick_setting_is_lossless_and_the_report_says_so(capsys, tmp_path):
    assert main(["--output", str(tmp_path / "out.jsonl")]) == 0
    printed = capsys.readouterr().out
    assert "Lossless: every output distribution is the target's." in printed
    assert "all equal" in printed
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    exact = [r for r in records if r["setting"]["arithmetic"] == "fractions"]
    assert len(exact) > 200 and all(r["difference"] == "0" for r in exact)
    assert all(ours == targets for r in exact for ours, targets in r["laws"].values())
    assert {r["setting"]["m"] for r in records} == {None, 0, 1, 2, AUTO}
    # In every group enough trees keep a sampled slot.
    sampled = defaultdict(list)
    for r in records:
        if r["setting"]["m"] is not None:
            sampled[r["setting"]["group"]].append(r["sampled"] > 1)
    assert sampled.keys() == {r["setting"]["group"] for r in records}
    for group, enough in sampled.items():
        assert sum(enough) >= len(enough) / 3, group


@pytest.mark.full
def test_every_setting_is_lossless():
    assert main(["--full"]) == 0


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_kept_trees_and_output_distribution_equal_the_literal_method(setting):
    """A second implementation on lists, which tests the children one by one, gives the same."""
    s, work = setting, enumerator(setting)
    distributions = work.distributions
    for budget, trees in work.kept_trees((), s.budgets).items():
        expected = literal.trees_of(
            distributions, s.size, s.m, s.support, s.temperature, s.depth, budget
        )
        kept, found = defaultdict(Fraction), defaultdict(Fraction)
        for (nodes, _), probability in expected.items():
            kept[frozenset(nodes)] += probability
        for probability, tree, paths in trees:
            nodes = zip(paths, tree.kinds.tolist())
            found[frozenset(node for node in nodes if node[1] != NO_KIND)] += probability
        assert found == kept
        for verification in ("rheo", "rrsw"):
            emitted = replace(work, verification=verification).emitted((), trees)
            assert emitted == literal.emitted_of(distributions, expected, verification)


def test_probabilities_stay_fractions_where_the_draft_is_certain():
    """The tail has no mass there. What is drawn from it must not turn a fraction into a float."""
    distributions = ConstantDistributions(fractions(1, 1, 1), fractions(0, 0, 1))
    for m, depth in ((0, 0), (1, 0), (1, 1), (AUTO, 0)):
        for certificate in certify(Setting("", 3, 0, 2, m, depth, (1, 2)), distributions):
            assert certificate.comparison.difference == 0
            observed = certificate.comparison.observed.values()
            assert all(isinstance(p, (int, Fraction)) for p in observed)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_merging_draws_gives_the_distribution_of_walking_every_draw(setting):
    both = [setting, replace(setting, verification="rrsw")]
    assert check_merging(both) == 2 * len(setting.budgets)


@pytest.mark.parametrize("setting", SETTINGS[::4], ids=str)
def test_float64_and_fractions_agree(setting):
    """``torch.topk`` may order tied tokens otherwise and so keep other trees.

    So only texts that both arithmetics compare are checked.
    """
    exact, rounded = (
        {c.budget: c.comparison.observed for c in certify(replace(setting, arithmetic=name))}
        for name in Arithmetic.NAMES
    )
    for budget, probs in exact.items():
        shared = probs.keys() & rounded[budget].keys()
        assert len(shared) > setting.vocab
        expected = [float(probs[text]) for text in shared]
        assert [rounded[budget][text] for text in shared] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("m, verification, budgets", AT_ONCE)
def test_deciding_at_all_nodes_at_once_gives_the_same_distribution(
    m, verification, budgets, monkeypatch
):
    """A GPU decides at all nodes at once. Every draw of every node is walked, visited or not."""

    def loop(step, randomness):
        """Take the place of ``torch.vmap``, which does not accept fractions."""
        return lambda *batch: [torch.stack(column) for column in zip(*map(step, *batch))]

    def at_once(tree, target, draws, verification):
        def all_probs(nodes):
            return [target(node) for node in nodes]

        return verify(tree, all_probs, draws, verification, at_once=True)

    monkeypatch.setattr(torch, "vmap", loop)
    work = enumerator(Setting("", 3, 4, 2, m, 1, budgets, verification=verification))
    for trees in work.kept_trees((), budgets).values():
        node_by_node = work.emitted((), trees)
        with monkeypatch.context() as patch:
            patch.setattr("rheo.certify.enumeration.verify", at_once)
            assert work.emitted((), trees) == node_by_node
        assert len(node_by_node) > 3


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_output_distribution_under_filters_is_that_of_transformers_warpers(filters):
    """The target distributions are made by the warpers of decoding, and taken as fractions.

    That these warpers equal those of ``generate`` is tested in tests/rheo/test_verification.py.
    """
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
            assert 0 in certificate.comparison.expected.values()  # the filter removed something


def test_two_cycles_joined_have_the_distribution_of_two_cycles_walked_jointly():
    work, distributions = enumerator(Setting("", 2, 5, 2, 1, 0, (2,))), RandomDistributions(2, 5)

    class Joint(Replay):
        """Names every draw by its number, to tell the draws of the two cycles apart."""

        def token(self, weights):
            rows = weights.tolist() if len(weights.shape) == 2 else [weights.tolist()]
            chosen = [self._choose(len(self.drawn), row) for row in rows]
            return torch.tensor(chosen).reshape(weights.shape[:-1])

    def cycle(text, draws):
        logits = work.arithmetic.logits([distributions.draft(text)])[0]
        root = torch.tensor(text[-1] if text else 0)
        tree = build_tree(root, logits, None, TreeOptions(work.pool, 3, 0), draws)
        paths = [(), *((token,) for token in tree.tokens[1:].tolist())]

        def target(node):
            return work.arithmetic.probs(distributions.target((*text, *paths[node])))

        verified = verify(tree, target, draws)
        return (*text, *verified.tokens[: verified.count].tolist())

    joint = defaultdict(Fraction)
    for probability, text, _ in outcomes(
        lambda draws: cycle(cycle((), draws), draws), source=Joint
    ):
        joint[text] += probability
    assert dict(joint) == work.after_cycles(2, 2)[0]


def test_outcomes_sum_to_one_and_draws_that_do_not_matter_stay_open():
    def run(draws):
        token = draws.token(torch.tensor([0.25, 0.0, 0.75]))
        return token.item(), draws.accept(torch.tensor(0.5)).item()

    every = {result: probability for probability, result, _ in outcomes(run)}
    assert every == {(0, False): 0.125, (0, True): 0.125, (2, False): 0.375, (2, True): 0.375}
    merged = outcomes(run, matters=lambda result, name: name == 0)
    assert {result[0]: probability for probability, result, _ in merged} == {0: 0.25, 2: 0.75}


def test_compare_finds_the_largest_difference_of_a_wrong_distribution():
    distributions, exact = ConstantDistributions(fractions(1, 1), (1, 1)), Arithmetic("fractions")
    quarter, half = Fraction(1, 4), Fraction(1, 2)
    right = {(0, 0): quarter, (0, 1): quarter, (1,): half}
    assert compare(right, distributions, exact).difference == 0
    moved = {(0, 0): Fraction(3, 8), (0, 1): Fraction(1, 8), (1,): half}
    wrong = compare(moved, distributions, exact)
    assert wrong.difference == Fraction(1, 8) and wrong.worst in ((0, 0), (0, 1))
    incomplete = compare({(0,): half}, distributions, exact)  # half of the mass is missing
    assert incomplete.difference == half


def test_table1_of_the_paper_in_fractions():
    (right, kept), (wrong, broken) = table1().values()
    assert right == {1: Fraction(3, 5), 2: Fraction(2, 5)} and kept.lossless
    assert wrong == {1: Fraction(1)} and not broken.lossless
    # p is 1/5, 3/10, 1/2. With probability 3/5 the sampled token is x_2, and the slot survives.
    # Then x_2 is accepted with probability (3/10) / (3/5), and the residual 2/7, 0, 5/7 has no x_2.
    # With probability 2/5 the sampled token is x_3, the slot is lost, and p itself is sampled.
    expected = Fraction(3, 5) * Fraction(1, 2) + Fraction(2, 5) * Fraction(3, 10)
    assert broken.comparison.observed[(1,)] == expected != Fraction(3, 10)


def test_the_kept_trees_of_table1_hold_the_lead_and_the_sampled_slot():
    q = (Fraction(5), Fraction(3), Fraction(2))
    work = enumerator(Setting("", 3, 0, 3, 1, 0, (2,)), ConstantDistributions(q, q))
    kept = {
        (*tree.tokens[1:].tolist(), *tree.kinds[1:].tolist()): probability
        for probability, tree, _ in work.kept_trees((), (2,))[2]
    }
    assert kept == {(0, 1, LEAD, SAMPLED): Fraction(3, 5), (0, 2, LEAD, SAMPLED): Fraction(2, 5)}


def test_a_distribution_that_differs_is_an_exit_code_and_a_small_counterexample(capsys):
    wrong = load_rheo({"verification": [("p.scatter_add(0, tail, -q_tail).clamp_min(0)", "p")]})
    assert wrong.main([]) == 1
    printed = capsys.readouterr().out
    assert "NOT LOSSLESS: vocabulary 2, K 1, m 0" in printed and "the target's is" in printed
    assert "root: target" in printed and "(sampled): target" in printed
    assert "Lossless:" not in printed


def test_a_draw_outside_the_kept_tree_that_changes_it_is_reported():
    """The sampled slot scores 1, except with the most likely token of the tail.

    That token is tried first. With it the slot is not kept.
    """
    scored = "own, proxy = score_rule(q, weights)"
    peek = "proxy = torch.where(ranks[:, n_lead : n_lead + 1] > n_lead, 1, q[:, -1:])"
    peeking = load_rheo({"pool": [(scored, f"{scored}\n    {peek}")]})
    distributions = ConstantDistributions(fractions(1, 1, 1, 1), fractions(9, 4, 1, 1))
    setting = peeking.Setting("", 4, 0, 3, 1, 0, (1,), walk="merged")
    with pytest.raises(peeking.MergeError, match="depends on a draw outside of it"):
        list(peeking.certify(setting, distributions))


def test_rational_tensors_compute_as_float64_tensors_do():
    weights = [[Fraction(4), Fraction(0), Fraction(9)], [Fraction(1), Fraction(1), Fraction(16)]]
    exact, real = (Arithmetic(name).logits(weights) for name in ("fractions", "float64"))
    for temperature in (0.5, 1.0, 2.0):
        pair = [(x / temperature).softmax(-1).tolist() for x in (exact, real)]
        for a, b in zip(*pair):
            assert [float(x) for x in a] == pytest.approx(b, abs=1e-14)
    ids = [x.topk(2)[1].tolist() for x in (exact, real)]
    assert ids[0] == [[2, 0], [2, 0]] and ids[1][0] == ids[0][0]
    assert exact.log_softmax(-1).exp().sum(-1).tolist() == [1, 1]
    masked = exact.masked_fill(torch.tensor([True, False, False]), -torch.inf)
    assert masked.exp().tolist()[0][0] == 0
    with pytest.raises(ValueError, match="2 has no rational root"):
        RationalTensor([Fraction(2)], log=True) / 2.0
    with pytest.raises(TypeError, match="logarithm"):
        exact * exact
    with pytest.raises(NotImplementedError, match="no exact counterpart"):
        torch.cos(exact)


def test_the_full_settings_cover_every_small_shape():
    assert all_budgets(4, 3, 1)[-1] == 12 and all_budgets(2, 3, 0) == (1, 2)
    small = [s for s in full_settings() if s.vocab <= 4 and s.cycles == 1]
    shapes = {(s.vocab, s.size, s.depth) for s in small}
    assert shapes >= set(itertools.product((2, 3, 4), (1, 2, 3), (0, 1, 2)))


def test_an_unknown_arithmetic_is_refused():
    with pytest.raises(ValueError, match="'float16'; choose one of fractions, float64"):
        Arithmetic("float16")
