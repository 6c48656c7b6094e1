"""Arms over temperatures, from files of ``evaluation.acceptance``: ``python -m evaluation.temperatures contexts-T*.json --output FOLDER``.

One table: the first arm's tau, what every other arm has beyond it on the same contexts, and how ``rheo:auto`` does beside ``rheo:1`` and beside
the fixed arm that came out best at each temperature. Two pictures: the differences, and for some arms how often slots of each kind were
accepted by proxy, temperature and level.
"""

import argparse
import json
from pathlib import Path

from eagle.files import replace_text, replacing
from eagle.program import one_line_errors
from evaluation.statistics import Statistic
from evaluation.tables import show

AUTO, PAPER = "rheo:auto", "rheo:1"
LEVELS = ("1", "2", "3", "4")  # of the picture by level
MARKERS = "os^vDP"


def read(path: Path) -> dict:
    """A file of ``evaluation.acceptance``.

    Raises:
        ValueError: for a file of another kind, or of more than one head.
    """
    content = json.loads(path.read_text())
    if not {"settings", "rows", "calibration"} <= content.keys():
        raise ValueError(f"{path} is not a file of evaluation.acceptance --output")
    heads = {row["head"] for row in content["rows"]}
    if len(heads) != 1:
        raise ValueError(f"{path} holds {len(heads)} heads; give files of one")
    return content


def taus(rows: list[dict]) -> dict[str, Statistic]:
    """tau of each arm, clustered by question."""
    sums: dict[str, tuple[dict, dict]] = {}
    for row in rows:
        totals, counts = sums.setdefault(row["arm"], ({}, {}))
        totals[row["question_id"]] = totals.get(row["question_id"], 0.0) + row["tau"]
        counts[row["question_id"]] = counts.get(row["question_id"], 0) + 1
    return {arm: Statistic.ratio(*both) for arm, both in sums.items()}


def average(parts: list[Statistic]) -> Statistic:
    """Mean over temperatures, at which the questions are the same: one cluster each."""
    questions = {question for part in parts for question in part.influence}
    influence = {q: sum(part.influence.get(q, 0.0) for part in parts) / len(parts) for q in questions}
    return Statistic(sum(part.value for part in parts) / len(parts), influence)


def compare(found: dict[float, dict[str, Statistic]]) -> list[dict]:
    """One row a temperature and one for their mean: tau of the first arm, and differences."""
    first, *others = next(iter(found.values()))
    rows = []
    for temperature, arms in found.items():
        row = {"T": temperature, first: arms[first]} | {arm: arms[arm].minus(arms[first]) for arm in others}
        if AUTO in arms and PAPER in arms:
            best = max((arm for arm in arms if arm != AUTO), key=lambda arm: arms[arm].value)
            row |= {"paper": arms[AUTO].minus(arms[PAPER]), "best": arms[AUTO].minus(arms[best]), "name": best, "share": arms[PAPER]}
        rows.append(row)
    together = {"T": "mean"} | {key: average([row[key] for row in rows]) for key in rows[0] if key not in ("T", "name")}
    return [*rows, together]


def render(rows: list[dict], contexts: dict[float, int]) -> str:
    """The comparison as Markdown."""
    first, *others = [key for key in rows[0] if key not in ("T", "paper", "best", "name", "share")]
    lines = [f"| T | contexts | {first}: tau | {' | '.join(others)} |" + (f" {AUTO} minus {PAPER} | {AUTO} minus the best fixed |" if "best" in rows[0] else "")]
    lines.append("| --- " * (lines[0].count("|") - 1) + "|")
    for row in rows:
        cells = [str(row["T"]), str(contexts.get(row["T"], sum(contexts.values()))), show(row[first].estimate(), digits=3)]
        cells += [show(row[arm].estimate(), True, 3) for arm in others]
        if "best" in row:
            share = f" ({100 * row['paper'].value / row['share'].value:+.1f} %)"
            cells += [show(row["paper"].estimate(), True, 3) + share, show(row["best"].estimate(), True, 3) + (f" ({row['name']})" if "name" in row else "")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw_differences(rows: list[dict], picture: Path) -> None:
    """What each arm has beyond the first one, over temperature."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first, *others = [key for key in rows[0] if key not in ("T", "paper", "best", "name", "share")]
    figure, axis = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for number, (arm, marker) in enumerate(zip(others, MARKERS * len(others))):
        points = [(row["T"], row[arm].estimate()) for row in rows[:-1]]
        x = [t + 0.008 * (number - len(others) / 2) for t, _ in points]  # side by side, so that intervals can be told apart
        errors = [0 if e.low is None else e.high - e.value for _, e in points]
        axis.errorbar(x, [e.value for _, e in points], yerr=errors, marker=marker, markersize=5, capsize=2, linewidth=1.2, label=arm)
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

    figure, axes = pyplot.subplots(len(LEVELS), len(found), figsize=(2.5 * len(found), 2.4 * len(LEVELS)), layout="constrained", squeeze=False,
                                   sharex=True, sharey=True)  # fmt: skip
    for column, (temperature, levels) in zip(axes.T, found.items()):
        for axis, level in zip(column, LEVELS):
            axis.plot([0, 1], [0, 1], color="gray", linestyle="--", linewidth=1)
            for (kind, points), marker in zip(levels.get(level, {}).items(), MARKERS):
                points = [point for point in points if point[2] >= 1]  # visits; under one it is noise
                axis.plot([p[0] for p in points], [p[1] for p in points], marker=marker, markersize=4, linewidth=1, label=kind)
            axis.set_xlim(0, 1)
            axis.set_ylim(0, 1)
            axis.grid(alpha=0.3)
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
    contents = {}
    for path in args.files:
        content = read(path)
        temperature = content["settings"]["temperature"]
        if temperature in contents:
            raise ValueError(f"{path} is a second file of temperature {temperature}; give one a temperature")
        contents[temperature] = content
    contents = dict(sorted(contents.items()))
    found = {temperature: taus(content["rows"]) for temperature, content in contents.items()}
    if len({tuple(arms) for arms in found.values()}) != 1:
        raise ValueError("the files hold different arms; give files of the same --arms")
    rows = compare(found)
    contexts = {t: sum(row["arm"] == next(iter(found[t])) for row in content["rows"]) for t, content in contents.items()}
    text = render(rows, contexts)
    print(text)
    replace_text(args.output / "temperatures.md", text)
    draw_differences(rows, args.output / "temperatures.svg")
    for arm in args.levels_of:
        by_level = {t: c["calibration_by_level"] for t, content in contents.items() for c in content["calibration"] if c["arm"] == arm and "calibration_by_level" in c}
        if not by_level:
            raise ValueError(f"no file holds the levels of arm {arm!r}; the arms are {', '.join(next(iter(found.values())))}")
        draw_levels(by_level, arm, args.output / f"levels-{arm.replace(':', '-')}.svg")


def main(argv: list[str] | None = None) -> None:
    """Entry point; bad input ends with one line, not a traceback."""
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.temperatures", description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", help="of evaluation.acceptance --output, one a temperature, of one head and the same arms")
    parser.add_argument("--levels-of", nargs="*", default=[PAPER], help="arms whose acceptance by level is drawn")
    parser.add_argument("--output", type=Path, required=True, help="folder")
    with one_line_errors():
        run(parser.parse_args(argv))


if __name__ == "__main__":
    main()
