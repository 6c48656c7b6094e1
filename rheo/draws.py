"""The one place where chance enters: categorical tokens and acceptance coins."""

import torch
from torch import Tensor
from torch.nn.functional import pad

DRAW_BLOCK = 128  # tokens of a block of a large vocabulary
SMALL_RATE = (
    2.0**60
)  # of exponentials: weights up to 1 divided by them are finite and normal in float32


class Draws:
    """Random decisions of one request, all taken from one ``torch.Generator``.

    Drafting and verification ask for tokens and coins only through this object, so that a test can
    put an enumerator in its place and walk every outcome of the real code.

    Args:
        generator: source of all randomness; its device must be that of the tensors drawn from.
        ahead: ``[n]`` exponentials that were made from it ahead; the draws use them up first.
    """

    def __init__(self, generator: torch.Generator, ahead: Tensor | None = None):
        self.generator, self._ahead = generator, ahead

    def ahead(self, rows: int, width: int, device: torch.device) -> "Draws":
        """Draws from the same generator whose random numbers for so many rows of float32 weights are made now, in one operation.

        Not for use under ``torch.vmap``, where all rows of a call would share them.
        """
        if in_blocks(width, device):
            return self
        return type(self)(
            self.generator, self._exponentials(torch.empty(rows * width, device=device))
        )

    def token(self, weights: Tensor) -> Tensor:
        """Draw one index per row with probability proportional to ``weights``, rows independent.

        A CPU makes random numbers slowly: there a large vocabulary is drawn from in two steps, a block and then a token of it.

        Args:
            weights: ``[..., V]``, non-negative, float32 or float64.

        Returns:
            int64 ``[...]``.
        """
        if not in_blocks(weights.shape[-1], weights.device):
            return self._race(weights)
        missing = -weights.shape[-1] % DRAW_BLOCK
        blocks = (pad(weights, (0, missing)) if missing else weights).unflatten(
            -1, (-1, DRAW_BLOCK)
        )
        block = self._race(blocks.sum(-1))
        inside = blocks.take_along_dim(block[..., None, None], -2).squeeze(-2)
        return block * DRAW_BLOCK + self._race(inside)

    def _race(self, weights: Tensor) -> Tensor:
        """An exponential race, ``argmax(w / e)``.

        It needs no normalisation and no cumulative sum (whose rounding would give tokens of probability 0 a chance), and never selects a
        weight of 0 unless all are 0.
        """
        ahead, n = self._ahead, weights.numel()
        if ahead is None or ahead.numel() < n or ahead.dtype != weights.dtype:
            race = self._exponentials(torch.empty_like(weights))
        else:
            race, self._ahead = ahead[:n].view(weights.shape), ahead[n:]
        return (weights / race).argmax(-1)

    def _exponentials(self, place: Tensor) -> Tensor:
        """Fill ``place``; an exponential of exactly 0 would turn 0/0 into NaN.

        They are small ones, since quotients by them are to have all their digits: of the smallest numbers that a weight can be, they would
        have two, and ``argmax`` gives ties to the first.
        """
        return place.exponential_(SMALL_RATE, generator=self.generator).clamp_min_(
            torch.finfo(place.dtype).tiny
        )

    def accept(self, ratio: Tensor) -> Tensor:
        """True with probability ``min(1, ratio)``; strict, so that ratio 0 never accepts (bool, same shape)."""
        uniform = torch.rand(
            ratio.shape, generator=self.generator, device=ratio.device, dtype=ratio.dtype
        )
        return uniform < ratio


def in_blocks(width: int, device: torch.device) -> bool:
    """Whether rows of so many weights are drawn from in two steps."""
    return device.type == "cpu" and width > DRAW_BLOCK**2
