"""Question sets in FastChat's format: one JSON object a line with ``question_id``, ``category`` and ``turns``."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import eagle

SHIPPED = Path(eagle.__file__).parent / "data"


@dataclass(frozen=True)
class Question:
    """One question: an id, a task category, and the user's turns in order."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]


def data_folder() -> Path:
    """Where fetched question sets lie: ``$XDG_DATA_HOME/rheosampling``, by default under ``~/.local/share``."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "rheosampling"


def question_file(bench_name: str) -> Path:
    """The file of a named set: one that ships with the project, else one in the user's data folder.

    Raises:
        FileNotFoundError: naming where the file was looked for.
    """
    places = [folder / bench_name / "question.jsonl" for folder in (SHIPPED, data_folder())]
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(
        f"no question set {bench_name!r}: put its question.jsonl at {places[1]}, or give its path with --question-file "
        "(EAGLE keeps the paper's six sets under eagle/data/<name>/question.jsonl)"
    )


def load_questions(path: Path, begin: int | None = None, end: int | None = None) -> list[Question]:
    """Questions ``begin`` to ``end`` (a Python slice) of a file.

    Raises:
        ValueError: naming the line that is not a question, a repeated id, or an empty selection.
    """
    questions, seen = [], set()
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            question = Question(record["question_id"], record.get("category") or "", tuple(record["turns"]))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not a question with question_id and turns ({error!r})") from error
        if not question.turns or question.question_id in seen:
            raise ValueError(f"{path}, line {number}: no turns, or question_id {question.question_id!r} seen before")
        seen.add(question.question_id)
        questions.append(question)
    selected = questions[begin:end]
    if not selected:
        raise ValueError(f"{path} has {len(questions)} questions and the selection [{begin}:{end}] holds none of them")
    return selected
