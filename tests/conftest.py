"""Test options and fixtures shared by all test files."""

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the long exact and statistical tests too")


def pytest_configure(config):
    config.addinivalue_line("markers", "full: long; runs with --full only")
    torch.set_num_threads(1)  # the networks of these tests are too small for threads to pay


def pytest_collection_modifyitems(config, items):
    if config.getoption("--full"):
        return
    for item in items:
        if "full" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="long; run with --full"))
