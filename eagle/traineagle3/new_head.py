"""Make a draft head from the target's own weights, and write a draft head to a folder."""

import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from eagle.model.draft.checkpoint import head_config
from eagle.model.draft.network import DraftModel
from eagle.model.target import TargetModel, default_aux_layers

# Layers that read the normed embedding and the normed hidden state, side by side.
WIDE_PROJECTIONS = tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v"))
PROJECTIONS = (
    *WIDE_PROJECTIONS,
    "self_attn.o_proj",
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def new_config(target: TargetModel, draft_vocab_size: int, **changes) -> dict:
    """The ``config.json`` of a draft head that is shaped like one layer of the target.

    The auxiliary layers are EAGLE-3's own and are not listed, unless ``changes`` lists them. EAGLE
    assumes that the width of an attention head is the hidden size divided by the number of heads.
    If this is not so in the target, the draft head gets as many attention heads as fit.

    Args:
        target: the target.
        draft_vocab_size: number of tokens that the draft head can propose.
        changes: entries that replace others, if they are not None.
    """
    config = target.config
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if heads * head_dim != config.hidden_size:
        heads = largest_divisor(config.hidden_size, config.hidden_size // head_dim)
    kv_heads = min(getattr(config, "num_key_value_heads", None) or heads, heads)
    shape = {
        "hidden_size": config.hidden_size,
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": largest_divisor(heads, kv_heads),
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
    changed = {name: value for name, value in changes.items() if value is not None}
    return {k: v for k, v in (fixed | shape).items() if v is not None} | changed


def largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of ``number`` up to ``at_most``; 1 if ``at_most`` is below 1."""
    return next(n for n in range(max(at_most, 1), 0, -1) if number % n == 0)


def new_head(
    target: TargetModel, config: dict, draft_ids: Tensor, seed: int
) -> tuple[DraftModel, list[str]]:
    """Make a draft head in float32 that starts from the target.

    It starts with the target's last layer, final norm and output rows. Its ``fc`` passes the
    features of the last auxiliary layer on unchanged. All other weights start at random.

    Args:
        target: the target.
        config: as from ``new_config``.
        draft_ids: int64 ``[draft_vocab]`` target id of each draft id, all different.
        seed: of the random weights.

    Returns:
        The draft head, and the names of the layers that could not be copied, because the target is
        built in another way.
    """
    # 1. Random weights.
    n_layers = len(target.layers)
    aux_layers = config.get("eagle_aux_hidden_state_layer_ids") or default_aux_layers(n_layers)
    draft = DraftModel(head_config(config), target.hidden_size, aux_layers)
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02, generator=generator)

    # 2. The draft vocabulary.
    if draft.reduced:
        draft.d2t.copy_(draft_ids - torch.arange(draft_ids.numel()))
        draft.t2d[draft_ids] = True

    # 3. The target's weights where they fit.
    with torch.no_grad():
        missed = copy_projections(draft, target) + copy_norms(draft, target)
        if not copy_weight(draft.lm_head.weight, target.output_head, draft_ids):
            missed.append("lm_head")
        h = draft.config.hidden_size
        if h == target.hidden_size:
            draft.fc.weight.zero_()
            draft.fc.weight[:, -h:] = torch.eye(h)
        else:
            missed.append("fc")
    return draft, missed


def copy_projections(draft: DraftModel, target: TargetModel) -> list[str]:
    """Copy the linear layers of the target's last layer; returns the names that do not fit."""
    state, h, missed = draft.state_dict(), draft.config.hidden_size, []
    for name in PROJECTIONS:
        own = state[f"midlayer.{name}.weight"]
        if name in WIDE_PROJECTIONS:
            own = own[:, h:]  # the first h columns read the embedding, unlike the target's layer
        if not copy_weight(own, submodule(target.layers[-1], name)):
            missed.append(f"midlayer.{name}")
    draft.load_state_dict(state)
    return missed


def copy_norms(draft: DraftModel, target: TargetModel) -> list[str]:
    """Copy the norms of the last layer and the final norm; returns the names that do not fit.

    A norm is not copied if the target computes something else with its weight.
    """
    layer, missed = target.layers[-1], []
    sources = {
        "midlayer.hidden_norm": submodule(layer, "input_layernorm"),
        "midlayer.post_attention_layernorm": submodule(layer, "post_attention_layernorm"),
        "norm": submodule(target.model.get_decoder(), "norm"),
    }
    probe = torch.linspace(-1, 1, draft.config.hidden_size)[None]
    for name, source in sources.items():
        own = draft.get_submodule(name)
        if copy_weight(own.weight, source):
            expected = source(probe.to(source.weight)).float().cpu()
            if torch.allclose(own(probe), expected, atol=0.05, rtol=0.05):
                continue
        own.weight.fill_(1)
        missed.append(name)
    return missed


def copy_weight(own: Tensor, source: nn.Module | None, rows: Tensor | slice = slice(None)) -> bool:
    """Copy rows of the weight of ``source`` into ``own``; False if there is none of this shape."""
    weight = getattr(source, "weight", None)
    if weight is None or weight[rows].shape != own.shape:
        return False
    own.copy_(weight[rows])
    return True


def submodule(module: nn.Module, name: str) -> nn.Module | None:
    """A submodule by its dotted name; None if the target is built in another way."""
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
    """Write a draft head in the official layout; an existing folder is replaced as a whole.

    Args:
        draft: the draft head.
        config: its ``config.json``.
        folder: where to write.
        dtype: of the weights in the file.
        embedding: the target's token embedding, if it is to be stored with the draft head. EAGLE
            reads it from the target's files, and finds it only if these are split into shards with
            an index.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    scratch.chmod(0o755)  # mkdtemp makes a folder that only its owner can read
    try:
        state = {
            name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).cpu().contiguous()
            for name, tensor in draft.state_dict().items()
        }
        if embedding is not None:
            state["embed_tokens.weight"] = embedding.weight.detach().to(dtype).cpu().contiguous()
            # EAGLE looks for the embedding in the head's file if the config has this entry.
            config = config | {"target_hidden_size": config["hidden_size"]}
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
            scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
