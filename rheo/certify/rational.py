"""Exact arithmetic for the code of this package: a stand-in for ``torch.Tensor`` that holds fractions.

Pools, trees and verification are written against a few dozen tensor operations. ``RationalTensor`` implements those
on ``fractions.Fraction``, so that ``rheo.certify`` can run the very functions that decoding runs, without any rounding. Indices,
masks and everything else that is a whole number stays an ordinary tensor.
"""

from fractions import Fraction
from math import inf, isqrt

import numpy as np
import torch
from torch import Tensor


class RationalTensor:
    """An array of fractions, or of logarithms of fractions.

    The logarithm of x is kept as x itself with ``log`` set: sums become products, -inf becomes 0, and nothing is
    rounded. What has no value (0/0) is None, and computing with it, but for ``nan_to_num``, is a TypeError.

    Args:
        values: array-like of ``Fraction``.
        log: the tensor's elements are the logarithms of ``values``.
    """

    dtype = torch.float64  # what code that asks gets to hear; nothing is ever cast
    device = torch.device("cpu")

    def __init__(self, values, log: bool = False):
        self.values = np.asarray(values, dtype=object)
        self.log = (
            log and self.values.size > 0
        )  # an empty piece of logits, a tail without tokens, may meet any number

    def _like(self, values, log: bool | None = None) -> "RationalTensor":
        return RationalTensor(values, self.log if log is None else log)

    def _read(self, other):
        """``other`` in this tensor's own terms, as an array or a fraction."""
        if isinstance(other, RationalTensor):
            if other.log != self.log:
                raise TypeError("a logarithm and a plain number meet in one operation")
            return other.values
        if isinstance(other, Tensor):
            return np.vectorize(self._number, otypes=[object])(other.numpy())
        return self._number(other)

    def _number(self, number) -> Fraction:
        if not self.log:
            return Fraction(number)
        if number not in (0, -inf):
            raise TypeError(
                f"the logarithm {number} is not that of a known fraction; only 0 and -inf are"
            )
        return Fraction(number == 0)

    # Shape and selection.

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.values.shape)

    def numel(self) -> int:
        return self.values.size

    def to(self, *args, **kwargs) -> "RationalTensor":
        return self

    def tolist(self):
        return self.values.tolist()

    def flatten(self) -> "RationalTensor":
        return self._like(self.values.reshape(-1))

    def squeeze(self, dim: int) -> "RationalTensor":
        return self._like(self.values.squeeze(dim))

    def __getitem__(self, index) -> "RationalTensor":
        return self._like(self.values[_index(index)])

    def __setitem__(self, index, value) -> None:
        self.values[_index(index)] = self._read(value)

    def index_select(self, dim: int, index: Tensor) -> "RationalTensor":
        return self._like(self.values.take(index.numpy(), dim))

    def gather(self, dim: int, index: Tensor) -> "RationalTensor":
        return self._like(np.take_along_axis(self.values, index.numpy(), dim))

    def scatter_add(self, dim: int, index: Tensor, source) -> "RationalTensor":
        return self._like(self.values.copy()).scatter_add_(dim, index, source)

    def scatter_add_(self, dim: int, index: Tensor, source) -> "RationalTensor":
        np.add.at(self.values, index.numpy(), self._read(source))
        return self

    def masked_fill(self, mask: Tensor, value) -> "RationalTensor":
        return self._like(np.where(mask.numpy(), self._number(value), self.values))

    # Order.

    def topk(self, k: int) -> tuple["RationalTensor", Tensor]:
        order = np.array([_falling(row)[:k] for row in self.values])
        return self._like(np.take_along_axis(self.values, order, 1)), torch.from_numpy(order)

    def sort(self, descending: bool, stable: bool) -> tuple["RationalTensor", Tensor]:
        if not (descending and stable):
            raise NotImplementedError("only the stable descending sort is used")
        order = _falling(self.values)
        return self._like(self.values[order]), torch.tensor(order, dtype=torch.long)

    def __gt__(self, other) -> Tensor:
        return _mask(self.values > self._read(other))

    def __eq__(self, other) -> Tensor:
        return _mask(self.values == self._read(other))

    def clamp(self, low, high) -> "RationalTensor":
        return self._like(np.minimum(np.maximum(self.values, self._read(low)), self._read(high)))

    def clamp_min(self, bound) -> "RationalTensor":
        return self._like(np.maximum(self.values, self._number(bound)))

    def clamp_max(self, bound) -> "RationalTensor":
        return self._like(np.minimum(self.values, self._number(bound)))

    # Arithmetic. A sum of logarithms is a product, a difference a quotient, a quotient a root.

    def __add__(self, other) -> "RationalTensor":
        return self._like(
            self.values * self._read(other) if self.log else self.values + self._read(other)
        )

    def __sub__(self, other) -> "RationalTensor":
        return self._like(
            _log_minus(self.values, self._read(other))
            if self.log
            else self.values - self._read(other)
        )

    def __neg__(self) -> "RationalTensor":
        return self * -1

    def __mul__(self, other) -> "RationalTensor":
        if self.log:
            raise TypeError("a logarithm is multiplied")
        return self._like(self.values * self._read(other))

    def __truediv__(self, other) -> "RationalTensor":
        return self._like(
            _root(self.values, other) if self.log else _divide(self.values, self._read(other))
        )

    def sum(self, dim: int | None = None, keepdim: bool = False) -> "RationalTensor":
        if self.log:
            raise TypeError("logarithms are summed over a dimension; logsumexp is meant")
        return self._like(self.values.sum(axis=dim, keepdims=keepdim))

    def exp(self) -> "RationalTensor":
        return self._like(self.values, log=False)

    def amax(self, dim: int, keepdim: bool) -> "RationalTensor":
        return self._like(self.values.max(axis=dim, keepdims=keepdim))

    def log_softmax(self, dim: int, dtype=None) -> "RationalTensor":
        return self._like(_divide(self.values, self.values.sum(axis=dim, keepdims=True)))

    def softmax(self, dim: int) -> "RationalTensor":
        weights = _log_minus(
            self.values, self.values.max(axis=dim, keepdims=True)
        )  # as in floats, where only differences count
        return self._like(_divide(weights, weights.sum(axis=dim, keepdims=True)), log=False)

    # torch.cat and the like find their way here.

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function not in _FUNCTIONS:
            raise NotImplementedError(f"{function} has no exact counterpart")
        return _FUNCTIONS[function](*args, **(kwargs or {}))


def _index(index):
    """An index of numpy from one that may hold tensors."""
    parts = index if isinstance(index, tuple) else (index,)
    return tuple(part.numpy() if isinstance(part, Tensor) else part for part in parts)


def _mask(array) -> Tensor:
    return torch.from_numpy(np.asarray(array, dtype=bool))


def _falling(row) -> list[int]:
    return sorted(range(len(row)), key=row.__getitem__, reverse=True)  # stable, reverse or not


def _elementwise(function):
    apply = np.frompyfunc(function, 2, 1)
    return lambda a, b: np.asarray(apply(a, b), dtype=object)


_divide = _elementwise(lambda a, b: a / b if b != 0 else None)
# Logits of -inf count as the lowest finite number (rheo.pool), so that the difference of two of them is 0.
_log_minus = _elementwise(lambda a, b: a / b if b != 0 else Fraction(a == b) or None)


@_elementwise
def _root(value: Fraction, degree: float) -> Fraction:
    """The number whose logarithm is that of ``value`` divided by ``degree`` (a temperature)."""
    power = 1 / Fraction(degree)
    for _ in range(power.denominator.bit_length() - 1):
        roots = isqrt(value.numerator), isqrt(value.denominator)
        if (
            power.denominator & (power.denominator - 1)
            or Fraction(roots[0] ** 2, roots[1] ** 2) != value
        ):
            raise ValueError(f"{value} has no rational root for temperature {degree}")
        value = Fraction(*roots)
    return value**power.numerator


def _cat(tensors, dim: int = 0) -> RationalTensor:
    first = next(t for t in tensors if isinstance(t, RationalTensor))
    return first._like(np.concatenate([first._read(t) for t in tensors], axis=dim))


def _nan_to_num(x: RationalTensor, nan: float = 0.0, **_) -> RationalTensor:
    undefined = np.equal(x.values, None)
    return x._like(np.where(undefined, x._number(nan), x.values)) if undefined.any() else x


def _where(condition: Tensor, a, b) -> RationalTensor:
    first = a if isinstance(a, RationalTensor) else b
    return first._like(np.where(condition.numpy(), first._read(a), first._read(b)))


_FUNCTIONS = {
    torch.cat: _cat,
    torch.where: _where,
    torch.nan_to_num: _nan_to_num,
    torch.log: lambda x: x._like(x.values, log=True),
    torch.zeros_like: lambda x: RationalTensor(np.full(x.values.shape, Fraction(0))),
    torch.maximum: lambda a, b: a._like(np.maximum(a.values, a._read(b))),
    torch.minimum: lambda a, b: a._like(np.minimum(a.values, a._read(b))),
}

__all__ = ["RationalTensor"]
