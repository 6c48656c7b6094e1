"""Timing of cycles: several methods answer the same prompt and take turns."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from eagle.model.ea_model import EaModel
from eagle.model.options import DecodingOptions

PHASES = ("draft", "verify", "commit")


class Clock:
    """Measures the time spent inside some modules. None of them may contain another.

    Attributes:
        seconds: the time so far.
    """

    def __init__(self, modules: list[nn.Module]):
        self.seconds, self.started = 0.0, 0.0
        for module in modules:
            module.register_forward_pre_hook(self.start)
            module.register_forward_hook(self.stop)

    def start(self, *_):
        """A forward begins."""
        self.started = time.perf_counter()

    def stop(self, *_):
        """A forward ends."""
        self.seconds += time.perf_counter() - self.started


def networks(model: EaModel) -> list[nn.Module]:
    """The modules of target and draft head that a ``Clock`` should time."""
    head = model.draft
    return [model.base_model, head.fc, head.midlayer, head.norm, head.lm_head]


@dataclass
class Sample:
    """The timed cycles of one answer: all but the first, which is a warm-up.

    Attributes:
        method: name of the method.
        question: id of the question.
        tokens: number of tokens that these cycles emitted.
        cycles: seconds of each cycle.
        phases: seconds of each cycle, by phase.
        inside: seconds of each cycle that were spent inside the networks.
    """

    method: str
    question: int | str
    tokens: int = 0
    cycles: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    inside: list[float] = field(default_factory=list)


def timed_answer(
    model: EaModel,
    prompt: torch.Tensor,
    options: DecodingOptions,
    sample: Sample,
    clock: Clock | None,
) -> Iterator[None]:
    """Answer a prompt cycle by cycle and note the times in ``sample``.

    Time that passes between two steps of this iterator is not counted.

    Args:
        model: the pair.
        prompt: int64 ``[1, L]``.
        options: the method's decoding options.
        sample: is filled in.
        clock: times the networks; None on a GPU, where the end of every phase is waited for.

    Yields:
        None, after every cycle.
    """
    stream = model.stream(prompt, options, timing=True)
    before = None
    while True:
        start, inside = time.perf_counter(), clock.seconds if clock else 0.0
        generation = next(stream, None)
        end = time.perf_counter()
        if generation is None:
            return
        if before is not None:
            sample.tokens += generation.accept_lengths[-1]
            sample.cycles.append(end - start)
            sample.inside.append((clock.seconds if clock else 0.0) - inside)
            for phase, seconds in sample.phases.items():
                seconds.append(generation.seconds.get(phase, 0.0) - before.get(phase, 0.0))
        before = dict(generation.seconds)
        yield


def take_turns(answers: list[Iterator[None]]) -> None:
    """Run several answers, one cycle of each in turn, until all have ended.

    So a slow moment of the machine affects all methods. The order changes from round to round:
    after a short cycle the processor is cooler, which must not favour the same method each time.
    """
    chance, running = random.Random(0), list(answers)
    while running:
        for answer in chance.sample(running, len(running)):
            try:
                next(answer)
            except StopIteration:
                running.remove(answer)
