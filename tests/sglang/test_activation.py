"""However the overlay is armed, `status` sees every process of a running SGLang; what is needed and missing stops it.

Each way starts one engine, and all assertions read the one status that was taken while it ran.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import installed
from tests import running as engines
from tests.running import Running, Way, states
from tests.sglang.engines import free_ports

pytestmark = pytest.mark.long

CUDA_ARGS: dict[str, Any] = {"dtype": "bfloat16", "mem_fraction_static": 0.2}
CPU_ARGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.3,
    "max_mamba_cache_size": 16,
}

OFFLINE = """
import json, sys

def main():  # a spawned child imports this module, but does not run this function
    {main_starts_with}
    import sglang
    engine = sglang.Engine(**json.loads({arguments!r}))
    wanted = {{"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}}
    out = engine.generate(input_ids=[[1, 2, 3]], sampling_params=wanted)
    assert len(out[0]["output_ids"]) == 2
    print("READY", flush=True)
    sys.stdin.readline()
    engine.shutdown()

if __name__ == "__main__":
    main()
"""

HOOKS = {
    "engine": "server_args",
    "tokenizer manager": "tokenizer_manager",
    "data parallel controller": "data_parallel_controller",
    "scheduler": "scheduler",
    "model runner": "model_runner",
    "detokenizer": "detokenizer",
    "detokenizer router": "detokenizer_router",
}
"""Roles of processes, and the hook that each one is known by."""

MAIN = ("engine", "tokenizer manager")
RANK = ("scheduler", "model runner")

WAYS = (
    Way(
        "SGLANG_PLUGINS=atom",
        (MAIN, ("data parallel controller",), RANK, RANK, ("detokenizer",)),
        {"SGLANG_PLUGINS": "atom", "ATOM_MODELS": "1"},
        checkpoint="qwen3_5",
        options={"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
    ),
    Way("import atom_patches", (MAIN, RANK, ("detokenizer",)), main_starts_with="import atom_patches"),
    Way(
        "atom_patches run",
        (
            *(("engine",), ("tokenizer manager",), ("tokenizer manager",)),
            *(RANK, ("detokenizer",), ("detokenizer",), ("detokenizer router",)),
        ),
        options={"tokenizer_worker_num": 2, "detokenizer_worker_num": 2},
        serves=True,
    ),
)


def arguments(model: str, **options: Any) -> dict[str, Any]:
    import torch

    small = {
        "model_path": model,
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
        "max_total_tokens": 2048,
        "max_running_requests": 8,
        "context_length": 256,
        "random_seed": 0,
        "log_level": "warning",
    }
    return small | (CUDA_ARGS if torch.cuda.is_available() else CPU_ARGS) | options


def environment(state: Path, **changes: str) -> dict[str, str]:
    extra = {"SGLANG_MAMBA_CONV_DTYPE": "float32", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    return engines.environment(state, **extra, **changes)


def script(model: str, main_starts_with: str = "pass", **options: Any) -> str:
    return OFFLINE.format(arguments=json.dumps(arguments(model, **options)), main_starts_with=main_starts_with)


def server_command(model: str, port: int, **options: Any) -> list[str]:
    """The HTTP server, armed by the package's own launcher."""
    given = arguments(model, port=port, host="127.0.0.1", skip_tokenizer_init=False, **options)
    command = [sys.executable, "-m", "atom_patches", "run", "--", sys.executable, "-m", "sglang.launch_server"]
    return command + [part for name, value in given.items() for part in option(name, value)]


def option(name: str, value: Any) -> list[str]:
    """An argument of `Engine` on the command line; a switch that is off is left out."""
    flag = f"--{name.replace('_', '-')}"
    return [flag, str(value)] if not isinstance(value, bool) else [flag] * value


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: way.name)
def running(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Running:
    way: Way = request.param
    model = str(checkpoint(way.checkpoint))
    folder = tmp_path_factory.mktemp("way")
    state = folder / "state"
    env = environment(state, **way.environment)
    if way.serves:
        port = free_ports()
        command = server_command(model, port, **way.options)
        started = engines.server(command, port, folder, env, stop=False)  # with tokenizer workers SIGTERM ends nothing
    else:
        started = engines.script(script(model, way.main_starts_with, **way.options), folder, env)
    return engines.watch(way, started, state, environment(state))


def test_every_process_is_seen_with_its_role(running: Running) -> None:
    found = sorted(tuple(process["roles"]) for process in running.processes)
    assert found == sorted(running.way.roles)


def test_the_process_that_was_started_is_the_engine(running: Running) -> None:
    assert running.pids("engine") == [running.pid]


def test_each_process_names_itself_its_engine_and_its_options(running: Running) -> None:
    ranks = str(running.way.options.get("dp_size", 1))
    for process in running.processes:
        assert (process["engine"], process["version"]) == ("sglang", engines.version(running, "sglang"))
        assert (process["config"]["tp_size"], process["config"]["dp_size"]) == (ranks, ranks)
        for role in set(process["roles"]) - set(MAIN):
            assert f"sglang::{role.replace(' ', '_')}" in process["title"] or role == "model runner"


def test_each_process_has_a_state_and_a_reason_for_every_patch_of_its_engine(running: Running) -> None:
    engines.check_every_patch(running, "sglang")


def test_each_process_has_the_hook_of_its_role(running: Running) -> None:
    for process in running.processes:
        found = states(process)
        for role in process["roles"]:
            assert found[f"sglang.bootstrap.{HOOKS[role]}"] == "applied"
        assert not set(found.values()) & {"failed", "displaced", "drifted", "unsupported"}


def test_schedulers_have_the_decoders_that_were_asked_for(running: Running) -> None:
    asked = running.way.environment.get("ATOM_MODELS") == "1"
    for process in running.processes:
        expected = {"applied"} if "scheduler" in process["roles"] else {"applied", "pending"}
        assert states(process)["sglang.models.registry"] in (expected if asked else {"inactive"})


def test_doctor_has_no_objection(running: Running) -> None:
    assert running.doctor.returncode == 0, running.doctor.stdout


def test_nothing_is_left_of_a_stopped_engine(running: Running) -> None:
    assert running.status_afterwards["processes"] == []


# What must not go on


def run(code: str, state: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    state.mkdir(mode=0o700, exist_ok=True)
    script = state.parent / "script.py"
    script.write_text(code)
    given = environment(state, **changes)
    return subprocess.run(
        [sys.executable, str(script)], env=given, capture_output=True, text=True, timeout=400, check=False
    )


UNARMED = """
import sys
from sglang.srt.plugins import load_plugins
load_plugins()
import sglang.srt.managers.scheduler as scheduler
print("atom_patches" in sys.modules, scheduler.Scheduler.__init__.__code__.co_filename)
"""


@pytest.mark.parametrize("plugins", [{}, {"SGLANG_PLUGINS": "other"}])
def test_installed_is_not_armed(plugins: dict[str, str], tmp_path: Path) -> None:
    result = run(UNARMED, tmp_path / "state", **plugins)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[0] == "False" and result.stdout.rstrip().endswith("managers/scheduler.py")


BAD_SETTING = """
import os
os.environ["ATOM_PATCHES"] = "yes"
from sglang.srt.plugins import load_plugins
load_plugins()
print("GOING ON")
"""


def test_a_plugin_that_cannot_arm_ends_the_process(tmp_path: Path) -> None:
    """SGLang logs what a plugin raises and goes on without it."""
    result = run(BAD_SETTING, tmp_path / "state", SGLANG_PLUGINS="atom")
    assert result.returncode == 1 and "GOING ON" not in result.stdout
    assert "atom_patches cannot be armed" in result.stderr and "'yes'" in result.stderr


REQUIRED = """
import json, psutil
import sglang
from atom_patches.core import PatchError

def main():
    try:
        sglang.Engine(**json.loads({arguments!r}))
    except PatchError as error:
        print("STOPPED", psutil.Process().children(recursive=True), error)

if __name__ == "__main__":
    main()
"""


def test_required_and_impossible_stops_in_the_parent(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    given = json.dumps(arguments(str(checkpoint("qwen3"))))
    changes = {"ATOM_PATCHES": "1", "ATOM_MODELS": "llama", "ATOM_PATCH_SGLANG_MODELS": "1"}
    result = run(REQUIRED.format(arguments=given), tmp_path / "state", **changes)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "STOPPED [] atom_patches stops the launch of sglang" in result.stdout
    assert "ATOM_PATCH_SGLANG_MODELS=1 requires it" in result.stdout


FAILS_LATE = '''"""Cannot be built, which shows only when its target is imported."""

from atom_patches.core import Patch, Verdict

PATCH = Patch(
    id="sglang.trial.late",
    target="sglang.srt.models.qwen3:Qwen3ForCausalLM.forward",
    supports="sglang>=0.5.17,<0.5.18",
    kind="correctness",
    when=lambda config: Verdict(True, "always"),
)


@PATCH.around
def forward(original):
    raise ImportError("no adapter for this")
'''


@pytest.fixture
def with_a_patch_that_fails_late(tmp_path: Path) -> Path:
    """A folder to put on the path: this package, with one patch more."""
    package = tmp_path / "changed" / "atom_patches"
    link_all(Path(installed.__file__).parents[1] / "atom_patches", package, real=("sglang",))
    (package / "sglang" / "trial").mkdir()
    (package / "sglang" / "trial" / "__init__.py").write_text("")
    (package / "sglang" / "trial" / "late.py").write_text(FAILS_LATE)
    return package.parent


def link_all(folder: Path, copy: Path, real: tuple[str, ...] = ()) -> None:
    """Links to everything in a folder; the folders named `real` are folders of links themselves."""
    copy.mkdir(parents=True)
    for entry in folder.iterdir():
        if entry.name in real:
            link_all(entry, copy / entry.name)
        elif entry.name != "__pycache__":
            (copy / entry.name).symlink_to(entry)


def test_failure_in_an_import_that_sglang_survives_stops_the_engine(
    with_a_patch_that_fails_late: Path, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """SGLang takes a model that cannot be imported for one that does not exist, and serves it by a fallback."""
    path = [str(with_a_patch_that_fails_late), environment(tmp_path)["PYTHONPATH"]]
    changes = {"PYTHONPATH": os.pathsep.join(path), "ATOM_PATCHES_ACCEPTED": str(tmp_path / "accepted.json")}
    accept = [sys.executable, "-m", "atom_patches", "accept", "sglang.trial.late"]
    given = environment(tmp_path / "state", **changes)
    subprocess.run(accept, env=given, cwd=tmp_path, check=True, capture_output=True)  # not in the checkout
    result = run(script(str(checkpoint("qwen3"))), tmp_path / "state", SGLANG_PLUGINS="atom", **changes)
    said = result.stdout + result.stderr
    survived = r"Ignore import error when loading [\w.]+: atom_patches stops the launch"
    assert re.search(survived, said), said[-4000:]
    assert result.returncode != 0 and "READY" not in said, said[-4000:]
    assert "Scheduler hit an exception" in said and "no adapter for this" in said
