"""Run one of the paper's experiments: ``python -m evaluation.experiment table2 --pair demo``.

Answers lie under ``<results>/<experiment>/<pair>/cap<tokens>/<bench>/<cell>/``, a cell being a method, a temperature and a seed; each
process has a file of its own there. So a killed run goes on where it stopped, several processes (``accelerate launch``) or machines
(``--part K/N`` on one shared folder) divide the questions, and what lies in a folder is always of one kind. All cells answer a question
before the next one is begun, in an order that rotates, so that a slow phase of the machine meets all methods alike. In the end the
table or figure is written (``evaluation.paper.tables``).
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import PartialState
from tqdm import tqdm

from eagle.model.ea_model import EaModel
from eagle.program import one_line_errors
from evaluation.common import flags
from evaluation.common.answers import Request, answer, answer_turn, append, resume, run_block
from evaluation.common.prompts import check_template
from evaluation.common.questions import Question
from evaluation.paper.grids import EXPERIMENTS, Cell, Pair
from evaluation.paper.tables import Results, write


class Runner:
    """Answers the cells of an experiment, question by question.

    Args:
        part: (k, n): this process takes every n-th question, from the k-th on.
    """

    def __init__(
        self, name: str, pair: Pair, folder: Path, max_new_token: int, part: tuple[int, int]
    ):
        self.experiment, self.pair, self.folder, self.part = EXPERIMENTS[name], pair, folder, part
        self.max_new_token = max_new_token
        state = processes()
        self.model = EaModel.from_pretrained(
            self.pair.base_model_path, self.pair.ea_model_path, *self.experiment.tree, dtype=self.pair.dtype,
            device_map="auto" if state.num_processes == 1 else {"": state.device},
        )  # fmt: skip
        check_template(self.pair.template, self.model.tokenizer)

    def request(self, cell: Cell) -> Request:
        method = cell.method
        pool = {
            "sampling": method.sampling,
            "m": method.m,
            "support": method.support,
            "verification": method.verification,
        }
        options = self.model.options(
            temperature=cell.temperature,
            max_new_tokens=self.max_new_token,
            max_length=None,
            seed=cell.seed,
            **pool,
        )
        return Request(
            cell.bench,
            f"{self.pair.label}-{cell.method.name}",
            self.pair.template,
            1,
            options,
            self.experiment.timing,
        )

    def run(self, cells: list[Cell], questions: dict[str, list[Question]]) -> int:
        """Answer what is not answered yet; returns how many answers were made."""
        k, n = self.part
        jobs, done = [], {}
        more = {
            "base_model_path": self.pair.base_model_path,
            "ea_model_path": self.pair.ea_model_path,
        }
        more["warm_up"] = f"{self.warm_up_tokens} tokens of every way to decode"
        for cell in cells:
            request = self.request(cell)
            run = run_block(self.model, request, more)
            for path in cell.folder(self.folder).glob("*.jsonl"):
                records = resume(path, request, run, own=path.name == self.file_name)
                done.setdefault(cell, set()).update(record["question_id"] for record in records)
            jobs.append((cell, request, run))
        pending = []
        for bench, of_bench in questions.items():
            for number, question in enumerate(of_bench):
                if number % n == k:
                    here = [
                        job
                        for job in jobs
                        if job[0].bench == bench
                        and question.question_id not in done.get(job[0], ())
                    ]
                    turn = number // n % max(len(here), 1)
                    pending += [(question, job) for job in here[turn:] + here[:turn]]
        if not pending:
            return 0
        self.warm_up(pending)
        with tqdm(pending, unit="answer", desc=f"{self.pair.label} {k + 1}/{n}") as bar:
            for question, (cell, request, run) in bar:
                place = cell.folder(self.folder)
                bar.set_postfix_str(f"{cell.bench} {place.name}")
                append(place / self.file_name, answer(self.model, request, question, run))
        return len(pending)

    @property
    def file_name(self) -> str:
        """This part's file in every cell."""
        return f"{self.part[0] + 1}-of-{self.part[1]}.jsonl"

    @property
    def warm_up_tokens(self) -> int:
        """With CUDA graphs as many as an answer may have, so that few captures are measured (those of longer prompts are)."""
        return 8 if self.model.graphs is None or self.experiment.timing else self.max_new_token

    def warm_up(self, pending: list[tuple[Question, tuple[Cell, Request, dict]]]) -> None:
        """The beginning of an answer in every way to decode, thrown away."""
        first: dict = {}
        for question, (_, request, _) in pending:
            first.setdefault(
                replace(request.options, seed=0, max_new_tokens=self.warm_up_tokens),
                (question, request),
            )
        for options, (question, request) in first.items():
            answer_turn(
                self.model, replace(request, options=options), [question.turns[0]], [], seed=0
            )


def processes() -> PartialState:
    """Which of how many processes this one is, and its device."""
    return PartialState(cpu=not torch.cuda.is_available())


def parse_part(text: str | None) -> tuple[int, int]:
    """This process's part of the questions: of those of ``K/N`` (counted from 1; by default 1/1) what ``accelerate launch`` gives it."""
    k, slash, n = ("1/1" if text is None else text).partition("/")
    if not (slash and k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
        raise ValueError(f"--part is {text!r}; write K/N with 1 <= K <= N")
    state = processes()
    return (int(k) - 1) * state.num_processes + state.process_index, int(n) * state.num_processes


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.experiment", description="Run one of the paper's experiments.", allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    parser.add_argument("name", choices=EXPERIMENTS)
    flags.add_study(parser, 1024, "those of the paper", "those of the experiment")
    parser.add_argument(
        "--part", help="K/N: this machine takes every N-th question, from the K-th on"
    )
    return parser


def run(args: argparse.Namespace) -> None:
    """Set up, echo, answer."""
    flags.check_study(args)
    experiment = EXPERIMENTS[args.name]
    questions, seeds = (
        flags.study_questions(args, experiment.benches),
        range(args.seeds or experiment.seeds),
    )
    cells = experiment.cells(tuple(questions), seeds)
    part, folder = parse_part(args.part), flags.study_folder(args, args.name)
    total = sum(len(questions[cell.bench]) for cell in cells)
    print(
        f"{experiment.title}\n{len(cells)} cells, {total} answers, part {part[0] + 1} of {part[1]} -> {folder}",
        flush=True,
    )
    start = time.perf_counter()
    made = Runner(args.name, flags.pair(args), folder, args.max_new_token, part).run(
        cells, questions
    )
    print(
        f"{made} answers made in {time.perf_counter() - start:.0f} s, the others were there",
        flush=True,
    )
    if part == (0, 1):
        write(Results(args.name, args.pair, folder, questions, seeds, args.limit), folder)
    elif processes().is_main_process:
        options = f"--pair {args.pair}" + ("" if args.dtype is None else f" --dtype {args.dtype}")
        options += f" --max-new-token {args.max_new_token} --results {args.results}"
        print(f"when all parts are done: python -m evaluation.paper.tables {args.name} {options}")


def main(argv: list[str] | None = None) -> None:
    """Entry point; bad input ends with one line, not a traceback."""
    with one_line_errors():
        run(build_parser().parse_args(argv))


if __name__ == "__main__":
    main()
