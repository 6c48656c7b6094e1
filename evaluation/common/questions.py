"""Question sets in FastChat's format: one JSON object a line with ``question_id``, ``category`` and ``turns``.

``python -m evaluation.questions fetch`` gets the paper's six sets, which are data under others' licences and so not part of this
project, checks them and keeps them in the user's data folder.
"""

import argparse
import hashlib
import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import eagle
from eagle.files import replacing
from eagle.program import one_line_errors

SHIPPED = Path(eagle.__file__).parent / "data"
SOURCE = "https://raw.githubusercontent.com/SafeAILab/EAGLE/cb7e0841fe0c206c6ed74a197ad5e2a1f13f5a2b/eagle/data"
SHA256 = {
    "alpaca": "8ad3e5a7fc61b88d8e25edb81a52a2ce00a04494d5694c122cb11a5cc26a00df",
    "gsm8k": "a55920b2f2aac724241124c59e5b8e8168dbbeb2ab0fdbee17d5b0ab6db5ff27",
    "humaneval": "ce0244e2b228339e9a11afc63a151719beede1e389fdaec7cd9751d33902180e",
    "mt_bench": "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
    "qa": "04252e41ab00bcc03b11940b4a3766cf40ae0b76a09c4f56968ba952f0b029f3",
    "sum": "916876f0c42f938a944de96eed16e51425f29f27438cca5c9ef4737c0fedf771",
}


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
    how = (
        "python -m evaluation.questions fetch gets it"
        if bench_name in SHA256
        else f"put its question.jsonl at {places[1]}"
    )
    raise FileNotFoundError(
        f"no question set {bench_name!r}: {how}, or give its path with --question-file"
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
            question = Question(
                record["question_id"], record.get("category") or "", tuple(record["turns"])
            )
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}: not a question with question_id and turns ({error!r})"
            ) from error
        if not question.turns or question.question_id in seen:
            raise ValueError(
                f"{path}, line {number}: no turns, or question_id {question.question_id!r} seen before"
            )
        seen.add(question.question_id)
        questions.append(question)
    selected = questions[begin:end]
    if not selected:
        raise ValueError(
            f"{path} has {len(questions)} questions and the selection [{begin}:{end}] holds none of them"
        )
    return selected


def fetch(name: str, source: Path | None = None) -> Path:
    """Get one of the paper's sets into the data folder, checked; one that is there already is only checked.

    Args:
        source: folder that holds ``<name>/question.jsonl``; None gets it from EAGLE's repository.

    Raises:
        ValueError: where the file is not the published one.
        OSError: where it cannot be read, or there is no network.
    """
    place = data_folder() / name / "question.jsonl"
    if place.is_file() and hashlib.sha256(place.read_bytes()).hexdigest() == SHA256[name]:
        return place
    if source is not None:
        origin = str(source / name / "question.jsonl")
        content = Path(origin).read_bytes()
    else:
        origin = f"{SOURCE}/{name}/question.jsonl"
        try:
            with urllib.request.urlopen(origin, timeout=60) as response:
                content = response.read()
        except urllib.error.URLError as error:
            raise OSError(
                f"{origin} cannot be reached ({error.reason}). Without a network: copy eagle/data of an EAGLE checkout here and "
                "give it with --from"
            ) from error
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256[name]:
        raise ValueError(
            f"{origin} is not the published question set: its SHA-256 is {found}, expected {SHA256[name]}"
        )
    with replacing(place) as scratch:
        scratch.write_bytes(content)
    return place


def main(argv: list[str] | None = None) -> None:
    """Entry point; bad input ends with one line, not a traceback."""
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.questions", description="The paper's six question sets."
    )
    command = parser.add_subparsers(dest="command", required=True).add_parser(
        "fetch", help="get, check and keep them"
    )
    command.add_argument("names", nargs="*", help=f"default: all of {', '.join(SHA256)}")
    command.add_argument(
        "--from",
        dest="source",
        type=Path,
        help="folder with <name>/question.jsonl, in place of the network",
    )
    args = parser.parse_args(argv)
    unknown = [name for name in args.names if name not in SHA256]
    with one_line_errors():
        if unknown:
            raise ValueError(
                f"unknown question sets: {', '.join(unknown)}; choose among {', '.join(SHA256)}"
            )
        for name in args.names or SHA256:
            place = fetch(name, args.source)
            print(f"{name}: {len(load_questions(place))} questions, {place}", flush=True)


if __name__ == "__main__":
    main()
