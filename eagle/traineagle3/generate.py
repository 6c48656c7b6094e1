"""Make training conversations with the target itself.

    python -m eagle.traineagle3.generate --help

The target writes both sides of a conversation: it completes the user turn of its own chat template
and then answers it. Or it answers the user turns of a file. The result is a corpus file (see
``corpus``), with the settings beside it (see ``corpus_writer``).

A batch depends on the settings, the seed and its own number only. Therefore a killed run continues
where it stopped, and ends with the same conversations.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from tqdm import tqdm

from eagle.model.ea_model import EaModel
from eagle.model.loading import DTYPE_HELP
from eagle.model.tokens import chat_ids
from eagle.program import new_parser, program
from eagle.traineagle3.batch_sampling import BatchSampler
from eagle.traineagle3.corpus import Conversation
from eagle.traineagle3.corpus_writer import CorpusWriter
from eagle.traineagle3.user_turns import (
    SYSTEMS,
    around_user_turn,
    chat,
    end_of_user_turn,
    user_text,
)

GIVE_UP = 20  # batches in a row without a conversation


@dataclass(frozen=True)
class Recipe:
    """What decides the conversations. The settings file holds its fields.

    Attributes:
        base_model_path: the target.
        prompts: SHA-256 of the file of user turns; None if the target makes them up.
        batch_size: conversations made at the same time.
        seed: any integer.
        temperatures: of the answers. Each batch uses one of them, in turn.
        question_temperature: of the user turns that the target makes up.
        max_question: cap on the tokens of a user turn.
        max_answer: cap on the tokens of an answer.
        dtype: of the target.
        systems: system prompts of the user turns that the target makes up, one chosen at random
            for each.
        answer_systems: system prompts of the answers, one chosen at random for each. A draft head
            should learn under the system prompts that it will be used with.

    Raises:
        ValueError: for a size below 1, or a temperature that is not finite and above 0.
    """

    base_model_path: str
    prompts: str | None
    batch_size: int
    seed: int
    temperatures: list[float]
    question_temperature: float
    max_question: int
    max_answer: int
    dtype: str
    systems: list[str]
    answer_systems: list[str]

    def __post_init__(self):
        for name in ("batch_size", "max_question", "max_answer"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for temperature in (*self.temperatures, self.question_temperature):
            if not 0 < temperature < float("inf"):
                raise ValueError(
                    f"temperature is {temperature}; conversations are sampled, so it must be "
                    "finite and above 0"
                )


class Conversations:
    """Makes batches of conversations.

    Args:
        model: the target, used for nothing else (see ``BatchSampler``).
        recipe: what decides the conversations.
        users: the user turns; None if the target makes them up.

    Raises:
        ValueError: if the target has no chat template.
    """

    def __init__(self, model: EaModel, recipe: Recipe, users: list[str] | None):
        if model.tokenizer is None or not model.tokenizer.chat_template:
            raise ValueError(
                f"{recipe.base_model_path} has no chat template; conversations need one"
            )
        self.recipe, self.users = recipe, users
        self.tokenizer, self.stop_ids = model.tokenizer, model.stop_ids
        self.sampler = BatchSampler(model)

    def batches(self, start: int) -> Iterator[list[Conversation]]:
        """Make batch after batch, without an end if the target makes up the user turns.

        Args:
            start: number of the first batch, from 0.

        Yields:
            The conversations of one batch, which may be none.

        Raises:
            ValueError: after many batches in a row without a conversation, or if the chat template
                changes the user turn.
        """
        size, number, empty = self.recipe.batch_size, start, 0
        while self.users is None or number * size < len(self.users):
            batch = self.batch(number)
            empty = 0 if batch else empty + 1
            if empty == GIVE_UP:
                raise ValueError(
                    f"{GIVE_UP} batches in a row gave no conversation: the target does not end the "
                    f"user turns that it makes up within {self.recipe.max_question} tokens; raise "
                    "--max-question, or give user turns with --prompts"
                )
            yield batch
            number += 1

    def batch(self, number: int) -> list[Conversation]:
        """Make one batch; a conversation without a user turn or an answer is left out."""
        # 1. Seed torch's global generator, from which everything in the batch is sampled.
        recipe = self.recipe
        digest = hashlib.sha256(json.dumps([recipe.seed, number]).encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)

        # 2. Take the user turns of the file, or let the target make them up.
        if self.users is None:
            users = self.made_up_users()
        else:
            users = self.users[number * recipe.batch_size : (number + 1) * recipe.batch_size]

        # 3. Put them into the chat template.
        systems = choose(recipe.answer_systems, len(users))
        texts = [chat(self.tokenizer, system, user) for system, user in zip(systems, users) if user]
        prompts = [chat_ids(self.tokenizer, text) for text in texts]
        if not prompts:
            return []

        # 4. Answer them.
        temperature = recipe.temperatures[number % len(recipe.temperatures)]
        answers = self.sampler.sample(prompts, temperature, recipe.max_answer, self.stop_ids)
        return [
            Conversation(prompt, answer, temperature)
            for prompt, (answer, _) in zip(prompts, answers)
            if answer
        ]

    def made_up_users(self) -> list[str]:
        """User turns that the target writes; "" for one that it does not end within the cap."""
        recipe, tokenizer = self.recipe, self.tokenizer
        systems = choose(recipe.systems, recipe.batch_size)
        around = [around_user_turn(tokenizer, system) for system in systems]
        prompts = [chat_ids(tokenizer, before) for before, _ in around]
        stop_ids = self.stop_ids.union(*(end_of_user_turn(tokenizer, after) for _, after in around))
        temperature, cap = recipe.question_temperature, recipe.max_question
        written = self.sampler.sample(prompts, temperature, cap, stop_ids)
        return [
            user_text(tokenizer, ids, after) if ended else ""
            for (ids, ended), (_, after) in zip(written, around)
        ]


def choose(items: list[str], count: int) -> list[str]:
    """Choose ``count`` items independently and uniformly, with torch's global generator."""
    return [items[i] for i in torch.randint(len(items), (count,)).tolist()]


def read_users(path: Path) -> list[str]:
    """User turns of a file.

    Args:
        path: JSON Lines with ``turns`` (the first one is taken) or ``prompt`` if the name ends in
            ``.jsonl``. Otherwise plain text with one user turn a line.

    Raises:
        ValueError: naming a line that has neither, or if there is no user turn.
    """
    users = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            users.append(line.strip())
            continue
        try:
            record = json.loads(line)
            users.append(record["turns"][0] if "turns" in record else record["prompt"])
        except (json.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            message = f"{path}, line {number}: neither turns nor a prompt ({error!r})"
            raise ValueError(message) from error
    if not users:
        raise ValueError(f"{path} holds no prompts")
    return users


def build_parser() -> argparse.ArgumentParser:
    """The program's options."""
    parser = new_parser(
        "eagle.traineagle3.generate",
        "Make training conversations with the target itself.",
    )
    add = parser.add_argument
    target_help = "target: Hub id, folder, .gguf file, or smollm2-demo"
    add("--base-model-path", required=True, help=target_help)
    output_help = "JSON Lines file, gzipped if its name ends in .gz"
    add("--output", type=Path, required=True, help=output_help)
    count_help = "stop after the batch that brings the file to this number; default: all --prompts"
    add("--conversations", type=int, help=count_help)
    prompts_help = "take user turns from a file: text, or .jsonl with turns or prompt"
    add("--prompts", type=Path, help=prompts_help)
    add("--batch-size", type=int, default=64, help="conversations made at the same time")
    temperatures = [1.0, 1.0, 0.7, 0.3]
    temperatures_help = "temperatures of the answers; each batch uses one of them, in turn"
    add("--temperatures", type=float, nargs="+", default=temperatures, help=temperatures_help)
    question_help = "temperature of the user turns that the target makes up"
    add("--question-temperature", type=float, default=1.0, help=question_help)
    max_question_help = "cap on the tokens of a user turn; one that does not end in it is dropped"
    add("--max-question", type=int, default=128, help=max_question_help)
    add("--max-answer", type=int, default=256, help="cap on the tokens of an answer")
    systems_help = (
        "system prompts of the user turns that the target makes up, one chosen at random for each; "
        '"" is the template\'s own'
    )
    add("--systems", nargs="+", default=list(SYSTEMS), help=systems_help)
    answer_systems_help = "system prompts of the answers, one chosen at random for each"
    add("--answer-systems", nargs="+", default=[""], help=answer_systems_help)
    add("--seed", type=int, default=0, help="seed of all random choices")
    add("--dtype", default="auto", help=DTYPE_HELP)
    return parser


@program(build_parser)
def main(args: argparse.Namespace) -> None:
    """Add conversations to a file until it holds enough, or until the prompts are used up."""
    # 1. Read the settings.
    if args.conversations is None and args.prompts is None:
        raise ValueError("--conversations is missing: without --prompts there is no end")
    settings = {field.name: getattr(args, field.name) for field in fields(Recipe)}
    users = None
    if args.prompts:
        settings["prompts"] = hashlib.sha256(args.prompts.read_bytes()).hexdigest()
        users = read_users(args.prompts)
    recipe = Recipe(**settings)
    wanted = len(users) if args.conversations is None else args.conversations

    # 2. Open the file, and see how far it has come.
    writer = CorpusWriter(args.output, asdict(recipe))
    state = f"{args.output} holds {writer.conversations} conversations"
    print(f"{state}; {wanted} are wanted, {recipe.batch_size} a batch", flush=True)
    if writer.conversations >= wanted:
        return

    # 3. Load the target.
    model = EaModel.from_pretrained(args.base_model_path, dtype=args.dtype)
    conversations = Conversations(model, recipe, users)

    # 4. Make batches and add them to the file.
    tokens = 0
    with tqdm(total=wanted, initial=writer.conversations, unit="conversation") as bar:
        for batch in conversations.batches(writer.batches):
            writer.append(batch)
            tokens += sum(len(conversation.answer) for conversation in batch)
            bar.update(len(batch))
            bar.set_postfix(answer_tokens=tokens)
            if writer.conversations >= wanted:
                break
    print(f"Done: {args.output}, {writer.conversations} conversations", flush=True)


if __name__ == "__main__":
    main()
