"""Linear layers for inference: one that adds to the residual stream as it multiplies, and for a CPU one whose weight is laid out once.

There a plain linear layer lays its weight out anew at every product. For the few rows of a decoding step that costs more than the product itself: packed
layers take half to two thirds of the time (docs/PERFORMANCE.md).
"""

import platform

import torch
from torch import Tensor, nn

ROWS = 8  # of a product, named at the packing; the layout serves 1 to hundreds alike


class ResidualLinear(nn.Linear):
    """A linear layer that adds what it computes to the residual stream, in inference in one operation."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """``[..., n, out]`` of x ``[..., n, in]`` and the stream ``[..., n, out]``."""
        # In training autocast would round the stream itself, and cast the transposed weight anew at every call.
        if (
            torch.is_grad_enabled()
            or self.bias is not None
            or type(self.weight) is not nn.Parameter
        ):
            return residual + super().forward(x)
        return torch.addmm(residual.flatten(0, -2), x.flatten(0, -2), self.weight.t()).view_as(
            residual
        )


class PackedLinear(nn.Module):
    """``nn.Linear`` or ``ResidualLinear`` for inference on a CPU, its weight as oneDNN multiplies it; ``state_dict`` gives it in the usual layout.

    Args:
        linear: the layer to pack (see ``packable``); it is left as it is.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features, self.bias = (
            linear.in_features,
            linear.out_features,
            linear.bias,
        )
        self.register_buffer(
            "packed",
            torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS),
            persistent=False,
        )

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is not None:
            return torch.ops.mkldnn._linear_pointwise(x, residual, self.packed, self.bias, "add")
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.packed.to_dense()

    def _apply(self, fn, recurse=True):
        raise RuntimeError(
            "the weights are packed for this CPU and can be neither moved nor cast; load the model with pack_weights=False"
        )


def packable(module: nn.Module) -> bool:
    """Whether a module is a linear layer that runs faster packed: on an x86 CPU, not offloaded, in float32, or in bfloat16 where the CPU multiplies in it."""
    if (
        type(module) not in (nn.Linear, ResidualLinear) or type(module.weight) is not nn.Parameter
    ):  # a quantised weight is a tensor of another class
        return False
    if hasattr(module, "_hf_hook") or module.weight.device.type != "cpu":
        return False
    if not torch.backends.mkldnn.is_available() or platform.machine() not in ("x86_64", "AMD64"):
        return False
    return (
        module.weight.dtype == torch.float32
        or module.weight.dtype == torch.bfloat16
        and cpu_multiplies_in_bf16()
    )


def cpu_multiplies_in_bf16() -> bool:
    """Whether the CPU has instructions for products in bfloat16."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def pack_linears(model: nn.Module) -> None:
    """Put a ``PackedLinear`` in the place of every layer of ``model`` that is ``packable``; one by one, so that weights are never all held twice."""
    for name, child in list(model.named_children()):
        if packable(child):
            setattr(model, name, PackedLinear(child))
        else:
            pack_linears(child)


__all__ = ["PackedLinear", "ResidualLinear", "cpu_multiplies_in_bf16", "pack_linears", "packable"]
