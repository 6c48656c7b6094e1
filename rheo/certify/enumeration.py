"""The output law of build + prune + verify, computed and not estimated: every outcome of every draw of the real code.

``grow``, ``prune`` and ``verify`` run as in decoding; only their ``Draws`` is replaced by ``Replay``, which is told what each
draw yields and knows how probable that was. The laws are tables of fractions that depend on the whole prefix, so the arithmetic
is exact (``rheo.rational``), or float64 where tensors are to be tested with their rounding.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from rheo.certify.rational import RationalTensor
from rheo.pool import LEAD, PoolOptions
from rheo.tree import NO_KIND, Tree, TreeOptions, grow, prune
from rheo.verification import verify

Path = tuple[int, ...]  # token ids after the prefix
TextProbs = dict[Path, Fraction | float]  # emitted tokens: probability
WALKS = ("jointly", "by node", "merged")


class Arithmetic:
    """How tables of fractions become what the code computes with.

    Args:
        name: "fractions", or "float64" for ordinary tensors.
    """

    NAMES = ("fractions", "float64")
    LOWEST = -1000.0  # stands for the logarithm of 0, whose exponential is 0 in float64

    def __init__(self, name: str):
        if name not in self.NAMES:
            raise ValueError(f"arithmetic is {name!r}; choose one of {', '.join(self.NAMES)}")
        self.exact = name == "fractions"

    def logits(self, weights: list[tuple[Fraction, ...]]) -> Tensor | RationalTensor:
        """``[P, V]`` draft logits from rows of weights."""
        if self.exact:
            return RationalTensor(weights, log=True)
        return (
            torch.tensor([[float(w) for w in row] for row in weights], dtype=torch.float64)
            .log()
            .clamp_min(self.LOWEST)
        )

    def probs(self, p: tuple[Fraction, ...]) -> Tensor | RationalTensor:
        """``[V]`` a target law."""
        return (
            RationalTensor(p)
            if self.exact
            else torch.tensor([float(x) for x in p], dtype=torch.float64)
        )

    def number(self, x: Fraction) -> Fraction | float:
        return x if self.exact else float(x)


class RandomDistributions:
    """Target and draft laws, different after every prefix, of mixed kinds: dense, tied, with zeros, certain, uniform, peaked.

    The draft's weights are squares, so that temperatures 1/2, 1 and 2 lead to rational laws.

    Args:
        vocab: number of target tokens.
        seed: of the laws; modulo 6 the kind of the draft's law at the root, in the order above.
        draft_ids: target id of each draft id; None where the vocabularies agree.
    """

    def __init__(self, vocab: int, seed: int, draft_ids: tuple[int, ...] | None = None):
        self.vocab, self.seed, self.draft_ids = vocab, seed, draft_ids or tuple(range(vocab))
        self._cache: dict = {}

    def target(self, path: Path) -> tuple[Fraction, ...]:
        """p after ``path``."""
        return self._at(path)[0]

    def draft(self, path: Path) -> tuple[Fraction, ...]:
        """Weights of the draft's tokens after ``path``; their sum is not 1."""
        return self._at(path)[1]

    def _at(self, path: Path):
        if path not in self._cache:
            chance = random.Random(f"{self.seed} {path}")
            p = _weights(chance, self.vocab)
            q = _weights(
                chance, len(self.draft_ids), None if path else KINDS[self.seed % len(KINDS)]
            )
            if chance.random() < 0.2:  # a perfect draft, as far as its vocabulary goes
                p = [0] * self.vocab
                for token, weight in zip(self.draft_ids, q):
                    p[token] = weight
            self._cache[path] = tuple(Fraction(w, sum(p)) for w in p), tuple(map(Fraction, q))
        return self._cache[path]


KINDS = ("dense", "tied", "zeros", "certain", "uniform", "peaked")


def _weights(chance: random.Random, size: int, kind: str | None = None) -> list[int]:
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


class ConstantDistributions:
    """The same two laws after every prefix.

    Args:
        p: target law ``[V]``.
        q: draft weights ``[V]``.
    """

    def __init__(self, p: tuple[Fraction, ...], q: tuple[Fraction, ...]):
        self.vocab, self.draft_ids, self._p, self._q = len(p), tuple(range(len(q))), p, q

    def target(self, path: Path) -> tuple[Fraction, ...]:
        return self._p

    def draft(self, path: Path) -> tuple[Fraction, ...]:
        return self._q


class Replay:
    """Stands in for ``rheo.Draws``: each draw yields what ``choices`` says, else its first possible outcome.

    A draw of the construction is named by the path of its parent (``parents``, set before each level), so that it
    keeps its name whatever else happens; a draw of the verification by its number.

    Args:
        choices: outcome of the draws that are decided.
        chance: where given, the other draws yield random outcomes.
    """

    def __init__(self, choices: dict, chance: random.Random | None = None):
        self.choices, self.chance = choices, chance
        self.parents: list[Path] | None = None
        self.drawn: dict = {}  # name of each draw: (law, outcome)
        self.times: Counter = Counter()

    def ahead(self, *_) -> "Replay":
        return self

    def token(self, weights) -> Tensor:
        if len(weights.shape) == 1:
            return torch.tensor(self._choose(len(self.drawn), weights.tolist()))
        taken = []
        for path, row in zip(self.parents, weights.tolist(), strict=True):
            self.times[path] += (
                1  # padding may repeat a path, and code may draw twice: each is a draw of its own
            )
            if not any(
                row
            ):  # a tail without mass: the slot does not exist, and a race takes the first token
                row = [1 + row[0], *row[1:]]
            taken.append(self._choose((path, self.times[path]), row))
        return torch.tensor(taken)

    def accept(self, ratio) -> Tensor:
        probability = min(ratio.tolist(), Fraction(1))
        return torch.tensor(self._choose(len(self.drawn), [1 - probability, probability]) == 1)

    def _choose(self, name, weights: list) -> int:
        total = sum(weights)
        probs = [w / total for w in weights]
        possible = [i for i, w in enumerate(probs) if w > 0]
        outcome = self.choices.get(
            name, self.chance.choice(possible) if self.chance else possible[0]
        )
        self.drawn[name] = probs, outcome
        return outcome


def outcomes(
    run: Callable, matters: Callable = lambda result, name: True, source: type[Replay] = Replay
) -> Iterator[tuple]:
    """Yield (probability, result, choices) of ``run(draws)`` over all outcomes of its draws.

    Args:
        matters: tells of a result and a draw's name whether the draw must be decided. A draw that never
            matters stays open, and its outcomes are merged into one.
        source: what stands in for ``Draws``.
    """
    open_states = [({}, 1)]
    while open_states:
        choices, weight = open_states.pop()
        draws = source(choices)
        result = run(draws)
        while (
            name := next((n for n in draws.drawn if n not in choices and matters(result, n)), None)
        ) is not None:
            probs, taken = draws.drawn[name]
            for other, probability in enumerate(probs):
                if other != taken and probability > 0:
                    open_states.append(({**choices, name: other}, weight * probability))
            choices, weight = {**choices, name: taken}, weight * probs[taken]
        yield weight, result, choices


class MergeError(AssertionError):
    """A draw outside of the kept tree changed the kept tree."""


@dataclass(frozen=True)
class Enumerator:
    """The law of what one cycle emits after each prefix.

    Attributes:
        distributions: target and draft.
        pool, depth: as in ``TreeOptions``.
        verification: as in ``verify``.
        arithmetic: see ``Arithmetic``.
        walk: "jointly": every draw through the whole of ``grow``, ``prune`` and ``verify``; "by node": every draw of the
            construction, then the steps of ``verify`` node by node, each once; "merged": by node, and of the construction only the draws
            of parents that keep a sampled or fill child.

    Raises:
        ValueError: for another ``walk``.
    """

    distributions: RandomDistributions | ConstantDistributions
    pool: PoolOptions
    depth: int
    verification: str
    arithmetic: Arithmetic
    walk: str = "jointly"

    def __post_init__(self):
        if self.walk not in WALKS:
            raise ValueError(f"walk is {self.walk!r}; choose one of {', '.join(WALKS)}")

    def kept_trees(self, prefix: Path, budgets: tuple[int, ...]) -> dict[int, list[tuple]]:
        """Per budget (drafted nodes) the different kept trees [(probability, tree, paths of its nodes)].

        Raises:
            MergeError: where a merged draw mattered after all (each result is tried with other outcomes).
        """
        options = TreeOptions(self.pool, total_token=2, depth=self.depth)
        target_ids = torch.tensor(self.distributions.draft_ids)
        root = torch.tensor(prefix[-1] if prefix else 0)

        def growth(draws):
            draws.parents = [()]

            def expand(tokens, ranks, level):
                draws.parents = [
                    (*draws.parents[r], t) for r, t in zip(ranks.tolist(), tokens.tolist())
                ]
                return self.arithmetic.logits(
                    [self.distributions.draft((*prefix, *path)) for path in draws.parents]
                )

            return grow(
                self.arithmetic.logits([self.distributions.draft(prefix)])[0],
                expand,
                options,
                draws,
                target_ids,
            )

        found: dict[int, dict] = {budget: {} for budget in budgets}

        def add(budget, weight, tree):
            entry = found[budget].setdefault(_key(tree), [0, tree, _paths(tree)])
            entry[0] = entry[0] + weight

        if self.walk != "merged":
            for weight, grown, _ in outcomes(growth):
                for budget in budgets:
                    add(budget, weight, prune(root, grown, budget + 1))
            return {budget: list(trees.values()) for budget, trees in found.items()}

        chance = random.Random(0)
        for budget in budgets:

            def run(draws, budget=budget):
                tree = prune(root, growth(draws), budget + 1)
                paths = _paths(tree)
                return tree, {
                    path[:-1]
                    for path, kind in zip(paths, tree.kinds.tolist())
                    if kind not in (LEAD, NO_KIND)
                }

            for weight, (tree, decided), choices in outcomes(
                run, lambda result, name: name[0] in result[1]
            ):
                for _ in range(2):
                    if _key(run(Replay(choices, chance))[0]) != _key(tree):
                        raise MergeError(
                            f"after {prefix}, {budget} drafted nodes: the kept tree hangs on a draw outside of it"
                        )
                add(budget, weight, tree)
        return {budget: list(trees.values()) for budget, trees in found.items()}

    def emitted(self, prefix: Path, trees: list[tuple]) -> TextProbs:
        """{tokens of one cycle: probability} over the kept ``trees``."""
        probs: TextProbs = defaultdict(int)
        steps: dict = {}
        for weight, tree, paths in trees:

            def target(node, paths=paths):
                return self.arithmetic.probs(self.distributions.target((*prefix, *paths[node])))

            if self.walk != "jointly":
                self._walk(probs, steps, tree, paths, target, 0, (), weight)
                continue
            for probability, tokens, _ in outcomes(lambda draws: self._verify(tree, target, draws)):
                probs[tokens] += weight * probability
        return dict(probs)

    def _verify(self, tree: Tree, target: Callable, draws: Replay) -> Path:
        verified = verify(tree, target, draws, self.verification)
        if not verified.finite:
            raise AssertionError("verification met a law that is not finite")
        return tuple(verified.tokens[: verified.count].tolist())

    def _walk(
        self,
        probs: TextProbs,
        steps: dict,
        tree: Tree,
        paths: list[Path],
        target,
        node: int,
        emitted: Path,
        weight,
    ) -> None:
        """Add to ``probs`` what is emitted from ``node`` on: one step of ``verify`` on it and its children, then their walks."""
        star, children = _star(tree, node)
        key = paths[node], _key(star)
        if key not in steps:
            steps[key] = [
                (t, w)
                for w, t, _ in outcomes(
                    lambda draws: self._verify(star, lambda _: target(node), draws)
                )
            ]
        step = defaultdict(int)
        for (token,), probability in steps[key]:
            step[token] += probability
        for token, probability in step.items():
            if token in children:
                self._walk(
                    probs,
                    steps,
                    tree,
                    paths,
                    target,
                    children[token],
                    (*emitted, token),
                    weight * probability,
                )
            else:
                probs[(*emitted, token)] += weight * probability

    def after_cycles(
        self, cycles: int, budget: int, prefix: Path = ()
    ) -> tuple[TextProbs, list[Tree]]:
        """{tokens of ``cycles`` cycles in a row: probability}, and all kept trees that were met."""
        trees = self.kept_trees(prefix, (budget,))[budget]
        first, met = self.emitted(prefix, trees), [tree for _, tree, _ in trees]
        if cycles == 1:
            return first, met
        probs: TextProbs = defaultdict(int)
        for tokens, probability in first.items():
            rest, more_trees = self.after_cycles(cycles - 1, budget, (*prefix, *tokens))
            met += more_trees
            for more, weight in rest.items():
                probs[(*tokens, *more)] += probability * weight
        return dict(probs), met


def _paths(tree: Tree) -> list[Path]:
    """The tokens from the root's child down to each node."""
    paths: list[Path] = [()]
    for parent, token in zip(tree.parents[1:].tolist(), tree.tokens[1:].tolist()):
        paths.append((*paths[parent], token))
    return paths


def _key(tree: Tree) -> tuple:
    """Everything of a tree that verification reads; equal keys have equal laws."""
    rows = tree.pool_rows[sorted(set(tree.parents[tree.valid].tolist()))]
    tokens = torch.where(tree.valid, tree.tokens, 0)  # padding may hold anything
    parts = (tokens, tree.parents, tree.kinds, tree.valid, tree.tail[rows], tree.q_tail[rows])
    return tuple(tuple(part.flatten().tolist()) for part in parts)


def _star(tree: Tree, node: int) -> tuple[Tree, dict[int, int]]:
    """``node`` and its children as a tree that verification leaves after one step; the children's nodes by token."""
    nodes = torch.cat((torch.tensor([node]), tree.children(node).nonzero()[:, 0]))
    zero, ones = torch.zeros_like(nodes), torch.ones_like(nodes)
    levels, kinds = ones.clone(), tree.kinds[nodes]
    levels[0], kinds[0] = 0, NO_KIND
    star = Tree(
        tokens=tree.tokens[nodes], parents=zero, levels=levels, kinds=kinds, valid=ones.bool(), log_scores=tree.log_scores[nodes],
        mask=torch.eye(len(nodes), dtype=torch.bool), pool_rows=tree.pool_rows[nodes], tail=tree.tail, q_tail=tree.q_tail,
        max_levels=0,
    )  # fmt: skip
    return star, dict(zip(tree.tokens[nodes[1:]].tolist(), nodes[1:].tolist()))


@dataclass(frozen=True)
class Comparison:
    """How far an emitted law is from the target's.

    Attributes:
        observed, expected: per beginning of a text the probability that decoding, continued by the target where the cycles end, and the
            target alone begin with it.
        worst: the beginning where the two differ most.
    """

    observed: TextProbs
    expected: TextProbs
    worst: Path

    @property
    def difference(self) -> Fraction | float:
        return abs(self.observed[self.worst] - self.expected[self.worst])


def compare(
    emitted: TextProbs,
    distributions: RandomDistributions | ConstantDistributions,
    arithmetic: Arithmetic,
) -> Comparison:
    """Compare an emitted law with the target's at every beginning that the cycles can reach.

    Beyond these both laws go on as the target does, so no longer text can differ by more.
    """
    through: TextProbs = defaultdict(int)  # emitted texts that begin so
    for tokens, probability in emitted.items():
        for length in range(len(tokens) + 1):
            through[tokens[:length]] += probability
    observed, expected = {(): through[()]}, {(): arithmetic.number(Fraction(1))}
    for begin in sorted(
        {tokens[:length] for tokens in emitted for length in range(len(tokens))}, key=len
    ):
        ended = observed[begin] - through[begin] + emitted.get(begin, 0)  # here or before
        for token, p in enumerate(distributions.target(begin)):
            longer, p = (*begin, token), arithmetic.number(p)
            observed[longer] = through.get(longer, 0) + ended * p
            expected[longer] = expected[begin] * p
    worst = max(observed, key=lambda tokens: abs(observed[tokens] - expected[tokens]))
    return Comparison(observed, expected, worst)


__all__ = [
    "Arithmetic",
    "Comparison",
    "ConstantDistributions",
    "Enumerator",
    "MergeError",
    "RandomDistributions",
    "Replay",
    "compare",
    "outcomes",
]
