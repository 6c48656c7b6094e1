"""The picture of a training run."""

import json
from pathlib import Path

from eagle.files import replacing


def plot_curve(metrics: Path, picture: Path) -> None:
    """Loss, agreement and held-out tau against tokens seen, from ``metrics.jsonl``; replaces the picture, all or nothing."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    learning, measured = [r for r in records if "loss" in r], [r for r in records if "tau" in r]
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for axis, name, title in (
        (axes[0], "loss", "cross-entropy"),
        (axes[1], "agreement", "top-1 agreement"),
    ):
        for step in range(len(learning[0][name]) if learning else 0):
            axis.plot(
                [r["tokens"] for r in learning],
                [r[name][step] for r in learning],
                label=f"self-fed step {step}",
                linewidth=1,
            )
        axis.set_title(f"{title}, training batches")
    for name in measured[0]["tau"] if measured else ():
        axes[2].plot(
            [r["tokens"] for r in measured],
            [r["tau"][name] for r in measured],
            marker="o",
            label=name,
        )
    axes[2].set_title("tau, held-out conversations, T = 1")
    for axis in axes:
        axis.set_xlabel("tokens seen")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)
    with replacing(picture) as scratch:
        figure.savefig(scratch)
    pyplot.close(figure)
