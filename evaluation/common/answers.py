"""Answer files: making them question by question, resuming them, reading them.

One JSON object a line with EAGLE's keys and ours:

    question_id, answer_id, model_id, tstamp   as in FastChat
    choices[].index                            number of the choice
    choices[].turns                            answer text per turn
    choices[].idxs                             cycles - 1 per turn
    choices[].new_tokens                       tokens kept per turn
    choices[].wall_time                        seconds per turn, prefill included
    choices[].accept_lengths                   per turn, accepted + 1 of each cycle
    choices[].accepted_kinds                   per turn, a string per cycle: l(ead), s(ampled) or f(ill) per accepted token
    choices[].survivals                        per turn, a string per cycle: per visited node with children 1 or 0, whether its sampled child was there
    choices[].calibration                      per turn, {kind: cells by proxy bin}, see ``evaluation.contexts.calibration.tally``; not for plain decoding
    choices[].stop_reasons                     per turn, "stop" or "length"
    choices[].seconds                          per turn, {phase: seconds}; empty on a GPU without --timing
    run                                        settings, seed, dtype, device, versions, commit
"""

import hashlib
import json
import os
import platform
import subprocess
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from eagle.files import differences
from eagle.model.decoding import Generation
from eagle.model.ea_model import EaModel
from eagle.model.options import DecodingOptions
from evaluation.common.prompts import build_prompt
from evaluation.common.questions import Question
from evaluation.contexts import calibration

# Parts of the run block that do not decide the answers: a run may go on when they changed, and says so.
CIRCUMSTANCES = ("commit", "threads")


@dataclass(frozen=True)
class Request:
    """What one run asks of the model, the same for all its questions.

    Attributes:
        bench_name, model_id: labels that go into the answer file.
        template: see ``evaluation.prompts``.
        num_choices: answers per question, each with seeds of its own.
        timing: seconds per phase on a GPU too, at the price of synchronising.
        options: decoding options; ``options.seed`` is the run's seed.
    """

    bench_name: str
    model_id: str
    template: str
    num_choices: int
    options: DecodingOptions
    timing: bool = False


def turn_seed(seed: int, question_id: int | str, choice: int, turn: int) -> int:
    """The seed of one request: a hash of where it stands, so that order, splitting and resuming change nothing."""
    digest = hashlib.sha256(json.dumps([seed, question_id, choice, turn]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # 63 bits, what torch.Generator.manual_seed takes


def run_block(model: EaModel, request: Request, more: dict[str, str | None]) -> dict:
    """All that one would need to repeat the run.

    Args:
        more: what the model and the request do not know: paths, how it was warmed up.
    """
    options, drafting = request.options, request.options.sampling != "none"
    pool = options.tree.pool
    block = {
        **more,
        "bench_name": request.bench_name,
        "template": request.template,
        "num_choices": request.num_choices,
        "sampling": options.sampling,
        "temperature": options.warpers.temperature,
        "filters": {
            "top_k": options.warpers.top_k,
            "top_p": options.warpers.top_p,
            "min_p": options.warpers.min_p,
        },
        "max_new_token": options.max_new_tokens,
        "seed": options.seed,
        "dtype": str(model.target.dtype).removeprefix("torch."),
        "device": device_name(model.target.device),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "commit": commit(),
    }
    if model.graphs is not None and not request.timing:
        block["cuda_graph"] = True
    if model.target.packed:
        block["packed_weights"] = True
    if drafting:
        block |= {
            "total_token": options.total_token,
            "depth": options.depth,
            "top_k": options.top_k,
        }
        block |= {"head": model.draft.fingerprint}
    if options.sampling == "rheo":
        block |= {"m": pool.m, "support": pool.support, "normaliser": pool.normaliser}
        block |= {"verification": options.verification or "rheo"}
    return block


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's architecture."""
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu ({platform.machine()})"
    )


def commit() -> str | None:
    """This checkout's commit, with ``+`` where files are changed; None outside a checkout."""
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            ["git", "status", "--porcelain", "-uno"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def describe(model: EaModel, request: Request, n_questions: int, path: Path) -> str:
    """What a run will do, for the user to read before it starts."""
    options = request.options
    lines = [
        f"{n_questions} questions of {request.bench_name} x {request.num_choices} choice(s) -> {path}"
    ]
    if options.sampling == "none":
        lines.append("plain decoding")
    else:
        pool = options.tree.pool
        rheo = f", m {pool.m}, support {pool.support or 'all'}, verification {options.verification or 'rheo'}"
        lines.append(
            f"sampling {options.sampling}{rheo if options.sampling == 'rheo' else ''}; "
            f"tree of {options.total_token - 1} drafted nodes (total_token {options.total_token}), "
            f"at most {options.depth + 1} levels (depth {options.depth}), {pool.size} slots a pool"
        )
    probs = options.warpers
    filters = [
        f"{name} {value}"
        for name, value in (("top-k", probs.top_k), ("top-p", probs.top_p), ("min-p", probs.min_p))
        if value
    ]
    lines.append(
        f"temperature {probs.temperature}, filters {', '.join(filters) or 'none'}, "
        f"at most {options.max_new_tokens} new tokens, seed {options.seed}"
    )
    lines.append(
        f"{str(model.target.dtype).removeprefix('torch.')} on {device_name(model.target.device)}, template {request.template}"
    )
    return "\n".join(lines)


def answer_all(
    model: EaModel, questions: list[Question], request: Request, path: Path, run: dict
) -> int:
    """Answer the questions that ``path`` does not hold yet, appending each when it is finished.

    One question is answered first and thrown away, so that no measurement includes a cold start.

    Returns:
        Number of questions answered now.

    Raises:
        ValueError: where the file holds answers of another run.
    """
    done = {record["question_id"] for record in resume(path, request, run)}
    pending = [q for q in questions if q.question_id not in done]
    if done:
        print(
            f"{path} holds {len(done)} finished questions; {len(questions) - len(pending)} of these are skipped",
            flush=True,
        )
    if not pending:
        return 0
    answer_turn(model, request, [pending[0].turns[0]], [], seed=0)
    accepted = cycles = 0
    with tqdm(pending, unit="question", desc=request.model_id) as bar:
        for question in bar:
            record = answer(model, request, question, run)
            append(path, record)
            lengths = [n for c in record["choices"] for turn in c["accept_lengths"] for n in turn]
            accepted, cycles = accepted + sum(lengths), cycles + len(lengths)
            if cycles:
                bar.set_postfix(tau=f"{accepted / cycles:.2f}")
    return len(pending)


def answer(model: EaModel, request: Request, question: Question, run: dict) -> dict:
    """The record of one question (see the top of this file)."""
    return {
        "question_id": question.question_id,
        "answer_id": uuid.uuid4().hex,
        "model_id": request.model_id,
        "choices": [
            answer_choice(model, request, question, choice) for choice in range(request.num_choices)
        ],
        "tstamp": time.time(),
        "run": run,
    }


def append(path: Path, record: dict) -> None:
    """Add a record to an answer file: one write of a whole line, so that a kill leaves at most a last line without its end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def answer_choice(model: EaModel, request: Request, question: Question, choice: int) -> dict:
    """All turns of one choice; each turn sees the answers before it."""
    result: dict = {"index": choice}
    keys = (
        "turns",
        "idxs",
        "new_tokens",
        "wall_time",
        "accept_lengths",
        "accepted_kinds",
        "survivals",
        "calibration",
        "stop_reasons",
        "seconds",
    )
    result |= {key: [] for key in keys}
    for turn in range(len(question.turns)):
        seed = turn_seed(request.options.seed, question.question_id, choice, turn)
        text, generation, wall = answer_turn(
            model, request, list(question.turns[: turn + 1]), result["turns"], seed
        )
        values = (
            text,
            generation.cycles - 1,
            generation.new_tokens,
            wall,
            generation.accept_lengths,
            ["".join(kind[0] for kind in kinds) for kinds in generation.accepted_kinds],
            [
                "".join(
                    str(int(any(slot.kind == "sampled" for slot in family))) for family in tried
                )
                for tried in generation.tried
            ],
            calibration.tally(generation.tried) if request.options.sampling != "none" else None,
            generation.stop_reason,
            {phase: round(sec, 6) for phase, sec in generation.seconds.items()},
        )
        for key, value in zip(keys, values):
            result[key].append(value)
    return result


def answer_turn(
    model: EaModel, request: Request, users: list[str], answers: list[str], seed: int
) -> tuple[str, Generation, float]:
    """Text, generation and wall time (seconds) of one turn."""
    prompt = build_prompt(request.template, model.tokenizer, users, answers)
    options = replace(request.options, seed=seed)
    synchronise(model.target.device)
    start = time.perf_counter()
    generation = model.generate(prompt, options, request.timing)
    synchronise(model.target.device)
    wall = time.perf_counter() - start
    return (
        model.tokenizer.decode(generation.token_ids, skip_special_tokens=True).strip(),
        generation,
        wall,
    )


def synchronise(device: torch.device) -> None:
    """Wait for a GPU; the CPU needs no waiting."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def resume(path: Path, request: Request, run: dict, own: bool = True) -> list[dict]:
    """Records of an answer file that this run may continue; a line cut off by a kill is dropped from the file.

    Args:
        own: False for a file that another process may be writing to: its last line is left alone where it has no end yet.

    Raises:
        ValueError: where the file's answers were made with other settings, naming them.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if own and len(whole) < len(content):
        print(
            f"{path}: dropping a last line that was cut off ({len(content) - len(whole)} bytes)",
            flush=True,
        )
        with path.open("r+b") as file:
            file.truncate(len(whole))
    records = parse_answers(whole.decode("utf-8"), path)
    for record in records:
        before = record.get("run") or {}
        notes = differences(*({k: x.get(k) for k in CIRCUMSTANCES} for x in (before, run)))
        if record is records[0] and notes:
            print(
                f"note: {path} was begun under other circumstances ({', '.join(notes)})", flush=True
            )
        changed = differences(
            *({k: v for k, v in x.items() if k not in CIRCUMSTANCES} for x in (before, run))
        )
        if changed:
            raise ValueError(
                f"{path} holds answers of another run ({', '.join(changed)}); choose another output"
            )
    return records


def read_answers(paths: Iterable[Path], growing: bool = False) -> list[dict]:
    """The records of answer files, in order.

    Args:
        growing: whether a last line without its end is left out, as a process that is writing, or was killed, leaves it.

    Raises:
        ValueError: naming the line that is not an answer.
    """
    texts = (
        (path, Path(path).read_text(encoding="utf-8", errors="replace" if growing else "strict"))
        for path in paths
    )
    return [
        record
        for path, text in texts
        for record in parse_answers(text[: text.rfind("\n") + 1] if growing else text, path)
    ]


def parse_answers(text: str, path: Path) -> list[dict]:
    """The records in the text of an answer file; errors as in ``read_answers``."""
    records = []
    # Not splitlines(): an answer may hold one of the other characters that it takes for the end of a line.
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
