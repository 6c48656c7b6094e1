"""The draft head: its state, loading from disk, and the errors of heads that do not fit."""

import copy
import pickle

import pytest
import torch
from support.tiny import PROMPT, head_json, load_head, save_head, tiny_head, tiny_pair, tiny_target

from eagle.model.draft.checkpoint import head_config
from eagle.model.draft.state import DraftState
from eagle.model.ea_model import EaModel


@pytest.fixture(scope="module")
def model():
    return tiny_pair()


def random_features(n):
    """Features of ``n`` positions: three auxiliary layers of 16."""
    return torch.randn(n, 3 * 16, generator=torch.Generator().manual_seed(1))


def assert_close(a, b, atol=1e-5):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


@torch.inference_mode()
def test_incremental_draft_cache_equals_a_fresh_prefill_with_the_targets_features(model):
    tokens = torch.randint(32, (12,), generator=torch.Generator().manual_seed(0))
    features = random_features(12)
    fresh = DraftState(model.draft, model.target.embedding, 40)
    fresh_logits = fresh.commit(tokens, features)
    grown = DraftState(model.draft, model.target.embedding, 40)
    grown.commit(tokens[:5], features[:5])
    # A tree in between leaves no trace.
    grown.expand(torch.tensor([1, 2, 3]), torch.tensor([0, 0, 0]), 1)
    grown.expand(torch.tensor([4, 5]), torch.tensor([2, 0]), 2)
    grown.commit(tokens[5:7], features[5:7])
    grown_logits = grown.commit(tokens[7:], features[7:])
    assert_close(grown_logits, fresh_logits)
    assert_close(grown.buffer.data[..., :12, :], fresh.buffer.data[..., :12, :])


def test_draft_cache_after_cycles_holds_the_targets_features_not_the_drafts(model, monkeypatch):
    """Decoding leaves the same cache as one prefill with the target's hidden states."""
    states = []
    original = DraftState.__init__

    def record(self, *args):
        original(self, *args)
        states.append(self)

    monkeypatch.setattr(DraftState, "__init__", record)
    options = model.options(temperature=1.0, max_new_tokens=30, sampling="rheo", seed=5)
    result = model.generate(PROMPT, options)
    # Blocks of several tokens were committed.
    assert result.cycles > 3 and max(result.accept_lengths) > 1
    buffer = states[0].buffer
    length = buffer.length
    with torch.inference_mode():
        hidden = model.base_model(result.output_ids, output_hidden_states=True).hidden_states
        features = torch.cat([hidden[i][0, :length] for i in (0, 1, 2)], -1)
        fresh = DraftState(model.draft, model.target.embedding, length)
        fresh.commit(result.output_ids[0, 1 : length + 1], features)
    assert_close(buffer.data[..., :length, :], fresh.buffer.data, atol=1e-4)


@torch.inference_mode()
def test_tree_expansion_equals_running_the_head_along_each_path(model):
    """A node sees the committed positions and its ancestors; its rotary position is its level's."""

    def state():
        found = DraftState(model.draft, model.target.embedding, 40)
        found.commit(torch.tensor([1, 2, 3, 4, 5]), random_features(5))
        return found

    tree = state()
    tree.expand(torch.tensor([6, 7, 8]), torch.tensor([0, 0, 0]), 1)
    second = tree.expand(torch.tensor([9, 10]), torch.tensor([2, 0]), 2)
    for row, path in enumerate(([8, 9], [6, 10])):
        alone = state()
        for level, token in enumerate(path, 1):
            logits = alone.expand(torch.tensor([token]), torch.tensor([0]), level)
        assert_close(second[row], logits[0])


@pytest.mark.parametrize("draft_vocab", [None, 8])
@pytest.mark.parametrize("own_embedding", [False, True])
def test_a_saved_head_loads_and_decodes_like_the_original(tmp_path, draft_vocab, own_embedding):
    target = tiny_target(tie_word_embeddings=not own_embedding)
    head = tiny_head(target, draft_vocab, own_embedding=own_embedding)
    target.save_pretrained(tmp_path / "target")
    save_head(head, tmp_path / "head", head_json(target, draft_vocab))
    options = {"temperature": 1.0, "sampling": "rheo", "max_new_tokens": 20, "seed": 4}
    size = {"total_token": 9, "depth": 2, "top_k": 3}
    expected = EaModel(target, head, **size).eagenerate(PROMPT, **options)
    paths = str(tmp_path / "target"), str(tmp_path / "head")
    with pytest.warns(UserWarning, match="no tokenizer"):
        loaded = EaModel.from_pretrained(*paths, **size, device_map=None)
    assert loaded.eagenerate(PROMPT, **options).tolist() == expected.tolist()
    assert (loaded.draft.embed_tokens is not None) == own_embedding


def test_own_embedding_of_the_head_is_the_one_that_is_used():
    target = tiny_target()
    head = tiny_head(target, own_embedding=True)
    with torch.inference_mode():
        args = torch.tensor([1, 2]), torch.randn(2, 48)
        before = DraftState(head, target.get_input_embeddings(), 8).commit(*args)
        head.embed_tokens.weight.mul_(3)
        after = DraftState(head, target.get_input_embeddings(), 8).commit(*args)
    assert not torch.allclose(before, after)


def test_a_head_saved_as_a_pickle_loads(tmp_path):
    target = tiny_target()
    head = tiny_head(target, 8)
    save_head(head, tmp_path, head_json(target, 8))
    (tmp_path / "model.safetensors").unlink()
    torch.save(head.state_dict(), tmp_path / "pytorch_model.bin")
    assert torch.equal(load_head(tmp_path, target).d2t, head.d2t)


def saved_head(tmp_path, change=lambda weights: None, draft_vocab=8, **config):
    """Save a head after a change of its weights and config; returns its folder and its target."""
    target = tiny_target()
    head = tiny_head(target, draft_vocab)
    weights = head.state_dict()
    change(weights)
    head.state_dict = lambda: weights
    return save_head(head, tmp_path / "head", head_json(target, draft_vocab) | config), target


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda w: w.pop("fc.weight"), r"missing: fc.weight"),
        (
            lambda w: w.update({"midlayer.self_attn.q_proj.bias": torch.zeros(16)}),
            r"unexpected: midlayer.self_attn.q_proj.bias",
        ),
        (
            lambda w: w.update({"norm.weight": torch.zeros(3)}),
            r"wrong shape: norm.weight \(3,\) instead of \(16,\)",
        ),
        (
            lambda w: w.update({"layers.0.mlp.up_proj.weight": torch.zeros(3)}),
            r"EAGLE-1 or EAGLE-2 head",
        ),
        (lambda w: w.pop("d2t"), r"missing: d2t"),
        (lambda w: w["d2t"].zero_(), r"all zeros"),
        (lambda w: w["d2t"].add_(30), r"points outside the vocabulary 0..31: \[33"),
        (lambda w: w["d2t"].copy_(5 - torch.arange(8) // 2), r"several draft ids"),
        (lambda w: w["t2d"].zero_(), r"t2d .* does not mark"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_with_what_is_wrong(tmp_path, change, message):
    folder, target = saved_head(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        load_head(folder, target)


def test_equal_vocabularies_need_no_mapping_and_refuse_another_one(tmp_path):
    def with_offset(offset):
        d2t = torch.full((32,), offset)
        return saved_head(tmp_path, lambda w: w.update(d2t=d2t), draft_vocab=None)

    assert load_head(*with_offset(0)).target_ids() is None
    with pytest.raises(ValueError, match="although its vocabulary is the target's"):
        load_head(*with_offset(1))


def test_aux_layers_of_the_config_are_used_and_checked(tmp_path):
    key = "eagle_aux_hidden_state_layer_ids"
    assert load_head(*saved_head(tmp_path, **{key: [0, 1, 3]})).aux_layers == [0, 1, 3]
    nested = {key: None, "eagle_config": {key: [1, 2, 3]}}
    assert load_head(*saved_head(tmp_path, **nested)).aux_layers == [1, 2, 3]
    message = r"lists feature layers \[0, 1, 4\]; the target has layers 0..3"
    with pytest.raises(ValueError, match=message):
        load_head(*saved_head(tmp_path, **{key: [0, 1, 4]}))


def test_aux_layers_counted_by_their_outputs_are_warned_about(tmp_path):
    target = tiny_target(layers=10)
    save_head(tiny_head(target), tmp_path, head_json(target, aux_layers=[1, 4, 6]))
    with pytest.warns(UserWarning, match=r"input is recorded.*list \[2, 5, 7\] instead"):
        load_head(tmp_path, target)


def test_other_vocabulary_or_missing_files_are_named(tmp_path):
    folder, target = saved_head(tmp_path)
    with pytest.raises(ValueError, match="vocabulary of 32, the target has 40"):
        load_head(folder, tiny_target(vocab=40))
    with pytest.raises(FileNotFoundError, match="config.json"):
        load_head(tmp_path, target)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model.safetensors nor pytorch_model.bin"):
        load_head(folder, target)


@pytest.mark.parametrize(
    "config, theta",
    [
        ({}, 10000.0),
        ({"rope_theta": 500000.0}, 500000.0),
        ({"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, 7.0),
        ({"rope_scaling": {"rope_theta": 9.0, "type": "linear", "factor": 2.0}}, 9.0),
    ],
)
def test_rope_theta_is_found_in_every_form_of_config(config, theta):
    raw = {
        "hidden_size": 16,
        "num_attention_heads": 4,
        "vocab_size": 8,
        "intermediate_size": 32,
        "num_key_value_heads": 2,
    }
    assert head_config(raw | config).rope_parameters["rope_theta"] == theta


def test_eagle3_is_the_only_kind_of_head():
    with pytest.raises(ValueError, match="use_eagle3=False"):
        EaModel.from_pretrained("x", "y", use_eagle3=False)


def test_a_head_can_be_pickled_and_copied(model):
    expected = model.draft.state_dict()
    for other in (pickle.loads(pickle.dumps(model.draft)), copy.deepcopy(model.draft)):
        state = other.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], value) for name, value in expected.items())
        other.load_state_dict(state)


def test_rotary_angles_stay_float32_in_half_precision(tmp_path):
    target = tiny_target()
    save_head(tiny_head(target), tmp_path, head_json(target))
    head = load_head(tmp_path, target)
    expected = head.rotary.inv_freq.clone()
    assert head.to(torch.bfloat16).rotary.inv_freq.dtype == torch.float32
    assert torch.equal(head.rotary.inv_freq, expected) and head.fc.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_row_that_overflows_does_not_reach_rows_that_do_not_see_it(poison):
    """Otherwise a sampled token could change its cousins' pools, and so its own survival."""
    target = tiny_target()
    head = tiny_head(target, own_embedding=True)
    head.embed_tokens.weight.data[9] = poison

    @torch.inference_mode()
    def cousin_logits(other):
        state = DraftState(head, None, 40)
        state.commit(torch.tensor([1, 2, 3, 4, 5]), random_features(5))
        first = state.expand(torch.tensor([6, other]), torch.tensor([0, 0]), 1)[0]
        return first, state.expand(torch.tensor([7, 8]), torch.tensor([0, 1]), 2)[0]

    for clean, poisoned in zip(cousin_logits(8), cousin_logits(9)):
        assert clean.isfinite().all()
        assert_close(poisoned, clean, atol=1e-6)
