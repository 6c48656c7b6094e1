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

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
DTYPE_HELP = (
    "auto (as stored), bf16, fp16, fp32, or fast: bf16 if the hardware has instructions for it, "
    "else fp32"
)
# Arguments of the target's from_pretrained that its tokenizer takes, too.
TOKENIZER_ARGUMENTS = ("revision", "token", "trust_remote_code", "subfolder", "gguf_file")


def parse_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """The dtype that a name stands for.

    Args:
        dtype: a name (see ``DTYPE_HELP``; the long names of ``DTYPES`` work, too) or a dtype.

    Returns:
        A dtype, or "auto".

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
    """Whether the GPU, or without a GPU the CPU, has instructions for bfloat16.

    Without them bfloat16 is slower than float32.
    """
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return cpu_multiplies_in_bf16()


def split_gguf(path: str) -> tuple[str, dict[str, str]]:
    """A path as ``from_pretrained`` takes it.

    Returns:
        For a ``.gguf`` file its folder and the keyword argument that names the file; for any other
        path the path itself and no keyword argument.
    """
    if not str(path).endswith(".gguf"):
        return path, {}
    folder, file = os.path.split(os.path.abspath(path))
    return folder, {"gguf_file": file}


def load_causal_lm(
    path: str, dtype: str | torch.dtype = "auto", device_map="auto", **kwargs
) -> PreTrainedModel:
    """Load a decoder in evaluation mode; warns if parts of it are offloaded.

    Args:
        path: Hub id, folder or ``.gguf`` file.
        dtype: as in ``parse_dtype``.
        device_map: as in transformers.
        kwargs: for ``from_pretrained``.
    """
    path, gguf = split_gguf(path)
    kwargs |= gguf
    # A tree needs an attention that takes a mask; sdpa is the fastest one that does.
    kwargs.setdefault("attn_implementation", "sdpa")
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=parse_dtype(dtype), device_map=device_map, **kwargs
    )
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    offloaded = devices & {"cpu", "disk"}
    if "disk" in offloaded or (offloaded and devices - offloaded):
        names = ", ".join(sorted(offloaded))
        warnings.warn(
            f"parts of {path} are offloaded to {names}: expect slow decoding", stacklevel=2
        )
    return model.eval()


def resolve_local(path: str) -> Path | None:
    """``path`` as a local path if it exists; None if it does not (then it is a Hub id)."""
    local = Path(path).expanduser()
    return local if local.exists() else None


def load_tokenizer(path: str, kwargs: dict) -> PreTrainedTokenizerBase | None:
    """Load the target's tokenizer.

    Args:
        path: Hub id, folder or ``.gguf`` file of the target.
        kwargs: arguments of the target's ``from_pretrained``; those that concern the tokenizer
            are used.

    Returns:
        The tokenizer; None, with a warning, if there is none. Without it the target still decodes
        from token ids to token ids.
    """
    path, gguf = split_gguf(path)
    kept = {name: kwargs[name] for name in TOKENIZER_ARGUMENTS if name in kwargs}
    try:
        return AutoTokenizer.from_pretrained(path, **kept, **gguf)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(
            f"no tokenizer in {path} ({reason}): the chat template's end-of-turn token is not "
            "among the stop tokens",
            stacklevel=3,
        )
        return None
