"""The target's next-token law: temperature and filters, by transformers' own warpers."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
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
        top_p: nucleus mass in (0, 1]; 0 (EAGLE's default) and 1 keep all.
        min_p: drop tokens under this fraction of the highest probability; 0 keeps all.

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
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must lie in 0..1, 0 for no filter"
                )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


class TargetProbs:
    """Maps logits to probabilities: temperature, then top-k, then top-p, then min-p, in float32.

    The order and the arithmetic are those of transformers' ``generate``.
    """

    def __init__(self, options: WarperOptions):
        self.greedy = options.greedy
        self.warpers = LogitsProcessorList()
        if not self.greedy:
            if options.temperature != 1:
                self.warpers.append(TemperatureLogitsWarper(float(options.temperature)))
            if options.top_k:
                self.warpers.append(TopKLogitsWarper(int(options.top_k)))
            if 0 < options.top_p < 1:
                self.warpers.append(TopPLogitsWarper(float(options.top_p)))
            if options.min_p:
                self.warpers.append(MinPLogitsWarper(float(options.min_p)))

    def __call__(self, logits: Tensor) -> Tensor:
        """Probabilities ``[..., V]`` float32 of ``logits`` ``[..., V]``; all NaN where a logit is NaN or infinite."""
        logits = logits.float()
        if self.greedy:
            p = torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1)
        else:
            p = self.warpers(None, logits.reshape(-1, logits.shape[-1])).softmax(-1).view_as(logits)
        # 0 times the largest of finite numbers is 0; an infinity or a NaN anywhere makes it NaN.
        return p.add_(0 * logits.abs().amax(-1, keepdim=True))
