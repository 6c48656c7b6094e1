"""Checkpoints that EAGLE and its older transformers can read."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eagle.model.draft.checkpoint import head_folder, read_config
from eagle.model.ea_model import EaModel
from eagle.model.target import TargetModel
from eagle.traineagle3.new_head import new_config, new_head, save_head


def save_for_eagle(model: EaModel, head: str, folder: Path) -> tuple[Path, Path]:
    """Save a pair for EAGLE: old names in the configs, and the embedding beside the draft head.

    Args:
        model: the pair.
        head: path of its draft head, whose config is copied.
        folder: where to save.

    Returns:
        The folders of target and draft head.
    """
    target, copy = folder / "target", folder / "head"
    model.base_model.save_pretrained(target)
    config = json.loads((target / "config.json").read_text())
    config["rope_theta"] = (config.pop("rope_parameters", None) or {}).get("rope_theta", 10000.0)
    config["torch_dtype"] = "float32"
    (target / "config.json").write_text(json.dumps(config))
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(target)
        settings = json.loads((target / "tokenizer_config.json").read_text())
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        settings.pop("extra_special_tokens", None)
        (target / "tokenizer_config.json").write_text(json.dumps(settings))
    config = read_config(head_folder(head))
    save_head(model.draft, config, copy, torch.float32, model.target.embedding)
    return target, copy


def tiny_pair(folder: Path, vocab: int = 64, draft_vocab: int = 48) -> tuple[str, str]:
    """Save a random target of eight small layers with a tokenizer of words, and a draft head.

    Returns:
        The folders of target and draft head.
    """
    torch.manual_seed(0)
    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(vocab - 3))]
    ids = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    target = LlamaForCausalLM(config).eval()
    target.save_pretrained(folder / "tiny-target")
    fast.save_pretrained(folder / "tiny-target")
    model = TargetModel(target)
    settings = new_config(model, draft_vocab)
    draft, _ = new_head(model, settings, torch.arange(vocab - draft_vocab, vocab), seed=0)
    save_head(draft, settings, folder / "tiny-head", torch.float32)
    return str(folder / "tiny-target"), str(folder / "tiny-head")
