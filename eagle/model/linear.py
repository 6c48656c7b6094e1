"""Linear layers for inference.

``ResidualLinear`` adds its product to the residual stream in one operation.

``PackedLinear`` is for CPUs. There a plain linear layer rearranges its weight at every product. For
the few rows of a decoding step that takes longer than the product itself. A packed layer rearranges
its weight once and takes half to two thirds of the time (docs/PERFORMANCE.md).
"""

import platform
from typing import TypeGuard

import torch
from torch import Tensor, nn

ROWS = 8  # rows of a product, which packing asks for; the layout serves 1 to hundreds equally well


class ResidualLinear(nn.Linear):
    """A linear layer that adds its output to the residual stream, in inference in one operation."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        """The new residual stream.

        Args:
            x: ``[..., n, in]``.
            residual: ``[..., n, out]`` the residual stream.

        Returns:
            ``[..., n, out]``, a new tensor.
        """
        plain_weight = type(self.weight) is nn.Parameter  # a quantised weight is a subclass
        # In training, autocast would round the stream itself and cast the transposed weight anew at
        # every call.
        if torch.is_grad_enabled() or self.bias is not None or not plain_weight:
            return residual + super().forward(x)
        stream = residual.flatten(0, -2)
        return torch.addmm(stream, x.flatten(0, -2), self.weight.t()).view_as(residual)


class PackedLinear(nn.Module):
    """``nn.Linear`` or ``ResidualLinear`` for inference on a CPU, its weight in oneDNN's layout.

    ``state_dict`` gives the weight in the usual layout.

    Args:
        linear: the layer to pack (see ``packable``); it is not changed.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)
        self.register_buffer("packed", packed, persistent=False)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The layer's output ``[..., out]``, added to the residual stream if it is given.

        Args:
            x: ``[..., in]``.
            residual: ``[..., out]`` the residual stream.
        """
        if residual is not None:
            return torch.ops.mkldnn._linear_pointwise(x, residual, self.packed, self.bias, "add")
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.packed.to_dense()

    def _apply(self, fn, recurse=True):
        raise RuntimeError(
            "the weights are packed for this CPU and can be neither moved nor cast; load the model "
            "with pack_weights=False"
        )


def packable(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer that runs faster packed.

    That is a layer on an x86 CPU, not offloaded and not quantised, in float32, or in bfloat16 if
    the CPU has instructions for it.
    """
    if type(module) not in (nn.Linear, ResidualLinear):
        return False
    weight = module.weight
    if type(weight) is not nn.Parameter:  # a quantised weight is a subclass
        return False
    if hasattr(module, "_hf_hook") or weight.device.type != "cpu":  # the hook offloads weights
        return False
    if not torch.backends.mkldnn.is_available() or platform.machine() not in ("x86_64", "AMD64"):
        return False
    fast_bf16 = weight.dtype == torch.bfloat16 and cpu_multiplies_in_bf16()
    return weight.dtype == torch.float32 or fast_bf16


def cpu_multiplies_in_bf16() -> bool:
    """Whether the CPU has instructions for products in bfloat16."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def pack_linears(model: nn.Module) -> None:
    """Replace every layer of ``model`` that is ``packable`` by a ``PackedLinear``.

    One layer is replaced after the other, so that the weights are never all in memory twice.
    """
    for name, child in list(model.named_children()):
        if packable(child):
            setattr(model, name, PackedLinear(child))
        else:
            pack_linears(child)
