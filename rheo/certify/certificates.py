"""Certify one setting: enumerate, compare, and look for the smallest counterexample."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rheo.certify.enumeration import (
    Arithmetic,
    Comparison,
    Enumerator,
    MergeError,
    RandomDistributions,
    compare,
)
from rheo.certify.settings import Setting, all_budgets
from rheo.pool import AUTO, SAMPLED, PoolOptions

TOLERANCE = {"fractions": 0, "float64": 1e-12}


@dataclass(frozen=True)
class Certificate:
    """What came out for one setting and one budget.

    Attributes:
        trees: different kept trees.
        sampled: those of them that keep a sampled slot (0 is no evidence about the method).
    """

    setting: Setting
    budget: int
    trees: int
    sampled: int
    comparison: Comparison

    @property
    def lossless(self) -> bool:
        return self.comparison.difference <= TOLERANCE[self.setting.arithmetic]


def enumerator(setting: Setting, distributions=None) -> Enumerator:
    """The enumerator of a setting; ``distributions`` in place of its random ones."""
    return Enumerator(
        distributions=distributions
        or RandomDistributions(setting.vocab, setting.distributions, setting.draft_ids),
        pool=PoolOptions(
            setting.size, setting.m, setting.support, setting.temperature, setting.normaliser
        ),
        depth=setting.depth,
        verification=setting.verification,
        arithmetic=Arithmetic(setting.arithmetic),
        walk=setting.walk,
    )


def certify(setting: Setting, distributions=None) -> Iterator[Certificate]:
    """Certify each budget of a setting.

    Raises:
        MergeError: where a merged draw mattered.
    """
    work = enumerator(setting, distributions)
    if setting.cycles == 1:  # one growth serves all budgets
        kept = work.kept_trees((), setting.budgets)
        found = (
            (budget, work.emitted((), trees), [tree for _, tree, _ in trees])
            for budget, trees in kept.items()
        )
    else:
        found = ((budget, *work.after_cycles(setting.cycles, budget)) for budget in setting.budgets)
    for budget, probs, trees in found:
        sampled = sum(SAMPLED in tree.kinds.tolist() for tree in trees)
        yield Certificate(
            setting,
            budget,
            len(trees),
            sampled,
            compare(probs, work.distributions, work.arithmetic),
        )


def merging_against_every_draw(settings) -> int:
    """Check for small settings that merging gives the law of walking every draw; the number of laws compared.

    Raises:
        MergeError: naming the setting where it does not.
    """
    compared = 0
    for setting in settings:
        for every, merged in zip(
            certify(replace(setting, walk="jointly")),
            certify(replace(setting, walk="merged")),
            strict=True,
        ):
            if every.comparison.observed != merged.comparison.observed:
                raise MergeError(
                    f"{setting}, {every.budget} drafted nodes: merging draws changes the output law"
                )
            compared += 1
    return compared


def smallest_failure(found: Certificate) -> Certificate:
    """A failing certificate of the same method with as small a vocabulary, pool and tree as random laws show it."""
    setting = found.setting
    if setting.draft_ids is not None or setting.cycles > 1:
        return found
    for depth, vocab, size in itertools.product(
        range(setting.depth + 1), range(2, setting.vocab + 1), range(1, setting.size + 1)
    ):
        if setting.m not in (None, AUTO) and setting.m >= size:
            continue
        small = replace(
            setting,
            depth=depth,
            vocab=vocab,
            size=size,
            budgets=all_budgets(vocab, size, depth)[:6],
            walk="by node",
        )
        for distributions in range(8):
            try:
                failures = [
                    c
                    for c in certify(replace(small, distributions=distributions))
                    if not c.lossless
                ]
            except MergeError:
                continue
            if failures:
                return failures[0]
    return found
