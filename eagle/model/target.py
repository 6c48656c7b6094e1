"""The target: a full-attention decoder of transformers, run over a tree of tokens."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eagle.model.cache import KVBuffer, TargetCache
from eagle.model.linear import PackedLinear

ATTENTIONS = ("sdpa", "eager")  # attention implementations that take a 4-D mask
# Entries of a config that change attention in a way that this code does not follow.
UNSUPPORTED = ("attn_logit_softcapping", "kv_lora_rank", "state_size", "alibi")
# These RoPE types change with the length of the block: a tree would not get a token's angles.
UNSUPPORTED_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class TargetOutput:
    """One forward over n tokens.

    Attributes:
        logits: ``[n or fewer, V]``, of the last tokens.
        features: ``[n, layers * h]`` hidden states of the auxiliary layers, side by side.
    """

    logits: Tensor
    features: Tensor


class TargetModel:
    """Runs a causal language model over blocks of tokens with a cache of this project.

    Args:
        model: a causal language model of transformers with full-attention layers only.

    Attributes:
        layers: decoder layers.
        embedding: token embedding.
        output_head: the layer that makes the logits.
        window: attention window of the config; None if attention sees everything.
        packed: whether linear layers are packed for this CPU (see ``eagle.model.linear``).

    Raises:
        ValueError: for a model of another kind, naming what is unsupported.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        check_supported(model, self.config)
        self.layers = model.get_decoder().layers
        self.devices = [execution_device(layer) for layer in self.layers]
        self.embedding = model.get_input_embeddings()
        self.output_head = model.get_output_embeddings()
        self.device = execution_device(self.embedding)
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.config.vocab_size
        self.window: int | None = getattr(self.config, "sliding_window", None)
        self.dtype: torch.dtype = model.dtype
        self.packed = any(isinstance(module, PackedLinear) for module in model.modules())
        # transformers 5.24 renames `past_key_values` to `cache` and warns about the old name.
        renamed = "cache" in inspect.signature(model.forward).parameters
        self.cache_keyword = "cache" if renamed else "past_key_values"

    def new_cache(
        self, capacity: int, new_buffer: Callable[..., KVBuffer] = KVBuffer
    ) -> TargetCache:
        """An empty cache for ``capacity`` positions; ``new_buffer`` as in ``TargetCache``."""
        config = self.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or self.hidden_size // config.num_attention_heads
        return TargetCache(self.devices, heads, head_dim, capacity, self.dtype, new_buffer)

    def prefill(self, input_ids: Tensor, cache: TargetCache, aux_layers: list[int]) -> TargetOutput:
        """Run a prompt on an empty cache and commit it.

        Args:
            input_ids: int64 ``[n]``.
            cache: an empty cache.
            aux_layers: layers whose entering hidden states are recorded.

        Returns:
            Features of all tokens, logits ``[1, V]`` of the last one.
        """
        positions = torch.arange(input_ids.numel(), device=self.device)
        output = self._forward(input_ids, positions, None, cache, aux_layers, 1)
        cache.advance(input_ids.numel())
        return output

    def tree_forward(
        self,
        tokens: Tensor,
        levels: Tensor,
        mask: Tensor,
        cache: TargetCache,
        aux_layers: list[int],
        logits_to_keep: int = 0,
    ) -> TargetOutput:
        """Run the nodes of a tree behind the committed tokens; nothing is committed.

        Args:
            tokens: int64 ``[N]``, the root first.
            levels: int64 ``[N]`` distance from the root. The root's position is the next one.
            mask: bool ``[N, N]``, which nodes each node sees.
            cache: holds the committed tokens.
            aux_layers: layers whose entering hidden states are recorded.
            logits_to_keep: compute the logits of so many of the last nodes only; 0 is all.
        """
        buffer, n = cache.first, tokens.numel()
        committed, bias = buffer.committed_mask(), None
        if n > 1 or committed is not None:  # a lone root sees everything
            shape, lowest = (1, 1, n, buffer.start + n), torch.finfo(self.dtype).min
            bias = torch.zeros(shape, dtype=self.dtype, device=self.device)
            bias[0, 0, :, buffer.start :].masked_fill_(~mask, lowest)
            if committed is not None:
                bias[0, 0, :, : buffer.start].masked_fill_(~committed, lowest)
        positions = buffer.position + levels
        return self._forward(tokens, positions, bias, cache, aux_layers, logits_to_keep)

    @torch.no_grad()
    def teach(self, input_ids: Tensor, aux_layers: list[int]) -> tuple[Tensor, Tensor]:
        """Run whole texts without a cache, for training.

        Args:
            input_ids: int64 ``[B, n]``, padded at the end if the texts differ in length.
            aux_layers: layers whose entering hidden states are recorded.

        Returns:
            Features ``[B, n, layers * h]``, and what the output head reads, ``[B, n, h]``.
        """
        with self._recording(aux_layers) as recorded:
            ids = input_ids.to(self.device)
            output = self.model.get_decoder()(input_ids=ids, use_cache=False)
        features = torch.cat([recorded[i].to(self.device) for i in aux_layers], -1)
        return features, output.last_hidden_state.to(self.device)

    def _forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        bias: Tensor | None,
        cache: TargetCache,
        aux_layers: list[int],
        logits_to_keep: int,
    ) -> TargetOutput:
        """Run tokens ``[n]`` at positions ``[n]`` under an additive mask ``[1, 1, n, keys]``."""
        with self._recording(aux_layers) as recorded:
            output = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                attention_mask=bias,
                use_cache=True,
                logits_to_keep=logits_to_keep,
                **{self.cache_keyword: cache},
            )
        features = output.logits.new_empty(0)
        if aux_layers:
            features = torch.cat([recorded[i][0].to(self.device) for i in aux_layers], -1)
        return TargetOutput(output.logits[0].to(self.device), features)

    @contextmanager
    def _recording(self, aux_layers: list[int]) -> Iterator[dict[int, Tensor]]:
        """Record the hidden states that enter some layers, by layer, in whatever runs inside."""
        recorded: dict[int, Tensor] = {}

        def recorder(index: int):
            def keep_input(module, args, kwargs):
                recorded[index] = args[0] if args else kwargs["hidden_states"]

            return keep_input

        # Hooks exist for this forward only: the model stays as its owner made it.
        handles = [
            self.layers[i].register_forward_pre_hook(recorder(i), with_kwargs=True)
            for i in aux_layers
        ]
        try:
            yield recorded
        finally:
            for handle in handles:
                handle.remove()


def check_supported(model: PreTrainedModel, config) -> None:
    """Check that a model's layers are all full attention that takes a tree mask.

    Raises:
        ValueError: naming the model and what is unsupported.
    """
    name = f"{type(model).__name__} (model type {config.model_type!r})"
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"unsupported: {name} is an encoder-decoder; a decoder-only model is needed"
        )
    if not hasattr(model.get_decoder(), "layers"):
        raise ValueError(f"unsupported: {name} keeps its decoder layers under an unknown name")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in UNSUPPORTED_ROPE:
        raise ValueError(
            f"unsupported: {name} uses RoPE of type {rope!r}, which depends on the length of the "
            "input"
        )
    if config._attn_implementation not in ATTENTIONS:
        raise ValueError(
            f"unsupported: {name} was loaded with "
            f"attn_implementation={config._attn_implementation!r}, which takes no tree mask; load "
            f"it with one of {', '.join(ATTENTIONS)}"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if kinds:
        raise ValueError(f"unsupported: {name} has layers of kind {', '.join(sorted(kinds))}")
    entries = [entry for entry in UNSUPPORTED if getattr(config, entry, None)]
    if entries:
        raise ValueError(f"unsupported: {name} sets {', '.join(entries)} in its config")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"unsupported: the forward of {name} does not take logits_to_keep")


def execution_device(module: nn.Module) -> torch.device:
    """Where a module computes: accelerate's hook knows it for offloaded modules."""
    hook = getattr(module, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    if device is None:
        # Packed weights are buffers.
        return next(chain(module.parameters(), module.buffers())).device
    return torch.device(f"cuda:{device}" if isinstance(device, int) else device)


def default_aux_layers(n_layers: int) -> list[int]:
    """EAGLE-3's auxiliary layers: those whose inputs are recorded, 2, n/2 and n-3.

    Raises:
        ValueError: if these are not three layers in rising order.
    """
    layers = [2, n_layers // 2, n_layers - 3]
    if not layers[0] < layers[1] < layers[2]:
        raise ValueError(
            f"a target of {n_layers} layers is too small for EAGLE-3's default feature layers (it "
            "takes 7); list the layers as eagle_aux_hidden_state_layer_ids in the head's config"
        )
    return layers
