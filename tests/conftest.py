"""Options and fixtures that all test files share."""

import pytest
import torch
from support.tiny import peaked_target, tiny_tokenizer

from eagle.traineagle3 import generate


def pytest_addoption(parser):
    """Add ``--full``."""
    parser.addoption(
        "--full", action="store_true", help="run the long exact and statistical tests too"
    )


def pytest_configure(config):
    """Register the marker ``full``, and use one thread: the networks here are tiny."""
    config.addinivalue_line("markers", "full: a long test; runs with --full only")
    torch.set_num_threads(1)


def pytest_collection_modifyitems(config, items):
    """Skip the long tests unless ``--full`` is given."""
    if config.getoption("--full"):
        return
    for item in items:
        if "full" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="long; run with --full"))


@pytest.fixture(scope="session")
def work(tmp_path_factory):
    """A folder with a tiny target and tokenizer in ``target``, and its ``corpus.jsonl``."""
    folder = tmp_path_factory.mktemp("work")
    peaked_target().save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    command = (
        f"--base-model-path {folder}/target --output {folder}/corpus.jsonl --conversations 80 "
        "--batch-size 20 --max-answer 24 --max-question 8 --question-temperature 3"
    )
    generate.main(command.split())
    return folder
