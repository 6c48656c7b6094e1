"""Which batch a training run takes at each step, and at which learning rate."""

import math

import torch


class Batches:
    """Batches of conversations of about equal length, in an order that the seed decides.

    Batches that are left over when the processes have shared out the rest are dropped.

    Args:
        lengths: number of tokens of each conversation.
        batch_tokens: largest number of tokens of a batch, padding included. A longer conversation
            is a batch by itself.
        epochs: passes over the data. A fraction takes that share of the batches.
        seed: decides the order.
        processes: number of processes, one for each device; each takes its own batches.

    Attributes:
        order: all batches of all epochs, each a list of indices of conversations.
        steps: number of batches for each process, at least 1.

    Raises:
        ValueError: if there are fewer batches than processes.
    """

    def __init__(
        self, lengths: list[int], batch_tokens: int, epochs: float, seed: int, processes: int
    ):
        self.lengths, self.batch_tokens = lengths, batch_tokens
        self.seed, self.processes = seed, processes
        passes = math.ceil(epochs)
        self.order = [batch for number in range(passes) for batch in self.epoch(number)]
        if len(self.order) < processes:
            raise ValueError(
                f"the data gives {len(self.order)} batches, fewer than the {processes} devices; "
                "lower batch_tokens"
            )
        self.steps = max(round(len(self.order) * epochs / passes) // processes, 1)

    def at(self, step: int, process: int) -> list[int]:
        """Indices of the conversations that a process takes at a step."""
        return self.order[step * self.processes + process]

    def epoch(self, number: int) -> list[list[int]]:
        """All batches of an epoch, in their order."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        # Sorting by length saves padding. Noise on the lengths gives a conversation other
        # neighbours in every epoch.
        noise = 1 + 0.2 * torch.rand(len(self.lengths), generator=generator)
        batches, current, longest = [], [], 0
        for i in (torch.tensor(self.lengths) * noise).argsort().tolist():
            longest = max(longest, self.lengths[i])
            if current and longest * (len(current) + 1) > self.batch_tokens:
                batches.append(current)
                current, longest = [], self.lengths[i]
            current.append(i)
        batches.append(current)
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def learning_rate(step: int, total: int, warmup: float) -> float:
    """The learning rate of a step, as a share of the highest one.

    It rises linearly in the first ``warmup * total`` steps, then falls to 0 along a cosine.

    Args:
        step: 0..total-1.
        total: number of steps of the run.
        warmup: share of the steps in which it rises; at least one step does.
    """
    rising = max(int(warmup * total), 1)
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(total - rising, 1)))
