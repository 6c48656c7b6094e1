"""Pools and trees against a literal, slow definition, and the rules that they must keep."""

import math

import pytest
import torch
from scipy.stats import chisquare

from rheo import AUTO, FILL, LEAD, SAMPLED, Draws, PoolOptions, TreeOptions, build_pools, build_tree
from rheo.pool import Pools
from rheo.scores import AGREEMENT
from rheo.tree import NO_KIND, Growth, prune


def draws(seed=0):
    return Draws(torch.Generator().manual_seed(seed))


class FixedToken:
    """Draws that always sample the same index: for a pool, the rank in its tail."""

    def __init__(self, index):
        self.index = index

    def ahead(self, *_):
        return self

    def token(self, weights):
        return torch.full(weights.shape[:-1], self.index)


def literal_pool(logits, size, m, support, drawn, temperature=1.0):
    """One pool as [(token, score, kind)] on plain lists (section 3.2, docs/RHEOSTAT.md)."""
    ids = sorted(range(len(logits)), key=lambda i: -logits[i])[: support or len(logits)]
    total = sum(math.exp(logits[i]) for i in ids)
    q = {i: math.exp(logits[i]) / total for i in ids}
    auto, own = m == AUTO, q
    if auto:
        m = min(1, min(size, len(ids)) - 1)
    pool = [(i, q[i], LEAD) for i in ids[:m]]
    tail = ids[m:]
    if auto:
        weights = {i: math.exp((logits[i] - logits[tail[0]]) / temperature) for i in tail}
        q_tail = {i: w / sum(weights.values()) for i, w in weights.items()}
        common = {
            i: AGREEMENT * min(q[i], q_tail[i]) + (1 - AGREEMENT) * q[i] * q_tail[i] for i in tail
        }
        own = {i: q[i] - common[i] for i in tail}
    if tail:
        z = sum(q[i] for i in tail)
        proxy = q[ids[0]] if m == 0 else max(min(q[ids[m - 1]], z), q[tail[0]])
        if auto:
            proxy = max(sum(common.values()), *own.values())
        pool.append((tail[drawn], proxy, SAMPLED))
        fill = [i for j, i in enumerate(tail) if j != drawn]
        pool += [(i, own[i], FILL) for i in fill[: size - m - 1]]
    return pool


@pytest.mark.parametrize("support", [0, 3, 6])
@pytest.mark.parametrize("m", [0, 1, 2, 3])
def test_pool_equals_the_literal_definition(m, support):
    generator = torch.Generator().manual_seed(m)
    for _ in range(20):
        logits = torch.randn(9, generator=generator, dtype=torch.float64) * 3
        for drawn in range(max((support or 9) - m, 0)):
            pools = build_pools(logits[None], PoolOptions(4, m, support), FixedToken(drawn))
            expected = literal_pool(logits.tolist(), 4, m, support, drawn)
            assert pools.tokens[0].tolist() == [t for t, _, _ in expected]
            assert list(pools.kinds) == [k for _, _, k in expected]
            assert pools.log_proxy[0].exp().tolist() == pytest.approx(
                [s for _, s, _ in expected], abs=1e-14
            )


@pytest.mark.parametrize("shape", [(20_001,), (2, 16_512)])
def test_a_token_of_a_large_vocabulary_is_sampled_by_its_weight(shape):
    generator = torch.Generator().manual_seed(0)
    probs = torch.zeros(shape)
    positions = torch.randperm(shape[-1], generator=generator)[:40]
    probs[..., positions] = torch.rand(*shape[:-1], 40, generator=generator) ** 3
    probs[..., positions[0]] = 2.0
    source, counts, rounds = draws(), torch.zeros(shape), 4000
    for _ in range(rounds):
        counts.scatter_add_(-1, source.token(probs)[..., None], torch.ones(*shape[:-1], 1))
    assert counts[probs == 0].sum() == 0
    for found, weights in zip(counts.view(-1, shape[-1]), probs.view(-1, shape[-1])):
        expected = weights.double() / weights.double().sum() * rounds
        often = expected >= 10
        cells = ([*x[often].tolist(), x[~often].sum().item()] for x in (found.double(), expected))
        assert chisquare(*cells).pvalue > 1e-4


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("size, support", [(1, 0), (2, 0), (4, 0), (4, 6), (4, 3), (4, 1)])
def test_auto_pool_equals_the_literal_definition(size, support, temperature):
    generator = torch.Generator().manual_seed(size)
    for _ in range(20):
        logits = torch.randn(9, generator=generator, dtype=torch.float64) * 3
        m = min(1, min(size, support or 9) - 1)
        for drawn in range((support or 9) - m):
            pools = build_pools(
                logits[None], PoolOptions(size, AUTO, support, temperature), FixedToken(drawn)
            )
            expected = literal_pool(logits.tolist(), size, AUTO, support, drawn, temperature)
            assert pools.tokens[0].tolist() == [t for t, _, _ in expected]
            assert list(pools.kinds) == [k for _, _, k in expected]
            assert pools.log_proxy[0].exp().tolist() == pytest.approx(
                [s for _, s, _ in expected], abs=1e-14
            )


def test_auto_at_temperature_0_builds_the_top_k_tree_of_the_support():
    vocab_logits = torch.randn(
        200, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )

    def build(pool):
        def expand(tokens, ranks, level):
            return vocab_logits[1 + tokens + 12 * (level % 3)]

        options = TreeOptions(pool, 20, 3)
        return build_tree(torch.tensor(0), vocab_logits[0], expand, options, draws())

    rheo, top_k = build(PoolOptions(4, AUTO, 0, temperature=0.0)), build(PoolOptions(4, None))
    assert (
        rheo.tokens.tolist() == top_k.tokens.tolist()
        and rheo.parents.tolist() == top_k.parents.tolist()
    )
    torch.testing.assert_close(rheo.log_scores, top_k.log_scores)


def test_top_k_pool_is_the_full_softmax_of_the_highest_logits():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    pools = build_pools(logits, PoolOptions(5, None), draws())
    expected = logits.log_softmax(-1).topk(5)
    assert torch.equal(pools.tokens, expected.indices)
    torch.testing.assert_close(pools.log_proxy, expected.values)


def test_full_normaliser_scores_with_the_whole_vocabulary():
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    pools = build_pools(logits, PoolOptions(5, 2, support=10, normaliser="full"), draws())
    torch.testing.assert_close(
        pools.log_proxy,
        logits.log_softmax(-1)
        .gather(1, pools.tokens)
        .where(torch.tensor(pools.kinds) != SAMPLED, pools.log_proxy),
    )
    assert (pools.log_proxy[:, 2] <= pools.log_proxy[:, 1]).all()


def test_full_normaliser_with_m_0_at_temperature_0_builds_the_top_k_tree():
    vocab_logits = torch.randn(200, 40, generator=torch.Generator().manual_seed(0))

    def build(pool):
        def expand(tokens, ranks, level):
            return vocab_logits[1 + tokens + 40 * (level % 3)]

        options = TreeOptions(pool, 20, 3)
        return build_tree(torch.tensor(0), vocab_logits[0], expand, options, draws())

    rheo, top_k = (
        build(PoolOptions(4, 0, 12, temperature=0.0, normaliser="full")),
        build(PoolOptions(4, None)),
    )
    assert (
        rheo.tokens.tolist() == top_k.tokens.tolist()
        and rheo.parents.tolist() == top_k.parents.tolist()
    )


def test_greedy_pool_takes_the_next_token_with_the_same_proxy():
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
    greedy = build_pools(logits, PoolOptions(3, 1, 0, temperature=0.0), draws())
    sampled = build_pools(logits, PoolOptions(3, 1, 0, temperature=1.0), draws())
    assert (
        greedy.tokens[0].tolist() == [0, 2, 1] and greedy.log_proxy[0, 1] == sampled.log_proxy[0, 1]
    )


@pytest.mark.parametrize("temperature", [0.01, 0.3, 1.0, 2.0])
def test_the_proxy_does_not_depend_on_the_token_and_no_fill_slot_scores_higher(temperature):
    generator = torch.Generator().manual_seed(0)
    for scale in (0.1, 3.0, 30.0, 300.0):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            logits = (torch.randn(8, 200, generator=generator) * scale).to(dtype)
            for option in (0, 1, 2, 5, AUTO):
                pools = [
                    build_pools(logits, PoolOptions(8, option, 64, temperature), draws(s))
                    for s in range(4)
                ]
                m = 1 if option == AUTO else option
                for pool in pools:
                    assert torch.equal(pool.log_proxy[:, m], pools[0].log_proxy[:, m])
                    exists = pool.log_proxy[:, m] > -torch.inf
                    assert (
                        pool.log_proxy[exists, m, None] >= pool.log_proxy[exists, m + 1 :]
                    ).all()
                    assert (pool.log_proxy <= 0).all()


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("normaliser", ["support", "full"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_with_nan_or_infinity_still_make_valid_pools(dtype, normaliser, temperature):
    """No NaN, a sampled score that depends on no draw, and no fill slot that scores higher."""
    rows = torch.randn(7, 60, generator=torch.Generator().manual_seed(0)).to(dtype) * 5
    rows[0, 7], rows[1, 7], rows[2, 7] = torch.nan, torch.inf, -torch.inf
    rows[3, :50], rows[4], rows[5] = torch.nan, torch.nan, -torch.inf  # the last row is sound
    for option in (None, 0, 1, 2, AUTO):
        pools = [
            build_pools(rows, PoolOptions(8, option, 32, temperature, normaliser), draws(seed))
            for seed in range(4)
        ]
        for pool in pools:
            assert (
                not pool.log_proxy.isnan().any()
                and not pool.tail_weights.isnan().any()
                and (pool.log_proxy <= 0).all()
            )
            assert (pool.log_proxy[6] > -torch.inf).all()
            if (
                option is None or normaliser == "full"
            ):  # a softmax over the whole row: nothing is left of a broken one
                assert (pool.log_proxy[[0, 1, 3, 4, 5]] == -torch.inf).all()
            if option is not None:
                m = 1 if option == AUTO else option
                assert torch.equal(pool.log_proxy[:, m], pools[0].log_proxy[:, m])
                assert (pool.log_proxy[:, m, None] >= pool.log_proxy[:, m + 1 :]).all()


def test_the_proxy_behind_a_near_certain_lead_uses_the_sum_of_the_tail():
    """Here 1 - q(x_1) is 0 in float32. The summed tail is not, and is at least q(x_2)."""
    pools = build_pools(torch.tensor([[0.0, -20.0, -20.5, -21.0]]), PoolOptions(3, 1, 0), draws())
    z = sum(math.exp(x) for x in (-20.0, -20.5, -21.0))
    assert pools.log_proxy[0, 1].item() == pytest.approx(math.log(z), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_token_is_sampled_from_the_stored_weights(temperature):
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)

    class Spy(Draws):
        def token(self, weights):
            self.weights = weights.clone()
            return super().token(weights)

    spy = Spy(torch.Generator().manual_seed(0))
    options = PoolOptions(4, 1, 16, temperature)
    pools = build_pools(logits, options, spy)
    assert (
        torch.equal(spy.weights, pools.tail_weights) and pools.tail_weights.dtype == torch.float32
    )
    tree = build_tree(torch.tensor(0), logits[0], None, TreeOptions(options, 4, 0), draws())
    highest = logits.float().topk(16)
    assert torch.equal(pools.draft_tail, highest.indices[:, 1:]) and torch.equal(
        tree.tail, pools.draft_tail
    )
    torch.testing.assert_close(tree.q_tail, (highest.values[:, 1:] / temperature).softmax(-1))


def test_a_tail_of_the_smallest_numbers_is_normalised():
    """The tail behind a near-certain lead has weights of about 1e-44."""
    weights = torch.tensor([[3.0, 2.0, 2.0]]) * 2.0**-149
    pool = Pools(
        torch.arange(3)[None],
        torch.tensor([[0.0, -99.0, -99.5]]),
        (LEAD, SAMPLED, FILL),
        torch.arange(1, 4)[None],
        weights,
    )
    tree = prune(
        torch.tensor(0), Growth([pool], torch.tensor([0.0, 0.0, -99.0, -99.5]), [], None), 4
    )
    assert tree.q_tail[0].tolist() == pytest.approx([3 / 7, 2 / 7, 2 / 7])


def test_tempering_before_the_softmax_keeps_digits_at_low_temperatures():
    pools = build_pools(
        torch.tensor([[100.0, 1.0, 0.0]]), PoolOptions(2, 1, 0, temperature=0.01), draws()
    )
    assert pools.tail_weights[0].tolist() == pytest.approx([1, 0])


def test_an_empty_tail_means_no_sampled_slot_and_nothing_takes_its_place():
    logits = torch.tensor([[0.0, -200.0, -201.0, -202.0], [0.0, -1.0, -2.0, -3.0]])
    pools = build_pools(logits, PoolOptions(3, 1, 0), draws())
    assert pools.log_proxy[0, 1] == -torch.inf and pools.log_proxy[1, 1] > -torch.inf
    tree = build_tree(
        torch.tensor(0), logits[0], None, TreeOptions(PoolOptions(3, 1, 0), 10, 0), draws()
    )
    assert tree.valid.tolist() == [True, True, False, False] and tree.kinds.tolist() == [
        NO_KIND,
        LEAD,
        NO_KIND,
        NO_KIND,
    ]  # x_1, no sampled token, x_2 without mass


def test_support_smaller_than_the_pool_gives_a_shorter_pool():
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
    for m, width in ((0, 3), (1, 3), (2, 3), (3, 3), (5, 3)):
        pools = build_pools(logits, PoolOptions(6, m, 3), draws())
        assert pools.tokens.shape == (2, width)
        assert all(len(set(row)) == width for row in pools.tokens.tolist())
        assert pools.kinds.count(SAMPLED) == (m < 3)


def literal_tree(pool_of, size, depth, budget):
    """The kept nodes as {path: kind} under the total order, on plain lists.

    ``pool_of(path)`` gives [(token, log proxy, kind)] with the numbers of the code, so that both
    have the same ties.
    """
    level, candidates = [((), 0.0)], []
    for number in range(depth + 1):
        children = []
        for rank, (path, score) in enumerate(level):
            for slot, (token, log_proxy, kind) in enumerate(pool_of(path)):
                children.append((-(score + log_proxy), number, (rank, slot), (*path, token), kind))
        children.sort(key=lambda c: (c[0], c[2]))
        candidates += children
        level = [(path, -negative) for negative, _, _, path, _ in children[:size]]
    candidates.sort(key=lambda c: c[:3])
    return {path: kind for _, _, _, path, kind in candidates[:budget]}


@pytest.mark.parametrize("m", [0, 1, 2, None])
def test_tree_equals_the_literal_definition_with_ties_everywhere(m):
    distributions = torch.tensor(
        [[8, 4, 2, 2], [4, 4, 4, 4], [4, 8, 3, 1]], dtype=torch.float64
    ).log()
    pool, fixed = PoolOptions(3, m, 0), FixedToken(0)

    def logits_at(path):
        return distributions[(sum(path) + len(path)) % 3]

    def pool_of(path):
        pools = build_pools(logits_at(path)[None], pool, fixed)
        return list(zip(pools.tokens[0].tolist(), pools.log_proxy[0].tolist(), pools.kinds))

    for depth in (0, 1, 2, 3):
        for budget in (1, 2, 5, 9, 17):
            frontier = [()]

            def expand(tokens, ranks, level):
                nonlocal frontier
                frontier = [(*frontier[r], t) for r, t in zip(ranks.tolist(), tokens.tolist())]
                return torch.stack([logits_at(p) for p in frontier])

            tree = build_tree(
                torch.tensor(0), logits_at(()), expand, TreeOptions(pool, budget + 1, depth), fixed
            )
            paths = [()]
            for node in range(1, tree.tokens.numel()):
                assert tree.parents[node] < node
                paths.append((*paths[tree.parents[node]], tree.tokens[node].item()))
                ancestors = {i for i, p in enumerate(paths) if p == paths[-1][: len(p)]}
                assert set(tree.mask[node].nonzero()[:, 0].tolist()) == ancestors
                assert tree.levels[node] == len(paths[-1])
            assert dict(zip(paths[1:], tree.kinds[1:].tolist())) == literal_tree(
                pool_of, 3, depth, budget
            )


def test_a_tie_of_the_lead_and_the_sampled_token_keeps_the_slot_order():
    """For m = 1 and q(x_1) <= 1/2 both score the same; the one kept node must be the lead."""
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    for seed in range(10):
        tree = build_tree(
            torch.tensor(0), logits, None, TreeOptions(PoolOptions(3, 1, 0), 2, 0), draws(seed)
        )
        assert tree.kinds.tolist() == [-1, LEAD]
        tree = build_tree(
            torch.tensor(0), logits, None, TreeOptions(PoolOptions(3, 1, 0), 3, 0), draws(seed)
        )
        assert tree.kinds.tolist() == [-1, LEAD, SAMPLED]


def test_paper_tree_has_59_drafted_nodes_and_at_most_8_levels():
    logits = torch.zeros(1, 64)
    tree = build_tree(
        torch.tensor(0),
        logits[0],
        lambda tokens, *_: torch.linspace(8, 0, 64).expand(len(tokens), -1),
        TreeOptions(PoolOptions()),
        draws(),
    )
    assert (
        tree.tokens.numel() == 60
        and tree.valid.all()
        and tree.levels.max() <= 8
        and tree.max_levels == 8
    )


def test_a_reduced_vocabulary_maps_candidates_and_tail_to_target_ids():
    target_ids = torch.tensor([7, 2, 9, 4])
    pools = build_pools(
        torch.tensor([[0.0, 3.0, 1.0, 2.0]]), PoolOptions(3, 1, 0), FixedToken(1), target_ids
    )
    assert pools.tokens[0].tolist() == [2, 9, 4] and pools.draft_tail[0].tolist() == [3, 2, 0]
    tree = build_tree(
        torch.tensor(5),
        torch.tensor([0.0, 3.0, 1.0, 2.0]),
        None,
        TreeOptions(PoolOptions(3, 1, 0), 4, 0),
        FixedToken(1),
        target_ids,
    )
    assert tree.tokens.tolist() == [5, 2, 9, 4] and tree.tail[0].tolist() == [4, 9, 7]
