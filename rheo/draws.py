"""The one place where chance enters: categorical tokens and acceptance coins."""

import torch
from torch import Tensor
from torch.nn.functional import pad

DRAW_BLOCK = 128  # tokens of a block of a large vocabulary


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

        A CPU makes random numbers slowly: there a large vocabulary is drawn from in two steps, a block and then a token of it.

        Args:
            weights: ``[..., V]``, non-negative, float32 or float64.

        Returns:
            int64 ``[...]``.
        """
        if weights.device.type != "cpu" or weights.shape[-1] <= DRAW_BLOCK**2:
            return self._race(weights)
        missing = -weights.shape[-1] % DRAW_BLOCK
        blocks = (pad(weights, (0, missing)) if missing else weights).unflatten(-1, (-1, DRAW_BLOCK))
        block = self._race(blocks.sum(-1))
        inside = blocks.take_along_dim(block[..., None, None], -2).squeeze(-2)
        return block * DRAW_BLOCK + self._race(inside)

    def _race(self, weights: Tensor) -> Tensor:
        """An exponential race, ``argmax(w / e)``.

        It needs no normalisation and no cumulative sum (whose rounding would give tokens of probability 0 a chance), and never selects a
        weight of 0 unless all are 0.
        """
        race = torch.empty_like(weights).exponential_(generator=self.generator)
        race.clamp_min_(torch.finfo(race.dtype).tiny)  # an exponential of exactly 0 would turn 0/0 into NaN
        return (weights / race).argmax(-1)

    def accept(self, ratio: Tensor) -> Tensor:
        """True with probability ``min(1, ratio)``; strict, so that ratio 0 never accepts (bool, same shape)."""
        coin = torch.rand(ratio.shape, generator=self.generator, device=ratio.device, dtype=ratio.dtype)
        return coin < ratio
