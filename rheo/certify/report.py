"""What the certifier prints: the lines of its report, Table 1 of the paper, and counterexamples.

Begin with ``Row``, one line of the report.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from fractions import Fraction
from unittest import mock

from torch import Tensor

from rheo.certify.certificates import Certificate, certify, enumerator
from rheo.certify.distributions import ConstantDistributions, RandomDistributions
from rheo.certify.enumeration import KeptTree
from rheo.certify.rational import Probability
from rheo.certify.settings import Setting
from rheo.pool import KIND_NAMES, SAMPLED, build_pools
from rheo.scores import paper_scores


@dataclass
class Row:
    """One line of the report: what was certified in a group of settings.

    Attributes:
        distributions: number of output distributions that were compared.
        trees: number of kept trees.
        sampled: number of kept trees with a sampled slot.
        probabilities: number of probabilities that were compared.
        worst: largest difference of two probabilities.
    """

    distributions: int = 0
    trees: int = 0
    sampled: int = 0
    probabilities: int = 0
    worst: Probability = 0

    HEAD = (
        f"{'':<40}{'distributions':>15}{'kept trees':>12}{'with a sampled slot':>21}"
        f"{'probabilities':>15}{'largest difference':>20}"
    )

    def add(self, certificate: Certificate) -> None:
        """Count a certificate."""
        self.distributions += 1
        self.trees += certificate.trees
        self.sampled += certificate.sampled
        self.probabilities += len(certificate.comparison.observed) - 1
        self.worst = max(self.worst, certificate.comparison.difference)

    def show(self, group: str) -> str:
        """The line, below ``HEAD``."""
        counts = f"{self.distributions:>15,}{self.trees:>12,}{self.sampled:>21,}"
        worst = f"{float(self.worst):.1e}" if self.worst else "0"
        return f"{group:<40}{counts}{self.probabilities:>15,}{worst:>20}"


def record(certificate: Certificate) -> dict:
    """A certificate for JSON.

    Its "laws" hold two probabilities of each beginning of a text: decoding's and the target's.
    """
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


def table1() -> dict[str, tuple[dict[int, Fraction], Certificate]]:
    """Table 1 of the paper: the sampled slot scored by the right proxy, and by the proxy 1/4.

    The draft probabilities are 0.5, 0.3 and 0.2, K = 3, m = 1, and two nodes survive.

    Returns:
        For each proxy the distribution of the sampled token, given that its slot survives, and the
        certificate of the output distribution.
    """

    def wrong_scores(q: Tensor, tail_weights: Tensor) -> tuple[Tensor, Tensor]:
        return q, q[:, :1] * 0.5

    p, q = (tuple(Fraction(n, 10) for n in tenths) for tenths in ((2, 3, 5), (5, 3, 2)))
    distributions = ConstantDistributions(p, q)
    setting = Setting("Table 1", 3, 0, 3, 1, 0, (2,))
    found = {}
    for name, rule in (("min(q(x_1), z) = 1/2", paper_scores), ("1/4", wrong_scores)):
        with mock.patch(f"{build_pools.__module__}.paper_scores", rule):
            trees = enumerator(setting, distributions).kept_trees((), (2,))[2]
            (certificate,) = certify(setting, distributions)
        survived: dict[int, Fraction] = defaultdict(Fraction)
        for probability, tree, _ in trees:
            for token in tree.tokens[tree.kinds == SAMPLED].tolist():
                survived[token] += probability
        total = sum(survived.values())
        found[name] = {token: survived[token] / total for token in sorted(survived)}, certificate
    return found


def show_table1() -> str:
    """Table 1 of the paper as text."""
    lines = [
        "Table 1 of the paper: draft 1/2, 3/10, 1/5; K = 3; m = 1; two survivors; "
        "q_tail = 0, 3/5, 2/5",
        "  proxy                  distribution of the surviving sampled token   output",
    ]
    for name, (survived, certificate) in table1().items():
        probs = ", ".join(f"x_{token + 1} {weight}" for token, weight in survived.items())
        off = f"NOT lossless: the output distribution is off by {certificate.comparison.difference}"
        lines.append(f"  {name:<22} {probs:<44}  {'lossless' if certificate.lossless else off}")
    return "\n".join(lines)


def describe_failure(found: Certificate, n_trees: int = 3) -> str:
    """A counterexample as text: where the distributions differ, and the trees behind it.

    Args:
        found: a certificate that is not lossless.
        n_trees: number of trees to show, the most probable ones.
    """
    comparison = found.comparison
    ours, targets = (
        f"{p} ({float(p):.6f})"
        for p in (comparison.observed[comparison.worst], comparison.expected[comparison.worst])
    )
    lines = [
        f"NOT LOSSLESS: {found.setting}, {found.budget} drafted nodes",
        f"A text that begins with {list(comparison.worst)} has probability {ours}, "
        f"the target's is {targets}.",
    ]
    trees = enumerator(found.setting).kept_trees((), (found.budget,))[found.budget]
    trees.sort(key=lambda kept: -kept.probability)
    for kept in trees[:n_trees]:
        lines += _describe_tree(kept, found.setting)
    if len(trees) > n_trees:
        lines.append(f"and {len(trees) - n_trees} more trees")
    return "\n".join(lines)


def _describe_tree(kept: KeptTree, setting: Setting) -> list[str]:
    """One line per node of a kept tree."""
    distributions = RandomDistributions(setting.vocab, setting.distributions, setting.draft_ids)
    tree, lines = kept.tree, [f"kept with probability {kept.probability}:"]
    for node, path in enumerate(kept.paths):
        if not tree.valid[node]:
            continue
        name = f"{path[-1]} ({KIND_NAMES[tree.kinds[node]]})" if path else "root"
        line = f"  {'  ' * len(path)}{name}: target {_join(distributions.target(path))}"
        if tree.children(node).any():
            q = distributions.draft(path)
            line += f"  draft {_join(weight / sum(q) for weight in q)}"
        lines.append(line)
    return lines


def _join(numbers: Iterable[Fraction]) -> str:
    """Numbers separated by commas."""
    return ", ".join(map(str, numbers))
