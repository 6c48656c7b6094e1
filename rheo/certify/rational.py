"""Fractions in place of tensors, so that the code of this package can run without rounding.

Pools, trees and verification use a few dozen tensor operations. ``RationalTensor`` implements them
on ``fractions.Fraction``. So ``rheo.certify`` runs the very functions that decoding runs. Indices,
masks and all other whole numbers stay ordinary tensors.

Begin with ``Arithmetic``, which turns tables of fractions into what the code computes with. Then
read ``RationalTensor``: its methods mean what those of ``torch.Tensor`` mean.
"""

# ruff: noqa: D102 - the methods of RationalTensor mean what those of torch.Tensor mean

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import inf, isqrt
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

Probability = Fraction | float


class Arithmetic:
    """Fractions or float64: how a table of fractions becomes what the code computes with.

    Args:
        name: "fractions" for exact arithmetic, or "float64" for ordinary tensors.

    Raises:
        ValueError: for another name.
    """

    NAMES = ("fractions", "float64")
    LOWEST = -1000.0  # stands for the logarithm of 0; its exponential is 0 in float64

    def __init__(self, name: str):
        if name not in self.NAMES:
            raise ValueError(f"arithmetic is {name!r}; choose one of {', '.join(self.NAMES)}")
        self.exact = name == "fractions"

    def logits(self, weights: Sequence[Sequence[Fraction]]) -> Tensor:
        """Draft logits ``[P, V]`` of P rows of weights."""
        if self.exact:
            return cast(Tensor, RationalTensor(weights, log=True))
        rows = [[float(weight) for weight in row] for row in weights]
        return torch.tensor(rows, dtype=torch.float64).log().clamp_min(self.LOWEST)

    def probs(self, p: Sequence[Fraction]) -> Tensor:
        """Target probabilities ``[V]``."""
        if self.exact:
            return cast(Tensor, RationalTensor(p))
        return torch.tensor([float(x) for x in p], dtype=torch.float64)

    def number(self, x: Fraction) -> Probability:
        """One number."""
        return x if self.exact else float(x)


class RationalTensor:
    """An array of fractions, or of logarithms of fractions.

    The logarithm of x is stored as x itself, and ``log`` is True. Then sums become products, -inf
    becomes 0, and nothing is rounded. A value that does not exist (0/0) is None. Every operation
    on None except ``nan_to_num`` raises a TypeError.

    Args:
        values: array-like of ``Fraction``.
        log: whether the elements of the tensor are the logarithms of ``values``.
    """

    dtype = torch.float64  # for code that asks; nothing is ever cast
    device = torch.device("cpu")

    def __init__(self, values: Any, log: bool = False):
        self.values: Any = np.asarray(values, dtype=object)
        # An empty piece of logits (a tail without tokens) may meet numbers of either kind.
        self.log = log and self.values.size > 0

    def _like(self, values: Any, log: bool | None = None) -> "RationalTensor":
        """A tensor of the same kind, or of the kind ``log``, with other values."""
        return RationalTensor(values, self.log if log is None else log)

    def _read(self, other: Any) -> Any:
        """``other`` as this tensor stores numbers: an array or one fraction."""
        if isinstance(other, RationalTensor):
            if other.log != self.log:
                raise TypeError("one operation mixes a logarithm with a plain number")
            return other.values
        if isinstance(other, Tensor):
            return np.vectorize(self._number, otypes=[object])(other.numpy())
        return self._number(other)

    def _number(self, number: Any) -> Fraction:
        """A number as this tensor stores it."""
        if not self.log:
            return Fraction(number)
        if number not in (0, -inf):
            raise TypeError(f"{number} is a logarithm of an unknown fraction; only 0 and -inf work")
        return Fraction(number == 0)

    # Shape and selection.

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.values.shape)

    def to(self, *args: Any, **kwargs: Any) -> "RationalTensor":
        return self

    def tolist(self) -> Any:
        return self.values.tolist()

    def flatten(self) -> "RationalTensor":
        return self._like(self.values.reshape(-1))

    def __getitem__(self, index: Any) -> "RationalTensor":
        return self._like(self.values[_index(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.values[_index(index)] = self._read(value)

    def squeeze(self, dim: int) -> "RationalTensor":
        return self._like(self.values.squeeze(dim))

    def index_select(self, dim: int, index: Tensor) -> "RationalTensor":
        return self._like(self.values.take(index.numpy(), dim))

    def gather(self, dim: int, index: Tensor) -> "RationalTensor":
        return self._like(np.take_along_axis(self.values, index.numpy(), dim))

    def scatter_add(self, dim: int, index: Tensor, source: Any) -> "RationalTensor":
        return self._like(self.values.copy()).scatter_add_(dim, index, source)

    def scatter_add_(self, dim: int, index: Tensor, source: Any) -> "RationalTensor":
        np.add.at(self.values, index.numpy(), self._read(source))
        return self

    def masked_fill(self, mask: Tensor, value: Any) -> "RationalTensor":
        return self._like(np.where(mask.numpy(), self._read(value), self.values))

    # Order.

    def topk(self, k: int) -> tuple["RationalTensor", Tensor]:
        order = np.array([_falling(row)[:k] for row in self.values])
        return self._like(np.take_along_axis(self.values, order, 1)), torch.from_numpy(order)

    def sort(self, descending: bool, stable: bool) -> tuple["RationalTensor", Tensor]:
        if not (descending and stable):
            raise NotImplementedError("only the stable descending sort is implemented")
        order = _falling(self.values)
        return self._like(self.values[order]), torch.tensor(order, dtype=torch.long)

    def __gt__(self, other: Any) -> Tensor:
        return torch.from_numpy(np.asarray(self.values > self._read(other), dtype=bool))

    def clamp(self, low: Any, high: Any) -> "RationalTensor":
        return self._like(np.minimum(np.maximum(self.values, self._read(low)), self._read(high)))

    def clamp_min(self, bound: Any) -> "RationalTensor":
        return self._like(np.maximum(self.values, self._read(bound)))

    def clamp_max(self, bound: Any) -> "RationalTensor":
        return self._like(np.minimum(self.values, self._read(bound)))

    def amax(self, dim: int, keepdim: bool) -> "RationalTensor":
        return self._like(self.values.max(axis=dim, keepdims=keepdim))

    # Arithmetic. A sum of logarithms is a product, a difference a quotient, a quotient a root.

    def __add__(self, other: Any) -> "RationalTensor":
        a, b = self.values, self._read(other)
        return self._like(a * b if self.log else a + b)

    def __sub__(self, other: Any) -> "RationalTensor":
        a, b = self.values, self._read(other)
        return self._like(_log_minus(a, b) if self.log else a - b)

    def __neg__(self) -> "RationalTensor":
        return self * -1

    def __mul__(self, other: Any) -> "RationalTensor":
        if self.log:
            raise TypeError("a logarithm cannot be multiplied")
        return self._like(self.values * self._read(other))

    def __truediv__(self, other: Any) -> "RationalTensor":
        if self.log:
            return self._like(_root(self.values, other))
        return self._like(_divide(self.values, self._read(other)))

    def sum(self, dim: int | None = None, keepdim: bool = False) -> "RationalTensor":
        if self.log:
            raise TypeError("logarithms cannot be summed over a dimension")
        return self._like(self.values.sum(axis=dim, keepdims=keepdim))

    def exp(self) -> "RationalTensor":
        return self._like(self.values, log=False)

    def log_softmax(self, dim: int, dtype: Any = None) -> "RationalTensor":
        return self._like(_divide(self.values, self.values.sum(axis=dim, keepdims=True)))

    def softmax(self, dim: int) -> "RationalTensor":
        # As in floating point, only the differences to the highest logit count.
        weights = _log_minus(self.values, self.values.max(axis=dim, keepdims=True))
        return self._like(_divide(weights, weights.sum(axis=dim, keepdims=True)), log=False)

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> "RationalTensor":
        """Called by torch for ``torch.cat`` and other functions of the module ``torch``."""
        if function not in _FUNCTIONS:
            raise NotImplementedError(f"{function} has no exact counterpart")
        return _FUNCTIONS[function](*args, **(kwargs or {}))


def _index(index: Any) -> tuple:
    """An index of numpy from one that may hold tensors."""
    parts = index if isinstance(index, tuple) else (index,)
    return tuple(part.numpy() if isinstance(part, Tensor) else part for part in parts)


def _falling(row: Any) -> list[int]:
    """Indices of a row, highest value first; ties stay in index order."""
    return sorted(range(len(row)), key=row.__getitem__, reverse=True)


def _elementwise(function: Callable) -> Callable[[Any, Any], Any]:
    """A function of two numbers, applied to arrays elementwise."""
    apply = np.frompyfunc(function, 2, 1)
    return lambda a, b: np.asarray(apply(a, b), dtype=object)


_divide = _elementwise(lambda a, b: a / b if b != 0 else None)
# Logits of -inf count as the lowest finite number (rheo.pool). So the difference of two is 0.
_log_minus = _elementwise(lambda a, b: a / b if b != 0 else Fraction(a == b) or None)


@_elementwise
def _root(value: Fraction, degree: float) -> Fraction:
    """The number whose logarithm is that of ``value`` divided by ``degree`` (a temperature)."""
    power = 1 / Fraction(degree)
    halvings = power.denominator.bit_length() - 1
    exact = power.denominator == 2**halvings
    for _ in range(halvings):
        root = Fraction(isqrt(value.numerator), isqrt(value.denominator))
        if not exact or root**2 != value:
            raise ValueError(f"{value} has no rational root for temperature {degree}")
        value = root
    return value**power.numerator


def _cat(tensors: Sequence, dim: int = 0) -> RationalTensor:
    """``torch.cat``."""
    first = next(t for t in tensors if isinstance(t, RationalTensor))
    return first._like(np.concatenate([first._read(t) for t in tensors], axis=dim))


def _nan_to_num(x: RationalTensor, nan: float = 0.0, **_: Any) -> RationalTensor:
    """``torch.nan_to_num``; only undefined values need it."""
    undefined = x.values == np.array(None)
    return x.masked_fill(torch.from_numpy(undefined), nan) if undefined.any() else x


def _where(condition: Tensor, a: Any, b: Any) -> RationalTensor:
    """``torch.where``."""
    first = a if isinstance(a, RationalTensor) else b
    return first._like(np.where(condition.numpy(), first._read(a), first._read(b)))


_FUNCTIONS: dict[Callable, Callable[..., RationalTensor]] = {
    torch.cat: _cat,
    torch.where: _where,
    torch.nan_to_num: _nan_to_num,
    torch.log: lambda x: x._like(x.values, log=True),
    torch.zeros_like: lambda x: RationalTensor(np.full(x.values.shape, Fraction(0))),
    torch.maximum: lambda a, b: a._like(np.maximum(a.values, a._read(b))),
    torch.minimum: lambda a, b: a._like(np.minimum(a.values, a._read(b))),
}
