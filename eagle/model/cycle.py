"""One cycle of decoding: draft, verify, commit. On a GPU it is replayed as one CUDA graph."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import exp
from typing import NamedTuple

import torch
from torch import Tensor

from eagle.model.draft import DraftModel, DraftState
from eagle.model.law import TargetLaw
from eagle.model.options import DecodingOptions
from eagle.model.target import TargetModel
from rheo import KIND_NAMES, Draws, Tree, Verdict, build_tree, pick, verify, verify_greedily
from rheo.tree import NO_KIND

STEP = 128  # positions that a graph serves: more of them are fewer captures, and more masked keys in each cycle


class NonFiniteLogits(RuntimeError):
    """The target produced NaN or infinite logits; no token was emitted from them."""

    def __init__(self, dtype: torch.dtype):
        super().__init__(
            f"the target's logits hold NaN or infinity in {dtype}: nothing was committed from them. "
            "Load the model with dtype='bf16' or dtype='fp32'."
        )


class Slot(NamedTuple):
    """A drafted child of a node that verification visited.

    Attributes:
        kind: of its slot (rheo.KIND_NAMES).
        proxy: its score in the pool, an estimate of how often it is accepted.
        accepted: whether it was.
    """

    kind: str
    proxy: float
    accepted: bool


@dataclass(frozen=True)
class Outcome:
    """What the host learns of a cycle.

    Attributes:
        tokens: emitted: the accepted ones, then the bonus token.
        kinds: slot kinds (rheo.KIND_NAMES) of the accepted ones.
        families: the children of each visited node that has any.
        finite: whether the target's laws at the visited nodes were; else nothing may be emitted.
    """

    tokens: list[int]
    kinds: list[str]
    families: list[list[Slot]]
    finite: bool


class Cycle:
    """What a request keeps from cycle to cycle, and the three phases of one.

    Between two cycles ``root`` is the last token, which neither cache holds yet.

    Args:
        draft: the head; not used for plain decoding, where every tree is a lone root.
        length: the most positions that a request can commit.
        step: see ``KVBuffer``; above 1 a cycle waits for nothing and its shapes stay the same for so many positions.
    """

    def __init__(self, target: TargetModel, draft: DraftModel | None, options: DecodingOptions, length: int, step: int = 1):
        self.target, self.head, self.options, self.tree_options, self.length = target, draft, options, options.tree, length
        self.law, self.draws = TargetLaw(options.law), Draws(torch.Generator(device=target.device))
        self.at_once = target.device.type != "cpu"
        self.cache = target.new_cache(length + max(options.total_token, options.depth + 2), step)
        self.state, self.taps = None, []
        if options.sampling != "none":
            self.state = DraftState(draft, target.embedding, length + options.depth * (options.top_k + 1), step, options.depth)
            self.taps, self.target_ids = draft.taps, draft.target_ids()
        self.root = self.root_logits = None
        self.news = None  # what the head has not taken in yet: arguments of ``DraftState.commit``
        self.tree = self.output = self.verdict = None

    def begin(self, seed: int) -> None:
        """Forget whatever was before, and seed the request's one generator."""
        self.draws.generator.manual_seed(seed)
        self.cache.clear()
        if self.state is not None:
            self.state.buffer.clear()

    def prefill(self, prompt: Tensor) -> Tensor:
        """Run the prompt (int64 ``[L]``); draws and returns the first token, the root of the first cycle.

        Raises:
            NonFiniteLogits: where the target's law after the prompt is not finite.
        """
        output = self.target.prefill(prompt, self.cache, self.taps)
        p = self.law(output.logits[0])
        self.root = self.draws.token(p)
        if p.isnan().any():
            raise NonFiniteLogits(self.target.dtype)
        self.news = torch.cat((prompt[1:], self.root[None])), output.features, None
        return self.root

    def take_in(self) -> None:
        """Hand the head what was committed, with its true features."""
        if self.state is not None and self.news is not None:
            self.root_logits = self.state.commit(*self.news)
        self.news = None

    def draft(self) -> None:
        """Grow a tree below the root."""
        self.take_in()
        if self.state is None:
            self.tree = lone_root(self.root)
        else:
            self.tree = build_tree(self.root, self.root_logits, self.state.expand, self.tree_options, self.draws, self.target_ids)

    def verify(self) -> None:
        """One forward of the target over the tree, then the path down from the root; a GPU decides at all nodes at once, so that it waits for nothing."""
        tree, at_once = self.tree, self.at_once
        self.output = output = self.target.tree_forward(tree.tokens, tree.levels, tree.mask, self.cache, self.taps)

        def logits(node: Tensor) -> Tensor:
            return output.logits if at_once else pick(output.logits, node)

        if self.law.greedy:
            self.verdict = verify_greedily(tree, logits, at_once)
        else:
            self.verdict = verify(tree, lambda node: self.law(logits(node)), self.draws, self.options.verification or "rheo", at_once)

    def commit(self, count: int | None = None) -> None:
        """Keep the accepted path in the target's cache.

        Args:
            count: how many tokens were emitted; None where the host does not know it yet.
        """
        verdict, n = self.verdict, None if count is not None else self.verdict.count
        path, tokens = verdict.path[:count], verdict.tokens[:count]
        self.cache.keep(path, n)
        self.root = pick(verdict.tokens, verdict.count - 1)
        if self.state is not None:
            self.news = tokens, self.output.features[path], n

    @property
    def carried(self) -> list[Tensor]:
        """All that a cycle reads of the one before, besides the caches."""
        return [self.root] if self.state is None else [self.root, self.root_logits, self.state.last]

    @carried.setter
    def carried(self, tensors: list[Tensor]) -> None:
        if self.state is None:
            (self.root,) = tensors
        else:
            self.root, self.root_logits, self.state.last = tensors
            self.state.forget_tree()

    def settle(self, count: int) -> None:
        """The host now knows how many tokens a cycle has committed."""
        self.cache.settle(count)
        if self.state is not None:
            self.state.buffer.settle(count)


class GraphedCycle:
    """Whole cycles without a wait inside, on a GPU as CUDA graphs, one for each shape; elsewhere the same cycles run as they are.

    A shape is met for the first time by an ordinary run, which warms it up, and captured when it comes again. Random numbers move on inside the
    graph, since the generator is registered with it. Where a capture fails, cycles go on without graphs, with a warning.

    Attributes:
        memory: bytes that the graphs hold.
    """

    def __init__(self, cycle: Cycle, owner: "Graphs"):
        self.cycle, self.owner, self.memory, self.pool = cycle, owner, 0, None
        self.nodes = 0  # of a tree, the same in every cycle
        self.graphs: dict[int, tuple["torch.cuda.CUDAGraph", Tensor] | None] = {}  # by shape; None for one that was met once
        self.places: list[Tensor] = []  # fixed, so that a graph finds what the cycle before it has left
        self.stream = torch.cuda.Stream(cycle.target.device) if cycle.target.device.type == "cuda" else None

    def load(self) -> None:
        """After the prefill: what the first cycle is to read goes where all cycles read it."""
        self.cycle.take_in()
        if not self.places:
            self.places = [x.clone() for x in self.cycle.carried]
        self.store()

    def store(self) -> None:
        """What a cycle has left goes where the next one reads it."""
        for place, value in zip(self.places, self.cycle.carried):
            place.copy_(value)
        self.cycle.carried = self.places

    def run(self) -> Outcome:
        """One cycle, committed; ends with the one copy to the host."""
        graph = self.graph()
        if graph is None:
            summary = self.body()
        else:
            replayed, summary = graph
            replayed.replay()
        outcome = to_host(summary, self.nodes)
        self.cycle.settle(len(outcome.tokens))
        return outcome

    def graph(self) -> tuple["torch.cuda.CUDAGraph", Tensor] | None:
        """The graph of the shape at hand and where it leaves its summary; None where the cycle is to run as it is."""
        shape = self.cycle.cache.first.start  # where the blocks of trees begin: nothing else changes
        if self.stream is None or not self.owner.capturing or shape not in self.graphs:
            self.graphs[shape] = None
        elif self.graphs[shape] is None:
            self.graphs[shape] = self.capture()
        return self.graphs[shape]

    def body(self) -> Tensor:
        """The three phases; returns what the host is to read, on the device."""
        cycle = self.cycle
        cycle.draft()
        cycle.verify()
        summary, self.nodes = summarise(cycle.tree, cycle.verdict), cycle.tree.tokens.numel()
        cycle.commit()
        cycle.take_in()
        self.store()
        return summary

    def capture(self) -> tuple["torch.cuda.CUDAGraph", Tensor] | None:
        """The cycle as a graph; None where it cannot be captured."""
        device, outer = self.cycle.target.device, torch.cuda.current_stream(self.cycle.target.device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(device)
        try:
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(self.cycle.draws.generator)
            # Of this stream's device; other threads may do what they like meanwhile.
            with torch.cuda.device(device), torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                summary = self.body()
        except RuntimeError as error:
            torch.cuda.set_stream(outer)  # a broken capture leaves its own behind
            self.owner.capturing, self.cycle.news, self.cycle.carried = False, None, self.places
            reason = str(error.__context__ or error).strip().partition("\n")[0]
            warnings.warn(f"a cycle could not be captured as a CUDA graph ({reason}); decoding goes on without", stacklevel=2)
            return None
        self.pool = graph.pool()
        self.memory += torch.cuda.memory_reserved(device) - before
        self.cycle.tree = self.cycle.output = self.cycle.verdict = None  # the next graph may use their memory
        return graph, summary


class Graphs:
    """The graphed cycles of a model, kept from request to request, since capturing costs more than a cycle.

    A cycle in use is nobody else's: a request that begins while another of the same options is running gets one of its own. The weights of
    target and head must stay where they are.

    Args:
        most: of so many different options; the least recently used goes first.

    Attributes:
        capturing: False once a capture has failed.
    """

    def __init__(self, most: int = 16):
        self.most, self.capturing, self.kept = most, True, {}

    @contextmanager
    def cycle(self, target: TargetModel, draft: DraftModel | None, options: DecodingOptions, length: int) -> Iterator[GraphedCycle]:
        """A cycle for a request that commits at most ``length`` positions, clean."""
        key = replace(options, seed=0, max_new_tokens=0, max_length=None, stop_token_ids=())
        graphed = self.kept.pop(key, None)
        if graphed is None or graphed.cycle.length < length or (graphed.cycle.target, graphed.cycle.head) != (target, draft):
            graphed = None  # its memory first
            while len(self.kept) >= self.most:
                del self.kept[next(iter(self.kept))]
            graphed = GraphedCycle(Cycle(target, draft, key, 2 ** (length - 1).bit_length(), STEP), self)
        try:
            yield graphed
        except GeneratorExit:  # the caller has heard enough; after any other exception the cycle is not to be trusted
            self.kept[key] = graphed
            raise
        self.kept[key] = graphed


def summarise(tree: Tree, verdict: Verdict) -> Tensor:
    """All that the host is to know of a cycle in one tensor, float64 ``[2 S + 2 + 3 N]`` with S steps of the walk and N nodes (see ``to_host``)."""
    walk = verdict.tokens, verdict.path, verdict.count.reshape(1), verdict.finite.reshape(1)
    return torch.cat((*walk, tree.parents, tree.kinds, tree.log_scores.double()))


def to_host(summary: Tensor, nodes: int) -> Outcome:
    """The one copy of a cycle, and its reading.

    Args:
        nodes: of the tree.
    """
    numbers = summary.tolist()
    walk, rest = numbers[: -3 * nodes], numbers[-3 * nodes :]
    *walk, count, finite = map(int, walk)
    tokens, path = walk[: len(walk) // 2][:count], walk[len(walk) // 2 :][:count]
    parents, kinds, scores = rest[:nodes], rest[nodes : 2 * nodes], rest[2 * nodes :]
    families: dict[int, list[Slot]] = {node: [] for node in path}
    for node, (parent, kind) in enumerate(zip(parents, kinds)):
        if kind != NO_KIND and parent in families:
            slot = Slot(KIND_NAMES[int(kind)], exp(scores[node] - scores[int(parent)]), node in path)
            families[parent].append(slot)
    return Outcome(tokens, [KIND_NAMES[int(kinds[node])] for node in path[1:]], [slots for slots in families.values() if slots], bool(finite))


def lone_root(root: Tensor) -> Tree:
    """The tree of plain decoding: nothing drafted, so that verification draws one token from p."""
    zero, one = torch.zeros_like(root).reshape(1), torch.ones(1, dtype=torch.bool, device=root.device)
    nothing = torch.zeros(1, 1, device=root.device)
    return Tree(
        root.reshape(1), zero, zero, zero - 1, one, nothing[0], one[None], zero, zero[None], nothing, max_levels=0
    )


__all__ = ["Cycle", "GraphedCycle", "Graphs", "NonFiniteLogits", "Outcome", "Slot", "lone_root", "summarise", "to_host"]
