"""Every command in the documentation is run: here, by a test that is named, or by a job; or what it lacks is said."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from atom_patches.cli import main
from atom_patches.cli.parsing import PROGRAM
from atom_patches.core import report
from tests.unit import documented

ROOT = documented.ROOT
WORKFLOWS = ROOT / ".github" / "workflows"


class Here(NamedTuple):
    """Run below, in this process."""


class Test(NamedTuple):
    """Run by a test, `file::name`, or by all of a file or folder."""

    name: str
    __test__ = False


class Job(NamedTuple):
    """Run by a workflow, as this command."""

    command: str


class Lacking(NamedTuple):
    """Not run: what it takes."""

    what: str


GPU = Lacking("a GPU")
SERVED = Lacking(
    "a model, and GPUs that hold it; tests/vllm, tests/sglang and the examples start the same with small ones"
)
NEW = Test("tests/startup/test_new_files.py")
CPU_BENCH = Test("tests/unit/test_documented_commands.py::test_a_benchmark_can_be_tried_without_a_gpu")
PCP_BENCH = Test("tests/unit/test_bench_pcp.py::test_a_run_on_a_cpu")
ENGINE_BENCH = Test("tests/vllm/test_compare.py::test_whole_engines_are_measured_in_turn")
SGLANG_BENCH = Test("tests/sglang/test_bench_engine.py::test_whole_engines_are_measured_in_turn")
EXAMPLES = Test("tests/unit/test_examples.py")

PROOFS: dict[str, Here | Test | Job | Lacking] = {
    rf"{PROGRAM}( COMMAND)?": Here(),
    r"atom-patches COMMAND": Test("tests/startup/test_install.py"),
    rf"{PROGRAM} status( --all| --json)?": Here(),
    rf"{PROGRAM} doctor( --json)?": Here(),
    rf"{PROGRAM} explain (vllm\.(pcp|dp_idle)\S*|sglang\S*)( --json)?": Here(),
    rf"{PROGRAM} (explain (ID|PATCH)|accept (--ship PATCH_ID|vllm\.pcp\S*))": Test("tests/unit/test_cli.py"),
    rf"{PROGRAM} bench compare before\.json after\.json.*": Here(),
    rf"{PROGRAM} compare .*": Test("tests/vllm/test_compare.py::test_stock_and_overlay_answer_the_same"),
    rf"{PROGRAM} completion (bash|zsh)": Here(),
    rf"{PROGRAM} new .*": NEW,
    rf"{PROGRAM} (accept --ship|explain) vllm\.example\.post_step": NEW,
    rf"{PROGRAM} run -- .*": Test("tests/unit/test_cli.py::test_run_becomes_the_armed_command"),
    rf"{PROGRAM} bench rms_norm --device cpu.*": CPU_BENCH,
    rf"{PROGRAM} bench pcp --device cpu --shape tiny": PCP_BENCH,
    rf"{PROGRAM} bench engine --device cpu.*": ENGINE_BENCH,
    rf"{PROGRAM} bench engine --engine sglang --device cpu.*": SGLANG_BENCH,
    rf"{PROGRAM} bench.*": GPU,
    r"python -m pytest tests/kernels/test_example\.py": NEW,
    r"python -m pytest tests/ordering tests/drift -k post_step": NEW,
    r"python -m pytest( tests/\w+)+( -k models)?": Job(".ci/run"),
    r"python tools/(compile_kernels|kernel_table)\.py (example|--write)": NEW,
    r"python tools/compile_kernels\.py FAMILY": Test("tests/kernels/test_compiles.py"),
    r"python tools/aiter_signatures\.py .*": Lacking("a checkout of AITER"),
    r"python benchmarks/\w+\.py.*": Lacking("a GPU, or two"),
    r"python examples/own_package/run\.py": EXAMPLES,
    r"python examples/(serve_hybrid_pcp|dp_attention|offline_models)\.py": Job(".ci/run"),
    r"python examples/serve_models\.py all": Lacking("minutes; its default runs in `make examples`"),
    r"python examples/(accuracy|serving_benchmark)\.py --help": EXAMPLES,
    r"python -m (sglang\.launch_server|vllm\.entrypoints\.openai\.api_server) --model.*": SERVED,
    r"vllm serve.*": SERVED,
    r"(docker|kubectl) .*": Lacking("Docker, a cluster and GPUs; tests/unit/test_examples.py reads the files"),
    r'python -c "import torch; .*"': Lacking("a GPU's driver to compare with"),
    r"py-spy dump .*": Lacking("a server that hangs"),
    r"pip (install -e PATH_TO_THIS_CHECKOUT|uninstall atom-patches)": Test("tests/startup/test_install.py"),
    r"pre-commit install": Lacking("a clone with hooks; they call make lint and make typecheck"),
    r"source \.venv/vllm-0\.20\.2/bin/activate": Job("make demo"),
    r"make (demo|demo-sglang|startup|pcp-matrix|feature-matrix|test-long)": Job(""),
    r"make feature-matrix ARGS=--new": Test("tests/vllm/test_features.py"),
    r"make (lint|typecheck|docs)": Job("make lint typecheck docs"),
    r"make (test|env|env-sglang|examples)": Job(".ci/run"),
    r"make env ENGINE=vllm-0\.33\.0": Job("make matrix"),  # which builds what it runs on
    r"make changes": Job("make lint typecheck docs"),  # the site has them
    r"make release VERSION=.*": Lacking("a release to make"),
    r"make test-(sglang|kernels ARGS=.*)": Job(".ci/run"),
    r"make help": Test("tests/unit/test_documented_commands.py::test_every_target_is_there"),
    r"make demo(-sglang)? ENGINE=.*": Job(""),
    r"make matrix.*": Job("make matrix"),
    r"make mutants.*": Job("make mutants"),
    r"make fuzz-dp STEPS=10000 RANKS=4": Job(""),
}


def proof(command: str) -> Here | Test | Job | Lacking | None:
    """The first that fits."""
    return next((one for pattern, one in PROOFS.items() if re.fullmatch(pattern, command)), None)


ALL = documented.commands()


def test_every_command_has_a_proof() -> None:
    assert len(ALL) > 80
    assert [command for command in ALL if proof(command.text) is None] == []


def test_no_proof_is_left_over() -> None:
    texts = {command.text for command in ALL}
    assert [pattern for pattern in PROOFS if not any(re.fullmatch(pattern, text) for text in texts)] == []


@pytest.mark.parametrize("one", [one for one in PROOFS.values() if isinstance(one, Test)], ids=lambda one: one.name)
def test_named_tests_exist(one: Test) -> None:
    file, _, name = one.name.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8") if name else (ROOT / file).exists()


def test_jobs_run_what_is_claimed() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in WORKFLOWS.glob("*.yml"))
    run = set(re.findall(r"(?:run: |- )((?:make|\.ci/run)[^\n]*)$", text, re.MULTILINE))
    for command in ALL:
        one = proof(command.text)
        if isinstance(one, Job):
            assert (one.command or command.text) in run, command
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "exec make test"
    whole = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ntest: ")[2].partition("\n\n")[0]
    assert whole.startswith("envs lint typecheck docs ") and "$(MAKE) --no-print-directory examples " in whole


@pytest.mark.parametrize("path", sorted(WORKFLOWS.glob("*.yml")), ids=lambda path: path.name)
def test_what_workflows_run_is_there(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = path.read_text(encoding="utf-8")
    targets = {word for line in re.findall(r"\bmake ([^\n]*)$", text, re.MULTILINE) for word in line.split()}
    assert [word for word in targets if "=" not in word and not re.search(rf"^{word}:", makefile, re.MULTILINE)] == []
    named = re.findall(r"(?<![\w/])(?:tests|tools)/[\w./]*\w", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_target_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for command in ALL:
        words = command.text.split()
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:.*##", makefile, re.MULTILINE) or words[1] == "help", command
            assert f"make {words[1]} " in shown or words[1] == "help", command


HERE = sorted({command.text for command in ALL if isinstance(proof(command.text), Here)})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two runs of the benchmark, for the state files and all that is written."""
    for name in ("before.json", "after.json"):
        shutil.copy(ROOT / "benchmarks" / "kernels-h200-2026-11-29" / "bench-1.json", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    for name in ("VLLM_PLUGINS", "SGLANG_PLUGINS", "ATOM_PATCHES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ATOM_PATCHES_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(report, "_own", {})
    return tmp_path


@pytest.mark.parametrize("command", HERE)
def test_what_is_documented_runs(folder: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command.removeprefix(PROGRAM).replace("COMMAND", "status"))
    assert main(words) == (0 if words else 2)
    assert capsys.readouterr().out


@pytest.mark.long
def test_a_benchmark_can_be_tried_without_a_gpu(folder: Path) -> None:
    command = [sys.executable, "-m", "atom_patches", "bench", "rms_norm", "--device", "cpu", "--case", "1 x 2048*"]
    ran = subprocess.run([*command, "--html", "r.html"], cwd=folder, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "1 cases, nothing wrong" in ran.stdout
    assert "say nothing about a GPU" in (folder / "r.html").read_text()
