"""State files: who may write them, whom a reader believes, and what a fork or an exit leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from atom_patches.core import report

PATCHES = (
    report.PatchReport("vllm.pcp.block_table", "applied", "prefill_context_parallel_size=2"),
    report.PatchReport("vllm.cpu.gdn", "inactive", "no gated delta net layer"),
)


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "state"
    monkeypatch.setenv("ATOM_PATCHES_STATE_DIR", str(path))
    monkeypatch.setattr(report, "_own", {})
    monkeypatch.setattr(report, "_kernels", [])
    return path


def publish(role: str = "worker", **changes: object) -> Path:
    fields: dict[str, object] = {"engine": "vllm", "version": "0.20.2", "config": {"tp": "1"}, "patches": PATCHES}
    return report.publish(role=role, **(fields | changes))  # type: ignore[arg-type]


def write_for(pid: int, started: str, state_dir: Path) -> Path:
    """A state file of another process: this process's, with its identity changed."""
    path = publish()
    content = json.loads(path.read_text()) | {"pid": pid, "started": started}
    path.unlink()
    other = state_dir / f"{pid}-vllm.json"
    other.write_text(json.dumps(content))
    return other


def test_a_published_report_is_read_back_whole() -> None:
    publish(notes=["late"])
    (found,) = report.processes()
    assert found.pid == os.getpid()
    assert found.roles == ("worker",)
    assert (found.engine, found.version, found.config) == ("vllm", "0.20.2", {"tp": "1"})
    assert found.patches == PATCHES
    assert found.notes == ("late",)
    assert "python" in found.title or "pytest" in found.title  # the latter where a worker of xdist names itself


def test_a_process_gathers_its_roles_and_replaces_the_rest() -> None:
    publish("api server", config={"tp": "1"})
    publish("engine core", config={"tp": "2"})
    publish("api server", config={"tp": "4"})
    (found,) = report.processes()
    assert found.roles == ("api server", "engine core")
    assert found.config == {"tp": "4"}


def test_a_process_with_both_engines_speaks_of_each() -> None:
    publish("api server")
    publish("engine", engine="sglang", version="0.5.17")
    later = (report.PatchReport("vllm.pcp.block_table", "displaced", "by someone"),)
    report.refresh("vllm", later)
    report.kernel_chosen("rms_norm", "triton", "made up")
    other, one = report.processes()
    assert (one.engine, one.roles, one.patches) == ("vllm", ("api server",), later)
    assert (other.engine, other.roles, other.patches) == ("sglang", ("engine",), PATCHES)
    assert [kernel.operation for kernel in (*one.kernels, *other.kernels)] == ["rms_norm"] * 2
    report.withdraw()
    assert report.processes() == []


def test_a_refresh_keeps_who_and_replaces_what() -> None:
    publish("worker", notes=["old"])
    later = (report.PatchReport("vllm.pcp.block_table", "displaced", "by someone"),)
    report.refresh("sglang", later)
    assert report.processes()[0].patches == PATCHES
    report.refresh("vllm", later, ["new"])
    (found,) = report.processes()
    assert (found.roles, found.config) == (("worker",), {"tp": "1"})
    assert (found.patches, found.notes) == (later, ("new",))


def test_a_process_that_published_nothing_has_nothing_to_refresh(state_dir: Path) -> None:
    report.refresh("vllm", PATCHES)
    assert not state_dir.exists()


def test_directory_and_files_are_private(state_dir: Path) -> None:
    path = publish()
    assert state_dir.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o077 == 0
    assert [entry.name for entry in state_dir.iterdir()] == [f"{os.getpid()}-vllm.json"]


def test_a_directory_open_to_others_is_refused(state_dir: Path) -> None:
    state_dir.mkdir()
    state_dir.chmod(0o755)
    with pytest.raises(report.StateDirError, match=r"0755, not 0700.*ATOM_PATCHES_STATE_DIR"):
        publish()
    with pytest.raises(report.StateDirError):
        report.processes()


def test_a_directory_that_was_refused_does_not_end_a_step_later(state_dir: Path) -> None:
    """Whoever publishes is told; what else happens to be reported then has no file, and raises nothing."""
    state_dir.mkdir(mode=0o755)
    with pytest.raises(report.StateDirError):
        publish()
    report.kernel_chosen("rms_norm", "triton", "made up")
    report.refresh("vllm", PATCHES)
    report._kernels.clear()


def test_a_symbolic_link_is_refused(state_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    state_dir.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(report.StateDirError, match="not a directory"):
        publish()


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(state_dir: Path) -> None:
    state_dir.mkdir(mode=0o700)
    os.chown(state_dir, 12345, -1)
    with pytest.raises(report.StateDirError, match="belongs to user 12345"):
        publish()


def test_a_place_that_cannot_be_created_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATOM_PATCHES_STATE_DIR", str(tmp_path / "file" / "state"))
    with pytest.raises(report.StateDirError, match="cannot be created"):
        publish()


def test_default_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ATOM_PATCHES_STATE_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert report.directory() == tmp_path / "atom_patches"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert report.directory() == tmp_path / f"atom_patches-{os.getuid()}"


def test_a_dead_process_is_forgotten(state_dir: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    started = report.start_time(ended.pid) or "1"
    ended.wait()
    path = write_for(ended.pid, started, state_dir)
    assert report.processes() == []
    assert not path.exists()


def test_a_zombie_is_dead(state_dir: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE)
    started = report.start_time(child.pid) or "1"
    assert child.stdout is not None
    child.stdout.read()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    write_for(child.pid, started, state_dir)
    assert report.processes() == []
    child.wait()


def test_a_recycled_pid_is_not_believed(state_dir: Path) -> None:
    parent = os.getppid()
    write_for(parent, "1", state_dir)
    assert report.processes() == []
    write_for(parent, report.start_time(parent) or "", state_dir)
    assert [found.pid for found in report.processes()] == [parent]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 0}'])
def test_a_file_in_another_format_is_ignored(state_dir: Path, text: str) -> None:
    publish()
    (state_dir / "1.json").write_text(text)
    assert [found.pid for found in report.processes()] == [os.getpid()]


def test_withdraw_removes_the_file_and_forgets_the_roles(state_dir: Path) -> None:
    publish("api server")
    report.withdraw()
    assert list(state_dir.iterdir()) == []
    publish("worker")
    assert report.processes()[0].roles == ("worker",)


def run_python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True, timeout=60
    )
    return result.stdout


PUBLISH = """
from atom_patches.core import report
def publish(role):
    report.publish(role=role, engine="vllm", version="0", config={}, patches=[])
"""


def test_an_ordinary_exit_removes_the_file(state_dir: Path) -> None:
    run_python(PUBLISH + "publish('worker'); assert len(report.processes()) == 1")
    assert list(state_dir.iterdir()) == []


def test_a_forked_child_reports_itself_and_spares_its_parent(state_dir: Path) -> None:
    code = """
    import os
    publish('api server')
    child = os.fork()
    if child == 0:
        assert [r.roles for r in report.processes()] == [('api server',)], 'not configured yet: no report'
        publish('worker')
        print(sorted(r.roles for r in report.processes()), flush=True)
        report.withdraw()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print([r.roles for r in report.processes()])
    """
    output = run_python(PUBLISH + textwrap.dedent(code))
    assert output.splitlines() == ["[('api server',), ('worker',)]", "[('api server',)]"]
    assert list(state_dir.iterdir()) == []


def test_a_killed_process_leaves_a_file_that_nobody_believes(state_dir: Path) -> None:
    code = PUBLISH + "publish('worker'); import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert len(list(state_dir.iterdir())) == 1
    assert report.processes() == []
    assert list(state_dir.iterdir()) == []


def test_the_start_time_survives_a_process_name_with_spaces_and_brackets() -> None:
    script = "import ctypes; ctypes.CDLL(None).prctl(15, b'a) S 1 (b'); print('ready', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    ticks = int(report.start_time(child.pid) or 0)
    assert ticks >= int(report.start_time(os.getpid()) or 0) > 0
    child.stdin.write("\n")
    child.stdin.close()
    child.wait()
