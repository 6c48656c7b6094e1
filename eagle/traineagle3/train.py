"""Train an EAGLE-3 head: ``python -m eagle.traineagle3.train --help``; several devices with ``accelerate launch -m``.

The output folder holds

    head/           the newest head in the official layout, for EaModel.from_pretrained(ea_model_path=...)
    checkpoint.pt   all that going on needs: given the same command again, a killed run ends with the same weights
                    (to the bit on a CPU; a GPU's attention adds up in an order of its own)
    metrics.jsonl   one JSON object a line: loss and top-1 agreement of each self-fed step; tau on held-out conversations
    curve.svg       the same as a picture
    settings.json   what decides the result
"""

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from tqdm import tqdm

from eagle.files import differences, replace_text, replacing
from eagle.model.draft.checkpoint import head_folder, load_draft, read_config
from eagle.model.draft.network import DraftModel
from eagle.model.ea_model import EaModel
from eagle.model.loading import DTYPE_HELP, multiplies_in_bf16
from eagle.program import one_line_errors
from eagle.traineagle3.corpus import Conversation, digest, read_corpus
from eagle.traineagle3.curve import plot_curve
from eagle.traineagle3.heldout import HeldOut, split
from eagle.traineagle3.new_head import new_config, new_head, save_head
from eagle.traineagle3.objective import TrainingTimeTest
from eagle.traineagle3.teacher import Teacher
from eagle.traineagle3.vocabulary import choose_draft_ids, coverage

PRECISIONS = ("auto", "no", "bf16")
HELD_OUT_ONE_IN = 50


@dataclass(frozen=True)
class Recipe:
    """What decides the head.

    Attributes:
        init_head: a head to start from instead of the target's own weights.
        steps, decay: self-fed steps, and the weight of each further one.
        batch_tokens: padded tokens of a batch and device.
        warmup: share of the steps in which the learning rate rises.
        max_length: tokens of a conversation; the rest is cut off.
        held_out, held_out_places, total_token, depth, top_k: of the held-out measure (see ``HeldOut``).
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
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be finite and above 0")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup is {self.warmup}; it must lie in 0..1, below 1")
        if self.precision not in PRECISIONS:
            raise ValueError(
                f"precision is {self.precision!r}; choose one of {', '.join(PRECISIONS)}"
            )


class Batches:
    """Batches of conversations of about equal length, epoch after epoch in an order that the seed decides.

    Args:
        lengths: tokens of each conversation.
        batch_tokens: most tokens of a batch, padding included; a longer conversation is a batch by itself.
        epochs: passes over the data; a fraction of one takes so much of its batches.
        processes: devices that take batches in turn; left-over batches are dropped.

    Attributes:
        steps: how often every device gets a batch, at least once.
    """

    def __init__(
        self, lengths: list[int], batch_tokens: int, epochs: float, seed: int, processes: int
    ):
        self.lengths, self.batch_tokens, self.seed, self.processes = (
            lengths,
            batch_tokens,
            seed,
            processes,
        )
        passes = math.ceil(epochs)
        self.order = [batch for number in range(passes) for batch in self.epoch(number)]
        if len(self.order) < processes:
            raise ValueError(
                f"the data gives {len(self.order)} batches, fewer than the {processes} devices; lower batch_tokens"
            )
        self.steps = max(round(len(self.order) * epochs / passes) // processes, 1)

    def at(self, step: int, process: int) -> list[int]:
        """Indices of the conversations that a process takes at a step."""
        return self.order[step * self.processes + process]

    def epoch(self, number: int) -> list[list[int]]:
        """All batches of an epoch."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        # Lengths are blurred, so that a conversation does not meet the same neighbours in every epoch.
        blur = 1 + 0.2 * torch.rand(len(self.lengths), generator=generator)
        batches, current, longest = [], [], 0
        for i in (torch.tensor(self.lengths) * blur).argsort().tolist():
            longest = max(longest, self.lengths[i])
            if current and longest * (len(current) + 1) > self.batch_tokens:
                batches.append(current)
                current, longest = [], self.lengths[i]
            current.append(i)
        batches.append(current)
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def learning_rate(step: int, total: int, warmup: float) -> float:
    """Share of the highest learning rate: linear up, then a cosine down to 0 (both over their own steps)."""
    rising = max(int(warmup * total), 1)
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(total - rising, 1)))


class DivergedError(ArithmeticError):
    """Training has left the finite numbers."""


class Run:
    """One training run: its networks, where it stands, and its output folder."""

    def __init__(
        self,
        recipe: Recipe,
        output: Path,
        accelerator: Accelerator,
        features: Path | None,
        with_embedding: bool = False,
    ):
        self.recipe, self.output, self.accelerator = recipe, output, accelerator
        self.check_folder()
        model = EaModel.from_pretrained(
            recipe.base_model_path,
            dtype=recipe.dtype,
            device_map={"": accelerator.device},
            pack_weights=False,
        )
        self.target = model.target
        self.target.model.requires_grad_(False)
        corpus = read_corpus(recipe.data, self.target.vocab_size)
        train, held = split(corpus, HELD_OUT_ONE_IN)
        train = [
            c for c in train if len(c.prompt) + 2 <= min(len(c.ids), recipe.max_length)
        ]  # others hold nothing to learn
        if not train:
            raise ValueError(
                f"none of the {len(corpus)} conversations is long enough to learn from"
            )
        draft, self.config = self.begin(train)
        self.head, self.kept_embedding = draft, self.target.embedding if with_embedding else None
        folder = (
            None
            if features is None
            else features / f"process-{accelerator.process_index}-of-{accelerator.num_processes}"
        )
        self.teacher = Teacher(self.target, train, draft.aux_layers, recipe.max_length, folder)
        lengths = [len(text) for text in self.teacher.texts]
        self.data = digest(self.teacher.texts)
        self.batches = Batches(
            lengths, recipe.batch_tokens, recipe.epochs, recipe.seed, accelerator.num_processes
        )
        self.total = self.batches.steps
        tree = {"total_token": recipe.total_token, "depth": recipe.depth, "tree_top_k": recipe.top_k}
        self.held_out = HeldOut(
            self.target, held[: recipe.held_out], recipe.held_out_places, recipe.max_length, tree
        )
        self.say(
            f"{len(train)} conversations ({sum(lengths):,} tokens), {len(self.held_out.texts)} of {len(held)} held-out ones for tau; "
            f"{self.total} steps of up to {recipe.batch_tokens} tokens on {accelerator.num_processes} x {accelerator.device}, "
            f"precision {accelerator.mixed_precision}, target in {self.target.dtype}"
        )
        if recipe.held_out and not self.held_out.texts:
            self.say(
                f"no conversation is held out of so few (one prompt in {HELD_OUT_ONE_IN} is): tau will not be measured"
            )

        objective = TrainingTimeTest(
            draft, self.target.embedding, self.target.output_head, recipe.steps, recipe.decay
        )
        self.trained = [parameter for parameter in draft.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(
            self.trained, recipe.lr, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
        )
        self.objective, self.optimizer = accelerator.prepare(
            objective.to(accelerator.device), optimizer
        )
        self.step = self.seen = 0  # optimiser steps taken, tokens that they saw on all devices
        self.resume()
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            replace_text(output / "settings.json", json.dumps(asdict(recipe), indent=1) + "\n")

    def say(self, text: str) -> None:
        self.accelerator.print(text, flush=True)

    def check_folder(self) -> None:
        """Raise a ValueError, naming the settings that differ, where the output folder holds another run."""
        path = self.output / "settings.json"
        if path.exists() and (self.output / "checkpoint.pt").exists():
            changed = differences(
                json.loads(path.read_text()), json.loads(json.dumps(asdict(self.recipe)))
            )
            if changed:
                raise ValueError(
                    f"{self.output} holds another run ({', '.join(changed)}); choose another --output"
                )

    def begin(self, train: list[Conversation]) -> tuple[DraftModel, dict]:
        """The head before its first step, and its config."""
        recipe, target = self.recipe, self.target
        if recipe.init_head is not None:
            draft = load_draft(
                recipe.init_head, target.hidden_size, target.vocab_size, len(target.layers)
            ).float()
            if draft.embed_tokens is not None:
                draft.embed_tokens.requires_grad_(False)
            config = read_config(head_folder(recipe.init_head))
            self.say(
                f"starting from the head in {recipe.init_head}: its size and draft vocabulary stay"
            )
        else:
            ids = choose_draft_ids(train, recipe.draft_vocab_size, target.vocab_size)
            config = new_config(
                target, recipe.draft_vocab_size, intermediate_size=recipe.intermediate_size
            )
            draft, missed = new_head(target, config, ids, recipe.seed)
            if missed:
                self.say(
                    f"these weights start at random, since the target's last layer has none of their shape: {', '.join(missed)}"
                )
        if draft.reduced:
            share = coverage(train, draft.target_ids(), target.vocab_size)
            self.say(
                f"the draft vocabulary of {draft.d2t.numel()} holds {100 * share:.1f} % of the answer tokens"
            )
        return draft.train().to(self.accelerator.device), config

    def resume(self) -> None:
        """Take up the checkpoint of an interrupted run, and drop the metrics that came after it.

        Raises:
            ValueError: where the checkpoint learnt from other texts or is of an older version, or devices do not find the same one.
        """
        path, reached = self.output / "checkpoint.pt", -1
        if path.exists():
            state = torch.load(path, map_location="cpu", weights_only=True)
            if state["data"] != self.data:
                raise ValueError(
                    f"the data files have changed since {path} was written; choose another --output (--init-head goes on from a head)"
                )
            try:
                self.optimizer.load_state_dict(state["optimizer"])
            except ValueError as error:  # as many parameters as an older version had
                raise ValueError(
                    f"{path} does not fit this version; choose another --output (--init-head goes on from a head)"
                ) from error
            self.head.load_state_dict(state["head"])
            self.step, self.seen = state["step"], state["seen"]
            reached = self.step
            self.say(f"going on from step {self.step}")
        metrics = self.output / "metrics.jsonl"
        if metrics.exists() and self.accelerator.is_main_process:
            lines = metrics.read_text().split("\n")[
                :-1
            ]  # what stands after the last end of a line was cut off
            replace_text(
                metrics,
                "".join(line + "\n" for line in lines if json.loads(line)["step"] <= reached),
            )
        steps = self.accelerator.gather(
            torch.tensor([self.step], device=self.accelerator.device)
        ).tolist()
        if len(set(steps)) > 1:
            raise ValueError(
                f"the devices find checkpoints of steps {steps}; {self.output} must be one folder that all of them see"
            )

    def save(self) -> None:
        """Write the head, then the checkpoint: a kill in between repeats the steps since the last one, and writes both."""
        if not self.accelerator.is_main_process:
            return
        save_head(self.head, self.config, self.output / "head", torch.float16, self.kept_embedding)
        networks = {"head": self.head.state_dict(), "optimizer": self.optimizer.state_dict()}
        state = networks | {"step": self.step, "seen": self.seen, "data": self.data}
        with replacing(self.output / "checkpoint.pt") as scratch:
            torch.save(state, scratch)

    def record(self, **values) -> None:
        """Add a line to the metrics."""
        if self.accelerator.is_main_process:
            self.output.mkdir(parents=True, exist_ok=True)
            with (self.output / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": self.step, "tokens": self.seen, **values}) + "\n")

    def measure(self) -> None:
        """Tau on the held-out conversations, which the devices share out, and the picture so far."""
        if self.held_out.texts:
            self.head.eval()
            sums = self.held_out.sums(
                self.head, self.accelerator.process_index, self.accelerator.num_processes
            )
            self.head.train()
            tau = self.held_out.tau(
                self.accelerator.reduce(sums.float().to(self.accelerator.device), "sum")
            )
            self.record(tau=tau)
            self.say(
                f"step {self.step}, {self.seen:,} tokens: tau "
                + ", ".join(f"{name} {value:.3f}" for name, value in tau.items())
            )
        if self.accelerator.is_main_process and (self.output / "metrics.jsonl").exists():
            plot_curve(self.output / "metrics.jsonl", self.output / "curve.svg")

    def train_step(self) -> dict[str, list[float]]:
        """One optimiser step; returns cross-entropy and agreement of each self-fed step, on this device's batch."""
        batch = self.teacher.batch(self.batches.at(self.step, self.accelerator.process_index))
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.lr * learning_rate(self.step, self.total, self.recipe.warmup)
        with self.accelerator.autocast():
            loss, entropy, agreement = self.objective(batch)
        self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.trained, self.recipe.clip)
        if not torch.isfinite(norm):
            raise DivergedError(
                f"the gradient at step {self.step} is {norm.item()}; lower --lr, or use --precision no"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.seen += int(self.accelerator.reduce(batch.lengths.sum(), "sum"))
        return {"loss": entropy.tolist(), "agreement": agreement.tolist()}

    def train(self, log_every: int, save_every: int, measure_every: int) -> None:
        """Train to the end. The recorded loss and agreement are those of the first device's batches."""
        sums, since, start = {}, 0, time.perf_counter()
        if self.step == 0:
            self.measure()
        bar = tqdm(
            total=self.total,
            initial=self.step,
            unit="step",
            disable=not self.accelerator.is_main_process,
        )
        while self.step < self.total:
            for name, values in self.train_step().items():
                sums[name] = [a + b for a, b in zip(sums.get(name, [0.0] * len(values)), values)]
            since += 1
            bar.update()
            if self.step % log_every == 0 or self.step == self.total:
                means = {
                    name: [round(value / since, 4) for value in values]
                    for name, values in sums.items()
                }
                self.record(
                    **means,
                    lr=self.optimizer.param_groups[0]["lr"],
                    seconds=round(time.perf_counter() - start, 1),
                )
                bar.set_postfix(loss=means["loss"][0], agreement=means["agreement"][0])
                sums, since, start = {}, 0, time.perf_counter()
            if self.step % measure_every == 0 or self.step == self.total:
                self.measure()
            if self.step % save_every == 0 or self.step == self.total:
                self.save()
        bar.close()


def choose_precision(precision: str) -> str:
    """bfloat16 where the hardware multiplies in it, else none."""
    if precision != "auto":
        return precision
    return "bf16" if multiplies_in_bf16() else "no"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eagle.traineagle3.train", description="Train an EAGLE-3 head on conversations that the target made.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add(
        "--base-model-path",
        required=True,
        help="target: Hub id, folder, .gguf file, or smollm2-demo",
    )
    add("--data", nargs="+", required=True, help="corpus files (see eagle.traineagle3.generate)")
    add("--output", type=Path, required=True, help="folder of the run")
    add(
        "--init-head",
        help="folder of a head to train further; default: start from the target's weights",
    )
    add(
        "--draft-vocab-size",
        type=int,
        default=32000,
        help="tokens that the head can propose, the most frequent ones of the data",
    )
    add("--intermediate-size", type=int, help="width of the head's MLP; default: the target's")
    add("--epochs", type=float, default=10)
    add(
        "--batch-tokens",
        type=int,
        default=4096,
        help="tokens of a batch, padding included, on each device",
    )
    add("--steps", type=int, default=7, help="self-fed steps (training-time test)")
    add("--decay", type=float, default=0.8, help="weight of each further self-fed step in the loss")
    add("--lr", type=float, default=1e-4, help="highest learning rate")
    add(
        "--warmup",
        type=float,
        default=0.02,
        help="share of the steps in which the learning rate rises",
    )
    add("--weight-decay", type=float, default=0.0)
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add(
        "--max-length", type=int, default=2048, help="tokens of a conversation; the rest is cut off"
    )
    add(
        "--precision",
        choices=PRECISIONS,
        default="auto",
        help="autocast of the head; auto is bf16 where the hardware has it",
    )
    add("--dtype", default="auto", help=f"of the target: {DTYPE_HELP}")
    add("--seed", type=int, default=0)
    add(
        "--features",
        type=Path,
        help="folder to keep the target's features in (4 hidden sizes a token)",
    )
    add(
        "--with-embedding",
        action="store_true",
        help="store the target's embedding with the head; EAGLE needs it for single-file targets",
    )
    add("--log-every", type=int, default=20, help="steps between lines of metrics.jsonl")
    add("--save-every", type=int, default=200, help="steps between checkpoints")
    add("--measure-every", type=int, default=500, help="steps between measurements of tau")
    add(
        "--held-out",
        type=int,
        default=24,
        help=f"held-out conversations for tau (one in {HELD_OUT_ONE_IN} is never trained on)",
    )
    add("--held-out-places", type=int, default=4, help="contexts of each")
    add("--total-token", type=int, default=60, help="tree of the held-out measure")
    add("--depth", type=int, default=7)
    add("--top-k", type=int, default=10)
    return parser


def run(args: argparse.Namespace) -> None:
    """Set up or resume, and train."""
    precision = choose_precision(args.precision)
    accelerator = Accelerator(mixed_precision=precision)
    for name in ("log_every", "save_every", "measure_every"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} is {getattr(args, name)}; it must be at least 1")
    recipe = Recipe(**{
        **{name: getattr(args, name) for name in Recipe.__dataclass_fields__ if hasattr(args, name)},
        "data": tuple(args.data), "precision": precision, "processes": accelerator.num_processes,
    })  # fmt: skip
    Run(recipe, args.output, accelerator, args.features, args.with_embedding).train(
        args.log_every, args.save_every, args.measure_every
    )
    accelerator.print(f"Done: {args.output / 'head'}")
    # The run and its networks are freed by now, and all devices are here: what is left of a process group that another
    # process has already taken down would wait for it for ever.
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()


def main(argv: list[str] | None = None) -> None:
    """Entry point; bad input ends with one line, not a traceback."""
    with one_line_errors(DivergedError):
        run(build_parser().parse_args(argv))


if __name__ == "__main__":
    main()
