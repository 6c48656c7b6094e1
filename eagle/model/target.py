"""The target: any full-attention decoder of transformers, run with a tree mask and three tapped layers."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eagle.model.cache import KVBuffer, TargetCache
from eagle.model.linear import PackedLinear

ATTENTIONS = ("sdpa", "eager")  # those that take a 4-D mask


@dataclass(frozen=True)
class TargetOutput:
    """One forward of n tokens: logits ``[n or 1, V]`` and the tapped hidden states ``[n, aux_layers * h]``."""

    logits: Tensor
    features: Tensor


class TargetModel:
    """Runs a causal language model over blocks of tokens, with a cache that this class owns the shape of.

    Args:
        model: a causal language model of transformers whose decoder layers are all plain full attention.

    Raises:
        ValueError: for a model of another kind, naming what is unsupported.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        check_supported(model, self.config)
        self.layers = model.get_decoder().layers
        self.devices = [_execution_device(layer) for layer in self.layers]
        self.embedding = model.get_input_embeddings()
        self.output_head = model.get_output_embeddings()
        self.device = _execution_device(self.embedding)
        self.hidden_size = self.config.hidden_size
        self.vocab_size = self.config.vocab_size
        self.window = getattr(
            self.config, "sliding_window", None
        )  # None: attention over everything
        self.dtype = model.dtype
        self.packed = any(isinstance(module, PackedLinear) for module in model.modules())
        # transformers 5.24 renames `past_key_values` to `cache` and warns about the old name.
        self.cache_keyword = (
            "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        )

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
        """Run a prompt ``[n]`` from an empty cache and commit it; logits ``[1, V]`` of its last token only."""
        output = self._forward(
            input_ids,
            torch.arange(input_ids.numel(), device=self.device),
            None,
            cache,
            aux_layers,
            1,
        )
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
        """Run a tree's nodes behind the committed tokens; nothing is committed.

        Args:
            tokens: int64 ``[N]``, the root first.
            levels: int64 ``[N]`` distance from the root, which stands right behind the committed tokens.
            mask: bool ``[N, N]``, which nodes each node sees.
            logits_to_keep: compute the logits of so many of the last nodes; 0 is all.
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
        """Run whole texts ``[B, n]``, padded at the end where they differ in length, without a cache.

        Returns:
            Features ``[B, n, aux_layers * h]``, and what the output head reads, ``[B, n, h]``.
        """
        with self._recording(aux_layers) as recorded:
            output = self.model.get_decoder()(input_ids=input_ids.to(self.device), use_cache=False)
        features = torch.cat([recorded[i].to(self.device) for i in aux_layers], -1)
        return features, output.last_hidden_state.to(self.device)

    def _forward(self, tokens, positions, bias, cache, aux_layers, logits_to_keep) -> TargetOutput:
        with self._recording(aux_layers) as recorded:
            output = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                attention_mask=bias,
                use_cache=True,
                logits_to_keep=logits_to_keep,
                **{self.cache_keyword: cache},
            )
        features = (
            torch.cat([recorded[i][0].to(self.device) for i in aux_layers], -1)
            if aux_layers
            else output.logits.new_empty(0)
        )
        return TargetOutput(output.logits[0].to(self.device), features)

    @contextmanager
    def _recording(self, aux_layers: list[int]) -> Iterator[dict[int, Tensor]]:
        """The hidden states that enter some layers, by layer, in whatever is run inside."""
        recorded: dict[int, Tensor] = {}

        def tap(index):
            def keep_input(module, args, kwargs):
                recorded[index] = args[0] if args else kwargs["hidden_states"]

            return keep_input

        # Hooks live for this forward only: the model stays as its owner made it.
        handles = [
            self.layers[i].register_forward_pre_hook(tap(i), with_kwargs=True) for i in aux_layers
        ]
        try:
            yield recorded
        finally:
            for handle in handles:
                handle.remove()


def check_supported(model: PreTrainedModel, config) -> None:
    """Refuse, by name, models whose layers are not all plain full attention."""
    name = f"{type(model).__name__} (model type {config.model_type!r})"
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"unsupported: {name} is an encoder-decoder; a decoder-only model is needed"
        )
    if not hasattr(model.get_decoder(), "layers"):
        raise ValueError(f"unsupported: {name} keeps its decoder layers under an unknown name")
    # Such a RoPE changes with the length of the block, so that a tree's forward is not a token's forward.
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        raise ValueError(
            f"unsupported: {name} uses RoPE of type {rope!r}, which depends on the length of the input"
        )
    if config._attn_implementation not in ATTENTIONS:
        raise ValueError(
            f"unsupported: {name} was loaded with attn_implementation={config._attn_implementation!r}, which takes no tree mask; "
            f"load it with one of {', '.join(ATTENTIONS)}"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(
            f"unsupported: {name} has layers of kind {', '.join(sorted(kinds - {'full_attention'}))}"
        )
    stateful = [
        k
        for k in ("attn_logit_softcapping", "kv_lora_rank", "state_size", "alibi")
        if getattr(config, k, None)
    ]
    if stateful:
        raise ValueError(f"unsupported: {name} sets {', '.join(stateful)} in its config")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"unsupported: the forward of {name} does not take logits_to_keep")


def _execution_device(module: torch.nn.Module) -> torch.device:
    """Where a module computes: accelerate's hook knows it for offloaded modules, else its own weights."""
    hook = getattr(module, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    if device is None:
        return next(
            chain(module.parameters(), module.buffers())
        ).device  # packed weights are buffers
    return torch.device(f"cuda:{device}" if isinstance(device, int) else device)


def default_aux_layers(n_layers: int) -> list[int]:
    """EAGLE-3's feature layers, by the index of the layer that the hidden state enters: 2, n/2 and n-3.

    Raises:
        ValueError: where these are not three layers in rising order.
    """
    aux_layers = [2, n_layers // 2, n_layers - 3]
    if not aux_layers[0] < aux_layers[1] < aux_layers[2]:
        raise ValueError(
            f"a target of {n_layers} layers is too small for EAGLE-3's default feature layers (it takes 7); "
            "list the layers as eagle_aux_hidden_state_layer_ids in the head's config"
        )
    return aux_layers
