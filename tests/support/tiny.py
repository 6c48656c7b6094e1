"""Tiny targets and draft heads with random weights, made in memory or on disk."""

import json

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from eagle.model.draft.checkpoint import head_config, load_draft
from eagle.model.draft.network import DraftModel
from eagle.model.ea_model import EaModel

CHAT_TOKENS = ["<|user|>", "<|end|>", "<|assistant|>"]
WORDS = ["<unk>", "<s>", "</s>", *CHAT_TOKENS, *(f"w{i}" for i in range(26))]
CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
PROMPT = torch.tensor([[3, 1, 2, 3, 0, 1]])

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}


def tiny_target(family="llama", vocab=32, layers=4, hidden=16, seed=0, scale=0.4, **config):
    """A random target.

    ``scale`` is the spread of its weights. It is large enough that the target's distribution
    depends on the prefix. ``config`` overrides fields of the model's configuration.
    """
    torch.manual_seed(seed)
    config_class, model_class = FAMILIES[family]
    settings = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 256,
        "initializer_range": scale,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "attn_implementation": "sdpa",
    }
    if family == "mistral":
        settings["sliding_window"] = None
    model = model_class(config_class(**(settings | config))).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=scale)
    return model


def peaked_target(layers=8):
    """A random target with peaked distributions, as a trained one has: there is much to learn."""
    target = tiny_target(layers=layers, hidden=32)
    target.lm_head.weight.data *= 4
    return target


def head_json(target, draft_vocab=None, aux_layers=(0, 1, 2), **extra):
    """The ``config.json`` of a draft head for ``target``; ``extra`` overrides its fields."""
    config = target.config
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": 2 * config.hidden_size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": draft_vocab or config.vocab_size,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "eagle_aux_hidden_state_layer_ids": list(aux_layers),
    } | extra


def draft_ids(vocab, draft_vocab):
    """The target ids of a reduced draft vocabulary: spread out, not the first ones."""
    return torch.arange(draft_vocab) * vocab // draft_vocab + (vocab // draft_vocab - 1)


def tiny_head(
    target, draft_vocab=None, aux_layers=(0, 1, 2), seed=1, scale=0.4, own_embedding=False, **extra
):
    """A random draft head for ``target``."""
    torch.manual_seed(seed)
    config = head_config(head_json(target, draft_vocab, aux_layers, **extra))
    head = DraftModel(config, target.config.hidden_size, list(aux_layers), own_embedding).eval()
    for name, parameter in head.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=scale)
    if head.reduced:
        ids = draft_ids(config.vocab_size, draft_vocab)
        head.d2t.copy_(ids - torch.arange(draft_vocab))
        head.t2d[ids] = True
    return head


def imitate(head, target):
    """Give the draft head the target's output weights, so that the two agree more often."""
    rows = head.target_ids() if head.reduced else slice(None)
    head.lm_head.weight.data.copy_(target.lm_head.weight.data[rows])
    return head


def tiny_pair(
    vocab=32,
    draft_vocab=None,
    total_token=12,
    depth=2,
    top_k=4,
    layers=4,
    aux_layers=(0, 1, 2),
    hidden=16,
    seed=0,
    **config,
):
    """An ``EaModel`` of a random target and a random draft head."""
    target = tiny_target(vocab=vocab, layers=layers, hidden=hidden, seed=seed, **config)
    head = imitate(tiny_head(target, draft_vocab, aux_layers, seed=seed + 1), target)
    return EaModel(target, head, total_token=total_token, depth=depth, top_k=top_k)


def save_head(head, folder, config):
    """Write a draft head to ``folder`` in the official layout."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: tensor.contiguous() for name, tensor in head.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    return folder


def save_pair(folder, draft_vocab=24):
    """Write a random target, its tokenizer and a draft head; return the target.

    The target and the tokenizer go to ``folder/target``, the draft head to ``folder/head``.
    """
    target = tiny_target()
    target.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    save_head(tiny_head(target, draft_vocab), folder / "head", head_json(target, draft_vocab))
    return target


def load_head(folder, target):
    """The draft head in ``folder``, for ``target``."""
    config = target.config
    return load_draft(str(folder), config.hidden_size, config.vocab_size, config.num_hidden_layers)


def tiny_tokenizer():
    """A tokenizer of 32 ids: the words w0..w25 and the tokens of a small chat template."""
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=CHAT_TOKENS,
    )
    fast.chat_template = CHAT
    return fast
