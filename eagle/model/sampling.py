"""The target's next-token distribution: temperature and filters, by transformers' own warpers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rheo import GREEDY_BELOW


@dataclass(frozen=True)
class WarperOptions:
    """Temperature and filters of the target.

    Attributes:
        temperature: below 1e-5 decoding is greedy.
        top_k: keep this many tokens; 0 keeps all.
        top_p: keep the most probable tokens up to this mass, in (0, 1]; 0 (EAGLE's default) and 1
            keep all.
        min_p: drop tokens below this fraction of the highest probability; 0 keeps all.

    Raises:
        ValueError: for a value outside these ranges.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    min_p: float = 0.0

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be finite and at least 0")
        if self.top_k < 0 or self.top_k != int(self.top_k):
            raise ValueError(
                f"top_k (filter) is {self.top_k}; it must be a whole number, 0 for no filter"
            )
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}; it must lie in 0..1, 0 for no filter")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature < GREEDY_BELOW


class TargetProbs:
    """Maps logits to probabilities: temperature, then top-k, then top-p, then min-p, in float32.

    The order and the arithmetic are those of transformers' ``generate``.

    Args:
        options: temperature and filters.
    """

    def __init__(self, options: WarperOptions):
        self.greedy = options.greedy
        self.warpers: list[Callable[..., Tensor]] = []
        if self.greedy:
            return
        if options.temperature != 1:
            self.warpers.append(TemperatureLogitsWarper(float(options.temperature)))
        if options.top_k:
            self.warpers.append(TopKLogitsWarper(int(options.top_k)))
        if 0 < options.top_p < 1:
            self.warpers.append(TopPLogitsWarper(float(options.top_p)))
        if options.min_p:
            self.warpers.append(MinPLogitsWarper(float(options.min_p)))

    def __call__(self, logits: Tensor) -> Tensor:
        """Probabilities ``[..., V]`` float32 of ``logits`` ``[..., V]``.

        A row with a NaN or infinite logit becomes all NaN.
        """
        logits = logits.float()
        if self.greedy:
            p = torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1)
        else:
            warped = logits.reshape(-1, logits.shape[-1])
            for warper in self.warpers:
                warped = warper(None, warped)  # the tokens so far, which none of them reads
            p = warped.softmax(-1).view_as(logits)
        # 0 times the largest logit is 0 if all are finite, else NaN.
        return p.add_(0 * logits.abs().amax(-1, keepdim=True))
