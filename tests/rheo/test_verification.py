"""Verification, draws and filters: rules whose breach is too small for a distribution test."""

import itertools

import pytest
import torch
from scipy.stats import chisquare
from support.tiny import PROMPT, tiny_pair
from transformers import GenerationConfig

from eagle.model.sampling import TargetProbs, WarperOptions
from rheo import Draws, PoolOptions, TreeOptions, build_tree, verify, verify_greedily


def draws(seed=0):
    return Draws(torch.Generator().manual_seed(seed))


def one_level_tree(logits, pool, seed=0, budget=10):
    return build_tree(torch.tensor(0), logits, None, TreeOptions(pool, budget + 1, 0), draws(seed))


def test_greedy_verification_takes_the_argmax_of_siblings_1e_6_apart():
    p = torch.tensor([1.0, 1.0 + 1e-6, 0.5, 0.2])
    probs = TargetProbs(WarperOptions(temperature=0.0))
    for pool in (
        PoolOptions(3, None),
        PoolOptions(3, 1, 0, temperature=0.0),
        PoolOptions(3, 0, 0, temperature=0.0),
    ):
        tree = one_level_tree(torch.tensor([2.0, 1.0, 0.0, -1.0]), pool)
        verified = verify(tree, lambda node: probs(p), draws())
        assert (
            verified.tokens[0] == 1 and verified.count == 2
        )  # accepted, whatever the draft preferred


def test_samples_of_parents_and_levels_and_acceptance_uniforms_are_independent():
    """2x2 tables of two samples: chi-square stays below 33, which fails with probability 1e-8."""
    n, source = 40000, draws(1)
    tokens = source.token(torch.tensor([0.3, 0.7]).expand(n, 2, 2))
    uniforms = source.accept(torch.full((n,), 0.4))
    for a, b in ((tokens[:, 0], tokens[:, 1]), (tokens[:, 0], uniforms.long())):
        table = torch.zeros(2, 2).index_put_((a, b), torch.ones(n), accumulate=True)
        expected = table.sum(1, keepdim=True) * table.sum(0) / n
        assert ((table - expected) ** 2 / expected).sum() < 33


def test_numbers_made_ahead_are_independent_and_sampling_goes_on_when_they_are_used_up():
    n, weights = 40000, torch.tensor([0.3, 0.7])
    source = draws(2).ahead(2 * n, 2, weights.device)
    first, second, third = (source.token(weights.expand(n, 2)) for _ in range(3))
    for a, b in ((first, second), (second, third), (first, third)):
        table = torch.zeros(2, 2).index_put_((a, b), torch.ones(n), accumulate=True)
        expected = n * weights[:, None] * weights
        assert ((table - expected) ** 2 / expected).sum() < 38  # 3 degrees: a 3e-8 event


def test_a_uniform_of_exactly_zero_does_not_accept_a_ratio_of_zero(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda shape, **kwargs: torch.zeros(shape))
    assert not draws().accept(torch.tensor(0.0))
    assert draws().accept(torch.tensor(1e-30))


def test_a_weight_of_zero_is_never_sampled_even_if_the_exponential_is_zero(monkeypatch):
    monkeypatch.setattr(
        torch.Tensor, "exponential_", lambda self, rate, generator=None: self.zero_()
    )
    assert draws().token(torch.tensor([0.0, 0.5, 0.5])) == 1


def test_tokens_are_sampled_by_their_weights_and_never_with_weight_zero():
    weights = torch.tensor([0.1, 0.0, 0.6, 0.3])
    counts = draws().token(weights.expand(40000, -1)).bincount(minlength=4)
    assert counts[1] == 0
    expected = weights * 40000
    assert (
        (counts - expected)[expected > 0] ** 2 / expected[expected > 0]
    ).sum() < 38  # 3 degrees: a 3e-8 event


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_smallest_numbers_are_sampled_in_their_proportion(dtype):
    """The tail behind a near-certain lead has such weights. A rounded quotient would tie."""
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    weights = torch.tensor([3.0, 2.0, 0.0, 2.0], dtype=dtype) * smallest
    counts = draws().token(weights.expand(40000, -1)).bincount(minlength=4)
    assert (
        counts[2] == 0
        and chisquare(counts[[0, 1, 3]].tolist(), [40000 * x / 7 for x in (3, 2, 2)]).pvalue > 1e-4
    )


def test_tokens_outside_the_draft_vocabulary_and_the_support_can_be_emitted():
    p = torch.full((6,), 1 / 6)
    logits, target_ids = torch.tensor([3.0, 2.0, 1.0]), torch.tensor([1, 3, 4])
    options = TreeOptions(PoolOptions(2, 1, 2), 3, 0)
    tree = build_tree(torch.tensor(0), logits, None, options, draws(), target_ids)
    source = draws(5)
    seen = {verify(tree, lambda node: p, source).tokens[0].item() for _ in range(300)}
    assert seen == set(range(6))


def test_a_residual_that_underflows_falls_back_to_p_and_is_never_nan():
    """The target p equals q_tail. After a (forced) rejection the residual is 0 everywhere."""
    logits = torch.tensor([0.0, -1.0, -2.0])
    tree = one_level_tree(logits, PoolOptions(2, 0, 0), budget=1)
    p = torch.zeros(3).index_add_(0, tree.tail[0], tree.q_tail[0])

    class Refusing(Draws):
        def accept(self, ratio):
            return torch.zeros_like(ratio, dtype=torch.bool)

    source = Refusing(torch.Generator().manual_seed(0))
    seen = [verify(tree, lambda node: p, source).tokens[0].item() for _ in range(200)]
    assert set(seen) == {0, 1, 2}


def test_verification_reads_the_target_at_visited_nodes_only():
    tree = one_level_tree(torch.tensor([2.0, 1.0, 0.0, -1.0]), PoolOptions(3, 1, 0))
    visited = []

    def probs(node):
        visited.append(node.item())
        return torch.eye(4)[3]

    verified = verify(tree, probs, draws())
    assert (
        visited == verified.path[: verified.count].tolist() and len(visited) < tree.tokens.numel()
    )


def test_deciding_at_all_nodes_at_once_and_node_by_node_agree_for_greedy_targets():
    """Trees of several shapes, with padding: same path, tokens and count; NaN is reported."""
    table = torch.randn(9, 9, generator=torch.Generator().manual_seed(0))
    # A draft so certain that its tail is empty: for m = 1 padding replaces the sampled slot.
    table[:4, 3] += 400.0
    probs = TargetProbs(WarperOptions(temperature=0.0))
    counts, padding = set(), 0
    for nodes, depth, m in itertools.product((2, 6, 30), (0, 1, 3), (None, 0, 1)):
        options = TreeOptions(PoolOptions(3, m, 0, temperature=0.0), nodes, depth)
        for root in range(9):
            tree = build_tree(
                torch.tensor(root),
                table[root],
                lambda tokens, ranks, level: table[tokens],
                options,
                draws(root),
            )
            padding += (~tree.valid).sum().item()
            rows = 0.7 * table[tree.tokens] + 0.3 * table[tree.tokens].roll(
                1, 0
            )  # near the draft's, and different
            for broken in (None, 0, 1):
                if broken is not None:
                    rows[broken] = float("nan")
                lazily, at_once = (
                    verify(tree, lambda node: probs(rows[node]), draws(), at_once=x)
                    for x in (False, True)
                )
                assert lazily.count == at_once.count and lazily.finite == at_once.finite
                for greedy in (
                    verify_greedily(tree, lambda node: rows[node], at_once=x) for x in (False, True)
                ):
                    assert greedy.finite == lazily.finite
                    if lazily.finite:
                        count = lazily.count
                        assert (
                            greedy.count == count
                            and greedy.path.shape == lazily.path.shape
                            and greedy.tokens.shape == lazily.tokens.shape
                        )
                        assert torch.equal(
                            greedy.path[:count], lazily.path[:count]
                        ) and torch.equal(greedy.tokens[:count], lazily.tokens[:count])
                count = lazily.count
                assert (
                    torch.equal(lazily.path[:count], at_once.path[:count])
                    and lazily.path.shape == at_once.path.shape
                )
                if broken is None:
                    assert (
                        torch.equal(lazily.tokens[:count], at_once.tokens[:count])
                        and lazily.tokens.shape == at_once.tokens.shape
                    )
                    counts.add(count.item())
                elif broken == 0:
                    assert not at_once.finite
    assert len(counts) > 2 and padding > 20


def test_unknown_verification_is_an_error():
    tree = one_level_tree(torch.zeros(3), PoolOptions(2, 1, 0))
    with pytest.raises(ValueError, match="verification is 'exact'; choose one of rheo, rrsw"):
        verify(tree, lambda node: torch.ones(3) / 3, draws(), "exact")


FILTERS = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.8, "min_p": 0.1},
]


@pytest.mark.parametrize("filters", FILTERS)
def test_filters_equal_those_of_generate(filters):
    """Against the warpers that ``generate`` itself makes of a generation config."""
    model = tiny_pair().base_model
    logits = torch.randn(32, generator=torch.Generator().manual_seed(0)) * 2
    config = GenerationConfig(**({"do_sample": True, "top_k": 0, "top_p": 1.0} | filters))
    config._eos_token_tensor = None
    processors = model._get_logits_processor(
        generation_config=config, input_ids_seq_length=1, device="cpu"
    )
    expected = processors(torch.zeros(1, 1, dtype=torch.long), logits[None]).softmax(-1)[0]
    torch.testing.assert_close(
        TargetProbs(WarperOptions(**filters))(logits), expected, atol=0, rtol=0
    )


def test_filters_leave_q_tail_alone():
    model = tiny_pair()
    for filters in ({"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.5}):
        plain, filtered = (
            model.options(temperature=0.7, sampling="rheo", **f).tree.pool for f in ({}, filters)
        )
        assert plain == filtered


def test_a_banned_token_never_appears_at_any_slot():
    """top_k = 1 at T = 1 leaves one token per step: 200 requests equal plain greedy decoding."""
    model = tiny_pair()
    expected = model.naivegenerate(PROMPT, temperature=0.0, max_new_tokens=12).tolist()
    for seed in range(50):
        for kwargs in (
            {"sampling": "topk"},
            {"sampling": "rheo", "m": 0},
            {"sampling": "rheo"},
            {"sampling": "rheo", "verification": "rrsw"},
        ):
            assert (
                model.eagenerate(
                    PROMPT, temperature=1.0, top_k=1, max_new_tokens=12, seed=seed, **kwargs
                ).tolist()
                == expected
            )


def test_a_token_of_probability_zero_never_appears_in_10000_draws():
    p = torch.tensor([0.4, 0.0, 0.3, 0.3])
    source = draws(3)
    for pool in (PoolOptions(3, None), PoolOptions(3, 0, 0), PoolOptions(3, 1, 0)):
        for seed in range(10):  # several trees, the banned token in lead, sampled and fill slots
            tree = one_level_tree(torch.tensor([1.0, 2.0, 0.5, 0.0]).roll(seed), pool, seed)
            for _ in range(334):
                verified = verify(tree, lambda node: p, source)
                assert 1 not in verified.tokens[: verified.count].tolist()
