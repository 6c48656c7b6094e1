"""Reading the answers of an experiment."""

from collections.abc import Iterable
from pathlib import Path

from evaluation.common.answer_file import CIRCUMSTANCES, read_answers
from evaluation.common.questions import load_questions, question_file
from evaluation.paper.grids import BENCHES, EXPERIMENTS, PAIRS, PLAIN, Method

# Keys of the run block that differ from cell to cell. All others are the same in an experiment
# (plain decoding lacks some of them).
CELL_KEYS = (
    "bench_name",
    "sampling",
    "m",
    "support",
    "verification",
    "normaliser",
    "temperature",
    "seed",
)


class Results:
    """The answers of an experiment, reduced to the questions that all its methods have answered.

    So the differences between methods are paired by question, even if the run is not finished.

    Args:
        name: the experiment.
        pair: key of ``PAIRS``.
        folder: folder of its answers.
        benches: question sets that count; None for all that the folder holds.
        seeds: seeds that count; None for all that the folder holds.
        limit: number of questions of each bench, from the first on; None for all.

    Attributes:
        label: the paper's name of the pair.
        experiment: the grid of settings.
        seeds: the seeds by bench.
        benches: the question sets, in the paper's order.
        records: the answers, by (bench, method, temperature).
        settings: what all answers share.

    Raises:
        ValueError: if there are no answers, a question is answered twice in a cell, or answers
            were made with different settings.
    """

    def __init__(
        self,
        name: str,
        pair: str,
        folder: Path,
        benches: Iterable[str] | None = None,
        seeds: Iterable[int] | None = None,
        limit: int | None = None,
    ):
        self.name, self.label, self.experiment = name, PAIRS[pair].label, EXPERIMENTS[name]
        found = seeds_by_bench(folder)
        chosen = found if benches is None else benches
        self.benches = [bench for bench in BENCHES if bench in chosen]
        if not self.benches:
            how = f"python -m evaluation.experiment {name} makes them"
            raise ValueError(f"{folder} holds no answers; {how}")
        self.seeds = {
            bench: found.get(bench, set()) if seeds is None else set(seeds)
            for bench in self.benches
        }
        self.records: dict[tuple[str, Method, float], list[dict]] = {}
        blocks: list[dict] = []
        for bench in self.benches:
            cells = self.experiment.cells([bench], sorted(self.seeds[bench]))
            answers = {cell: read_cell(cell.folder(folder)) for cell in cells}
            blocks += [record.get("run") or {} for a in answers.values() for record in a.values()]
            questions = self.common_questions(bench, list(answers.values()), limit)
            for cell, by_question in answers.items():
                records = self.records.setdefault((bench, cell.method, cell.temperature), [])
                records += [by_question[question] for question in questions]
        self.settings = {"experiment": name, "pair": pair} | shared_settings(blocks)

    def common_questions(
        self, bench: str, answers: list[dict], limit: int | None
    ) -> list[int | str]:
        """The ids of the questions that every cell has answered, in order."""
        common = set.intersection(*(set(by_question) for by_question in answers))
        if not common:
            raise ValueError(
                f"no question of {bench} is answered by every method yet; "
                f"run python -m evaluation.experiment {self.name} again"
            )
        if limit is not None:
            first = load_questions(question_file(bench), None, limit)
            common &= {question.question_id for question in first}
        return [question for question in answers[0] if question in common]


def seeds_by_bench(folder: Path) -> dict[str, set[int]]:
    """By bench, the seeds that the folder of an experiment holds answers with."""
    found: dict[str, set[int]] = {}
    for cell in folder.glob("*/*-seed*"):
        found.setdefault(cell.parent.name, set()).add(int(cell.name.rpartition("-seed")[2]))
    return found


def read_cell(folder: Path) -> dict[int | str, dict]:
    """The records of a cell by question id, in the order of the ids.

    It does not matter which process or machine wrote which file.
    """
    answers: dict[int | str, dict] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for record in read_answers([path], growing=True):
            question = record["question_id"]
            if question in answers:
                raise ValueError(f"{path}: question {question!r} is answered twice in this folder")
            answers[question] = record
    return dict(sorted(answers.items(), key=lambda item: (isinstance(item[0], str), item[0])))


def shared_settings(blocks: list[dict]) -> dict:
    """The settings that all run blocks share.

    Keys of ``CIRCUMSTANCES`` may differ; the settings list all their values.
    """
    settings: dict = {}
    for block in blocks:
        # A block without a head's fingerprint is taken to be of another head.
        missing = {} if block.get("sampling") == PLAIN.sampling else {"head": None}
        for key, value in (missing | block).items():
            if key in CIRCUMSTANCES:
                settings[key] = sorted({*settings.get(key, ()), value}, key=str)
            elif key not in CELL_KEYS and settings.setdefault(key, value) != value:
                raise ValueError(
                    f"answers with {key} {settings[key]!r} and {value!r} lie in one folder; "
                    "they cannot be compared"
                )
    return settings
