"""The first three tokens of ``EaModel.eagenerate`` against a tiny target's exact distribution.

The first token comes from the prefill. The second and third are drafted tokens or bonus tokens. The
test is Pearson's chi-square over all texts of three tokens. Cells with an expectation under 5 are
pooled; a text of probability 0 fails at once. The false-alarm rate of each test is 1e-6 divided by
the number of its settings, with fixed seeds. Wrong code must fail with half the requests that the
right code is tested with.
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
VOCAB, LENGTH = 5, 3
REQUESTS = 2000  # at T = 1 a total variation distance of 0.109 fails with probability 0.9
TREE = {"total_token": 6, "depth": 1, "top_k": 3}
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
SETTING = "method, temperature, draft_vocab"
FILTERS = {"top_k": 4, "top_p": 0.9, "min_p": 0.01}


def tiny_model(draft_vocab):
    """A model of one layer; ``draft_vocab`` None is the full vocabulary."""
    layers = {"layers": 1, "aux_layers": (0,), "hidden": 8}
    return tiny_pair(vocab=VOCAB, draft_vocab=draft_vocab, seed=2, **layers, **TREE)


@pytest.fixture(scope="module")
def models():
    """Models with the full and with a reduced draft vocabulary."""
    return {draft_vocab: tiny_model(draft_vocab) for draft_vocab in (None, 4)}


@torch.inference_mode()
def exact_probs(model, temperature=1.0, **filters):
    """Probabilities ``[V ** 3]`` of all texts of three tokens, by plain forwards in one batch."""
    texts = torch.cartesian_prod(*[torch.arange(VOCAB)] * LENGTH)
    inputs = torch.cat((PROMPT.expand(len(texts), -1), texts[:, :-1]), 1)
    logits = model.base_model(inputs).logits[:, -LENGTH:]
    warped = TargetProbs(WarperOptions(temperature, **filters))
    probs = torch.stack([warped(row) for row in logits.flatten(0, 1)]).view(logits.shape)
    return probs.gather(-1, texts[..., None]).double().prod(1).flatten()


def count_texts(model, requests, method, temperature=1.0, **filters):
    """How often each text of three tokens came out, ``[V ** 3]``; the seeds are 0, 1, 2, ..."""
    counts = torch.zeros(VOCAB**LENGTH)
    request = {"temperature": temperature, "max_new_tokens": LENGTH, **METHODS[method], **filters}
    for seed in range(requests):
        a, b, c = model.eagenerate(PROMPT, seed=seed, **request)[0, -LENGTH:].tolist()
        counts[(a * VOCAB + b) * VOCAB + c] += 1
    return counts


def fit(counts, probs):
    """The p-value of counts; 0 if an impossible text came out."""
    expected = probs * counts.sum()
    return goodness_of_fit([(counts.numpy(), expected.numpy())], FALSE_ALARM).p_value


def p_value(model, requests, method, temperature=1.0, **filters):
    """The p-value of a method against the target's exact distribution."""
    counts = count_texts(model, requests, method, temperature, **filters)
    return fit(counts, exact_probs(model, temperature, **filters))


@pytest.mark.parametrize(SETTING, QUICK)
def test_three_tokens_have_the_targets_distribution(models, method, temperature, draft_vocab):
    model = models[draft_vocab]
    assert p_value(model, REQUESTS, method, temperature) > FALSE_ALARM / len(QUICK)


@pytest.mark.full
@pytest.mark.parametrize(SETTING, FULL)
def test_three_tokens_have_the_targets_distribution_in_every_setting(
    models, method, temperature, draft_vocab
):
    model = models[draft_vocab]
    assert p_value(model, 6000, method, temperature) > FALSE_ALARM / len(FULL)


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.8, "min_p": 0.05}])
def test_three_tokens_have_the_targets_distribution_under_filters(models, filters):
    assert p_value(models[4], 1500, "rheo m=1", **filters) > FALSE_ALARM / 2


def decide_at_once(monkeypatch):
    """Make cycles verify as they do on a GPU."""
    begin = Cycle.begin

    def begin_so(self, seed):
        begin(self, seed)
        self.at_once = True

    monkeypatch.setattr(Cycle, "begin", begin_so)


@pytest.mark.parametrize(
    "method, filters", [("topk", {}), ("rheo m=1", {}), ("rrsw", {}), ("rheo m=1", FILTERS)]
)
def test_three_tokens_have_the_targets_distribution_if_all_nodes_are_decided_at_once(
    models, method, filters, monkeypatch
):
    """As on a GPU, but on a CPU."""
    decide_at_once(monkeypatch)
    assert p_value(models[4], 1500, method, **filters) > FALSE_ALARM / 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("cuda_graph", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_three_tokens_have_the_targets_distribution_on_a_gpu(method, cuda_graph):
    """With graphs all but the first cycles are replays, whose random numbers must move on."""
    model = tiny_model(4)
    expected = exact_probs(model)  # before the networks move to the GPU
    base_model, draft = model.base_model.cuda(), model.draft.cuda()
    model = EaModel(base_model, draft, **TREE, cuda_graph=cuda_graph)
    counts = count_texts(model, 3000, method)
    assert fit(counts, expected) > FALSE_ALARM / len(METHODS) / 2


def test_nodes_that_share_their_random_numbers_fail_the_statistical_test(models, monkeypatch):
    decide_at_once(monkeypatch)
    vmap = torch.vmap
    monkeypatch.setattr(torch, "vmap", lambda step, randomness: vmap(step, randomness="same"))
    assert p_value(models[None], REQUESTS // 2, "topk") < FALSE_ALARM / len(QUICK)


def test_a_verification_without_its_residual_fails_the_statistical_test(models, monkeypatch):
    monkeypatch.setattr(rheo.verification, "unless_zero", lambda weights, otherwise: otherwise)
    assert p_value(models[None], REQUESTS // 2, "rheo m=1") < FALSE_ALARM / len(QUICK)


def test_a_temperature_that_is_ignored_fails_the_statistical_test(models):
    counts = count_texts(models[None], REQUESTS // 2, "rheo m=1", temperature=1.0)
    expected = exact_probs(models[None], temperature=0.5)
    assert fit(counts, expected) < FALSE_ALARM / len(QUICK)


def test_one_generator_seeded_again_in_each_cycle_fails_the_statistical_test(models, monkeypatch):
    token = Draws.token

    def restarted(self, weights):
        self.generator.manual_seed(self.generator.initial_seed())
        return token(self, weights)

    monkeypatch.setattr(Draws, "token", restarted)
    assert p_value(models[None], REQUESTS // 2, "rheo m=1") < FALSE_ALARM / len(QUICK)


@pytest.mark.parametrize("method", METHODS)
def test_a_flat_target_yields_every_token_at_every_position_within_300_seeds(method):
    model = tiny_pair(vocab=8, layers=3)
    model.base_model.lm_head.weight.data.zero_()
    request = {"temperature": 1.0, "max_new_tokens": LENGTH, **METHODS[method]}
    missing = set(itertools.product(range(LENGTH), range(8)))
    for seed in range(300):
        output = model.eagenerate(PROMPT, seed=seed, **request)
        missing -= set(enumerate(output[0, -LENGTH:].tolist()))
        if not missing:
            break
    assert not missing
