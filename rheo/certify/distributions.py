"""Small tables of fractions that take the place of the target and of the draft head.

Begin with ``RandomDistributions``: its distributions depend on the whole prefix.
"""

import random
from fractions import Fraction

Path = tuple[int, ...]  # token ids after the prompt
Table = tuple[Fraction, ...]  # one number per token

KINDS = ("dense", "tied", "zeros", "certain", "uniform", "peaked")


class RandomDistributions:
    """Random target and draft distributions, different after every prefix, of all ``KINDS``.

    The draft's weights are squares, so that the temperatures 1/2, 1 and 2 give rational
    probabilities. After about one prefix in five the target equals the draft.

    Args:
        vocab: number of target tokens.
        seed: seed of the distributions. The draft's distribution at the root has the kind
            ``KINDS[seed % 6]``; the kinds of all others are random.
        draft_ids: target id of each draft id; None if the vocabularies are equal.
    """

    def __init__(self, vocab: int, seed: int, draft_ids: tuple[int, ...] | None = None):
        self.vocab, self.seed, self.draft_ids = vocab, seed, draft_ids or tuple(range(vocab))
        self._cache: dict[Path, tuple[Table, Table]] = {}

    def target(self, path: Path) -> Table:
        """The target's probabilities after ``path``, one per target token."""
        return self._at(path)[0]

    def draft(self, path: Path) -> Table:
        """The draft's weights after ``path``, one per draft token. Their sum is not 1."""
        return self._at(path)[1]

    def _at(self, path: Path) -> tuple[Table, Table]:
        """Target probabilities and draft weights after ``path``."""
        if path not in self._cache:
            chance = random.Random(f"{self.seed} {path}")
            kind = None if path else KINDS[self.seed % len(KINDS)]
            p = _weights(chance, self.vocab)
            q = _weights(chance, len(self.draft_ids), kind)
            if chance.random() < 0.2:  # a perfect draft, as far as its vocabulary reaches
                p = [0] * self.vocab
                for token, weight in zip(self.draft_ids, q):
                    p[token] = weight
            target = tuple(Fraction(weight, sum(p)) for weight in p)
            self._cache[path] = target, tuple(map(Fraction, q))
        return self._cache[path]


class ConstantDistributions:
    """The same two distributions after every prefix.

    Args:
        p: the target's probabilities.
        q: the draft's weights.
    """

    def __init__(self, p: Table, q: Table):
        self.vocab, self.draft_ids, self._p, self._q = len(p), tuple(range(len(q))), p, q

    def target(self, path: Path) -> Table:
        """The target's probabilities after ``path``."""
        return self._p

    def draft(self, path: Path) -> Table:
        """The draft's weights after ``path``."""
        return self._q


def _weights(chance: random.Random, size: int, kind: str | None = None) -> list[int]:
    """Square weights of a kind; None stands for a random kind."""
    kind = kind or chance.choice(KINDS)
    roots = [chance.randint(1, 5) for _ in range(size)]
    if kind == "tied":
        roots = [chance.randint(1, 2) for _ in range(size)]
    if kind == "zeros":
        alive = chance.randrange(size)
        roots = [root if i == alive or chance.random() < 0.5 else 0 for i, root in enumerate(roots)]
    if kind == "certain":
        roots = [0] * size
        roots[chance.randrange(size)] = 1
    if kind == "uniform":
        roots = [1] * size
    if kind == "peaked":
        roots = [root**3 for root in roots]
    return [root * root for root in roots]
