"""A counter of tensor operations, and of reads of data by the CPU."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eagle.model.target import TargetModel


class Operations(TorchDispatchMode):
    """A context that counts operations which make or change data. Views are not counted.

    Attributes:
        counts: number of operations by name.
        reads: how often the CPU read a number from another device or copied a tensor from it.
        paused: while True, nothing is counted.
    """

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.reads = 0
        self.paused = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if self.paused:
            return result
        inputs, outputs = tensors((args, kwargs)), tensors(result)
        name = function.overloadpacket.__name__
        if any(x.device.type not in ("cpu", "meta") for x in inputs):
            copied = any(x.device.type == "cpu" for x in outputs)
            self.reads += copied or name == "_local_scalar_dense"
        # The storage object is compared, not its address: tensors on "meta" have no address.
        storages = {x.untyped_storage()._cdata for x in inputs}
        shared = all(x.untyped_storage()._cdata in storages for x in outputs)
        if outputs and (function._schema.is_mutable or not shared):
            self.counts[name] += 1
        return result

    @contextmanager
    def leaving_out(self, target: TargetModel) -> Iterator[None]:
        """A context in which the forwards of the target are not counted."""
        forward = target._forward

        def uncounted(*args, **kwargs):
            self.paused = True
            try:
                return forward(*args, **kwargs)
            finally:
                self.paused = False

        target._forward = uncounted
        try:
            yield
        finally:
            del target._forward


def tensors(tree: object) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts, without those in oneDNN's own layout."""
    leaves = tree_leaves(tree)
    return [x for x in leaves if isinstance(x, torch.Tensor) and not x.is_mkldnn]
