"""Verification and filters: rules whose breach is too small for a distribution test."""

import itertools

import pytest
import torch
from support.tiny import PROMPT, tiny_pair
from support.trees import draws, one_level_tree
from transformers import GenerationConfig

from eagle.model.sampling import TargetProbs, WarperOptions
from rheo import Draws, PoolOptions, TreeOptions, build_tree, verify, verify_greedily

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0])
FILTERS = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.8, "min_p": 0.1},
]


def test_greedy_verification_takes_the_argmax_of_siblings_1e_6_apart():
    p = torch.tensor([1.0, 1.0 + 1e-6, 0.5, 0.2])
    probs = TargetProbs(WarperOptions(temperature=0.0))
    for m in (None, 1, 0):
        tree = one_level_tree(LOGITS, PoolOptions(3, m, 0, temperature=0.0))
        verified = verify(tree, lambda node: probs(p), draws())
        # The draft prefers token 0. Token 1 is accepted all the same.
        assert verified.tokens[0] == 1 and verified.count == 2


def test_tokens_outside_the_draft_vocabulary_and_the_support_can_be_emitted():
    p, target_ids = torch.full((6,), 1 / 6), torch.tensor([1, 3, 4])
    logits = torch.tensor([3.0, 2.0, 1.0])
    tree = one_level_tree(logits, PoolOptions(2, 1, 2), 3, target_ids=target_ids)
    source = draws(5)
    seen = {verify(tree, lambda node: p, source).tokens[0].item() for _ in range(300)}
    assert seen == set(range(6))


def test_a_residual_that_underflows_falls_back_to_p_and_is_never_nan():
    """The target p equals q_tail. After a (forced) rejection the residual is 0 everywhere."""
    tree = one_level_tree(torch.tensor([0.0, -1.0, -2.0]), PoolOptions(2, 0, 0), 2)
    p = torch.zeros(3).index_add_(0, tree.tail[0], tree.q_tail[0])

    class Refusing(Draws):
        def accept(self, ratio):
            return torch.zeros_like(ratio, dtype=torch.bool)

    source = Refusing(torch.Generator().manual_seed(0))
    seen = {verify(tree, lambda node: p, source).tokens[0].item() for _ in range(200)}
    assert seen == {0, 1, 2}


def test_verification_reads_the_target_at_visited_nodes_only():
    tree = one_level_tree(LOGITS, PoolOptions(3, 1, 0))
    visited = []

    def probs(node):
        visited.append(node.item())
        return torch.eye(4)[3]

    verified = verify(tree, probs, draws())
    assert visited == verified.path[: verified.count].tolist()
    assert len(visited) < tree.tokens.numel()


def assert_same(result, other):
    """Two results agree. Where the target is not finite, the tokens do not matter."""
    count = result.count
    assert result.finite == other.finite and count == other.count
    assert result.path.shape == other.path.shape and result.tokens.shape == other.tokens.shape
    assert torch.equal(result.path[:count], other.path[:count])
    if result.finite:
        assert torch.equal(result.tokens[:count], other.tokens[:count])


def test_deciding_at_all_nodes_at_once_and_node_by_node_agree_for_greedy_targets():
    """Trees of several shapes, with padding: same path, tokens and count; NaN is reported."""
    table = torch.randn(9, 9, generator=torch.Generator().manual_seed(0))
    # A draft so certain that its tail is empty: for m = 1 padding replaces the sampled slot.
    table[:4, 3] += 400.0
    probs = TargetProbs(WarperOptions(temperature=0.0))
    counts, padding, unvisited_nan = set(), 0, 0

    def expand(tokens, ranks, level):
        return table[tokens]

    shapes = itertools.product((2, 6, 30), (0, 1, 3), (None, 0, 1))
    for (nodes, depth, m), root in itertools.product(shapes, range(9)):
        options = TreeOptions(PoolOptions(3, m, 0, temperature=0.0), nodes, depth)
        tree = build_tree(torch.tensor(root), table[root], expand, options, draws(root))
        padding += (~tree.valid).sum().item()
        # The target is near the draft, and differs from it.
        target = 0.7 * table[tree.tokens] + 0.3 * table[tree.tokens].roll(1, 0)
        for broken in (None, 0, 1):
            rows = target.clone()
            if broken is not None:
                rows[broken] = torch.nan
            node_by_node = verify(tree, lambda node: probs(rows[node]), draws())
            at_once = verify(tree, lambda node: probs(rows[node]), draws(), at_once=True)
            assert_same(node_by_node, at_once)
            greedy = [verify_greedily(tree, lambda node: rows[node], x) for x in (False, True)]
            for result in greedy:
                assert result.finite == node_by_node.finite
                if result.finite:
                    assert_same(result, node_by_node)
            visited = node_by_node.path[: node_by_node.count].tolist()
            assert node_by_node.finite == (broken not in visited)
            unvisited_nan += broken == 1 and broken not in visited
            if broken is None:
                counts.add(node_by_node.count.item())
    assert len(counts) > 2 and padding > 20 and unvisited_nan > 20


def test_unknown_verification_is_an_error():
    tree = one_level_tree(torch.zeros(3), PoolOptions(2, 1, 0))
    with pytest.raises(ValueError, match="verification is 'exact'; choose one of rheo, rrsw"):
        verify(tree, lambda node: torch.ones(3) / 3, draws(), "exact")


@pytest.mark.parametrize("filters", FILTERS)
def test_filters_equal_those_of_generate(filters):
    """Against the warpers that ``generate`` itself makes of a generation config."""
    model = tiny_pair().base_model
    logits = torch.randn(32, generator=torch.Generator().manual_seed(0)) * 2
    config = GenerationConfig(**({"do_sample": True, "top_k": 0, "top_p": 1.0} | filters))
    config._eos_token_tensor = None
    warpers = model._get_logits_processor(config, input_ids_seq_length=1, device="cpu")
    expected = warpers(torch.zeros(1, 1, dtype=torch.long), logits[None]).softmax(-1)[0]
    assert torch.equal(TargetProbs(WarperOptions(**filters))(logits), expected)


def test_filters_leave_q_tail_alone():
    model = tiny_pair()

    def pool(**filters):
        return model.options(temperature=0.7, sampling="rheo", **filters).tree.pool

    for filters in ({"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.5}):
        assert pool(**filters) == pool()


def test_a_banned_token_never_appears_at_any_slot():
    """top_k = 1 at T = 1 leaves one token per step: 200 requests equal plain greedy decoding."""
    model = tiny_pair(layers=2, aux_layers=(0, 1))
    expected = model.naivegenerate(PROMPT, temperature=0.0, max_new_tokens=12)
    methods = (
        {"sampling": "topk"},
        {"sampling": "rheo", "m": 0},
        {"sampling": "rheo"},
        {"sampling": "rheo", "verification": "rrsw"},
    )
    request = {"temperature": 1.0, "top_k": 1, "max_new_tokens": 12}
    for seed, method in itertools.product(range(50), methods):
        assert torch.equal(model.eagenerate(PROMPT, seed=seed, **request, **method), expected)


def test_a_token_of_probability_zero_never_appears_in_10000_verifications():
    p = torch.tensor([0.4, 0.0, 0.3, 0.3])
    logits = torch.tensor([1.0, 2.0, 0.5, 0.0])
    source = draws(3)
    for m, seed in itertools.product((None, 0, 1), range(10)):
        # Rolled, so that the banned token comes to lead, sampled and fill slots.
        tree = one_level_tree(logits.roll(seed), PoolOptions(3, m, 0), source=draws(seed))
        for _ in range(334):
            verified = verify(tree, lambda node: p, source)
            assert 1 not in verified.tokens[: verified.count].tolist()
