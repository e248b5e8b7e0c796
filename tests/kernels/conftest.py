"""AITER for the tests that name it as their provider: on a CPU, a stand-in. A GPU is shared by several processes."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import aiter_stand_in
import harness
import pytest
import torch

from tests import untuned

if harness.GPU:
    untuned.install()

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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that was only refused is skipped, not passed."""
    report = yield
    if report.when == "setup":
        harness.refusals.clear()
        harness.served.clear()
    reason = harness.only_refused()
    if report.when == "call" and report.passed and reason is not None:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), (item.location[1] or 0) + 1, f"Skipped: every example was refused: {reason}")
    return report


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    yield
    if harness.GPU and torch.cuda.memory_reserved() > KEPT:
        torch.cuda.empty_cache()
