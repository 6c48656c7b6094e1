"""Pre-allocated key/value caches: blocks are written in place, an accepted path is kept by one gather."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class KVBuffer:
    """Keys and values of some attention layers on one device, for one sequence.

    Positions below ``length`` are committed. A forward writes its block behind them; ``keep`` then
    commits some of the block's positions, and the next block overwrites the others.

    Args:
        layers, heads, head_dim: shape of what is stored.
        capacity: positions that the buffer can hold.
    """

    def __init__(self, layers: int, heads: int, head_dim: int, capacity: int, dtype: torch.dtype, device: torch.device):
        self.data = torch.empty(layers, 2, heads, capacity, head_dim, dtype=dtype, device=device)
        self.length = 0

    def write(self, layer: int, keys: Tensor, values: Tensor, offset: int = 0) -> tuple[Tensor, Tensor]:
        """Store a block ``[1, heads, n, head_dim]`` ``offset`` positions behind the committed ones.

        Returns:
            Views ``[1, heads, length + offset + n, head_dim]`` of all keys and values up to the block's end.
        """
        start = self.length + offset
        end = start + keys.shape[-2]
        if end > self.data.shape[-2]:
            raise ValueError(f"the cache holds {self.data.shape[-2]} positions and {end} are needed")
        block = self.data[layer]
        block[0, :, start:end] = keys[0]
        block[1, :, start:end] = values[0]
        return block[0:1, :, :end], block[1:2, :, :end]

    def advance(self, count: int) -> None:
        """Commit the first ``count`` positions of the last block."""
        self.length += count

    def keep(self, indices: Tensor) -> None:
        """Commit the positions ``indices`` (int64 ``[n]``, rising) of the last block, in that order, and no others."""
        kept = self.data.index_select(-2, indices.to(self.data.device) + self.length)
        self.data[..., self.length : self.length + indices.numel(), :] = kept
        self.length += indices.numel()


class _BlockLayer(CacheLayerMixin):
    """One layer of a ``TargetCache`` as transformers sees it."""

    is_sliding = False

    def __init__(self, buffer: KVBuffer, index: int):
        super().__init__()
        self.buffer, self.index = buffer, index
        self.is_initialized = True

    def lazy_initialization(self, *args, **kwargs) -> None:
        """Nothing to do: the buffer exists."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        return self.buffer.write(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        # Older transformers pass the positions of the block instead of their number.
        count = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.buffer.length + count, 0

    def get_seq_length(self, *args) -> int:
        return self.buffer.length

    def get_max_length(self) -> int:
        return self.buffer.data.shape[-2]

    get_max_cache_shape = get_max_length  # its name before transformers 5.24


class TargetCache(Cache):
    """The target's cache: one buffer a device, so that a commit is one gather a device.

    Args:
        devices: the device of each decoder layer, in layer order.
        heads, head_dim: of keys and values.
        capacity: positions, the draft tree's included.
    """

    def __init__(self, devices: Sequence[torch.device], heads: int, head_dim: int, capacity: int, dtype: torch.dtype):
        self.buffers = {
            device: KVBuffer(list(devices).count(device), heads, head_dim, capacity, dtype, device)
            for device in dict.fromkeys(devices)
        }
        layers = [_BlockLayer(self.buffers[d], list(devices[:i]).count(d)) for i, d in enumerate(devices)]
        super().__init__(layers=layers)

    @property
    def length(self) -> int:
        """Number of committed positions."""
        return next(iter(self.buffers.values())).length

    def advance(self, count: int) -> None:
        """Commit the first ``count`` positions of the last block."""
        for buffer in self.buffers.values():
            buffer.advance(count)

    def keep(self, indices: Tensor) -> None:
        """Commit the positions ``indices`` (int64 ``[n]``) of the last block."""
        for buffer in self.buffers.values():
            buffer.keep(indices)
