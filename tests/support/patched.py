"""A copy of ``rheo`` with changed source, for tests that break the code on purpose."""

import sys
import types
from pathlib import Path

import rheo

# In an order in which each module imports only earlier ones.
MODULES = (
    "draws",
    "scores",
    "pool",
    "tree",
    "verification",
    "certify.distributions",
    "certify.rational",
    "certify.enumeration",
    "certify.settings",
    "certify.certificates",
    "certify.report",
    "certify.__main__",
)


def load_rheo(patches: dict[str, list[tuple[str, str]]] | None = None) -> types.SimpleNamespace:
    """Load a copy of ``rheo`` from its source, with some of the source changed.

    Args:
        patches: textual replacements [(old, new)] by the last part of a module's name.

    Returns:
        The names of all modules in one namespace.
    """
    package = f"patched_rheo_{len(sys.modules)}"
    for name in (package, f"{package}.certify"):
        sys.modules[name] = types.ModuleType(name)
    names = {}
    for name in MODULES:
        file = Path(rheo.__file__).parent.joinpath(*name.split(".")).with_suffix(".py")
        source = file.read_text().replace("from rheo.", f"from {package}.")
        for old, new in (patches or {}).get(name.rpartition(".")[2], []):
            assert source.count(old) == 1, f"the patch of {name} must apply once: {old!r}"
            source = source.replace(old, new)
        module = types.ModuleType(f"{package}.{name}")
        sys.modules[module.__name__] = module
        exec(compile(source, f"{name} (patched)", "exec"), module.__dict__)
        names.update({k: v for k, v in module.__dict__.items() if not k.startswith("__")})
    return types.SimpleNamespace(**names)
