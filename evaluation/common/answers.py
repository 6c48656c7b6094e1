"""Answering questions: one record of an answer file for each question.

``evaluation.common.answer_file`` describes the records.
"""

import hashlib
import json
import platform
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from eagle.model.decoding import Generation
from eagle.model.ea_model import EaModel
from eagle.model.options import DecodingOptions
from evaluation.common.answer_file import append, resume
from evaluation.common.prompts import build_prompt
from evaluation.common.questions import Question
from evaluation.common.run_info import device_name, dtype_name, git_revision
from evaluation.contexts import calibration


@dataclass(frozen=True)
class Request:
    """What one run asks of the model; the same for all its questions.

    Attributes:
        bench_name: name of the question set, for the answer file.
        model_id: label of the run, for the answer file.
        template: chat template, see ``evaluation.common.prompts``.
        num_choices: answers per question, each with its own seeds.
        options: decoding options; ``options.seed`` is the run's seed.
        timing: whether to time the phases of a cycle on a GPU too. This synchronises the GPU, which
            costs time.
    """

    bench_name: str
    model_id: str
    template: str
    num_choices: int
    options: DecodingOptions
    timing: bool = False


def turn_seed(seed: int, question_id: int | str, choice: int, turn: int) -> int:
    """The seed of one turn: 63 bits of a hash, as ``torch.Generator.manual_seed`` takes them.

    It depends on nothing but its arguments, so that resuming, splitting and reordering a run
    change no answer.
    """
    digest = hashlib.sha256(json.dumps([seed, question_id, choice, turn]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def run_block(model: EaModel, request: Request, more: dict[str, str | None]) -> dict:
    """Everything that is needed to repeat a run.

    Args:
        model: the loaded pair.
        request: what the run asks of it.
        more: what these two do not know, such as paths and the warm-up.
    """
    options, warpers, pool = request.options, request.options.warpers, request.options.tree.pool
    block = {
        **more,
        "bench_name": request.bench_name,
        "template": request.template,
        "num_choices": request.num_choices,
        "sampling": options.sampling,
        "temperature": warpers.temperature,
        "filters": {name: getattr(warpers, name) for name in ("top_k", "top_p", "min_p")},
        "max_new_token": options.max_new_tokens,
        "seed": options.seed,
        "dtype": dtype_name(model.target.dtype),
        "device": device_name(model.target.device),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "commit": git_revision(),
    }
    if model.graphs is not None and not request.timing:
        block["cuda_graph"] = True
    if model.target.packed:
        block["packed_weights"] = True
    if options.sampling != "none":
        block |= {
            "total_token": options.total_token,
            "depth": options.depth,
            "top_k": pool.size,
            "head": model.draft.fingerprint,
        }
    if options.sampling == "rheo":
        block |= {
            "m": pool.m,
            "support": pool.support,
            "normaliser": pool.normaliser,
            "verification": options.verification or "rheo",
        }
    return block


def describe(model: EaModel, request: Request, n_questions: int, path: Path) -> str:
    """What a run will do, for the user to read before it starts."""
    options, warpers, pool = request.options, request.options.warpers, request.options.tree.pool
    method = "plain decoding"
    if options.sampling != "none":
        rheo = (
            f", m {pool.m}, support {pool.support or 'all'}, "
            f"verification {options.verification or 'rheo'}"
        )
        method = (
            f"sampling {options.sampling}{rheo if options.sampling == 'rheo' else ''}; "
            f"tree of {options.total_token - 1} drafted nodes (total_token {options.total_token}), "
            f"at most {options.depth + 1} levels (depth {options.depth}), {pool.size} slots a pool"
        )
    filters = {"top-k": warpers.top_k, "top-p": warpers.top_p, "min-p": warpers.min_p}
    active = ", ".join(f"{name} {value}" for name, value in filters.items() if value) or "none"
    dtype, device = dtype_name(model.target.dtype), device_name(model.target.device)
    return (
        f"{n_questions} questions of {request.bench_name} x {request.num_choices} choice(s)"
        f" -> {path}\n"
        f"{method}\n"
        f"temperature {warpers.temperature}, filters {active}, "
        f"at most {options.max_new_tokens} new tokens, seed {options.seed}\n"
        f"{dtype} on {device}, template {request.template}"
    )


def answer_all(
    model: EaModel, questions: list[Question], request: Request, path: Path, run: dict
) -> int:
    """Answer the questions that ``path`` does not hold yet; append each one as it is finished.

    One turn is answered first and thrown away, so that no measurement includes a cold start.

    Returns:
        Number of questions answered now.

    Raises:
        ValueError: if the file holds answers of another run.
    """
    done = {record["question_id"] for record in resume(path, run)}
    pending = [question for question in questions if question.question_id not in done]
    if done:
        skipped = len(questions) - len(pending)
        print(f"{path} holds {len(done)} finished questions; skipping {skipped}", flush=True)
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
    """The record of one question."""
    choices = [answer_choice(model, request, question, i) for i in range(request.num_choices)]
    return {
        "question_id": question.question_id,
        "answer_id": uuid.uuid4().hex,
        "model_id": request.model_id,
        "choices": choices,
        "tstamp": time.time(),
        "run": run,
    }


def answer_choice(model: EaModel, request: Request, question: Question, choice: int) -> dict:
    """All turns of one choice; each turn sees the answers before it."""
    result: dict = {"index": choice, "turns": []}
    for turn in range(len(question.turns)):
        users, answers = list(question.turns[: turn + 1]), result["turns"]
        seed = turn_seed(request.options.seed, question.question_id, choice, turn)
        text, generation, wall_time = answer_turn(model, request, users, answers, seed)
        entry = {
            "turns": text,
            "idxs": generation.cycles - 1,
            "new_tokens": generation.new_tokens,
            "wall_time": wall_time,
            "accept_lengths": generation.accept_lengths,
            "accepted_kinds": [
                "".join(kind[0] for kind in kinds) for kinds in generation.accepted_kinds
            ],
            "survivals": survivals(generation),
            "calibration": calibration.tally(generation.tried)
            if request.options.sampling != "none"
            else None,
            "stop_reasons": generation.stop_reason,
            "seconds": {phase: round(sec, 6) for phase, sec in generation.seconds.items()},
        }
        for key, value in entry.items():
            result.setdefault(key, []).append(value)
    return result


def survivals(generation: Generation) -> list[str]:
    """For each cycle, 1 or 0 for each visited node: whether its sampled slot is in the tree."""
    return [
        "".join(
            "1" if any(slot.kind == "sampled" for slot in children) else "0" for children in tried
        )
        for tried in generation.tried
    ]


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
    wall_time = time.perf_counter() - start
    text = model.tokenizer.decode(generation.token_ids, skip_special_tokens=True).strip()
    return text, generation, wall_time


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has finished its work; on a CPU nothing needs to be done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
