"""A copy of ``rheo`` whose source is changed: what the tests that break the code on purpose run."""

import sys
import types
from pathlib import Path

import rheo

RHEO_FILES = ("draws", "pool", "tree", "verification", "rational", "enumeration", "certify")


def load_rheo(patches: dict[str, list[tuple[str, str]]] | None = None) -> types.SimpleNamespace:
    """The names of ``rheo``'s modules, from a copy of their source with textual ``patches`` {file: [(old, new)]}."""
    package = f"patched_rheo_{len(sys.modules)}"
    sys.modules[package] = types.ModuleType(package)
    names = {}
    for name in RHEO_FILES:
        source = (Path(rheo.__file__).parent / f"{name}.py").read_text().replace("from rheo.", f"from {package}.")
        for old, new in (patches or {}).get(name, []):
            assert source.count(old) == 1, f"the patch of {name}.py does not apply once: {old!r}"
            source = source.replace(old, new)
        module = types.ModuleType(f"{package}.{name}")
        sys.modules[module.__name__] = module
        exec(compile(source, f"{name}.py (patched)", "exec"), module.__dict__)
        names.update({k: v for k, v in module.__dict__.items() if not k.startswith("__")})
    return types.SimpleNamespace(**names)
