"""The generation loop: draft, verify, commit. All calls of a model go through ``decode``."""

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle.model.cuda_graph import Graphs
from eagle.model.cycle import Cycle, NonFiniteLogits, Outcome, Slot, summarise, to_cpu
from eagle.model.draft import DraftModel
from eagle.model.options import DecodingOptions
from eagle.model.target import TargetModel


@dataclass
class Generation:
    """The result of one request; complete when decoding has ended.

    Attributes:
        prompt_ids: int64 ``[1, L]``.
        token_ids: tokens kept after the prompt.
        accept_lengths: per cycle the number of accepted tokens plus 1, as verification decided. In
            the last cycle the cap or a stop token may have kept fewer.
        accepted_kinds: per cycle the slot kinds (rheo.KIND_NAMES) of the accepted tokens.
        tried: per cycle, for each visited node that has children, these children.
        seconds: wall time of the phases "prefill", "draft", "verify" and "commit". On a GPU it is
            empty unless timing was asked for.
        stop_reason: "stop" (a stop token) or "length" (a cap).
    """

    prompt_ids: Tensor
    token_ids: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    accepted_kinds: list[list[str]] = field(default_factory=list)
    tried: list[list[list[Slot]]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    stop_reason: str = "length"

    @property
    def output_ids(self) -> Tensor:
        """Prompt and new tokens, int64 ``[1, L + new]``, as a tensor of the caller's own."""
        prompt = self.prompt_ids
        new = torch.tensor([self.token_ids], dtype=prompt.dtype, device=prompt.device)
        return torch.cat((prompt, new), 1)

    @property
    def new_tokens(self) -> int:
        """Number of tokens kept after the prompt."""
        return len(self.token_ids)

    @property
    def cycles(self) -> int:
        """Number of cycles."""
        return len(self.accept_lengths)

    def keep(self, tokens: list[int], cap: int, stop_ids: frozenset[int]) -> bool:
        """Add emitted tokens up to the first stop token or the cap, whichever comes first.

        Args:
            tokens: of one cycle.
            cap: largest number of new tokens of the request.
            stop_ids: stop tokens; the first one is kept.

        Returns:
            Whether decoding has ended.
        """
        for token in tokens[: cap - self.new_tokens]:
            self.token_ids.append(token)
            if token in stop_ids:
                self.stop_reason = "stop"
                return True
        return self.new_tokens >= cap


class Stopwatch:
    """Adds wall time to named phases.

    Args:
        seconds: where the time is added.
        device: device of the models.
        synchronise: wait for a GPU at every phase. Without it a GPU is not timed, since a launch
            returns before the work is done.
    """

    def __init__(self, seconds: dict[str, float], device: torch.device, synchronise: bool):
        self.seconds, self.device = seconds, device
        self.running = synchronise or device.type == "cpu"
        self.last = 0.0
        self.restart()

    def restart(self) -> None:
        """Begin a phase now."""
        if self.running:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Add the time since the last call to ``phase``, and begin the next phase."""
        if self.running:
            before = self.last
            self.restart()
            self.seconds[phase] = self.seconds.get(phase, 0.0) + self.last - before


@torch.inference_mode()
def decode(
    target: TargetModel,
    draft: DraftModel | None,
    input_ids: Tensor,
    options: DecodingOptions,
    stop_ids: frozenset[int] = frozenset(),
    timing: bool = False,
    graphs: Graphs | None = None,
) -> Iterator[Generation]:
    """Generate from one prompt.

    Args:
        target: the target.
        draft: its draft head; not used with ``sampling="none"``.
        input_ids: int64 ``[1, L]`` or ``[L]`` prompt.
        options: options of the request.
        stop_ids: the model's stop tokens. The output ends at the first one, which is kept.
        timing: wait for the device after every phase, so that ``seconds`` are right on a GPU, too.
        graphs: if given, whole cycles run without waiting, on a GPU as CUDA graphs. Not used
            together with ``timing``.

    Yields:
        The growing result after every cycle, the same object each time; once if there is no cycle.

    Raises:
        ValueError: for an empty or batched prompt, ids outside the vocabulary, or a length beyond
            a cap.
        NonFiniteLogits: if the target's logits are NaN or infinite.
    """
    prompt = check_prompt(input_ids, target, options).to(target.device)
    cap = new_token_cap(prompt.numel(), target, options)
    generation = Generation(prompt_ids=prompt[None])
    if cap <= 0:
        yield generation
        return

    stop_ids = stop_ids | frozenset(options.stop_token_ids)
    length = prompt.numel() + cap
    graphed_cycle = (
        nullcontext() if graphs is None or timing else graphs.cycle(target, draft, options, length)
    )
    with graphed_cycle as graphed:
        cycle = Cycle(target, draft, options, length) if graphed is None else graphed.cycle
        cycle.begin(options.seed)
        watch = Stopwatch(generation.seconds, target.device, timing)
        root = cycle.prefill(prompt)
        finished = generation.keep([int(root.item())], cap, stop_ids)
        watch.lap("prefill")
        if finished:
            yield generation
        elif graphed is not None:
            graphed.load()
        while not finished:
            outcome = run_phases(cycle, watch) if graphed is None else graphed.run()
            if not outcome.finite:
                raise NonFiniteLogits(target.dtype)
            generation.accept_lengths.append(len(outcome.tokens))
            generation.accepted_kinds.append(outcome.kinds)
            generation.tried.append(outcome.tried)
            finished = generation.keep(outcome.tokens, cap, stop_ids)
            yield generation
            watch.restart()  # the time that the caller took does not count


def run_phases(cycle: Cycle, watch: Stopwatch) -> Outcome:
    """Run one cycle phase by phase. Nothing is committed if the target's logits are not finite."""
    cycle.draft()
    watch.lap("draft")
    cycle.verify()
    outcome = to_cpu(summarise(cycle.tree, cycle.verified), cycle.tree.tokens.numel())
    watch.lap("verify")
    if outcome.finite:
        cycle.commit(len(outcome.tokens))
    watch.lap("commit")
    return outcome


def check_prompt(input_ids: Tensor, target: TargetModel, options: DecodingOptions) -> Tensor:
    """The prompt as int64 ``[L]``.

    Raises:
        ValueError: for a prompt that cannot be decoded.
    """
    if input_ids.dim() == 2 and input_ids.shape[0] != 1:
        raise ValueError(
            f"input_ids has a batch of {input_ids.shape[0]}; decoding takes one sequence at a time"
        )
    prompt = input_ids.reshape(-1).long()
    if prompt.numel() == 0:
        raise ValueError("input_ids is empty; decoding needs at least one token")
    if prompt.min() < 0 or prompt.max() >= target.vocab_size:
        raise ValueError(
            f"input_ids holds ids outside the target's vocabulary 0..{target.vocab_size - 1}"
        )
    if options.max_length is not None and prompt.numel() > options.max_length:
        raise ValueError(
            f"the prompt has {prompt.numel()} tokens and max_length is {options.max_length}; "
            "raise max_length"
        )
    return prompt


def new_token_cap(prompt_length: int, target: TargetModel, options: DecodingOptions) -> int:
    """The largest number of new tokens that both caps allow.

    Raises:
        ValueError: if the request may outgrow the target's attention window.
    """
    cap = options.max_new_tokens
    if options.max_length is not None:
        cap = min(cap, options.max_length - prompt_length)
    if target.window is not None and prompt_length + cap > target.window:
        raise ValueError(
            f"the target attends to {target.window} tokens and the request may reach "
            f"{prompt_length + cap}; lower max_new_tokens or max_length (currently "
            f"{options.max_new_tokens} and {options.max_length})"
        )
    return cap
