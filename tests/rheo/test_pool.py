"""Candidate pools and their scores, against a literal, slow definition."""

import itertools
import math

import pytest
import torch
from support.trees import FixedToken, draws, one_level_tree

from rheo import AUTO, FILL, LEAD, SAMPLED, Draws, PoolOptions, build_pools
from rheo.scores import AGREEMENT

POOLS = [PoolOptions(4, m, support) for m, support in itertools.product(range(4), (0, 3, 6))]
AUTO_POOLS = [
    PoolOptions(size, AUTO, support, temperature)
    for size, support in ((1, 0), (2, 0), (4, 0), (4, 6), (4, 3), (4, 1))
    for temperature in (0.5, 1.0, 2.0)
]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def softmax(logits, temperature=1.0):
    """Probabilities by token, of logits by token."""
    highest = max(logits.values())
    weights = {i: math.exp((x - highest) / temperature) for i, x in logits.items()}
    return {i: weight / sum(weights.values()) for i, weight in weights.items()}


def literal_pool(logits, options, drawn):
    """One pool as [(token, score, kind)] on plain lists (section 3.2, docs/RHEOSTAT.md).

    ``drawn`` is the rank of the sampled token in the tail.
    """
    size, m, support = options.size, options.m, options.support
    ids = sorted(range(len(logits)), key=lambda i: -logits[i])[: support or len(logits)]
    q = softmax({i: logits[i] for i in ids})
    if auto := m == AUTO:
        m = min(1, min(size, len(ids)) - 1)
    pool, tail = [(i, q[i], LEAD) for i in ids[:m]], ids[m:]
    if not tail:
        return pool
    if auto:
        q_tail = softmax({i: logits[i] for i in tail}, options.temperature)
        common = {
            i: AGREEMENT * min(q[i], q_tail[i]) + (1 - AGREEMENT) * q[i] * q_tail[i] for i in tail
        }
        own = {i: q[i] - common[i] for i in tail}
        proxy = max(sum(common.values()), *own.values())
    else:
        own, z = q, sum(q[i] for i in tail)
        proxy = q[ids[0]] if m == 0 else max(min(q[ids[m - 1]], z), q[tail[0]])
    pool.append((tail[drawn], proxy, SAMPLED))
    fill = [i for i in tail if i != tail[drawn]]
    return pool + [(i, own[i], FILL) for i in fill[: size - m - 1]]


def pools_of_seeds(logits, options):
    """The same pools four times, with other sampled tokens."""
    return [build_pools(logits, options, draws(seed)) for seed in range(4)]


def name(options):
    """A short name for a parameter of a test."""
    return f"{options.size}-{options.m}-{options.support}-{options.temperature}"


@pytest.mark.parametrize("options", POOLS + AUTO_POOLS, ids=name)
def test_pool_equals_the_literal_definition(options):
    generator = torch.Generator().manual_seed(0)
    support = options.support or 9
    for _ in range(20):
        logits = torch.randn(9, generator=generator, dtype=torch.float64) * 3
        for drawn in range(max(support - options.lead_slots(support), 1)):
            pools = build_pools(logits[None], options, FixedToken(drawn))
            tokens, scores, kinds = zip(*literal_pool(logits.tolist(), options, drawn))
            assert tuple(pools.tokens[0].tolist()) == tokens
            assert pools.kinds == kinds
            assert pools.log_proxy[0].exp().tolist() == pytest.approx(scores, abs=1e-14)


def test_top_k_pool_is_the_full_softmax_of_the_highest_logits():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    pools = build_pools(logits, PoolOptions(5, None), draws())
    expected = logits.log_softmax(-1).topk(5)
    assert torch.equal(pools.tokens, expected.indices)
    torch.testing.assert_close(pools.log_proxy, expected.values)


def test_full_normaliser_scores_with_the_whole_vocabulary():
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    pools = build_pools(logits, PoolOptions(5, 2, support=10, normaliser="full"), draws())
    point = torch.tensor(pools.kinds) != SAMPLED
    expected = logits.log_softmax(-1).gather(1, pools.tokens)
    torch.testing.assert_close(pools.log_proxy[:, point], expected[:, point])
    assert (pools.log_proxy[:, 2] <= pools.log_proxy[:, 1]).all()


def test_greedy_pool_takes_the_next_token_with_the_same_proxy():
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
    greedy = build_pools(logits, PoolOptions(3, 1, 0, temperature=0.0), draws())
    sampled = build_pools(logits, PoolOptions(3, 1, 0, temperature=1.0), draws())
    assert greedy.tokens[0].tolist() == [0, 2, 1]
    assert greedy.log_proxy[0, 1] == sampled.log_proxy[0, 1]


@pytest.mark.parametrize("temperature", [0.01, 0.3, 1.0, 2.0])
def test_the_proxy_does_not_depend_on_the_token_and_no_fill_slot_scores_higher(temperature):
    generator = torch.Generator().manual_seed(0)
    for scale, dtype in itertools.product((0.1, 3.0, 30.0, 300.0), DTYPES):
        logits = (torch.randn(8, 200, generator=generator) * scale).to(dtype)
        for m in (0, 1, 2, 5, AUTO):
            options = PoolOptions(8, m, 64, temperature)
            slot = options.lead_slots(64)
            first, *others = pools_of_seeds(logits, options)
            for pools in (first, *others):
                proxy, fill = pools.log_proxy[:, slot], pools.log_proxy[:, slot + 1 :]
                assert torch.equal(proxy, first.log_proxy[:, slot])
                exists = proxy > -torch.inf
                assert (proxy[exists, None] >= fill[exists]).all()
                assert (pools.log_proxy <= 0).all()


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("normaliser", ["support", "full"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_with_nan_or_infinity_still_make_valid_pools(dtype, normaliser, temperature):
    """No NaN, a sampled score that depends on no draw, and no fill slot that scores higher."""
    rows = torch.randn(7, 60, generator=torch.Generator().manual_seed(0)).to(dtype) * 5
    rows[0, 7], rows[1, 7], rows[2, 7] = torch.nan, torch.inf, -torch.inf
    rows[3, :50], rows[4], rows[5] = torch.nan, torch.nan, -torch.inf
    sound = 6
    for m in (None, 0, 1, 2, AUTO):
        options = PoolOptions(8, m, 32, temperature, normaliser)
        first, *others = pools_of_seeds(rows, options)
        for pools in (first, *others):
            scores = pools.log_proxy
            assert not scores.isnan().any() and not pools.tail_weights.isnan().any()
            assert (scores <= 0).all() and (scores[sound] > -torch.inf).all()
            if m is None or normaliser == "full":
                # The softmax over the whole vocabulary leaves nothing of a broken row.
                assert (scores[[0, 1, 3, 4, 5]] == -torch.inf).all()
            if m is not None:
                slot = options.lead_slots(32)
                assert torch.equal(scores[:, slot], first.log_proxy[:, slot])
                assert (scores[:, slot, None] >= scores[:, slot + 1 :]).all()


def test_the_proxy_behind_a_near_certain_lead_uses_the_sum_of_the_tail():
    """Here 1 - q(x_1) is 0 in float32. The summed tail is not, and is at least q(x_2)."""
    tail = [-20.0, -20.5, -21.0]
    pools = build_pools(torch.tensor([[0.0, *tail]]), PoolOptions(3, 1, 0), draws())
    z = sum(math.exp(x) for x in tail)
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
    assert torch.equal(spy.weights, pools.tail_weights)
    assert pools.tail_weights.dtype == torch.float32
    tree = one_level_tree(logits[0], options, 4)
    highest = logits.float().topk(16)
    assert torch.equal(pools.draft_tail, highest.indices[:, 1:])
    assert torch.equal(tree.tail, pools.draft_tail)
    torch.testing.assert_close(tree.q_tail, (highest.values[:, 1:] / temperature).softmax(-1))


def test_tempering_before_the_softmax_keeps_digits_at_low_temperatures():
    options = PoolOptions(2, 1, 0, temperature=0.01)
    pools = build_pools(torch.tensor([[100.0, 1.0, 0.0]]), options, draws())
    assert pools.tail_weights[0].tolist() == pytest.approx([1, 0])


def test_support_smaller_than_the_pool_gives_a_shorter_pool():
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
    for m in (0, 1, 2, 3, 5):
        pools = build_pools(logits, PoolOptions(6, m, 3), draws())
        assert pools.tokens.shape == (2, 3)
        assert all(len(set(row)) == 3 for row in pools.tokens.tolist())
        assert pools.kinds.count(SAMPLED) == (m < 3)
