"""The project is described in pyproject.toml; this file is for tools that ask for setup.py."""

from setuptools import setup

setup()
