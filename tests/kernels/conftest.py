"""AITER for the tests that name it as their provider: on a CPU, a stand-in. A GPU is shared by several processes."""

from __future__ import annotations

from collections.abc import Iterator

import aiter_stand_in
import harness
import pytest
import torch

#: Bytes of a GPU that a test may leave in the allocator for the next one.
KEPT = 2**30


@pytest.fixture(autouse=True)
def _aiter(request: pytest.FixtureRequest) -> Iterator[None]:
    parameters = getattr(request.node, "callspec", None)
    if harness.GPU or parameters is None or "aiter" not in parameters.params.values():
        yield
        return
    with aiter_stand_in.installed():
        yield


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    yield
    if harness.GPU and torch.cuda.memory_reserved() > KEPT:
        torch.cuda.empty_cache()
