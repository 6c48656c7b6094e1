"""A second implementation of the method: the paper's steps on lists and fractions.

It uses nothing of ``rheo``. Where ``rheo`` samples once from the residual, this module tests the
children one by one. Where ``rheo`` sorts stably, this module sorts by an explicit key.
"""

import itertools
from collections import defaultdict
from fractions import Fraction
from typing import NamedTuple

LEAD, SAMPLED, FILL = 0, 1, 2
AGREEMENT = Fraction(0.3)  # of the scores for m = "auto"


def power(weight, temperature):
    """``weight ** (1 / temperature)`` for a square and the temperatures 1/2, 1 and 2."""
    if temperature == 2:
        numerator, denominator = (
            round(float(n) ** 0.5) for n in (weight.numerator, weight.denominator)
        )
        root = Fraction(numerator, denominator)
        assert root * root == weight
        return root
    return weight ** {1: 1, 0.5: 2}[temperature]


def pools_of(weights, draft_ids, size, m, support, temperature):
    """All pools of one parent: [(probability, slots [(token, score, kind)], q_tail)]."""
    ranked = sorted(range(len(weights)), key=lambda i: -weights[i])  # ties: lower draft id first
    if m is None:
        total = sum(weights)
        slots = [(draft_ids[i], weights[i] / total, LEAD) for i in ranked[:size]]
        return [(Fraction(1), slots, {})]
    ranked = ranked[: support or len(ranked)]
    kept = sum(weights[i] for i in ranked)
    q = own = {i: weights[i] / kept for i in ranked}
    auto = m == "auto"
    if auto:
        m = min(1, min(size, len(ranked)) - 1)
    lead, tail = ranked[:m], ranked[m:]
    slots = [(draft_ids[i], q[i], LEAD) for i in lead]
    z = sum((q[i] for i in tail), Fraction(0))
    if z == 0:
        fill = [(draft_ids[i], q[i], FILL) for i in tail[: size - m - 1]]
        return [(Fraction(1), slots + fill, {})]
    tempered = {i: power(weights[i], temperature) for i in tail}
    q_tail = {i: w / sum(tempered.values()) for i, w in tempered.items()}
    if auto:
        common = {
            i: AGREEMENT * min(q[i], q_tail[i]) + (1 - AGREEMENT) * q[i] * q_tail[i] for i in tail
        }
        own = {i: q[i] - common[i] for i in tail}
        score = max(sum(common.values()), *own.values())
    else:
        score = q[tail[0]] if m == 0 else max(min(q[lead[-1]], z), q[tail[0]])
    target_tail = {draft_ids[i]: w for i, w in q_tail.items()}
    pools = []
    for y in tail:
        rest = [i for i in tail if i != y][: size - m - 1]
        fill = [(draft_ids[i], own[i], FILL) for i in rest]
        if q_tail[y] > 0:
            pools.append((q_tail[y], [*slots, (draft_ids[y], score, SAMPLED), *fill], target_tail))
    return pools


class Candidate(NamedTuple):
    """A candidate of a tree; ``order`` is (rank of its parent, slot)."""

    score: Fraction
    level: int
    order: tuple[int, int]
    path: tuple[int, ...]
    kind: int


def rank(candidate):
    """The total order: best score first, then shallower, then left to right."""
    return -candidate.score, candidate.level, candidate.order


def trees_of(distributions, size, m, support, temperature, depth, budget):
    """All kept trees: {(nodes, tails): probability}.

    ``nodes`` holds (path, kind) of the kept nodes, best first. ``tails`` holds (parent's path,
    q_tail) of the kept sampled nodes.
    """
    found = defaultdict(Fraction)

    def keep(candidates, tails, probability):
        nodes = tuple((c.path, c.kind) for c in sorted(candidates, key=rank)[:budget])
        parents = sorted(path[:-1] for path, kind in nodes if kind == SAMPLED)
        found[nodes, tuple((path, tuple(tails[path].items())) for path in parents)] += probability

    def grow(level, frontier, candidates, tails, probability):
        """Expand ``frontier``, [(path, score)] best first, in every way."""
        if level > depth:
            keep(candidates, tails, probability)
            return
        every_pool = [
            pools_of(
                distributions.draft(path), distributions.draft_ids, size, m, support, temperature
            )
            for path, _ in frontier
        ]
        for pools in itertools.product(*every_pool):
            made, known, weight = [], dict(tails), probability
            for parent, ((path, score), (p, slots, q_tail)) in enumerate(zip(frontier, pools)):
                weight *= p
                known[path] = q_tail
                made += [
                    Candidate(score * own, level, (parent, slot), (*path, token), kind)
                    for slot, (token, own, kind) in enumerate(slots)
                    if score * own > 0
                ]
            best = [(c.path, c.score) for c in sorted(made, key=rank)[:size]]
            grow(level + 1, best, candidates + made, known, weight)

    grow(0, [((), Fraction(1))], [], {}, Fraction(1))
    return found


def emitted_of(distributions, trees, verification="rheo"):
    """{emitted tokens: probability} of one cycle.

    The children are tested one by one: Algorithm 1 for "rheo", Appendix A for "rrsw".
    """
    probs = defaultdict(Fraction)
    order = {"rheo": (SAMPLED, LEAD, FILL), "rrsw": (LEAD, SAMPLED, FILL)}[verification]

    def walk(nodes, tails, path, weight):
        p = dict(enumerate(distributions.target(path)))
        children = [(child[-1], kind) for child, kind in nodes if child[:-1] == path]
        for token, kind in sorted(children, key=lambda child: order.index(child[1])):
            if kind == SAMPLED:
                q_tail = tails[path]
                accept = min(Fraction(1), p[token] / q_tail[token])
                left = {t: max(Fraction(0), x - q_tail.get(t, 0)) for t, x in p.items()}
            else:
                accept = p[token]
                left = {t: Fraction(0) if t == token else x for t, x in p.items()}
            if accept > 0:
                walk(nodes, tails, (*path, token), weight * accept)
            weight = weight * (1 - accept)
            if weight == 0:
                return
            total = sum(left.values())
            p = {t: x / total for t, x in left.items()}
        for token, x in p.items():
            if x > 0:
                probs[(*path, token)] += weight * x

    for (nodes, tails), weight in trees.items():
        walk(nodes, {path: dict(q_tail) for path, q_tail in tails}, (), weight)
    return dict(probs)
