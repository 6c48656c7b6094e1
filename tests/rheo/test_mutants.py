"""Wrong versions of the code, each a small patch that a plausible implementer could write, and the test that kills it.

Most are killed by the exact output law: enumerated in float64 (``rheo.enumeration``), it is off by more than 1e-3 somewhere in
a few small settings, where the right code stays under 1e-12. Wrong sources of randomness replace the certifier's own. What does
not change a law, or changes it by less, is killed by the test named here.
"""

import itertools
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from support.patched import load_rheo

from eagle.model.options import DecodingOptions
from rheo import AUTO
from rheo.certify.certificates import Setting

POWER = 1e-3  # exact difference that counts as killed
PROXY = "(q, sampled_proxy(q, n_lead))"
AUTO_PROXY = "acceptance_scores(q, weights) if auto"
STORED = "kinds, tail, weights)\n\n\n"


def proxy(expression):
    """The sampled slot has another score."""
    return {"pool": [(PROXY, f"(q, {expression})")]}


def pool_law(expression):
    """The pool hands out another law than it drew from."""
    return {"pool": [(STORED, f"kinds, tail, {expression})\n\n\n")]}


MUTANTS = {
    "the token's own probability as proxy": proxy("q.gather(1, ranks[:, n_lead : n_lead + 1])"),
    "the paper's ad-hoc proxy (half of q(x_m))": proxy("q[:, max(n_lead - 1, 0)][:, None] / 2"),
    "0.6 times the proxy, not clamped to q(x_{m+1})": proxy("sampled_proxy(q, n_lead) * 0.6"),
    "ties of survival broken by token id": {
        "tree": [(
            "    nodes = best_first(growth.scores, total_token)[1].sort().values",
            "    by_id = torch.cat([torch.tensor([-1]), *(pools.tokens.flatten() for pools in levels)]).argsort(stable=True)\n"
            "    nodes = by_id[best_first(growth.scores[by_id], total_token)[1]].sort().values",
        )]
    },
    "ties of survival in the order that topk happens to give, highest place first": {
        "tree": [(
            "    nodes = best_first(growth.scores, total_token)[1].sort().values",
            "    last = growth.scores.numel() - 1\n"
            "    nodes = torch.cat([offsets[:1], last - best_first(growth.scores[1:].flip(0), total_token - 1)[1]]).sort().values",
        )]
    },
    "fill ranked before sampled at ties": {
        "pool": [
            ("drawn, fill + (fill >= drawn)), 1)", "fill + (fill >= drawn), drawn), 1)"),
            ("    scores[:, n_lead : n_lead + 1] = proxy\n", "    scores[:, width - 1 :] = proxy\n"),
            ("+ (SAMPLED,) + (FILL,) * width)[:width]", "+ (FILL,) * (width - n_lead - 1) + (SAMPLED,))"),
        ]
    },
    "min(1, p/q) on lead and fill tokens": {
        "verification": [(
            "    return token if first is None",
            "    point = tree.children(node) & ~tree.sampled\n"
            "    candidate = pick(tree.tokens, point.int().argmax())\n"
            "    q = pick(tree.log_scores, point.int().argmax()).exp()\n"
            "    lenient = draws.accept(torch.where(point.any(), pick(p, candidate) / q, 0))\n"
            "    token = torch.where(lenient, candidate, token)\n    return token if first is None",
        )]
    },
    "q instead of q_tail in the ratio": {"tree": [("weights / weights.sum(-1, keepdim=True)", "weights")]},
    "tail judged at another temperature than it was drawn at": pool_law("weights.square()"),
    "support truncated differently in drafting and in verification": pool_law("weights * (torch.arange(n_support - n_lead) < n_support - n_lead - 1)"),
    "q_tail that holds a second draw": pool_law("torch.zeros_like(weights).scatter(1, draws.token(weights)[:, None], 1.0)"),
    "RRSw without taking the lead tokens out of p": {
        "verification": [("p = normalised(p.masked_fill(lead > 0, 0), otherwise=p)", "p = p + 0")]
    },
    "q_tail sorted again, ties the other way round": {
        "pool": [(STORED, "kinds, vocab - 1 - logits.flip(-1).sort(descending=True, stable=True).indices[:, n_lead:n_support], weights)\n\n\n")]
    },
    "residual skipped": {"verification": [("p.scatter_add(0, tail, -q_tail).clamp_min(0)", "p")]},
    "residual of a sampled slot that did not survive": {"verification": [("* (child > 0)\n", "* True\n")]},
    "absolute difference as residual": {
        "verification": [("p.scatter_add(0, tail, -q_tail).clamp_min(0)", "p.scatter_add(0, tail, -q_tail).abs()")]
    },
    "residual of the accepted proposals, norm(min(p, q_tail))": {
        "verification": [("p.scatter_add(0, tail, -q_tail).clamp_min(0)", "torch.minimum(p, (p * 0).scatter_add(0, tail, q_tail))")]
    },
    "q_tail of the wrong parent after pruning": {
        "tree": [("        pool_rows=row_of[nodes],", "        pool_rows=row_of[nodes].roll(1),")]
    },
    "kept set not closed under parents: proxies above 1": proxy("sampled_proxy(q, n_lead) * 1.65"),
    "padding that passes for drafted": {"tree": [("torch.where(valid, kind, NO_KIND)", "kind")]},
}  # fmt: skip
AUTO_MUTANTS = {
    "the sampled slot scored by the token drawn": {
        "pool": [
            (
                AUTO_PROXY,
                "(q, acceptance_scores(q, weights)[0].gather(1, ranks[:, n_lead : n_lead + 1])) if auto",
            )
        ]
    },
    "the sampled slot scored lower than the fill slots that it should beat": {
        "pool": [
            (
                "torch.maximum(common.sum(-1, keepdim=True).clamp_max(1), own.amax(-1, keepdim=True))",
                "common.sum(-1, keepdim=True).clamp_max(1)",
            )
        ]
    },
    "as many lead tokens as the draws of the level before say": {
        "pool": [
            ("min(AUTO_LEAD, width - 1)", "min(AUTO_LEAD if parents == 1 else PEEK[0], width - 1)"),
            (
                "    own, proxy = ",
                "    PEEK[0] = 0 if ranks[:, n_lead].min() > n_lead else 2\n    own, proxy = ",
            ),
            ("AUTO_LEAD = 1", "PEEK, AUTO_LEAD = [1], 1"),
            (STORED, "kinds, ids, torch.nn.functional.pad(weights, (n_lead, 0)))\n\n\n"),
        ],
    },
}
FORGOTTEN_D2T = {
    "tree": [
        (
            "in_target_vocabulary(torch.cat([pools.draft_tail for pools in levels]), growth.target_ids)",
            "torch.cat([pools.draft_tail for pools in levels])",
        )
    ]
}


def settings(draft_ids=None, seeds=6):
    """One level of three slots, then two levels of two and of three."""
    for distributions, m in itertools.product(range(seeds), (1, 0)):
        for verification in ("rheo", "rrsw"):
            yield Setting(
                "",
                4,
                distributions,
                3,
                m,
                0,
                (1, 2, 3),
                verification=verification,
                draft_ids=draft_ids,
                arithmetic="float64",
            )
    for distributions, (m, size) in itertools.product(range(seeds), ((1, 2), (0, 2))):
        yield Setting(
            "",
            3,
            distributions,
            size,
            m,
            1,
            (2, 3, 4, 5),
            draft_ids=draft_ids,
            arithmetic="float64",
            walk="merged",
        )


def auto_settings():
    """A flat ``q_tail`` over many tokens, where fill slots may be worth more than the sampled one; then branches that could hear of each other."""
    for distributions in range(12):
        yield Setting(
            "", 7, distributions, 3, AUTO, 0, (2,), temperature=50.0, arithmetic="float64"
        )
    for distributions, temperature in itertools.product(range(6), (2.0, 1.0)):
        yield Setting(
            "",
            4,
            distributions,
            3,
            AUTO,
            0,
            (1, 2, 3),
            temperature=temperature,
            arithmetic="float64",
        )
    for distributions, size in itertools.product(range(6), (2, 3)):
        yield Setting(
            "",
            3,
            distributions,
            size,
            AUTO,
            1,
            (2, 3, 4, 5),
            temperature=2.0,
            arithmetic="float64",
            walk="by node",
        )


def killed(code, cases) -> float:
    """The first exact difference above ``POWER``, else the largest one."""
    worst = 0.0
    for setting in cases:
        # Node by node is enough for the verification; every draw of the construction is walked.
        try:
            for certificate in code.certify(
                replace(setting, walk="jointly") if setting.depth == 0 else setting
            ):
                difference = certificate.comparison.difference
                worst = max(
                    worst, difference if difference == difference else float("inf")
                )  # NaN is not small
        except (code.MergeError, IndexError):  # an orphan's parent is not among the nodes
            return float("inf")
        if worst > POWER:
            break
    return worst


def test_the_right_code_survives_what_kills_the_mutants():
    assert (
        killed(
            load_rheo(),
            itertools.chain(settings(), auto_settings(), settings(draft_ids=(2, 0), seeds=3)),
        )
        < 1e-12
    )


def test_auto_with_rrsw_fails_the_exact_law_and_is_refused():
    """The sampled slot may outrank a lead token, which RRSw tries first: whether it is there then hangs on the draw."""
    cases = [
        Setting("", 3, distributions, 2, AUTO, 1, (2, 3), verification="rrsw", arithmetic="float64")
        for distributions in range(8)
    ]
    assert killed(load_rheo(), cases) > POWER
    assert killed(load_rheo(), [replace(setting, verification="rheo") for setting in cases]) < 1e-12
    with pytest.raises(ValueError, match="m='auto' with verification 'rrsw' is not lossless"):
        DecodingOptions(sampling="rheo", m=AUTO, verification="rrsw")


@pytest.mark.parametrize("name", AUTO_MUTANTS)
def test_mutant_of_auto_fails_the_exact_law(name):
    assert killed(load_rheo(AUTO_MUTANTS[name]), auto_settings()) > POWER


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_fails_the_exact_law(name):
    assert killed(load_rheo(MUTANTS[name]), settings()) > POWER


def test_mutant_that_forgets_d2t_in_the_residual_fails_the_exact_law():
    assert killed(load_rheo(FORGOTTEN_D2T), settings(draft_ids=(2, 0))) > POWER


def test_mutant_that_filters_after_the_ratio_fails_the_exact_law():
    """A filter keeps the target's two most likely tokens; the mutant judges by the unfiltered law and filters what it then draws from."""
    late = load_rheo({"verification": [(
        "draws.token(residual(p, tail, q_tail))",
        "draws.token(normalised(residual(p, tail, q_tail) * (kept := p >= p.sort(descending=True)[0][1]), otherwise=p * kept))",
    )]})  # fmt: skip
    p, filtered, q = (
        tuple(Fraction(x, sum(row)) for x in row)
        for row in ((4, 3, 2, 1), (4, 3, 0, 0), (1, 4, 1, 4))
    )

    def difference(code, given, m):
        """From the law that filtering asks for, one level of two slots, the code judging by the law ``given``."""
        work = code.enumerator(
            Setting("", 4, 0, 2, m, 0, (2,), arithmetic="float64"),
            code.ConstantDistributions(given, q),
        )
        probs = work.emitted((), work.kept_trees((), (2,))[2])
        first = {
            token: sum(w for text, w in probs.items() if text[0] == token) for token in range(4)
        }
        return max(abs(first[token] - float(filtered[token])) for token in range(4))

    assert difference(load_rheo(), filtered, 0) < 1e-12  # the real code is given the filtered law
    assert (
        difference(late, p, None) < 1e-12
    )  # without a sampled slot there is no ratio, and late is early enough
    assert difference(late, p, 0) > POWER


def test_mutant_that_shares_one_uniform_among_the_parents_of_a_level_fails_the_exact_law():
    """Whether the second child's sampled slot survives hangs on the first child's draw: sharing ties it to its own token.

    First child: score 0.7, its fill slot 0.21 or 0.14 by its draw; second child: 0.3, its sampled slot 0.15; six are kept.
    """
    code = load_rheo({"enumeration": [(
        "        taken = []\n"
        "        for path, row in zip(self.parents, weights.tolist(), strict=True):\n"
        "            self.times[path] += 1  # padding may repeat a path, and code may draw twice: each is a draw of its own\n"
        "            if not any(row):  # a tail without mass: the slot does not exist, and a race takes the first token\n"
        "                row = [1 + row[0], *row[1:]]\n"
        "            taken.append(self._choose((path, self.times[path]), row))\n"
        "        return torch.tensor(taken)\n",
        "        rows = (weights / weights.sum(-1, keepdim=True)).cumsum(-1).clamp_max(1)\n"
        "        rows[:, -1] = 1\n"
        "        edges = sorted({0.0, *rows.flatten().tolist()})\n"
        "        piece = self._choose(len(self.drawn), [b - a for a, b in zip(edges, edges[1:])])\n"
        "        return (rows > (edges[piece] + edges[piece + 1]) / 2).int().argmax(-1)\n",
    )]})  # fmt: skip

    def laws_of(module):
        class Laws(module.ConstantDistributions):
            def draft(self, path):
                return (
                    {(): (7, 2, 1), (0,): (5, 3, 2)}.get(path, (2, 3, 5))
                    if len(path) < 2
                    else (1, 1, 1)
                )

        p = tuple(Fraction(x, 10) for x in (2, 3, 5))
        distributions = Laws(p, (Fraction(1),) * 3)
        distributions.draft = lambda path: tuple(
            Fraction(x) for x in Laws.draft(distributions, path)
        )
        return distributions

    setting = Setting("", 3, 0, 3, 1, 1, (4, 5, 6, 7), arithmetic="float64")
    right = load_rheo()
    assert max(c.comparison.difference for c in right.certify(setting, laws_of(right))) < 1e-12
    assert max(c.comparison.difference for c in code.certify(setting, laws_of(code))) > POWER


def test_mutant_whose_coin_is_the_uniform_that_drew_the_token_fails_the_exact_law():
    """Drafting by inversion of one uniform u, accepting where that same u < p/q_tail."""
    code = load_rheo()

    class SharedCoin(code.Replay):
        def token(self, weights):
            index = super().token(weights)
            if len(weights.shape) == 2:
                probs, taken = list(self.drawn.values())[-1]
                self.piece = sum(probs[:taken]), sum(probs[: taken + 1])
            return index

        def accept(self, ratio):
            low, high = self.piece
            return super().accept(((ratio - low) / (high - low)).clamp(0, 1))

    def emitted(draws_class):
        distributions = code.ConstantDistributions(
            *(tuple(Fraction(x, 10) for x in row) for row in ((1, 2, 3, 4), (4, 3, 2, 1)))
        )

        def run(draws):  # one level, build and verify under one source
            draws.parents = [()]
            logits = code.Arithmetic("float64").logits([distributions.draft(())])[0]
            tree = code.build_tree(
                torch.tensor(0),
                logits,
                None,
                code.TreeOptions(code.PoolOptions(2, 0, 0), 3, 0),
                draws,
            )
            p = [
                code.Arithmetic("float64").probs(distributions.target(path))
                for path in ((), *((t,) for t in tree.tokens[1:].tolist()))
            ]
            verified = code.verify(tree, lambda node: p[node], draws)
            return tuple(verified.tokens[: verified.count].tolist())

        probs = {}
        for weight, text, _ in code.outcomes(run, source=draws_class):
            probs[text] = probs.get(text, 0.0) + weight
        return code.compare(probs, distributions, code.Arithmetic("float64")).difference

    assert emitted(code.Replay) < 1e-12
    assert emitted(SharedCoin) > POWER


def test_mutant_with_a_strict_coin_made_lenient_accepts_ratio_zero(monkeypatch):
    """Too small for a law: the coin is exactly 0 once in 2^24 draws."""
    monkeypatch.setattr(torch, "rand", lambda shape, **kwargs: torch.zeros(shape))
    generator = torch.Generator()
    assert not load_rheo().Draws(generator).accept(torch.tensor(0.0))
    lenient = load_rheo({"draws": [("return coin < ratio", "return coin <= ratio")]})
    assert lenient.Draws(generator).accept(torch.tensor(0.0))


def test_mutant_that_takes_z_as_one_minus_the_head_scores_below_a_fill_slot():
    """Too small for a law: 1 - q(x_1) rounds to 0 where the tail's sum does not."""
    logits = torch.tensor([[0.0, -20.0, -20.5, -21.0]])

    def scores(code):
        source = code.Draws(torch.Generator().manual_seed(0))
        return code.build_pools(logits, code.PoolOptions(3, 1, 0), source).log_proxy[0].exp()

    right = scores(load_rheo())
    assert right[1] >= right[2] > 0
    wrong = load_rheo({"pool": [
        ("    z = tail.sum(-1, keepdim=True)\n", "    z = 1 - q[:, :n_lead].sum(-1, keepdim=True)\n"),
        ("    return z.clamp(tail[:, :1], q[:, n_lead - 1 : n_lead])", "    return torch.minimum(q[:, n_lead - 1 : n_lead], z)"),
    ]})  # fmt: skip
    assert scores(wrong)[1] < scores(wrong)[2]


BY_ID_IN_EXPANSION = {"tree": [(
    "parents, (best, order) = levels[-1], best_first(scores[-1], pool.size)",
    "parents, by_id = levels[-1], levels[-1].tokens.flatten().argsort(stable=True)\n"
    "        order = by_id[best_first(scores[-1][by_id], pool.size)[1]]\n"
    "        best = scores[-1][order]",
)]}  # fmt: skip


def test_mutant_that_breaks_ties_by_token_id_in_the_expansion_only_builds_another_tree_with_the_right_law():
    """Which tied node is expanded hangs on draws above or beside it, never on its own pool: the law stays, the tree is not the paper's."""
    code, right = load_rheo(BY_ID_IN_EXPANSION), load_rheo()
    assert killed(code, settings()) < 1e-12

    distributions = {
        (): (8, 4, 2, 2),
        (0,): (2, 2, 4, 8),
    }  # scores 1/2, 1/4; below them 1/4, 1/8 and 1/8, 1/16: paths (0, 2) and (1, 0) tie

    def expanded(module):
        logits = {
            path: torch.tensor(row, dtype=torch.float64).log()
            for path, row in distributions.items()
        }
        frontier = [()]

        def expand(tokens, ranks, level):
            nonlocal frontier
            frontier = [(*frontier[r], t) for r, t in zip(ranks.tolist(), tokens.tolist())]
            return torch.stack([logits.get(path, logits[()]) for path in frontier])

        module.grow(logits[()], expand, module.TreeOptions(module.PoolOptions(2, None), 7, 2), None)
        return frontier

    assert expanded(right) == [(0, 3), (0, 2)] and expanded(code) == [(0, 3), (1, 0)]


def test_two_draft_ids_on_one_target_id_keep_the_law_here_and_are_refused_at_load():
    """Siblings with one target id: harmless for the one-draw form, whose laws add up by target id, but a wasted slot."""
    assert killed(load_rheo(), settings(draft_ids=(2, 2), seeds=3)) < 1e-12
