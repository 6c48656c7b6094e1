"""Load an EAGLE-3 draft head, strictly, from a folder or a Hub id."""

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
# Entries of the head's config that its network reads.
CONFIG_ENTRIES = (
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


def load_draft(path: str, target_hidden: int, target_vocab: int, n_layers: int) -> DraftModel:
    """Load a draft head for a target.

    Args:
        path: folder or Hub id of the head.
        target_hidden: width of the target's hidden states.
        target_vocab: number of tokens of the target.
        n_layers: number of decoder layers of the target.

    Raises:
        ValueError: listing missing, unexpected and misshapen weights, or naming what is wrong with
            the config, the auxiliary layers or the vocabulary mapping.
        FileNotFoundError: if the folder has no config or no weights.
    """
    folder = head_folder(path)
    raw, weights = read_config(folder), read_weights(folder)
    config = head_config(raw)
    if config.vocab_size != target_vocab:
        raise ValueError(
            f"the head in {path} is for a vocabulary of {config.vocab_size}, the target has "
            f"{target_vocab}"
        )
    aux_layers = read_aux_layers(raw, n_layers)
    own_embedding = "embed_tokens.weight" in weights
    if not own_embedding and config.hidden_size != target_hidden:
        raise ValueError(
            f"the head in {path} has no embed_tokens.weight, and the target's embedding is "
            f"{target_hidden} wide where the head needs {config.hidden_size}"
        )
    with torch.device("meta"):
        model = DraftModel(config, target_hidden, aux_layers, own_embedding)
    if not model.reduced:
        # With equal vocabularies the mapping is the identity, which some heads store.
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
    """The local folder of a head; a Hub id is downloaded."""
    local = resolve_local(path)
    patterns = ["config.json", *WEIGHT_FILES]
    return Path(snapshot_download(path, allow_patterns=patterns)) if local is None else local


def read_config(folder: Path) -> dict:
    """The head's ``config.json``.

    Raises:
        FileNotFoundError: if there is none.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds no config.json: it is not an EAGLE-3 head")
    return json.loads(file.read_text())


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The head's weights, from safetensors or from a pickle that may hold tensors only.

    Raises:
        FileNotFoundError: if there are none.
    """
    safe, pickled = (folder / name for name in WEIGHT_FILES)
    if safe.is_file():
        return load_file(safe)
    if pickled.is_file():
        return torch.load(pickled, map_location="cpu", weights_only=True)
    raise FileNotFoundError(
        f"{folder} holds neither {' nor '.join(WEIGHT_FILES)}: it is not an EAGLE-3 head"
    )


def head_config(raw: dict) -> LlamaConfig:
    """The head's config as a ``LlamaConfig``.

    ``rope_theta`` may be missing (10000), at the top level, or inside ``rope_parameters`` or
    ``rope_scaling``.
    """
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope["rope_theta"] = float(raw.get("rope_theta") or rope.get("rope_theta") or 10000.0)
    entries = {name: raw[name] for name in CONFIG_ENTRIES if raw.get(name) is not None}
    entries["draft_vocab_size"] = raw.get("draft_vocab_size") or raw["vocab_size"]
    return LlamaConfig(**entries, num_hidden_layers=1, rope_parameters=rope)


def read_aux_layers(raw: dict, n_layers: int) -> list[int]:
    """The auxiliary layers that the head's config lists, or EAGLE-3's own.

    Raises:
        ValueError: for layers that the target does not have, or that are listed twice.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    listed = raw.get(name) or (raw.get("eagle_config") or {}).get(name)
    if not listed:
        return default_aux_layers(n_layers)
    wrong = [i for i in listed if not 0 <= i < n_layers]
    if wrong or len(set(listed)) != len(listed):
        raise ValueError(
            f"the head's config lists feature layers {listed}; the target has layers "
            f"0..{n_layers - 1}, each once"
        )
    if list(listed) == [1, n_layers // 2 - 1, n_layers - 4]:
        warnings.warn(
            f"the head's config lists feature layers {listed}; they are read as the layers whose "
            "input is recorded. If the head means their output, list "
            f"{default_aux_layers(n_layers)} instead",
            stacklevel=2,
        )
    return list(listed)


def check_keys(model: DraftModel, weights: dict[str, Tensor], path: str) -> None:
    """Check the names and shapes of a head's weights.

    Raises:
        ValueError: listing missing, unexpected and misshapen weights.
    """
    wanted = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    missing = sorted(wanted.keys() - weights.keys())
    unexpected = sorted(weights.keys() - wanted.keys())
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
            f"{path} holds an EAGLE-1 or EAGLE-2 head (its keys start with 'layers.0.'); only "
            "EAGLE-3 heads are supported, use the EAGLE-3 head of this target"
        )
    lists = (("missing", missing), ("unexpected", unexpected), ("wrong shape", misshapen))
    for label, names in lists:
        if names:
            problem += f"\n  {label}: {', '.join(names)}"
    raise ValueError(problem)


def check_mapping(d2t: Tensor, t2d: Tensor, vocab: int, path: str) -> None:
    """Check that d2t (offsets) maps draft ids to distinct target ids, those that t2d marks.

    Raises:
        ValueError: if it does not.
    """
    name, ids = f"d2t of the head in {path}", torch.arange(d2t.numel()) + d2t
    outside = ids[(ids < 0) | (ids >= vocab)]
    if not d2t.any():
        raise ValueError(
            f"{name} is all zeros: the mapping of its reduced vocabulary was not saved"
        )
    if outside.numel():
        raise ValueError(
            f"{name} points outside the vocabulary 0..{vocab - 1}: {outside[:5].tolist()}"
        )
    values, counts = ids.unique(return_counts=True)
    repeated = values[counts > 1]
    if repeated.numel():
        raise ValueError(f"{name} maps several draft ids to the target ids {repeated[:5].tolist()}")
    if not torch.equal(values, t2d.nonzero()[:, 0]):
        raise ValueError(f"t2d of the head in {path} does not mark the target ids that d2t maps to")
