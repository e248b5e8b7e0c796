"""Every attention backend that prefill context parallelism accepts gathers keys and values, and moves queries."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.gdn_oracle import ROOT, environment, oracle

OURS = ROOT / "atom_patches"
WRITES = {
    "FLASH_ATTN": "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.do_kv_cache_update",
    "TRITON_ATTN": "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl.do_kv_cache_update",
    "FLASH_ATTN queries": "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.forward",
    "TRITON_ATTN queries": "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl.forward",
    "CPU_ATTN": "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward",
}
#: Implementation -> whether an engine's start may accept it. All of them have a `do_kv_cache_update`.
ACCEPTED = {
    "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl": True,
    "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl": True,
    "vllm.v1.attention.backends.flash_attn_diffkv:FlashAttentionDiffKVImpl": False,
    "vllm.v1.attention.backends.flex_attention:FlexAttentionImpl": False,
    "vllm.v1.attention.backends.tree_attn:TreeAttentionImpl": False,
}
SCRIPT = """
import importlib, json, sys
from vllm.engine.arg_utils import EngineArgs
targets = json.loads(sys.argv[2])
size = int(sys.argv[3])
config = EngineArgs(model=sys.argv[1], enforce_eager=True, prefill_context_parallel_size=size).create_engine_config()

def find(target):
    module, _, qualname = target.partition(":")
    value = importlib.import_module(module)
    for part in qualname.split("."):
        value = getattr(value, part)
    return value

found = {target: find(target).__code__.co_filename for target in targets}
if size > 1:
    from atom_patches.vllm.adapters.pcp_attention import writes_gathered
    implementations = {name: find(name) for name in json.loads(sys.argv[4])}
    found |= {name: writes_gathered(cls.__new__(cls)) for name, cls in implementations.items()}
print(json.dumps(found))
"""


def look(size: int) -> dict[str, Any]:
    """In a process whose configuration has `size` ranks: the file that defines each write; what would be accepted."""
    targets, implementations = json.dumps(list(WRITES.values())), json.dumps(list(ACCEPTED))
    command = [sys.executable, "-c", SCRIPT, str(oracle("qwen3").path), targets, str(size), implementations]
    done = subprocess.run(
        command, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def split() -> dict[str, Any]:
    return look(2)


@pytest.mark.parametrize("backend", WRITES)
def test_accepted_backends_gather(split: dict[str, Any], backend: str) -> None:
    assert Path(split[WRITES[backend]]).is_relative_to(OURS)


@pytest.mark.parametrize("implementation", ACCEPTED)
def test_only_gathering_backends_are_accepted(split: dict[str, Any], implementation: str) -> None:
    assert split[implementation] is ACCEPTED[implementation]


def test_backends_are_stock_without_pcp() -> None:
    assert not any(Path(home).is_relative_to(OURS) for home in look(1).values())
