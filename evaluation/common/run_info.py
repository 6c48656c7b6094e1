"""What a run was made with: device, dtype, and the source code's git revision."""

import platform
import subprocess
from pathlib import Path

import torch


def device_name(device: torch.device) -> str:
    """The GPU's name, or ``cpu`` with the processor's architecture."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()})"


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype without the module's name, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def git_revision() -> str | None:
    """The git commit of this checkout, with ``+`` if files are changed; None outside a checkout."""
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "-uno")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
