"""Where acceptance comes from: slot kinds, levels, survival of the sampled slot, and proxies against what was accepted."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from eagle.files import replacing
from eagle.model.cycle import Slot
from eagle.model.tuning.contexts import Context
from rheo import FILL, KIND_NAMES, LEAD, SAMPLED
from rheo.tree import NO_KIND

BINS = 10  # of the proxy, each a tenth wide

# Of the slots of one kind with a proxy in one bin, whose parents verification visited: [their number, their sum of proxies, acceptances].
Tally = list[float]
# By slot kind (rheo.KIND_NAMES): (mean proxy, share accepted, number) of each bin that holds slots.
Curves = dict[str, list[tuple[float, float, float]]]


def bin_of(proxy: float) -> int:
    """The tenth that a proxy lies in."""
    return min(int(proxy * BINS), BINS - 1)


def nothing_tried() -> dict[str, list[Tally]]:
    """The cells of each kind by bin, all 0."""
    return {kind: [[0, 0.0, 0] for _ in range(BINS)] for kind in KIND_NAMES}


def tally(cycles: Iterable[list[list[Slot]]]) -> dict[str, list[Tally]]:
    """The cells of each kind by bin, from the visited families of some cycles."""
    cells = nothing_tried()
    for families in cycles:
        for slot in (slot for family in families for slot in family):
            cell = cells[slot.kind][bin_of(slot.proxy)]
            for i, value in enumerate((1, slot.proxy, int(slot.accepted))):
                cell[i] += value
    return cells


def curves(tallies: list[dict[str, list[Tally]]]) -> Curves:
    """Many tallies as one."""
    found: Curves = {}
    for kind in KIND_NAMES:
        summed = [
            [sum(cell[i] for cell in cells) for i in range(3)]
            for cells in zip(*(cells[kind] for cells in tallies))
        ]
        found[kind] = [
            (proxies / number, accepted / number, number)
            for number, proxies, accepted in summed
            if number
        ]
    return found


@dataclass
class Calibration:
    """Sums over the drawn trees of one method, every node weighed by the probability that verification comes to its parent.

    Attributes:
        contexts: number of trees.
        visits: by level, expected visits of its nodes; level 0 is the root, 1 a tree.
        accepted: by (kind, level), expected acceptances.
        tried: by level, the cells of each kind by bin of the proxy.
        pools, survived: expected visits of nodes whose pool had a sampled slot that competed, and of those where it is in the tree.
    """

    contexts: int = 0
    visits: dict = field(default_factory=lambda: defaultdict(float))
    accepted: dict = field(default_factory=lambda: defaultdict(float))
    tried: dict = field(default_factory=lambda: defaultdict(nothing_tried))
    pools: float = 0.0
    survived: float = 0.0

    def add(self, context: Context) -> None:
        """Take in one tree."""
        tree, reach = context.tree, context.reach.tolist()
        self.contexts += 1
        self.visits[0] += 1
        nodes = list(
            zip(
                tree.parents.tolist(),
                tree.levels.tolist(),
                tree.kinds.tolist(),
                tree.log_scores.exp().tolist(),
            )
        )
        with_sampled = {parent for parent, _, kind, _ in nodes if kind == SAMPLED}
        expanded = {parent for parent, _, kind, _ in nodes if kind != NO_KIND}
        self.pools += sum(reach[node] for node in expanded)
        self.survived += sum(reach[node] for node in with_sampled)
        for node, (parent, level, kind, score) in enumerate(nodes):
            if kind == NO_KIND:
                continue
            proxy = score / nodes[parent][-1]
            self.visits[level] += reach[node]
            self.accepted[kind, level] += reach[node]
            cell = self.tried[level][KIND_NAMES[kind]][bin_of(proxy)]
            for i, value in enumerate((reach[parent], reach[parent] * proxy, reach[node])):
                cell[i] += value

    def by_kind(self) -> dict[str, float]:
        """Expected acceptances a cycle, by slot kind."""
        return {
            KIND_NAMES[kind]: sum(v for (k, _), v in self.accepted.items() if k == kind)
            / self.contexts
            for kind in (LEAD, SAMPLED, FILL)
        }

    def by_level(self) -> list[float]:
        """Probability that a cycle accepts a token at level 1, 2, ..."""
        return [self.visits[level] / self.contexts for level in range(1, max(self.visits) + 1)]

    def curves(self) -> Curves:
        """Proxies against what was accepted, over all levels."""
        return curves(list(self.tried.values()))

    def to_json(self) -> dict:
        """What the plot and the table show."""
        return {
            "contexts": self.contexts,
            "accepted_by_kind": self.by_kind(),
            "accepted_by_level": self.by_level(),
            "sampled_slot_survives": self.survived / self.pools if self.pools else None,
            "calibration": self.curves(),
            "calibration_by_level": {
                level: curves([cells]) for level, cells in sorted(self.tried.items())
            },
        }


def render(calibrations: dict[str, Calibration]) -> str:
    """A Markdown table: acceptances a cycle by kind and level, and how often a visited parent's sampled slot is in the tree."""
    levels = max(len(c.by_level()) for c in calibrations.values())
    lines = [
        f"| method | lead | sampled | fill | sampled slot survives | {' | '.join(f'level {i + 1}' for i in range(levels))} |"
    ]
    lines.append("| --- " * (5 + levels) + "|")
    for name, calibration in calibrations.items():
        kinds = " | ".join(f"{value:.3f}" for value in calibration.by_kind().values())
        survives = (
            f"{100 * calibration.survived / calibration.pools:.0f} %"
            if calibration.survived
            else "-"
        )
        by_level = calibration.by_level()
        shown = " | ".join(f"{by_level[i]:.3f}" if i < len(by_level) else "" for i in range(levels))
        lines.append(f"| {name} | {kinds} | {survives} | {shown} |")
    return "\n".join(lines)


def plot_curves(axis, by_kind: Curves, **style) -> None:
    """Share accepted against the proxy into one panel, beside the diagonal; ``style`` is of the lines."""
    axis.plot([0, 1], [0, 1], color="gray", linestyle="--", linewidth=1)
    for (kind, points), marker in zip(by_kind.items(), "os^"):
        if points:
            axis.plot(
                [p[0] for p in points], [p[1] for p in points], marker=marker, label=kind, **style
            )
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 1)
    axis.grid(alpha=0.3)


def plot(found: dict[str, Curves], pictures: Iterable[Path]) -> None:
    """Share accepted against the proxy, one panel a method; a slot on the diagonal is worth what its proxy says."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(len(found), 4)
    rows = -(-len(found) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(3.6 * columns, 3.6 * rows), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(found) :]:
        axis.set_visible(False)
    for axis, (name, by_kind) in zip(axes.flat, found.items()):
        plot_curves(axis, by_kind)
        axis.set_title(name)
        axis.set_xlabel("proxy")
        if any(by_kind.values()):
            axis.legend(loc="upper left")
    for row in axes:
        row[0].set_ylabel("share accepted where its parent is visited")
    for picture in pictures:
        with replacing(picture) as scratch:
            figure.savefig(scratch, dpi=160)
    pyplot.close(figure)
