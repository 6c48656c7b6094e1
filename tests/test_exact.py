"""The output law of build + prune + verify, enumerated over all draws of the real code, equals the target's law.

Float64 throughout; 1e-12 leaves room for the rounding of some hundred multiplications and nothing else.
Wrong versions of the code (MUTANTS) must fail the same check.
"""

import itertools

import pytest
import torch
from exact import RandomLaws, ReplayedDraws, SharedUniformDraws, emitted_law, grown_trees, largest_difference, load_rheo

from rheo import FILL, LEAD, SAMPLED, PoolOptions

TOLERANCE = 1e-12
CODE = load_rheo()
QUICK = [(4, 3, 0), (3, 2, 1), (3, 3, 1), (3, 2, 2)]  # vocabulary, K, depth
FULL = [*QUICK, (4, 2, 1), (4, 3, 1), (4, 2, 2), (3, 3, 2)]
TEMPERATURES = (0.3, 1.0, 2.0)


def budgets(size, depth):
    """Every number of drafted nodes, up to all candidates."""
    return range(1, size + depth * size * size + 1)


def differences(code, laws, size, m, support, temperature, depth, which=None, draws=ReplayedDraws):
    """{(budget, verification): largest difference to the target's law}."""
    pool = PoolOptions(size, m, support, temperature)
    trees = grown_trees(code, laws, pool, depth, which or budgets(size, depth), draws)
    return {
        (budget, verification): largest_difference(laws, emitted_law(code, laws, kept, verification), depth + 2)
        for budget, kept in trees.items()
        for verification in (("rheo",) if m is None else ("rheo", "rrsw"))
    }


def check(seed, vocab, size, m, support, temperature, depth, draft_ids=None):
    laws = RandomLaws(vocab, seed, draft_ids)
    found = differences(CODE, laws, size, m, support, temperature, depth)
    wrong = {key: value for key, value in found.items() if not value <= TOLERANCE}
    assert not wrong, f"vocabulary {vocab}, K {size}, m {m}, support {support}, T {temperature}, depth {depth}, laws {seed}: {wrong}"


@pytest.mark.parametrize("vocab, size, depth", QUICK)
@pytest.mark.parametrize("m", [None, 0, 1, 2])
def test_output_law_is_the_targets_for_every_budget(vocab, size, depth, m):
    if m is not None and m >= size:
        pytest.skip("m must be below K")
    for seed, temperature, support in ((0, 1.0, 0), (1, 0.3, 2), (2, 2.0, 0))[: 3 if depth < 2 else 1]:
        check(seed, vocab, size, m, support, temperature, depth)


def test_output_law_is_the_targets_with_a_reduced_draft_vocabulary():
    for seed, m in itertools.product(range(3), (None, 0, 1)):
        check(seed, 3, 2, m, 0, 1.0, 1, draft_ids=[2, 0])


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("vocab, size, depth", FULL)
def test_output_law_is_the_targets_for_every_setting(vocab, size, depth, seed):
    if (vocab, size, depth) == (3, 3, 2) and seed > 1:
        pytest.skip("minutes each; two samples of laws are enough")
    for m in [None, *range(size)]:
        for temperature, support in itertools.product(TEMPERATURES, (0, 2)):
            check(seed, vocab, size, m, support, temperature, depth)
        check(seed, vocab, size, m, 0, 1.0, depth, draft_ids=[2, 0])


# Each mutant: file, text, replacement. Some error a plausible implementation could make.
PROXY = "log_proxy = torch.maximum(torch.minimum(log_q[:, n_lead - 1 : n_lead], log_z), log_tail[:, :1])"
MUTANTS = {
    "the token's own probability as proxy": ("pool", PROXY, "log_proxy = log_q.gather(1, drawn)"),
    "the paper's ad-hoc proxy (half of q(x_m))": ("pool", PROXY, "log_proxy = log_q[:, n_lead - 1 : n_lead] - 0.6931471805599453"),
    "0.6 times the proxy, not clamped to q(x_{m+1})": (
        "pool", PROXY, "log_proxy = torch.minimum(log_q[:, n_lead - 1 : n_lead], log_z) - 0.5108256237659907",
    ),
    "ties of survival broken by token id": (
        "tree",
        "    keep = best_first(scores)[: total_token - 1].sort().values",
        "    ids = torch.cat([pools.tokens.flatten() for pools in levels])\n"
        "    keep = ids.argsort()[scores[ids.argsort()].sort(descending=True, stable=True).indices][: total_token - 1].sort().values",
    ),
    "min(1, p/q) on lead and fill tokens": (
        "verification",
        "    return draws.token(law)",
        "    point = children & (tree.kinds != SAMPLED)\n"
        "    candidate = pick(tree.tokens, point.int().argmax())\n"
        "    q = pick(tree.log_scores, point.int().argmax()).exp()\n"
        "    lenient = draws.accept(torch.where(point.any(), pick(p, candidate) / q, 0))\n"
        "    return torch.where(lenient, candidate, draws.token(law))",
    ),
    "q instead of q_tail in the ratio": (
        "pool", "        support=support,\n        q_tail=q_tail,",
        "        support=support,\n        q_tail=q_tail * log_tail.exp().sum(-1, keepdim=True),",
    ),
    "residual skipped": ("verification", "residual = normalised((p - q_tail).clamp_min(0), otherwise=p)", "residual = p"),
    "tail judged at another temperature than it was drawn at": (
        "pool", "        support=support,\n        q_tail=q_tail,",
        "        support=support,\n        q_tail=normalise_again(q_tail),",
    ),
}  # fmt: skip
HELPERS = {"tail judged at another temperature than it was drawn at": "\n\ndef normalise_again(law):\n    return law.square() / law.square().sum(-1, keepdim=True)\n"}


def mutant_code(name):
    file, old, new = MUTANTS[name]
    patches = [(old, new)]
    if name in HELPERS:
        anchor = "def build_pools("
        patches.append((anchor, HELPERS[name].strip() + "\n\n\n" + anchor))
    return load_rheo({file: patches})


def worst_over_laws(code, draws=ReplayedDraws):
    """Largest difference over a few laws, one level of three slots; stops at the first clear one."""
    worst = 0.0
    for seed, m in itertools.product(range(6), (1, 0)):
        found = differences(code, RandomLaws(4, seed), 3, m, 0, 1.0, 0, which=(1, 2, 3), draws=draws)
        worst = max(worst, max(found[key] for key in found if key[1] == "rheo"))
        if worst > 1e-3:
            break
    return worst


def test_mutants_start_from_code_that_passes():
    assert worst_over_laws(CODE) <= TOLERANCE


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_fails_the_exact_law(name):
    assert worst_over_laws(mutant_code(name)) > 1e-3


def test_mutant_that_shares_one_uniform_among_the_parents_of_a_level_fails_the_exact_law():
    """Whether the second child's sampled slot survives hangs on the first child's draw: sharing ties it to its own token.

    First child: score 0.7, its fill slot 0.21 or 0.14 by its draw; second child: 0.3, its sampled slot 0.15; six are kept.
    """
    laws, q = RandomLaws(3, 0), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    root = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    laws.cache[()] = q, root.log()
    for token in range(3):
        laws.cache[(token,)] = q.flip(0), q.log()

    def worst(source):
        trees = grown_trees(CODE, laws, PoolOptions(3, 1, 0), 1, (6,), source)[6]
        return largest_difference(laws, emitted_law(CODE, laws, trees), 3)

    assert worst(ReplayedDraws) <= TOLERANCE
    assert worst(SharedUniformDraws) > 1e-3


def test_enumeration_sums_to_one_over_several_trees():
    laws = RandomLaws(4, 3)
    trees = grown_trees(CODE, laws, PoolOptions(3, 1, 0), 1, (4,))[4]
    assert len(trees) > 1 and sum(weight for weight, _ in trees.values()) == pytest.approx(1, abs=1e-12)
    assert sum(emitted_law(CODE, laws, trees).values()) == pytest.approx(1, abs=1e-12)


def test_table1_counterexample_of_the_paper():
    """Draft 0.5/0.3/0.2, K 3, m 1, two survivors: proxy min(0.5, 0.5) keeps the sampled slot, a proxy of 0.25 does not."""
    q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)

    def survivors(code):
        """{(tokens, kinds) of the two survivors: probability}"""
        laws = RandomLaws(3, 0)
        laws.cache[()] = q, q.log()
        kept = grown_trees(code, laws, PoolOptions(3, 1, 0), 0, (2,))[2]
        return {(*tree.tokens[1:].tolist(), *tree.kinds[1:].tolist()): weight for weight, tree in kept.values()}

    assert survivors(CODE) == pytest.approx({(0, 1, LEAD, SAMPLED): 0.6, (0, 2, LEAD, SAMPLED): 0.4}, abs=1e-15)
    # With 0.25, x_3 as the sampled token loses to the fill slot's x_2 (0.3): only x_2 ever survives as sampled.
    wrong = load_rheo({"pool": [(PROXY, "log_proxy = torch.full_like(log_z, 0.25).log()")]})
    assert survivors(wrong) == pytest.approx({(0, 1, LEAD, SAMPLED): 0.6, (0, 1, LEAD, FILL): 0.4}, abs=1e-15)
