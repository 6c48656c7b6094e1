"""Is decoding lossless? ``python -m rheo.certify`` answers with exact arithmetic, through the code that decodes.

For small vocabularies it walks every outcome of every draw of pool, tree and verification (``rheo.enumeration``) and compares the
law of what is emitted with the target's law, after one cycle and after several in a row. In fractions the difference is exactly 0;
where the code runs on float64 tensors it is rounding, at most 1e-12. Larger trees are enumerated by merging draws whose outcome
cannot be seen in the kept tree; that is tried out at every leaf, and compared with walking every draw where both are possible.

    python -m rheo.certify                      about a minute
    python -m rheo.certify --full               every m, budget and verification up to vocabulary 4, K 3, depth 2; some minutes
    python -m rheo.certify --model B --head E   a statistical test of whole generations of a real pair

Exit code 1, and a small counterexample, where a law differs.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from unittest import mock

from tqdm import tqdm

from rheo.enumeration import Arithmetic, Comparison, ConstantLaws, Enumerator, MergeError, RandomLaws, compare
from rheo.pool import AUTO, KIND_NAMES, SAMPLED, PoolOptions, build_pools
from rheo.rational import RationalTensor
from rheo.verification import VERIFICATIONS

TOLERANCE = {"fractions": 0, "float64": 1e-12}


@dataclass(frozen=True)
class Setting:
    """One thing to certify.

    Attributes:
        group: the line of the report that it belongs to.
        vocab, laws: number of tokens, and seed of the laws (``RandomLaws``).
        size, m, support, temperature, depth: of the tree (``PoolOptions``, ``TreeOptions``); m None is Top-K, or a number, or AUTO.
        budgets: numbers of drafted nodes to keep, each certified by itself.
        verification: "rheo" or "rrsw".
        draft_ids: target ids of a reduced draft vocabulary; None for the whole.
        cycles: cycles in a row.
        arithmetic: "fractions" or "float64".
        walk: see ``Enumerator``.
        normaliser: as in ``PoolOptions``.
    """

    group: str
    vocab: int
    laws: int
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
            f"T {self.temperature}, depth {self.depth}, "
            f"verification {self.verification}, {self.cycles} cycle(s), laws {self.laws}, {self.arithmetic}"
        )


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


def enumerator(setting: Setting, laws=None) -> Enumerator:
    """The enumerator of a setting; ``laws`` in place of its random ones."""
    return Enumerator(
        laws=laws or RandomLaws(setting.vocab, setting.laws, setting.draft_ids),
        pool=PoolOptions(setting.size, setting.m, setting.support, setting.temperature, setting.normaliser),
        depth=setting.depth,
        verification=setting.verification,
        arithmetic=Arithmetic(setting.arithmetic),
        walk=setting.walk,
    )


def certify(setting: Setting, laws=None) -> Iterator[Certificate]:
    """Certify each budget of a setting.

    Raises:
        MergeError: where a merged draw mattered.
    """
    work = enumerator(setting, laws)
    if setting.cycles == 1:  # one growth serves all budgets
        kept = work.kept_trees((), setting.budgets)
        found = ((budget, work.emitted((), trees), [tree for _, tree, _ in trees]) for budget, trees in kept.items())
    else:
        found = ((budget, *work.after_cycles(setting.cycles, budget)) for budget in setting.budgets)
    for budget, law, trees in found:
        sampled = sum(SAMPLED in tree.kinds.tolist() for tree in trees)
        yield Certificate(setting, budget, len(trees), sampled, compare(law, work.laws, work.arithmetic))


def all_budgets(vocab: int, size: int, depth: int) -> tuple[int, ...]:
    """Every number of drafted nodes, up to all candidates."""
    width = min(size, vocab)
    return tuple(range(1, width + depth * width * width + 1))


def ways_to_decode(lead: Iterable[int]) -> tuple[tuple[int | str | None, str], ...]:
    """(m, verification): Top-K, some fixed m under each verification, and AUTO, which is lossless under the first alone."""
    return (None, "rheo"), *itertools.product(lead, VERIFICATIONS), (AUTO, "rheo")


def quick_settings() -> Iterator[Setting]:
    """Under a minute; the smallest first, so that a failure is met in a small setting."""
    ways = ways_to_decode((0, 1, 2))
    conditions = ((0, 1.0, 0), (1, 0.5, 0), (2, 2.0, 3), (5, 0.0, 0))  # laws, temperature, support
    for (vocab, size, depth), (m, verification) in itertools.product(((2, 2, 0), (3, 3, 0), (4, 3, 0), (2, 2, 1), (3, 2, 1)), ways):
        if m not in (None, AUTO) and m >= size:
            continue
        small = Setting("every draw, jointly", vocab, 0, size, m, depth, all_budgets(vocab, size, depth), verification=verification)
        if vocab * depth == 3:
            yield replace(small, laws=6, budgets=(2, 3))
            small = replace(small, group="merged draws", walk="merged")
        for laws, temperature, support in conditions[: 4 if (vocab, size) == (3, 3) else 2]:
            yield replace(small, laws=laws, temperature=temperature, support=support)
        rounded = replace(small, group="every draw, jointly, float64", arithmetic="float64", walk="jointly")
        yield replace(rounded, laws=7, budgets=small.budgets[1:3])
        if vocab == 3:
            yield replace(small, group="reduced draft vocabulary", laws=6, draft_ids=(2, 0))
            yield replace(small, group="scores by the full softmax", laws=12, support=2, normaliser="full")
    for m, verification in (*ways[:4], ways[-1]):
        two = Setting("two and three cycles in a row", 2, 6, 2, m, 1, (3,), cycles=2, verification=verification)
        if m in (None, AUTO) or m < 2:
            yield two
            yield replace(two, vocab=3, depth=0, budgets=(2,), cycles=3, walk="by node")
    for m, verification in ways:
        yield Setting("vocabulary 6, K 5, depth 4, merged", 6, 6, 5, m, 4, (5,), verification=verification, walk="merged")


def full_settings() -> Iterator[Setting]:
    """Every m, budget and verification up to vocabulary 4, K 3 and depth 2, several temperatures and laws; larger ones merged."""
    yield from quick_settings()
    conditions = tuple(itertools.product((0.5, 1.0, 2.0), (0, 2)))  # temperature, support
    for depth, vocab, size in itertools.product((0, 1, 2), (2, 3, 4), (1, 2, 3)):
        for m, verification in ways_to_decode(range(size)):
            budgets = all_budgets(vocab, size, depth)
            base = Setting("every draw, jointly", vocab, 0, size, m, depth, budgets, verification=verification)
            if depth > 0:
                base = replace(base, group=f"every draw, depth {depth}, node by node", walk="by node")
            if depth == 2:  # up to 16,384 outcomes of the draws, each pruned to 21 sizes
                yield replace(base, laws=13, temperature=0.5, support=3)
                if verification == "rheo":
                    yield replace(base, laws=12)
                continue
            for laws, (temperature, support) in enumerate(conditions * (3 if depth == 0 else 1), 20):
                yield replace(base, laws=laws, temperature=temperature, support=support)
            yield replace(base, group="every draw, float64", arithmetic="float64", laws=18)
            if vocab > 2:
                yield replace(base, group="reduced draft vocabulary", laws=18, draft_ids=(2, 0))
    for (m, verification), laws in itertools.product(ways_to_decode((0, 1)), (20, 21)):
        two = Setting("two and three cycles in a row", 3, laws, 2, m, 1, (2, 4), cycles=2, verification=verification)
        two = replace(two, walk="by node")
        yield two
        yield replace(two, vocab=2, cycles=3)
    for (m, verification), budget in itertools.product(ways_to_decode((0, 1, 2, 4)), (3, 6, 9)):
        large = Setting("vocabulary 6, K 5, depth 4, merged", 6, 30, 5, m, 4, (budget,), verification=verification)
        yield replace(large, walk="merged")


def merging_against_every_draw(settings) -> int:
    """Check for small settings that merging gives the law of walking every draw; the number of laws compared.

    Raises:
        MergeError: naming the setting where it does not.
    """
    compared = 0
    for setting in settings:
        for every, merged in zip(certify(replace(setting, walk="jointly")), certify(replace(setting, walk="merged")), strict=True):
            if every.comparison.observed != merged.comparison.observed:
                raise MergeError(f"{setting}, {every.budget} drafted nodes: merging draws changes the output law")
            compared += 1
    return compared


def table1() -> dict[str, tuple[dict[int, Fraction], Certificate]]:
    """Table 1 of the paper: draft 0.5, 0.3, 0.2, K 3, m 1, two survivors, the sampled slot scored rightly and with 0.25.

    Returns:
        Per proxy the law of the sampled token where its slot survives, and the certificate of the output law.
    """
    q = tuple(Fraction(n, 10) for n in (5, 3, 2))
    laws = ConstantLaws(p=tuple(Fraction(n, 10) for n in (2, 3, 5)), q=q)
    setting = Setting("Table 1", 3, 0, 3, 1, 0, (2,))
    quarter = mock.patch.object(
        sys.modules[build_pools.__module__], "sampled_proxy", lambda q, n_lead: RationalTensor([[Fraction(1, 4)]])
    )
    found = {}
    for name in ("min(q(x_1), z) = 1/2", "1/4"):
        with quarter if name == "1/4" else mock.MagicMock():
            trees = enumerator(setting, laws).kept_trees((), (2,))[2]
            (certificate,) = certify(setting, laws)
        survived = {}
        for weight, tree, _ in trees:
            for token, kind in zip(tree.tokens.tolist(), tree.kinds.tolist()):
                if kind == SAMPLED:
                    survived[token] = survived.get(token, 0) + weight
        total = sum(survived.values())
        found[name] = {token: weight / total for token, weight in sorted(survived.items())}, certificate
    return found


def show_table1() -> str:
    """Table 1 as text."""
    lines = ["Table 1 of the paper: draft 1/2, 3/10, 1/5; K = 3; m = 1; two survivors; q_tail = 0, 3/5, 2/5"]
    for name, (survived, certificate) in table1().items():
        law = ", ".join(f"x_{token + 1} {weight}" for token, weight in survived.items())
        off = f"NOT lossless: the output law is off by {certificate.comparison.difference}"
        verdict = "lossless" if certificate.lossless else off
        lines.append(f"  proxy {name:<22} law of the sampled token where it survives: {law:<18} {verdict}")
    return "\n".join(lines)


def smallest_failure(found: Certificate) -> Certificate:
    """A failing certificate of the same method with as small a vocabulary, pool and tree as random laws show it."""
    setting = found.setting
    if setting.draft_ids is not None or setting.cycles > 1:
        return found
    for depth, vocab, size in itertools.product(range(setting.depth + 1), range(2, setting.vocab + 1), range(1, setting.size + 1)):
        if setting.m not in (None, AUTO) and setting.m >= size:
            continue
        small = replace(setting, depth=depth, vocab=vocab, size=size, budgets=all_budgets(vocab, size, depth)[:6], walk="by node")
        for laws in range(8):
            try:
                failures = [c for c in certify(replace(small, laws=laws)) if not c.lossless]
            except MergeError:
                continue
            if failures:
                return failures[0]
    return found


def describe_failure(found: Certificate, n_trees: int = 3) -> str:
    """A counterexample for reading: where the laws differ, and the trees behind it."""
    setting, comparison = found.setting, found.comparison
    laws = RandomLaws(setting.vocab, setting.laws, setting.draft_ids)
    observed, expected = (law[comparison.worst] for law in (comparison.observed, comparison.expected))
    lines = [
        f"NOT LOSSLESS: {setting}, {found.budget} drafted nodes",
        f"A text beginning with {list(comparison.worst)} comes with probability {observed} ({float(observed):.6f}), "
        f"the target's is {expected} ({float(expected):.6f}).",
    ]
    trees = enumerator(setting).kept_trees((), (found.budget,))[found.budget]
    for weight, tree, paths in sorted(trees, key=lambda entry: -entry[0])[:n_trees]:
        lines.append(f"kept with probability {weight}:")
        for node, (path, kind) in enumerate(zip(paths, tree.kinds.tolist())):
            if not tree.valid[node]:
                continue
            p = ", ".join(str(x) for x in laws.target(path))
            name = f"{path[-1]} ({KIND_NAMES[kind]})" if path else "root"
            inner = ""
            if (tree.parents[1:] == node).any():
                q = laws.draft(path)
                inner = f"  draft {', '.join(str(w / sum(q)) for w in q)}"
            lines.append(f"  {'  ' * len(path)}{name}: target {p}{inner}")
    if len(trees) > n_trees:
        lines.append(f"and {len(trees) - n_trees} more trees")
    return "\n".join(lines)


def record(certificate: Certificate) -> dict:
    """A certificate for JSON: settings, and [decoding's, the target's] probability of every beginning that was compared."""
    comparison = certificate.comparison
    return {
        "setting": asdict(certificate.setting) | {"budgets": certificate.budget},
        "trees": certificate.trees,
        "sampled": certificate.sampled,
        "difference": str(comparison.difference),
        "laws": {" ".join(map(str, text)): [str(ours), str(comparison.expected[text])] for text, ours in comparison.observed.items()},
    }


class Row:
    """One line of the report: what was certified in a group of settings."""

    HEAD = f"{'':<40}{'output laws':>12}{'kept trees':>12}{'with a sampled slot':>21}{'probabilities':>15}{'largest difference':>20}"

    def __init__(self):
        self.laws, self.trees, self.sampled, self.probabilities, self.worst = 0, 0, 0, 0, 0

    def add(self, certificate: Certificate) -> None:
        self.laws += 1
        self.trees += certificate.trees
        self.sampled += certificate.sampled
        self.probabilities += len(certificate.comparison.observed) - 1
        self.worst = max(self.worst, certificate.comparison.difference)

    def show(self, group: str) -> str:
        worst = self.worst if self.worst == 0 else f"{float(self.worst):.1e}"
        return f"{group:<40}{self.laws:>12,}{self.trees:>12,}{self.sampled:>21,}{self.probabilities:>15,}{worst:>20}"


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if any(argument.partition("=")[0] == "--model" for argument in arguments):
        # The statistical test needs models, which this package knows nothing of: it lives with the other evaluations.
        return importlib.import_module("evaluation.black_box").main(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m rheo.certify", description="Certify losslessness by exact enumeration.", allow_abbrev=False,
        epilog="With --model (and --head) a statistical test of that pair is run instead: see --model X --help.",
    )  # fmt: skip
    parser.add_argument("--full", action="store_true", help="all settings, not the quick ones only; 4 to 30 minutes")
    parser.add_argument("--table1", action="store_true", help="Table 1 of the paper, and nothing else")
    parser.add_argument("--output", help="write the laws of every configuration to this file, one JSON object a line")
    known = parser.parse_args(arguments)
    print(show_table1(), flush=True)
    if known.table1:
        return 0
    settings = list(full_settings() if known.full else quick_settings())
    rows: dict[str, Row] = {}
    with open(known.output, "w", encoding="utf-8") if known.output else contextlib.nullcontext() as output:
        try:
            for setting in tqdm(settings, unit="setting", desc="certify"):
                for certificate in certify(setting):
                    if output:
                        output.write(json.dumps(record(certificate)) + "\n")
                    if not certificate.lossless:
                        print(describe_failure(smallest_failure(certificate)), flush=True)
                        return 1
                    rows.setdefault(setting.group, Row()).add(certificate)
            small = (s for s in quick_settings() if s.depth == s.cycles == 1 and s.arithmetic == "fractions" and s.laws in (0, 6))
            compared = merging_against_every_draw(replace(s, budgets=s.budgets[:4]) for s in small)
        except MergeError as error:
            print(f"NOT CERTIFIED: {error}", flush=True)
            return 1
    print(Row.HEAD)
    for group, row in rows.items():
        print(row.show(group))
    print(f"merging draws against walking every draw: {compared} laws, all equal")
    print("Lossless: every output law is the target's.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
