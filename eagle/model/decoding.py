"""The generation loop: draft, verify, commit. Every way of calling the model goes through ``decode``."""

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle.model.cuda_graph import Graphs
from eagle.model.cycle import Cycle, NonFiniteLogits, Outcome, Slot, summarise, to_cpu
from eagle.model.draft.network import DraftModel
from eagle.model.options import SAMPLINGS, DecodingOptions
from eagle.model.target import TargetModel


@dataclass
class Generation:
    """The result of one request, complete once decoding has ended.

    Attributes:
        prompt_ids: int64 ``[1, L]``.
        token_ids: the tokens kept after the prompt.
        accept_lengths: per cycle what verification accepted, plus 1 for the bonus token; in the last cycle the
            cap or a stop token may have kept less.
        accepted_kinds: per cycle the slot kinds (rheo.KIND_NAMES) of the accepted tokens.
        tried: per cycle, the children of each visited node that has any: slot kind, proxy, whether it was accepted.
        seconds: wall time per phase: prefill, draft, verify, commit; empty on a GPU unless timing was asked for.
        stop_reason: "stop" (stop token) or "length" (cap).
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
        """int64 ``[1, L + new_tokens]`` prompt and new tokens, a tensor of the caller's own."""
        new = torch.tensor(
            [self.token_ids], dtype=self.prompt_ids.dtype, device=self.prompt_ids.device
        )
        return torch.cat((self.prompt_ids, new), 1)

    @property
    def new_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def cycles(self) -> int:
        return len(self.accept_lengths)


class Stopwatch:
    """Adds wall time to named phases; on a GPU only where it may synchronise, since launch times mean nothing."""

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
        """Give the time since the phase began to ``phase``, and begin the next one."""
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
    """Generate from one prompt; yields the growing result after every cycle, and once where there is none.

    Args:
        draft: the EAGLE-3 head; not used with ``sampling="none"``.
        input_ids: int64 ``[1, L]`` or ``[L]`` prompt.
        stop_ids: the model's stop tokens; output ends at the first one, which is kept.
        timing: synchronise the device at every phase, so that ``seconds`` means what it says on a GPU.
        graphs: where given, whole cycles run without a wait, on a GPU as CUDA graphs; not with ``timing``.

    Raises:
        ValueError: for an empty or batched prompt, ids outside the vocabulary, or a length beyond a cap.
        NonFiniteLogits: where the target's logits are NaN or infinite.
    """
    prompt = check_prompt(input_ids, target, options).to(target.device)
    generation = Generation(prompt_ids=prompt[None])
    budget = options.max_new_tokens
    if options.max_length is not None:
        budget = min(budget, options.max_length - prompt.numel())
    if target.window is not None and prompt.numel() + budget > target.window:
        raise ValueError(
            f"the target attends to {target.window} tokens and the request may reach {prompt.numel() + budget}; "
            f"lower max_new_tokens or max_length (currently {options.max_new_tokens} and {options.max_length})"
        )
    if budget <= 0:
        yield generation
        return

    stop_ids = stop_ids | frozenset(options.stop_token_ids)
    length = prompt.numel() + budget
    if graphs is None or timing:
        context = nullcontext()
    else:
        context = graphs.cycle(target, draft, options, length)
    with context as graphed:
        cycle = Cycle(target, draft, options, length) if graphed is None else graphed.cycle
        cycle.begin(options.seed)
        watch = Stopwatch(generation.seconds, target.device, timing)
        root = cycle.prefill(prompt)
        _keep(generation, [root.item()], budget, stop_ids)
        watch.lap("prefill")
        finished = _finished(generation, budget, stop_ids)
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
            _keep(generation, outcome.tokens, budget, stop_ids)
            finished = _finished(generation, budget, stop_ids)
            yield generation
            watch.restart()  # what the caller did between two cycles is not ours


def run_phases(cycle: Cycle, watch: Stopwatch) -> Outcome:
    """One cycle, phase by phase; committed where the target's laws were finite."""
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
    """The prompt as int64 ``[L]``; raises a ValueError for what cannot be decoded."""
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
            f"the prompt has {prompt.numel()} tokens and max_length is {options.max_length}; raise max_length"
        )
    return prompt


def _keep(generation: Generation, tokens: list[int], budget: int, stop_ids: frozenset[int]) -> None:
    """Append emitted tokens up to the first stop token or the cap, whichever comes first."""
    for token in tokens[: budget - generation.new_tokens]:
        generation.token_ids.append(token)
        if token in stop_ids:
            generation.stop_reason = "stop"
            return


def _finished(generation: Generation, budget: int, stop_ids: frozenset[int]) -> bool:
    return generation.stop_reason == "stop" or generation.new_tokens >= budget


__all__ = ["SAMPLINGS", "DecodingOptions", "Generation", "NonFiniteLogits", "decode"]
