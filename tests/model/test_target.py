"""The target with its cache and tree mask equals the plain target; loading; the tree's size."""

import json
import warnings
from statistics import mean

import pytest
import sentencepiece
import torch
from support.tiny import FAMILIES, PROMPT, tiny_head, tiny_pair, tiny_target
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from eagle.model import loading
from eagle.model.ea_model import EaModel
from eagle.model.loading import load_causal_lm, load_tokenizer, parse_dtype
from eagle.model.target import TargetModel, default_aux_layers
from eagle.model.tuning import tree_size
from eagle.model.tuning.contexts import contexts
from eagle.model.tuning.tree_size import DEPTHS, EVERY, SIZES, TEXT, best_tree, expected_tokens

# A branching tree of 7 nodes.
TOKENS = torch.tensor([5, 7, 9, 11, 2, 3, 4])
PARENTS = [0, 0, 0, 1, 1, 2, 3]

over_families = pytest.mark.parametrize("family", FAMILIES)


def tree_inputs():
    """Levels, mask and paths from the root of the nodes."""
    mask = torch.eye(7, dtype=torch.bool)
    levels = torch.zeros(7, dtype=torch.long)
    paths = [[0]]
    for node in range(1, 7):
        mask[node] |= mask[PARENTS[node]]
        levels[node] = levels[PARENTS[node]] + 1
        paths.append([*paths[PARENTS[node]], node])
    return levels, mask, paths


def generate(target, new):
    """The prompt and ``new`` tokens by transformers' own greedy decoding."""
    everything = torch.ones_like(PROMPT)
    ids = target.generate(
        PROMPT, attention_mask=everything, do_sample=False, max_new_tokens=new, pad_token_id=0
    )
    return ids.tolist()


def assert_close(a, b):
    torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@over_families
@torch.inference_mode()
def test_tree_forward_of_every_path_equals_the_sequential_forward(family, implementation):
    model = tiny_target(family, attn_implementation=implementation)
    target = TargetModel(model)
    levels, mask, paths = tree_inputs()
    cache = target.new_cache(32)
    target.prefill(PROMPT[0], cache, [1])
    output = target.tree_forward(TOKENS, levels, mask, cache, [0, 2])
    for node, path in enumerate(paths):
        sequence = torch.cat((PROMPT[0], TOKENS[path]))[None]
        plain = model(sequence, output_hidden_states=True)
        assert_close(output.logits[node], plain.logits[0, -1])
        features = torch.cat([plain.hidden_states[i][0, -1] for i in (0, 2)])
        assert_close(output.features[node], features)


@over_families
@torch.inference_mode()
def test_cache_keeps_the_accepted_path_and_forgets_the_rest(family):
    model = tiny_target(family)
    target = TargetModel(model)
    levels, mask, _ = tree_inputs()
    cache = target.new_cache(32)
    target.prefill(PROMPT[0], cache, [])
    target.tree_forward(TOKENS, levels, mask, cache, [])
    cache.keep(torch.tensor([0, 1, 3]))
    assert cache.length == PROMPT.numel() + 3
    lone, level = torch.tensor([8]), torch.tensor([0])
    output = target.tree_forward(lone, level, torch.ones(1, 1, dtype=torch.bool), cache, [])
    sequence = torch.cat((PROMPT[0], TOKENS[[0, 1, 3]], lone))[None]
    assert_close(output.logits[0], model(sequence).logits[0, -1])


@over_families
def test_greedy_output_equals_generate_and_plain_decoding(family):
    target = tiny_target(family, seed=3)
    model = EaModel(target, tiny_head(target), total_token=12, depth=2, top_k=4)
    expected = generate(target, 40)
    for options in (
        {"sampling": "topk"},
        {"sampling": "rheo", "m": 0},
        {"sampling": "rheo", "m": 1},
        {"sampling": "none"},
    ):
        ids = model.eagenerate(PROMPT, temperature=0.0, max_new_tokens=40, **options)
        assert ids.tolist() == expected, options


def test_decoding_gives_no_deprecation_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny_pair().eagenerate(PROMPT, max_new_tokens=8)


def test_hooks_are_gone_after_a_request():
    model = tiny_pair()
    model.eagenerate(PROMPT, max_new_tokens=8)
    assert not any(layer._forward_pre_hooks for layer in model.base_model.model.layers)


def test_unsupported_targets_are_refused_by_name():
    with pytest.raises(ValueError, match="GPT2LMHeadModel"):
        TargetModel(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=8)))
    sliding = tiny_target("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=0)
    with pytest.raises(ValueError, match="sliding_attention"):
        TargetModel(sliding)


def test_targets_whose_rope_depends_on_the_block_or_that_take_no_mask_are_refused_by_name():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ValueError, match="RoPE of type 'dynamic'"):
        TargetModel(tiny_target(rope_parameters=rope))
    model = tiny_target()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2.*sdpa, eager"):
        TargetModel(model)


def test_mistral_within_its_window_decodes_and_beyond_it_is_refused():
    target = tiny_target("mistral", sliding_window=16)
    model = EaModel(target, tiny_head(target), total_token=8, depth=1, top_k=3)
    assert model.eagenerate(PROMPT, max_new_tokens=10).tolist() == generate(target, 10)
    with pytest.raises(ValueError, match="attends to 16 tokens"):
        model.eagenerate(PROMPT, max_new_tokens=11)


def test_default_aux_layers_are_those_of_eagle3_and_small_targets_are_an_error():
    assert default_aux_layers(32) == [2, 16, 29] and default_aux_layers(30) == [2, 15, 27]
    with pytest.raises(ValueError, match="6 layers is too small"):
        default_aux_layers(6)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_layers_on_two_devices_give_the_same_ids():
    from accelerate import dispatch_model

    one = tiny_pair()
    expected = one.eagenerate(PROMPT, max_new_tokens=30)
    devices = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    devices |= {f"model.layers.{i}": int(i > 1) for i in range(4)}
    target, head = dispatch_model(one.base_model, devices), one.draft.to("cuda:0")
    two = EaModel(target, head, total_token=12, depth=2, top_k=4)
    assert two.eagenerate(PROMPT, max_new_tokens=30).tolist() == expected.tolist()


def test_dtypes_by_name(monkeypatch):
    assert parse_dtype("auto") == "auto"
    assert parse_dtype("bf16") == parse_dtype(torch.bfloat16) == torch.bfloat16
    for has_it, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(loading, "multiplies_in_bf16", lambda has_it=has_it: has_it)
        assert parse_dtype("fast") == dtype
    with pytest.raises(ValueError, match="dtype is 'int4'; choose one of auto, fast, bf16, fp16"):
        parse_dtype("int4")


def test_the_tree_of_the_most_expected_tokens_per_second_is_chosen():
    tau = {2: 1 + torch.arange(100).double().log1p()}
    largest, smallest = (max(SIZES), 2), (min(SIZES), 2)
    assert best_tree(tau, {2: 1.0}, dict.fromkeys(SIZES, 0.0)) == largest  # verification is free
    assert best_tree(tau, {2: 0.0}, {n: float(n) for n in SIZES}) == smallest  # nodes cost all
    assert best_tree(tau, {2: 1.0}, {8: 2.0, 16: 2.2, 32: 4.0}) == (16, 2)
    tau[5] = tau[2] * 1.5  # 3 more levels give half as many tokens again
    assert best_tree(tau, {2: 1.0, 5: 2.0}, {16: 2.2}) == (16, 5)
    assert best_tree(tau, {2: 1.0, 5: 3.0}, {16: 2.2}) == (16, 2)


def test_expected_tokens_of_a_smaller_tree_are_read_from_a_larger_one():
    model = tiny_pair()

    def options(nodes, depth):
        return model.options(temperature=1.0, total_token=nodes, depth=depth, tree_top_k=4)

    # 60 nodes are more than the root and its 4 + 3 * 16 candidates.
    tau = expected_tokens(model.target, model.draft, PROMPT, options(60, 3), (1, 3))
    assert set(tau) == {1, 3} and tau[3][-1] > tau[1][-1]
    for expected in tau.values():
        assert expected.shape == (53,) and expected[0] == 1 and expected[-1] > 1.1
    text = model.naivegenerate(PROMPT, temperature=1.0, max_new_tokens=TEXT)[0]
    positions = list(range(PROMPT.numel(), text.numel(), EVERY))
    for nodes, depth in ((2, 3), (7, 3), (12, 3), (50, 3), (2, 1), (12, 1), (20, 1)):
        small = contexts(model.target, model.draft, text, positions, [options(nodes, depth)])
        direct = mean(context.tau for context in small)
        assert tau[depth][nodes - 1].item() == pytest.approx(direct, abs=1e-6)


def test_the_tree_is_measured_once_for_a_pair(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def chosen(**size):
        return tiny_pair(**size).tree_defaults

    size = chosen(total_token=-1)
    both = chosen(total_token=-1, depth=-1)
    depth = chosen(depth=-1)
    assert size["total_token"] in SIZES and size["depth"] == 2
    assert both["total_token"] in SIZES and both["depth"] in DEPTHS
    assert depth["total_token"] == 12 and depth["depth"] in DEPTHS
    monkeypatch.setattr(tree_size, "verification_seconds", None)  # a measurement would fail
    assert chosen(total_token=-1) == size
    assert chosen(total_token=-1, depth=-1) == both
    with pytest.raises(TypeError):  # with a fixed depth of 3 it is another measurement
        chosen(total_token=-1, depth=3)
    for missing in ({"total_token": -1}, {"depth": -1}):
        with pytest.raises(ValueError, match="-1 chooses the tree for a draft head"):
            EaModel(tiny_target(), None, **missing)


def test_offload_is_announced(monkeypatch):
    model = tiny_target()
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu"}
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: model)
    with pytest.warns(UserWarning, match="parts of some/model are offloaded to cpu"):
        load_causal_lm("some/model")


class Int8Linear(torch.nn.Module):
    """A layer with a quantised weight, int8 and a scale per row, as some libraries have it."""

    def __init__(self, linear):
        super().__init__()
        self.scale = torch.nn.Buffer(linear.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.weight = torch.nn.Buffer((linear.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight * self.scale)


def test_a_quantised_target_gives_the_output_of_generate():
    target = tiny_target()
    head = tiny_head(target)
    for layer in target.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, module in list(part.named_children()):
                if isinstance(module, torch.nn.Linear):
                    setattr(part, name, Int8Linear(module))
    model = EaModel(target, head, total_token=12, depth=2, top_k=4)
    expected = generate(target, 30)
    for sampling in ({"sampling": "none"}, {"sampling": "topk"}, {"sampling": "rheo", "m": 1}):
        assert model.eagenerate(PROMPT, max_new_tokens=30, **sampling).tolist() == expected


def test_a_tokenizer_that_is_a_sentencepiece_model_is_loaded(tmp_path, recwarn):
    """Vicuna-13B-v1.3 has this kind of tokenizer: a ``tokenizer.model`` and nothing else."""
    tiny_target().save_pretrained(tmp_path)
    texts = [
        "the sea is blue and the sky is blue",
        "a bird flies over the sea",
        "who sees the bird in the sky",
    ]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts * 4),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "legacy": False,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = load_tokenizer(str(tmp_path), {})("the bird sees the sea").input_ids
    own = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert ids == [own.bos_id(), *own.encode("the bird sees the sea")]
    assert not any("no tokenizer" in str(warning.message) for warning in recwarn)
