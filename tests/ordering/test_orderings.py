"""Every patch that fits the installed engine, in every order of arming and importing that occurs, on the real engine.

One scenario is one process with one import of the engine that is installed here (see `scenarios.py`); no engine is
built. The tests read what the processes found, one test a patch and scenario.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import installed
from tests.installed import ENGINE

pytestmark = installed.needs_engine

IDS = list(installed.fitting())
BOOTSTRAP = [name for name in IDS if name.startswith(f"{ENGINE.name}.bootstrap.")]
# What the scenario of several engine instances asks for; another release than the reviewed ones may not serve it.
ASKED = {"vllm": "vllm.pcp.block_sizes", "sglang": "sglang.models.registry"}[ENGINE.name]
serves_instances = pytest.mark.skipif(ASKED not in IDS, reason=f"{ASKED} does not fit the installed release")
SCENARIOS = Path(__file__).with_name("scenarios.py")


@functools.cache
def ended(scenario: str, state_dir: str) -> subprocess.CompletedProcess[str]:
    """The process of a scenario; run once, however it ends."""
    environment = installed.environment(ATOM_PATCHES_STATE_DIR=state_dir)
    command = [sys.executable, str(SCENARIOS), ENGINE.name, scenario]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)


def outcome(scenario: str, state_dir: str) -> dict[str, dict[str, Any]]:
    """What the process of a scenario found."""
    result = ended(scenario, state_dir)
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    assert result.returncode == 0 and lines, result.stdout[-2000:] + result.stderr[-4000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


@pytest.fixture(scope="session")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("state")
    folder.chmod(0o700)
    return str(folder)


def check(found: dict[str, Any], expected: set[str]) -> None:
    assert set(found) == expected
    assert {name: value for name, value in found.items() if value is not True} == {}


def test_every_target_can_be_imported_here(state_dir: str) -> None:
    assert outcome("armed_first", state_dir)[""]["not importable"] == {}


@pytest.mark.parametrize("name", IDS)
def test_armed_before_the_target_is_imported(name: str, state_dir: str) -> None:
    expected = {"waited", "applied", "ours", "twice is once", "pickles by name", "in a forked child"}
    check(outcome("armed_first", state_dir)[name], expected)


@pytest.mark.parametrize("name", IDS)
def test_armed_after_the_target_is_imported_reverted_and_armed_again(name: str, state_dir: str) -> None:
    expected = {f"{what} the {time} time" for what in ("applied", "ours") for time in ("first", "second")}
    expected.add("stock object after revert second")
    if name not in BOOTSTRAP:
        expected |= {"stock object after revert first", "group reverts when it fails"}
    check(outcome("imported_first", state_dir)[name], expected)


@pytest.mark.parametrize("name", BOOTSTRAP)
def test_spawned_child(name: str, state_dir: str) -> None:
    check(outcome("spawned", state_dir)[name], {"ours", "pickles by name"})
    check(outcome("spawned", state_dir)[""], {"armed"})


@pytest.mark.parametrize("name", BOOTSTRAP)
def test_armed_by_the_plugin_in_the_middle_of_the_import(name: str, state_dir: str) -> None:
    assert outcome("by_plugin", state_dir)[""] == {"armed before": False}
    check(outcome("by_plugin", state_dir)[name], {"ours"})


@serves_instances
@pytest.mark.parametrize("name", [name for name in IDS if name not in BOOTSTRAP])
def test_two_engine_instances_of_one_process(name: str, state_dir: str) -> None:
    check(outcome("instances", state_dir)[name], {"stock at first", "on if applied", "stock again"})


CACHE_KEY = (
    "patches on",
    "untouched when off",
    "equal in a child",
    "bound twice",
    "differs from the unpatched",
    "differs with another patch",
    "differs with other code",
    "key is the stock one again",
    "dictionary untouched",
    "dictionary passed on",
    "object's hash counts",
    "object's attributes",
    "object pickles",
)


@serves_instances
@pytest.mark.skipif(ENGINE.name != "vllm", reason="of these engines, vLLM alone reuses code by a key that it computes")
@pytest.mark.parametrize("name", CACHE_KEY)
def test_compile_cache_key(name: str, state_dir: str) -> None:
    assert outcome("instances", state_dir)[""][name] is True
