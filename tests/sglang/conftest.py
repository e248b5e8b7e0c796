"""Tests on a real SGLang run where it is installed, in a release that the patches were written for."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import harness  # noqa: F401  # has Triton interpret kernels where there is no GPU, before a test's module imports it
import pytest

HERE = Path(__file__).parent
MISSING = None if importlib.util.find_spec("sglang") else "SGLang is not installed; `make test-sglang` installs it"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if MISSING is None:
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=MISSING))
