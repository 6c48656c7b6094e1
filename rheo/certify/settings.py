"""What is certified: the settings, from small to large."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rheo.pool import AUTO
from rheo.verification import VERIFICATIONS


@dataclass(frozen=True)
class Setting:
    """One thing to certify.

    Attributes:
        group: the line of the report that it belongs to.
        vocab, distributions: number of tokens, and seed of the laws (``RandomDistributions``).
        size, m, support, temperature, depth: of the tree (``PoolOptions``, ``TreeOptions``); m None is Top-K, or a number, or AUTO.
        budgets: numbers of drafted nodes to keep, each certified by itself.
        verification: "rheo" or "rrsw".
        draft_ids: target ids of a reduced draft vocabulary; None for the whole.
        cycles: cycles in a row.
        arithmetic: "fractions" or "float64".
        walk: see ``Enumerator``.
        normaliser: as in ``PoolOptions``.
    """

    group: str
    vocab: int
    distributions: int
    size: int
    m: int | str | None
    depth: int
    budgets: tuple[int, ...]
    support: int = 0
    temperature: float = 1.0
    verification: str = "rheo"
    draft_ids: tuple[int, ...] | None = None
    cycles: int = 1
    arithmetic: str = "fractions"
    walk: str = "jointly"
    normaliser: str = "support"

    def __str__(self) -> str:
        m = "Top-K" if self.m is None else f"m {self.m}"
        draft = "" if self.draft_ids is None else f", draft vocabulary {list(self.draft_ids)}"
        return (
            f"vocabulary {self.vocab}{draft}, K {self.size}, {m}, support {self.support or 'all'}, "
            f"T {self.temperature}, depth {self.depth}, "
            f"verification {self.verification}, {self.cycles} cycle(s), laws {self.distributions}, {self.arithmetic}"
        )


def all_budgets(vocab: int, size: int, depth: int) -> tuple[int, ...]:
    """Every number of drafted nodes, up to all candidates."""
    width = min(size, vocab)
    return tuple(range(1, width + depth * width * width + 1))


def ways_to_decode(lead: Iterable[int]) -> tuple[tuple[int | str | None, str], ...]:
    """(m, verification): Top-K, some fixed m under each verification, and AUTO, which is lossless under the first alone."""
    return (None, "rheo"), *itertools.product(lead, VERIFICATIONS), (AUTO, "rheo")


def quick_settings() -> Iterator[Setting]:
    """Under a minute; the smallest first, so that a failure is met in a small setting."""
    ways = ways_to_decode((0, 1, 2))
    conditions = ((0, 1.0, 0), (1, 0.5, 0), (2, 2.0, 3), (5, 0.0, 0))  # laws, temperature, support
    for (vocab, size, depth), (m, verification) in itertools.product(
        ((2, 2, 0), (3, 3, 0), (4, 3, 0), (2, 2, 1), (3, 2, 1)), ways
    ):
        if m not in (None, AUTO) and m >= size:
            continue
        small = Setting(
            "every draw, jointly",
            vocab,
            0,
            size,
            m,
            depth,
            all_budgets(vocab, size, depth),
            verification=verification,
        )
        if vocab * depth == 3:
            yield replace(small, distributions=6, budgets=(2, 3))
            small = replace(small, group="merged draws", walk="merged")
        for distributions, temperature, support in conditions[
            : 4 if (vocab, size) == (3, 3) else 2
        ]:
            yield replace(
                small, distributions=distributions, temperature=temperature, support=support
            )
        rounded = replace(
            small, group="every draw, jointly, float64", arithmetic="float64", walk="jointly"
        )
        yield replace(rounded, distributions=7, budgets=small.budgets[1:3])
        if vocab == 3:
            yield replace(
                small, group="reduced draft vocabulary", distributions=6, draft_ids=(2, 0)
            )
            yield replace(
                small,
                group="scores by the full softmax",
                distributions=12,
                support=2,
                normaliser="full",
            )
    for m, verification in (*ways[:4], ways[-1]):
        two = Setting(
            "two and three cycles in a row",
            2,
            6,
            2,
            m,
            1,
            (3,),
            cycles=2,
            verification=verification,
        )
        if m in (None, AUTO) or m < 2:
            yield two
            yield replace(two, vocab=3, depth=0, budgets=(2,), cycles=3, walk="by node")
    for m, verification in ways:
        yield Setting(
            "vocabulary 6, K 5, depth 4, merged",
            6,
            6,
            5,
            m,
            4,
            (5,),
            verification=verification,
            walk="merged",
        )


def full_settings() -> Iterator[Setting]:
    """Every m, budget and verification up to vocabulary 4, K 3 and depth 2, several temperatures and laws; larger ones merged."""
    yield from quick_settings()
    conditions = tuple(itertools.product((0.5, 1.0, 2.0), (0, 2)))  # temperature, support
    for depth, vocab, size in itertools.product((0, 1, 2), (2, 3, 4), (1, 2, 3)):
        for m, verification in ways_to_decode(range(size)):
            budgets = all_budgets(vocab, size, depth)
            base = Setting(
                "every draw, jointly", vocab, 0, size, m, depth, budgets, verification=verification
            )
            if depth > 0:
                base = replace(
                    base, group=f"every draw, depth {depth}, node by node", walk="by node"
                )
            if depth == 2:  # up to 16,384 outcomes of the draws, each pruned to 21 sizes
                yield replace(base, distributions=13, temperature=0.5, support=3)
                if verification == "rheo":
                    yield replace(base, distributions=12)
                continue
            for distributions, (temperature, support) in enumerate(
                conditions * (3 if depth == 0 else 1), 20
            ):
                yield replace(
                    base, distributions=distributions, temperature=temperature, support=support
                )
            yield replace(base, group="every draw, float64", arithmetic="float64", distributions=18)
            if vocab > 2:
                yield replace(
                    base, group="reduced draft vocabulary", distributions=18, draft_ids=(2, 0)
                )
    for (m, verification), distributions in itertools.product(ways_to_decode((0, 1)), (20, 21)):
        two = Setting(
            "two and three cycles in a row",
            3,
            distributions,
            2,
            m,
            1,
            (2, 4),
            cycles=2,
            verification=verification,
        )
        two = replace(two, walk="by node")
        yield two
        yield replace(two, vocab=2, cycles=3)
    for (m, verification), budget in itertools.product(ways_to_decode((0, 1, 2, 4)), (3, 6, 9)):
        large = Setting(
            "vocabulary 6, K 5, depth 4, merged",
            6,
            30,
            5,
            m,
            4,
            (budget,),
            verification=verification,
        )
        yield replace(large, walk="merged")
