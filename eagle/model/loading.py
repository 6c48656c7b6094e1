"""Loading the target and its tokenizer: dtypes by name, GGUF files, local folders and Hub ids."""

import os
import warnings
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from eagle.model.linear import cpu_multiplies_in_bf16

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPES |= {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DTYPE_HELP = "auto (as stored), bf16, fp16, fp32, or fast: bf16 where the hardware multiplies in it, else fp32"


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
        raise ValueError(
            f"dtype is {dtype!r}; choose one of auto, fast, {', '.join(DTYPES)} or a torch.dtype"
        )
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


def load_causal_lm(
    path: str, dtype: str | torch.dtype = "auto", device_map="auto", **kwargs
) -> PreTrainedModel:
    """Load a decoder from a Hub id, a folder, or a ``.gguf`` file, with the arguments of ``from_pretrained``."""
    path, gguf = split_gguf(path)
    kwargs |= gguf
    # The tree mask needs an attention that takes one; sdpa is the fastest that does.
    kwargs.setdefault("attn_implementation", "sdpa")
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=parse_dtype(dtype), device_map=device_map, **kwargs
    )
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    offloaded = places & {"cpu", "disk"}
    if "disk" in offloaded or offloaded and places - offloaded:
        warnings.warn(
            f"parts of {path} are offloaded to {', '.join(sorted(offloaded))}: expect slow decoding",
            stacklevel=2,
        )
    return model.eval()


def resolve_local(path: str) -> Path | None:
    """``path`` as a local path where it exists, else None (a Hub id)."""
    local = Path(path).expanduser()
    return local if local.exists() else None


def load_tokenizer(path: str, kwargs: dict) -> PreTrainedTokenizerBase | None:
    """The target's tokenizer; None, with a warning, for weights that come without one (ids in, ids out)."""
    path, gguf = split_gguf(path)
    kept = {
        k: kwargs[k]
        for k in ("revision", "token", "trust_remote_code", "subfolder", "gguf_file")
        if k in kwargs
    }
    try:
        return AutoTokenizer.from_pretrained(path, **kept, **gguf)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(
            f"no tokenizer in {path} ({reason}): the stop set lacks the chat template's end-of-turn token",
            stacklevel=3,
        )
        return None
