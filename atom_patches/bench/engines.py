"""The engines that `bench engine` measures: the program of a side, and the variables that make it stock or overlay.

Whoever measures gets one of these objects, and asks it; none asks which engine it is.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

Variables = Mapping[str, str]

STAND_IN = Path(__file__).parents[2] / "tests" / "sglang" / "cpu_site"
"""Of a checkout: what lets SGLang run its hybrids where there is no GPU."""


@dataclass(frozen=True)
class Engine:
    """What is an engine's own in a measurement.

    Attributes:
        name: of its package.
        label: for people.
        program: a side, as arguments of Python.
        stock: variables of the side without decoders of this package, by device.
        overlay: of the one with them.
        every: of all sides, by device.
        fusions: those that the overlay's decoder is built with, by device, for a model that has the layers.
        drops: beginnings of variables that would steer a side.
        releases: those that a side can drive, of the distribution of the same name; none: any.
        path: folders that a side's Python needs first, by device.
    """

    name: str
    label: str
    program: tuple[str, ...]
    stock: Mapping[str, Variables]
    overlay: Variables
    every: Mapping[str, Variables]
    fusions: Mapping[str, tuple[str, ...]]
    drops: tuple[str, ...] = ("ATOM_",)
    releases: tuple[str, ...] = ()
    path: Mapping[str, tuple[Path, ...]] = field(default_factory=dict[str, tuple[Path, ...]])

    def installed(self) -> bool:
        """Whether this environment has it."""
        return importlib.util.find_spec(self.name) is not None

    def refusal(self, device: str) -> str | None:
        """Why the installed one cannot be measured on the device; None if it can."""
        if self.releases and (version := importlib.metadata.version(self.name)) not in self.releases:
            return f"bench engine drives {self.label} {', '.join(self.releases)}; {version} is installed."
        if lacking := [folder for folder in self._path(device) if not folder.is_dir()]:
            return f"{self.label} on a CPU takes a checkout of this project: there is no {lacking[0]}."
        return None

    def expected(self, device: str, experts: bool) -> list[str]:
        """The fusions that the overlay's decoder of a model with or without experts must have."""
        return [one for one in self.fusions[device] if experts or one != "experts"]

    def environment(self, device: str, variables: Variables) -> dict[str, str]:
        """This process's, without what would steer any side, and with a side's variables."""
        kept = {name: one for name, one in os.environ.items() if not name.startswith(self.drops)}
        before = [str(folder) for folder in self._path(device)]
        path = [*before, *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**kept, **({"PYTHONPATH": os.pathsep.join(path)} if before else {}), **self.every[device], **variables}

    def _path(self, device: str) -> tuple[Path, ...]:
        return self.path.get(device, ())


VLLM = Engine(
    name="vllm",
    label="vLLM",
    program=("-m", "atom_patches.bench.vllm_side"),
    # vLLM's CPU platform lacks what a hybrid needs; this package brings it, to vLLM's own model, too.
    stock={"cuda": {"ATOM_PATCHES": "0"}, "cpu": {"ATOM_PATCHES": "1", "ATOM_MODELS": "0"}},
    overlay={"ATOM_PATCHES": "1", "ATOM_MODELS": "1", "ATOM_PATCH_VLLM_MODELS": "1"},
    every={
        "cuda": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": ""},
        "cpu": {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "",
            "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        },
    },
    fusions={"cuda": ("experts", "qk_rope", "kv_cache", "linear"), "cpu": ("qk_rope",)},
)  # fmt: skip

SGLANG = Engine(
    name="sglang",
    label="SGLang",
    program=("-m", "atom_patches.bench.sglang_side"),
    stock={"cuda": {"ATOM_PATCHES": "0"}, "cpu": {"ATOM_PATCHES": "0"}},
    overlay={"ATOM_PATCHES": "1", "ATOM_MODELS": "1", "ATOM_PATCH_SGLANG_MODELS": "1"},
    every={
        "cuda": {"SGLANG_PLUGINS": "none"},
        "cpu": {
            "SGLANG_PLUGINS": "none", "SGLANG_PLATFORM": "cpu_stand_in", "SGLANG_MAMBA_CONV_DTYPE": "float32",
            "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
        },
    },
    fusions={"cuda": ("experts", "linear"), "cpu": ("experts",)},
    drops=("ATOM_", "SGLANG_"),
    releases=("0.5.17",),
    path={"cpu": (STAND_IN,)},
)  # fmt: skip

ENGINES = {engine.name: engine for engine in (VLLM, SGLANG)}
