"""Whole cycles as CUDA graphs: everything that only they need.

A CUDA graph replays the same operations on the same addresses. So a graphed cycle has fixed
shapes: blocks of a cache begin at multiples of ``STEP`` rows, and what lies between the committed
positions and the block is masked. The number of committed positions is a tensor on the device.
The functions that draft and verify are those of ``eagle.model.cycle``.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from eagle.model.cache import KVBuffer, TargetCache
from eagle.model.cycle import Cycle, Outcome, summarise, to_cpu
from eagle.model.draft import DraftModel, DraftState
from eagle.model.options import DecodingOptions
from eagle.model.target import TargetModel
from rheo import pick

STEP = 128  # rows that one graph serves: more are fewer captures, and more masked keys per cycle


class FixedShapeBuffer(KVBuffer):
    """A buffer whose blocks begin at multiples of ``step`` rows.

    Args:
        step: see ``STEP``; the other arguments are those of ``KVBuffer``.

    Attributes:
        count: int64 ``[]`` number of committed positions on the device. It runs ahead of
            ``length``, which the CPU knows, until ``sync_length`` is called.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        step: int,
    ):
        super().__init__(layers, heads, head_dim, round_up(capacity, step) + step, dtype, device)
        self.step = step
        self.count = torch.zeros((), dtype=torch.long, device=device)

    @property
    def start(self) -> int:
        """The row where the next block begins."""
        return round_up(self.length, self.step)

    @property
    def position(self) -> Tensor:
        """The position of the next block's first token, int64 ``[]``."""
        return self.count

    def committed_mask(self) -> Tensor:
        """Which rows before the block are committed, bool ``[start]``."""
        return self.rows[: self.start] < self.count

    def advance(self, count: int) -> None:
        """Commit the first ``count`` positions of a block that was written at row ``length``."""
        super().advance(count)
        self.count += count

    def clear(self) -> None:
        """Forget all positions."""
        super().clear()
        self.count.zero_()

    def keep_first(self, indices: Tensor, count: Tensor) -> None:
        """Commit the first ``count`` (int64 ``[]``) of some positions of the last block.

        Args:
            indices: int64 ``[n]``, counted from the start of the block.
            count: on the device; ``sync_length`` has to follow.
        """
        rows = self.count + self.rows[: indices.numel()]
        self.data.index_copy_(-2, rows, self.block(indices))
        self.count += count

    def sync_length(self, count: int) -> None:
        """Tell the CPU that ``count`` more positions are committed on the device."""
        self.length += count


def round_up(number: int, step: int) -> int:
    """The next multiple of ``step``."""
    return -(-number // step) * step


class FixedShapeDraftState(DraftState):
    """The draft head's state in a ``FixedShapeBuffer``.

    Args:
        depth: the largest number of expansions of a tree.
        step: see ``STEP``; the other arguments are those of ``DraftState``.
    """

    buffer: FixedShapeBuffer

    def __init__(
        self, model: DraftModel, embedding: nn.Module, capacity: int, depth: int, step: int
    ):
        super().__init__(model, embedding, capacity, partial(FixedShapeBuffer, step=step))
        self.depth = depth

    def commit(self, tokens: Tensor, features: Tensor, count: Tensor | None = None) -> Tensor:
        """Add committed positions, as ``DraftState.commit`` does.

        Args:
            tokens: int64 ``[n]``.
            features: ``[n, layers * h_target]``.
            count: where given (int64 ``[]``), only the first ``count`` positions are meant;
                ``sync_length`` has to follow.
        """
        if count is None:
            return super().commit(tokens, features)
        buffer, n = self.buffer, tokens.numel()
        rows, end = buffer.count + buffer.rows[:n], buffer.start + round_up(n, buffer.step)
        mask = buffer.rows[:end] <= rows[:, None]
        hidden = self.fuse_and_run(tokens, features, rows, mask, end)
        buffer.count += count
        return self.set_last(hidden.index_select(0, count.reshape(1) - 1))

    def begin_tree(self) -> Tensor:
        """Set the rotary angles of the tree's levels; returns what the root sees."""
        buffer = self.buffer
        self.tree_angles = self.angles[:, :, buffer.count + buffer.rows[: self.depth]]
        return buffer.committed_mask()[None]


class FixedShapeCycle(Cycle):
    """A cycle that never waits for the device and has the same shapes for ``step`` positions.

    Args:
        step: see ``STEP``; the other arguments are those of ``Cycle``.
    """

    state: FixedShapeDraftState | None

    def __init__(
        self,
        target: TargetModel,
        draft: DraftModel | None,
        options: DecodingOptions,
        length: int,
        step: int,
    ):
        self.step = step
        super().__init__(target, draft, options, length)

    def new_cache(self, capacity: int) -> TargetCache:
        """An empty cache of the target."""
        return self.target.new_cache(capacity, partial(FixedShapeBuffer, step=self.step))

    def new_state(self, draft: DraftModel, capacity: int) -> FixedShapeDraftState:
        """An empty state of the draft head."""
        return FixedShapeDraftState(
            draft, self.target.embedding, capacity, self.options.depth, self.step
        )

    def commit(self, count: int | None = None) -> None:
        """Keep the accepted path; how long it is, only the device knows (``sync_length``)."""
        verified = self.verified
        for buffer in self.buffers():
            buffer.keep_first(verified.path, verified.count)
        self.root = pick(verified.tokens, verified.count - 1)
        if self.state is not None:
            features = self.output.features[verified.path]
            self.pending = verified.tokens, features, verified.count

    @property
    def loop_state(self) -> list[Tensor]:
        """Everything that a cycle reads of the one before it, besides the caches."""
        if self.state is None:
            return [self.root]
        return [self.root, self.root_logits, self.state.last]

    @loop_state.setter
    def loop_state(self, tensors: list[Tensor]) -> None:
        if self.state is None:
            (self.root,) = tensors
        else:
            self.root, self.root_logits, self.state.last = tensors
            self.state.forget_tree()

    def sync_length(self, count: int) -> None:
        """Tell the CPU's side of the caches that a cycle has committed ``count`` tokens."""
        for buffer in self.buffers():
            buffer.sync_length(count)
        if self.state is not None:
            self.state.buffer.sync_length(count)

    def buffers(self) -> list[FixedShapeBuffer]:
        """The buffers of the target's cache."""
        return cast(list[FixedShapeBuffer], list(self.cache.buffers.values()))


class GraphedCycle:
    """Runs a ``FixedShapeCycle``, on a GPU as CUDA graphs, one for each shape.

    The first cycle of a shape runs as it is, which warms it up. The second one is captured, and
    all later ones are replayed. The generator is registered with the graph, so that random numbers
    move on inside it. Where a capture fails, cycles go on without graphs, with a warning. On a CPU
    the same cycles run without graphs.

    Attributes:
        memory: bytes that the graphs hold.
    """

    def __init__(self, cycle: FixedShapeCycle, owner: "Graphs"):
        self.cycle, self.owner, self.memory = cycle, owner, 0
        self.pool: Any = None  # memory that the graphs share
        self.nodes = 0  # nodes of a tree, the same in every cycle
        # Graph and summary by shape; None for a shape that was met once.
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor] | None] = {}
        # The loop state at fixed addresses, where a graph finds what the last cycle left.
        self.fixed_state: list[Tensor] = []
        device = cycle.target.device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def load(self) -> None:
        """After the prefill: put what the first cycle reads where all cycles read it."""
        self.cycle.prefill_draft()
        if not self.fixed_state:
            self.fixed_state = [x.clone() for x in self.cycle.loop_state]
        self.store()

    def store(self) -> None:
        """Put what a cycle has left where the next one reads it."""
        for fixed, value in zip(self.fixed_state, self.cycle.loop_state):
            fixed.copy_(value)
        self.cycle.loop_state = self.fixed_state

    def run(self) -> Outcome:
        """Run and commit one cycle; ends with the only copy to the CPU."""
        graph = self.graph()
        if graph is None:
            summary = self.body()
        else:
            replayed, summary = graph
            replayed.replay()
        outcome = to_cpu(summary, self.nodes)
        self.cycle.sync_length(len(outcome.tokens))
        return outcome

    def graph(self) -> tuple[torch.cuda.CUDAGraph, Tensor] | None:
        """The graph of the present shape and its summary; None where the cycle runs as it is."""
        shape = self.cycle.cache.first.start  # nothing else changes
        if self.stream is None or not self.owner.capturing or shape not in self.graphs:
            self.graphs[shape] = None
        elif self.graphs[shape] is None:
            self.graphs[shape] = self.capture()
        return self.graphs[shape]

    def body(self) -> Tensor:
        """Run the three phases; returns the summary, on the device."""
        cycle = self.cycle
        cycle.draft()
        cycle.verify()
        summary = summarise(cycle.tree, cycle.verified)
        self.nodes = cycle.tree.tokens.numel()
        cycle.commit()
        cycle.prefill_draft()
        self.store()
        return summary

    def capture(self) -> tuple[torch.cuda.CUDAGraph, Tensor] | None:
        """Capture the cycle as a graph; None, with a warning, where that fails."""
        cycle, device = self.cycle, self.cycle.target.device
        outer = torch.cuda.current_stream(device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(device)
        try:
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(cycle.generator)
            # "thread_local": other threads may use the GPU meanwhile.
            with (
                torch.cuda.device(device),
                torch.cuda.graph(
                    graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
                ),
            ):
                summary = self.body()
        except RuntimeError as error:
            torch.cuda.set_stream(outer)  # a broken capture leaves its own stream behind
            self.owner.capturing = False
            cycle.pending, cycle.loop_state = None, self.fixed_state
            reason = str(error.__context__ or error).strip().partition("\n")[0]
            warnings.warn(
                f"a cycle could not be captured as a CUDA graph ({reason}); "
                "decoding goes on without graphs",
                stacklevel=2,
            )
            return None
        self.pool = graph.pool()
        self.memory += torch.cuda.memory_reserved(device) - before
        del cycle.tree, cycle.output, cycle.verified  # the next graph may use their memory
        return graph, summary


def can_use_graphs(target: TargetModel) -> bool:
    """Whether the target is on a single GPU and this version of torch can capture cycles."""
    devices = {parameter.device for parameter in target.model.parameters()}
    # Before torch 2.13 a generator does not recover from a capture that failed.
    return (
        target.device.type == "cuda" and devices == {target.device} and torch.__version__ >= "2.13"
    )


class Graphs:
    """The graphed cycles of a model, kept from request to request: a capture is expensive.

    No two requests use a cycle at the same time: a request that begins while another one with the
    same options is running gets a cycle of its own. The weights of both networks must stay at
    their addresses.

    Args:
        most: number of cycles to keep; the least recently used one goes first.

    Attributes:
        capturing: False once a capture has failed.
    """

    def __init__(self, most: int = 16):
        self.most, self.capturing = most, True
        self.kept: dict[DecodingOptions, GraphedCycle] = {}

    @contextmanager
    def cycle(
        self,
        target: TargetModel,
        draft: DraftModel | None,
        options: DecodingOptions,
        length: int,
    ) -> Iterator[GraphedCycle]:
        """A cycle for a request that commits at most ``length`` positions."""
        key = replace(options, seed=0, max_new_tokens=0, max_length=None, stop_token_ids=())
        graphed = self.kept.pop(key, None)
        if (
            graphed is None
            or graphed.cycle.length < length
            or (graphed.cycle.target, graphed.cycle.draft_head) != (target, draft)
        ):
            graphed = None  # frees its memory first
            while len(self.kept) >= self.most:
                del self.kept[next(iter(self.kept))]
            room = 2 ** (length - 1).bit_length()
            graphed = GraphedCycle(FixedShapeCycle(target, draft, key, room, STEP), self)
        try:
            yield graphed
        except GeneratorExit:  # the caller stopped early: the cycle is still good
            self.kept[key] = graphed
            raise
        self.kept[key] = graphed  # after any other exception the cycle is not kept
