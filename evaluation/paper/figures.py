"""Plots of tau against m and against temperature, as in the paper's Figures 3 and 4."""

from pathlib import Path

from eagle.plotting import saved_plot
from evaluation.paper.grids import BENCH_LABELS, MEAN
from evaluation.paper.rows import Row


def plot(rows: list[Row], path: Path) -> None:
    """Plot tau against temperature, or against m if there is one temperature.

    Args:
        rows: of an experiment; each bench gets a panel.
        path: the file to write.
    """
    benches = [bench for bench in dict.fromkeys(row.bench for row in rows) if bench != MEAN]
    one_temperature = len({row.temperature for row in rows}) == 1
    plot_panel = plot_against_m if one_temperature else plot_against_temperature
    with saved_plot(path, 1, len(benches), figsize=(3.6 * len(benches), 3.4)) as (_, panels):
        for panel, bench in zip(panels[0], benches):
            plot_panel(panel, [row for row in rows if row.bench == bench and row.tau])
            panel.set_title(BENCH_LABELS[bench])
            panel.grid(alpha=0.3)
        panels[0, 0].set_ylabel("tau")
        if panels[0, 0].get_legend_handles_labels()[0]:
            panels[0, 0].legend()


def plot_against_m(panel, rows: list[Row]) -> None:
    """RheoSampling by its number of lead slots, and Top-K as a horizontal band."""
    sampled = [row for row in rows if row.method.startswith("rheo")]
    leads = [int(row.method.removeprefix("rheo-m")) for row in sampled]
    plot_taus(panel, leads, sampled, "rheo")
    for row in rows:
        if row.method == "topk":
            panel.axhline(row.tau.value, color="gray", linestyle="--", label="topk")
            if row.tau.low is not None:
                panel.axhspan(row.tau.low, row.tau.high, color="gray", alpha=0.15)
    panel.set_xlabel("m")
    panel.set_xticks(leads)


def plot_against_temperature(panel, rows: list[Row]) -> None:
    """One line per method, and Top-K at temperature 0 as a horizontal line."""
    for method in dict.fromkeys(row.method for row in rows):
        points = [row for row in rows if row.method == method]
        plot_taus(panel, [row.temperature for row in points], points, method)
    for row in rows:
        if row.method == "topk" and row.temperature == 0:
            panel.axhline(row.tau.value, color="gray", linestyle="--", label="topk, greedy")
    panel.set_xlabel("temperature")


def plot_taus(panel, positions: list[float], rows: list[Row], label: str) -> None:
    """A line of tau with error bars."""
    errors = [0 if row.tau.low is None else row.tau.high - row.tau.value for row in rows]
    taus = [row.tau.value for row in rows]
    panel.errorbar(positions, taus, errors, marker="o", capsize=3, label=label)
