"""The EAGLE-3 head: one decoder layer that predicts from the target's features (official checkpoint layout)."""

import hashlib
from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle.model.linear import ResidualLinear

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
        self.head_dim, self.heads, self.kv_heads = (
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
        )
        bias = config.attention_bias
        self.qkv_proj = nn.Linear(
            2 * config.hidden_size, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=bias
        )
        self.o_proj = ResidualLinear(self.heads * self.head_dim, config.hidden_size, bias=bias)
        kv_size = self.kv_heads * self.head_dim
        apart_in_files(
            self,
            "qkv_proj",
            {"q_proj": self.heads * self.head_dim, "k_proj": kv_size, "v_proj": kv_size},
        )

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend, residual: Tensor
    ) -> Tensor:
        """``[B, n, h]`` of x ``[B, n, 2h]``, added to the residual stream ``[B, n, h]``."""
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), 1)
        cos, sin = angles
        q, k = torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, -1), sin).split(
            (self.heads, self.kv_heads), 1
        )
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


def split_joined(
    joined: str, parts: dict[str, int], _module, state: dict[str, Tensor], prefix: str, _metadata
) -> None:
    """Put the parts into a state dict, each a tensor of its own."""
    for kind in ("weight", "bias"):
        whole = state.pop(f"{prefix}{joined}.{kind}", None)
        if whole is not None:
            pieces = whole.split(list(parts.values()))
            state.update(
                {f"{prefix}{name}.{kind}": piece.clone() for name, piece in zip(parts, pieces)}
            )


def join_parts(
    joined: str, parts: dict[str, int], _module, state: dict[str, Tensor], prefix: str, *_
) -> None:
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

    def forward(
        self, embeds: Tensor, hidden: Tensor, angles: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        x = torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), -1)
        hidden = self.self_attn(x, angles, attend, hidden)
        return self.mlp(self.post_attention_layernorm(hidden), hidden)


class DraftModel(nn.Module):
    """The EAGLE-3 draft network.

    Args:
        config: the head's config.
        target_hidden: width of the target's hidden states.
        aux_layers: target layers whose entering hidden states are the features.
        own_embedding: whether the head brings its own token embedding.
    """

    def __init__(
        self,
        config: LlamaConfig,
        target_hidden: int,
        aux_layers: list[int],
        own_embedding: bool = False,
    ):
        super().__init__()
        self.config, self.aux_layers = config, aux_layers
        h, draft_vocab = config.hidden_size, config.draft_vocab_size
        self.fc = nn.Linear(len(aux_layers) * target_hidden, h, bias=False)
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
        return hashlib.sha256(
            self.fc.state_dict()["weight"].cpu().float().numpy().tobytes()
        ).hexdigest()[:16]

    def target_ids(self) -> Tensor | None:
        """int64 ``[draft_vocab]`` target id of each draft id; None where the vocabularies agree."""
        return (
            torch.arange(self.d2t.numel(), device=self.d2t.device) + self.d2t
            if self.reduced
            else None
        )

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features ``[..., aux_layers * h_target]`` as a hidden state ``[..., h]``."""
        return self.fc(features)

    def angles(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary cosines and sines ``[1, n, head_dim]`` of positions ``[n]``, computed in float32, in the dtype of ``like``.

        The first half of the sines is negative: a row turns by ``x * cos + roll(x, head_dim / 2) * sin``.
        """
        cos, sin = self.rotary(like, positions[None])
        sin[..., : sin.shape[-1] // 2].neg_()
        return cos, sin

    def forward(
        self,
        tokens: Tensor,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        attend: Attend,
        embedding: nn.Module,
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


def causal(q: Tensor, kv: Tensor) -> Tensor:
    """Attention over whole texts, nothing remembered (see ``Attend``)."""
    return scaled_dot_product_attention(q, *kv.chunk(2), is_causal=True, enable_gqa=True)
