"""Train an EAGLE-3 draft head: ``python -m eagle.traineagle3.train --help``.

On several devices: ``accelerate launch -m eagle.traineagle3.train``. ``RunFolder`` lists the files
that a run writes. An interrupted run is resumed by the same command, and ends with the same
weights: bit for bit on a CPU, up to the order of additions on a GPU.
"""

import argparse
import time
from dataclasses import asdict, fields
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from eagle.model.draft.checkpoint import head_folder, load_draft, read_config
from eagle.model.draft.network import DraftModel
from eagle.model.ea_model import EaModel
from eagle.program import program
from eagle.traineagle3.corpus import Conversation, digest, read_corpus
from eagle.traineagle3.heldout import HELD_OUT_ONE_IN, HeldOut, split
from eagle.traineagle3.new_head import new_config, new_head, save_head
from eagle.traineagle3.objective import TrainingTimeTest
from eagle.traineagle3.recipe import Recipe, build_parser, choose_precision
from eagle.traineagle3.run_folder import RunFolder
from eagle.traineagle3.schedule import Batches, learning_rate
from eagle.traineagle3.teacher import Teacher
from eagle.traineagle3.vocabulary import choose_draft_ids, coverage


class DivergedError(ArithmeticError):
    """The gradient is infinite or not a number."""


class Run:
    """One training run: its models, its data, and how far it is.

    Args:
        recipe: the settings.
        output: folder of the run. If it holds a checkpoint of the same settings, the run resumes.
        accelerator: devices and processes.
        features: folder to keep the target's features in; None computes them for every batch.
        with_embedding: store the target's embedding with the draft head.

    Raises:
        ValueError: if settings, data, target and output folder do not fit together.
    """

    def __init__(
        self,
        recipe: Recipe,
        output: Path,
        accelerator: Accelerator,
        features: Path | None = None,
        with_embedding: bool = False,
    ):
        self.recipe, self.accelerator, self.folder = recipe, accelerator, RunFolder(output)
        self.is_main = accelerator.is_main_process
        self.process, self.processes = accelerator.process_index, accelerator.num_processes

        # 1. The output folder must not hold another run.
        self.folder.check_settings(asdict(recipe))

        # 2. The target, which is not trained.
        model = EaModel.from_pretrained(
            recipe.base_model_path,
            dtype=recipe.dtype,
            device_map={"": accelerator.device},
            pack_weights=False,
        )
        self.target = model.target
        self.target.model.requires_grad_(False)
        self.stored_embedding = self.target.embedding if with_embedding else None

        # 3. The conversations, without those in which no token is drafted.
        corpus = read_corpus(recipe.data, self.target.vocab_size)
        train, held_out = split(corpus, HELD_OUT_ONE_IN)
        train = [c for c in train if len(c.prompt) + 2 <= min(len(c.ids), recipe.max_length)]
        if not train:
            raise ValueError(f"all {len(corpus)} conversations are too short to learn from")

        # 4. The draft head before its first step.
        self.head, self.config = self.initial_head(train)

        # 5. The batches, with the target's features, and the measure on held-out conversations.
        if features is not None:
            features = features / f"process-{self.process}-of-{self.processes}"
        aux_layers, max_length = self.head.aux_layers, recipe.max_length
        self.teacher = Teacher(self.target, train, aux_layers, max_length, features)
        self.data = digest(self.teacher.texts)
        lengths = [len(text) for text in self.teacher.texts]
        batch_tokens, epochs = recipe.batch_tokens, recipe.epochs
        self.batches = Batches(lengths, batch_tokens, epochs, recipe.seed, self.processes)
        measured, positions = held_out[: recipe.held_out], recipe.held_out_places
        self.held_out = HeldOut(self.target, measured, positions, max_length, recipe.tree)
        self.say(
            f"{len(train)} conversations ({sum(lengths):,} tokens), {len(self.held_out.texts)} of "
            f"{len(held_out)} held-out ones for tau; {self.batches.steps} steps of up to "
            f"{batch_tokens} tokens on {self.processes} x {accelerator.device}, "
            f"precision {accelerator.mixed_precision}, target in {self.target.dtype}"
        )
        if recipe.held_out and not self.held_out.texts:
            self.say(
                "tau will not be measured: the data are too few to hold any out "
                f"(one prompt in {HELD_OUT_ONE_IN} is)"
            )

        # 6. The objective and the optimiser.
        embedding, output_head = self.target.embedding, self.target.output_head
        objective = TrainingTimeTest(self.head, embedding, output_head, recipe.steps, recipe.decay)
        self.trained = [weight for weight in self.head.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(
            self.trained, recipe.lr, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
        )
        objective = objective.to(accelerator.device)
        self.objective, self.optimizer = accelerator.prepare(objective, optimizer)

        # 7. Where the run is: optimiser steps taken, and tokens seen by all processes together.
        self.step = self.seen = 0
        self.resume()
        accelerator.wait_for_everyone()
        if self.is_main:
            self.folder.write_settings(asdict(recipe))

    def say(self, text: str) -> None:
        """Print on the main process."""
        self.accelerator.print(text, flush=True)

    def initial_head(self, train: list[Conversation]) -> tuple[DraftModel, dict]:
        """The draft head before its first step, and its ``config.json``."""
        recipe, target = self.recipe, self.target
        if recipe.init_head is not None:
            layers = len(target.layers)
            draft = load_draft(recipe.init_head, target.hidden_size, target.vocab_size, layers)
            draft = draft.float()
            if draft.embed_tokens is not None:
                draft.embed_tokens.requires_grad_(False)
            config = read_config(head_folder(recipe.init_head))
            self.say(
                f"starting from the draft head in {recipe.init_head}, with its size and draft "
                "vocabulary"
            )
        else:
            size = recipe.draft_vocab_size
            ids = choose_draft_ids(train, size, target.vocab_size)
            config = new_config(target, size, intermediate_size=recipe.intermediate_size)
            draft, missed = new_head(target, config, ids, recipe.seed)
            if missed:
                self.say(
                    "these weights start at random, because the target's last layer has none of "
                    f"their shape: {', '.join(missed)}"
                )
        if draft.reduced:
            share = coverage(train, draft.target_ids(), target.vocab_size)
            self.say(
                f"the draft vocabulary of {draft.d2t.numel()} holds {100 * share:.1f} % of the "
                "answer tokens"
            )
        return draft.train().to(self.accelerator.device), config

    def resume(self) -> None:
        """Continue from the checkpoint, if there is one.

        Raises:
            ValueError: if the checkpoint is of other texts or of an older version, or if the
                processes do not find the same one.
        """
        state = self.folder.load_checkpoint(self.data)
        if state is not None:
            try:
                self.optimizer.load_state_dict(state["optimizer"])
            except ValueError as error:  # an older version had another number of parameters
                raise ValueError(
                    f"{self.folder.checkpoint} does not fit this version; choose another --output "
                    "(--init-head starts from a trained draft head)"
                ) from error
            self.head.load_state_dict(state["head"])
            self.step, self.seen = state["step"], state["seen"]
            self.say(f"resuming from step {self.step}")
        if self.is_main:
            self.folder.drop_metrics_after(-1 if state is None else self.step)
        step = torch.tensor([self.step], device=self.accelerator.device)
        steps = self.accelerator.gather(step).tolist()
        if len(set(steps)) > 1:
            raise ValueError(
                f"the processes find checkpoints of steps {steps}; {self.folder.path} must be one "
                "folder that all of them see"
            )

    def train(self, log_every: int, save_every: int, measure_every: int) -> None:
        """Train to the end, and record, measure and save every so many steps.

        Recorded loss and agreement are means over the steps since the last record, on the batches
        of the main process.
        """
        total = self.batches.steps
        recent: list[Tensor] = []  # of the steps since the last record
        start = time.perf_counter()
        if self.step == 0:
            self.measure()
        bar = tqdm(total=total, initial=self.step, unit="step", disable=not self.is_main)
        while self.step < total:
            recent.append(self.train_step())
            bar.update()
            last = self.step == total
            if last or self.step % log_every == 0:
                means = torch.stack(recent).mean(0).tolist()
                loss, agreement = ([round(value, 4) for value in row] for row in means)
                lr = self.optimizer.param_groups[0]["lr"]
                seconds = round(time.perf_counter() - start, 1)
                self.record(loss=loss, agreement=agreement, lr=lr, seconds=seconds)
                bar.set_postfix(loss=loss[0], agreement=agreement[0])
                recent, start = [], time.perf_counter()
            if last or self.step % measure_every == 0:
                self.measure()
            if last or self.step % save_every == 0:
                self.save()
        bar.close()

    def train_step(self) -> Tensor:
        """Take one optimiser step on this process's batch.

        Returns:
            float64 ``[2, self-fed steps]`` on the CPU: cross-entropy and top-1 agreement.

        Raises:
            DivergedError: if the gradient is infinite or not a number.
        """
        batch = self.teacher.batch(self.batches.at(self.step, self.process))
        rate = learning_rate(self.step, self.batches.steps, self.recipe.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.lr * rate
        with self.accelerator.autocast():
            loss, entropy, agreement = self.objective(batch)
        self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.trained, self.recipe.clip)
        if not torch.isfinite(norm):
            raise DivergedError(
                f"the gradient at step {self.step} is {norm.item()}; lower --lr, or use "
                "--precision no"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.seen += int(self.accelerator.reduce(batch.lengths.sum(), "sum"))
        return torch.stack((entropy, agreement)).to("cpu", torch.float64)

    def measure(self) -> None:
        """Measure tau on the held-out conversations, shared among the processes; plot so far."""
        if self.held_out.texts:
            self.head.eval()
            sums = self.held_out.sums(self.head, self.process, self.processes)
            self.head.train()
            sums = self.accelerator.reduce(sums.float().to(self.accelerator.device), "sum")
            tau = self.held_out.tau(sums)
            self.record(tau=tau)
            values = ", ".join(f"{method} {value:.3f}" for method, value in tau.items())
            self.say(f"step {self.step}, {self.seen:,} tokens: tau {values}")
        if self.is_main:
            self.folder.plot()

    def record(self, **values) -> None:
        """Add a line to the metrics."""
        if self.is_main:
            self.folder.record({"step": self.step, "tokens": self.seen, **values})

    def save(self) -> None:
        """Write the draft head, then the checkpoint.

        A run interrupted between the two resumes from the checkpoint before, and writes both again.
        """
        if not self.is_main:
            return
        save_head(self.head, self.config, self.folder.head, torch.float16, self.stored_embedding)
        state = {"head": self.head.state_dict(), "optimizer": self.optimizer.state_dict()}
        state |= {"step": self.step, "seen": self.seen, "data": self.data}
        self.folder.save_checkpoint(state)


@program(build_parser, DivergedError)
def main(args: argparse.Namespace) -> None:
    """Start or resume a run, and train to its end."""
    precision = choose_precision(args.precision)
    accelerator = Accelerator(mixed_precision=precision)
    for name in ("log_every", "save_every", "measure_every"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} is {getattr(args, name)}; it must be at least 1")
    settings = vars(args) | {"precision": precision, "processes": accelerator.num_processes}
    settings["data"] = tuple(args.data)
    recipe = Recipe(**{field.name: settings[field.name] for field in fields(Recipe)})
    run = Run(recipe, args.output, accelerator, args.features, args.with_embedding)
    run.train(args.log_every, args.save_every, args.measure_every)
    accelerator.print(f"Done: {run.folder.head}")
    # The run must be freed, and every process must be here, before the process group ends:
    # freeing it later could wait for ever for a process that has left.
    del run
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
