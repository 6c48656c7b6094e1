"""Conversations that the target makes itself: ``python -m eagle.traineagle3.generate --help``.

The target completes the user turn of its own chat template, then answers what it asked; or it answers the prompts of a file.
A batch is a function of the seed and of its number alone, so that a killed run goes on where it stopped and ends with the
same file. One JSON object a line (see ``corpus``), and the settings beside it in ``<output>.settings.json``.
"""

import argparse
import gzip
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad
from tqdm import tqdm
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StaticCache,
)

from eagle.files import differences, replace_text
from eagle.model.cycle import NonFiniteLogits
from eagle.model.ea_model import EaModel
from eagle.model.loading import DTYPE_HELP
from eagle.model.tokens import chat_ids, chat_text
from eagle.program import one_line_errors
from eagle.traineagle3.corpus import Conversation

# What the target is told before it makes up a user turn; "" is the template's own system prompt.
SYSTEMS = (
    "",
    "You are a helpful assistant that answers questions about everyday life.",
    "You are an expert programmer. The user asks for code or about code.",
    "You complete a Python function. The user gives its first line and a docstring with examples.",
    "You solve maths word problems step by step.",
    "You are a maths tutor. The user tells a short story with several numbers and asks how many or how much.",
    "You write stories, letters, essays and other texts for the user.",
    "The user gives you a text, and you summarise, rewrite or translate it.",
    "The user pastes a passage from an article and asks a question about it.",
    "The user asks a short question about history, geography, science or people.",
    "You explain physics, chemistry, biology, economics and other subjects.",
    "The user gives a detailed task in several sentences.",
    "You play a role that the user describes.",
    "The user asks for advice, recommendations or a plan.",
    "The user gives data and asks to sort, extract, classify or reformat it.",
    "The user poses a riddle or a problem of logic.",
)
STRETCH = 16  # tokens between two looks at which texts of a batch have ended
GIVE_UP = 20  # batches in a row without a conversation
USER_MARK = "\u2402user turn\u2402"


@dataclass(frozen=True)
class Recipe:
    """What decides the conversations.

    Attributes:
        prompts: hash of the file of prompts; None where the target makes the user turns up.
        temperatures: of the answers; batches take them in turn.
        question_temperature: of the user turns that the target makes up.
        max_question, max_answer: caps on new tokens.
        systems: system prompts under which the target makes up user turns, drawn for each.
        answer_systems: those under which it answers, drawn for each; a head should learn under those that it will meet.
    """

    base_model_path: str
    prompts: str | None
    batch_size: int
    seed: int
    temperatures: tuple[float, ...]
    question_temperature: float
    max_question: int
    max_answer: int
    dtype: str = "auto"
    systems: tuple[str, ...] = SYSTEMS
    answer_systems: tuple[str, ...] = ("",)

    def __post_init__(self):
        for name in ("batch_size", "max_question", "max_answer"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for temperature in (*self.temperatures, self.question_temperature):
            if not 0 < temperature < float("inf"):
                raise ValueError(
                    f"temperature is {temperature}; conversations are sampled, so it must be finite and above 0"
                )


class Conversations:
    """Makes batches of conversations with a model that is used for nothing else.

    Raises:
        ValueError: where the target has no chat template.
    """

    def __init__(self, model: EaModel, recipe: Recipe, prompts: list[str] | None):
        if model.tokenizer is None or not model.tokenizer.chat_template:
            raise ValueError(
                f"{recipe.base_model_path} has no chat template; conversations need one"
            )
        self.model, self.recipe, self.prompts = model, recipe, prompts
        # transformers fills what a call leaves open from the model's own generation config: a repetition penalty, filters.
        # The answers are to have the target's law, as decoding has it.
        model.base_model.generation_config = GenerationConfig()

    def batches(self, start: int) -> Iterator[list[Conversation]]:
        """Batch after batch from number ``start`` on; ends with the prompts where they come from a file.

        Raises:
            ValueError: after many batches in a row without one conversation, or where the chat template hides the user turn.
        """
        size = self.recipe.batch_size
        number, empty = start, 0
        while self.prompts is None or number * size < len(self.prompts):
            given = (
                None if self.prompts is None else self.prompts[number * size : (number + 1) * size]
            )
            batch = self.batch(number, given)
            empty = 0 if batch else empty + 1
            if empty == GIVE_UP:
                raise ValueError(
                    f"{GIVE_UP} batches in a row gave no conversation: the target does not end the user turns that it makes up within "
                    f"{self.recipe.max_question} tokens; raise --max-question, or give user turns with --prompts"
                )
            yield batch
            number += 1

    def batch(self, number: int, users: list[str] | None) -> list[Conversation]:
        """The conversations of one batch; those without a usable user turn or answer are left out."""
        recipe, tokenizer = self.recipe, self.model.tokenizer
        digest = hashlib.sha256(json.dumps([recipe.seed, number]).encode()).digest()
        torch.manual_seed(
            int.from_bytes(digest[:8], "big") >> 1
        )  # transformers draws from the global generator
        if users is None:
            headers = [
                user_header(tokenizer, system)
                for system in choose(recipe.systems, recipe.batch_size)
            ]
            ends = self.model.stop_ids | {
                end for _, after in headers for end in first_special(tokenizer, after)
            }
            prompts = [chat_ids(tokenizer, header) for header, _ in headers]
            written = self.sample(prompts, recipe.question_temperature, recipe.max_question, ends)
            # A turn that ran into the cap is not a whole question.
            users = [
                clean(tokenizer, ids, after) if done else ""
                for (ids, done), (_, after) in zip(written, headers)
            ]
        texts = [
            chat(tokenizer, system, user)
            for system, user in zip(choose(recipe.answer_systems, len(users)), users)
            if user
        ]
        if not texts:
            return []
        prompts = [chat_ids(tokenizer, text) for text in texts]
        temperature = recipe.temperatures[number % len(recipe.temperatures)]
        answers = self.sample(prompts, temperature, recipe.max_answer, self.model.stop_ids)
        return [
            Conversation(prompt, answer, temperature)
            for prompt, (answer, _) in zip(prompts, answers)
            if answer
        ]

    @torch.inference_mode()
    def sample(
        self, prompts: list[list[int]], temperature: float, cap: int, ends: frozenset[int]
    ) -> list[tuple[list[int], bool]]:
        """Continuations of a batch, each up to its first token of ``ends`` (included), and whether it came to one."""
        stops = sorted(ends)
        length = max(map(len, prompts))
        filler = stops[0] if stops else 0
        ids = torch.tensor(
            [[filler] * (length - len(p)) + p for p in prompts], device=self.model.target.device
        )
        mask = torch.tensor(
            [[0] * (length - len(p)) + [1] * len(p) for p in prompts], device=ids.device
        )
        draw = LogitsProcessorList([Draw(temperature)])
        # A cache of fixed size: one that grows is copied whole at every token.
        cache = StaticCache(config=self.model.target.config, max_cache_len=length + cap)
        texts: list[tuple[list[int], bool]] = [([], False)] * len(prompts)
        rows = list(range(len(prompts)))  # those that go on
        for written in range(0, cap, STRETCH):
            config = GenerationConfig(
                max_new_tokens=min(STRETCH, cap - written),
                eos_token_id=stops or None,
                pad_token_id=filler,
                disable_compile=True,
            )
            ids = self.model.base_model.generate(
                ids,
                attention_mask=mask,
                generation_config=config,
                logits_processor=draw,
                **{self.model.target.cache_keyword: cache},
            )
            for row, new in zip(rows, ids[:, length:].tolist()):
                texts[row] = cut(new, ends)
            mask = pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
            on = [i for i, row in enumerate(rows) if not texts[row][1]]
            if not on:
                break
            if len(on) < len(rows):
                rows, ids, mask = [rows[i] for i in on], ids[on], mask[on]
                keep_rows(cache, on)
        return texts


def keep_rows(cache: StaticCache, rows: list[int]) -> None:
    """Leave some sequences of a batch in its cache."""
    for layer in cache.layers:
        layer.keys, layer.values, layer.batch_size = layer.keys[rows], layer.values[rows], len(rows)


class Draw(LogitsProcessor):
    """Leaves one token of each row, drawn from the row's law at a temperature, for ``generate`` to take as the best.

    ``generate``'s own draw takes one random number a token of the vocabulary, which on a CPU costs more than the network does
    in a large batch. This one takes two a row: one picks a block of the vocabulary, the other a token of the block.

    Raises:
        NonFiniteLogits: when called, where a law is NaN.
    """

    BLOCK = 256

    def __init__(self, temperature: float):
        self.temperature = temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        p = (scores.float() / self.temperature).softmax(-1)
        if p.isnan().any():
            raise NonFiniteLogits(scores.dtype)
        blocks = pad(p, (0, -p.shape[-1] % self.BLOCK)).unflatten(-1, (-1, self.BLOCK))
        block = pick(blocks.sum(-1))
        token = block * self.BLOCK + pick(blocks[torch.arange(len(p), device=p.device), block])
        return torch.full_like(scores, -torch.inf).scatter_(1, token[:, None], 0)


def pick(weights: Tensor) -> Tensor:
    """One index a row (int64 ``[B]``) with probability proportional to ``weights`` (``[B, n]``), from torch's global generator."""
    sums = weights.double().cumsum(-1)
    mark = torch.rand(len(sums), 1, dtype=sums.dtype, device=sums.device) * sums[:, -1:]
    return torch.searchsorted(sums, mark, right=True)[:, 0].clamp_max(weights.shape[-1] - 1)


def choose(items: tuple[str, ...], count: int) -> list[str]:
    """Independent uniform picks, from torch's global generator."""
    return [items[i] for i in torch.randint(len(items), (count,)).tolist()]


def first_special(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The first token of ``text`` where it is a special one, in a list; what stands behind a user turn ends it."""
    first = chat_ids(tokenizer, text.strip())[:1]
    return [token for token in first if token in tokenizer.all_special_ids]


def cut(ids: list[int], stops: frozenset[int]) -> tuple[list[int], bool]:
    """``ids`` up to the first stop token, which is kept, and whether there is one."""
    for i, token in enumerate(ids):
        if token in stops:
            return ids[: i + 1], True
    return ids, False


def chat(tokenizer: PreTrainedTokenizerBase, system: str, user: str) -> str:
    """The template's text of one user turn, with or without a system prompt."""
    return chat_text(
        tokenizer,
        [{"role": "system", "content": system}] * bool(system)
        + [{"role": "user", "content": user}],
    )


def user_header(tokenizer: PreTrainedTokenizerBase, system: str) -> tuple[str, str]:
    """The template's text before and after a user turn."""
    before, mark, after = chat(tokenizer, system, USER_MARK).partition(USER_MARK)
    if not mark:
        raise ValueError(
            "the chat template does not repeat the user's turn as it is; give prompts with --prompts"
        )
    return before, after


def clean(tokenizer: PreTrainedTokenizerBase, ids: list[int], after: str) -> str:
    """A user turn as text, without what the template puts behind it."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    end = after.strip().partition("\n")[0]
    return (text.partition(end)[0] if end else text).strip()


def read_prompts(path: Path) -> list[str]:
    """User turns from a file: JSON Lines with ``turns`` (the first is taken) or ``prompt``, or plain text, one a line.

    Raises:
        ValueError: naming the line that is neither.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            prompts.append(line.strip())
            continue
        try:
            record = json.loads(line)
            prompts.append(record["turns"][0] if "turns" in record else record["prompt"])
        except (json.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}: neither turns nor a prompt ({error!r})"
            ) from error
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


def open_output(path: Path, recipe: Recipe) -> tuple[int, int]:
    """Prepare the output for appending: (conversations it holds, number of the next batch).

    Raises:
        ValueError: where it was made with other settings, naming them.
    """
    settings, size = settings_file(path), path.stat().st_size if path.exists() else 0
    if not settings.exists():
        if size:
            raise ValueError(
                f"{path} exists and {settings.name} does not: it was not made by this program; choose another --output"
            )
        return 0, 0
    state = json.loads(settings.read_text())
    changed = differences(state["recipe"], json.loads(json.dumps(asdict(recipe))))
    if changed:
        raise ValueError(
            f"{path} was made with other settings ({', '.join(changed)}); choose another --output"
        )
    if size < state["bytes"]:
        raise ValueError(
            f"{path} has {size} bytes and should have {state['bytes']}; restore it, or delete {settings.name} to begin anew"
        )
    with path.open("ab") as file:  # what was written of a batch that did not get finished
        file.truncate(state["bytes"])
    return state["conversations"], state["batches"]


def settings_file(path: Path) -> Path:
    """Where the recipe of a corpus and how far it has come are kept."""
    return path.with_name(path.name + ".settings.json")


def write_settings(path: Path, state: dict) -> None:
    """Replace the settings file, all or nothing."""
    replace_text(settings_file(path), json.dumps(state, indent=1) + "\n")


def append(path: Path, batch: list[Conversation]) -> int:
    """Add a batch to the file; returns the file's size in bytes."""
    text = "".join(conversation.to_json() + "\n" for conversation in batch).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(gzip.compress(text) if path.suffix == ".gz" and text else text)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def run(args: argparse.Namespace) -> None:
    """Generate until the file holds ``args.conversations``, or the prompts are used up."""
    if args.conversations is None and args.prompts is None:
        raise ValueError("--conversations is missing: without --prompts there is no end")
    recipe = Recipe(
        args.base_model_path, hashlib.sha256(args.prompts.read_bytes()).hexdigest() if args.prompts else None, args.batch_size, args.seed,
        tuple(args.temperatures), args.question_temperature, args.max_question, args.max_answer, args.dtype, tuple(args.systems),
        tuple(args.answer_systems),
    )  # fmt: skip
    prompts = read_prompts(args.prompts) if args.prompts else None
    wanted = len(prompts) if args.conversations is None else args.conversations
    count, number = open_output(args.output, recipe)
    print(
        f"{args.output} holds {count} conversations; {wanted} are wanted, {recipe.batch_size} a batch",
        flush=True,
    )
    if count >= wanted:
        return
    maker = Conversations(
        EaModel.from_pretrained(args.base_model_path, dtype=args.dtype), recipe, prompts
    )
    tokens = 0
    with tqdm(total=wanted, initial=count, unit="conversation") as bar:
        for number, batch in enumerate(maker.batches(number), number + 1):
            size = append(args.output, batch)
            count += len(batch)
            write_settings(
                args.output,
                {
                    "recipe": asdict(recipe),
                    "batches": number,
                    "bytes": size,
                    "conversations": count,
                },
            )
            tokens += sum(len(conversation.answer) for conversation in batch)
            bar.update(len(batch))
            bar.set_postfix(answer_tokens=tokens)
            if count >= wanted:
                break
    print(f"Done: {args.output}, {count} conversations", flush=True)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eagle.traineagle3.generate", description="Make training conversations with the target itself.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add(
        "--base-model-path",
        required=True,
        help="target: Hub id, folder, .gguf file, or smollm2-demo",
    )
    add(
        "--output",
        type=Path,
        required=True,
        help="JSON Lines file, gzipped where the name ends in .gz",
    )
    add(
        "--conversations",
        type=int,
        help="stop when the file holds at least so many (whole batches); default: all --prompts",
    )
    add(
        "--prompts",
        type=Path,
        help="take user turns from a file (text, or .jsonl with turns or prompt) instead of making them up",
    )
    add("--batch-size", type=int, default=64)
    add(
        "--temperatures",
        type=float,
        nargs="+",
        default=[1.0, 1.0, 0.7, 0.3],
        help="of the answers, batch by batch in turn",
    )
    add(
        "--question-temperature",
        type=float,
        default=1.0,
        help="of the user turns that the target makes up",
    )
    add(
        "--max-question",
        type=int,
        default=128,
        help="cap on the tokens of a user turn; one that reaches it is dropped",
    )
    add("--max-answer", type=int, default=256, help="cap on the tokens of an answer")
    add(
        "--systems",
        nargs="+",
        default=list(SYSTEMS),
        help='system prompts for the making of user turns, drawn for each; "" is the template\'s own',
    )
    add(
        "--answer-systems",
        nargs="+",
        default=[""],
        help="system prompts for the answers, drawn for each",
    )
    add("--seed", type=int, default=0)
    add("--dtype", default="auto", help=DTYPE_HELP)
    return parser


def main(argv: list[str] | None = None) -> None:
    """Entry point; bad input ends with one line, not a traceback."""
    with one_line_errors():
        run(build_parser().parse_args(argv))


if __name__ == "__main__":
    main()
