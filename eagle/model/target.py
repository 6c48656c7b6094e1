"""The target: any full-attention decoder of transformers, run with a tree mask and three tapped layers."""

import inspect
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from eagle.model.cache import TargetCache
from eagle.model.linear import PackedLinear, cpu_multiplies_in_bf16

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPES |= {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DTYPE_HELP = "auto (as stored), bf16, fp16, fp32, or fast: bf16 where the hardware multiplies in it, else fp32"
ATTENTIONS = ("sdpa", "eager")  # those that take a 4-D mask


@dataclass(frozen=True)
class TargetOutput:
    """One forward of n tokens: logits ``[n or 1, V]`` and the tapped hidden states ``[n, taps * h]``."""

    logits: Tensor
    features: Tensor


def parse_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """A dtype by name (see ``DTYPE_HELP``, and the long names) or as it is.

    Raises:
        ValueError: for an unknown name.
    """
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    if dtype == "fast":
        return torch.bfloat16 if multiplies_in_bf16() else torch.float32
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; choose one of auto, fast, {', '.join(DTYPES)} or a torch.dtype")
    return DTYPES[dtype]


def multiplies_in_bf16() -> bool:
    """Whether the GPU, or without one the CPU, has instructions for bfloat16; without them it is slower than float32."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return cpu_multiplies_in_bf16()


def split_gguf(path: str) -> tuple[str, dict[str, str]]:
    """A ``.gguf`` file as the folder and the keyword that ``from_pretrained`` wants; other paths as they are."""
    if not str(path).endswith(".gguf"):
        return path, {}
    folder, file = os.path.split(os.path.abspath(path))
    return folder, {"gguf_file": file}


def load_causal_lm(path: str, dtype: str | torch.dtype = "auto", device_map="auto", **kwargs) -> PreTrainedModel:
    """Load a decoder from a Hub id, a folder, or a ``.gguf`` file, with the arguments of ``from_pretrained``."""
    path, gguf = split_gguf(path)
    kwargs |= gguf
    # The tree mask needs an attention that takes one; sdpa is the fastest that does.
    kwargs.setdefault("attn_implementation", "sdpa")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=parse_dtype(dtype), device_map=device_map, **kwargs)
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    offloaded = places & {"cpu", "disk"}
    if "disk" in offloaded or offloaded and places - offloaded:
        warnings.warn(f"parts of {path} are offloaded to {', '.join(sorted(offloaded))}: expect slow decoding", stacklevel=2)
    return model.eval()


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
        self.window = getattr(self.config, "sliding_window", None)  # None: attention over everything
        self.dtype = model.dtype
        self.packed = any(isinstance(module, PackedLinear) for module in model.modules())
        # transformers 5.24 renames `past_key_values` to `cache` and warns about the old name.
        self.cache_keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def new_cache(self, capacity: int, step: int = 1) -> TargetCache:
        """An empty cache for ``capacity`` positions; ``step`` as in ``KVBuffer``."""
        heads = getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads
        head_dim = getattr(self.config, "head_dim", None) or self.hidden_size // self.config.num_attention_heads
        return TargetCache(self.devices, heads, head_dim, capacity, self.dtype, step)

    def prefill(self, input_ids: Tensor, cache: TargetCache, taps: list[int]) -> TargetOutput:
        """Run a prompt ``[n]`` from an empty cache and commit it; logits ``[1, V]`` of its last token only."""
        output = self._forward(input_ids, torch.arange(input_ids.numel(), device=self.device), None, cache, taps, 1)
        cache.advance(input_ids.numel())
        return output

    def tree_forward(
        self, tokens: Tensor, levels: Tensor, mask: Tensor, cache: TargetCache, taps: list[int], logits_to_keep: int = 0
    ) -> TargetOutput:
        """Run a tree's nodes behind the committed tokens; nothing is committed.

        Args:
            tokens: int64 ``[N]``, the root first.
            levels: int64 ``[N]`` distance from the root, which stands right behind the committed tokens.
            mask: bool ``[N, N]``, which nodes each node sees.
            logits_to_keep: compute the logits of so many of the last nodes; 0 is all.
        """
        bias, buffer = None, cache.first
        if tokens.numel() > 1 or buffer.step > 1:  # a lone root sees everything
            bias = torch.zeros(1, 1, tokens.numel(), buffer.start + tokens.numel(), dtype=self.dtype, device=self.device)
            lowest = torch.finfo(self.dtype).min
            bias[0, 0, :, buffer.start :].masked_fill_(~mask, lowest)
            if buffer.step > 1:
                bias[0, 0, :, : buffer.start].masked_fill_(~buffer.seen(), lowest)
        return self._forward(tokens, buffer.end + levels, bias, cache, taps, logits_to_keep)

    @torch.no_grad()
    def teach(self, input_ids: Tensor, taps: list[int]) -> tuple[Tensor, Tensor]:
        """Run whole texts ``[B, n]``, padded at the end where they differ in length, without a cache.

        Returns:
            Features ``[B, n, taps * h]``, and what the output head reads, ``[B, n, h]``.
        """
        with self._tapped(taps) as tapped:
            output = self.model.get_decoder()(input_ids=input_ids.to(self.device), use_cache=False)
        features = torch.cat([tapped[i].to(self.device) for i in taps], -1)
        return features, output.last_hidden_state.to(self.device)

    def _forward(self, tokens, positions, bias, cache, taps, logits_to_keep) -> TargetOutput:
        with self._tapped(taps) as tapped:
            output = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                attention_mask=bias,
                use_cache=True,
                logits_to_keep=logits_to_keep,
                **{self.cache_keyword: cache},
            )
        features = torch.cat([tapped[i][0].to(self.device) for i in taps], -1) if taps else output.logits.new_empty(0)
        return TargetOutput(output.logits[0].to(self.device), features)

    @contextmanager
    def _tapped(self, taps: list[int]) -> Iterator[dict[int, Tensor]]:
        """The hidden states that enter some layers, by layer, in whatever is run inside."""
        tapped: dict[int, Tensor] = {}

        def tap(index):
            def keep_input(module, args, kwargs):
                tapped[index] = args[0] if args else kwargs["hidden_states"]

            return keep_input

        # Hooks live for this forward only: the model stays as its owner made it.
        handles = [self.layers[i].register_forward_pre_hook(tap(i), with_kwargs=True) for i in taps]
        try:
            yield tapped
        finally:
            for handle in handles:
                handle.remove()


def check_supported(model: PreTrainedModel, config) -> None:
    """Refuse, by name, models whose layers are not all plain full attention."""
    name = f"{type(model).__name__} (model type {config.model_type!r})"
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"unsupported: {name} is an encoder-decoder; a decoder-only model is needed")
    if not hasattr(model.get_decoder(), "layers"):
        raise ValueError(f"unsupported: {name} keeps its decoder layers under an unknown name")
    # Such a RoPE changes with the length of the block, so that a tree's forward is not a token's forward.
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        raise ValueError(f"unsupported: {name} uses RoPE of type {rope!r}, which depends on the length of the input")
    if config._attn_implementation not in ATTENTIONS:
        raise ValueError(
            f"unsupported: {name} was loaded with attn_implementation={config._attn_implementation!r}, which takes no tree mask; "
            f"load it with one of {', '.join(ATTENTIONS)}"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(f"unsupported: {name} has layers of kind {', '.join(sorted(kinds - {'full_attention'}))}")
    stateful = [k for k in ("attn_logit_softcapping", "kv_lora_rank", "state_size", "alibi") if getattr(config, k, None)]
    if stateful:
        raise ValueError(f"unsupported: {name} sets {', '.join(stateful)} in its config")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"unsupported: the forward of {name} does not take logits_to_keep")


def _execution_device(module: torch.nn.Module) -> torch.device:
    """Where a module computes: accelerate's hook knows it for offloaded modules, else its own weights."""
    hook = getattr(module, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    if device is None:
        return next(chain(module.parameters(), module.buffers())).device  # packed weights are buffers
    return torch.device(f"cuda:{device}" if isinstance(device, int) else device)


def default_taps(n_layers: int) -> list[int]:
    """EAGLE-3's feature layers, by the index of the layer that the hidden state enters: 2, n/2 and n-3.

    Raises:
        ValueError: where these are not three layers in rising order.
    """
    taps = [2, n_layers // 2, n_layers - 3]
    if not taps[0] < taps[1] < taps[2]:
        raise ValueError(
            f"a target of {n_layers} layers is too small for EAGLE-3's default feature layers (it takes 7); "
            "list the layers as eagle_aux_hidden_state_layer_ids in the head's config"
        )
    return taps


def resolve_local(path: str) -> Path | None:
    """``path`` as a local path where it exists, else None (a Hub id)."""
    local = Path(path).expanduser()
    return local if local.exists() else None
