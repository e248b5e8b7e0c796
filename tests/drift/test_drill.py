"""The drift drill on the real vLLM: one line of an upstream function changes, and everything says so.

The changed vLLM is a folder of links to the installed one, with one file replaced, put in front of it on the path.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from atom_patches.core import Target, reviewed, source
from atom_patches.vllm.pcp import total_cp_world_size

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here")

PATCH = total_cp_world_size.PATCH
EDIT = "drift_drill = 1"
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
CONFIGURE = """
import sys
import atom_patches
from atom_patches.core.registry import REGISTRY
from vllm.engine.arg_utils import EngineArgs
EngineArgs(
    model=sys.argv[1], enforce_eager=True, max_model_len=64, skip_tokenizer_init=True, prefill_context_parallel_size=2
).create_engine_config()
print("STATE " + next(report.state for report in REGISTRY.status("vllm") if report.id == sys.argv[2]))
"""
OPTIMISATION = """
import atom_patches
from atom_patches.core import Patch, Verdict
from atom_patches.core.registry import Registry
from atom_patches.vllm.engine import ENGINE
import vllm.v1.worker.cp_utils as cp_utils
stock = cp_utils.get_total_cp_world_size
PATCH = Patch(
    id="vllm.test.faster", target="vllm.v1.worker.cp_utils:get_total_cp_world_size", supports="vllm>=0.20.2,<0.21",
    kind="optimisation", when=lambda config: Verdict(True, "always"),
)
PATCH.around(lambda original: lambda: 7)
class Config: additional_config = {}
import dataclasses
registry = Registry()
registry.arm(dataclasses.replace(ENGINE, describe=lambda config: {}), [PATCH])
first, second = Config(), Config()
registry.configure("vllm", first, "engine core")
registry.configure("vllm", second, "worker")
print("STATE", registry.status("vllm")[0].state, cp_utils.get_total_cp_world_size is stock)
"""


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to put on the path: vLLM with one line more in the function that `PATCH` replaces."""
    root = tmp_path_factory.mktemp("changed")
    target = Target.parse(PATCH.target)
    (found,) = source.find(target)
    original = Path(found.module.file)
    installed = reviewed.discovery.package_folder("vllm")
    link_around(installed, root / "vllm", original.relative_to(installed).parts)
    lines = list(found.module.lines)
    lines.insert(found.node.end_lineno or 0, " " * (found.node.col_offset + 4) + EDIT + "\n")
    (root / "vllm" / original.relative_to(installed)).write_text("".join(lines))
    return root


def link_around(installed: Path, copy: Path, path: Sequence[str]) -> None:
    """Links to everything but the file at `path`, whose folders become real ones."""
    copy.mkdir()
    for entry in installed.iterdir():
        if entry.name == path[0]:
            if len(path) > 1:
                link_around(entry, copy / entry.name, path[1:])
        elif entry.name != "__pycache__":
            (copy / entry.name).symlink_to(entry)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration without weights: enough to build an engine's configuration from."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


class Launcher:
    """Runs commands with the changed vLLM in front, and a file of accepted fingerprints of their own."""

    def __init__(self, changed: Path, folder: Path) -> None:
        state = folder / "state"
        state.mkdir(mode=0o700)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ATOM_", "VLLM_PLUGINS"))}
        self.environment = kept | {
            "PYTHONPATH": os.pathsep.join([str(changed), *filter(None, [os.environ.get("PYTHONPATH", "")])]),
            "ATOM_PATCHES_ACCEPTED": str(folder / "accepted.json"),
            "ATOM_PATCHES_STATE_DIR": str(state),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        }

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        given = self.environment | environment
        return subprocess.run(command, capture_output=True, text=True, env=given, timeout=300, check=False)


@pytest.fixture
def launcher(changed: Path, tmp_path: Path) -> Launcher:
    return Launcher(changed, tmp_path)


def test_correctness_patch_stops_the_launch_until_the_change_is_accepted(launcher: Launcher, model: Path) -> None:
    stopped = launcher.run("-c", CONFIGURE, str(model), PATCH.id)
    assert stopped.returncode == 1
    assert f"{PATCH.id} (correctness, drifted): {PATCH.target} changed (" in stopped.stderr
    assert EDIT in stopped.stderr and f"accept {PATCH.id}" in stopped.stderr
    assert "Traceback" not in stopped.stderr and "STATE" not in stopped.stdout

    explained = launcher.run("-m", "atom_patches", "explain", PATCH.id)
    assert f"+ {EDIT}" in explained.stdout, explained.stdout + explained.stderr

    drifted = [line.split()[1] for line in stopped.stderr.splitlines() if line.startswith("  - ")]
    assert PATCH.id in drifted
    for name in drifted:
        accepted = launcher.run("-m", "atom_patches", "accept", name)
        assert accepted.returncode == 0, accepted.stdout + accepted.stderr

    launched = launcher.run("-c", CONFIGURE, str(model), PATCH.id)
    assert launched.returncode == 0, launched.stderr[-3000:]
    assert "STATE applied" in launched.stdout or "STATE pending" in launched.stdout


def test_server_stops_in_the_parent_with_one_message(launcher: Launcher, model: Path) -> None:
    server = ("-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--enforce-eager", "--port", "0")
    parallel = ("--max-model-len", "64", "--skip-tokenizer-init", "--prefill-context-parallel-size", "2")
    stopped = launcher.run(*server, *parallel, VLLM_PLUGINS="atom")
    assert stopped.returncode == 1
    text = stopped.stdout + stopped.stderr
    assert text.count("atom_patches stops the launch of vllm") == 1
    assert EDIT in text
    assert "Traceback" not in text and "EngineCore" not in text.replace(PATCH.target, ""), text[-3000:]


def test_optimisation_is_stock_with_one_warning(launcher: Launcher) -> None:
    result = launcher.run("-c", OPTIMISATION)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "STATE drifted True" in result.stdout
    assert result.stderr.count("vllm.test.faster is not applied") == 1
    strict = launcher.run("-c", OPTIMISATION, ATOM_PATCHES_STRICT="1")
    assert strict.returncode == 1 and "ATOM_PATCHES_STRICT=1" in strict.stderr and "Traceback" not in strict.stderr
