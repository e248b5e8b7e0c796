"""Who serves an operation: the environment, the capabilities, the measured table, and what a person is told."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atom_patches.core import report
from atom_patches.core.registry import Registry
from atom_patches.kernels import registry
from atom_patches.kernels.gated_delta_rule.chunk import CHUNK_GATED_DELTA_RULE
from atom_patches.kernels.registry import YES, KernelUnavailable, no
from atom_patches.kernels.rms_norm import RMS_NORM
from atom_patches.vllm.engine import ENGINE as VLLM

X = torch.ones(2, 8)
CALL = (X, torch.ones(8), 1e-6, False)


@pytest.fixture(autouse=True)
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOM_KERNELS", raising=False)


@pytest.fixture
def providers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Give an operation's family providers that are plain functions, on any device."""
    modules: dict[str, types.ModuleType] = {}

    def offer(provider: str, **functions: Callable[..., Any]) -> None:
        modules[provider] = types.ModuleType(provider)
        vars(modules[provider]).update(functions)

    def find(package: str | None, family: str, provider: str) -> types.ModuleType | registry.Verdict:
        return modules.get(provider, no(f"{provider} was not offered"))

    for cached in (registry._available, registry._tell):
        cached.cache_clear()
    monkeypatch.setattr(registry, "_module", find)
    monkeypatch.setattr(registry, "_STATIC", dict.fromkeys(("aiter", "triton", "engine"), lambda device: YES))
    yield offer
    for cached in (registry._available, registry._tell):
        cached.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make calls look as if they came from a GPU with a measured table."""

    def pretend(ranking: list[str] | None = None, *, hip: str | None = None) -> None:
        shape = RMS_NORM.shape_class(*CALL)
        table = {} if ranking is None else {"rms_norm": {shape: ranking}}
        monkeypatch.setattr(registry, "_device", lambda arguments: torch.device("cuda"))
        monkeypatch.setattr(registry, "_measured", lambda gpu, engine: table)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU 1")
        monkeypatch.setattr(torch.version, "hip", hip)

    return pretend


def served(*args: Any) -> Tensor:
    return torch.zeros_like(args[0])


def chosen() -> str:
    return registry.choose(RMS_NORM, CALL).provider


def test_tensors_on_the_cpu_get_the_reference() -> None:
    assert registry.choose(RMS_NORM, CALL).function is RMS_NORM.reference


@pytest.mark.parametrize("provider", ["triton", "engine"])
def test_the_measured_winner_is_taken(gpu: Any, providers: Any, provider: str) -> None:
    for name in ("triton", "engine"):
        providers(name, rms_norm=served)
    gpu([provider])
    assert chosen() == provider


def test_what_was_not_measured_goes_to_the_engine_then_to_triton(gpu: Any, providers: Any) -> None:
    gpu()
    assert chosen() == "torch"
    providers("triton", rms_norm=served)
    registry._available.cache_clear()
    assert chosen() == "triton"
    providers("engine", rms_norm=served)
    registry._available.cache_clear()
    assert chosen() == "engine"


def test_an_engine_that_waits_for_the_device_comes_after_triton(gpu: Any, providers: Any) -> None:
    gpu()
    for name in ("engine", "triton"):
        providers(name, chunk_gated_delta_rule=served)
    call = (torch.ones(2, 1, 8),) * 6 + (None, 1.0, 64)
    candidates = [provider for provider, _ in registry.automatic(CHUNK_GATED_DELTA_RULE, call)]
    assert candidates == ["triton", "engine", "torch"]


def test_a_reference_that_reads_the_device_serves_no_capture(
    gpu: Any, providers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert chosen() == "torch"
    monkeypatch.setitem(vars(RMS_NORM), "reference_reads", True)
    with pytest.raises(KernelUnavailable, match="reads the device, which a CUDA graph's capture does not allow"):
        chosen()


def test_aiter_comes_first_on_rocm(gpu: Any, providers: Any) -> None:
    for name in ("aiter", "triton", "engine"):
        providers(name, rms_norm=served)
    gpu(["triton", "aiter"], hip="6.4")
    assert chosen() == "aiter"


def test_a_winner_that_refuses_the_call_is_passed_over(gpu: Any, providers: Any) -> None:
    providers("engine", rms_norm=served, supports_rms_norm=lambda *call: no("rows are too short"))
    providers("triton", rms_norm=served)
    gpu(["engine", "triton"])
    assert chosen() == "triton"


def test_a_provider_that_cannot_run_here_is_passed_over(gpu: Any, providers: Any) -> None:
    providers("engine", rms_norm=served, available=lambda: no("its library is missing"))
    gpu(["engine"])
    assert chosen() == "torch"


def test_a_provider_that_cannot_be_imported_is_passed_over(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As when an engine has moved what its binding imports."""
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "__init__.py").touch()
    (tmp_path / "moved" / "rms_norm.py").write_text("from json import gone_in_this_version\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(logging.getLogger("atom_patches"), "propagate", True)
    monkeypatch.setattr(registry, "_offered", "moved")
    gpu(["engine", "torch"])
    assert chosen() == "torch"
    assert "moved.rms_norm cannot be imported" in caplog.text
    monkeypatch.setenv("ATOM_KERNELS", "engine")
    with pytest.raises(KernelUnavailable, match=r"moved\.rms_norm cannot be imported: .*gone_in_this_version"):
        chosen()


def test_kernels_are_launched_on_the_device_of_the_tensors(providers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []

    @contextlib.contextmanager
    def enter(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield

    providers("triton", rms_norm=served)
    monkeypatch.setenv("ATOM_KERNELS", "triton")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", enter)
    for device in ("cpu", "cuda:0", "cuda:1"):
        monkeypatch.setattr(registry, "_device", lambda arguments, device=device: torch.device(device))
        RMS_NORM(*CALL)
    assert entered == [torch.device("cuda:1")]


def test_an_asked_for_provider_that_cannot_serve_is_an_error(providers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    providers("triton", rms_norm=served, supports_rms_norm=lambda *call: no("rows are too short"))
    monkeypatch.setenv("ATOM_KERNELS", "triton,aiter")
    with pytest.raises(KernelUnavailable) as error:
        RMS_NORM(*CALL)
    message = str(error.value)
    assert message.startswith("ATOM_KERNELS=triton,aiter: none of these can serve rms_norm here")
    assert "triton: rows are too short; aiter: aiter was not offered" in message
    assert "ATOM_KERNEL_RMS_NORM" in message


def test_auto_at_the_end_of_a_list_falls_back(providers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_KERNELS", "triton,auto")
    assert chosen() == "torch"
    providers("triton", rms_norm=served)
    registry._available.cache_clear()
    assert chosen() == "triton"
    assert not bool(RMS_NORM(*CALL).any())


def test_the_variable_of_the_family_wins(providers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    providers("triton", rms_norm=served)
    monkeypatch.setenv("ATOM_KERNELS", "torch")
    monkeypatch.setenv("ATOM_KERNEL_RMS_NORM", "triton")
    assert chosen() == "triton"


def test_a_choice_is_told_once_and_reported(
    providers: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("ATOM_PATCHES_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(report, "_own", {})
    monkeypatch.setattr(report, "_kernels", [])
    monkeypatch.setattr(logging.getLogger("atom_patches"), "propagate", True)
    report.publish(role="worker", engine="vllm", version="0", config={}, patches=())
    with caplog.at_level(logging.DEBUG, logger="atom_patches"):
        RMS_NORM(*CALL)
        RMS_NORM(*CALL)
    assert [r.getMessage() for r in caplog.records] == ["kernel rms_norm: torch (the reference serves tensors on cpu)"]
    (process,) = report.processes()
    assert process.kernels == (report.KernelReport("rms_norm", "torch", "the reference serves tensors on cpu"),)
    report.withdraw()


def test_importing_a_family_imports_no_provider() -> None:
    code = (
        "import sys, atom_patches.kernels.rms_norm as family, torch\n"
        "family.rms_norm(torch.ones(1, 4), torch.ones(4))\n"
        "print([name for name in ('triton', 'aiter', 'vllm', 'sglang') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_measured_table_is_read_by_gpu_and_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "MEASURED", tmp_path)
    table = {"rms_norm": {"small": ["triton"]}}
    (tmp_path / "NVIDIA_H200").mkdir()
    (tmp_path / "NVIDIA_H200" / "vllm.json").write_text(json.dumps({"ranking": table}))
    registry._measured.cache_clear()
    assert registry._measured("NVIDIA H200", "atom_patches.vllm.kernels") == table
    assert registry._measured("NVIDIA H200", "atom_patches.sglang.kernels") == {}
    assert registry._measured("NVIDIA H200", None) == table
    assert registry._measured("NVIDIA A100", None) == {}
    registry._measured.cache_clear()


def test_the_kernels_of_the_engine_that_runs_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_offered", None)
    monkeypatch.setattr(Registry, "running", None)
    assert registry.available(RMS_NORM, "engine", torch.device("cuda")) == no(
        "no inference engine runs in this process"
    )
    monkeypatch.setattr(Registry, "running", VLLM)
    assert registry._package(RMS_NORM, "engine") == "atom_patches.vllm.kernels"
