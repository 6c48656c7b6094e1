"""Compare methods over temperatures, from files of ``evaluation.acceptance``.

Run as ``python -m evaluation.contexts.temperatures contexts-T*.json --output FOLDER``. It writes

- a table: tau of the first method, and the differences of the other methods to it on the same
  contexts; then ``rheo:auto`` minus ``rheo:1``, and ``rheo:auto`` minus the fixed method that is
  best at each temperature;
- a plot of the differences;
- for some methods, a plot of the share of slots accepted by proxy, temperature and level.
"""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

import rheo
from eagle.files import replace_text
from eagle.plotting import saved_plot
from eagle.program import new_parser, program
from evaluation.common.markdown import table
from evaluation.common.statistics import Statistic, show
from evaluation.contexts.calibration import plot_curves
from evaluation.contexts.compare import count_contexts, parse_method, taus

AUTO, PAPER = "rheo:auto", "rheo:1"
MAY_DIFFER = {"temperature", "plot", "commit"}  # between the settings of two files
LEVELS = ("1", "2", "3", "4")  # levels that are plotted
MARKERS = "os^vDP"


@dataclass(frozen=True)
class Row:
    """The methods at one temperature, or their mean over all temperatures.

    The last four values are None if ``AUTO`` or ``PAPER`` was not measured.

    Attributes:
        temperature: the temperature, or None for the mean.
        contexts: number of contexts.
        first: tau of the first method.
        differences: tau of each other method minus that of the first.
        paper: tau of ``PAPER``.
        to_paper: tau of ``AUTO`` minus that of ``PAPER``.
        to_best: tau of ``AUTO`` minus that of the best fixed method. That method is chosen by the
            same numbers, which favours it. The mean compares with a new choice at each temperature.
        best: name of that method; None for the mean.
    """

    temperature: float | None
    contexts: int
    first: Statistic
    differences: dict[str, Statistic]
    paper: Statistic | None = None
    to_paper: Statistic | None = None
    to_best: Statistic | None = None
    best: str | None = None

    @classmethod
    def of(cls, temperature: float, rows: list[dict]) -> "Row":
        """The methods at one temperature, from the rows of a file."""
        tau = {method: value for (_, method), value in taus(rows).items()}
        first, *others = tau
        differences = {method: tau[method].minus(tau[first]) for method in others}
        row = cls(temperature, count_contexts(rows), tau[first], differences)
        if AUTO not in tau or PAPER not in tau:
            return row
        fixed = [method for method in tau if parse_method(method).get("m") != rheo.AUTO]
        best = max(fixed, key=lambda method: tau[method].value)
        to_paper, to_best = tau[AUTO].minus(tau[PAPER]), tau[AUTO].minus(tau[best])
        return replace(row, paper=tau[PAPER], to_paper=to_paper, to_best=to_best, best=best)

    @classmethod
    def mean(cls, rows: list["Row"]) -> "Row":
        """The mean over temperatures, at which the questions are the same."""
        mean = Statistic.mean_of_same
        row = cls(
            temperature=None,
            contexts=sum(row.contexts for row in rows),
            first=mean([row.first for row in rows]),
            differences={
                method: mean([row.differences[method] for row in rows])
                for method in rows[0].differences
            },
        )
        if rows[0].paper is None:
            return row
        names = ("paper", "to_paper", "to_best")
        return replace(row, **{name: mean([getattr(row, name) for row in rows]) for name in names})

    def cells(self) -> list[str]:
        """The row of the table."""
        temperature = "mean" if self.temperature is None else f"{self.temperature:g}"
        cells = [temperature, str(self.contexts), show(self.first.estimate(), digits=3)]
        cells += [show(difference.estimate(), True, 3) for difference in self.differences.values()]
        if self.paper is not None:
            share = 100 * self.to_paper.value / self.paper.value
            best = f" ({self.best})" if self.best else ""
            cells.append(f"{show(self.to_paper.estimate(), True, 3)} ({share:+.1f} %)")
            cells.append(f"{show(self.to_best.estimate(), True, 3)}{best}")
        return cells


def read(path: Path) -> dict:
    """The content of a file of ``evaluation.acceptance``, with its only draft head as ``head``.

    Raises:
        ValueError: for another kind of file, or one with several draft heads.
    """
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or not {"settings", "rows", "calibration"} <= content.keys():
        raise ValueError(f"{path} was not written by evaluation.acceptance --output")
    if not all({"method", "position"} <= row.keys() for row in content["rows"]):
        raise ValueError(f"{path} is of version 0.1, which wrote other names; measure it again")
    heads = {row["head"] for row in content["rows"]}
    if len(heads) != 1:
        raise ValueError(f"{path} holds {len(heads)} draft heads; give files of one")
    return content | {"head": heads.pop()}


def read_all(paths: list[Path]) -> dict[float, dict]:
    """The files by temperature, lowest first.

    Raises:
        ValueError: unless all have the same head and settings and a temperature of their own.
    """
    contents: dict[float, dict] = {}
    for path in paths:
        content = read(path)
        temperature = content["settings"]["temperature"]
        if temperature in contents:
            raise ValueError(
                f"{path} is a second file of temperature {temperature}; "
                "give one file per temperature"
            )
        first = next(iter(contents.values()), content)
        ours, theirs = ({"head": c["head"]} | c["settings"] for c in (content, first))
        for name in sorted((ours.keys() | theirs.keys()) - MAY_DIFFER):
            if ours.get(name) != theirs.get(name):
                raise ValueError(
                    f"{path} was made with {name} {ours.get(name)}, "
                    f"{paths[0]} with {theirs.get(name)}; "
                    "give files that differ in temperature only"
                )
        contents[temperature] = content
    return dict(sorted(contents.items()))


def levels_of(contents: dict[float, dict], method: str) -> dict[float, dict]:
    """The calibration of a method by level, for each temperature.

    Raises:
        ValueError: for a method that was not measured, or a file without levels.
    """
    found = {}
    for temperature, content in contents.items():
        methods = {entry["method"]: entry for entry in content["calibration"]}
        if method not in methods:
            raise ValueError(
                f"method {method!r} was not measured; the methods are {', '.join(methods)}"
            )
        if "calibration_by_level" not in methods[method]:
            raise ValueError(
                f"the file of temperature {temperature} is too old to hold levels; "
                "measure it again, or give no method with --levels-of"
            )
        found[temperature] = methods[method]["calibration_by_level"]
    return found


def render(rows: list[Row], first: str) -> str:
    """The comparison as Markdown."""
    columns = ["T", "contexts", f"{first}: tau", *rows[0].differences]
    if rows[0].paper is not None:
        columns += [f"{AUTO} minus {PAPER}", f"{AUTO} minus the best fixed"]
    return table(columns, [row.cells() for row in rows]) + "\n"


def plot_differences(rows: list[Row], first: str, path: Path) -> None:
    """Plot the difference of each method to the first one over temperature."""
    methods = list(rows[0].differences)
    with saved_plot(path, figsize=(7, 4.2)) as (_, panels):
        panel = panels[0, 0]
        style = {"markersize": 5, "capsize": 2, "linewidth": 1.2}
        for number, method in enumerate(methods):
            estimates = [row.differences[method].estimate() for row in rows]
            shift = 0.008 * (number - len(methods) / 2)  # side by side, to keep intervals apart
            x, y = [row.temperature + shift for row in rows], [e.value for e in estimates]
            errors = [0 if e.low is None else e.high - e.value for e in estimates]
            marker = MARKERS[number % len(MARKERS)]
            panel.errorbar(x, y, yerr=errors, marker=marker, label=method, **style)
        panel.axhline(0, color="gray", linestyle="--", linewidth=1)
        panel.set(xlabel="temperature", ylabel=f"tau minus that of {first}, 95 %")
        panel.grid(alpha=0.3)
        panel.legend(frameon=False)


def plot_levels(found: dict[float, dict], method: str, path: Path) -> None:
    """Plot the share accepted over the proxy: a column per temperature, a row per level.

    Args:
        found: by temperature, the method's calibration by level.
        method: name of the method, for the title.
        path: the PNG file.
    """
    rows, columns = len(LEVELS), len(found)
    size = (2.5 * columns, 2.4 * rows)
    shared = {"sharex": True, "sharey": True}
    with saved_plot(path, rows, columns, figsize=size, **shared) as (figure, panels):
        for column, (temperature, levels) in zip(panels.T, found.items()):
            for panel, level in zip(column, LEVELS):
                # Points of fewer than one visit are noise.
                by_kind = {
                    kind: [point for point in points if point[2] >= 1]
                    for kind, points in levels.get(level, {}).items()
                }
                plot_curves(panel, by_kind, markersize=4, linewidth=1)
            column[0].set_title(f"T = {temperature:g}")
            column[-1].set_xlabel("proxy")
        for panel, level in zip(panels[:, 0], LEVELS):
            panel.set_ylabel(f"level {level}: accepted")
        panels[0, 0].legend(loc="upper left", frameon=False, fontsize=8)
        figure.suptitle(f"{method}: share of slots accepted where the parent is visited")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = new_parser(
        "evaluation.contexts.temperatures",
        "Compare methods over temperatures, from files of evaluation.acceptance.",
    )
    add = parser.add_argument
    files = "made by evaluation.acceptance --output: one per temperature, with the same settings"
    add("files", type=Path, nargs="+", help=files)
    levels = "methods whose acceptance by level is plotted"
    add("--levels-of", nargs="*", default=[], help=levels)
    add("--output", type=Path, required=True, help="folder for the table and the plots")
    return parser


@program(build_parser)
def main(args: argparse.Namespace) -> None:
    """Read the files, print the table, write table and plots."""
    contents = read_all(args.files)
    levels = {method: levels_of(contents, method) for method in args.levels_of}
    rows = [Row.of(temperature, content["rows"]) for temperature, content in contents.items()]
    first = next(iter(contents.values()))["rows"][0]["method"]
    text = render([*rows, Row.mean(rows)], first)
    print(text)
    replace_text(args.output / "temperatures.md", text)
    plot_differences(rows, first, args.output / "temperatures.png")
    for method, found in levels.items():
        plot_levels(found, method, args.output / f"levels-{method.replace(':', '-')}.png")


if __name__ == "__main__":
    main()
