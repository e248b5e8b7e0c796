"""Whichever way the overlay is armed, `status` sees every process of a running engine; unarmed, it sees none.

Each way starts one engine, and all assertions read the one status that was taken while it ran.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import running as engines
from tests.running import Running, Way, states
from tests.vllm.gdn_oracle import free_port

OFFLINE = """
import sys

def main():  # a spawned child imports this module, but does not run this function
    {main_starts_with}
    from vllm import LLM, SamplingParams
    llm = LLM(model={model!r}, enforce_eager=True, max_model_len=256, max_num_seqs=2, dtype="float32")
    wanted = SamplingParams(max_tokens=2, temperature=0, detokenize=False)
    out = llm.generate([{{"prompt_token_ids": [1, 2, 3]}}], wanted)
    assert len(out[0].outputs[0].token_ids) == 2
    print("READY", flush=True)
    sys.stdin.readline()

if __name__ == "__main__":
    main()
"""

OF_ONE_RANK = (("api server",), ("engine core",), ("worker",))

WAYS = (
    Way("VLLM_PLUGINS=atom", (*OF_ONE_RANK, ("worker",)), {"VLLM_PLUGINS": "atom"}, serves=True),
    Way("ATOM_PATCHES=1", OF_ONE_RANK, {"ATOM_PATCHES": "1"}),
    Way("import atom_patches", OF_ONE_RANK, main_starts_with="import atom_patches"),
    Way("nothing", (), {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
)


def server_command(model: str, port: int) -> list[str]:
    """The OpenAI-compatible server with two prefill-context-parallel workers."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "2"]
    return [*command, "--dtype", "float32", "--prefill-context-parallel-size", "2"]


#: The children of a process that imported the package are armed in the same way.
SELDOM = ("ATOM_PATCHES=1",)
PARAMS = [pytest.param(way, id=way.name, marks=[pytest.mark.long] * (way.name in SELDOM)) for way in WAYS]


@pytest.fixture(scope="module", params=PARAMS)
def running(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Running:
    way: Way = request.param
    model = str(checkpoint(way.checkpoint))
    folder = tmp_path_factory.mktemp("way")
    state = folder / "state"
    env = engines.environment(state, VLLM_CPU_OMP_THREADS_BIND="0|1" if way.serves else "0", **way.environment)
    if way.serves:
        port = free_port()
        started = engines.server(server_command(model, port), port, folder, env)
    else:
        code = OFFLINE.format(model=model, main_starts_with=way.main_starts_with)
        started = engines.script(code, folder, env)
    return engines.watch(way, started, state, engines.environment(state))


def test_every_process_is_seen_with_its_role(running: Running) -> None:
    found = sorted(tuple(process["roles"]) for process in running.processes)
    assert found == sorted(running.way.roles)


def test_the_process_that_was_started_is_the_api_server(running: Running) -> None:
    assert running.pids("api server") == ([running.pid] if running.way.roles else [])


def test_each_process_names_itself_its_engine_and_its_options(running: Running) -> None:
    size = "2" if running.way.serves else "1"
    for process in running.processes:
        assert (process["engine"], process["version"]) == ("vllm", engines.version(running, "vllm"))
        assert process["config"]["prefill_context_parallel_size"] == size
        if "engine core" in process["roles"]:
            assert "EngineCore" in process["title"]
        elif "worker" in process["roles"]:
            assert "Worker" in process["title"]


def test_each_process_has_a_state_and_a_reason_for_every_patch_of_its_engine(running: Running) -> None:
    engines.check_every_patch(running, "vllm")


def test_a_feature_is_applied_where_it_is_needed_and_nowhere_else(running: Running) -> None:
    """`block_table` belongs to the workers; `kv_cache_manager` to the engine core, which has the scheduler."""
    for process in running.processes:
        found = states(process)
        if not running.way.serves:
            assert found["vllm.pcp.block_table"] == "inactive"
        elif "worker" in process["roles"]:
            assert found["vllm.pcp.block_table"] == "applied"
        elif "engine core" in process["roles"]:
            assert found["vllm.pcp.kv_cache_manager"] == "applied"


def test_the_text_form_names_every_process(running: Running) -> None:
    for process in running.processes:
        assert f"{process['pid']}  {', '.join(process['roles'])}" in running.text
    if not running.way.roles:
        assert "none that was handed an engine's configuration" in running.text


def test_doctor_is_content(running: Running) -> None:
    assert (running.doctor.returncode, running.doctor.stderr) == (0, "")
    assert running.doctor.stdout.endswith("doctor: no problems\n")


def test_no_process_holds_on_to_an_original(running: Running) -> None:
    notes = [note for process in running.processes for note in process["notes"]]
    assert [note for note in notes if "still held by" in note] == []


def test_nothing_is_left_after_the_engine_has_stopped(running: Running) -> None:
    assert running.status_afterwards["processes"] == []
    assert running.files_afterwards == []
