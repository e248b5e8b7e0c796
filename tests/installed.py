"""The inference engine of this environment, on which tests/ordering and tests/drift run."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from pathlib import Path

import pytest

from atom_patches import arming
from atom_patches.core import Engine, Patch, State, discovery, gates

FOUND = next((name for name in arming.ENGINES if importlib.util.find_spec(name) is not None), None)
NAME = FOUND or arming.ENGINES[0]
ENGINE: Engine = importlib.import_module(f"atom_patches.{NAME}.engine").ENGINE

needs_engine = pytest.mark.skipif(FOUND is None, reason="neither vLLM nor SGLang is installed here")
"""Mark of tests that need one of the engines."""


@functools.cache
def fitting() -> dict[str, Patch]:
    """The patches that apply to the installed release, by id. On a reviewed one those are all: tests/drift says so."""
    patches = discovery.load(ENGINE) if FOUND else []
    return {patch.id: patch for patch in patches if gates.fits(ENGINE, patch).state is State.PENDING}


CPU_SITE = Path(__file__).parent / "sglang" / "cpu_site"


def environment(**changes: str) -> dict[str, str]:
    """What a process that imports the engine, unarmed and on the CPU, is started with."""
    ours = ("ATOM_", "VLLM_PLUGINS", "SGLANG_PLUGINS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return kept | quiet() | (sglang_on_cpu() if NAME == "sglang" else {}) | changes


def quiet() -> dict[str, str]:
    """Neither engine asks the network, reports, compiles or says more than it must."""
    common = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    return common | {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}


def sglang_on_cpu() -> dict[str, str]:
    """SGLang has no CPU platform of use here: the stand-in of tests/sglang takes its place."""
    path = [str(CPU_SITE), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    import torch

    if torch.cuda.is_available():
        return {}
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "SGLANG_PLATFORM": "cpu_stand_in",
        "TRITON_INTERPRET": "1",
    }
