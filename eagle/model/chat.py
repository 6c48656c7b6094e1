"""The chat template: messages as the text, and the ids, that the answer follows."""

from transformers import PreTrainedTokenizerBase


def chat_text(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """The template's text up to where the answer begins.

    Args:
        messages: each with ``role`` and ``content``, the last one the user's.
    """
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def chat_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a text that the template made, which brings its own special tokens."""
    return tokenizer(text, add_special_tokens=False).input_ids
