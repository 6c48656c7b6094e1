"""Answer files: their format, and how they are written, resumed, read and summed up.

An answer file holds one JSON object per line, with EAGLE's keys and ours:

    question_id, answer_id, model_id, tstamp   as in FastChat
    choices[].index             number of the choice
    choices[].turns             per turn, the text of the answer
    choices[].idxs              per turn, cycles - 1
    choices[].new_tokens        per turn, number of tokens kept
    choices[].wall_time         per turn, seconds, prefill included
    choices[].accept_lengths    per turn, accepted + 1 of each cycle
    choices[].accepted_kinds    per turn, a string for each cycle: the kind of each accepted
                                token, l(ead), s(ampled) or f(ill)
    choices[].survivals         per turn, a string for each cycle: for each visited node that has
                                children, 1 if its sampled slot is among them, else 0
    choices[].calibration       per turn, counts by slot kind and proxy, as
                                ``evaluation.contexts.calibration.tally`` makes them; null for
                                plain decoding
    choices[].stop_reasons      per turn, "stop" or "length"
    choices[].seconds           per turn, {phase: seconds}; empty on a GPU without --timing
    run                         settings, seed, dtype, device, versions, git commit
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from eagle.files import differences

# Parts of the run block that do not decide the answers. A run may continue after they changed;
# a note is printed then.
CIRCUMSTANCES = ("commit", "threads")


def append(path: Path, record: dict) -> None:
    """Add a record to an answer file.

    The line is written at once, so that a killed process leaves at most one incomplete last line.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def resume(path: Path, run: dict, own: bool = True) -> list[dict]:
    """The records of an answer file that a run may continue; none if the file does not exist.

    Args:
        path: the answer file.
        run: the run block of the run that continues.
        own: whether this process alone writes to the file. If so, an incomplete last line, which a
            killed process left, is removed from the file. Otherwise it is only ignored.

    Raises:
        ValueError: if the answers were made with other settings; the message lists them.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if own and len(whole) < len(content):
        size = len(content) - len(whole)
        print(f"{path}: dropping an incomplete last line ({size} bytes)", flush=True)
        with path.open("r+b") as file:
            file.truncate(len(whole))
    records = parse_answers(whole.decode("utf-8"), path)
    for number, record in enumerate(records):
        before = record.get("run") or {}
        notes = differences(*({k: x.get(k) for k in CIRCUMSTANCES} for x in (before, run)))
        if number == 0 and notes:
            print(f"note: {path} was begun under other conditions: {', '.join(notes)}", flush=True)
        changed = differences(
            *({k: v for k, v in x.items() if k not in CIRCUMSTANCES} for x in (before, run))
        )
        if changed:
            raise ValueError(
                f"{path} holds answers of another run ({', '.join(changed)}); choose another output"
            )
    return records


def read_answers(paths: Iterable[Path], growing: bool = False) -> list[dict]:
    """The records of some answer files, in order.

    Args:
        paths: the answer files.
        growing: whether to ignore an incomplete last line, as a process leaves it that is still
            writing or was killed.

    Raises:
        ValueError: if a line is not an answer; the message names it.
    """
    records = []
    for path in paths:
        text = Path(path).read_text(encoding="utf-8", errors="replace" if growing else "strict")
        records += parse_answers(text[: text.rfind("\n") + 1] if growing else text, path)
    return records


def parse_answers(text: str, path: Path) -> list[dict]:
    """The records in the text of an answer file; errors as in ``read_answers``."""
    records = []
    # Not splitlines(): it also splits at characters that an answer may contain.
    for number, line in enumerate(text.split("\n"), 1):
        if not line:
            continue
        try:
            record = json.loads(line)
            _ = record["question_id"], record["choices"][0]["new_tokens"]
        except (json.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not an answer ({error!r})") from error
        records.append(record)
    return records


def totals(records: list[dict]) -> dict[str, dict]:
    """Sums over records, by quantity and then by question id.

    The quantities are ``accepted`` (accepted + 1 of each cycle), ``cycles``, ``tokens``,
    ``seconds`` (of whole turns) and ``drafting`` (seconds of the draft phase).
    """
    sums: dict[str, dict] = {
        name: defaultdict(float) for name in ("accepted", "cycles", "tokens", "seconds", "drafting")
    }
    for record in records:
        question = record["question_id"]
        for choice in record["choices"]:
            lengths = [n for turn in choice.get("accept_lengths", []) for n in turn]
            drafting = sum(turn.get("draft", 0.0) for turn in choice.get("seconds", ()))
            sums["accepted"][question] += sum(lengths)
            sums["cycles"][question] += len(lengths)
            sums["tokens"][question] += sum(choice["new_tokens"])
            sums["seconds"][question] += sum(choice["wall_time"])
            sums["drafting"][question] += drafting
    return sums
