"""What Ray is told to start workers with; no Ray, and no engine, is needed for that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atom_patches.vllm.pcp.ray_environment import PATCH


def runtime_environment(ranks: int, asked: dict[str, Any] | None) -> Any:
    """The runtime environment that the engine's configuration has when Ray is met."""
    met: list[Any] = []
    config = SimpleNamespace(prefill_context_parallel_size=ranks, ray_runtime_env=asked)
    assert PATCH.builder is not None
    connect = PATCH.builder(lambda parallel, *args, **kwargs: met.append((parallel.ray_runtime_env, args, kwargs)))
    connect(config, "address", require_gpu_on_driver=False)
    [(found, args, kwargs)] = met
    assert (args, kwargs) == (("address",), {"require_gpu_on_driver": False})
    return found


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is armed by the plugin list, and has settings; `ATOM_OTHER` is another package's."""
    monkeypatch.delenv("ATOM_PATCHES", raising=False)
    for name, value in (("VLLM_PLUGINS", "atom,mine"), ("ATOM_PCP_GDN", "relay"), ("ATOM_OTHER", "1")):
        monkeypatch.setenv(name, value)


def test_workers_are_armed_and_set_as_the_driver_is() -> None:
    sent = runtime_environment(2, None)["env_vars"]
    assert sent["ATOM_PATCHES"] == "1"
    assert sent["VLLM_PLUGINS"] == "atom,mine"
    assert sent["ATOM_PCP_GDN"] == "relay"
    assert "ATOM_OTHER" not in sent and "PATH" not in sent


def test_what_the_user_says_goes_first_and_is_not_written_to() -> None:
    mine = {"pip": ["einops"], "env_vars": {"ATOM_PCP_GDN": "two_pass", "MINE": "1"}}
    found = runtime_environment(2, mine)
    assert found["pip"] == ["einops"]
    assert (found["env_vars"]["ATOM_PCP_GDN"], found["env_vars"]["MINE"]) == ("two_pass", "1")
    assert mine["env_vars"] == {"ATOM_PCP_GDN": "two_pass", "MINE": "1"}


def test_an_engine_of_one_rank_is_left_alone() -> None:
    assert runtime_environment(1, None) is None
