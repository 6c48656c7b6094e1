"""Where acceptance comes from: slot kinds and levels, and how good the proxies are."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from eagle.model.cycle import Slot
from eagle.model.tuning.contexts import Context
from eagle.plotting import saved_plot
from evaluation.common.markdown import table
from rheo import FILL, KIND_NAMES, LEAD, SAMPLED
from rheo.tree import NO_KIND

BINS = 10  # bins of the proxy, each 0.1 wide

# The slots of one kind whose proxy is in one bin and whose parent verification visited:
# [number, sum of proxies, number accepted].
Cell = list[float]
# Cells by slot kind and bin.
Tally = dict[str, list[Cell]]
# By slot kind (rheo.KIND_NAMES), for each bin with slots: (mean proxy, share accepted, number).
Curves = dict[str, list[tuple[float, float, float]]]


def bin_of(proxy: float) -> int:
    """The bin of a proxy in [0, 1]."""
    return min(int(proxy * BINS), BINS - 1)


def empty_tally() -> Tally:
    """Cells that are all 0."""
    return {kind: [[0, 0.0, 0] for _ in range(BINS)] for kind in KIND_NAMES}


def add_slot(cells: Tally, kind: str, proxy: float, weight: float, accepted: float) -> None:
    """Count one slot.

    Args:
        cells: changed in place.
        kind: the slot's kind.
        proxy: its proxy.
        weight: 1, or the probability that its parent is visited.
        accepted: 1 or 0, or the probability that it is accepted.
    """
    cell = cells[kind][bin_of(proxy)]
    for i, value in enumerate((weight, weight * proxy, accepted)):
        cell[i] += value


def tally(cycles: Iterable[list[list[Slot]]]) -> Tally:
    """Count the slots that verification tried.

    Args:
        cycles: for each cycle the children of each visited node.
    """
    cells = empty_tally()
    for tried in cycles:
        for slot in (slot for children in tried for slot in children):
            add_slot(cells, slot.kind, slot.proxy, 1, int(slot.accepted))
    return cells


def curves(tallies: list[Tally]) -> Curves:
    """The curves of several tallies together."""
    found: Curves = {}
    for kind in KIND_NAMES:
        bins = zip(*(cells[kind] for cells in tallies))
        summed = [[sum(cell[i] for cell in cells) for i in range(3)] for cells in bins]
        found[kind] = [(proxies / n, accepted / n, n) for n, proxies, accepted in summed if n]
    return found


@dataclass
class Calibration:
    """Sums over the trees of one method. Nodes are weighted by the probability of being visited.

    Attributes:
        contexts: number of trees.
        visits: by level, expected visits of its nodes; level 0 is the root, with 1 for each tree.
        accepted: by (kind, level), expected acceptances.
        tried: by level, the tally of its slots.
        pools: expected visits of nodes that have a pool.
        survived: expected visits of nodes whose sampled slot is in the tree.
    """

    contexts: int = 0
    visits: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    accepted: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    tried: dict[int, Tally] = field(default_factory=lambda: defaultdict(empty_tally))
    pools: float = 0.0
    survived: float = 0.0

    def add(self, context: Context) -> None:
        """Add one tree."""
        tree, reach = context.tree, context.reach.tolist()
        parents, levels, kinds = tree.parents.tolist(), tree.levels.tolist(), tree.kinds.tolist()
        scores = tree.log_scores.exp().tolist()
        self.contexts += 1
        self.visits[0] += 1
        expanded = {parent for parent, kind in zip(parents, kinds) if kind != NO_KIND}
        with_sampled = {parent for parent, kind in zip(parents, kinds) if kind == SAMPLED}
        self.pools += sum(reach[node] for node in expanded)
        self.survived += sum(reach[node] for node in with_sampled)
        for node, (parent, level, kind) in enumerate(zip(parents, levels, kinds)):
            if kind == NO_KIND:
                continue
            self.visits[level] += reach[node]
            self.accepted[kind, level] += reach[node]
            proxy = scores[node] / scores[parent]
            add_slot(self.tried[level], KIND_NAMES[kind], proxy, reach[parent], reach[node])

    def by_kind(self) -> dict[str, float]:
        """Expected acceptances per cycle, by slot kind."""
        sums = dict.fromkeys((LEAD, SAMPLED, FILL), 0.0)
        for (kind, _), accepted in self.accepted.items():
            sums[kind] += accepted
        return {KIND_NAMES[kind]: total / self.contexts for kind, total in sums.items()}

    def by_level(self) -> list[float]:
        """Probability that a cycle accepts a token at level 1, 2, and so on."""
        return [self.visits[level] / self.contexts for level in range(1, max(self.visits) + 1)]

    def curves(self) -> Curves:
        """Share accepted by proxy, over all levels."""
        return curves(list(self.tried.values()))

    def to_json(self) -> dict:
        """All results."""
        by_level = {level: curves([cells]) for level, cells in sorted(self.tried.items())}
        return {
            "contexts": self.contexts,
            "accepted_by_kind": self.by_kind(),
            "accepted_by_level": self.by_level(),
            "sampled_slot_survives": self.survived / self.pools if self.pools else None,
            "calibration": self.curves(),
            "calibration_by_level": by_level,
        }


def render(calibrations: dict[str, Calibration]) -> str:
    """A Markdown table of acceptances per cycle, by slot kind and by level.

    The column "sampled slot survives" is the share of visited parents whose sampled slot is in the
    tree.
    """
    levels = max(len(calibration.by_level()) for calibration in calibrations.values())
    rows = []
    for name, calibration in calibrations.items():
        by_level = [f"{value:.3f}" for value in calibration.by_level()]
        survived, pools = calibration.survived, calibration.pools
        rows.append(
            [
                name,
                *(f"{value:.3f}" for value in calibration.by_kind().values()),
                f"{100 * survived / pools:.0f} %" if survived else "-",
                *by_level,
                *[None] * (levels - len(by_level)),
            ]
        )
    columns = ["method", *KIND_NAMES, "sampled slot survives"]
    return table([*columns, *(f"level {i + 1}" for i in range(levels))], rows)


def plot_curves(panel, by_kind: Curves, **style) -> None:
    """Plot the share accepted over the proxy, with the diagonal; ``style`` is for the lines."""
    panel.plot([0, 1], [0, 1], color="gray", linestyle="--", linewidth=1)
    for (kind, points), marker in zip(by_kind.items(), "os^"):
        if points:
            proxies, shares, _ = zip(*points)
            panel.plot(proxies, shares, marker=marker, label=kind, **style)
    panel.set(xlim=(0, 1), ylim=(0, 1))
    panel.grid(alpha=0.3)


def plot(found: dict[str, Curves], path: Path) -> None:
    """Plot the share accepted over the proxy, one panel per method.

    A slot on the diagonal is accepted as often as its proxy says.
    """
    columns = min(len(found), 4)
    rows = -(-len(found) // columns)
    size = (3.6 * columns, 3.6 * rows)
    with saved_plot(path, rows, columns, figsize=size) as (_, panels):
        for panel, (name, by_kind) in zip(panels.flat, found.items()):
            plot_curves(panel, by_kind)
            panel.set(title=name, xlabel="proxy")
            if any(by_kind.values()):
                panel.legend(loc="upper left")
        for panel in panels.flat[len(found) :]:
            panel.set_visible(False)
        for panel in panels[:, 0]:
            panel.set_ylabel("share accepted where its parent is visited")
