"""Run one of the paper's experiments: ``python -m evaluation.experiment table2 --pair demo``.

The answers lie in ``<results>/<experiment>/<pair>/cap<tokens>/<bench>/<cell>/``. A cell is one
method at one temperature with one seed. Each process writes to its own file there. Therefore

- a killed run continues where it stopped;
- several processes (``accelerate launch``) or machines (``--part K/N`` on a shared folder) can
  divide the questions;
- all answers in a folder were made in the same way.

All cells answer a question before the next question is begun. Their order rotates, so that slow
phases of the machine affect all methods alike. At the end ``evaluation.paper.tables`` writes the
table or figure.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import PartialState
from tqdm import tqdm

from eagle.model.ea_model import EaModel
from eagle.program import program
from evaluation.common.answer_file import append, resume
from evaluation.common.answers import Request, answer, answer_turn, run_block
from evaluation.common.prompts import check_template
from evaluation.common.questions import Question
from evaluation.paper.grids import EXPERIMENTS, Cell, Experiment, Pair
from evaluation.paper.results import Results
from evaluation.paper.study import (
    check_counts,
    chosen_pair,
    chosen_questions,
    study_folder,
    study_parser,
)
from evaluation.paper.tables import write


class Job(NamedTuple):
    """One cell of an experiment.

    Attributes:
        cell: the method, bench, temperature and seed.
        request: the same, as the model is asked.
        run: the run block of its answers.
        done: ids of the questions that are answered already.
    """

    cell: Cell
    request: Request
    run: dict
    done: set


class Runner:
    """Answers the cells of an experiment, question by question.

    Args:
        experiment: the grid of settings.
        pair: the models.
        folder: where the answers go.
        max_new_token: cap on the new tokens of a turn.
        part: (k, n): this process answers every n-th question, from number k on.
    """

    def __init__(
        self,
        experiment: Experiment,
        pair: Pair,
        folder: Path,
        max_new_token: int,
        part: tuple[int, int],
    ):
        self.experiment, self.pair, self.folder, self.part = experiment, pair, folder, part
        self.max_new_token = max_new_token
        self.file_name = f"{part[0] + 1}-of-{part[1]}.jsonl"  # of this process, in every cell
        state = processes()
        self.model = EaModel.from_pretrained(
            pair.base_model_path,
            pair.ea_model_path,
            *experiment.tree,
            dtype=pair.dtype,
            device_map="auto" if state.num_processes == 1 else {"": state.device},
        )
        check_template(pair.template, self.model.tokenizer)

    def run(self, cells: list[Cell], questions: dict[str, list[Question]]) -> int:
        """Answer what is not answered yet; returns the number of new answers."""
        pending = self.pending([self.job(cell) for cell in cells], questions)
        if not pending:
            return 0
        self.warm_up(pending)
        title = f"{self.pair.label} {self.part[0] + 1}/{self.part[1]}"
        with tqdm(pending, unit="answer", desc=title) as bar:
            for question, job in bar:
                folder = job.cell.folder(self.folder)
                bar.set_postfix_str(f"{job.cell.bench} {folder.name}")
                record = answer(self.model, job.request, question, job.run)
                append(folder / self.file_name, record)
        return len(pending)

    def job(self, cell: Cell) -> Job:
        """What a cell asks of the model, and which questions it has answered."""
        method = cell.method
        options = self.model.options(
            temperature=cell.temperature,
            sampling=method.sampling,
            m=method.m,
            support=method.support,
            verification=method.verification,
            max_new_tokens=self.max_new_token,
            max_length=None,
            seed=cell.seed,
        )
        model_id, timing = f"{self.pair.label}-{method.name}", self.experiment.timing
        request = Request(cell.bench, model_id, self.pair.template, 1, options, timing)
        more = {
            "base_model_path": self.pair.base_model_path,
            "ea_model_path": self.pair.ea_model_path,
            "warm_up": f"{self.warm_up_tokens} tokens of every way to decode",
        }
        run = run_block(self.model, request, more)
        done = set()
        for path in cell.folder(self.folder).glob("*.jsonl"):
            records = resume(path, run, own=path.name == self.file_name)
            done |= {record["question_id"] for record in records}
        return Job(cell, request, run, done)

    def pending(
        self, jobs: list[Job], questions: dict[str, list[Question]]
    ) -> list[tuple[Question, Job]]:
        """The answers that this process still has to make, in the order of making them."""
        k, n = self.part
        pending = []
        for bench, of_bench in questions.items():
            for number, question in enumerate(of_bench):
                if number % n != k:
                    continue
                here = [
                    job
                    for job in jobs
                    if job.cell.bench == bench and question.question_id not in job.done
                ]
                turn = number // n % max(len(here), 1)
                pending += [(question, job) for job in here[turn:] + here[:turn]]
        return pending

    @property
    def warm_up_tokens(self) -> int:
        """Number of tokens of a warm-up answer.

        With CUDA graphs it is the cap on new tokens: a longer text needs further captures, and few
        of them should be part of the measurement.
        """
        return 8 if self.model.graphs is None or self.experiment.timing else self.max_new_token

    def warm_up(self, pending: list[tuple[Question, Job]]) -> None:
        """Begin an answer in every way to decode, and throw it away."""
        first: dict = {}
        for question, job in pending:
            options = replace(job.request.options, seed=0, max_new_tokens=self.warm_up_tokens)
            first.setdefault(options, (replace(job.request, options=options), question))
        for request, question in first.values():
            answer_turn(self.model, request, [question.turns[0]], [], seed=0)


def processes() -> PartialState:
    """The number of processes, which of them this one is, and its device."""
    return PartialState(cpu=not torch.cuda.is_available())


def parse_part(text: str | None) -> tuple[int, int]:
    """The part (k, n) of the questions that this process answers; k counts from 0.

    The processes of ``accelerate launch`` divide a machine's part among them.

    Args:
        text: the machine's part as ``K/N``, where K counts from 1; None means 1/1.
    """
    k, slash, n = ("1/1" if text is None else text).partition("/")
    if not (slash and k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
        raise ValueError(f"--part is {text!r}; write K/N with 1 <= K <= N")
    state = processes()
    return (int(k) - 1) * state.num_processes + state.process_index, int(n) * state.num_processes


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = study_parser(
        "evaluation.experiment",
        "Run one of the paper's experiments.",
        max_new_token=1024,
        benches="those of the paper",
        seeds="those of the experiment",
    )
    part = "K/N: this machine answers every N-th question, from the K-th on"
    parser.add_argument("name", choices=EXPERIMENTS)
    parser.add_argument("--part", help=part)
    return parser


@program(build_parser)
def main(args: argparse.Namespace) -> None:
    """Say what will be done, answer, and write the table if this process did everything."""
    check_counts(args)
    experiment, folder = EXPERIMENTS[args.name], study_folder(args, args.name)
    questions = chosen_questions(args, experiment)
    seeds = range(args.seeds or experiment.seeds)
    cells, part = experiment.cells(questions, seeds), parse_part(args.part)
    total = sum(len(questions[cell.bench]) for cell in cells)
    print(experiment.title)
    print(
        f"{len(cells)} cells, {total} answers, part {part[0] + 1} of {part[1]} -> {folder}",
        flush=True,
    )
    start = time.perf_counter()
    runner = Runner(experiment, chosen_pair(args), folder, args.max_new_token, part)
    made = runner.run(cells, questions)
    seconds = time.perf_counter() - start
    print(f"{made} answers made in {seconds:.0f} s; the others existed already", flush=True)
    if part == (0, 1):
        write(Results(args.name, args.pair, folder, questions, seeds, args.limit), folder)
    elif processes().is_main_process:
        flags = f"--pair {args.pair}" + ("" if args.dtype is None else f" --dtype {args.dtype}")
        flags += f" --max-new-token {args.max_new_token} --results {args.results}"
        print(f"when all parts are done: python -m evaluation.paper.tables {args.name} {flags}")


if __name__ == "__main__":
    main()
