"""Walk every outcome of build, prune and verify, and add up the probability of what is emitted.

``grow``, ``prune`` and ``verify`` run as they do in decoding. Only their ``Draws`` is replaced: a
``Replay`` is told the outcome of each draw, and records how probable it was.

Begin with ``outcomes``, which runs a function once for every outcome of its draws. ``Enumerator``
applies it to one cycle: ``kept_trees`` enumerates the trees, ``emitted`` enumerates their
verification, and ``after_cycles`` joins several cycles.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rheo.certify.distributions import ConstantDistributions, Path, RandomDistributions
from rheo.certify.rational import Arithmetic, Probability
from rheo.draws import Draws
from rheo.pool import LEAD, PoolOptions
from rheo.tree import NO_KIND, Growth, Tree, TreeOptions, grow, prune
from rheo.verification import verify

Distributions = RandomDistributions | ConstantDistributions
TextProbs = dict[Path, Probability]  # probability of each emitted text
Choices = dict[Hashable, int]  # outcome of each decided draw
WALKS = ("jointly", "by node", "merged")


class Replay(Draws):
    """Takes the place of ``Draws``: the outcome of each draw is given, not random.

    Every draw has a name. While the tree is built, a draw is named by the path of its parent and
    by how often that parent has drawn before. So a draw keeps its name whatever the others yield.
    In verification a draw is named by its number.

    The random numbers of ``Draws`` are never set up here. So a method of ``Draws`` that is not
    replaced fails, and does not bring in chance.

    Args:
        choices: the outcomes of the draws that are decided.
        chance: chooses the outcomes of the other draws; None takes the first possible one.

    Attributes:
        parents: paths of the parents of the next call of ``token`` with several rows. It must be
            set before each level of the tree.
        drawn: for each draw so far the probabilities of its outcomes, and the outcome.
    """

    def __init__(self, choices: Choices, chance: random.Random | None = None):
        self.choices, self.chance = choices, chance
        self.parents: list[Path] = []
        self.drawn: dict[Hashable, tuple[list[Probability], int]] = {}
        self._times: Counter[Path] = Counter()

    def ahead(self, rows: int, width: int, device: torch.device) -> "Replay":
        """There is nothing to make ahead of time."""
        return self

    def token(self, weights: Tensor) -> Tensor:
        """The given index per row."""
        if len(weights.shape) == 1:
            return torch.tensor(self._choose(len(self.drawn), weights.tolist()))
        chosen = []
        for path, row in zip(self.parents, weights.tolist(), strict=True):
            # Padding may repeat a path, and wrong code may draw twice: these are separate draws.
            self._times[path] += 1
            if not any(row):  # a tail without mass: the slot does not exist, any token will do
                row = [1 + row[0], *row[1:]]
            chosen.append(self._choose((path, self._times[path]), row))
        return torch.tensor(chosen)

    def accept(self, ratio: Tensor) -> Tensor:
        """The given decision: outcome 1 accepts."""
        value: Any = ratio.tolist()
        p = Fraction(1) if value > 1 else value
        return torch.tensor(self._choose(len(self.drawn), [1 - p, p]) == 1)

    def _choose(self, name: Hashable, weights: list[Probability]) -> int:
        """The outcome of a draw; it is recorded in ``drawn``."""
        total = sum(weights)
        probs = [weight / total for weight in weights]
        possible = [i for i, p in enumerate(probs) if p > 0]
        first = self.chance.choice(possible) if self.chance else possible[0]
        outcome = self.choices.get(name, first)
        self.drawn[name] = probs, outcome
        return outcome


def outcomes(
    run: Callable[[Any], Any],
    matters: Callable[[Any, Hashable], bool] = lambda result, name: True,
    source: type[Replay] = Replay,
) -> Iterator[tuple[Any, Any, Choices]]:
    """Run a function for every outcome of its draws.

    Args:
        run: the function. It makes all its random decisions with its argument, a ``Replay``.
        matters: whether a draw must be decided, given the result and the name of the draw. A draw
            that never matters stays open, so that all its outcomes count as one.
        source: the class of the argument of ``run``.

    Yields:
        The probability of an outcome, the result of ``run``, and the decided draws. The
        probabilities sum to 1.
    """
    stack: list[tuple[Choices, Any]] = [({}, 1)]
    while stack:
        choices, probability = stack.pop()
        draws = source(choices)
        result = run(draws)
        for name, (probs, chosen) in draws.drawn.items():
            if name in choices or not matters(result, name):
                continue
            # Decide this draw here as it came out. Its other outcomes wait on the stack.
            for other, p in enumerate(probs):
                if other != chosen and p > 0:
                    stack.append(({**choices, name: other}, probability * p))
            choices, probability = {**choices, name: chosen}, probability * probs[chosen]
        yield probability, result, choices


class MergeError(AssertionError):
    """A draw that was left open changed the kept tree."""


class KeptTree(NamedTuple):
    """A tree after pruning.

    Attributes:
        probability: of this tree among all outcomes.
        tree: the tree.
        paths: for each node the tokens from the root's child down to it.
    """

    probability: Any
    tree: Tree
    paths: list[Path]


@dataclass(frozen=True)
class Enumerator:
    """The exact distribution of what cycles emit.

    Attributes:
        distributions: the target and the draft.
        pool: as in ``TreeOptions``.
        depth: as in ``TreeOptions``.
        verification: as in ``verify``.
        arithmetic: fractions or float64.
        walk: how the outcomes are enumerated. "jointly": every draw of build and verification,
            with ``verify`` on the whole tree. "by node": every draw of the build, then ``verify``
            on one node and its children at a time, once per different step. "merged": by node,
            and the only draws of the build that are decided are those of parents that keep a
            sampled or fill child.

    Raises:
        ValueError: for another ``walk``.
    """

    distributions: Distributions
    pool: PoolOptions
    depth: int
    verification: str
    arithmetic: Arithmetic
    walk: str = "jointly"

    def __post_init__(self):
        if self.walk not in WALKS:
            raise ValueError(f"walk is {self.walk!r}; choose one of {', '.join(WALKS)}")

    def kept_trees(self, prefix: Path, budgets: Sequence[int]) -> dict[int, list[KeptTree]]:
        """The different trees that one cycle may keep after a prefix.

        Args:
            prefix: tokens before the cycle.
            budgets: numbers of drafted nodes to keep.

        Returns:
            The trees of each budget. Their probabilities sum to 1.

        Raises:
            MergeError: if a draw that was merged changes the kept tree.
        """
        found: dict[int, dict[tuple, KeptTree]] = {budget: {} for budget in budgets}
        if self.walk == "merged":
            chance = random.Random(0)
            for budget in budgets:
                for probability, tree in self._merged(prefix, budget, chance):
                    _add(found[budget], probability, tree)
        else:
            for probability, growth, _ in outcomes(lambda draws: self._grow(prefix, draws)):
                for budget in budgets:
                    _add(found[budget], probability, _prune(prefix, growth, budget))
        return {budget: list(trees.values()) for budget, trees in found.items()}

    def _grow(self, prefix: Path, draws: Replay) -> Growth:
        """Grow a tree after a prefix with the real code."""
        draft, logits = self.distributions.draft, self.arithmetic.logits

        def expand(tokens: Tensor, ranks: Tensor, level: int) -> Tensor:
            expanded = zip(ranks.tolist(), tokens.tolist())
            draws.parents = [(*draws.parents[rank], token) for rank, token in expanded]
            return logits([draft((*prefix, *path)) for path in draws.parents])

        draws.parents = [()]
        options = TreeOptions(self.pool, total_token=2, depth=self.depth)
        target_ids = torch.tensor(self.distributions.draft_ids)
        return grow(logits([draft(prefix)])[0], expand, options, draws, target_ids)

    def _merged(
        self, prefix: Path, budget: int, chance: random.Random
    ) -> Iterator[tuple[Probability, Tree]]:
        """Yield (probability, tree) over the draws of parents that keep a sampled or fill child.

        Each tree is built twice more, with random outcomes of the other draws. It must stay equal.
        """

        def build(draws: Replay) -> tuple[Tree, set[Path]]:
            tree = _prune(prefix, self._grow(prefix, draws), budget)
            nodes = zip(_paths(tree), tree.kinds.tolist())
            return tree, {path[:-1] for path, kind in nodes if kind not in (LEAD, NO_KIND)}

        def matters(result: tuple[Tree, set[Path]], name: Any) -> bool:
            parent, _ = name
            return parent in result[1]

        for probability, (tree, _), choices in outcomes(build, matters):
            for _ in range(2):
                other, _ = build(Replay(choices, chance))
                if _key(other) != _key(tree):
                    raise MergeError(
                        f"after {prefix}, {budget} drafted nodes: "
                        "the kept tree depends on a draw outside of it"
                    )
            yield probability, tree

    def emitted(self, prefix: Path, trees: Iterable[tuple[Any, Tree, list[Path]]]) -> TextProbs:
        """The probability of each text that one cycle emits.

        Args:
            prefix: tokens before the cycle.
            trees: the kept trees of the cycle, each as in ``KeptTree``.
        """
        probs: TextProbs = defaultdict(int)
        steps: dict[tuple, dict[int, Any]] = {}
        for fields in trees:
            kept = KeptTree(*fields)
            if self.walk == "jointly":
                texts = self._jointly(prefix, kept)
            else:
                texts = self._by_node(prefix, kept, 0, kept.probability, steps)
            for text, probability in texts:
                probs[text] += probability
        return dict(probs)

    def _jointly(self, prefix: Path, kept: KeptTree) -> Iterator[tuple[Path, Probability]]:
        """Yield (text, probability) of one tree; ``verify`` runs on the whole tree."""

        def target(node: Tensor) -> Tensor:
            return self._target((*prefix, *kept.paths[node]))

        for probability, text, _ in outcomes(lambda draws: self._verify(kept.tree, target, draws)):
            yield text, kept.probability * probability

    def _by_node(
        self, prefix: Path, kept: KeptTree, node: int, reached: Any, steps: dict
    ) -> Iterator[tuple[Path, Probability]]:
        """Yield (text, probability) of the texts that pass through a node of one tree.

        ``verify`` runs on the node and its children. ``reached`` is the probability of getting to
        the node. ``steps`` holds what ``verify`` emitted in all steps so far.
        """
        path = kept.paths[node]
        star, children = _star(kept.tree, node)
        key = path, _key(star)
        if key not in steps:
            steps[key] = self._step(star, (*prefix, *path))
        for token, probability in steps[key].items():
            if token in children:
                child, passed = children[token], reached * probability
                yield from self._by_node(prefix, kept, child, passed, steps)
            else:
                yield (*path, token), reached * probability

    def _step(self, star: Tree, text: Path) -> dict[int, Any]:
        """The probability of each token that ``verify`` emits in one step after a text."""
        probs: dict[int, Any] = defaultdict(int)

        def run(draws: Replay) -> Path:
            return self._verify(star, lambda node: self._target(text), draws)

        for probability, (token,), _ in outcomes(run):
            probs[token] += probability
        return probs

    def _target(self, text: Path) -> Tensor:
        """The target's probabilities ``[V]`` after a text."""
        return self.arithmetic.probs(self.distributions.target(text))

    def _verify(self, tree: Tree, target: Callable[[Tensor], Tensor], draws: Replay) -> Path:
        """The tokens that the real code emits."""
        verified = verify(tree, target, draws, self.verification)
        if not verified.finite:
            raise AssertionError("verification met target probabilities that are not finite")
        return tuple(verified.tokens[: verified.count].tolist())

    def after_cycles(
        self, cycles: int, budget: int, prefix: Path = ()
    ) -> tuple[TextProbs, list[Tree]]:
        """The probability of each text that several cycles in a row emit.

        Args:
            cycles: number of cycles.
            budget: number of drafted nodes to keep in each cycle.
            prefix: tokens before the first cycle.

        Returns:
            The probabilities, and all kept trees of all cycles.
        """
        kept = self.kept_trees(prefix, (budget,))[budget]
        first, trees = self.emitted(prefix, kept), [tree for _, tree, _ in kept]
        if cycles == 1:
            return first, trees
        probs: TextProbs = defaultdict(int)
        for text, probability in first.items():
            rest, more_trees = self.after_cycles(cycles - 1, budget, (*prefix, *text))
            trees += more_trees
            for more, weight in rest.items():
                probs[(*text, *more)] += probability * weight
        return dict(probs), trees


def _prune(prefix: Path, growth: Growth, budget: int) -> Tree:
    """The real code's tree of the root and ``budget`` drafted nodes."""
    root = torch.tensor(prefix[-1] if prefix else 0)
    return prune(root, growth, budget + 1)


def _add(found: dict[tuple, KeptTree], probability: Any, tree: Tree) -> None:
    """Add a tree to those found; equal trees become one."""
    key = _key(tree)
    if key in found:
        probability = found[key].probability + probability
        found[key] = found[key]._replace(probability=probability)
    else:
        found[key] = KeptTree(probability, tree, _paths(tree))


def _paths(tree: Tree) -> list[Path]:
    """The tokens from the root's child down to each node."""
    paths: list[Path] = [()]
    for parent, token in zip(tree.parents[1:].tolist(), tree.tokens[1:].tolist()):
        paths.append((*paths[parent], token))
    return paths


def _key(tree: Tree) -> tuple:
    """Everything of a tree that verification reads."""
    rows = tree.pool_rows[sorted(set(tree.parents[tree.valid].tolist()))]
    tokens = torch.where(tree.valid, tree.tokens, 0)  # padding may hold anything
    parts = (tokens, tree.parents, tree.kinds, tree.valid, tree.tail[rows], tree.q_tail[rows])
    return tuple(tuple(part.flatten().tolist()) for part in parts)


def _star(tree: Tree, node: int) -> tuple[Tree, dict[int, int]]:
    """A tree of a node and its children, which verification leaves after one step.

    Returns:
        The tree, and the index in the whole tree of each child by its token.
    """
    nodes = torch.cat((torch.tensor([node]), tree.children(node).nonzero()[:, 0]))
    zeros, first = torch.zeros_like(nodes), torch.arange(len(nodes)) == 0
    star = replace(
        tree,
        tokens=tree.tokens[nodes],
        parents=zeros,
        levels=torch.where(first, 0, 1),
        kinds=torch.where(first, NO_KIND, tree.kinds[nodes]),
        valid=~zeros.bool(),
        log_scores=tree.log_scores[nodes],
        mask=torch.eye(len(nodes), dtype=torch.bool),
        pool_rows=tree.pool_rows[nodes],
        max_levels=0,
    )
    return star, dict(zip(tree.tokens[nodes[1:]].tolist(), nodes[1:].tolist()))
