"""Fingerprints: what makes a difference, what does not, and what a diff shows."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atom_patches.core import Target, drift

SAMPLE = '''
import functools


@functools.cache
def f(a, b=(1, 2), *, c: int = 3) -> int:
    """Docstring."""
    total = 0  # a comment
    for x in range(a):
        if x % 2:
            total += x
        else:
            total -= x

    def inner(y):
        """Another."""
        return y

    text = f"{total!r:>{c}} and {inner(a)}" + "plain # no comment"
    more = """
    kept  as it is
    """
    return (total
            + b[0]) + len(text) + len(more)
'''


def hash_of(toy: Any, text: str, qualname: str = "f") -> str:
    toy.write("m", text)
    return drift.fingerprint(drift.current_lines(Target(f"{toy.name}.m", qualname))).hash


SAME = {
    "comment gone": ("  # a comment", ""),
    "comment added": ("        if x % 2:", "        # odd\n        if x % 2:  # odd"),
    "docstring changed": ('"""Docstring."""', '"""Quite\n\n    another."""'),
    "docstring gone": ('        """Another."""\n', ""),
    "blank lines": ("    total = 0", "\n\n    total = 0\n"),
    "line break in brackets": ("(total\n            + b[0])", "(total + b[0])"),
    "spaces": ("range(a)", "range( a )"),
    "moved in the file": ("import functools", "import functools\nimport os\n\nX = 1"),
    "type comment": ("total = 0  # a comment", "total = 0  # type: int"),
}
DIFFERENT = {
    "constant": ("total = 0", "total = 1"),
    "operator": ("total += x", "total -= x"),
    "default": ("c: int = 3", "c: int = 4"),
    "annotation": ("-> int", "-> float"),
    "decorator": ("@functools.cache", "@functools.lru_cache"),
    "decorator gone": ("@functools.cache\n", ""),
    "format string": ("{total!r", "{total!s"),
    "format width": (":>{c}}", ":<{c}}"),
    "string that looks like a comment": ("plain # no comment", "plain"),
    "text in a long string": ("kept  as", "kept as"),
    "indentation": ("            total -= x\n", "            total -= x\n            x = 1\n"),
    "line added": ("    def inner(y):", "    total = abs(total)\n\n    def inner(y):"),
    "line gone": ("            total += x\n", "            pass\n"),
}


@pytest.mark.parametrize("edit", SAME.values(), ids=SAME)
def test_no_difference(toy: Any, edit: tuple[str, str]) -> None:
    assert hash_of(toy, SAMPLE) == hash_of(toy, SAMPLE.replace(*edit))


@pytest.mark.parametrize("edit", DIFFERENT.values(), ids=DIFFERENT)
def test_difference(toy: Any, edit: tuple[str, str]) -> None:
    assert edit[0] in SAMPLE
    assert hash_of(toy, SAMPLE) != hash_of(toy, SAMPLE.replace(*edit))


def test_statement_moved_out_of_its_block_is_a_difference(toy: Any) -> None:
    inside = "def f(a):\n    if a:\n        a = 1\n        a = 2\n    return a\n"
    outside = "def f(a):\n    if a:\n        a = 1\n    a = 2\n    return a\n"
    assert hash_of(toy, inside) != hash_of(toy, outside)


def test_depth_counts_from_the_definition(toy: Any) -> None:
    top = "def f(a):\n    if a:\n        return 1\n    return 2\n"
    nested = "if True:\n  def f(a):\n     if a:\n       return 1\n     return 2\n"
    assert hash_of(toy, top) == hash_of(toy, nested)


def test_method_and_class(toy: Any) -> None:
    text = 'class C:\n    """Doc."""\n    limit = 3\n\n    def f(self):\n        return 1\n'
    whole, method = hash_of(toy, text, "C"), hash_of(toy, text, "C.f")
    edited = text.replace("limit = 3", "limit = 4")
    assert hash_of(toy, edited, "C") != whole
    assert hash_of(toy, edited, "C.f") == method


def test_all_branches_count(toy: Any) -> None:
    text = "if X:\n    def f(): return 1\nelse:\n    def f(): return 2\n"
    assert hash_of(toy, text) != hash_of(toy, text.replace("return 2", "return 3"))
    assert hash_of(toy, text) != hash_of(toy, text.replace("return 1", "return 3"))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6))
def test_comments_and_blank_lines_anywhere_make_no_difference(toy: Any, seed: int) -> None:
    """In this repository's own functions, which are as varied as anyone's."""
    chosen = random.Random(seed)
    file = Path(drift.__file__ or "")
    text = file.read_text()
    name = chosen.choice(["lines_of", "diff", "_logical_lines", "_joined", "Line", "_docstring_lines"])
    lines = text.splitlines()
    for _ in range(chosen.randrange(1, 6)):
        number = chosen.choice([n for n, line in enumerate(lines) if line.strip() and '"""' not in line])
        if not _inside_docstring(lines, number):
            lines.insert(number, chosen.choice(["", "# a remark", "        # another", "\f"]))
    assert hash_of(toy, text, name) == hash_of(toy, "\n".join(lines) + "\n", name)


def _inside_docstring(lines: list[str], number: int) -> bool:
    return "\n".join(lines[:number]).count('"""') % 2 == 1


def pythons() -> dict[str, str]:
    """The interpreters of this machine that the package supports, by version: on the path, and pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [f"python3.{minor}" for minor in range(10, 20)]
    candidates += [str(path) for path in pyenv.glob("versions/*/bin/python3")]
    found: dict[str, str] = {}
    for candidate in candidates:
        with contextlib.suppress(OSError):
            command = [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            major, _, minor = result.stdout.strip().partition(".")
            if major == "3" and int(minor) >= 10:
                found[result.stdout.strip()] = candidate
    return found


def test_every_python_on_this_machine_agrees(toy: Any) -> None:
    """Tokenisers differ from version to version, f-strings most of all."""
    expected = hash_of(toy, SAMPLE)
    script = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "import types\n"
        "package = types.ModuleType('atom_patches'); package.__path__ = [sys.argv[1] + '/atom_patches']\n"
        "sys.modules['atom_patches'] = package\n"
        "from atom_patches.core import drift, Target\n"
        "print(drift.fingerprint(drift.current_lines(Target(sys.argv[3] + '.m', 'f'))).hash)\n"
    )
    repository = str(Path(drift.__file__ or "").parents[2])
    hashes: dict[str, str] = {}
    for version, python in {"this": sys.executable, **pythons()}.items():
        command = [python, "-c", script, repository, str(toy.root), toy.name]
        hashes[version] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert set(hashes.values()) == {expected}, hashes


def diff(toy: Any, before: str, after: str) -> list[str]:
    toy.write("m", before)
    target = Target(f"{toy.name}.m", "f")
    reviewed = drift.fingerprint(drift.current_lines(target))
    toy.write("m", after)
    changes = drift.diff([reviewed], drift.current_lines(target))
    return [change.rpartition("/")[2] for change in changes]


def test_diff_of_one_changed_line(toy: Any) -> None:
    after = SAMPLE.replace("total += x", "total += 2 * x")
    assert diff(toy, SAMPLE, after) == ["m.py:11: - 1 reviewed line(s)", "m.py:11: + total += 2 * x"]


def test_diff_of_added_and_removed_lines(toy: Any) -> None:
    assert diff(toy, SAMPLE, SAMPLE.replace("    total = 0", "    b = b\n    total = 0")) == ["m.py:8: + b = b"]
    assert diff(toy, SAMPLE, SAMPLE.replace("            total -= x", "            pass"))[1:] == ["m.py:13: + pass"]
    gone = diff(toy, SAMPLE, SAMPLE.replace("        else:\n            total -= x\n", ""))
    assert gone == ["m.py:14: - 2 reviewed line(s)"] or gone == ["m.py:13: - 2 reviewed line(s)"]


def test_diff_compares_with_the_nearest_reviewed_source(toy: Any) -> None:
    target = Target(f"{toy.name}.m", "f")
    toy.write("m", "def f(x):\n    return x\n")
    far = drift.fingerprint(drift.current_lines(target))
    toy.write("m", SAMPLE)
    near = drift.fingerprint(drift.current_lines(target))
    toy.write("m", SAMPLE.replace("total = 0", "total = 1"))
    assert len(drift.diff([far, near], drift.current_lines(target))) == 2
