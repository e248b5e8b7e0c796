"""The command line, on an engine made up for the test: a package on disk, with patches declared for it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from atom_patches.cli import catalogue, doctor, main
from atom_patches.core import late, report
from atom_patches.core.engine import Engine
from tools import startup

UPSTREAM = '''
def scale(value):
    """Twice the value."""
    factor = 2
    return value * factor


def shift(value):
    return value + 1
'''

DECLARATION = '''
"""Scale by three.

Why:         two is too little.
How:         replace the function.
Remove when: upstream scales by three.
"""
from atom_patches.core import Patch, Verdict


def wanted(config):
    """Whether the configuration asks for three."""
    return Verdict(config == 3, f"scale={config}")


PATCH = Patch(
    id="mill.grind.scale",
    target="mill.stones:scale",
    supports="mill>=1.0,<2",
    kind="correctness",
    group="mill.grind",
    when=wanted,
    relies_on=("mill.stones:shift",),
    upstream="mill/mill#7",
)


@PATCH.around
def scale(original):
    def scale(value):
        return value * 3

    return scale
'''


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("ATOM", "VLLM_", "SGLANG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ATOM_PATCHES_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("ATOM_PATCHES_ACCEPTED", str(tmp_path / "accepted.json"))
    monkeypatch.setattr(report, "_own", {})


class Mill:
    """An installed engine whose source and version a test may change."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.source = root / "mill" / "stones.py"
        self.declarations = root / "mill_patches"
        for folder in (root / "mill", self.declarations, self.declarations / "grind"):
            folder.mkdir(parents=True)
            (folder / "__init__.py").write_text("")
        self.source.write_text(UPSTREAM)
        (self.declarations / "grind" / "scale.py").write_text(DECLARATION)
        self.release("1.4.0")
        self.engine = Engine(
            name="mill",
            package="mill",
            distributions=("mill",),
            declarations="mill_patches",
            bind_cache_key=lambda config, active: None,
            describe=lambda config: {"scale": str(config)},
        )

    def release(self, version: str) -> None:
        add_distribution(self.root, "mill", version)

    def edit(self, old: str, new: str) -> None:
        text = self.source.read_text()
        assert old in text
        self.source.write_text(text.replace(old, new))


def add_distribution(folder: Path, name: str, version: str, entry_points: str = "") -> None:
    for stale in folder.glob(f"{name.replace('-', '_')}-*.dist-info"):
        for file in stale.iterdir():
            file.unlink()
        stale.rmdir()
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entry_points:
        (info / "entry_points.txt").write_text(textwrap.dedent(entry_points))


@pytest.fixture
def mill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mill]:
    made = Mill(tmp_path / "mill_site")
    monkeypatch.syspath_prepend(str(made.root))
    monkeypatch.setattr(catalogue, "engines", lambda: [made.engine])
    yield made
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mill", "mill_patches")]:
        del sys.modules[name]


@pytest.fixture
def reviewed(mill: Mill, capsys: pytest.CaptureFixture[str]) -> Mill:
    """The engine, with the fingerprints of its present source shipped."""
    assert main(["accept", "--ship", "mill.grind"]) == 0
    capsys.readouterr()
    return mill


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process: exit status, output, errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def standing(run: Run) -> Mapping[str, Any]:
    status, out, _ = run("status", "--json")
    assert status == 0
    (patch,) = json.loads(out)["patches"]
    return patch


# status


def test_status_of_a_reviewed_engine(reviewed: Mill, run: Run) -> None:
    status, out, _ = run("status", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["engines"] == [
        {
            "name": "mill",
            "installed": True,
            "version": "1.4.0",
            "distribution": "mill",
            "location": str(reviewed.root / "mill"),
        }
    ]
    (patch,) = found["patches"]
    assert patch["id"] == "mill.grind.scale"
    assert patch["variable"] == "ATOM_PATCH_MILL_GRIND"
    assert (patch["state"], patch["reason"]) == ("pending", "the source of mill 1.4.0 is as reviewed")
    assert found["processes"] == []
    assert "mill" not in sys.modules


def test_status_says_when_the_environment_switches_a_patch_off(
    reviewed: Mill, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOM_PATCH_MILL_GRIND", "0")
    assert (standing(run)["state"], standing(run)["reason"]) == ("off", "ATOM_PATCH_MILL_GRIND=0")
    monkeypatch.setenv("ATOM_PATCHES", "0")
    assert standing(run)["reason"] == "ATOM_PATCHES=0"


def test_status_without_the_engine(mill: Mill, run: Run) -> None:
    mill.engine = Engine(**{**vars(mill.engine), "package": "mill_that_is_missing", "distributions": ("nonsuch",)})
    status, out, _ = run("status", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["engines"][0] | {"installed": False, "version": None, "location": None} == found["engines"][0]
    assert found["patches"][0]["reason"] == "mill is not installed in this environment"
    assert "mill  not installed" in run("status")[1]


def test_the_version_of_a_source_tree_is_read_from_its_version_file(mill: Mill, run: Run) -> None:
    mill.engine = Engine(**{**vars(mill.engine), "distributions": ("nonsuch",)})
    (mill.root / "mill" / "_version.py").write_text(
        "version: str\n__version__: str\n__version__ = version = '1.5.0.dev3+gabc'\n"
    )
    assert json.loads(run("status", "--json")[1])["engines"][0]["version"] == "1.5.0.dev3+gabc"


def publish(role: str, state: str = "applied", notes: tuple[str, ...] = ()) -> None:
    report.publish(
        role=role,
        engine="mill",
        version="1.4.0",
        config={"scale": "3"},
        patches=[report.PatchReport("mill.grind.scale", state, "scale=3")],
        notes=notes,
    )


def test_status_shows_running_processes(reviewed: Mill, run: Run) -> None:
    publish("worker")
    (process,) = json.loads(run("status", "--json")[1])["processes"]
    assert process["pid"] == os.getpid()
    assert process["roles"] == ["worker"]
    assert process["config"] == {"scale": "3"}
    assert process["patches"] == [{"id": "mill.grind.scale", "state": "applied", "reason": "scale=3"}]
    text = run("status")[1]
    assert re.search(rf"{os.getpid()}  worker  \(mill 1.4.0\)", text)
    assert re.search(r"applied +scale=3\n +mill.grind.scale", text)


def test_status_refuses_state_files_that_prove_nothing(reviewed: Mill, run: Run, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o755)
    status, out, err = run("status")
    assert (status, out) == (1, "")
    assert "is open to others" in err


# explain and accept: the drift drill


def test_explain_tells_why_how_and_until_when(reviewed: Mill, run: Run) -> None:
    status, out, _ = run("explain", "mill.grind.scale")
    assert status == 0
    for text in (
        "Why:         two is too little.",
        "Remove when: upstream scales by three.",
        "mill.stones:scale",
        "mill>=1.0,<2",
        "Whether the configuration asks for three.",
        "ATOM_PATCH_MILL_GRIND, now auto",
        "mill/mill#7",
        "as reviewed in 1.4.0",
    ):
        assert text in out


def test_drift_is_shown_with_its_line_and_accepted_after_review(reviewed: Mill, run: Run) -> None:
    reviewed.edit("factor = 2", "factor = 4")

    patch = standing(run)
    assert patch["state"] == "drifted"
    assert "mill.stones:scale changed" in patch["reason"]
    assert run("doctor")[0] == 1

    _, explained, _ = run("explain", "mill.grind.scale")
    assert "changed since 1.4.0" in explained
    assert re.search(r"stones\.py:4: \+ factor = 4", explained)
    assert "shift  " in explained and "as reviewed in 1.4.0" in explained

    status, out, _ = run("accept", "mill.grind.scale")
    assert status == 0
    assert "mill.stones:scale" in out and "mill.stones:shift" not in out
    assert standing(run)["state"] == "pending"
    assert run("doctor")[:2] == (0, "doctor: no problems\n")
    assert "nothing to accept" in run("accept", "mill.grind.scale")[1]
    again = json.loads(run("accept", "mill.grind.scale", "--json")[1])
    assert (again["id"], again["accepted"]) == ("mill.grind.scale", [])
    shipped = json.loads(run("accept", "--ship", "mill.grind.scale", "--json")[1])
    assert "mill.stones:scale" in shipped["accepted"] and shipped["file"].endswith(".json")


def test_drift_of_what_a_patch_relies_on_counts(reviewed: Mill, run: Run) -> None:
    reviewed.edit("value + 1", "value + 2")
    patch = standing(run)
    assert patch["state"] == "drifted"
    assert "mill.stones:shift" in patch["reason"]


def test_comments_docstrings_and_layout_are_no_drift(reviewed: Mill, run: Run) -> None:
    reviewed.edit('"""Twice the value."""', '"""Double it."""  # really')
    reviewed.edit("return value * factor", "\n    # over two lines\n    return (value\n            * factor)")
    assert standing(run)["state"] == "drifted"  # the brackets are tokens of their own
    reviewed.edit("return (value\n            * factor)", "return value  *  factor")
    assert standing(run)["state"] == "pending"


def test_an_unreviewed_version_with_unknown_source_is_unsupported(reviewed: Mill, run: Run) -> None:
    reviewed.release("2.0.0")
    assert standing(run)["state"] == "pending"  # the source outranks the version
    reviewed.edit("factor = 2", "factor = 4")
    patch = standing(run)
    assert patch["state"] == "unsupported"
    status, out, _ = run("doctor")
    assert status == 1
    assert "mill 2.0.0 has a version that was not reviewed for 1 patch(es): mill.grind.scale" in out


def test_a_target_that_is_gone_cannot_be_accepted(reviewed: Mill, run: Run) -> None:
    reviewed.edit("def scale", "def rescale")
    assert standing(run)["state"] == "drifted"
    assert "gone" in run("explain", "mill.grind.scale")[1]
    status, _, err = run("accept", "mill.grind.scale")
    assert status == 1
    assert "cannot be accepted" in err and "mill>=1.0,<2" in err


@pytest.mark.parametrize("command", ["explain", "accept"])
@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("mill.grind.scael", "mill.grind.scale"),
        ("mill.gridn", "mill.grind"),
        ("grind.scale", "mill.grind.scale"),
    ],
)
def test_a_misspelt_id_gets_the_nearest_one(reviewed: Mill, run: Run, command: str, typed: str, meant: str) -> None:
    status, out, err = run(command, typed)
    assert (status, out) == (1, "")
    assert repr(typed) in err and f"did you mean {meant}?" in err


# doctor


def test_doctor_says_who_serves_the_kernels_of_a_process(
    reviewed: Mill, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_kernels", [])
    report.publish(role="worker", engine="mill", version="1.4.0", config={}, patches=())
    report.kernel_chosen("rms_norm", "triton", "the fastest of those measured")
    try:
        status, out, _ = run("doctor")
        processes = json.loads(run("status", "--json")[1])["processes"]
    finally:
        report.withdraw()
    assert status == 0
    assert "kernel rms_norm is served by triton: the fastest of those measured" in out
    assert processes[0]["kernels"] == [
        {"operation": "rms_norm", "provider": "triton", "reason": "the fastest of those measured"}
    ]


def test_doctor_finds_nothing_wrong(reviewed: Mill, run: Run) -> None:
    assert run("doctor") == (0, "doctor: no problems\n", "")


def test_doctor_finds_a_second_install(
    reviewed: Mill, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_distribution(tmp_path / "other", "atom-patches", "0.0.9")
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    status, out, _ = run("doctor")
    assert status == 1
    assert "atom-patches is installed 2 times" in out and str(tmp_path / "other") in out


def test_doctor_finds_a_missing_pth_file(reviewed: Mill, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_is_site", lambda folder: False)
    status, out, _ = run("doctor")
    assert status == 1
    assert "atom_patches.pth" in out and "Install the package with pip" in out


def test_doctor_finds_the_other_plugin_called_atom(
    reviewed: Mill, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry_points = """
        [vllm.platform_plugins]
        atom = atom.plugin.vllm.register:register_platform
        [vllm.general_plugins]
        atom_model_registry = atom.plugin.vllm.register:register_model
    """
    add_distribution(tmp_path / "other", "atom", "1.0", entry_points)
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    status, out, _ = run("doctor")
    assert status == 1
    assert "atom has a plugin called 'atom' in vllm.platform_plugins" in out
    assert out.count("problem:") == 1


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("VLLM_PLUGINS", "atm", "'atm', which is not an installed plugin and is ignored; did you mean 'atom'?"),
        ("VLLM_PLUGINS", "atom-patches", "did you mean 'atom'?"),
        ("VLLM_PLUGINS", "mine, atom", "VLLM_PLUGINS names ' atom', with white space"),
        ("SGLANG_PLUGINS", "atomm", "SGLANG_PLUGINS names 'atomm'"),
        ("VLLM_PLUGIN", "atom", "VLLM_PLUGIN is not a variable of the engine; did you mean VLLM_PLUGINS?"),
        ("SGLANG_PLUGIN", "atom", "did you mean SGLANG_PLUGINS?"),
        ("ATOM_PATCH_MILL_GRNID", "1", "did you mean ATOM_PATCH_MILL_GRIND?"),
        ("ATOM_PATCHES", "on", "ATOM_PATCHES='on' is not allowed"),
        ("ATOM_PATCHES_STATE_DIR", "here", "is a relative path"),
    ],
)
def test_doctor_finds_misspelt_names(
    reviewed: Mill, run: Run, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, expected: str
) -> None:
    monkeypatch.setenv(variable, value)
    status, out, _ = run("doctor")
    assert status == 1
    assert expected in out


def test_doctor_names_plugins_that_a_list_shuts_out(
    reviewed: Mill, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_distribution(tmp_path / "other", "theirs", "1.0", "[vllm.general_plugins]\ntheirs = theirs:register\n")
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    monkeypatch.setenv("VLLM_PLUGINS", "atom")
    status, out, _ = run("doctor")
    assert status == 0
    assert re.search(r"note: VLLM_PLUGINS=atom shuts out other installed plugins: .*theirs", out)
    monkeypatch.setenv("VLLM_PLUGINS", "theirs")
    assert "note: VLLM_PLUGINS=theirs shuts atom_patches out" in run("doctor")[1]
    monkeypatch.setenv("ATOM_PATCHES", "1")
    assert "shuts atom_patches out" not in run("doctor")[1]


def test_doctor_finds_an_engine_that_was_built_before_arming(reviewed: Mill, run: Run) -> None:
    publish(late.ROLE, "pending", ("mill had built an engine before",))
    status, out, _ = run("doctor")
    assert status == 1
    assert f"process {os.getpid()} (armed too late): mill had built an engine before" in out


@pytest.mark.parametrize("state", ["failed", "displaced", "drifted", "unsupported"])
def test_doctor_finds_patches_in_trouble(reviewed: Mill, run: Run, state: str) -> None:
    publish("worker", state)
    status, out, _ = run("doctor")
    assert status == 1
    assert f"mill.grind.scale is {state}: scale=3" in out


def test_doctor_passes_on_notes_of_processes(reviewed: Mill, run: Run) -> None:
    publish("worker", notes=("a subclass is not patched",))
    status, out, _ = run("doctor")
    assert status == 0
    assert "note: process" in out and "a subclass is not patched" in out


# run, and the command line as a process


def atom_patches(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    environment = startup.environment(ATOM_PATCHES_STATE_DIR=os.environ["ATOM_PATCHES_STATE_DIR"], **changes)
    return subprocess.run(
        [sys.executable, "-m", "atom_patches", *arguments],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_run_becomes_the_armed_command() -> None:
    code = "import os, sys; print(os.environ['ATOM_PATCHES'], 'atom_patches' in sys.modules); sys.exit(7)"
    result = atom_patches("run", "--", sys.executable, "-c", code)
    assert (result.returncode, result.stdout, result.stderr) == (7, "1 True\n", "")


def test_run_passes_options_of_the_command_through() -> None:
    result = atom_patches("run", "--", "echo", "--help", "--", "-x")
    assert (result.returncode, result.stdout) == (0, "--help -- -x\n")


@pytest.mark.parametrize(
    ("arguments", "changes", "expected"),
    [
        ((), {}, "run needs a command"),
        (("--", "no-such-command"), {}, "there is no command 'no-such-command'"),
        (("--", "echo", "ran"), {"ATOM_PATCHES": "0"}, "ATOM_PATCHES=0 keeps everything off"),
        (("--", "echo", "ran"), {"ATOM_PATCHES": "yes"}, "ATOM_PATCHES='yes' is not allowed"),
        (("--", "echo", "ran"), {"ATOM_PATCH_VLLM_PPC": "1"}, "did you mean ATOM_PATCH_VLLM_PCP?"),
    ],
)
def test_run_refuses_before_starting_anything(
    arguments: tuple[str, ...], changes: dict[str, str], expected: str
) -> None:
    result = atom_patches("run", *arguments, **changes)
    assert (result.returncode, result.stdout) == (1, "")
    assert expected in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("shebang", [False, True], ids=["interpreter", "script"])
def test_run_refuses_a_python_without_the_package(tmp_path: Path, shebang: bool) -> None:
    """`python3` stands for an interpreter of another environment: it never has the package armed."""
    other = tmp_path / "python3"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    other.chmod(0o755)
    command = other
    if shebang:
        command = tmp_path / "serve"
        command.write_text(f"#!{other}\nprint('ran')\n")
        command.chmod(0o755)
    result = atom_patches("run", "--", str(command), "-c", "print('ran')")
    assert (result.returncode, result.stdout) == (1, "")
    assert "atom_patches is not installed" in result.stderr


def test_the_command_line_neither_arms_itself_nor_imports_an_engine() -> None:
    code = """
import runpy, sys
sys.argv = ["atom_patches", "status"]
try:
    runpy.run_module("atom_patches", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert end.code == 0, end.code
import os
from atom_patches import arming
print(arming.armed(), "ATOM_PATCHES" in os.environ, [m for m in ("torch", "vllm", "sglang") if m in sys.modules])
"""
    environment = startup.environment(ATOM_PATCHES_STATE_DIR=os.environ["ATOM_PATCHES_STATE_DIR"])
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd="/", capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.splitlines()[-1] == "False False []"


def test_every_declared_patch_has_a_state_and_a_reason() -> None:
    result = atom_patches("status", "--json")
    assert result.returncode == 0, result.stderr
    patches = json.loads(result.stdout)["patches"]
    assert {patch["id"] for patch in patches} >= {"vllm.bootstrap.engine_args", "vllm.pcp.block_table"}
    assert all(patch["state"] and patch["reason"] for patch in patches)


def test_explain_prints_what_a_patch_adds_about_itself() -> None:
    pytest.importorskip("vllm")
    lines = atom_patches("explain", "vllm.pcp.gated_delta_net").stdout.splitlines()
    [header] = [line for line in lines if line.endswith("  auto, auto/3")]
    ways = ["redundant", "relay", "two_pass", "head_all_to_all", "relay/3"]
    assert header.split() == ["prompt", "ranks", *ways, "auto,", "auto/3"]
    # 64k tokens on 8 ranks.
    [row] = [line.split() for line in lines if line.split()[:2] == ["65,536", "8"]]
    assert row[-2] == "two_pass," and float(row[4]) < float(row[2]) and float(row[4]) < float(row[3])
    assert any("5 us for each operation that the host issues" in line for line in lines)
    assert not any("two_pass" in line for line in atom_patches("explain", "vllm.pcp.block_table").stdout.splitlines())
    rule = atom_patches("explain", "vllm.pcp.moe_parallel").stdout
    assert "<= 0.6 * --gpu-memory-utilization * the GPU's memory" in rule
    assert "64.4 GB of experts, whole on GPUs from 117 GB" in rule


def test_a_reader_may_stop_reading() -> None:
    script = f"{sys.executable} -m atom_patches status --json | head -1"
    environment = startup.environment(ATOM_PATCHES_STATE_DIR=os.environ["ATOM_PATCHES_STATE_DIR"])
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {script}"],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "{\n", "")


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    for command in ("status", "doctor", "explain", "accept", "run"):
        assert command in out
