"""Chat templates: how a conversation becomes prompt ids."""

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eagle.model.tokens import chat_ids, chat_text

# The system prompt of EAGLE's script for Llama 3.1 (it is Meta's prompt for Llama 2). Comparing
# with EAGLE's results needs exactly this text.
LLAMA31_SYSTEM = (
    "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible, "
    "while being safe.  Your answers should not include any harmful, unethical, racist, sexist, "
    "toxic, dangerous, or illegal content. Please ensure that your responses are socially unbiased "
    "and positive in nature.\n\n"
    "If a question does not make any sense, or is not factually coherent, explain why instead of "
    "answering something not correct. If you don't know the answer to a question, please don't "
    "share false information."
)
FASTCHAT_TEMPLATES = ("vicuna_v1.1",)
TEMPLATES = ("auto", "llama-3.1", *FASTCHAT_TEMPLATES)


def check_template(template: str, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Raise a ValueError if a template is unknown or the tokenizer cannot use it."""
    if tokenizer is None:
        raise ValueError("the target has no tokenizer; answering questions needs one")
    if template not in TEMPLATES:
        raise ValueError(f"template is {template!r}; choose one of {', '.join(TEMPLATES)}")
    if template not in FASTCHAT_TEMPLATES and not tokenizer.chat_template:
        choices = " or ".join(FASTCHAT_TEMPLATES)
        raise ValueError(f"the tokenizer has no chat template; choose --template {choices}")


def build_prompt(
    template: str, tokenizer: PreTrainedTokenizerBase, users: list[str], answers: list[str]
) -> Tensor:
    """Prompt ids, int64 ``[1, L]``, of a conversation that waits for its next answer.

    Args:
        template: "auto" for the tokenizer's own template, or another of ``TEMPLATES``.
        tokenizer: the target's.
        users: the user's turns.
        answers: the answers to all turns but the last.
    """
    if template in FASTCHAT_TEMPLATES:
        return torch.tensor([tokenizer(fastchat_text(template, users, answers)).input_ids])
    messages = [{"role": "system", "content": LLAMA31_SYSTEM}] if template == "llama-3.1" else []
    for i, user in enumerate(users):
        messages.append({"role": "user", "content": user})
        if i < len(answers):
            messages.append({"role": "assistant", "content": answers[i]})
    return torch.tensor([chat_ids(tokenizer, chat_text(tokenizer, messages))])


def fastchat_text(template: str, users: list[str], answers: list[str]) -> str:
    """The same conversation as text, by one of FastChat's templates."""
    from fastchat.conversation import get_conv_template

    conversation = get_conv_template(template)
    user_role, answer_role = conversation.roles
    for i, user in enumerate(users):
        conversation.append_message(user_role, user)
        conversation.append_message(answer_role, answers[i] if i < len(answers) else None)
    return conversation.get_prompt()
