"""Plot the progress of a training run."""

import json
from pathlib import Path

from eagle.plotting import saved_plot


def plot_curve(metrics: Path, plot: Path) -> None:
    """Plot loss, agreement and held-out tau against the tokens seen.

    Args:
        metrics: the run's ``metrics.jsonl``.
        plot: file to write, replaced as a whole.
    """
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    training = [record for record in records if "loss" in record]
    measured = [record for record in records if "tau" in record]
    with saved_plot(plot, columns=3, figsize=(13, 3.8)) as (_, panels):
        loss, agreement, tau = panels[0]
        plot_self_fed_steps(loss, training, "loss")
        loss.set_title("cross-entropy, training batches")
        plot_self_fed_steps(agreement, training, "agreement")
        agreement.set_title("top-1 agreement, training batches")
        tokens = [record["tokens"] for record in measured]
        for method in measured[0]["tau"] if measured else ():
            values = [record["tau"][method] for record in measured]
            tau.plot(tokens, values, marker="o", label=method)
        tau.set_title("tau, held-out conversations, T = 1")
        for panel in panels[0]:
            panel.set_xlabel("tokens seen")
            panel.grid(alpha=0.3)
            if panel.lines:
                panel.legend(fontsize=8)


def plot_self_fed_steps(panel, records: list[dict], name: str) -> None:
    """Plot the values under ``name``, one line for each self-fed step."""
    tokens = [record["tokens"] for record in records]
    for step in range(len(records[0][name]) if records else 0):
        values = [record[name][step] for record in records]
        panel.plot(tokens, values, label=f"self-fed step {step}", linewidth=1)
