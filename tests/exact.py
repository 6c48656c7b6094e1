"""Exact output laws of the real code: every outcome of its draws, enumerated by replay, in float64."""

import itertools
import sys
import types
from pathlib import Path

import torch

import rheo
from rheo import PoolOptions, TreeOptions

RHEO_FILES = ("draws", "pool", "tree", "verification")


def load_rheo(patches: dict[str, list[tuple[str, str]]] | None = None) -> types.SimpleNamespace:
    """The functions of ``rheo``, or of a copy of its source with textual ``patches`` {file: [(old, new)]}."""
    package = f"patched_rheo_{len(sys.modules)}"
    sys.modules[package] = types.ModuleType(package)
    functions = {}
    for name in RHEO_FILES:
        source = (Path(rheo.__file__).parent / f"{name}.py").read_text().replace("from rheo.", f"from {package}.")
        for old, new in (patches or {}).get(name, []):
            assert source.count(old) == 1, f"the patch of {name}.py does not apply once: {old!r}"
            source = source.replace(old, new)
        module = types.ModuleType(f"{package}.{name}")
        sys.modules[module.__name__] = module
        exec(compile(source, f"{name}.py (patched)", "exec"), module.__dict__)
        functions.update({k: v for k, v in module.__dict__.items() if callable(v)})
    return types.SimpleNamespace(**functions)


class ReplayedDraws:
    """Stands in for ``rheo.Draws``: follows a script of outcomes, then takes first branches and records the rest."""

    def __init__(self, script):
        self.script, self.used, self.weight, self.branches = script, [], 1.0, []

    def _choose(self, law):
        """Index of the outcome taken from ``law``, a list of probabilities."""
        possible = [i for i, w in enumerate(law) if w > 0]
        step = len(self.used)
        choice = self.script[step] if step < len(self.script) else possible[0]
        if step >= len(self.script):
            self.branches += [[*self.used, other] for other in possible[1:]]
        self.used.append(choice)
        self.weight *= law[choice]
        return choice

    def token(self, weights):
        rows = weights.double().reshape(-1, weights.shape[-1])
        rows = (rows / rows.sum(-1, keepdim=True)).tolist()
        return torch.tensor([self._choose(row) for row in rows]).reshape(weights.shape[:-1])

    def accept(self, ratio):
        probabilities = ratio.double().nan_to_num(0).clamp(0, 1).reshape(-1).tolist()
        return torch.tensor([self._choose([1 - a, a]) == 1 for a in probabilities]).reshape(ratio.shape)


class SharedUniformDraws(ReplayedDraws):
    """A wrong source: the rows of one call share a single uniform (inverse-CDF sampling)."""

    def token(self, weights):
        rows = weights.double().reshape(-1, weights.shape[-1])
        cdf = (rows / rows.sum(-1, keepdim=True)).cumsum(-1).clamp_max(1)
        cdf[:, -1] = 1
        edges = sorted({0.0, *cdf.flatten().tolist()})
        piece = self._choose([b - a for a, b in zip(edges, edges[1:])])
        middle = (edges[piece] + edges[piece + 1]) / 2
        return (cdf > middle).int().argmax(-1).reshape(weights.shape[:-1])


def enumerate_runs(run, draws_class=ReplayedDraws):
    """Yield (probability, result) of ``run(draws)`` over every outcome of its draws."""
    scripts = [[]]
    while scripts:
        draws = draws_class(scripts.pop())
        result = run(draws)
        scripts += draws.branches
        yield draws.weight, result


class RandomLaws:
    """Target and draft laws that depend on the whole path, over a vocabulary of ``vocab`` tokens.

    The kinds of law are mixed: Dirichlet, ties, zeros, one certain token.
    """

    def __init__(self, vocab, seed, draft_ids=None):
        self.vocab, self.seed = vocab, seed
        self.draft_ids = draft_ids if draft_ids is not None else list(range(vocab))
        self.cache = {}

    def _law(self, generator, size):
        kind = torch.randint(6, (1,), generator=generator).item()
        weights = torch.empty(size, dtype=torch.float64).exponential_(generator=generator)
        if kind == 1:  # ties
            weights = torch.randint(1, 3, (size,), generator=generator).double()
        if kind == 2:  # zeros, at least one token left
            alive = torch.rand(size, generator=generator) < 0.6
            alive[torch.randint(size, (1,), generator=generator)] = True
            weights = weights * alive
        if kind == 3:  # a certain token
            weights = torch.nn.functional.one_hot(torch.randint(size, (1,), generator=generator)[0], size).double()
        if kind == 4:  # uniform
            weights = torch.ones(size, dtype=torch.float64)
        if kind == 5:  # peaked
            weights = weights**3
        return weights / weights.sum()

    def at(self, path):
        """(p [vocab], draft logits [draft vocab]) after the drafted ``path``."""
        if path not in self.cache:
            generator = torch.Generator().manual_seed(hash((self.seed, *path)) & 0x7FFFFFFF)
            p = self._law(generator, self.vocab)
            q = self._law(generator, len(self.draft_ids))
            self.cache[path] = p, q.log().clamp_min(-1000.0)
        return self.cache[path]


def tree_paths(tree):
    paths = [()]
    for node in range(1, tree.tokens.numel()):
        paths.append((*paths[tree.parents[node]], tree.tokens[node].item()))
    return paths


def kept_key(tree):
    """Everything of a tree that verification reads, so that equal keys have equal verification laws."""
    rows = [tree.pool_rows[n].item() for n in sorted(set(tree.parents[tree.valid].tolist()))]
    parts = (tree.tokens, tree.parents, tree.kinds, tree.valid, tree.support[rows], tree.q_tail[rows])
    return tuple(tuple(x.flatten().tolist()) for x in parts)


def grown_trees(code, laws, pool: PoolOptions, depth, budgets, draws_class=ReplayedDraws):
    """Per budget (drafted nodes), {key: [probability, tree]} over all draws of the construction."""
    options = TreeOptions(pool, total_token=2, depth=depth)
    target_ids = torch.tensor(laws.draft_ids)

    def run(draws):
        frontier = [()]

        def expand(tokens, parent_ranks, level):
            nonlocal frontier
            frontier = [(*frontier[r], t) for r, t in zip(parent_ranks.tolist(), tokens.tolist())]
            return torch.stack([laws.at(path)[1] for path in frontier])

        return code.grow(laws.at(())[1], expand, options, draws, target_ids)

    trees = {budget: {} for budget in budgets}
    for weight, growth in enumerate_runs(run, draws_class):
        for budget in budgets:
            tree = code.prune(torch.tensor(0), growth, budget + 1)
            trees[budget].setdefault(kept_key(tree), [0.0, tree])[0] += weight
    return trees


def emitted_law(code, laws, trees, verification="rheo"):
    """{emitted tokens: probability} of one cycle."""
    law = {}
    for weight, tree in trees.values():
        paths = tree_paths(tree)

        def run(draws):
            verdict = code.verify(tree, lambda node: laws.at(paths[node])[0], draws, verification)
            assert bool(verdict.finite)
            return tuple(verdict.tokens[: verdict.count].tolist())

        for probability, tokens in enumerate_runs(run):
            law[tokens] = law.get(tokens, 0.0) + weight * probability
    return law


def largest_difference(laws, emitted, length):
    """Largest |emitted, continued by the target, minus target| over all sequences of ``length`` tokens."""

    def target(tokens, start=0):
        probability = 1.0
        for i in range(start, len(tokens)):
            probability *= laws.at(tokens[:i])[0][tokens[i]].item()
        return probability

    worst = 0.0
    for sequence in itertools.product(range(laws.vocab), repeat=length):
        observed = sum(emitted.get(sequence[:n], 0.0) * target(sequence, n) for n in range(1, length + 1))
        worst = max(worst, abs(observed - target(sequence)))
    return worst
