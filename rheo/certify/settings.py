"""What is certified: the list of settings.

Begin with ``Setting``, one configuration to certify. ``quick_settings`` and ``full_settings`` list
them for the two runs of ``python -m rheo.certify``.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rheo.pool import AUTO
from rheo.verification import VERIFICATIONS

JOINTLY = "every draw, jointly"
REDUCED = "reduced draft vocabulary"
CYCLES = "two and three cycles in a row"
LARGE = "vocabulary 6, K 5, depth 4, merged"


@dataclass(frozen=True)
class Setting:
    """One configuration to certify.

    Attributes:
        group: the line of the report to which the setting belongs.
        vocab: number of target tokens.
        distributions: seed of the target and draft distributions (``RandomDistributions``).
        size: K, the number of slots of a pool.
        m: as in ``PoolOptions``: None for Top-K, a number, or AUTO.
        depth: as in ``TreeOptions``.
        budgets: numbers of drafted nodes to keep. Each one is certified by itself.
        support: as in ``PoolOptions``.
        temperature: as in ``PoolOptions``.
        verification: "rheo" or "rrsw".
        draft_ids: target ids of a reduced draft vocabulary; None for the whole vocabulary.
        cycles: number of cycles in a row.
        arithmetic: "fractions" or "float64" (``Arithmetic``).
        walk: "jointly", "by node" or "merged" (``Enumerator``).
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
            f"T {self.temperature}, depth {self.depth}, verification {self.verification}, "
            f"{self.cycles} cycle(s), distributions {self.distributions}, {self.arithmetic}"
        )


Way = tuple[int | str | None, str]  # m, verification


def all_budgets(vocab: int, size: int, depth: int) -> tuple[int, ...]:
    """Every number of drafted nodes, from 1 to the number of all candidates."""
    width = min(size, vocab)
    return tuple(range(1, width + depth * width * width + 1))


def ways_to_decode(lead: Iterable[int]) -> tuple[Way, ...]:
    """All lossless pairs (m, verification).

    They are Top-K, each fixed m under each verification, and AUTO, which is lossless under "rheo"
    only.

    Args:
        lead: the fixed values of m.
    """
    return (None, "rheo"), *itertools.product(lead, VERIFICATIONS), (AUTO, "rheo")


def quick_settings() -> Iterator[Setting]:
    """The settings of the quick certificate, which takes less than a minute.

    Small settings come first, so that a failure shows up in a small setting.
    """
    ways = ways_to_decode((0, 1, 2))
    shapes = ((2, 2, 0), (3, 3, 0), (4, 3, 0), (2, 2, 1), (3, 2, 1))  # vocabulary, K, depth
    for (vocab, size, depth), (m, verification) in itertools.product(shapes, ways):
        if not isinstance(m, int) or m < size:
            budgets = all_budgets(vocab, size, depth)
            small = Setting(JOINTLY, vocab, 0, size, m, depth, budgets, verification=verification)
            yield from _variants(small)
    for m, verification in (*ways[:4], ways[-1]):
        two = Setting(CYCLES, 2, 6, 2, m, 1, (3,), cycles=2, verification=verification)
        yield two
        yield replace(two, vocab=3, depth=0, budgets=(2,), cycles=3, walk="by node")
    for m, verification in ways:
        yield Setting(LARGE, 6, 6, 5, m, 4, (5,), verification=verification, walk="merged")


def _variants(small: Setting) -> Iterator[Setting]:
    """A small setting with several distributions, arithmetics, draft vocabularies, normalisers."""
    budgets = small.budgets
    if small.vocab == 3 and small.depth == 1:
        yield replace(small, distributions=6, budgets=(2, 3))
        small = replace(small, group="merged draws", walk="merged")
    conditions = ((0, 1.0, 0), (1, 0.5, 0), (2, 2.0, 3), (5, 0.0, 0))  # seed, temperature, support
    n_conditions = 4 if (small.vocab, small.size) == (3, 3) else 2
    for seed, temperature, support in conditions[:n_conditions]:
        yield replace(small, distributions=seed, temperature=temperature, support=support)
    rounded = replace(small, group=f"{JOINTLY}, float64", arithmetic="float64", walk="jointly")
    yield replace(rounded, distributions=7, budgets=budgets[1:3])
    if small.vocab == 3:
        yield replace(small, group=REDUCED, distributions=6, draft_ids=(2, 0))
        full = replace(small, group="scores by the full softmax", normaliser="full")
        yield replace(full, distributions=12, support=2)


def full_settings() -> Iterator[Setting]:
    """The settings of the full certificate.

    They are the quick settings, then every m, budget and verification up to vocabulary 4, K 3 and
    depth 2, at several temperatures and with several distributions. Larger settings are merged.
    """
    yield from quick_settings()
    for depth, vocab, size in itertools.product((0, 1, 2), (2, 3, 4), (1, 2, 3)):
        for m, verification in ways_to_decode(range(size)):
            budgets = all_budgets(vocab, size, depth)
            base = Setting(JOINTLY, vocab, 0, size, m, depth, budgets, verification=verification)
            yield from _full_variants(base)
    for (m, verification), seed in itertools.product(ways_to_decode((0, 1)), (20, 21)):
        two = Setting(CYCLES, 3, seed, 2, m, 1, (2, 4), verification=verification, walk="by node")
        yield replace(two, cycles=2)
        yield replace(two, cycles=3, vocab=2)
    for (m, verification), budget in itertools.product(ways_to_decode((0, 1, 2, 4)), (3, 6, 9)):
        yield Setting(LARGE, 6, 30, 5, m, 4, (budget,), verification=verification, walk="merged")


def _full_variants(base: Setting) -> Iterator[Setting]:
    """A setting with many distributions, temperatures and supports; fewer for deep trees."""
    if base.depth > 0:
        group = f"every draw, depth {base.depth}, node by node"
        base = replace(base, group=group, walk="by node")
    if base.depth == 2:  # up to 16,384 outcomes of the draws, each pruned to 21 sizes
        yield replace(base, distributions=13, temperature=0.5, support=3)
        if base.verification == "rheo":
            yield replace(base, distributions=12)
        return
    conditions = tuple(itertools.product((0.5, 1.0, 2.0), (0, 2)))  # temperature, support
    repeated = conditions * (3 if base.depth == 0 else 1)
    for seed, (temperature, support) in enumerate(repeated, 20):
        yield replace(base, distributions=seed, temperature=temperature, support=support)
    yield replace(base, group="every draw, float64", arithmetic="float64", distributions=18)
    if base.vocab > 2:
        yield replace(base, group=REDUCED, distributions=18, draft_ids=(2, 0))


def settings_to_merge() -> Iterator[Setting]:
    """Small settings for which merging draws is compared with walking every draw."""
    for setting in quick_settings():
        one_cycle = setting.depth == setting.cycles == 1 and setting.arithmetic == "fractions"
        if one_cycle and setting.distributions in (0, 6):
            yield replace(setting, budgets=setting.budgets[:4])
