"""How a target makes up a user turn: it completes the user turn of its own chat template."""

from transformers import PreTrainedTokenizerBase

from eagle.model.tokens import chat_ids, chat_text

# What the target is told before it makes up a user turn; "" is the template's own system prompt.
SYSTEMS = (
    "",
    "You are a helpful assistant that answers questions about everyday life.",
    "You are an expert programmer. The user asks for code or about code.",
    "You complete a Python function. The user gives its first line and a docstring with examples.",
    "You solve maths word problems step by step.",
    "You are a maths tutor. The user tells a short story with several numbers and asks how many "
    "or how much.",
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
USER_MARK = "\u2402user turn\u2402"  # stands for the user turn while the template is taken apart


def chat(tokenizer: PreTrainedTokenizerBase, system: str, user: str) -> str:
    """A user turn in the chat template, up to where the answer begins.

    Args:
        tokenizer: has a chat template.
        system: system prompt; "" leaves it out.
        user: the user turn.
    """
    messages = [{"role": "system", "content": system}] if system else []
    return chat_text(tokenizer, [*messages, {"role": "user", "content": user}])


def around_user_turn(tokenizer: PreTrainedTokenizerBase, system: str) -> tuple[str, str]:
    """The template's text before and after a user turn.

    Raises:
        ValueError: if the template changes the user turn.
    """
    before, mark, after = chat(tokenizer, system, USER_MARK).partition(USER_MARK)
    if not mark:
        raise ValueError(
            "the chat template does not contain the user turn unchanged; give user turns with "
            "--prompts"
        )
    return before, after


def end_of_user_turn(tokenizer: PreTrainedTokenizerBase, after: str) -> frozenset[int]:
    """The special token that ends a user turn, if there is one.

    Args:
        tokenizer: has a chat template.
        after: the template's text after a user turn.

    Returns:
        The first token of ``after`` if it is a special token, otherwise nothing.
    """
    first = chat_ids(tokenizer, after.strip())[:1]
    return frozenset(first).intersection(tokenizer.all_special_ids)


def user_text(tokenizer: PreTrainedTokenizerBase, ids: list[int], after: str) -> str:
    """A user turn as text, without the text that the template puts after it.

    Args:
        tokenizer: decodes the ids.
        ids: token ids that the target wrote.
        after: the template's text after a user turn.
    """
    text = tokenizer.decode(ids, skip_special_tokens=True)
    end = after.strip().partition("\n")[0]
    return (text.partition(end)[0] if end else text).strip()
