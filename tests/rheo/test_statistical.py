"""The first three tokens of ``EaModel.eagenerate`` against a tiny target's exact distribution.

The first token comes from the prefill. The second and third are drafted tokens or bonus tokens. The
test is Pearson's chi-square over all texts of three tokens. Cells with an expectation under 5 are
pooled; a text of probability 0 fails at once. The false-alarm rate of each test is 1e-6 divided by
the number of its settings, with fixed seeds.
"""

import itertools

import pytest
import torch
from support.tiny import PROMPT, tiny_pair

import rheo.verification
from eagle.model.cycle import Cycle
from eagle.model.ea_model import EaModel
from eagle.model.sampling import TargetProbs, WarperOptions
from evaluation.common.statistics import goodness_of_fit
from rheo import Draws

FALSE_ALARM = 1e-6
LENGTH = 3
METHODS = {
    "topk": {"sampling": "topk"},
    "rheo m=0": {"sampling": "rheo", "m": 0},
    "rheo m=1": {"sampling": "rheo", "m": 1},
    "rheo m=2": {"sampling": "rheo", "m": 2},
    "rrsw": {"sampling": "rheo", "m": 1, "verification": "rrsw"},
}
QUICK = [(method, 1.0, None) for method in METHODS] + [("rheo m=1", 0.5, 4), ("rrsw", 0.5, 4)]
FULL = [
    setting for setting in itertools.product(METHODS, (0.5, 1.0), (None, 4)) if setting not in QUICK
]


@pytest.fixture(scope="module")
def models():
    """Vocabulary 5, two layers; full and reduced draft vocabulary."""
    return {
        size: tiny_pair(
            vocab=5,
            draft_vocab=size,
            layers=2,
            aux_layers=(0, 1),
            hidden=8,
            total_token=6,
            depth=1,
            top_k=3,
            seed=2,
        )
        for size in (None, 4)
    }


@torch.inference_mode()
def exact_probs(model, temperature, filters):
    """Probabilities [V, V, V] of the first three new tokens, by plain forwards in one batch."""
    vocab = model.target.vocab_size
    probs = TargetProbs(WarperOptions(temperature, **filters))
    prefixes = torch.cartesian_prod(*[torch.arange(vocab)] * (LENGTH - 1))
    logits = model.base_model(torch.cat((PROMPT.expand(len(prefixes), -1), prefixes), 1)).logits[
        :, PROMPT.numel() - 1 :
    ]
    probability = torch.ones(len(prefixes), vocab, dtype=torch.float64)
    for row, prefix in enumerate(prefixes.tolist()):
        for step, token in enumerate(prefix):
            probability[row] *= probs(logits[row, step])[token].double()
        probability[row] *= probs(logits[row, LENGTH - 1]).double()
    return probability.flatten()


def p_value(model, method, temperature, n, first_seed=0, **filters):
    """The p-value of n requests with consecutive seeds; 0 if an impossible text came out."""
    vocab = model.target.vocab_size
    expected = exact_probs(model, temperature, filters) * n
    counts = torch.zeros_like(expected)
    for seed in range(first_seed, first_seed + n):
        ids = model.eagenerate(
            PROMPT,
            temperature=temperature,
            max_new_tokens=LENGTH,
            seed=seed,
            **METHODS[method],
            **filters,
        )
        a, b, c = ids[0, -LENGTH:].tolist()
        counts[(a * vocab + b) * vocab + c] += 1
    return goodness_of_fit([(counts.numpy(), expected.numpy())], FALSE_ALARM).p_value


@pytest.mark.parametrize("method, temperature, draft_vocab", QUICK)
def test_three_tokens_have_the_targets_distribution(models, method, temperature, draft_vocab):
    assert p_value(models[draft_vocab], method, temperature, 2000) > FALSE_ALARM / len(QUICK)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("cuda_graph", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_three_tokens_have_the_targets_distribution_on_a_gpu(method, cuda_graph):
    """With graphs all but the first cycles are replays, whose random numbers must move on."""
    cpu = tiny_pair(
        vocab=5,
        draft_vocab=4,
        layers=2,
        aux_layers=(0, 1),
        hidden=8,
        total_token=6,
        depth=1,
        top_k=3,
        seed=2,
    )
    expected = exact_probs(cpu, 1.0, {})
    model = EaModel(
        cpu.base_model.cuda(),
        cpu.draft.cuda(),
        total_token=6,
        depth=1,
        top_k=3,
        cuda_graph=cuda_graph,
    )
    n, counts = 3000, torch.zeros_like(expected)
    for seed in range(n):
        a, b, c = model.eagenerate(
            PROMPT, temperature=1.0, max_new_tokens=LENGTH, seed=seed, **METHODS[method]
        )[0, -LENGTH:].tolist()
        counts[(a * 5 + b) * 5 + c] += 1
    assert (
        goodness_of_fit([(counts.numpy(), (expected * n).numpy())], FALSE_ALARM).p_value
        > FALSE_ALARM / len(METHODS) / 2
    )


@pytest.mark.full
@pytest.mark.parametrize("method, temperature, draft_vocab", FULL)
def test_three_tokens_have_the_targets_distribution_in_every_setting(
    models, method, temperature, draft_vocab
):
    assert p_value(models[draft_vocab], method, temperature, 6000) > FALSE_ALARM / len(FULL)


def decide_at_once(monkeypatch):
    """Make cycles verify as they do on a GPU."""
    begin = Cycle.begin

    def begin_so(self, seed):
        begin(self, seed)
        self.at_once = True

    monkeypatch.setattr(Cycle, "begin", begin_so)


@pytest.mark.parametrize("filters", [{}, {"top_k": 4, "top_p": 0.9, "min_p": 0.01}])
@pytest.mark.parametrize("method", ["topk", "rheo m=1", "rrsw"])
def test_three_tokens_have_the_targets_distribution_if_all_nodes_are_decided_at_once(
    models, method, filters, monkeypatch
):
    """As on a GPU, but on a CPU."""
    decide_at_once(monkeypatch)
    assert p_value(models[4], method, 1.0, 1500, **filters) > FALSE_ALARM / 6


def test_nodes_that_share_their_random_numbers_fail_the_statistical_test(models, monkeypatch):
    decide_at_once(monkeypatch)
    vmap = torch.vmap
    monkeypatch.setattr(torch, "vmap", lambda step, randomness: vmap(step, randomness="same"))
    assert p_value(models[None], "topk", 1.0, 2000) < FALSE_ALARM / len(QUICK)


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.8, "min_p": 0.05}])
def test_three_tokens_have_the_targets_distribution_under_filters(models, filters):
    assert p_value(models[4], "rheo m=1", 1.0, 1500, **filters) > FALSE_ALARM / 2


def test_a_verification_without_its_residual_fails_the_statistical_test(models, monkeypatch):
    monkeypatch.setattr(rheo.verification, "unless_zero", lambda weights, otherwise: otherwise)
    assert p_value(models[None], "rheo m=1", 1.0, 2000) < FALSE_ALARM / len(QUICK)


def test_a_temperature_that_is_ignored_fails_the_statistical_test(models, monkeypatch):
    expected = exact_probs(models[None], 0.5, {})
    monkeypatch.setattr(f"{__name__}.exact_probs", lambda *args: expected)
    assert p_value(models[None], "rheo m=1", 1.0, 2000) < FALSE_ALARM / len(QUICK)


def test_one_generator_seeded_again_in_each_cycle_fails_the_statistical_test(models, monkeypatch):
    token = Draws.token

    def restarted(self, weights):
        self.generator.manual_seed(self.generator.initial_seed())
        return token(self, weights)

    monkeypatch.setattr(Draws, "token", restarted)
    assert p_value(models[None], "rheo m=1", 1.0, 2000) < FALSE_ALARM / len(QUICK)


def test_a_flat_target_yields_every_token_over_300_seeds():
    model = tiny_pair(vocab=8, layers=3)
    model.base_model.lm_head.weight.data.zero_()
    for method in METHODS.values():
        seen = [set() for _ in range(3)]
        for seed in range(300):
            for place, token in zip(
                seen,
                model.eagenerate(PROMPT, temperature=1.0, max_new_tokens=3, seed=seed, **method)[
                    0, -3:
                ].tolist(),
            ):
                place.add(token)
        assert all(len(place) == 8 for place in seen)
