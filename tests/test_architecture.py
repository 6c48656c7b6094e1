"""The direction of imports: evaluation -> eagle -> rheo, and the method knows nothing else."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A package, and the packages of this project that it may not import.
FORBIDDEN = {"rheo": {"eagle", "evaluation"}, "eagle": {"evaluation"}}
METHOD = ("draws", "scores", "pool", "tree", "verification")  # in the order of reading


def imports(file):
    """(line, first part of the name, whole name) of every import of a file."""
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [node.args[0].value] if isinstance(node.args[0], ast.Constant) else []
        for name in names:
            yield node.lineno, name.partition(".")[0], name


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_run_one_way(package):
    files = sorted((ROOT / package).rglob("*.py"))
    wrong = [
        f"{file.relative_to(ROOT)}, line {line}: {name}"
        for file in files
        for line, first, name in imports(file)
        if first in FORBIDDEN[package] and file != ROOT / "rheo/integrations/eagle.py"
    ]
    assert files and not wrong


def test_the_integration_imports_only_the_checkout_of_eagle():
    """``rheo.integrations.eagle`` loads EAGLE's own package ``eagle`` from a checkout."""
    found = {
        name for _, first, name in imports(ROOT / "rheo/integrations/eagle.py") if first == "eagle"
    }
    assert found == {"eagle.model.ea_model"}


@pytest.mark.parametrize("module", METHOD)
def test_the_method_imports_only_torch_and_what_is_read_before_it(module):
    before = {f"rheo.{name}" for name in METHOD[: METHOD.index(module)]}
    standard = {"argparse", "collections", "dataclasses", "functools", "torch"}
    wrong = [
        name
        for _, first, name in imports(ROOT / f"rheo/{module}.py")
        if first not in standard and name not in before
    ]
    assert not wrong
