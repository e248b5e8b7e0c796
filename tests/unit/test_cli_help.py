"""What the command line teaches: examples that work, words that were meant, colours, completion, JSON."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cli_page
import pytest

from atom_patches.cli import catalogue, colour, completion, doctor, main, parsers, status
from atom_patches.core import Engine, Patch, State, gates
from tools import startup

PARSER, COMMANDS = parsers()
NAMES = list(COMMANDS.by_name)
EXAMPLES = [arguments for parser in (PARSER, *COMMANDS.by_name.values()) for arguments, _ in parser.examples]


@pytest.fixture(autouse=True)
def private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATOM_PATCHES_STATE_DIR", str(tmp_path / "state"))


def words(example: str) -> list[str]:
    two = [name for name in NAMES if " " in name and example.startswith(name)]
    rest = example.removeprefix(two[0]) if two else example
    shell = subprocess.run(["bash", "-c", f"printf '%s\\n' {rest}"], capture_output=True, text=True, check=True)
    return [*two, *filter(None, shell.stdout.splitlines())]


@pytest.mark.parametrize("example", sorted(set(EXAMPLES)))
def test_every_example_is_understood(example: str) -> None:
    parsed, rest = PARSER.parse_known_args(words(example))
    assert rest == [] and callable(parsed.run)


@pytest.mark.parametrize("name", NAMES)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*name.split(), "--help"])
    out = capsys.readouterr().out
    assert end.value.code == 0
    assert "examples:" in out and f"python -m atom_patches {name}" in out
    assert max(map(len, re.sub(r"^  python.*$", "", out, flags=re.MULTILINE).splitlines())) <= 110


def test_no_command_gets_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "examples:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["statsu"], "there is no command 'statsu'; did you mean status?"),
        (["bench-pcp"], "did you mean bench pcp?"),
        (["zzz"], "there is no command 'zzz'; the commands are status, doctor"),
        (["status", "--jsno"], "status takes no --jsno; did you mean --json?"),
        (["bench", "pcp", "--worlsd=2"], "bench pcp takes no --worlsd; did you mean --worlds?"),
        (["status", "more"], "status takes no more; see python -m atom_patches status --help"),
    ],
)
def test_a_misspelt_word_gets_the_one_that_was_meant(
    typed: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(typed)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_the_page_is_up_to_date() -> None:
    text = cli_page.PART.document.read_text(encoding="utf-8")
    assert text == cli_page.PART.updated(text), "run: python tools/cli_page.py --write"


# JSON


def test_whoever_reports_something_reports_it_to_scripts_too() -> None:
    """`run` becomes the command, and `completion` prints a script as it is."""
    without = [name for name, parser in COMMANDS.by_name.items() if "--json" not in parser.options]
    assert without == ["run", "completion"]


@pytest.mark.parametrize("command", [["status"], ["doctor"], ["explain", "vllm.dp_idle"]])
def test_json_is_the_same_for_scripts(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main([*command, "--json"])
    assert json.loads(capsys.readouterr().out)


def test_explained_patches_are_plain_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "vllm.dp_idle", "--json"]) == 0
    (patch,) = json.loads(capsys.readouterr().out)
    assert patch["id"] == "vllm.dp_idle.post_step"
    assert patch["target"] == "vllm.v1.engine.core:EngineCore.post_step"
    assert patch["upstream"] == "vllm-project/vllm#43547" and "Why:" in patch["documentation"]
    assert patch["state"] and patch["reason"]


def test_findings_are_plain_data(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_PATCH_VLLM_PPC", "1")
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == 1
    assert any(one["kind"] == "problem" and "ATOM_PATCH_VLLM_PCP" in one["message"] for one in found["findings"])


# Colours


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "variables", "coloured"),
    [
        (Terminal(), {}, True),
        (io.StringIO(), {}, False),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
    ],
)
def test_colours_only_where_they_are_seen_and_wanted(
    stream: Any, variables: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert colour.painter(stream)("applied", "green") == ("\x1b[32mapplied\x1b[0m" if coloured else "applied")


@pytest.mark.parametrize(("version", "problem"), [("0.20.2", False), ("9.0", True)])
def test_a_feature_for_another_release_is_no_problem(
    version: str, problem: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But a release that nothing was reviewed for is one."""

    def standing(found: catalogue.Installed, patch: Patch) -> gates.Finding:
        other = patch.feature == "vllm.dp_idle"
        return gates.Finding(State.UNSUPPORTED if other else State.PENDING, "made up")

    def installed(engine: Engine) -> catalogue.Installed:
        return catalogue.Installed(engine, Path() if engine.name == "vllm" else None, "vllm", version)

    monkeypatch.setattr(catalogue, "installed", installed)
    monkeypatch.setattr(catalogue, "standing", standing)
    (found,) = doctor.engine_checks()
    assert found.is_problem is problem
    assert "explain vllm.dp_idle.post_step" in found.message


def test_a_release_that_others_are_written_for_is_one_quiet_line() -> None:
    reason = "vllm 0.20.2 is not in <0.33,>=0.32, and a:b is gone: so long a story"
    two = [{"id": f"vllm.pcp.{name}", "state": "unsupported", "reason": f"{reason} {name}"} for name in "ab"]
    line, names = status._grouped(two, indent="", every=False, paint=lambda text, colour: f"<{colour}>{text}")
    assert line.startswith("<grey>unsupported") and "story" not in line and "explain ID" in line
    assert names.strip() == "vllm.pcp (2 patches)"


def patches(**states: str) -> list[dict[str, Any]]:
    ids = {"a": "vllm.pcp.a", "b": "vllm.pcp.b", "c": "vllm.dp.c"}
    return [{"id": ids[name], "state": state, "reason": f"why {state}"} for name, state in states.items()]


def test_a_feature_that_stands_alike_is_one_name_and_trouble_is_named_and_red() -> None:
    fine = status._grouped(patches(a="applied", b="applied", c="applied"), "", every=False, paint=colour.plain)
    assert fine == ["applied      why applied", "             vllm.pcp (2 patches), vllm.dp.c"]
    every = status._grouped(patches(a="applied", b="applied"), "", every=True, paint=colour.plain)
    assert every[1].split() == ["vllm.pcp.a,", "vllm.pcp.b"]
    bad = status._grouped(patches(a="drifted", b="drifted"), "", every=False, paint=colour.painted)
    assert bad[0].startswith("\x1b[1;31mdrifted") and bad[1].split() == ["vllm.pcp.a,", "vllm.pcp.b"]


# Completion

DRIVER = """
{script}
COMP_WORDS=(atom-patches {words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )); {more}
_atom_patches; printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def complete() -> Callable[[str], set[str]]:
    script = completion.script("bash", COMMANDS)

    def complete(typed: str) -> set[str]:
        more = "COMP_WORDS+=(''); COMP_CWORD=$(( COMP_CWORD + 1 ))" if typed.endswith(" ") else ""
        code = DRIVER.format(script=script, words=typed.strip(), more=more)
        ran = subprocess.run(["bash", "-uc", code], capture_output=True, text=True, check=True)
        return set(ran.stdout.split())

    return complete


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("st", {"status"}),
        ("status --j", {"--json"}),
        ("explain vllm.dp_idle.", {"vllm.dp_idle.post_step"}),
        ("accept vllm.pcp_metric", {"vllm.pcp_metrics"}),
        ("bench p", {"pcp", "paged_attention"}),
        ("bench --engine v", {"vllm"}),
        ("bench pcp --shape ", {"qwen3.6-35b-a3b", "tiny"}),
        ("new ", {"patch", "kernel"}),
        ("new patch --t", {"--target"}),
        ("completion z", {"zsh"}),
    ],
)
def test_completion_offers_what_fits(complete: Callable[[str], set[str]], typed: str, offered: set[str]) -> None:
    assert complete(typed) == offered


def test_completion_of_the_first_word_is_every_command(complete: Callable[[str], set[str]]) -> None:
    assert complete(" ") == {name.partition(" ")[0] for name in NAMES} | {"--help", "--version"}


def test_a_tab_starts_no_python() -> None:
    script = completion.script("zsh", COMMANDS)
    assert "python" not in script and "$(" not in script.replace("$(compgen", "")
    assert script.startswith("autoload -U bashcompinit")


def test_the_installed_command_is_the_same_program(tmp_path: Path) -> None:
    code = "import sys; from atom_patches.__main__ import main; sys.argv = ['atom-patches', 'status']; sys.exit(main())"
    environment = startup.environment(ATOM_PATCHES_STATE_DIR=os.environ["ATOM_PATCHES_STATE_DIR"])
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and ran.stdout.startswith("atom_patches ")
