"""All random decisions: sampling a token, and accepting with a probability."""

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128  # tokens of one block of a large vocabulary
# Rate of the exponentials, which are then about 2^-60. A weight of at most 1 divided by one stays
# finite in float32, and the smallest weights keep all their digits in the quotient.
RATE = 2.0**60


class Draws:
    """The random decisions of one request, all made with one ``torch.Generator``.

    Drafting and verification ask for random decisions only through this object. So a test can
    replace it by an enumerator and walk every outcome of the real code (``rheo.certify``).

    Args:
        generator: on the device of the tensors that are sampled from; None is torch's global one.
        ahead: ``[n]`` exponentials that were made with the generator ahead of time; sampling uses
            them up first.
    """

    def __init__(self, generator: torch.Generator | None, ahead: Tensor | None = None):
        self.generator, self._ahead = generator, ahead

    def ahead(self, rows: int, width: int, device: torch.device) -> "Draws":
        """Make the random numbers for many rows now, in one operation.

        Not for use inside ``torch.vmap``: there all rows would share the same numbers.

        Args:
            rows: number of rows that will be sampled from.
            width: number of weights in a row (float32).
            device: device of the weights.

        Returns:
            Draws with the same generator that use these numbers first.
        """
        if in_blocks(width, device):
            return self
        numbers = self._exponentials(torch.empty(rows * width, device=device))
        return type(self)(self.generator, numbers)

    def token(self, weights: Tensor) -> Tensor:
        """Sample one index per row, with probability proportional to its weight.

        Rows are independent. An index of weight 0 is never sampled, unless all weights are 0.

        Args:
            weights: ``[..., V]``, non-negative, float32 or float64.

        Returns:
            int64 ``[...]``.
        """
        if not in_blocks(weights.shape[-1], weights.device):
            return self._race(weights)
        # First a block, then a token of it: that takes far fewer random numbers.
        missing = -weights.shape[-1] % BLOCK
        padded = pad(weights, (0, missing)) if missing else weights
        blocks = padded.unflatten(-1, (-1, BLOCK))
        block = self._race(blocks.sum(-1))
        inside = blocks.take_along_dim(block[..., None, None], -2).squeeze(-2)
        return block * BLOCK + self._race(inside)

    def accept(self, ratio: Tensor) -> Tensor:
        """Return True with probability ``min(1, ratio)``, elementwise.

        The comparison is strict, so that a ratio of 0 is never accepted.

        Args:
            ratio: any shape.

        Returns:
            bool, the same shape.
        """
        uniform = torch.rand(
            ratio.shape, generator=self.generator, device=ratio.device, dtype=ratio.dtype
        )
        return uniform < ratio

    def _race(self, weights: Tensor) -> Tensor:
        """Sample by an exponential race: the argmax of ``weights / exponentials``.

        A race needs no normalisation and no cumulative sum, whose rounding would give tokens of
        probability 0 a chance.
        """
        ahead, n = self._ahead, weights.numel()
        if ahead is None or ahead.numel() < n or ahead.dtype != weights.dtype:
            race = self._exponentials(torch.empty_like(weights))
        else:
            race, self._ahead = ahead[:n].view(weights.shape), ahead[n:]
        return (weights / race).argmax(-1)

    def _exponentials(self, out: Tensor) -> Tensor:
        """Fill ``out`` with exponentials; none is 0, since 0/0 is NaN."""
        out.exponential_(RATE, generator=self.generator)
        return out.clamp_min_(torch.finfo(out.dtype).tiny)


def in_blocks(width: int, device: torch.device) -> bool:
    """Whether rows of this width are sampled in two steps: a block, then a token in it.

    A CPU makes random numbers slowly, so that two steps pay for a large vocabulary.
    """
    return device.type == "cpu" and width > BLOCK**2
