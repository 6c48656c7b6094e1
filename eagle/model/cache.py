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
        step: a block begins at the next multiple of ``step``, so that shapes and addresses stay the same for so many positions,
            as a CUDA graph needs it. What lies between the committed positions and the block is to be masked.

    Attributes:
        length: the committed positions.
        count: the same as a tensor, int64 ``[]``, which with ``step`` > 1 a cycle moves on by itself; ``settle`` tells the host.
    """

    def __init__(self, layers: int, heads: int, head_dim: int, capacity: int, dtype: torch.dtype, device: torch.device, step: int = 1):
        capacity = round_up(capacity, step) + (step if step > 1 else 0)
        # Zeros, since what is masked is multiplied by 0 all the same, and memory may hold NaN.
        self.data = torch.zeros(layers, 2, heads, capacity, head_dim, dtype=dtype, device=device)
        self.rows = torch.arange(capacity, device=device)
        self.length, self.step = 0, step
        self.count = torch.zeros((), dtype=torch.long, device=device)

    @property
    def start(self) -> int:
        """Where the next block begins."""
        return round_up(self.length, self.step)

    @property
    def end(self) -> int | Tensor:
        """The number of committed positions: a tensor where the host may not know it yet."""
        return self.length if self.step == 1 else self.count

    def seen(self) -> Tensor:
        """bool ``[start]``: which positions before the block are committed."""
        if self.step == 1:
            return torch.ones(self.length, dtype=torch.bool, device=self.rows.device)
        return self.rows[: self.start] < self.count

    def below(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Views ``[1, heads, end, head_dim]`` of all keys and values below ``end``.

        Raises:
            ValueError: where there are fewer positions.
        """
        if end > self.data.shape[-2]:
            raise ValueError(f"the cache holds {self.data.shape[-2]} positions and {end} are needed")
        data = self.data[layer]
        return data[:1, :, :end], data[1:, :, :end]

    def write(self, layer: int, block: Tensor, rows: slice | Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Store a block's keys and values ``[2, heads, n, head_dim]`` at some ``rows``; returns ``below(end)``."""
        views = self.below(layer, end)
        self.data[layer][:, :, rows] = block
        return views

    def write_block(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store a block's keys and values ``[1, heads, n, head_dim]`` where blocks begin; returns what is below the block's end."""
        start, end = self.start, self.start + keys.shape[-2]
        all_keys, all_values = self.below(layer, end)
        all_keys[:, :, start:] = keys
        all_values[:, :, start:] = values
        return all_keys, all_values

    def advance(self, count: int) -> None:
        """Commit the first ``count`` positions of the last block, which began right behind the committed ones."""
        self.length += count
        if self.step > 1:
            self.count += count

    def clear(self) -> None:
        """Back to no position."""
        self.length = 0
        self.count.zero_()

    def settle(self, count: int) -> None:
        """``count`` more positions were committed by ``keep`` with a tensor, or by writing at ``end``: now the host knows."""
        self.length += count

    def keep(self, indices: Tensor, count: Tensor | None = None) -> None:
        """Commit the positions ``indices`` (int64 ``[n]``, rising) of the last block, in that order, and no others.

        Args:
            count: where given (int64 ``[]``, on this device, with ``step`` > 1), only so many of the first; ``settle`` is to follow.
        """
        indices = indices.to(self.data.device)
        kept, n = self.data.index_select(-2, indices + self.start), indices.numel()
        if count is None:
            self.data[..., self.length : self.length + n, :] = kept
            self.advance(n)
        else:
            self.data.index_copy_(-2, self.count + self.rows[:n], kept)
            self.count += count


def round_up(number: int, step: int) -> int:
    """The next multiple of ``step``."""
    return -(-number // step) * step


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
        return self.buffer.write_block(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        # Older transformers pass the positions of the block instead of their number.
        count = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.buffer.start + count, 0

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
        step: see ``KVBuffer``.
    """

    def __init__(self, devices: Sequence[torch.device], heads: int, head_dim: int, capacity: int, dtype: torch.dtype, step: int = 1):
        self.buffers = {
            device: KVBuffer(list(devices).count(device), heads, head_dim, capacity, dtype, device, step)
            for device in dict.fromkeys(devices)
        }
        layers = [_BlockLayer(self.buffers[d], list(devices[:i]).count(d)) for i, d in enumerate(devices)]
        super().__init__(layers=layers)

    @property
    def first(self) -> KVBuffer:
        """The buffer of the first layer; all count alike."""
        return next(iter(self.buffers.values()))

    @property
    def length(self) -> int:
        """Number of committed positions."""
        return self.first.length

    def advance(self, count: int) -> None:
        """Commit the first ``count`` positions of the last block."""
        for buffer in self.buffers.values():
            buffer.advance(count)

    def clear(self) -> None:
        """Back to no position."""
        for buffer in self.buffers.values():
            buffer.clear()

    def settle(self, count: int) -> None:
        """See ``KVBuffer.settle``."""
        for buffer in self.buffers.values():
            buffer.settle(count)

    def keep(self, indices: Tensor, count: Tensor | None = None) -> None:
        """Commit the positions ``indices`` (int64 ``[n]``) of the last block (see ``KVBuffer.keep``)."""
        for buffer in self.buffers.values():
            buffer.keep(indices, count)
