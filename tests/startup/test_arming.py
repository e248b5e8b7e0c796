"""Who arms, who does not, and what arming leaves in a fresh interpreter.

These tests need the package installed in the environment that runs them: the `.pth` file is what they are about.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tools import startup

IS_ARMED = "import sys; print('atom_patches' in sys.modules and sys.modules['atom_patches'].arming.armed())"
MODULES = "import sys; print(sorted(sys.modules))"


def run(code: str, *options: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        env=startup.environment(**changes),
        cwd=tempfile.gettempdir(),
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("changes", [{}, {"ATOM_PATCHES": ""}, {"ATOM_PATCHES": "0"}], ids=["unset", "empty", "0"])
def test_installed_is_not_armed(changes: dict[str, str]) -> None:
    assert startup.ours(startup.loaded(**changes)) == set()


def test_the_master_switch_arms_without_an_engine_torch_or_anything_costly() -> None:
    before, after = startup.loaded(), startup.loaded(ATOM_PATCHES="1")
    assert after - before == {"atom_patches", "atom_patches.arming"}


@pytest.mark.parametrize(
    ("option", "armed"),
    [
        ("-S", False),  # no site module, so no .pth file is read, and no site-packages either
        ("-I", True),  # isolated from PYTHON* variables, the working directory and user site; not from site
        ("-E", True),  # ignores PYTHON* variables only
        ("-s", True),  # ignores the user's site directory only
    ],
)
def test_interpreter_options(option: str, armed: bool) -> None:
    result = run(IS_ARMED, option, ATOM_PATCHES="1")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{armed}\n", "")


def test_a_pth_line_that_outlived_the_package_does_not_break_python(tmp_path: Path) -> None:
    (tmp_path / "atom_patches.pth").write_text(startup.pth_file().read_text())
    code = f"import site; site.addsitedir({str(tmp_path)!r}); print('still running')"
    unarmed = run(code, "-S")
    assert (unarmed.returncode, unarmed.stdout, unarmed.stderr) == (0, "still running\n", "")
    armed = run(code, "-S", ATOM_PATCHES="1")
    assert (armed.returncode, armed.stdout) == (0, "still running\n")
    assert "atom_patches.pth" in armed.stderr and "No module named 'atom_patches'" in armed.stderr


def test_the_pth_line_may_be_processed_twice() -> None:
    code = f"exec(open({str(startup.pth_file())!r}).read()); import sys; print(len(sys.meta_path))"
    plain = run("import sys; print(len(sys.meta_path))", ATOM_PATCHES="1")
    assert run(code, ATOM_PATCHES="1").stdout == plain.stdout


def test_importing_the_package_arms_this_process_and_its_children() -> None:
    code = f"""
import atom_patches, os, subprocess, sys
print(atom_patches.arming.armed(), os.environ["ATOM_PATCHES"], flush=True)
subprocess.run([sys.executable, "-c", {IS_ARMED!r}], check=True)
"""
    assert run(code).stdout.split() == ["True", "1", "True"]


def test_importing_the_package_does_not_overrule_the_master_switch() -> None:
    code = "import atom_patches, os; print(atom_patches.arming.armed(), os.environ['ATOM_PATCHES'])"
    assert run(code, ATOM_PATCHES="0").stdout.split() == ["False", "0"]


@pytest.mark.parametrize("entry_point", ["vllm_general_plugin", "vllm_platform_plugin", "sglang_plugin"])
@pytest.mark.parametrize(
    ("environment", "armed"),
    [
        ({}, False),
        ({"PLUGINS": ""}, False),
        ({"PLUGINS": "other,atomic"}, False),
        ({"PLUGINS": "atom"}, True),
        ({"PLUGINS": "other,atom"}, True),
        ({"PLUGINS": "other, atom"}, True),
        ({"PLUGINS": "atom", "ATOM_PATCHES": "0"}, False),
        ({"PLUGINS": "atom", "ATOM_PATCHES": ""}, True),
        ({"ATOM_PATCHES": "1"}, True),
    ],
)
def test_an_entry_point_arms_only_when_asked(entry_point: str, environment: dict[str, str], armed: bool) -> None:
    variable = "SGLANG_PLUGINS" if entry_point.startswith("sglang") else "VLLM_PLUGINS"
    changes = {variable if name == "PLUGINS" else name: value for name, value in environment.items()}
    code = f"import atom_patches_boot; print(atom_patches_boot.{entry_point}()); {IS_ARMED}"
    result = run(code, **changes)
    assert (result.stdout.split(), result.stderr) == (["None", str(armed)], "")


def test_sglang_cannot_go_on_without_a_plugin_that_fails() -> None:
    """SGLang's loader catches every `Exception` of a plugin."""
    code = """
import os, sys, atom_patches_boot
sys.modules["sglang"] = sys
os.environ |= {"SGLANG_PLUGINS": "atom", "ATOM_PATCHES": "yes"}
try:
    atom_patches_boot.sglang_plugin()
except Exception:
    pass
print("going on")
"""
    result = run(code)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1 and "'yes'" in result.stderr, result.stderr


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("vllm.general_plugins", "vllm_general_plugin"),
        ("vllm.platform_plugins", "vllm_platform_plugin"),
        ("sglang.srt.plugins", "sglang_plugin"),
    ],
)
def test_loading_an_entry_point_does_not_import_the_package(group: str, name: str) -> None:
    code = f"""
from importlib.metadata import entry_points
(ours,) = [e for e in entry_points(group={group!r}) if e.name == "atom" and e.dist.name == "atom-patches"]
print(ours.load().__name__)
{IS_ARMED}
"""
    assert run(code).stdout.split() == [name, "False"]


STUB = """
import sys, atom_patches.arming as arming
engaged = []
arming._hand_over = lambda name: engaged.append((name, "vllm" in sys.modules))
"""


@pytest.fixture
def fake_engine(tmp_path: Path) -> str:
    """A code line that puts a package called vllm, with one submodule, first on the path."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    (tmp_path / "vllm" / "config.py").write_text("")
    return f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"


def test_an_engine_is_engaged_once_before_its_import(fake_engine: str) -> None:
    code = STUB + fake_engine + "import vllm.config, vllm; arming.arm(); print(engaged)"
    assert run(code).stdout == "[('vllm', False)]\n"


def test_an_engine_that_is_there_already_is_engaged_at_once(fake_engine: str) -> None:
    code = fake_engine + "import vllm\n" + "import os; os.environ['ATOM_PATCHES'] = '0'" + STUB
    code += "os.environ.pop('ATOM_PATCHES'); arming.arm(); print(engaged)"
    assert run(code).stdout == "[('vllm', True)]\n"


def test_an_invalid_master_switch_stops_engines_only(fake_engine: str) -> None:
    assert run("print('fine')", ATOM_PATCHES="yes").stdout == "fine\n"
    assert run("print('fine')", ATOM_PATCHES="yes").stderr == ""
    result = run(fake_engine + "import vllm", ATOM_PATCHES="yes")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].endswith(
        "ATOM_PATCHES='yes' is not allowed. Set it to one of: 0, 1; or unset it."
    )


def test_a_failed_start_is_not_remembered_as_a_success(fake_engine: str) -> None:
    code = (
        fake_engine
        + """
for attempt in range(2):
    try:
        import vllm
    except ValueError as error:
        print("refused")
"""
    )
    assert run(code, ATOM_PATCHES="yes").stdout == "refused\nrefused\n"


def test_disarm_takes_back_what_arm_did() -> None:
    code = """
import os, sys
before = list(sys.meta_path)
import atom_patches
atom_patches.arming.disarm()
print(sys.meta_path == before, "ATOM_PATCHES" in os.environ)
"""
    assert run(code).stdout.split() == ["True", "False"]


def test_figures_hold() -> None:
    missed = [figure for figure in startup.figures(pairs=7) if not figure.holds]
    assert missed == []
