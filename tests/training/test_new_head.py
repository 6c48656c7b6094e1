"""The draft vocabulary, and the draft head that training starts from."""

import pytest
import torch
from support.tiny import tiny_target

from eagle.model.target import TargetModel
from eagle.traineagle3.corpus import Conversation
from eagle.traineagle3.new_head import new_config, new_head
from eagle.traineagle3.vocabulary import choose_draft_ids, coverage


def conversations(*answers):
    return [Conversation([1, 2], list(answer), 1.0) for answer in answers]


def test_the_draft_vocabulary_is_the_most_frequent_answer_tokens():
    corpus = conversations([9, 9, 9, 4, 4, 7], [9, 4, 3])
    ids = choose_draft_ids(corpus, 3, 12)
    assert ids.tolist() == [3, 4, 9]  # 3 and 7 are seen once each: the lower id is taken
    assert coverage(corpus, ids, 12) == pytest.approx(8 / 9)


def test_a_draft_vocabulary_larger_than_the_seen_tokens_is_filled_up():
    ids = choose_draft_ids(conversations([9, 9, 4]), 6, 12)
    assert ids.tolist() == [0, 1, 2, 3, 4, 9]
    # Offsets that are all 0 would be refused as a mapping that was never saved.
    assert choose_draft_ids(conversations([2, 2, 0]), 4, 12).tolist() == [0, 1, 2, 4]
    assert choose_draft_ids(conversations([9]), 12, 12).tolist() == list(range(12))


@pytest.mark.parametrize("size", [0, 13])
def test_a_draft_vocabulary_of_impossible_size_is_refused(size):
    with pytest.raises(ValueError, match=f"draft_vocab_size is {size}"):
        choose_draft_ids(conversations([9]), size, 12)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_new_head_starts_from_the_targets_last_layer_and_output_head(family):
    target = TargetModel(tiny_target(family, layers=8))
    ids = torch.tensor([3, 5, 30])
    head, missed = new_head(target, new_config(target, 3), ids, seed=0)
    assert missed == [] and head.aux_layers == [2, 4, 5]
    layer, state = target.layers[-1], head.state_dict()
    for name in ("q_proj", "k_proj", "v_proj"):
        of_hidden = state[f"midlayer.self_attn.{name}.weight"][:, 16:]
        assert torch.equal(of_hidden, getattr(layer.self_attn, name).weight)
    own = head.midlayer
    assert torch.equal(own.self_attn.o_proj.weight, layer.self_attn.o_proj.weight)
    assert torch.equal(own.mlp.down_proj.weight, layer.mlp.down_proj.weight)
    assert torch.equal(head.lm_head.weight, target.output_head.weight[ids])
    assert torch.equal(head.target_ids(), ids)
    features = torch.randn(4, 48)
    assert torch.equal(head.fuse(features), features[:, 32:])  # those of the last auxiliary layer


def test_a_target_whose_attention_is_wider_than_its_hidden_size_gets_a_head_that_eagle_can_load():
    """Qwen3-0.6B is such a target: 16 attention heads of 128, a hidden size of 1024."""
    target = TargetModel(tiny_target("qwen3", layers=8, head_dim=8))
    config = new_config(target, 24)
    names = ("num_attention_heads", "num_key_value_heads", "hidden_size")
    assert [config[name] for name in names] == [2, 2, 16]
    head, missed = new_head(target, config, torch.arange(24), seed=0)
    assert missed == ["midlayer.self_attn.q_proj", "midlayer.self_attn.o_proj"]
    assert head.config.head_dim == 8


def test_weights_that_cannot_start_from_the_target_are_named():
    target = TargetModel(tiny_target(layers=8))
    config = new_config(target, 32, intermediate_size=20)
    _, missed = new_head(target, config, torch.arange(32), seed=0)
    assert missed == ["midlayer.mlp.gate_proj", "midlayer.mlp.up_proj", "midlayer.mlp.down_proj"]
