"""Engines with ATOM's decoders, and what the decoders did in each step, as `layer_probe` writes it down."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.sglang.engines import LATER, Engine, Outcome, Outcomes, Wave, launch, mixed, prompt, request
from tests.sglang.environment import HERE, environment, gpus

DP2: dict[str, Any] = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
TP2: dict[str, Any] = {"tp_size": 2}
# Stages send to each other, which ranks that share a GPU cannot.
IN_STAGES: dict[str, Any] = {} if gpus() == 1 else {"pp_size": 2}
SHELLS = "atom_patches.sglang.adapters.classes."
#: A layout's checkpoint, options, the class that SGLang builds, and whether ranks have requests of their own.
Layout = tuple[str, dict[str, Any], str, bool]


def waves(spread: bool) -> list[Wave]:
    """Many at once, one alone, two that overlap, and two that begin like another; on named ranks where ranks are."""
    first, last = (0, 1) if spread else (None, None)
    alone = [request(prompt(7), new=6, rank=last)]
    overlap = [request(prompt(40, 2), new=16, rank=first), request(prompt(33), at=LATER, rank=last)]
    shared = [request(prompt(150) + prompt(n), rank=first) for n in (4, 21)]
    return [mixed(), alone, overlap, shared]


def atom(key: str, folder: Path, plan: Engine) -> Engine:
    """The engine with ATOM's decoders, and with the probe."""
    probe = folder / "probe" / key.replace(" ", "_")
    probe.mkdir(parents=True)
    env = {"SGLANG_PLUGINS": "atom,layer_probe", "ATOM_MODELS": "1", "LAYER_PROBE": str(probe)}
    env["PYTHONPATH"] = environment(HERE / "layer_probe")["PYTHONPATH"]
    return dataclasses.replace(plan, env=plan.env | env)


@dataclass(frozen=True)
class Probed:
    """An engine's answers, and its decoders' steps by process."""

    outcome: Outcome
    steps: list[list[dict[str, Any]]]


@dataclass(frozen=True)
class Launched:
    """Engines by their layout."""

    folder: Path
    outcomes: Outcomes

    def __getitem__(self, key: str) -> Probed:
        return Probed(self.outcomes[key], _read(self.folder / "probe" / key.replace(" ", "_")))


def run(folder: Path, plans: dict[str, Engine]) -> Launched:
    """Launch the engines, which were planned for that folder."""
    return Launched(folder, launch(folder, plans))


def _read(folder: Path) -> list[list[dict[str, Any]]]:
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in sorted(folder.glob("*.jsonl"))]
