"""AITER for the tests that name it as their provider: on a CPU, a stand-in."""

from __future__ import annotations

from collections.abc import Iterator

import aiter_stand_in
import harness
import pytest


@pytest.fixture(autouse=True)
def _aiter(request: pytest.FixtureRequest) -> Iterator[None]:
    parameters = getattr(request.node, "callspec", None)
    if harness.GPU or parameters is None or "aiter" not in parameters.params.values():
        yield
        return
    with aiter_stand_in.installed():
        yield
