"""Arms over temperatures, from files of ``evaluation.acceptance``: ``python -m evaluation.temperatures contexts-T*.json --output FOLDER``.

One table: the first arm's tau, what every other arm has beyond it on the same contexts, and how ``rheo:auto`` does beside ``rheo:1`` and beside
the fixed arm that came out best at each temperature. Two pictures: the differences, and for some arms how often slots of each kind were
accepted by proxy, temperature and level.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import rheo
from eagle.files import replace_text, replacing
from eagle.program import one_line_errors
from evaluation.acceptance import count_contexts, parse_arm, taus
from evaluation.calibration import draw_curves
from evaluation.statistics import Statistic
from evaluation.tables import show

AUTO, PAPER = "rheo:auto", "rheo:1"
MAY_DIFFER = {"temperature", "plot", "commit"}  # between the settings of two files
LEVELS = ("1", "2", "3", "4")  # of the picture by level
MARKERS = "os^vDP"


@dataclass(frozen=True)
class Row:
    """The arms at one temperature, or their mean over all.

    Attributes:
        temperature: None for the mean.
        first: tau of the first arm.
        differences: of the other arms to the first.
        paper: tau of PAPER; with ``to_paper`` and ``to_best``, AUTO minus it and AUTO minus the best fixed arm; None where one was not measured.
        best: that arm. It is chosen by what is compared, so the difference to it leans to its side; the mean is that to a choice made anew at each
            temperature.
    """

    temperature: float | None
    contexts: int
    first: Statistic
    differences: dict[str, Statistic]
    paper: Statistic | None = None
    to_paper: Statistic | None = None
    to_best: Statistic | None = None
    best: str = ""

    @classmethod
    def of(cls, temperature: float, rows: list[dict]) -> "Row":
        """From the rows of a file."""
        arms = {arm: tau for (_, arm), tau in taus(rows).items()}
        first, *others = arms
        beside = ()
        if AUTO in arms and PAPER in arms:
            best = max((arm for arm in arms if parse_arm(arm).get("m") != rheo.AUTO), key=lambda arm: arms[arm].value)
            beside = arms[PAPER], arms[AUTO].minus(arms[PAPER]), arms[AUTO].minus(arms[best]), best
        return cls(temperature, count_contexts(rows), arms[first], {arm: arms[arm].minus(arms[first]) for arm in others}, *beside)

    @classmethod
    def mean(cls, rows: list["Row"]) -> "Row":
        """Over temperatures, at which the questions are the same."""
        mean = Statistic.mean_of_same
        differences = {arm: mean([row.differences[arm] for row in rows]) for arm in rows[0].differences}
        beside = [None if rows[0].paper is None else mean([getattr(row, name) for row in rows]) for name in ("paper", "to_paper", "to_best")]
        return cls(None, sum(row.contexts for row in rows), mean([row.first for row in rows]), differences, *beside)

    def cells(self) -> list[str]:
        """Of the table."""
        cells = ["mean" if self.temperature is None else f"{self.temperature:g}", str(self.contexts), show(self.first.estimate(), digits=3)]
        cells += [show(difference.estimate(), True, 3) for difference in self.differences.values()]
        if self.paper is not None:
            share = 100 * self.to_paper.value / self.paper.value
            cells.append(f"{show(self.to_paper.estimate(), True, 3)} ({share:+.1f} %)")
            cells.append(show(self.to_best.estimate(), True, 3) + (f" ({self.best})" if self.best else ""))
        return cells


def read(path: Path) -> dict:
    """A file of ``evaluation.acceptance``.

    Raises:
        ValueError: for a file of another kind, or of more than one head.
    """
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or not {"settings", "rows", "calibration"} <= content.keys():
        raise ValueError(f"{path} is not a file of evaluation.acceptance --output")
    heads = {row["head"] for row in content["rows"]}
    if len(heads) != 1:
        raise ValueError(f"{path} holds {len(heads)} heads; give files of one")
    return content | {"head": heads.pop()}


def read_all(paths: list[Path]) -> dict[float, dict]:
    """Files by temperature, rising.

    Raises:
        ValueError: where they are not of one head, the same settings and a temperature each.
    """
    contents: dict[float, dict] = {}
    for path in paths:
        content = read(path)
        temperature = content["settings"]["temperature"]
        if temperature in contents:
            raise ValueError(f"{path} is a second file of temperature {temperature}; give one a temperature")
        first = next(iter(contents.values()), content)
        ours, theirs = ({"head": c["head"]} | c["settings"] for c in (content, first))
        for name in sorted((ours.keys() | theirs.keys()) - MAY_DIFFER):
            if ours.get(name) != theirs.get(name):
                given = f"{path} was made with {name} {ours.get(name)}, {paths[0]} with {theirs.get(name)}"
                raise ValueError(f"{given}; give files that differ in temperature only")
        contents[temperature] = content
    return dict(sorted(contents.items()))


def levels_of(contents: dict[float, dict], arm: str) -> dict[float, dict]:
    """By temperature, an arm's calibration by level.

    Raises:
        ValueError: for an arm that was not measured, or files of before levels were kept.
    """
    found = {t: next((c for c in content["calibration"] if c["arm"] == arm), None) for t, content in contents.items()}
    if None in found.values():
        arms = [c["arm"] for c in next(iter(contents.values()))["calibration"]]
        raise ValueError(f"arm {arm!r} was not measured; the arms are {', '.join(arms)}")
    old = [t for t, entry in found.items() if "calibration_by_level" not in entry]
    if old:
        raise ValueError(f"the file of temperature {old[0]} is of before levels were kept; measure it again, or give --levels-of no arm")
    return {t: entry["calibration_by_level"] for t, entry in found.items()}


def render(rows: list[Row], first: str) -> str:
    """The comparison as Markdown."""
    columns = ["T", "contexts", f"{first}: tau", *rows[0].differences]
    if rows[0].paper is not None:
        columns += [f"{AUTO} minus {PAPER}", f"{AUTO} minus the best fixed"]
    lines = [columns, ["---"] * len(columns), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def draw_differences(rows: list[Row], first: str, picture: Path) -> None:
    """What each arm has beyond the first one, over temperature."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    arms = list(rows[0].differences)
    for number, arm in enumerate(arms):
        estimates = [row.differences[arm].estimate() for row in rows]
        x = [row.temperature + 0.008 * (number - len(arms) / 2) for row in rows]  # side by side, so that intervals can be told apart
        errors = [0 if e.low is None else e.high - e.value for e in estimates]
        marker = MARKERS[number % len(MARKERS)]
        axis.errorbar(x, [e.value for e in estimates], yerr=errors, marker=marker, markersize=5, capsize=2, linewidth=1.2, label=arm)
    axis.axhline(0, color="gray", linestyle="--", linewidth=1)
    axis.set_xlabel("temperature")
    axis.set_ylabel(f"tau minus that of {first}, 95 %")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    with replacing(picture) as scratch:
        figure.savefig(scratch, dpi=160)
    pyplot.close(figure)


def draw_levels(found: dict[float, dict], arm: str, picture: Path) -> None:
    """Share accepted against the proxy: a column a temperature, a row a level.

    Args:
        found: by temperature, the arm's calibration by level.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = 2.5 * len(found), 2.4 * len(LEVELS)
    figure, axes = pyplot.subplots(len(LEVELS), len(found), figsize=size, layout="constrained", squeeze=False, sharex=True, sharey=True)
    for column, (temperature, levels) in zip(axes.T, found.items()):
        for axis, level in zip(column, LEVELS):
            # Points of fewer than one visit are noise.
            by_kind = {kind: [point for point in points if point[2] >= 1] for kind, points in levels.get(level, {}).items()}
            draw_curves(axis, by_kind, markersize=4, linewidth=1)
        column[0].set_title(f"T = {temperature:g}")
        column[-1].set_xlabel("proxy")
    for row, level in zip(axes, LEVELS):
        row[0].set_ylabel(f"level {level}: accepted")
    axes[0, 0].legend(loc="upper left", frameon=False, fontsize=8)
    figure.suptitle(f"{arm}: share of slots accepted where the parent is visited")
    with replacing(picture) as scratch:
        figure.savefig(scratch, dpi=160)
    pyplot.close(figure)


def run(args: argparse.Namespace) -> None:
    """Read, print, write."""
    contents = read_all(args.files)
    levels = {arm: levels_of(contents, arm) for arm in args.levels_of}
    rows = [Row.of(temperature, content["rows"]) for temperature, content in contents.items()]
    first = next(iter(contents.values()))["rows"][0]["arm"]
    text = render([*rows, Row.mean(rows)], first)
    print(text)
    replace_text(args.output / "temperatures.md", text)
    draw_differences(rows, first, args.output / "temperatures.svg")
    for arm, found in levels.items():
        draw_levels(found, arm, args.output / f"levels-{arm.replace(':', '-')}.svg")


def main(argv: list[str] | None = None) -> None:
    """Entry point; bad input ends with one line, not a traceback."""
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.temperatures", description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", help="of evaluation.acceptance --output, one a temperature, else with the same settings")
    parser.add_argument("--levels-of", nargs="*", default=[], help="arms whose acceptance by level is drawn")
    parser.add_argument("--output", type=Path, required=True, help="folder")
    with one_line_errors():
        run(parser.parse_args(argv))


if __name__ == "__main__":
    main()
