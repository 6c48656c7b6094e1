"""Wrong versions of the code, and the test that kills each of them.

Each mutant is a small patch that a plausible implementer could write. Most are killed by the exact
output distribution, enumerated in float64 (``rheo.certify``): in a few small settings it is off by
more than 1e-3, where the right code stays below 1e-12. A mutant that does not change the
distribution, or changes it by less, has a test of its own here.
"""

import itertools
from dataclasses import replace
from fractions import Fraction
from math import isnan

import pytest
import torch
from support.patched import load_rheo

from eagle.model.options import DecodingOptions
from rheo import AUTO
from rheo.certify.settings import Setting

POWER = 1e-3  # an exact difference above this one kills a mutant
SCORED = "own, proxy = score_rule(q, weights)"
STORED = "return Pools(tokens, torch.log(scores), kinds, tail, weights)"
SURVIVORS = "best = best_first(growth.scores, total_token)[1]"
RESIDUAL = "p.scatter_add(0, tail, -q_tail).clamp_min(0)"
LEADS = "n_lead = options.lead_slots(n_support)"


def proxy(expression):
    """Score the sampled slot by another expression."""
    changed = f"own, proxy = q, {expression}".replace("sampled_proxy(q, n_lead)", "proxy")
    return {"pool": [(SCORED, f"{SCORED}\n    {changed}")]}


def stored(tail="tail", weights="weights"):
    """Store another tail, or other weights, than the token was drawn from."""
    return {
        "pool": [(STORED, f"return Pools(tokens, torch.log(scores), kinds, {tail}, {weights})")]
    }


def residual(expression):
    """Compute another residual."""
    return {"verification": [(RESIDUAL, expression)]}


MUTANTS = {
    "the token's own probability as proxy": proxy("q.gather(1, ranks[:, n_lead : n_lead + 1])"),
    "the paper's ad-hoc proxy (half of q(x_m))": proxy("q[:, max(n_lead - 1, 0)][:, None] / 2"),
    "0.6 times the proxy, not clamped to q(x_{m+1})": proxy("sampled_proxy(q, n_lead) * 0.6"),
    "ties of survival broken by token id": {
        "tree": [
            (
                SURVIVORS,
                "by_id = torch.cat([torch.tensor([-1]), *(x.tokens.flatten() for x in levels)])\n"
                "    by_id = by_id.argsort(stable=True)\n"
                "    best = by_id[best_first(growth.scores[by_id], total_token)[1]]",
            )
        ]
    },
    "ties of survival in the order that topk happens to give, highest index first": {
        "tree": [
            (
                SURVIVORS,
                "last = growth.scores.numel() - 1\n"
                "    best = last - best_first(growth.scores[1:].flip(0), total_token - 1)[1]\n"
                "    best = torch.cat([offsets[:1], best])",
            )
        ]
    },
    "fill ranked before sampled at ties": {
        "pool": [
            ("drawn, fill + (fill >= drawn)), 1)", "fill + (fill >= drawn), drawn), 1)"),
            (
                "    scores[:, n_lead : n_lead + 1] = proxy\n",
                "    scores[:, width - 1 :] = proxy\n",
            ),
            (
                "+ (SAMPLED,) + (FILL,) * width)[:width]",
                "+ (FILL,) * (width - n_lead - 1) + (SAMPLED,))",
            ),
        ]
    },
    "min(1, p/q) on lead and fill tokens": {
        "verification": [
            (
                "    if first is None or is_lead is None:\n",
                "    point = tree.children(node) & ~tree.sampled\n"
                "    candidate = pick(tree.tokens, point.int().argmax())\n"
                "    q = pick(tree.log_scores, point.int().argmax()).exp()\n"
                "    lenient = draws.accept(torch.where(point.any(), pick(p, candidate) / q, 0))\n"
                "    token = torch.where(lenient, candidate, token)\n"
                "    if first is None or is_lead is None:\n",
            )
        ]
    },
    "q instead of q_tail in the ratio": {
        "tree": [("q_tail = weights / weights.sum(-1, keepdim=True)", "q_tail = weights")]
    },
    "tail judged at another temperature than it was drawn at": stored(weights="weights.square()"),
    "support truncated differently in drafting and in verification": stored(
        weights="weights * (torch.arange(n_support - n_lead) < n_support - n_lead - 1)"
    ),
    "q_tail that holds a second draw": stored(
        weights="torch.zeros_like(weights).scatter(1, draws.token(weights)[:, None], 1.0)"
    ),
    "RRSw without taking the lead tokens out of p": {
        "verification": [("p = normalised(p.masked_fill(lead > 0, 0), otherwise=p)", "p = p + 0")]
    },
    "q_tail sorted again, ties the other way round": stored(
        tail="vocab - 1 - logits.flip(-1).sort(descending=True, stable=True).indices"
        "[:, n_lead:n_support]"
    ),
    "residual skipped": residual("p"),
    "residual of a sampled slot that did not survive": {
        "verification": [("* (child > 0)\n", "* True\n")]
    },
    "absolute difference as residual": residual("p.scatter_add(0, tail, -q_tail).abs()"),
    "residual of the accepted proposals, norm(min(p, q_tail))": residual(
        "torch.minimum(p, (p * 0).scatter_add(0, tail, q_tail))"
    ),
    "q_tail of the wrong parent after pruning": {
        "tree": [("        pool_rows=row_of[nodes],", "        pool_rows=row_of[nodes].roll(1),")]
    },
    "kept set not closed under parents: proxies above 1": proxy("sampled_proxy(q, n_lead) * 1.65"),
    "padding that passes for drafted": {"tree": [("torch.where(valid, kind, NO_KIND)", "kind")]},
}
AUTO_MUTANTS = {
    "the sampled slot scored by the token drawn": {
        "pool": [(SCORED, SCORED + "\n    proxy = own.gather(1, ranks[:, n_lead : n_lead + 1])")]
    },
    "the sampled slot scored lower than the fill slots that it should beat": {
        "scores": [("torch.maximum(sampled, own.amax(-1, keepdim=True))", "sampled")]
    },
    "as many lead tokens as the draws of the level before say": {
        "pool": [
            (LEADS, "n_lead = min(AUTO_LEAD if parents == 1 else PEEK[0], width - 1)"),
            (SCORED, "PEEK[0] = 0 if ranks[:, n_lead].min() > n_lead else 2\n    " + SCORED),
            ("AUTO_LEAD = 1", "PEEK, AUTO_LEAD = [1], 1"),
            *stored("ids", "torch.nn.functional.pad(weights, (n_lead, 0))")["pool"],
        ],
    },
}
FORGOTTEN_D2T = {
    "tree": [("tail=in_target_vocabulary(draft_tail, growth.target_ids)", "tail=draft_tail")]
}


BY_ID_IN_EXPANSION = {
    "tree": [
        (
            "best, order = best_first(scores[-1], pool.size)",
            "by_id = levels[-1].tokens.flatten().argsort(stable=True)\n"
            "        order = by_id[best_first(scores[-1][by_id], pool.size)[1]]\n"
            "        best = scores[-1][order]",
        )
    ]
}


def settings(draft_ids=None, seeds=6):
    """One level of three slots, then two levels of two slots."""
    exact = Setting("", 4, 0, 3, 1, 0, (1, 2, 3), draft_ids=draft_ids, arithmetic="float64")
    for seed, m, verification in itertools.product(range(seeds), (1, 0), ("rheo", "rrsw")):
        yield replace(exact, distributions=seed, m=m, verification=verification)
    deep = replace(exact, vocab=3, size=2, depth=1, budgets=(2, 3, 4, 5), walk="merged")
    for seed, m in itertools.product(range(seeds), (1, 0)):
        yield replace(deep, distributions=seed, m=m)


def auto_settings():
    """Settings for m = auto.

    First a flat ``q_tail`` over many tokens: there a fill slot may be worth more than the sampled
    slot. Then trees whose branches could depend on each other.
    """
    exact = Setting("", 7, 0, 3, AUTO, 0, (2,), temperature=50.0, arithmetic="float64")
    for seed in range(12):
        yield replace(exact, distributions=seed)
    for seed, temperature in itertools.product(range(6), (2.0, 1.0)):
        yield replace(
            exact, vocab=4, distributions=seed, budgets=(1, 2, 3), temperature=temperature
        )
    deep = replace(exact, vocab=3, depth=1, budgets=(2, 3, 4, 5), temperature=2.0, walk="by node")
    for seed, size in itertools.product(range(6), (2, 3)):
        yield replace(deep, distributions=seed, size=size)


def largest_difference(code, cases) -> float:
    """The first exact difference above ``POWER``, or else the largest one."""
    worst = 0.0
    for setting in cases:
        # For one level every draw is walked at once. For more levels it is enough to walk the
        # verification node by node.
        setting = replace(setting, walk="jointly") if setting.depth == 0 else setting
        try:
            for certificate in code.certify(setting):
                difference = certificate.comparison.difference
                worst = max(worst, float("inf") if isnan(difference) else difference)
        except (code.MergeError, IndexError):  # an orphan's parent is not among the nodes
            return float("inf")
        if worst > POWER:
            break
    return worst


def fractions(*numbers):
    """Whole numbers over their sum."""
    return tuple(Fraction(x, sum(numbers)) for x in numbers)


def test_the_right_code_survives_what_kills_the_mutants():
    cases = (*settings(), *auto_settings(), *settings(draft_ids=(2, 0), seeds=3))
    assert largest_difference(load_rheo(), cases) < 1e-12


def test_auto_with_rrsw_is_not_lossless_and_is_refused():
    """RRSw tries the lead tokens first, but the sampled slot may rank before one of them.

    Whether the lead token survives then depends on the sampled token.
    """
    exact = Setting("", 3, 0, 2, AUTO, 1, (2, 3), verification="rrsw", arithmetic="float64")
    cases = [replace(exact, distributions=seed) for seed in range(8)]
    assert largest_difference(load_rheo(), cases) > POWER
    right = [replace(setting, verification="rheo") for setting in cases]
    assert largest_difference(load_rheo(), right) < 1e-12
    with pytest.raises(ValueError, match="m='auto' with verification 'rrsw' is not lossless"):
        DecodingOptions(sampling="rheo", m=AUTO, verification="rrsw")


@pytest.mark.parametrize("name", AUTO_MUTANTS)
def test_mutant_of_auto_changes_the_output_distribution(name):
    assert largest_difference(load_rheo(AUTO_MUTANTS[name]), auto_settings()) > POWER


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_changes_the_output_distribution(name):
    assert largest_difference(load_rheo(MUTANTS[name]), settings()) > POWER


def test_mutant_that_forgets_d2t_in_the_residual_changes_the_output_distribution():
    assert largest_difference(load_rheo(FORGOTTEN_D2T), settings(draft_ids=(2, 0))) > POWER


def test_mutant_that_filters_after_the_acceptance_test_changes_the_output_distribution():
    """The mutant accepts by the unfiltered target and filters only the residual.

    The filter keeps the target's two most likely tokens.
    """
    mutant = load_rheo(
        {
            "verification": [
                (
                    "draws.token(residual(p, tail, q_tail))",
                    "draws.token(normalised(residual(p, tail, q_tail)"
                    " * (kept := p >= p.sort(descending=True)[0][1]), otherwise=p * kept))",
                )
            ]
        }
    )
    unfiltered, filtered = fractions(4, 3, 2, 1), fractions(4, 3, 0, 0)

    def difference(code, given, m):
        """Distance to the filtered target, for code that is given the target ``given``."""
        setting = Setting("", 4, 0, 2, m, 0, (2,), arithmetic="float64")
        given = code.ConstantDistributions(given, fractions(1, 4, 1, 4))
        work = code.enumerator(setting, given)
        texts = work.emitted((), work.kept_trees((), (2,))[2])
        first = [sum(w for text, w in texts.items() if text[0] == token) for token in range(4)]
        return max(abs(first[token] - float(filtered[token])) for token in range(4))

    assert difference(load_rheo(), filtered, 0) < 1e-12  # the right code gets the filtered target
    assert difference(mutant, unfiltered, None) < 1e-12  # no sampled slot, no acceptance test
    assert difference(mutant, unfiltered, 0) > POWER


def test_mutant_that_shares_one_uniform_among_the_parents_of_a_level_changes_the_distribution():
    """Sharing ties the survival of a sampled slot to the token in it.

    The first child of the root has score 0.7. The sampled token of its pool decides whether its
    fill slot scores 0.21 or 0.14. The second child has score 0.3 and a sampled slot of score 0.15.
    Six nodes are kept. So the first child's sample decides whether the second's slot survives.
    """

    def token(self, weights):
        """Invert one uniform for all rows."""
        edges = (weights / weights.sum(-1, keepdim=True)).cumsum(-1).clamp_max(1)
        edges[..., -1] = 1
        cuts = sorted({0.0, *edges.flatten().tolist()})
        piece = self._choose(len(self.drawn), [b - a for a, b in zip(cuts, cuts[1:])])
        return (edges > (cuts[piece] + cuts[piece + 1]) / 2).int().argmax(-1)

    def certified(code):
        class Given(code.ConstantDistributions):
            def draft(self, path):
                weights = {(): (7, 2, 1), (0,): (5, 3, 2)}.get(path, (2, 3, 5))
                return fractions(*(weights if len(path) < 2 else (1, 1, 1)))

        setting = Setting("", 3, 0, 3, 1, 1, (4, 5, 6, 7), arithmetic="float64")
        given = Given(fractions(2, 3, 5), fractions(1, 1, 1))
        return max(c.comparison.difference for c in code.certify(setting, given))

    assert certified(load_rheo()) < 1e-12
    mutant = load_rheo()
    per_row = mutant.Replay.token
    mutant.Replay.token = lambda self, weights: (token if len(weights.shape) == 2 else per_row)(
        self, weights
    )
    assert certified(mutant) > POWER


def test_mutant_that_accepts_with_the_uniform_of_the_sampled_token_changes_the_distribution():
    """The mutant samples the token by inverting one uniform u, and accepts it if u < p/q_tail."""
    code = load_rheo()

    class SharedUniform(code.Replay):
        def token(self, weights):
            index = super().token(weights)
            if len(weights.shape) == 2:
                probs, taken = list(self.drawn.values())[-1]
                self.piece = sum(probs[:taken]), sum(probs[: taken + 1])
            return index

        def accept(self, ratio):
            low, high = self.piece
            return super().accept(((ratio - low) / (high - low)).clamp(0, 1))

    def difference(draws_class):
        given = code.ConstantDistributions(fractions(1, 2, 3, 4), fractions(4, 3, 2, 1))
        arithmetic = code.Arithmetic("float64")
        options = code.TreeOptions(code.PoolOptions(2, 0, 0), 3, 0)

        def run(draws):  # one level, built and verified with one source of random decisions
            draws.parents = [()]
            logits = arithmetic.logits([given.draft(())])[0]
            tree = code.build_tree(torch.tensor(0), logits, None, options, draws)
            p = arithmetic.probs(given.target(()))
            verified = code.verify(tree, lambda node: p, draws)
            return tuple(verified.tokens[: verified.count].tolist())

        texts = {}
        for weight, text, _ in code.outcomes(run, source=draws_class):
            texts[text] = texts.get(text, 0.0) + weight
        return code.compare(texts, given, arithmetic).difference

    assert difference(code.Replay) < 1e-12
    assert difference(SharedUniform) > POWER


def test_mutant_whose_acceptance_test_is_not_strict_accepts_a_ratio_of_zero(monkeypatch):
    """Too small for a distribution: a uniform is exactly 0 once in 2^24 draws."""
    monkeypatch.setattr(torch, "rand", lambda shape, **kwargs: torch.zeros(shape))
    generator = torch.Generator()
    assert not load_rheo().Draws(generator).accept(torch.tensor(0.0))
    mutant = load_rheo({"draws": [("return uniform < ratio", "return uniform <= ratio")]})
    assert mutant.Draws(generator).accept(torch.tensor(0.0))


def test_mutant_that_takes_z_as_one_minus_the_leads_scores_below_a_fill_slot():
    """Too small for a distribution: 1 - q(x_1) rounds to 0, the sum over the tail does not."""
    logits = torch.tensor([[0.0, -20.0, -20.5, -21.0]])

    def scores(code):
        source = code.Draws(torch.Generator().manual_seed(0))
        return code.build_pools(logits, code.PoolOptions(3, 1, 0), source).log_proxy[0].exp()

    right = scores(load_rheo())
    assert right[1] >= right[2] > 0
    mutant = load_rheo(
        {
            "scores": [
                (
                    "    z = tail.sum(-1, keepdim=True)\n",
                    "    z = 1 - q[:, :n_lead].sum(-1, keepdim=True)\n",
                ),
                (
                    "    return z.clamp(tail[:, :1], q[:, n_lead - 1 : n_lead])",
                    "    return torch.minimum(q[:, n_lead - 1 : n_lead], z)",
                ),
            ]
        }
    )
    assert scores(mutant)[1] < scores(mutant)[2]


def test_mutant_that_breaks_ties_by_token_id_in_the_expansion_only_builds_another_tree():
    """The output distribution stays the same, but the tree is not the paper's.

    Which of two tied nodes is expanded depends on samples above or beside them, never on their own
    pools.
    """
    mutant, right = load_rheo(BY_ID_IN_EXPANSION), load_rheo()
    assert largest_difference(mutant, settings()) < 1e-12
    # Scores 1/2 and 1/4; below them 1/4, 1/8 and 1/8, 1/16. The paths (0, 2) and (1, 0) tie.
    drafts = {(): (8, 4, 2, 2), (0,): (2, 2, 4, 8)}

    def expanded(code):
        frontier = [()]

        def logits(path):
            return torch.tensor(drafts.get(path, drafts[()]), dtype=torch.float64).log()

        def expand(tokens, ranks, level):
            nonlocal frontier
            frontier = [(*frontier[r], t) for r, t in zip(ranks.tolist(), tokens.tolist())]
            return torch.stack([logits(path) for path in frontier])

        code.grow(logits(()), expand, code.TreeOptions(code.PoolOptions(2, None), 7, 2), None)
        return frontier

    assert expanded(right) == [(0, 3), (0, 2)] and expanded(mutant) == [(0, 3), (1, 0)]


def test_two_draft_ids_for_one_target_id_are_lossless_here():
    """Siblings with one target id only waste a slot; loading refuses such a head all the same."""
    assert largest_difference(load_rheo(), settings(draft_ids=(2, 2), seeds=3)) < 1e-12
