"""Memory traffic: the bytes that a cycle must read, and how many a device reads per second."""

import time

import torch
from torch import nn

from eagle.model.ea_model import EaModel
from eagle.model.linear import PackedLinear


def bandwidth(device: torch.device) -> float:
    """Bytes per second that the device reads from its memory: the best of ten measurements."""
    block = torch.ones(2**26, device=device)  # 256 MiB, larger than any cache
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(4):  # a GPU waits once at the end; four sums make that wait small
            total = block.sum()
        total.item()
        seconds.append(time.perf_counter() - start)
    return 4 * block.nbytes / min(seconds)


def weight_bytes(module: nn.Module) -> int:
    """Bytes of a module's weights, packed weights included."""
    packed = (part.packed for part in module.modules() if isinstance(part, PackedLinear))
    return sum(weight.numel() * weight.element_size() for weight in (*module.parameters(), *packed))


def cycle_bytes(model: EaModel, drafting: bool, context: int) -> int:
    """Bytes that a cycle must read: weights and cache of the target, weights of the draft head.

    Of the input embedding a cycle reads a few rows only; it is not counted.

    Args:
        model: the pair.
        drafting: whether the draft head runs: its ``fc`` once, the rest once per draft call.
        context: committed tokens, whose keys and values the target reads.
    """
    target, head = model.target, model.draft
    size = weight_bytes(target.model)
    if getattr(target.output_head, "weight", None) is not target.embedding.weight:
        size -= target.embedding.weight.nbytes
    buffers = target.new_cache(1).buffers.values()
    size += context * sum(buffer.data[..., :1, :].nbytes for buffer in buffers)
    if drafting:
        calls = model.tree_defaults["depth"] + 1
        size += weight_bytes(head.fc)
        size += calls * sum(map(weight_bytes, (head.midlayer, head.norm, head.lm_head)))
    return size
