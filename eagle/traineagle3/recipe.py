"""The settings of a training run, and the command-line options that set them."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from eagle.model.loading import DTYPE_HELP, multiplies_in_bf16
from eagle.program import new_parser
from eagle.traineagle3.heldout import HELD_OUT_ONE_IN

PRECISIONS = ("auto", "no", "bf16")


@dataclass(frozen=True)
class Recipe:
    """The settings that decide the resulting draft head. A resumed run must have the same ones.

    Attributes:
        base_model_path: the target.
        data: corpus files.
        init_head: draft head to start from; None starts from the target's own weights.
        draft_vocab_size: number of tokens that the draft head can propose.
        intermediate_size: width of the draft head's MLP; None takes the target's.
        epochs: passes over the data.
        batch_tokens: tokens of a batch, padding included, on each device.
        steps: self-fed steps.
        decay: weight of each further self-fed step in the loss.
        lr: highest learning rate.
        warmup: share of the optimiser steps in which the learning rate rises.
        weight_decay: weight decay of AdamW.
        clip: largest norm of the gradient.
        max_length: tokens of a conversation that are used; the rest is cut off.
        precision: autocast of the draft head, "no" or "bf16".
        dtype: dtype of the target.
        seed: decides the order of the batches and the weights that start at random.
        processes: number of processes, one for each device.
        held_out: largest number of held-out conversations that are measured.
        held_out_places: positions in each of them.
        total_token: nodes of the measured draft tree, the root included.
        depth: expansions of that tree after its first level.
        top_k: K, slots of a pool.

    Raises:
        ValueError: for a value outside its range, naming it.
    """

    base_model_path: str
    data: tuple[str, ...]
    init_head: str | None
    draft_vocab_size: int
    intermediate_size: int | None
    epochs: float
    batch_tokens: int
    steps: int
    decay: float
    lr: float
    warmup: float
    weight_decay: float
    clip: float
    max_length: int
    precision: str
    dtype: str
    seed: int
    processes: int
    held_out: int
    held_out_places: int
    total_token: int
    depth: int
    top_k: int

    def __post_init__(self):
        for name in ("epochs", "batch_tokens", "lr", "clip", "max_length", "held_out_places"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be finite and above 0")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup is {self.warmup}; it must be at least 0 and below 1")
        if self.precision not in PRECISIONS:
            raise ValueError(
                f"precision is {self.precision!r}; choose one of {', '.join(PRECISIONS)}"
            )

    @property
    def tree(self) -> dict[str, int]:
        """The sizes of the measured draft tree, by their names in ``DecodingOptions``."""
        return {"total_token": self.total_token, "depth": self.depth, "tree_top_k": self.top_k}


def choose_precision(precision: str) -> str:
    """The precision that "auto" stands for: bf16 if the hardware has instructions for it."""
    if precision != "auto":
        return precision
    return "bf16" if multiplies_in_bf16() else "no"


def build_parser() -> argparse.ArgumentParser:
    """The command-line options of a training run."""
    parser = new_parser(
        "eagle.traineagle3.train",
        "Train an EAGLE-3 draft head on conversations that the target wrote.",
    )

    add = parser.add_argument_group("target and data").add_argument
    target = "Hub id, folder, .gguf file, or smollm2-demo"
    features = "folder to keep the target's features in; takes 4 hidden states per token"
    add("--base-model-path", required=True, help=target)
    add("--dtype", default="auto", help=f"dtype of the target: {DTYPE_HELP}")
    add("--data", nargs="+", required=True, help="corpus files (see eagle.traineagle3.generate)")
    add("--max-length", type=int, default=2048, help="cut conversations off after so many tokens")
    add("--features", type=Path, help=features)

    add = parser.add_argument_group("draft head").add_argument
    vocabulary = "tokens that the draft head can propose: the most frequent ones of the data"
    embedding = "store the target's embedding with the head; EAGLE needs it for one-file targets"
    add("--init-head", help="draft head to start from; None starts from the target's weights")
    add("--draft-vocab-size", type=int, default=32000, help=vocabulary)
    add("--intermediate-size", type=int, help="width of the MLP; None takes the target's")
    add("--with-embedding", action="store_true", help=embedding)

    add = parser.add_argument_group("training").add_argument
    batch = "tokens of a batch, padding included, on each device"
    warmup = "share of the optimiser steps in which the learning rate rises"
    precision = "autocast of the draft head; auto is bf16 if the hardware has instructions for it"
    add("--epochs", type=float, default=10, help="passes over the data")
    add("--batch-tokens", type=int, default=4096, help=batch)
    add("--steps", type=int, default=7, help="self-fed steps (training-time test)")
    add("--decay", type=float, default=0.8, help="weight of each further self-fed step in the loss")
    add("--lr", type=float, default=1e-4, help="highest learning rate")
    add("--warmup", type=float, default=0.02, help=warmup)
    add("--weight-decay", type=float, default=0.0, help="weight decay of AdamW")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--precision", choices=PRECISIONS, default="auto", help=precision)
    add("--seed", type=int, default=0, help="decides the batches and the random weights")

    add = parser.add_argument_group("output").add_argument
    add("--output", type=Path, required=True, help="folder of the run")
    add("--log-every", type=int, default=20, help="steps between lines of metrics.jsonl")
    add("--save-every", type=int, default=200, help="steps between checkpoints")

    add = parser.add_argument_group("tau on held-out conversations").add_argument
    held_out = f"conversations; one prompt in {HELD_OUT_ONE_IN} is held out from training"
    positions = {"dest": "held_out_places", "metavar": "N"}
    positions["help"] = "positions in each held-out conversation"
    add("--measure-every", type=int, default=500, help="steps between measurements")
    add("--held-out", type=int, default=24, help=held_out)
    add("--held-out-positions", "--held-out-places", type=int, default=4, **positions)
    add("--total-token", type=int, default=60, help="nodes of the tree, the root included")
    add("--depth", type=int, default=7, help="expansions after the first level")
    add("--top-k", type=int, default=10, help="slots of a pool (K)")
    return parser
