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

pytestmark = pytest.mark.skipif(
    not packable(nn.Linear(2, 2)), reason="weights are packed on x86 CPUs only"
)
DTYPES = [
    torch.float32,
    pytest.param(
        torch.bfloat16,
        marks=pytest.mark.skipif(
            not cpu_multiplies_in_bf16(), reason="this CPU does not multiply in bfloat16"
        ),
    ),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_a_packed_layer_computes_what_the_plain_one_does(dtype, bias):
    torch.manual_seed(0)
    linear = nn.Linear(48, 200, bias=bias).to(dtype)
    packed = PackedLinear(linear)
    for x in (
        torch.randn(1, 48),
        torch.randn(7, 48),
        torch.randn(2, 3, 48),
        torch.randn(300, 48),
        torch.randn(48, 5).t(),
        torch.randn(9, 96)[:, ::2],
    ):
        x = x.to(dtype)
        expected, exact = (
            linear(x),
            nn.functional.linear(
                x.double(), linear.weight.double(), linear.bias.double() if bias else None
            ),
        )
        assert packed(x).shape == expected.shape and packed(x).dtype == dtype
        torch.testing.assert_close(packed(x), expected)
        assert (packed(x).double() - exact).abs().max() <= 1.01 * (
            expected.double() - exact
        ).abs().max() + 1e-6  # rounded no more
    assert torch.equal(packed.state_dict()["weight"], linear.weight) and not hasattr(
        packed, "weight"
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_a_packed_residual_layer_adds_what_the_plain_one_does(dtype, bias):
    torch.manual_seed(0)
    layer = ResidualLinear(48, 200, bias=bias).to(dtype)
    packed = PackedLinear(layer)
    for shape in ((1,), (7,), (1, 7), (300,)):
        x, residual = torch.randn(*shape, 48).to(dtype), torch.randn(*shape, 200).to(dtype)
        before = residual.clone()
        # In bfloat16 a sum may be rounded in another place; where it nearly cancels, that is many of its own units.
        bounds = {"atol": 0.05, "rtol": 0.02} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(packed(x, residual), layer(x, residual), **bounds)
        assert torch.equal(residual, before)  # the stream is not added to in place


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_pair_decodes_as_the_plain_one(tmp_path, dtype):
    save_pair(tmp_path)
    paths, size = (
        (str(tmp_path / "target"), str(tmp_path / "head")),
        {"total_token": 12, "depth": 2, "top_k": 3, "dtype": dtype},
    )
    packed, plain = (
        EaModel.from_pretrained(*paths, **size),
        EaModel.from_pretrained(*paths, **size, pack_weights=False),
    )
    for network in (packed.base_model, packed.draft):
        assert sum(isinstance(module, PackedLinear) for module in network.modules()) > 4
        assert not any(isinstance(module, nn.Linear) for module in network.modules())
    assert packed.target.packed and not plain.target.packed
    assert (
        packed.draft.dtype == packed.target.dtype == dtype
        and packed.draft.fingerprint == plain.draft.fingerprint
    )
    for sampling in ({"sampling": "none"}, {"sampling": "topk"}, {"sampling": "rheo", "m": 1}):
        for temperature in (0.0, 1.0):
            if dtype == torch.bfloat16 and sampling["sampling"] != "none":
                continue  # other roundings in the head make other trees, in which a token's neighbours, and so its roundings, are others
            options = sampling | {"temperature": temperature, "max_new_tokens": 24, "seed": 3}
            assert (
                packed.eagenerate(PROMPT, **options).tolist()
                == plain.eagenerate(PROMPT, **options).tolist()
            )


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
    assert before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )
    before, after = load_file(tmp_path / "head/model.safetensors"), packed.draft.state_dict()
    assert before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )
    for network in (packed.base_model, packed.draft):
        with pytest.raises(RuntimeError, match="packed for this CPU.*pack_weights=False"):
            network.to(torch.float64)


def test_other_layers_and_other_dtypes_are_left_alone():
    class Sub(nn.Linear):
        """As quantisation back ends derive theirs."""

    class Quantised(torch.Tensor):
        """As libraries that quantise weights and leave the layer derive theirs."""

    quantised, offloaded = nn.Linear(4, 4), nn.Linear(4, 4)
    quantised.weight = nn.Parameter(quantised.weight.detach().as_subclass(Quantised))
    offloaded._hf_hook = object()
    left = [nn.Linear(4, 4).to(dtype) for dtype in (torch.float64, torch.float16)] + [
        nn.Linear(4, 4, device="meta"),
        Sub(4, 4),
        offloaded,
        quantised,
    ]
    model = nn.ModuleList([*left, nn.Linear(4, 4)])
    pack_linears(model)
    assert list(model)[:-1] == left and isinstance(model[-1], PackedLinear)


def test_a_model_given_by_its_owner_stays_as_it_is():
    target = tiny_target()
    EaModel(target, tiny_head(target))
    assert not any(isinstance(module, PackedLinear) for module in target.modules())
