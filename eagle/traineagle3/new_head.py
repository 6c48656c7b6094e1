"""A head to begin with, made from the target's own weights, and the folder that a head is kept in."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from eagle.model.draft.checkpoint import head_config
from eagle.model.draft.network import DraftModel
from eagle.model.target import TargetModel, default_aux_layers

PROJECTIONS = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def new_config(target: TargetModel, draft_vocab_size: int, **changes) -> dict:
    """The ``config.json`` of a head shaped as one layer of the target; ``changes`` override single entries.

    The feature layers are EAGLE-3's own and so are not listed, unless ``changes`` names them. EAGLE takes the hidden size over the number
    of heads for the width of a head: where the target's layers are built otherwise, the head gets as many heads as fit.
    """
    config = target.config
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if heads * head_dim != config.hidden_size:
        heads = max(
            n
            for n in range(1, max(config.hidden_size // head_dim, 1) + 1)
            if config.hidden_size % n == 0
        )
    kv_heads = min(getattr(config, "num_key_value_heads", None) or heads, heads)
    kv_heads = max(n for n in range(1, kv_heads + 1) if heads % n == 0)
    shape = {
        "hidden_size": config.hidden_size,
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "hidden_act": getattr(config, "hidden_act", "silu"),
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0),
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    fixed = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }
    return {k: v for k, v in (fixed | shape).items() if v is not None} | {
        k: v for k, v in changes.items() if v is not None
    }


def new_head(
    target: TargetModel, config: dict, draft_ids: Tensor, seed: int
) -> tuple[DraftModel, list[str]]:
    """A head in float32 that starts from the target: its last layer, final norm and output rows, and the last feature as it is.

    Args:
        config: as from ``new_config``.
        draft_ids: int64 ``[draft_vocab]`` target id of each draft id, distinct.
        seed: of the weights that have no counterpart in the target.

    Returns:
        The head, and the names of the weights that had to start at random although the target might have had them.
    """
    aux_layers = config.get("eagle_aux_hidden_state_layer_ids") or default_aux_layers(
        len(target.layers)
    )
    generator = torch.Generator().manual_seed(seed)
    draft = DraftModel(head_config(config), target.hidden_size, aux_layers)
    for parameter in draft.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02, generator=generator)
    if draft.reduced:
        draft.d2t.copy_(draft_ids - torch.arange(draft_ids.numel()))
        draft.t2d[draft_ids] = True

    h, missed = draft.config.hidden_size, []

    def start(name: str, own: Tensor, source: nn.Module | None, rows=slice(None)) -> None:
        """Copy the target's weight into ``own``, a part of the head's weight ``name``."""
        weight = getattr(source, "weight", None)
        if weight is None or weight[rows].shape != own.shape:
            missed.append(name)
            return
        own.copy_(weight[rows])

    with torch.no_grad():
        layer, state = target.layers[-1], draft.state_dict()
        for name in PROJECTIONS:
            own = state[f"midlayer.{name}.weight"]
            if name.endswith(("q_proj", "k_proj", "v_proj")):
                own = own[
                    :, h:
                ]  # the first h columns read the embedding, which the target's layer does not do
            start(f"midlayer.{name}", own, submodule(layer, name))
        draft.load_state_dict(state)
        norms = (
            ("midlayer.hidden_norm", submodule(layer, "input_layernorm")),
            ("midlayer.post_attention_layernorm", submodule(layer, "post_attention_layernorm")),
            ("norm", submodule(target.model.get_decoder(), "norm")),
        )
        for name, source in norms:
            own = draft.get_submodule(name)
            start(name, own.weight, source)
            probe = torch.linspace(-1, 1, h)[None]
            if name not in missed and not torch.allclose(
                own(probe), source(probe.to(source.weight)).float().cpu(), atol=0.05, rtol=0.05
            ):
                own.weight.fill_(1)  # the target's norm means something else by its weight
                missed.append(name)
        start("lm_head", draft.lm_head.weight, target.output_head, draft_ids)
        if h == target.hidden_size:
            draft.fc.weight.zero_()
            draft.fc.weight[:, -h:] = torch.eye(h)
        else:
            missed.append("fc")
    return draft, missed


def submodule(module: nn.Module, name: str) -> nn.Module | None:
    """A submodule by its dotted name; None where the target's layers are built otherwise."""
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


def save_head(
    draft: DraftModel,
    config: dict,
    folder: Path,
    dtype: torch.dtype,
    embedding: nn.Module | None = None,
) -> None:
    """Write a head in the official layout, replacing the folder as a whole.

    Args:
        embedding: the target's, to be stored with the head. EAGLE reads it from the target's files, and finds it only where these
            are split into shards with an index.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    scratch.chmod(0o755)  # mkdtemp makes it private
    try:
        state = {
            k: (v.to(dtype) if v.is_floating_point() else v).cpu().contiguous()
            for k, v in draft.state_dict().items()
        }
        if embedding is not None:
            state["embed_tokens.weight"] = embedding.weight.detach().to(dtype).cpu().contiguous()
            config = config | {
                "target_hidden_size": config["hidden_size"]
            }  # tells EAGLE to look for it here
        save_file(state, scratch / "model.safetensors", metadata={"format": "pt"})
        config = config | {"torch_dtype": str(dtype).removeprefix("torch.")}
        (scratch / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        if folder.exists():
            old = folder.with_name(folder.name + ".old")
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
            scratch.rename(folder)
            shutil.rmtree(old)
        else:
            os.rename(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
