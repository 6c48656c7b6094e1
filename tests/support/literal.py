"""The method once more, written down literally and apart from ``rheo``: lists, fractions, the paper's steps one by one.

Nothing of the package is used. Where ``rheo.verify`` makes one draw from the residual, children are tested one after the other here; where
``rheo.grow`` sorts stably, the total order is a sort key here.
"""

from collections import defaultdict
from fractions import Fraction

LEAD, SAMPLED, FILL = 0, 1, 2


def power(weight, temperature):
    """weight ** (1 / temperature) for squares and temperatures 1/2, 1, 2."""
    if temperature == 2:
        root = Fraction(
            round(float(weight.numerator) ** 0.5), round(float(weight.denominator) ** 0.5)
        )
        assert root * root == weight
        return root
    return weight ** {1: 1, 0.5: 2}[temperature]


def pools_of(weights, draft_ids, size, m, support, temperature):
    """[(probability, {drawn token, slots [(token, score, kind)], q_tail})] of one parent over its sampled token."""
    total = sum(weights)
    ranked = sorted(range(len(weights)), key=lambda i: -weights[i])  # ties: lower draft id first
    if m is None:
        return [
            (Fraction(1), [(draft_ids[i], weights[i] / total, LEAD) for i in ranked[:size]], {})
        ]
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
        return [
            (Fraction(1), slots + [(draft_ids[i], q[i], FILL) for i in tail[: size - m - 1]], {})
        ]
    tempered = {i: power(weights[i], temperature) for i in tail}
    q_tail = {i: w / sum(tempered.values()) for i, w in tempered.items()}
    if auto:
        agreement = Fraction(0.3)
        common = {
            i: agreement * min(q[i], q_tail[i]) + (1 - agreement) * q[i] * q_tail[i] for i in tail
        }
        own = {i: q[i] - common[i] for i in tail}
        score = max(sum(common.values()), *own.values())
    else:
        score = q[tail[0]] if m == 0 else max(min(q[lead[-1]], z), q[tail[0]])
    return [
        (
            q_tail[y],
            slots
            + [(draft_ids[y], score, SAMPLED)]
            + [(draft_ids[i], own[i], FILL) for i in [j for j in tail if j != y][: size - m - 1]],
            {draft_ids[i]: w for i, w in q_tail.items()},
        )
        for y in tail
        if q_tail[y] > 0
    ]


def trees_of(distributions, size, m, support, temperature, depth, budget):
    """{kept tree: probability}; a tree is a tuple of (path, kind), best first, and of (parent's path, q_tail)."""
    start = (
        Fraction(1),
        [((), Fraction(1), ())],
        (),
        (),
    )  # probability, frontier of (path, score, rank), candidates, q_tails
    states = [(*start, 0)]
    found = defaultdict(Fraction)
    while states:
        probability, frontier, candidates, tails, level = states.pop()
        if level > depth:
            ranked = sorted(candidates, key=lambda c: (-c[0], c[1], c[2]))[:budget]
            parents = {path[:-1] for _, _, _, path, _ in ranked}
            tree = tuple((path, kind) for _, _, _, path, kind in ranked)
            sampled = {path[:-1] for path, kind in tree if kind == SAMPLED}
            found[
                tree,
                tuple(
                    (path, tuple(sorted(t.items())))
                    for path, t in sorted(tails)
                    if path in parents & sampled
                ),
            ] += probability
            continue
        branches = [(probability, [], tails)]
        for rank, (path, score, _) in enumerate(frontier):
            branches = [
                (
                    weight * chance,
                    [
                        *made,
                        *(
                            (score * s, level, (rank, slot), (*path, token), kind)
                            for slot, (token, s, kind) in enumerate(slots)
                            if s * score > 0
                        ),
                    ],
                    (*known, (path, q_tail)),
                )
                for weight, made, known in branches
                for chance, slots, q_tail in pools_of(
                    distributions.draft(path),
                    distributions.draft_ids,
                    size,
                    m,
                    support,
                    temperature,
                )
            ]
        for weight, made, known in branches:
            best = sorted(made, key=lambda c: (-c[0], c[2]))[:size]
            states.append(
                (
                    weight,
                    [(c[3], c[0], ()) for c in best],
                    (*candidates, *made),
                    tuple(sorted(known, key=lambda pair: pair[0])),
                    level + 1,
                )
            )
    return found


def emitted_of(distributions, trees, verification="rheo"):
    """{emitted tokens: probability} of one cycle, the children tested one by one (Algorithm 1; App. A for RRSw)."""
    probs = defaultdict(Fraction)
    order = {"rheo": (SAMPLED, LEAD, FILL), "rrsw": (LEAD, SAMPLED, FILL)}[verification]

    def walk(tree, tails, path, weight):
        p = dict(enumerate(distributions.target(path)))
        children = [(child[-1], kind) for child, kind in tree if child[:-1] == path]
        for wanted in order:
            for token, kind in children:
                if kind != wanted:
                    continue
                if kind == SAMPLED:
                    q_tail = tails[path]
                    accept = min(Fraction(1), p[token] / q_tail[token])
                    left = {t: max(Fraction(0), x - q_tail.get(t, 0)) for t, x in p.items()}
                else:
                    accept = p[token]
                    left = {t: Fraction(0) if t == token else x for t, x in p.items()}
                if accept > 0:
                    walk(tree, tails, (*path, token), weight * accept)
                weight = weight * (1 - accept)
                if weight == 0:
                    return
                total = sum(left.values())
                p = {t: x / total for t, x in left.items()}
        for token, x in p.items():
            if x > 0:
                probs[(*path, token)] += weight * x

    for (tree, tails), weight in trees.items():
        walk(tree, {path: dict(t) for path, t in tails}, (), weight)
    return dict(probs)
