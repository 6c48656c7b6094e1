"""Question sets in FastChat's format: a JSON object per line, with question_id, category, turns.

``python -m evaluation.questions fetch`` downloads the paper's six sets, checks them and keeps them
in the user's data folder. They are not part of this project because they have their own licences.
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
from eagle.program import program

SHIPPED = Path(eagle.__file__).parent / "data"
EAGLE_REVISION = "cb7e0841fe0c206c6ed74a197ad5e2a1f13f5a2b"
SOURCE = f"https://raw.githubusercontent.com/SafeAILab/EAGLE/{EAGLE_REVISION}/eagle/data"
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
    """Folder of fetched question sets: ``rheosampling`` in ``$XDG_DATA_HOME``.

    If the variable is not set, ``~/.local/share`` takes its part.
    """
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "rheosampling"


def question_file(bench_name: str) -> Path:
    """The file of a named set, from the sets of this project or from the user's data folder.

    Raises:
        FileNotFoundError: if there is none; the message says how to get it.
    """
    files = [folder / bench_name / "question.jsonl" for folder in (SHIPPED, data_folder())]
    for file in files:
        if file.is_file():
            return file
    how = f"put its question.jsonl at {files[1]}"
    if bench_name in SHA256:
        how = "python -m evaluation.questions fetch gets it"
    raise FileNotFoundError(
        f"no question set {bench_name!r}: {how}, or give its path with --question-file"
    )


def load_questions(path: Path, begin: int | None = None, end: int | None = None) -> list[Question]:
    """Questions ``begin`` to ``end`` (a Python slice) of a file.

    Raises:
        ValueError: if a line is not a question, an id is repeated, or the selection is empty.
    """
    questions, seen = [], set()
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        here = f"{path}, line {number}"
        try:
            record = json.loads(line)
            turns, category = tuple(record["turns"]), record.get("category") or ""
            question = Question(record["question_id"], category, turns)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{here}: not a question with question_id and turns ({error!r})"
            ) from error
        if not question.turns:
            raise ValueError(f"{here}: the question has no turns")
        if question.question_id in seen:
            raise ValueError(f"{here}: question_id {question.question_id!r} was seen before")
        seen.add(question.question_id)
        questions.append(question)
    selected = questions[begin:end]
    if not selected:
        raise ValueError(
            f"{path} has {len(questions)} questions; "
            f"the selection [{begin}:{end}] holds none of them"
        )
    return selected


def fetch(name: str, source: Path | None = None) -> Path:
    """Get one of the paper's sets into the data folder and check it.

    A set that is already there is only checked; if it is damaged, it is fetched again.

    Args:
        name: a key of ``SHA256``.
        source: folder that holds ``<name>/question.jsonl``; None for EAGLE's repository on the web.

    Returns:
        The file in the data folder.

    Raises:
        ValueError: if the file is not the published one.
        OSError: if it cannot be read, or there is no network.
    """
    path = data_folder() / name / "question.jsonl"
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == SHA256[name]:
        return path
    if source is not None:
        origin = str(source / name / "question.jsonl")
        content = Path(origin).read_bytes()
    else:
        origin = f"{SOURCE}/{name}/question.jsonl"
        content = download(origin)
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256[name]:
        raise ValueError(
            f"{origin} is not the published question set: "
            f"its SHA-256 is {found}, expected {SHA256[name]}"
        )
    with replacing(path) as scratch:
        scratch.write_bytes(content)
    return path


def download(url: str) -> bytes:
    """The content of a web address; an OSError explains what to do without a network."""
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return response.read()
    except urllib.error.URLError as error:
        raise OSError(
            f"{url} cannot be reached ({error.reason}). Without a network: copy the folder "
            "eagle/data of a checkout of EAGLE to this machine and give it with --from"
        ) from error


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.questions", description="The paper's six question sets."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("fetch", help="download, check and keep them").add_argument
    origin = "folder that holds <name>/question.jsonl, instead of the network"
    add("names", nargs="*", help=f"default: all of {', '.join(SHA256)}")
    add("--from", dest="source", type=Path, help=origin)
    return parser


@program(build_parser)
def main(args: argparse.Namespace) -> None:
    """Fetch the sets asked for."""
    unknown = ", ".join(name for name in args.names if name not in SHA256)
    if unknown:
        raise ValueError(f"unknown question sets: {unknown}; choose among {', '.join(SHA256)}")
    for name in args.names or SHA256:
        path = fetch(name, args.source)
        print(f"{name}: {len(load_questions(path))} questions, {path}", flush=True)


if __name__ == "__main__":
    main()
