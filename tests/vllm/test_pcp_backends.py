"""Every attention backend that prefill context parallelism accepts gathers keys and values before it writes them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.vllm.gdn_oracle import ROOT, environment, oracle

WRITES = {
    "FLASH_ATTN": "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.do_kv_cache_update",
    "TRITON_ATTN": "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl.do_kv_cache_update",
    "CPU_ATTN": "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward",
}
SCRIPT = """
import importlib, json, sys
from vllm.engine.arg_utils import EngineArgs
targets = json.loads(sys.argv[2])
size = int(sys.argv[3])
config = EngineArgs(model=sys.argv[1], enforce_eager=True, prefill_context_parallel_size=size).create_engine_config()
homes = {}
for target in targets:
    module, _, qualname = target.partition(":")
    value = importlib.import_module(module)
    for part in qualname.split("."):
        value = getattr(value, part)
    homes[target] = value.__code__.co_filename
print(json.dumps(homes))
"""


def homes(size: int) -> dict[str, str]:
    """The file in which each backend's write is defined, in a process whose configuration has `size` ranks."""
    command = [sys.executable, "-c", SCRIPT, str(oracle("qwen3").path), json.dumps(list(WRITES.values())), str(size)]
    done = subprocess.run(
        command, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def split() -> dict[str, str]:
    return homes(2)


@pytest.mark.parametrize("backend", WRITES)
def test_accepted_backends_gather(split: dict[str, str], backend: str) -> None:
    assert "atom_patches" in split[WRITES[backend]]


def test_backends_are_stock_without_pcp() -> None:
    assert all("atom_patches" not in home for home in homes(1).values())
