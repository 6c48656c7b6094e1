"""The EAGLE-3 draft head: one decoder layer on the target's features (arXiv 2503.01840)."""

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

# Attention of queries [B, heads, n, head_dim] over the keys and values [2 B, kv_heads, n, head_dim]
# of the same rows, keys first, and over the rows that it remembers.
# Returns [B, heads, n, head_dim].
Attend = Callable[[Tensor, Tensor], Tensor]


class HeadNorm(nn.RMSNorm):
    """Llama's RMS norm as one operation."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x ``[..., h]``. Under autocast the weight is float32 and x is not."""
        return rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class DraftAttention(nn.Module):
    """Attention that reads the normed embedding beside the normed hidden state, 2h wide.

    The projections of query, key and value are one matrix in memory, so that a call multiplies
    once. In files they are three.

    Args:
        config: the head's config.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        h, bias = config.hidden_size, config.attention_bias
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads or self.heads
        self.head_dim = config.head_dim or h // self.heads
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.qkv_proj = nn.Linear(2 * h, q_size + 2 * kv_size, bias=bias)
        self.o_proj = ResidualLinear(q_size, h, bias=bias)
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        separate_in_files(self, "qkv_proj", parts)

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend, residual: Tensor
    ) -> Tensor:
        """Attend from x ``[B, n, 2h]`` and add the result to the residual stream ``[B, n, h]``.

        Args:
            x: normed embedding and normed hidden state, side by side.
            angles: rotary cosines and sines (see ``DraftModel.angles``).
            attend: which rows each row sees.
            residual: the residual stream.
        """
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), 1)
        cos, sin = angles
        turned = torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, -1), sin)
        q, k = turned.split((self.heads, self.kv_heads), 1)
        # NaN or infinity in one row would reach rows that do not see it (0 * NaN is NaN). Then a
        # sampled token could change the pools of unrelated nodes, which is not lossless. Inside
        # the row itself, and below it, such values only cost acceptance.
        kv = torch.nan_to_num(torch.cat((k, v)), 0.0, 0.0, 0.0)
        return self.o_proj(attend(q, kv).transpose(1, 2).flatten(2), residual)


class DraftMLP(nn.Module):
    """Llama's MLP. Gate and up projections are one matrix in memory, and two in files.

    Args:
        config: the head's config.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        h, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = nn.Linear(h, 2 * inner, bias=bias)
        self.down_proj = ResidualLinear(inner, h, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]
        separate_in_files(self, "gate_up_proj", {"gate_proj": inner, "up_proj": inner})

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """Apply the MLP to x ``[B, n, h]``, added to the residual stream ``[B, n, h]``."""
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(self.act_fn(gate) * up, residual)


def separate_in_files(module: nn.Module, joined: str, parts: dict[str, int]) -> None:
    """Save and load one joined linear layer as the several layers that files have.

    Args:
        module: owner of the layer.
        joined: name of the joined layer.
        parts: output features by name, in the order in which they are joined.
    """
    module.register_state_dict_post_hook(partial(split_joined, joined, parts))
    module.register_load_state_dict_pre_hook(partial(join_parts, joined, parts))


def split_joined(
    joined: str, parts: dict[str, int], _module, state: dict[str, Tensor], prefix: str, _metadata
) -> None:
    """Replace the joined layer in a state dict by its parts, each a tensor of its own."""
    for kind in ("weight", "bias"):
        whole = state.pop(f"{prefix}{joined}.{kind}", None)
        if whole is not None:
            for name, piece in zip(parts, whole.split(list(parts.values()))):
                state[f"{prefix}{name}.{kind}"] = piece.clone()


def join_parts(
    joined: str, parts: dict[str, int], _module, state: dict[str, Tensor], prefix: str, *_
) -> None:
    """Replace the parts in a state dict by the joined layer; if one is missing, by nothing."""
    for kind in ("weight", "bias"):
        found = [state.pop(f"{prefix}{name}.{kind}", None) for name in parts]
        pieces = [piece for piece in found if piece is not None]
        if len(pieces) == len(parts):
            state[f"{prefix}{joined}.{kind}"] = torch.cat(pieces)


class DraftLayer(nn.Module):
    """The head's decoder layer.

    The residual stream is the hidden state; the embedding enters through attention only.

    Args:
        config: the head's config.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config)
        self.input_layernorm = HeadNorm(h, eps=eps)
        self.hidden_norm = HeadNorm(h, eps=eps)
        self.post_attention_layernorm = HeadNorm(h, eps=eps)

    def forward(
        self, embeds: Tensor, hidden: Tensor, angles: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """Hidden states ``[B, n, h]`` from embeddings and hidden states ``[B, n, h]``."""
        x = torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), -1)
        hidden = self.self_attn(x, angles, attend, hidden)
        return self.mlp(self.post_attention_layernorm(hidden), hidden)


class DraftModel(nn.Module):
    """The EAGLE-3 draft head. Its parameter names are those of the official checkpoints.

    Args:
        config: the head's config.
        target_hidden: width of the target's hidden states.
        aux_layers: target layers whose entering hidden states are the features.
        own_embedding: whether the head has a token embedding of its own.
    """

    d2t: Tensor
    t2d: Tensor

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
        """Move and cast as every module does, but keep rotary angles in float32.

        In half precision the angles would be off by radians.
        """
        super()._apply(fn, recurse)
        self.rotary = LlamaRotaryEmbedding(self.config).to(self.device)
        return self

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.norm.weight.device

    @cached_property
    def fingerprint(self) -> str:
        """A name for the weights: 16 hexadecimal digits of the SHA-256 of ``fc``.

        Computed once, when it is first read.
        """
        weight = self.fc.state_dict()["weight"].cpu().float()
        return hashlib.sha256(weight.numpy().tobytes()).hexdigest()[:16]

    def target_ids(self) -> Tensor | None:
        """Target id of each draft id, int64 ``[draft_vocab]``; None if the vocabularies agree."""
        if not self.reduced:
            return None
        return torch.arange(self.d2t.numel(), device=self.d2t.device) + self.d2t

    def fuse(self, features: Tensor) -> Tensor:
        """Map the target's features ``[..., layers * h_target]`` to hidden states ``[..., h]``."""
        return self.fc(features)

    def angles(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary cosines and sines of some positions, computed in float32.

        The first half of the sines is negative: a row x turns by
        ``x * cos + roll(x, head_dim / 2) * sin``.

        Args:
            positions: ``[n]``.
            like: a tensor of the dtype and device of the result.

        Returns:
            Two tensors ``[1, n, head_dim]``.
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
        """Run the decoder layer.

        Args:
            tokens: int64 ``[B, n]``.
            hidden: ``[B, n, h]`` hidden states that the tokens join.
            angles: of the rows' positions, ``[1, n, head_dim]``, or ``[1, 1, head_dim]`` if all
                rows share one position.
            attend: which rows each row sees, and where they are remembered.
            embedding: the target's token embedding, used if the head has none.

        Returns:
            ``[B, n, h]`` hidden states, before ``norm``.
        """
        embed = embedding if self.embed_tokens is None else self.embed_tokens
        embeds = embed(tokens).to(hidden.device, hidden.dtype)
        return self.midlayer(embeds, hidden, angles, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """Draft logits ``[..., draft_vocab]`` of hidden states ``[..., h]``."""
        return self.lm_head(self.norm(hidden))


def causal(q: Tensor, kv: Tensor) -> Tensor:
    """Causal attention over whole texts that remembers nothing (see ``Attend``)."""
    k, v = kv.chunk(2)
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
