"""The one place where chance enters: categorical tokens and acceptance coins."""

import torch
from torch import Tensor


class Draws:
    """Random decisions of one request, all taken from one ``torch.Generator``.

    Drafting and verification ask for tokens and coins only through this object, so that a test can
    put an enumerator in its place and walk every outcome of the real code.

    Args:
        generator: source of all randomness; its device must be that of the tensors drawn from.
    """

    def __init__(self, generator: torch.Generator):
        self.generator = generator

    def token(self, weights: Tensor) -> Tensor:
        """Draw one index per row with probability proportional to ``weights``, rows independent.

        An exponential race, ``argmax(w / e)``: it needs no normalisation and no cumulative sum
        (whose rounding would give tokens of probability 0 a chance), and never selects a weight of 0
        unless all are 0.

        Args:
            weights: ``[..., V]``, non-negative, float32 or float64.

        Returns:
            int64 ``[...]``.
        """
        race = torch.empty_like(weights).exponential_(generator=self.generator)
        race.clamp_min_(torch.finfo(race.dtype).tiny)  # an exponential of exactly 0 would turn 0/0 into NaN
        return (weights / race).argmax(-1)

    def accept(self, ratio: Tensor) -> Tensor:
        """True with probability ``min(1, ratio)``; strict, so that ratio 0 never accepts (bool, same shape)."""
        coin = torch.rand(ratio.shape, generator=self.generator, device=ratio.device, dtype=ratio.dtype)
        return coin < ratio
