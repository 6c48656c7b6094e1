"""Certify settings: enumerate what is emitted, and compare it with the target.

Begin with ``certify``, which certifies one setting.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from rheo.certify.distributions import Path, RandomDistributions
from rheo.certify.enumeration import Distributions, Enumerator, MergeError, TextProbs
from rheo.certify.rational import Arithmetic, Probability
from rheo.certify.settings import Setting, all_budgets
from rheo.pool import SAMPLED, PoolOptions
from rheo.tree import Tree

TOLERANCE = {"fractions": 0, "float64": 1e-12}


@dataclass(frozen=True)
class Comparison:
    """How far an emitted distribution is from the target's.

    Attributes:
        observed: for each beginning of a text, the probability that the output of decoding starts
            with it. The target continues the output where the cycles end.
        expected: the same for the target alone.
        worst: the beginning where the two differ most.
    """

    observed: TextProbs
    expected: TextProbs
    worst: Path

    @property
    def difference(self) -> Probability:
        """The largest difference of the two probabilities of a beginning."""
        return _distance(self.observed[self.worst], self.expected[self.worst])


@dataclass(frozen=True)
class Certificate:
    """The result for one setting and one budget.

    Attributes:
        setting: what was certified.
        budget: number of drafted nodes.
        trees: number of different kept trees.
        sampled: number of those that keep a sampled slot. If it is 0, the certificate says
            nothing about the method.
        comparison: of the emitted distribution with the target's.
    """

    setting: Setting
    budget: int
    trees: int
    sampled: int
    comparison: Comparison

    @property
    def lossless(self) -> bool:
        """Whether the difference is at most ``TOLERANCE``."""
        return self.comparison.difference <= TOLERANCE[self.setting.arithmetic]


def certify(setting: Setting, distributions: Distributions | None = None) -> Iterator[Certificate]:
    """Certify each budget of a setting.

    Args:
        setting: what to certify.
        distributions: used in place of the random ones of the setting.

    Yields:
        One certificate per budget.

    Raises:
        MergeError: if a merged draw changes the kept tree.
    """
    work = enumerator(setting, distributions)
    for budget, probs, trees in _enumerate(work, setting):
        sampled = sum(SAMPLED in tree.kinds.tolist() for tree in trees)
        comparison = compare(probs, work.distributions, work.arithmetic)
        yield Certificate(setting, budget, len(trees), sampled, comparison)


def enumerator(setting: Setting, distributions: Distributions | None = None) -> Enumerator:
    """The enumerator of a setting; arguments as in ``certify``."""
    s = setting
    return Enumerator(
        distributions or RandomDistributions(s.vocab, s.distributions, s.draft_ids),
        PoolOptions(s.size, s.m, s.support, s.temperature, s.normaliser),
        s.depth,
        s.verification,
        Arithmetic(s.arithmetic),
        s.walk,
    )


def _enumerate(work: Enumerator, setting: Setting) -> Iterator[tuple[int, TextProbs, list[Tree]]]:
    """Yield each budget, the probabilities of the emitted texts, and the kept trees."""
    if setting.cycles > 1:
        for budget in setting.budgets:
            yield budget, *work.after_cycles(setting.cycles, budget)
        return
    # Trees are grown once for all budgets.
    for budget, trees in work.kept_trees((), setting.budgets).items():
        yield budget, work.emitted((), trees), [tree for _, tree, _ in trees]


def compare(emitted: TextProbs, distributions: Distributions, arithmetic: Arithmetic) -> Comparison:
    """Compare emitted texts with the target at every beginning that the cycles can reach.

    After that both continue as the target does. So no longer text can differ by more.

    Args:
        emitted: probability of each text that the cycles emit.
        distributions: the target.
        arithmetic: of the probabilities.
    """
    emitted_from: TextProbs = defaultdict(int)  # by beginning: the emitted texts that have it
    for text, probability in emitted.items():
        for length in range(len(text) + 1):
            emitted_from[text[:length]] += probability
    observed: TextProbs = {(): emitted_from[()]}
    expected: TextProbs = {(): arithmetic.number(Fraction(1))}
    inner = {text[:length] for text in emitted for length in range(len(text))}
    for begin in sorted(inner, key=len):
        # The probability that the cycles ended here or before, so that the target goes on.
        ended = observed[begin] - emitted_from[begin] + emitted.get(begin, 0)
        for token, fraction in enumerate(distributions.target(begin)):
            longer, p = (*begin, token), arithmetic.number(fraction)
            observed[longer] = emitted_from.get(longer, 0) + ended * p
            expected[longer] = expected[begin] * p
    worst = max(observed, key=lambda text: _distance(observed[text], expected[text]))
    return Comparison(observed, expected, worst)


def _distance(a: Probability, b: Probability) -> Probability:
    """The absolute difference."""
    return a - b if a > b else b - a


def check_merging(settings: Iterable[Setting]) -> int:
    """Check that merging draws gives the same distribution as walking every draw.

    Args:
        settings: small settings.

    Returns:
        The number of distributions that were compared.

    Raises:
        MergeError: if two distributions differ.
    """
    compared = 0
    for setting in settings:
        every_draw = certify(replace(setting, walk="jointly"))
        for every, merged in zip(every_draw, certify(replace(setting, walk="merged")), strict=True):
            if every.comparison.observed != merged.comparison.observed:
                raise MergeError(
                    f"{setting}, {every.budget} drafted nodes: "
                    "merging draws changes the output distribution"
                )
            compared += 1
    return compared


def smallest_failure(found: Certificate) -> Certificate:
    """A failing certificate of the same method that is as small as possible.

    Smaller depths, vocabularies and pools are tried with a few random distributions each.

    Args:
        found: a failing certificate. It is returned if no smaller one fails.
    """
    setting = found.setting
    if setting.draft_ids is not None or setting.cycles > 1:
        return found
    depths, vocabs = range(setting.depth + 1), range(2, setting.vocab + 1)
    for depth, vocab, size in itertools.product(depths, vocabs, range(1, setting.size + 1)):
        if isinstance(setting.m, int) and setting.m >= size:
            continue
        budgets = all_budgets(vocab, size, depth)[:6]
        small = replace(setting, vocab=vocab, size=size, depth=depth, budgets=budgets)
        small = replace(small, walk="by node")
        for seed in range(8):
            for certificate in certify(replace(small, distributions=seed)):
                if not certificate.lossless:
                    return certificate
    return found
