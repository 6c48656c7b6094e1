"""Test options and fixtures shared by all test files."""

import pytest
import torch
from support.tiny import peaked_target, tiny_tokenizer

from eagle.traineagle3 import generate


def pytest_addoption(parser):
    parser.addoption(
        "--full", action="store_true", help="run the long exact and statistical tests too"
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "full: long; runs with --full only")
    torch.set_num_threads(1)  # the networks of these tests are too small for threads to pay


def pytest_collection_modifyitems(config, items):
    if config.getoption("--full"):
        return
    for item in items:
        if "full" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="long; run with --full"))


@pytest.fixture(scope="session")
def work(tmp_path_factory):
    """A folder with a target, its tokenizer, and a corpus that the target wrote."""
    folder = tmp_path_factory.mktemp("work")
    peaked_target().save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    generate.main(
        f"--base-model-path {folder}/target --output {folder}/corpus.jsonl --conversations 80 --batch-size 20 --max-answer 24 "
        "--max-question 8 --question-temperature 3".split()
    )
    return folder
