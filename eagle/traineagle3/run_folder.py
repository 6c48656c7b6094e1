"""The output folder of a training run."""

import json
from pathlib import Path

import torch

from eagle.files import differences, replace_text, replacing
from eagle.traineagle3.curve import plot_curve


class RunFolder:
    """The files of a training run. Only the main process writes them.

    Args:
        path: the folder.

    Attributes:
        head: the newest draft head in the official layout, for ``EaModel.from_pretrained``.
        checkpoint: all that a resumed run needs: draft head, optimiser, position, data.
        metrics: one JSON object per line: loss and top-1 agreement of each self-fed step on
            training batches, or tau on held-out conversations.
        curve: a plot of the metrics.
        settings: the run's ``Recipe``.
    """

    def __init__(self, path: Path):
        self.path = path
        self.head = path / "head"
        self.checkpoint = path / "checkpoint.pt"
        self.metrics = path / "metrics.jsonl"
        self.curve = path / "curve.png"
        self.settings = path / "settings.json"

    def check_settings(self, settings: dict) -> None:
        """Check that the folder holds no other run.

        Raises:
            ValueError: if it holds a checkpoint of other settings, naming those that differ.
        """
        if not (self.settings.exists() and self.checkpoint.exists()):
            return
        now = json.loads(json.dumps(settings))  # tuples become lists, as in the file
        changed = differences(json.loads(self.settings.read_text()), now)
        if changed:
            raise ValueError(
                f"{self.path} holds another run ({', '.join(changed)}); choose another --output"
            )

    def write_settings(self, settings: dict) -> None:
        """Write the settings."""
        replace_text(self.settings, json.dumps(settings, indent=1) + "\n")

    def load_checkpoint(self, data: str) -> dict | None:
        """The checkpoint; None if there is none.

        Args:
            data: hash of the training texts.

        Raises:
            ValueError: if the checkpoint is of other texts.
        """
        if not self.checkpoint.exists():
            return None
        state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        if state["data"] != data:
            raise ValueError(
                f"the data files have changed since {self.checkpoint} was written; choose another "
                "--output (--init-head starts from a trained draft head)"
            )
        return state

    def save_checkpoint(self, state: dict) -> None:
        """Replace the checkpoint."""
        with replacing(self.checkpoint) as scratch:
            torch.save(state, scratch)

    def record(self, values: dict) -> None:
        """Add a line to the metrics."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self.metrics.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def drop_metrics_after(self, step: int) -> None:
        """Keep the metrics up to a step; a run that resumes there will write the others again."""
        if not self.metrics.exists():
            return
        lines = self.metrics.read_text().split("\n")[:-1]  # an incomplete last line goes, too
        kept = [line + "\n" for line in lines if json.loads(line)["step"] <= step]
        replace_text(self.metrics, "".join(kept))

    def plot(self) -> None:
        """Plot the metrics, if there are any."""
        if self.metrics.exists():
            plot_curve(self.metrics, self.curve)
