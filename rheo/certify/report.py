"""What the certifier prints: its table, Table 1 of the paper, and counterexamples."""

import sys
from dataclasses import asdict
from fractions import Fraction
from unittest import mock

from rheo.certify.certificates import Certificate, certify, enumerator
from rheo.certify.enumeration import ConstantDistributions, RandomDistributions
from rheo.certify.rational import RationalTensor
from rheo.certify.settings import Setting
from rheo.pool import KIND_NAMES, SAMPLED, build_pools


def table1() -> dict[str, tuple[dict[int, Fraction], Certificate]]:
    """Table 1 of the paper: draft 0.5, 0.3, 0.2, K 3, m 1, two survivors, the sampled slot scored rightly and with 0.25.

    Returns:
        Per proxy the law of the sampled token where its slot survives, and the certificate of the output law.
    """
    q = tuple(Fraction(n, 10) for n in (5, 3, 2))
    distributions = ConstantDistributions(p=tuple(Fraction(n, 10) for n in (2, 3, 5)), q=q)
    setting = Setting("Table 1", 3, 0, 3, 1, 0, (2,))
    quarter = mock.patch.object(
        sys.modules[build_pools.__module__],
        "sampled_proxy",
        lambda q, n_lead: RationalTensor([[Fraction(1, 4)]]),
    )
    found = {}
    for name in ("min(q(x_1), z) = 1/2", "1/4"):
        with quarter if name == "1/4" else mock.MagicMock():
            trees = enumerator(setting, distributions).kept_trees((), (2,))[2]
            (certificate,) = certify(setting, distributions)
        survived = {}
        for weight, tree, _ in trees:
            for token, kind in zip(tree.tokens.tolist(), tree.kinds.tolist()):
                if kind == SAMPLED:
                    survived[token] = survived.get(token, 0) + weight
        total = sum(survived.values())
        found[name] = (
            {token: weight / total for token, weight in sorted(survived.items())},
            certificate,
        )
    return found


def show_table1() -> str:
    """Table 1 as text."""
    lines = [
        "Table 1 of the paper: draft 1/2, 3/10, 1/5; K = 3; m = 1; two survivors; q_tail = 0, 3/5, 2/5"
    ]
    for name, (survived, certificate) in table1().items():
        probs = ", ".join(f"x_{token + 1} {weight}" for token, weight in survived.items())
        off = f"NOT lossless: the output law is off by {certificate.comparison.difference}"
        verified = "lossless" if certificate.lossless else off
        lines.append(
            f"  proxy {name:<22} law of the sampled token where it survives: {probs:<18} {verified}"
        )
    return "\n".join(lines)


def describe_failure(found: Certificate, n_trees: int = 3) -> str:
    """A counterexample for reading: where the laws differ, and the trees behind it."""
    setting, comparison = found.setting, found.comparison
    distributions = RandomDistributions(setting.vocab, setting.distributions, setting.draft_ids)
    observed, expected = (
        probs[comparison.worst] for probs in (comparison.observed, comparison.expected)
    )
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
            p = ", ".join(str(x) for x in distributions.target(path))
            name = f"{path[-1]} ({KIND_NAMES[kind]})" if path else "root"
            inner = ""
            if (tree.parents[1:] == node).any():
                q = distributions.draft(path)
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
        "laws": {
            " ".join(map(str, text)): [str(ours), str(comparison.expected[text])]
            for text, ours in comparison.observed.items()
        },
    }


class Row:
    """One line of the report: what was certified in a group of settings."""

    HEAD = f"{'':<40}{'output distributions':>12}{'kept trees':>12}{'with a sampled slot':>21}{'probabilities':>15}{'largest difference':>20}"

    def __init__(self):
        self.distributions, self.trees, self.sampled, self.probabilities, self.worst = 0, 0, 0, 0, 0

    def add(self, certificate: Certificate) -> None:
        self.distributions += 1
        self.trees += certificate.trees
        self.sampled += certificate.sampled
        self.probabilities += len(certificate.comparison.observed) - 1
        self.worst = max(self.worst, certificate.comparison.difference)

    def show(self, group: str) -> str:
        worst = self.worst if self.worst == 0 else f"{float(self.worst):.1e}"
        return f"{group:<40}{self.distributions:>12,}{self.trees:>12,}{self.sampled:>21,}{self.probabilities:>15,}{worst:>20}"
