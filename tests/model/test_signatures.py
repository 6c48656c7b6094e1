"""EAGLE's calls keep their arguments, and no option hides in ``**kwargs``."""

import inspect

import pytest

from eagle.model.ea_model import EaModel
from eagle.model.options import DecodingOptions

# The positional arguments of EAGLE's own calls, in its order (its commit cb7e084).
EAGLE_CALL = (
    "input_ids",
    "temperature",
    "top_p",
    "top_k",
    "max_new_tokens",
    "max_length",
    "log",
    "is_llama3",
)
EAGLE_LOAD = {
    "use_eagle3": True,
    "base_model_path": None,
    "ea_model_path": None,
    "total_token": 60,
    "depth": 7,
    "top_k": 10,
    "threshold": 1.0,
}
EAGLE_DEFAULTS = (0.0, 0.0, 0.0, 512, 2048, False, False)
CALLS = ("eagenerate", "ea_generate", "naivegenerate", "naive_generate")


def parameters(name):
    return list(inspect.signature(getattr(EaModel, name)).parameters.values())


@pytest.mark.parametrize("name", CALLS)
def test_the_positional_arguments_of_a_call_are_eagles(name):
    positional = [p for p in parameters(name)[1:] if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert tuple(p.name for p in positional) == EAGLE_CALL
    assert tuple(p.default for p in positional[1:]) == EAGLE_DEFAULTS


def test_loading_accepts_all_of_eagles_keywords_with_its_defaults():
    found = {p.name: p.default for p in parameters("from_pretrained")}
    assert {name: found[name] for name in EAGLE_LOAD} == EAGLE_LOAD
    with pytest.raises(ValueError, match="use_eagle3 is given by its name"):
        EaModel.from_pretrained(True, "target", "head")


@pytest.mark.parametrize("name", ("options", *CALLS))
def test_every_option_stands_in_the_signature(name):
    found = {p.name for p in parameters(name)}
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters(name))
    assert all(p.annotation is not p.empty for p in parameters(name)[1:])
    wanted = {"temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "max_length"}
    if not name.startswith("naive"):
        wanted |= set(DecodingOptions.__dataclass_fields__) - {"warpers"}
    assert wanted <= found


def test_an_unknown_option_is_refused_by_name():
    model = EaModel.__new__(EaModel)
    with pytest.raises(TypeError, match="repetition_penalty"):
        model.eagenerate(None, repetition_penalty=1.2)
