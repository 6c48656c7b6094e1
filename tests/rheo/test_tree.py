"""Draft trees against a literal, slow definition, and the rules that they must keep."""

import itertools

import pytest
import torch
from support.trees import FixedToken, draws, one_level_tree

from rheo import AUTO, FILL, LEAD, SAMPLED, PoolOptions, TreeOptions, build_pools, build_tree
from rheo.pool import Pools
from rheo.tree import NO_KIND, Growth, prune


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


def paths_of(tree):
    """The path of each node. Checks parents, levels and the mask on the way."""
    paths = [()]
    for node in range(1, tree.tokens.numel()):
        assert tree.parents[node] < node
        paths.append((*paths[tree.parents[node]], tree.tokens[node].item()))
        ancestors = {i for i, path in enumerate(paths) if path == paths[-1][: len(path)]}
        assert set(tree.mask[node].nonzero()[:, 0].tolist()) == ancestors
        assert tree.levels[node] == len(paths[-1])
    return paths


@pytest.mark.parametrize("m", [0, 1, 2, None])
def test_tree_equals_the_literal_definition_with_ties_everywhere(m):
    weights = [[8, 4, 2, 2], [4, 4, 4, 4], [4, 8, 3, 1]]
    logits = torch.tensor(weights, dtype=torch.float64).log()
    pool, fixed = PoolOptions(3, m, 0), FixedToken(0)

    def logits_at(path):
        return logits[(sum(path) + len(path)) % 3]

    def pool_of(path):
        pools = build_pools(logits_at(path)[None], pool, fixed)
        return list(zip(pools.tokens[0].tolist(), pools.log_proxy[0].tolist(), pools.kinds))

    for depth, budget in itertools.product((0, 1, 2, 3), (1, 2, 5, 9, 17)):
        frontier = [()]

        def expand(tokens, ranks, level):
            nonlocal frontier
            frontier = [(*frontier[r], t) for r, t in zip(ranks.tolist(), tokens.tolist())]
            return torch.stack([logits_at(path) for path in frontier])

        options = TreeOptions(pool, budget + 1, depth)
        tree = build_tree(torch.tensor(0), logits_at(()), expand, options, fixed)
        kinds = dict(zip(paths_of(tree)[1:], tree.kinds[1:].tolist()))
        assert kinds == literal_tree(pool_of, 3, depth, budget)


@pytest.mark.parametrize(
    "pool, vocab, dtype",
    [
        (PoolOptions(4, AUTO, 0, temperature=0.0), 12, torch.float64),
        (PoolOptions(4, 0, 12, temperature=0.0, normaliser="full"), 40, torch.float32),
    ],
    ids=["auto", "m=0, full normaliser"],
)
def test_at_temperature_0_these_pools_build_the_top_k_tree(pool, vocab, dtype):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, vocab, generator=generator, dtype=dtype)

    def expand(tokens, ranks, level):
        return logits[1 + tokens + vocab * (level % 3)]

    tree, top_k = (
        build_tree(torch.tensor(0), logits[0], expand, TreeOptions(options, 20, 3), draws())
        for options in (pool, PoolOptions(4, None))
    )
    assert torch.equal(tree.tokens, top_k.tokens)
    assert torch.equal(tree.parents, top_k.parents)
    torch.testing.assert_close(tree.log_scores, top_k.log_scores)


def test_a_tie_of_the_lead_and_the_sampled_token_keeps_the_slot_order():
    """For m = 1 and q(x_1) <= 1/2 both score the same; the one kept node must be the lead."""
    logits, pool = torch.tensor([0.5, 0.3, 0.2]).log(), PoolOptions(3, 1, 0)
    for seed in range(10):
        for kinds in ([NO_KIND, LEAD], [NO_KIND, LEAD, SAMPLED]):
            tree = one_level_tree(logits, pool, len(kinds), draws(seed))
            assert tree.kinds.tolist() == kinds


def test_an_empty_tail_means_no_sampled_slot_and_nothing_takes_its_place():
    logits = torch.tensor([[0.0, -200.0, -201.0, -202.0], [0.0, -1.0, -2.0, -3.0]])
    options = PoolOptions(3, 1, 0)
    pools = build_pools(logits, options, draws())
    assert pools.log_proxy[0, 1] == -torch.inf and pools.log_proxy[1, 1] > -torch.inf
    tree = one_level_tree(logits[0], options, 10)
    # The lead token x_1 is left. The sampled slot and x_2 have no mass.
    assert tree.valid.tolist() == [True, True, False, False]
    assert tree.kinds.tolist() == [NO_KIND, LEAD, NO_KIND, NO_KIND]


def test_a_tail_of_the_smallest_numbers_is_normalised():
    """The tail behind a near-certain lead has weights of about 1e-44."""
    log_scores = torch.tensor([0.0, -99.0, -99.5])
    pool = Pools(
        tokens=torch.arange(3)[None],
        log_proxy=log_scores[None],
        kinds=(LEAD, SAMPLED, FILL),
        draft_tail=torch.arange(1, 4)[None],
        tail_weights=torch.tensor([[3.0, 2.0, 2.0]]) * 2.0**-149,
    )
    growth = Growth([pool], torch.cat((torch.zeros(1), log_scores)), [], None)
    tree = prune(torch.tensor(0), growth, 4)
    assert tree.q_tail[0].tolist() == pytest.approx([3 / 7, 2 / 7, 2 / 7])


def test_paper_tree_has_59_drafted_nodes_and_at_most_8_levels():
    def expand(tokens, ranks, level):
        return torch.linspace(8, 0, 64).expand(len(tokens), -1)

    options = TreeOptions(PoolOptions())
    tree = build_tree(torch.tensor(0), torch.zeros(64), expand, options, draws())
    assert tree.tokens.numel() == 60 and tree.valid.all()
    assert tree.levels.max() <= 8 and tree.max_levels == 8


def test_a_reduced_vocabulary_maps_candidates_and_tail_to_target_ids():
    logits, target_ids = torch.tensor([0.0, 3.0, 1.0, 2.0]), torch.tensor([7, 2, 9, 4])
    options, fixed = PoolOptions(3, 1, 0), FixedToken(1)
    pools = build_pools(logits[None], options, fixed, target_ids)
    assert pools.tokens[0].tolist() == [2, 9, 4] and pools.draft_tail[0].tolist() == [3, 2, 0]
    tree = one_level_tree(logits, options, 4, fixed, target_ids)
    assert tree.tokens.tolist() == [0, 2, 9, 4] and tree.tail[0].tolist() == [4, 9, 7]
