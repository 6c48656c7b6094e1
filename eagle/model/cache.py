"""Pre-allocated key/value caches.

A forward writes its block of keys and values behind the committed positions. Then the accepted
path of the block is kept by one gather, and the next block overwrites the rest.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class KVBuffer:
    """Keys and values of some attention layers on one device, for one sequence.

    Positions below ``length`` are committed.

    Args:
        layers: number of attention layers.
        heads: key/value heads of a layer.
        head_dim: width of a head.
        capacity: number of positions that the buffer can hold.
        dtype: dtype of keys and values.
        device: where they are stored.

    Attributes:
        data: ``[layers, 2, heads, capacity, head_dim]``, keys before values.
        rows: int64 ``[capacity]``: 0, 1, ..., capacity - 1.
        length: number of committed positions.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        # Zeros, not empty memory: a masked value is still multiplied by 0, and 0 * NaN is NaN.
        self.data = torch.zeros(layers, 2, heads, capacity, head_dim, dtype=dtype, device=device)
        self.rows = torch.arange(capacity, device=device)
        self.length = 0

    @property
    def start(self) -> int:
        """The row where the next block begins."""
        return self.length

    @property
    def position(self) -> int | Tensor:
        """The position of the next block's first token: the number of committed positions."""
        return self.length

    def committed_mask(self) -> Tensor | None:
        """Which rows before the block are committed, bool ``[start]``; None where all are."""
        return None

    def below(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Views ``[1, heads, end, head_dim]`` of all keys and values in the rows below ``end``.

        Raises:
            ValueError: where the buffer has fewer rows.
        """
        if end > self.data.shape[-2]:
            raise ValueError(
                f"the cache holds {self.data.shape[-2]} positions and {end} are needed"
            )
        data = self.data[layer]
        return data[:1, :, :end], data[1:, :, :end]

    def write(
        self, layer: int, block: Tensor, rows: slice | Tensor, end: int
    ) -> tuple[Tensor, Tensor]:
        """Store a block's keys and values ``[2, heads, n, head_dim]`` at ``rows``.

        Returns:
            ``below(layer, end)``.
        """
        views = self.below(layer, end)
        self.data[layer][:, :, rows] = block
        return views

    def write_block(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store a block's keys and values ``[1, heads, n, head_dim]`` from row ``start`` on.

        Returns:
            All keys and values up to the end of the block.
        """
        start, end = self.start, self.start + keys.shape[-2]
        all_keys, all_values = self.below(layer, end)
        all_keys[:, :, start:] = keys
        all_values[:, :, start:] = values
        return all_keys, all_values

    def advance(self, count: int) -> None:
        """Commit the first ``count`` positions of a block that was written at row ``length``."""
        self.length += count

    def clear(self) -> None:
        """Forget all positions."""
        self.length = 0

    def keep(self, indices: Tensor) -> None:
        """Commit some positions of the last block, and no others.

        Args:
            indices: int64 ``[n]``, rising, counted from the start of the block.
        """
        n = indices.numel()
        kept = self.block(indices)
        self.data[..., self.length : self.length + n, :] = kept
        self.advance(n)

    def block(self, indices: Tensor) -> Tensor:
        """Keys and values ``[layers, 2, heads, n, head_dim]`` at some positions of the block."""
        return self.data.index_select(-2, indices.to(self.data.device) + self.start)


class _BlockLayer(CacheLayerMixin):
    """One layer of a ``TargetCache`` as transformers sees it."""

    is_sliding = False

    def __init__(self, buffer: KVBuffer, index: int):
        super().__init__()
        self.buffer, self.index = buffer, index
        self.is_initialized = True

    def lazy_initialization(self, *args, **kwargs) -> None:
        """Do nothing: the buffer exists."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Store a block; returns all keys and values up to its end."""
        return self.buffer.write_block(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        """Keys that a mask covers, and the offset of the first one."""
        # Older transformers pass the positions of the block instead of their number.
        count = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.buffer.start + count, 0

    def get_seq_length(self, *args) -> int:
        """Return the number of committed positions."""
        return self.buffer.length

    def get_max_length(self) -> int:
        """Return the number of positions that fit."""
        return self.buffer.data.shape[-2]

    get_max_cache_shape = get_max_length  # its name before transformers 5.24


class TargetCache(Cache):
    """The target's cache: one buffer per device, so that a commit is one gather per device.

    Args:
        devices: the device of each decoder layer, in layer order.
        heads: key/value heads of a layer.
        head_dim: width of a head.
        capacity: number of positions, those of the draft tree included.
        dtype: dtype of keys and values.
        new_buffer: makes a buffer; called as ``KVBuffer`` is.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        new_buffer: Callable[..., KVBuffer] = KVBuffer,
    ):
        devices = list(devices)
        self.buffers = {
            device: new_buffer(devices.count(device), heads, head_dim, capacity, dtype, device)
            for device in dict.fromkeys(devices)
        }
        layers: list[Any] = [
            _BlockLayer(self.buffers[device], devices[:i].count(device))
            for i, device in enumerate(devices)
        ]
        super().__init__(layers=layers)

    @property
    def first(self) -> KVBuffer:
        """The buffer of the first layer; all buffers have the same length."""
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
        """Forget all positions."""
        for buffer in self.buffers.values():
            buffer.clear()

    def keep(self, indices: Tensor) -> None:
        """Commit the positions ``indices`` (int64 ``[n]``) of the last block."""
        for buffer in self.buffers.values():
            buffer.keep(indices)
