"""What comes from the tokenizer: the chat template, and which tokens end an answer."""

from typing import cast

from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

_ANSWER = "Answer"


def stop_token_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> frozenset[int]:
    """The tokens that end an answer.

    Args:
        model: its generation config, or else its config, names end-of-sequence tokens.
        tokenizer: if given, adds its end-of-sequence token and the chat template's end of turn.
    """
    config = model.generation_config.eos_token_id if model.generation_config is not None else None
    if config is None:
        config = model.config.eos_token_id
    stops = set(config if isinstance(config, list) else [config])
    if tokenizer is not None:
        stops |= {tokenizer.eos_token_id, end_of_turn(tokenizer)}
    return frozenset(stops - {None})


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template puts right after an answer; None if it has none."""
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = chat_text(tokenizer, turns, add_generation_prompt=False)
    except TemplateError:  # a template for other roles
        return None
    after = text.rpartition(_ANSWER)[2].strip()
    found = {
        token.content: id_
        for id_, token in tokenizer.added_tokens_decoder.items()
        if token.special and after.startswith(token.content)
    }
    return found[max(found, key=len)] if found else None


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    add_generation_prompt: bool = True,
) -> str:
    """A conversation in the tokenizer's chat template.

    Args:
        tokenizer: has a chat template.
        messages: each with ``role`` and ``content``.
        add_generation_prompt: end the text where the assistant's next answer begins.
    """
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    return cast(str, text)


def chat_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text from a chat template, which holds its own special tokens already."""
    return tokenizer(text, add_special_tokens=False).input_ids
