"""Packed layers compute what plain layers compute, and only layers that gain by it are packed."""

import pytest
import torch
from safetensors.torch import load_file
from support.tiny import PROMPT, save_pair, tiny_head, tiny_target
from torch import nn
from transformers import AutoModelForCausalLM

from eagle.model.ea_model import EaModel
from eagle.model.linear import (
    PackedLinear,
    ResidualLinear,
    cpu_multiplies_in_bf16,
    pack_linears,
    packable,
)

needs_packing = pytest.mark.skipif(
    not packable(nn.Linear(2, 2)), reason="weights are packed on x86 CPUs only"
)
needs_bf16 = pytest.mark.skipif(
    not cpu_multiplies_in_bf16(), reason="this CPU does not multiply in bfloat16"
)
over_dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_bf16)]
)
over_bias = pytest.mark.parametrize("bias", [True, False])


@needs_packing
@over_dtypes
@over_bias
@torch.inference_mode()
def test_a_packed_layer_computes_what_the_plain_one_does(dtype, bias):
    torch.manual_seed(0)
    linear = nn.Linear(48, 200, bias=bias).to(dtype)
    packed = PackedLinear(linear)
    weight, offset = linear.weight.double(), linear.bias.double() if bias else None
    inputs = [torch.randn(*shape, 48) for shape in ((1,), (7,), (2, 3), (300,))]
    inputs += [torch.randn(48, 5).t(), torch.randn(9, 96)[:, ::2]]  # not contiguous
    for x in inputs:
        x = x.to(dtype)
        result, expected = packed(x), linear(x)
        assert result.shape == expected.shape and result.dtype == dtype
        torch.testing.assert_close(result, expected)
        exact = nn.functional.linear(x.double(), weight, offset)
        error, expected_error = ((y.double() - exact).abs().max() for y in (result, expected))
        assert error <= 1.01 * expected_error + 1e-6  # no larger rounding error
    assert torch.equal(packed.state_dict()["weight"], linear.weight)
    assert not hasattr(packed, "weight")


@needs_packing
@over_dtypes
@over_bias
@torch.inference_mode()
def test_a_packed_residual_layer_adds_what_the_plain_one_does(dtype, bias):
    torch.manual_seed(0)
    layer = ResidualLinear(48, 200, bias=bias).to(dtype)
    packed = PackedLinear(layer)
    # In bfloat16 the two may round at different steps of the sum. Where the sum nearly cancels,
    # the difference is large beside it.
    bounds = {"atol": 0.05, "rtol": 0.02} if dtype == torch.bfloat16 else {}
    for shape in ((1,), (7,), (1, 7), (300,)):
        x, residual = torch.randn(*shape, 48).to(dtype), torch.randn(*shape, 200).to(dtype)
        before = residual.clone()
        torch.testing.assert_close(packed(x, residual), layer(x, residual), **bounds)
        assert torch.equal(residual, before)  # the residual stream is not changed in place


@needs_packing
@over_dtypes
def test_a_packed_pair_decodes_as_the_plain_one(tmp_path, dtype):
    save_pair(tmp_path)
    paths = str(tmp_path / "target"), str(tmp_path / "head")
    settings = {"total_token": 12, "depth": 2, "top_k": 3, "dtype": dtype}
    packed = EaModel.from_pretrained(*paths, **settings)
    plain = EaModel.from_pretrained(*paths, **settings, pack_weights=False)
    for network in (packed.base_model, packed.draft):
        assert sum(isinstance(module, PackedLinear) for module in network.modules()) > 4
        assert not any(isinstance(module, nn.Linear) for module in network.modules())
    assert packed.target.packed and not plain.target.packed
    assert packed.draft.dtype == packed.target.dtype == dtype
    assert packed.draft.fingerprint == plain.draft.fingerprint
    samplings = [{"sampling": "none"}, {"sampling": "topk"}, {"sampling": "rheo", "m": 1}]
    if dtype == torch.bfloat16:
        # The head rounds differently and grows other trees. In another tree a token has other
        # neighbours, and the target rounds differently, too.
        samplings = samplings[:1]
    for sampling in samplings:
        for temperature in (0.0, 1.0):
            options = sampling | {"temperature": temperature, "max_new_tokens": 24, "seed": 3}
            result = packed.eagenerate(PROMPT, **options)
            assert result.tolist() == plain.eagenerate(PROMPT, **options).tolist()


def assert_same_weights(state, expected):
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@needs_packing
@pytest.mark.parametrize("tied", [False, True])
def test_packed_weights_are_saved_like_others_and_refuse_to_move(tmp_path, tied):
    save_pair(tmp_path)
    if tied:  # the output head is the embedding
        tiny_target(tie_word_embeddings=True).save_pretrained(tmp_path / "target")
    packed = EaModel.from_pretrained(str(tmp_path / "target"), str(tmp_path / "head"))
    packed.base_model.save_pretrained(tmp_path / "again")
    before, after = (
        AutoModelForCausalLM.from_pretrained(tmp_path / folder).state_dict()
        for folder in ("target", "again")
    )
    assert_same_weights(after, before)
    assert_same_weights(packed.draft.state_dict(), load_file(tmp_path / "head/model.safetensors"))
    for network in (packed.base_model, packed.draft):
        with pytest.raises(RuntimeError, match="packed for this CPU.*pack_weights=False"):
            network.to(torch.float64)


@needs_packing
def test_other_layers_and_other_dtypes_are_left_alone():
    class Sub(nn.Linear):
        """Some quantisation libraries replace the layer by a subclass like this."""

    class Quantised(torch.Tensor):
        """Others keep the layer and replace its weight by a subclass like this."""

    quantised, offloaded = nn.Linear(4, 4), nn.Linear(4, 4)
    quantised.weight = nn.Parameter(quantised.weight.detach().as_subclass(Quantised))
    offloaded._hf_hook = object()
    unpackable = [
        nn.Linear(4, 4).to(torch.float64),
        nn.Linear(4, 4).to(torch.float16),
        nn.Linear(4, 4, device="meta"),
        Sub(4, 4),
        offloaded,
        quantised,
    ]
    model = nn.ModuleList([*unpackable, nn.Linear(4, 4)])
    pack_linears(model)
    assert list(model)[:-1] == unpackable and isinstance(model[-1], PackedLinear)


def test_a_model_that_the_caller_loaded_is_not_packed():
    target = tiny_target()
    EaModel(target, tiny_head(target))
    assert not any(isinstance(module, PackedLinear) for module in target.modules())


@over_bias
def test_a_residual_layer_adds_to_the_stream_and_autocast_does_not_round_it(bias):
    torch.manual_seed(0)
    layer = ResidualLinear(6, 4, bias=bias)
    x, stream = torch.randn(2, 3, 6), 1000 + torch.randn(2, 3, 4)
    expected = stream + nn.functional.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x, stream), expected)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, stream), expected)
    for given in (x, x.bfloat16()):
        with torch.autocast("cpu", torch.bfloat16):
            result = layer(given, stream)
        assert result.dtype == torch.float32
        # Neighbouring bfloat16 numbers near 1000 are 4 apart.
        torch.testing.assert_close(result, expected, atol=0.05, rtol=0)
