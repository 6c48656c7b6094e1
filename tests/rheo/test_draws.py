"""Random decisions: tokens by their weights, never with weight 0, and all independent."""

import pytest
import torch
from scipy.stats import chi2_contingency
from support.trees import draws

from evaluation.common.statistics import goodness_of_fit

N = 40_000


def p_value(counts, weights, pool_below=5.0):
    """p-value of Pearson's chi-square test; 0 if something of weight 0 was sampled."""
    weights = torch.as_tensor(weights, dtype=torch.float64)
    expected = weights / weights.sum() * counts.sum()
    groups = [(counts.flatten().numpy(), expected.flatten().numpy())]
    return goodness_of_fit(groups, 1e-4, pool_below=pool_below).p_value


def cross_table(a, b):
    """How often two binary samples took each pair of values, ``[2, 2]``."""
    return (2 * a + b).bincount(minlength=4).view(2, 2)


def test_tokens_are_sampled_by_their_weights_and_never_with_weight_zero():
    weights = torch.tensor([0.1, 0.0, 0.6, 0.3])
    counts = draws().token(weights.expand(N, -1)).bincount(minlength=4)
    assert p_value(counts, weights) > 3e-8


@pytest.mark.parametrize("shape", [(20_001,), (2, 16_512)])
def test_tokens_of_a_large_vocabulary_are_sampled_by_their_weights(shape):
    generator = torch.Generator().manual_seed(0)
    weights = torch.zeros(shape)
    positions = torch.randperm(shape[-1], generator=generator)[:40]
    weights[..., positions] = torch.rand(*shape[:-1], 40, generator=generator) ** 3
    weights[..., positions[0]] = 2.0
    source, counts = draws(), torch.zeros(shape)
    for _ in range(4000):
        counts.scatter_add_(-1, source.token(weights)[..., None], torch.ones(*shape[:-1], 1))
    rows = zip(counts.view(-1, shape[-1]), weights.view(-1, shape[-1]))
    assert all(p_value(*row, pool_below=10) > 1e-4 for row in rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_smallest_numbers_are_sampled_in_their_proportion(dtype):
    """The tail behind a near-certain lead has such weights. A rounded quotient would tie."""
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    weights = torch.tensor([3.0, 2.0, 0.0, 2.0], dtype=dtype)
    counts = draws().token((weights * smallest).expand(N, -1)).bincount(minlength=4)
    assert p_value(counts, weights) > 1e-4


def test_a_weight_of_zero_is_never_sampled_even_if_the_exponential_is_zero(monkeypatch):
    monkeypatch.setattr(
        torch.Tensor, "exponential_", lambda self, rate, generator=None: self.zero_()
    )
    assert draws().token(torch.tensor([0.0, 0.5, 0.5])) == 1


def test_a_uniform_of_exactly_zero_does_not_accept_a_ratio_of_zero(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda shape, **kwargs: torch.zeros(shape))
    assert not draws().accept(torch.tensor(0.0))
    assert draws().accept(torch.tensor(1e-30))


def test_samples_of_parents_and_levels_and_acceptance_uniforms_are_independent():
    weights, source = torch.tensor([0.3, 0.7]), draws(1)
    parent, sibling = source.token(weights.expand(N, 2, 2)).unbind(-1)
    below = source.token(weights.expand(N, 2))
    accepted = source.accept(torch.full((N,), 0.4))
    for other in (sibling, below, accepted):
        table = cross_table(parent, other)
        assert chi2_contingency(table, correction=False).pvalue > 1e-8


def test_numbers_made_ahead_are_independent_and_sampling_goes_on_when_they_are_used_up():
    weights = torch.tensor([0.3, 0.7])
    source = draws(2).ahead(2 * N, 2, weights.device)
    first, second, third = (source.token(weights.expand(N, 2)) for _ in range(3))
    for a, b in ((first, second), (second, third), (first, third)):
        assert p_value(cross_table(a, b), weights[:, None] * weights) > 3e-8
