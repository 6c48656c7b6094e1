"""The EAGLE-3 head: one decoder layer that predicts from the target's features (official checkpoint layout)."""

import hashlib
import json
import warnings
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle.model.cache import KVBuffer, round_up
from eagle.model.linear import ResidualLinear
from eagle.model.target import default_taps, resolve_local

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")

# Attention over queries [B, heads, n, head_dim] and the keys and values [2 B, kv_heads, n, head_dim] of the same rows, keys first, and
# whatever rows it remembers; returns [B, heads, n, head_dim].
Attend = Callable[[Tensor, Tensor], Tensor]


class HeadNorm(nn.RMSNorm):
    """Llama's norm in one operation; under autocast its weight is in float32 and what it norms is not."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class DraftAttention(nn.Module):
    """Attention whose query, key and value read the normed embedding beside the normed hidden state (2h wide).

    The three projections are one matrix in memory, so that a draft call multiplies once; in files they are three.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.head_dim, self.heads, self.kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        bias = config.attention_bias
        self.qkv_proj = nn.Linear(2 * config.hidden_size, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=bias)
        self.o_proj = ResidualLinear(self.heads * self.head_dim, config.hidden_size, bias=bias)
        kv_size = self.kv_heads * self.head_dim
        apart_in_files(self, "qkv_proj", {"q_proj": self.heads * self.head_dim, "k_proj": kv_size, "v_proj": kv_size})

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend, residual: Tensor) -> Tensor:
        """``[B, n, h]`` of x ``[B, n, 2h]``, added to the residual stream ``[B, n, h]``."""
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), 1)
        cos, sin = angles
        q, k = torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, -1), sin).split((self.heads, self.kv_heads), 1)
        # A NaN or an infinity in one row would reach rows that do not see it (0 * NaN), so that a drawn token could
        # change the pools of its cousins. The row itself, and those drafted below it, may be as wrong as they like.
        kv = torch.nan_to_num(torch.cat((k, v)), 0.0, 0.0, 0.0)
        return self.o_proj(attend(q, kv).transpose(1, 2).flatten(2), residual)


class DraftMLP(nn.Module):
    """Llama's MLP; its gate and up projections are one matrix in memory and two in files."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        inner, bias = config.intermediate_size, config.mlp_bias
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * inner, bias=bias)
        self.down_proj = ResidualLinear(inner, config.hidden_size, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]
        apart_in_files(self, "gate_up_proj", {"gate_proj": inner, "up_proj": inner})

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """``[B, n, h]`` of x ``[B, n, h]``, added to the residual stream ``[B, n, h]``."""
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(self.act_fn(gate) * up, residual)


def apart_in_files(module: nn.Module, joined: str, parts: dict[str, int]) -> None:
    """Linear layers that multiply as one, ``joined``, go into state dicts and come from them as the several that files have.

    Args:
        parts: output features by name, in the order in which they are joined.
    """
    module.register_state_dict_post_hook(partial(split_joined, joined, parts))
    module.register_load_state_dict_pre_hook(partial(join_parts, joined, parts))


def split_joined(joined: str, parts: dict[str, int], _module, state: dict[str, Tensor], prefix: str, _metadata) -> None:
    """Put the parts into a state dict, each a tensor of its own."""
    for kind in ("weight", "bias"):
        whole = state.pop(f"{prefix}{joined}.{kind}", None)
        if whole is not None:
            pieces = whole.split(list(parts.values()))
            state.update({f"{prefix}{name}.{kind}": piece.clone() for name, piece in zip(parts, pieces)})


def join_parts(joined: str, parts: dict[str, int], _module, state: dict[str, Tensor], prefix: str, *_) -> None:
    """Join a file's parts into the one matrix."""
    for kind in ("weight", "bias"):
        found = [state.pop(f"{prefix}{name}.{kind}", None) for name in parts]
        if None not in found:
            state[f"{prefix}{joined}.{kind}"] = torch.cat(found)


class DraftLayer(nn.Module):
    """The head's decoder layer; the residual stream is the hidden state, the embedding enters through attention."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config)
        self.input_layernorm = HeadNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = HeadNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = HeadNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, embeds: Tensor, hidden: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x = torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), -1)
        hidden = self.self_attn(x, angles, attend, hidden)
        return self.mlp(self.post_attention_layernorm(hidden), hidden)


class DraftModel(nn.Module):
    """The EAGLE-3 draft network.

    Args:
        config: the head's config.
        target_hidden: width of the target's hidden states.
        taps: target layers whose entering hidden states are the features.
        own_embedding: whether the head brings its own token embedding.
    """

    def __init__(self, config: LlamaConfig, target_hidden: int, taps: list[int], own_embedding: bool = False):
        super().__init__()
        self.config, self.taps = config, taps
        h, draft_vocab = config.hidden_size, config.draft_vocab_size
        self.fc = nn.Linear(len(taps) * target_hidden, h, bias=False)
        self.midlayer = DraftLayer(config)
        self.norm = HeadNorm(h, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(h, draft_vocab, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, h) if own_embedding else None
        self.reduced = draft_vocab != config.vocab_size
        if self.reduced:
            self.register_buffer("d2t", torch.zeros(draft_vocab, dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    def _apply(self, fn, recurse=True):
        """Moves and casts as every module does, but rotary angles stay float32: half precision turns them by radians."""
        super()._apply(fn, recurse)
        self.rotary = LlamaRotaryEmbedding(self.config).to(self.device)
        return self

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.norm.weight.device

    @cached_property
    def fingerprint(self) -> str:
        """Tells heads apart: 16 hexadecimal digits of the SHA-256 of ``fc``, as it is when first asked for."""
        return hashlib.sha256(self.fc.state_dict()["weight"].cpu().float().numpy().tobytes()).hexdigest()[:16]

    def target_ids(self) -> Tensor | None:
        """int64 ``[draft_vocab]`` target id of each draft id; None where the vocabularies agree."""
        return torch.arange(self.d2t.numel(), device=self.d2t.device) + self.d2t if self.reduced else None

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features ``[..., taps * h_target]`` as a hidden state ``[..., h]``."""
        return self.fc(features)

    def angles(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary cosines and sines ``[1, n, head_dim]`` of positions ``[n]``, computed in float32, in the dtype of ``like``.

        The first half of the sines is negative: a row turns by ``x * cos + roll(x, head_dim / 2) * sin``.
        """
        cos, sin = self.rotary(like, positions[None])
        sin[..., : sin.shape[-1] // 2].neg_()
        return cos, sin

    def forward(
        self, tokens: Tensor, hidden: Tensor, angles: tuple[Tensor, Tensor], attend: Attend, embedding: nn.Module
    ) -> Tensor:
        """Hidden states ``[B, n, h]`` (before ``norm``) after ``tokens`` ``[B, n]`` joined to ``hidden`` ``[B, n, h]``.

        Args:
            angles: of the rows' rotary positions (see ``angles``), ``[1, n, head_dim]``, or ``[1, 1, head_dim]`` for one that all share.
            attend: which rows each row sees, and where they are remembered.
            embedding: the target's token embedding, used where the head has none.
        """
        embed = embedding if self.embed_tokens is None else self.embed_tokens
        embeds = embed(tokens).to(hidden.device, hidden.dtype)
        return self.midlayer(embeds, hidden, angles, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """Draft logits ``[..., draft_vocab]`` of hidden states ``[..., h]``."""
        return self.lm_head(self.norm(hidden))


class DraftState:
    """The head's memory in one request: committed positions, and behind them the rows of the tree being grown.

    Committed position t holds (token t+1, the target's true features of t); nothing approximate stays
    after a cycle. Rows of the tree overwrite each other from cycle to cycle.

    Args:
        embedding: the target's token embedding.
        capacity: positions, the tree's rows included.
        step: see ``KVBuffer``.
        depth: the most expansions of a tree; needed where ``step`` is above 1.
    """

    def __init__(self, model: DraftModel, embedding: nn.Module, capacity: int, step: int = 1, depth: int = 0):
        self.model, self.embedding, self.depth = model, embedding, depth
        heads, head_dim = model.config.num_key_value_heads, model.config.head_dim
        self.buffer = KVBuffer(1, heads, head_dim, capacity, model.dtype, model.device, step)
        self.angles = torch.stack(model.angles(self.buffer.rows, model.norm.weight))
        self.tree_angles = None  # [2, 1, levels or more, head_dim] of the tree's levels
        self.itself = torch.eye(0, dtype=torch.bool, device=model.device)  # rows of one level see themselves alone
        self.last = None  # [1, h] of the last committed position
        self.hidden = None  # [F, h] of the newest rows: the last committed position, then the newest tree level
        self.seen = None  # bool [F, keys]: which committed positions and tree rows each of the newest rows sees

    def commit(self, tokens: Tensor, features: Tensor, count: Tensor | None = None) -> Tensor:
        """Add committed positions; returns the draft logits ``[draft_vocab]`` after the last of them.

        Args:
            tokens: int64 ``[n]``, one position ahead of the features: position t gets token t+1.
            features: ``[n, taps * h_target]`` from the target.
            count: where given (int64 ``[]``), only so many of the first are meant (see ``KVBuffer.keep``).
        """
        buffer, n = self.buffer, tokens.numel()
        features = self.model.fuse(features.to(self.model.dtype))
        if count is None:
            start, end = buffer.length, buffer.length + n
            rows, mask = slice(start, end), buffer.rows[:end] <= buffer.rows[start:end, None] if start else None
        else:
            rows, end = buffer.count + buffer.rows[:n], buffer.start + round_up(n, buffer.step)
            mask = buffer.rows[:end] <= rows[:, None]
        hidden = self._forward(tokens, features, self.angles[:, :, rows], mask, rows, end)
        if count is None:
            self.last = hidden[-1:]
            buffer.advance(n)
        else:
            self.last = hidden.index_select(0, count.reshape(1) - 1)
            buffer.count += count
        self.forget_tree()
        return self.model.logits(self.last)[0]

    def forget_tree(self) -> None:
        """Back to the committed positions: another tree can be grown from them."""
        self.hidden, self.seen = self.last, None

    def expand(self, tokens: Tensor, parent_ranks: Tensor, level: int) -> Tensor:
        """Draft logits ``[F, draft_vocab]`` after tree nodes (see ``rheo.tree.Expand``)."""
        buffer, n = self.buffer, tokens.numel()
        if self.seen is None:
            self.seen = buffer.seen()[None]
            end = buffer.end
            self.tree_angles = self.angles[:, :, end:] if isinstance(end, int) else self.angles[:, :, end + buffer.rows[: self.depth]]
        if self.itself.shape[0] < n:
            self.itself = torch.eye(n, dtype=torch.bool, device=tokens.device)
        first = self.seen.shape[1]
        self.seen = torch.cat((self.seen.index_select(0, parent_ranks), self.itself[:n, :n]), 1)
        angles, rows = self.tree_angles[:, :, level - 1 : level], slice(first, first + n)
        self.hidden = self._forward(tokens, self.hidden.index_select(0, parent_ranks), angles, self.seen, rows, first + n)
        return self.model.logits(self.hidden)

    def _forward(
        self, tokens: Tensor, hidden: Tensor, angles: Tensor, mask: Tensor | None, rows: slice | Tensor, end: int
    ) -> Tensor:
        """Run n tokens at the positions of ``angles`` ``[2, 1, n or 1, head_dim]``, and keep them at some ``rows`` of the buffer, of which
        they may see those below ``end``.
        """

        def attend(q, kv):
            k, v = self.buffer.write(0, kv, rows, end)
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)

        return self.model(tokens[None], hidden[None], angles.unbind(), attend, self.embedding)[0]


def causal(q: Tensor, kv: Tensor) -> Tensor:
    """Attention over whole texts, nothing remembered (see ``Attend``)."""
    return scaled_dot_product_attention(q, *kv.chunk(2), is_causal=True, enable_gqa=True)


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
        raise ValueError(f"the head in {path} is for a vocabulary of {config.vocab_size}, the target has {target_vocab}")
    taps = feature_layers(raw, n_layers)
    own_embedding = "embed_tokens.weight" in weights
    if not own_embedding and config.hidden_size != target_hidden:
        raise ValueError(
            f"the head in {path} has no embed_tokens.weight, and the target's embedding is {target_hidden} wide "
            f"where the head needs {config.hidden_size}"
        )
    with torch.device("meta"):
        model = DraftModel(config, target_hidden, taps, own_embedding)
    if not model.reduced:
        # With equal vocabularies the mapping is the identity; some heads store it all the same.
        if weights.pop("d2t", torch.zeros(1)).any():
            raise ValueError(f"the head in {path} maps ids by d2t although its vocabulary is the target's")
        weights.pop("t2d", None)
    check_keys(model, weights, path)
    if model.reduced:
        check_mapping(weights["d2t"], weights["t2d"], target_vocab, path)
    model.load_state_dict(weights, strict=True, assign=True)
    model.rotary = LlamaRotaryEmbedding(config)  # its buffers are computed, not loaded
    return model.eval()


def head_folder(path: str) -> Path:
    """The local folder of a head, downloaded where ``path`` is a Hub id."""
    return resolve_local(path) or Path(snapshot_download(path, allow_patterns=["config.json", *WEIGHT_FILES]))


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
    raise FileNotFoundError(f"{folder} holds neither {' nor '.join(WEIGHT_FILES)}: it is not an EAGLE-3 head")


def head_config(raw: dict) -> LlamaConfig:
    """The head's config as a ``LlamaConfig``; rope_theta may be absent, top-level or nested."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope["rope_theta"] = float(raw.get("rope_theta") or rope.get("rope_theta") or 10000.0)
    names = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
        "vocab_size", "max_position_embeddings", "hidden_act", "attention_bias", "mlp_bias",
    )
    kept = {name: raw[name] for name in names if raw.get(name) is not None}
    return LlamaConfig(
        **kept, num_hidden_layers=1, rope_parameters=rope, draft_vocab_size=raw.get("draft_vocab_size") or raw["vocab_size"]
    )


def feature_layers(raw: dict, n_layers: int) -> list[int]:
    """The target layers to tap: listed in the head's config, else EAGLE-3's own."""
    listed = raw.get("eagle_aux_hidden_state_layer_ids") or (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if not listed:
        return default_taps(n_layers)
    wrong = [i for i in listed if not 0 <= i < n_layers]
    if wrong or len(set(listed)) != len(listed):
        raise ValueError(f"the head's config lists feature layers {listed}; the target has layers 0..{n_layers - 1}, each once")
    if list(listed) == [1, n_layers // 2 - 1, n_layers - 4]:
        warnings.warn(
            f"the head's config lists feature layers {listed}; they are read as the layers whose input is tapped. If the head "
            f"means their output, list {default_taps(n_layers)} instead",
            stacklevel=2,
        )
    return list(listed)


def check_keys(model: DraftModel, weights: dict[str, Tensor], path: str) -> None:
    """Raise a ValueError that lists missing, unexpected and misshapen weights."""
    wanted = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    missing, unexpected = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
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
    for label, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape", misshapen)):
        if names:
            problem += f"\n  {label}: {', '.join(names)}"
    raise ValueError(problem)


def check_mapping(d2t: Tensor, t2d: Tensor, vocab: int, path: str) -> None:
    """Raise a ValueError unless d2t (offsets) maps draft ids to distinct target ids, those that t2d marks."""
    ids = torch.arange(d2t.numel()) + d2t
    outside = ids[(ids < 0) | (ids >= vocab)]
    if not d2t.any():
        raise ValueError(f"d2t of the head in {path} is all zeros: the mapping of its reduced vocabulary was not saved")
    if outside.numel():
        raise ValueError(f"d2t of the head in {path} points outside the vocabulary 0..{vocab - 1}: {outside[:5].tolist()}")
    values, counts = ids.unique(return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"d2t of the head in {path} maps several draft ids to the target ids {values[counts > 1][:5].tolist()}")
    if not torch.equal(values, t2d.nonzero()[:, 0]):
        raise ValueError(f"t2d of the head in {path} does not mark the target ids that d2t maps to")
