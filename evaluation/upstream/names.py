"""Compare the names of EAGLE's interface with those of this project."""

import ast
import inspect
from pathlib import Path

from eagle.model.ea_model import EaModel
from evaluation.common.markdown import table
from evaluation.gen_ea_answer import build_parser

# Why a name of EAGLE is not here.
NOT_HERE = {
    "forward": "EAGLE's inner step of the target; here TargetModel.tree_forward",
    "--load-in-8bit": "pass quantization_config to EaModel.from_pretrained",
    "--num-gpus-per-model": "device_map places layers; accelerate launch makes processes",
    "--num-gpus-total": "accelerate launch makes processes",
    "--max-gpu-memory": "device_map and max_memory go to the target's from_pretrained",
    "--tree-choices": "EAGLE-1's static trees",
    "--use_eagle3": "always on, accepted as --use-eagle3",
}


def names_table(eagle: Path) -> str:
    """A Markdown table of methods and flags: the same, added, or missing with the reason.

    Args:
        eagle: the checkout of EAGLE.
    """
    rows = [*method_rows(eagle / "eagle/model/ea_model.py")]
    rows += flag_rows(eagle / "eagle/evaluation/gen_ea_answer_llama3chat.py")
    return table(("EAGLE", "here", "notes"), rows)


def method_rows(file: Path) -> list[tuple[str, str, str]]:
    """Rows of the public methods of ``EaModel``.

    Args:
        file: where EAGLE defines it.
    """
    ours = {
        name: list(inspect.signature(function).parameters)[1:]
        for name, function in inspect.getmembers(EaModel, callable)
        if not name.startswith("_")
    }
    ours["from_pretrained"] = list(inspect.signature(EaModel.from_pretrained).parameters)
    rows = []
    for name, theirs in sorted(methods_of(file, "EaModel").items()):
        if name not in ours:
            rows.append((f"`{name}`", "missing", NOT_HERE.get(name, "")))
            continue
        missing = [] if "kwargs" in ours[name] else without(theirs, ours[name])
        added = without(ours[name], [*theirs, "kwargs", "args"])
        changes = {"missing": missing, "added": added}
        notes = [f"{change} {', '.join(names)}" for change, names in changes.items() if names]
        rows.append((f"`{name}`", "same name", "; ".join(notes)))
    return rows


def flag_rows(file: Path) -> list[tuple[str, str, str]]:
    """Rows of the command-line flags.

    Args:
        file: EAGLE's program; it may be missing.
    """
    theirs = flags_of(file) if file.exists() else set()
    actions = build_parser(True)._actions
    ours = {name for action in actions for name in action.option_strings if name[:2] == "--"}
    rows = []
    for flag in sorted(theirs | ours):
        where = "missing" if flag not in ours else "same" if flag in theirs else "added"
        here = "missing" if where == "missing" else f"`{flag}`"
        rows.append((f"`{flag}`" if flag in theirs else "", here, NOT_HERE.get(flag, where)))
    return rows


def methods_of(file: Path, class_name: str) -> dict[str, list[str]]:
    """The public methods of a class and their arguments, from its source."""
    nodes = ast.parse(file.read_text(encoding="utf-8")).body
    body = next(n.body for n in nodes if isinstance(n, ast.ClassDef) and n.name == class_name)
    methods = [n for n in body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"]
    return {
        method.name: without(
            [a.arg for a in (*method.args.args, *method.args.kwonlyargs)], ["self", "cls"]
        )
        for method in methods
    }


def flags_of(file: Path) -> set[str]:
    """The names that a program gives to ``add_argument``, from its source."""
    return {
        node.args[0].value
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") == "add_argument"
        and isinstance(node.args[0], ast.Constant)
    }


def without(names: list[str], others: list[str]) -> list[str]:
    """The names that are not among ``others``, in order."""
    return [name for name in names if name not in others]
