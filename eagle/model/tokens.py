"""The tokenizer's part: the chat template, and which tokens end an answer."""

from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

_ANSWER = "Answer"


def stop_token_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> frozenset[int]:
    """The stop set: the generation config's and the tokenizer's end-of-sequence tokens and the template's end-of-turn."""
    config = model.generation_config.eos_token_id if model.generation_config is not None else None
    if config is None:
        config = model.config.eos_token_id
    stops = set(config if isinstance(config, list) else [config])
    if tokenizer is not None:
        stops |= {tokenizer.eos_token_id, end_of_turn(tokenizer)}
    return frozenset(stops - {None})


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template puts right after an answer; None where there is none."""
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except TemplateError:  # a template that takes other roles
        return None
    after = text.rpartition(_ANSWER)[2].strip()
    special = [
        (after.find(token), id_)
        for id_, token in _special_tokens(tokenizer)
        if after.startswith(token)
    ]
    return special[0][1] if special else None


def _special_tokens(tokenizer: PreTrainedTokenizerBase):
    """(id, text) of the special tokens, longest text first."""
    added = [
        (id_, token.content)
        for id_, token in tokenizer.added_tokens_decoder.items()
        if token.special
    ]
    return sorted(added, key=lambda item: -len(item[1]))


def chat_text(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """The template's text up to where the answer begins.

    Args:
        messages: each with ``role`` and ``content``, the last one the user's.
    """
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def chat_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a text that the template made, which brings its own special tokens."""
    return tokenizer(text, add_special_tokens=False).input_ids
