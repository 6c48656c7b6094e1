"""Arms over temperatures, from files of ``evaluation.acceptance``: ``python -m evaluation.contexts.temperatures contexts-T*.json --output FOLDER``.

One table: the first method's tau, what every other method has beyond it on the same contexts, and how ``rheo:auto`` does beside ``rheo:1`` and beside
the fixed method that came out best at each temperature. Two pictures: the differences, and for some methods how often slots of each kind were
accepted by proxy, temperature and level.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import rheo
from eagle.files import replace_text, replacing
from eagle.program import one_line_errors
from evaluation.common.statistics import Statistic
from evaluation.contexts.calibration import plot_curves
from evaluation.contexts.compare import count_contexts, parse_method, taus
from evaluation.paper.tables import show

AUTO, PAPER = "rheo:auto", "rheo:1"
MAY_DIFFER = {"temperature", "plot", "commit"}  # between the settings of two files
LEVELS = ("1", "2", "3", "4")  # of the picture by level
MARKERS = "os^vDP"


@dataclass(frozen=True)
class Row:
    """The methods at one temperature, or their mean over all.

    Attributes:
        temperature: None for the mean.
        first: tau of the first method.
        differences: of the other methods to the first.
        paper: tau of PAPER; with ``to_paper`` and ``to_best``, AUTO minus it and AUTO minus the best fixed method; None where one was not measured.
        best: that method. It is chosen by what is compared, so the difference to it leans to its side; the mean is that to a choice made anew at each
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
        methods = {method: tau for (_, method), tau in taus(rows).items()}
        first, *others = methods
        beside = ()
        if AUTO in methods and PAPER in methods:
            best = max(
                (method for method in methods if parse_method(method).get("m") != rheo.AUTO),
                key=lambda method: methods[method].value,
            )
            beside = (
                methods[PAPER],
                methods[AUTO].minus(methods[PAPER]),
                methods[AUTO].minus(methods[best]),
                best,
            )
        return cls(
            temperature,
            count_contexts(rows),
            methods[first],
            {method: methods[method].minus(methods[first]) for method in others},
            *beside,
        )

    @classmethod
    def mean(cls, rows: list["Row"]) -> "Row":
        """Over temperatures, at which the questions are the same."""
        mean = Statistic.mean_of_same
        differences = {
            method: mean([row.differences[method] for row in rows])
            for method in rows[0].differences
        }
        beside = [
            None if rows[0].paper is None else mean([getattr(row, name) for row in rows])
            for name in ("paper", "to_paper", "to_best")
        ]
        return cls(
            None,
            sum(row.contexts for row in rows),
            mean([row.first for row in rows]),
            differences,
            *beside,
        )

    def cells(self) -> list[str]:
        """Of the table."""
        cells = [
            "mean" if self.temperature is None else f"{self.temperature:g}",
            str(self.contexts),
            show(self.first.estimate(), digits=3),
        ]
        cells += [show(difference.estimate(), True, 3) for difference in self.differences.values()]
        if self.paper is not None:
            share = 100 * self.to_paper.value / self.paper.value
            cells.append(f"{show(self.to_paper.estimate(), True, 3)} ({share:+.1f} %)")
            cells.append(
                show(self.to_best.estimate(), True, 3) + (f" ({self.best})" if self.best else "")
            )
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
            raise ValueError(
                f"{path} is a second file of temperature {temperature}; give one a temperature"
            )
        first = next(iter(contents.values()), content)
        ours, theirs = ({"head": c["head"]} | c["settings"] for c in (content, first))
        for name in sorted((ours.keys() | theirs.keys()) - MAY_DIFFER):
            if ours.get(name) != theirs.get(name):
                given = f"{path} was made with {name} {ours.get(name)}, {paths[0]} with {theirs.get(name)}"
                raise ValueError(f"{given}; give files that differ in temperature only")
        contents[temperature] = content
    return dict(sorted(contents.items()))


def levels_of(contents: dict[float, dict], method: str) -> dict[float, dict]:
    """By temperature, a method's calibration by level.

    Raises:
        ValueError: for a method that was not measured, or files of before levels were kept.
    """
    found = {
        t: next((c for c in content["calibration"] if c["method"] == method), None)
        for t, content in contents.items()
    }
    if None in found.values():
        methods = [c["method"] for c in next(iter(contents.values()))["calibration"]]
        raise ValueError(
            f"method {method!r} was not measured; the methods are {', '.join(methods)}"
        )
    old = [t for t, entry in found.items() if "calibration_by_level" not in entry]
    if old:
        raise ValueError(
            f"the file of temperature {old[0]} is of before levels were kept; measure it again, or give --levels-of no method"
        )
    return {t: entry["calibration_by_level"] for t, entry in found.items()}


def render(rows: list[Row], first: str) -> str:
    """The comparison as Markdown."""
    columns = ["T", "contexts", f"{first}: tau", *rows[0].differences]
    if rows[0].paper is not None:
        columns += [f"{AUTO} minus {PAPER}", f"{AUTO} minus the best fixed"]
    lines = [columns, ["---"] * len(columns), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def plot_differences(rows: list[Row], first: str, picture: Path) -> None:
    """What each method has beyond the first one, over temperature."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    methods = list(rows[0].differences)
    for number, method in enumerate(methods):
        estimates = [row.differences[method].estimate() for row in rows]
        x = [
            row.temperature + 0.008 * (number - len(methods) / 2) for row in rows
        ]  # side by side, so that intervals can be told apart
        errors = [0 if e.low is None else e.high - e.value for e in estimates]
        marker = MARKERS[number % len(MARKERS)]
        axis.errorbar(
            x,
            [e.value for e in estimates],
            yerr=errors,
            marker=marker,
            markersize=5,
            capsize=2,
            linewidth=1.2,
            label=method,
        )
    axis.axhline(0, color="gray", linestyle="--", linewidth=1)
    axis.set_xlabel("temperature")
    axis.set_ylabel(f"tau minus that of {first}, 95 %")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    with replacing(picture) as scratch:
        figure.savefig(scratch, dpi=160)
    pyplot.close(figure)


def plot_levels(found: dict[float, dict], method: str, picture: Path) -> None:
    """Share accepted against the proxy: a column a temperature, a row a level.

    Args:
        found: by temperature, the method's calibration by level.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = 2.5 * len(found), 2.4 * len(LEVELS)
    figure, axes = pyplot.subplots(
        len(LEVELS),
        len(found),
        figsize=size,
        layout="constrained",
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    for column, (temperature, levels) in zip(axes.T, found.items()):
        for axis, level in zip(column, LEVELS):
            # Points of fewer than one visit are noise.
            by_kind = {
                kind: [point for point in points if point[2] >= 1]
                for kind, points in levels.get(level, {}).items()
            }
            plot_curves(axis, by_kind, markersize=4, linewidth=1)
        column[0].set_title(f"T = {temperature:g}")
        column[-1].set_xlabel("proxy")
    for row, level in zip(axes, LEVELS):
        row[0].set_ylabel(f"level {level}: accepted")
    axes[0, 0].legend(loc="upper left", frameon=False, fontsize=8)
    figure.suptitle(f"{method}: share of slots accepted where the parent is visited")
    with replacing(picture) as scratch:
        figure.savefig(scratch, dpi=160)
    pyplot.close(figure)


def run(args: argparse.Namespace) -> None:
    """Read, print, write."""
    contents = read_all(args.files)
    levels = {method: levels_of(contents, method) for method in args.levels_of}
    rows = [Row.of(temperature, content["rows"]) for temperature, content in contents.items()]
    first = next(iter(contents.values()))["rows"][0]["method"]
    text = render([*rows, Row.mean(rows)], first)
    print(text)
    replace_text(args.output / "temperatures.md", text)
    plot_differences(rows, first, args.output / "temperatures.svg")
    for method, found in levels.items():
        plot_levels(found, method, args.output / f"levels-{method.replace(':', '-')}.svg")


def main(argv: list[str] | None = None) -> None:
    """Entry point; bad input ends with one line, not a traceback."""
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.contexts.temperatures",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "files",
        type=Path,
        nargs="+",
        help="of evaluation.acceptance --output, one a temperature, else with the same settings",
    )
    parser.add_argument(
        "--levels-of", nargs="*", default=[], help="methods whose acceptance by level is drawn"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder")
    with one_line_errors():
        run(parser.parse_args(argv))


if __name__ == "__main__":
    main()
