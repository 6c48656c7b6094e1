"""Loading an EAGLE-3 head, strictly, from a folder or a Hub id."""

import json
import warnings
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle.model.draft.network import DraftModel
from eagle.model.loading import resolve_local
from eagle.model.target import default_aux_layers

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


def load_draft(path: str, target_hidden: int, target_vocab: int, n_layers: int) -> DraftModel:
    """Load an EAGLE-3 head from a folder or a Hub id, strictly.

    Raises:
        ValueError: listing missing, unexpected and misshapen weights, or naming what is wrong with the
            config, the feature layers or the vocabulary mapping.
        FileNotFoundError: where the folder lacks a config or weights.
    """
    folder = head_folder(path)
    raw, weights = read_config(folder), read_weights(folder)
    config = head_config(raw)
    if config.vocab_size != target_vocab:
        raise ValueError(
            f"the head in {path} is for a vocabulary of {config.vocab_size}, the target has {target_vocab}"
        )
    aux_layers = aux_layers_of(raw, n_layers)
    own_embedding = "embed_tokens.weight" in weights
    if not own_embedding and config.hidden_size != target_hidden:
        raise ValueError(
            f"the head in {path} has no embed_tokens.weight, and the target's embedding is {target_hidden} wide "
            f"where the head needs {config.hidden_size}"
        )
    with torch.device("meta"):
        model = DraftModel(config, target_hidden, aux_layers, own_embedding)
    if not model.reduced:
        # With equal vocabularies the mapping is the identity; some heads store it all the same.
        if weights.pop("d2t", torch.zeros(1)).any():
            raise ValueError(
                f"the head in {path} maps ids by d2t although its vocabulary is the target's"
            )
        weights.pop("t2d", None)
    check_keys(model, weights, path)
    if model.reduced:
        check_mapping(weights["d2t"], weights["t2d"], target_vocab, path)
    model.load_state_dict(weights, strict=True, assign=True)
    model.rotary = LlamaRotaryEmbedding(config)  # its buffers are computed, not loaded
    return model.eval()


def head_folder(path: str) -> Path:
    """The local folder of a head, downloaded where ``path`` is a Hub id."""
    return resolve_local(path) or Path(
        snapshot_download(path, allow_patterns=["config.json", *WEIGHT_FILES])
    )


def read_config(folder: Path) -> dict:
    """The head's ``config.json``."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no config.json: it is not an EAGLE-3 head")
    return json.loads((folder / "config.json").read_text())


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The head's weights, from safetensors or from a pickle that may hold tensors only."""
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            if name.endswith(".safetensors"):
                return load_file(folder / name)
            return torch.load(folder / name, map_location="cpu", weights_only=True)
    raise FileNotFoundError(
        f"{folder} holds neither {' nor '.join(WEIGHT_FILES)}: it is not an EAGLE-3 head"
    )


def head_config(raw: dict) -> LlamaConfig:
    """The head's config as a ``LlamaConfig``; rope_theta may be absent, top-level or nested."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope["rope_theta"] = float(raw.get("rope_theta") or rope.get("rope_theta") or 10000.0)
    names = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "vocab_size",
        "max_position_embeddings",
        "hidden_act",
        "attention_bias",
        "mlp_bias",
    )
    kept = {name: raw[name] for name in names if raw.get(name) is not None}
    return LlamaConfig(
        **kept,
        num_hidden_layers=1,
        rope_parameters=rope,
        draft_vocab_size=raw.get("draft_vocab_size") or raw["vocab_size"],
    )


def aux_layers_of(raw: dict, n_layers: int) -> list[int]:
    """The target layers to tap: listed in the head's config, else EAGLE-3's own."""
    listed = raw.get("eagle_aux_hidden_state_layer_ids") or (raw.get("eagle_config") or {}).get(
        "eagle_aux_hidden_state_layer_ids"
    )
    if not listed:
        return default_aux_layers(n_layers)
    wrong = [i for i in listed if not 0 <= i < n_layers]
    if wrong or len(set(listed)) != len(listed):
        raise ValueError(
            f"the head's config lists feature layers {listed}; the target has layers 0..{n_layers - 1}, each once"
        )
    if list(listed) == [1, n_layers // 2 - 1, n_layers - 4]:
        warnings.warn(
            f"the head's config lists feature layers {listed}; they are read as the layers whose input is tapped. If the head "
            f"means their output, list {default_aux_layers(n_layers)} instead",
            stacklevel=2,
        )
    return list(listed)


def check_keys(model: DraftModel, weights: dict[str, Tensor], path: str) -> None:
    """Raise a ValueError that lists missing, unexpected and misshapen weights."""
    wanted = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    missing, unexpected = (
        sorted(wanted.keys() - weights.keys()),
        sorted(weights.keys() - wanted.keys()),
    )
    misshapen = [
        f"{name} {tuple(weights[name].shape)} instead of {wanted[name]}"
        for name in sorted(wanted.keys() & weights.keys())
        if tuple(weights[name].shape) != wanted[name]
    ]
    if not (missing or unexpected or misshapen):
        return
    problem = f"the head in {path} does not fit"
    if any(name.startswith("layers.0.") for name in unexpected):
        problem = (
            f"{path} holds an EAGLE-1 or EAGLE-2 head (its keys start with 'layers.0.'); only EAGLE-3 heads are "
            "supported, use the EAGLE-3 head of this target"
        )
    for label, names in (
        ("missing", missing),
        ("unexpected", unexpected),
        ("wrong shape", misshapen),
    ):
        if names:
            problem += f"\n  {label}: {', '.join(names)}"
    raise ValueError(problem)


def check_mapping(d2t: Tensor, t2d: Tensor, vocab: int, path: str) -> None:
    """Raise a ValueError unless d2t (offsets) maps draft ids to distinct target ids, those that t2d marks."""
    ids = torch.arange(d2t.numel()) + d2t
    outside = ids[(ids < 0) | (ids >= vocab)]
    if not d2t.any():
        raise ValueError(
            f"d2t of the head in {path} is all zeros: the mapping of its reduced vocabulary was not saved"
        )
    if outside.numel():
        raise ValueError(
            f"d2t of the head in {path} points outside the vocabulary 0..{vocab - 1}: {outside[:5].tolist()}"
        )
    values, counts = ids.unique(return_counts=True)
    if (counts > 1).any():
        raise ValueError(
            f"d2t of the head in {path} maps several draft ids to the target ids {values[counts > 1][:5].tolist()}"
        )
    if not torch.equal(values, t2d.nonzero()[:, 0]):
        raise ValueError(f"t2d of the head in {path} does not mark the target ids that d2t maps to")
