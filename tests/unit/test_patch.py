"""Declarations that cannot mean anything are refused where they are written."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from atom_patches.core import Patch, Target, discovery

FACTS: dict[str, Any] = {"id": "toy.a", "target": "toy.core:f", "supports": "toy>=1", "kind": "correctness"}


@pytest.mark.parametrize(
    ("fact", "value", "complaint"),
    [
        ("id", "nodots", "dotted"),
        ("id", "Toy.A", "dotted"),
        ("target", "toy.core.f", "module:qualname"),
        ("target", ":f", "module:qualname"),
        ("relies_on", ("toy.core",), "module:qualname"),
        ("relies_on_one_of", (("toy.core:f", "toy.core"),), "module:qualname"),
        ("kind", "nice to have", "kind is one of"),
    ],
)
def test_refused(fact: str, value: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Patch(**(FACTS | {fact: value}))


def test_target_reads_and_writes_the_same() -> None:
    assert str(Target.parse("a.b:C.d")) == "a.b:C.d"
    assert Target.parse("a.b:C.d") == ("a.b", "C.d")


def test_feature_is_the_group_or_the_patch() -> None:
    assert Patch(**FACTS).feature == "toy.a"
    assert Patch(**FACTS, group="toy.g").feature == "toy.g"


def declare(toy: Any, place: str, text: str) -> None:
    file = toy.declarations / f"{place}.py"
    file.parent.mkdir(exist_ok=True)
    (file.parent / "__init__.py").write_text("")
    file.write_text("from atom_patches.core import Patch, Verdict\n" + text)


GOOD = (
    "PATCH = Patch(id={id!r}, target='{name}.core:plain', supports='toy>=1', kind='optimisation',"
    " when=lambda config: Verdict(True, 'always'))\n"
    "@PATCH.around\n"
    "def builder(original):\n    return lambda *args, **kwargs: 7\n"
)


def test_one_file_is_one_patch(toy: Any, make: Any) -> None:
    declare(toy, "feature/first", GOOD.format(id="toy.feature.first", name=toy.name))
    declare(toy, "adapters/not_a_patch", "raise AssertionError('imported')\n")
    declare(toy, "feature/_helper", "raise AssertionError('imported')\n")
    patches = discovery.load(toy.engine)
    assert [patch.id for patch in patches] == ["toy.feature.first"]
    toy.review(*patches)
    toy.registry.arm(toy.engine)
    config = make.config(1)
    toy.configure(config)
    assert toy.load("core").plain(1) == 7


def test_discovery_imports_no_engine(toy: Any) -> None:
    declare(toy, "feature/first", GOOD.format(id="toy.feature.first", name=toy.name))
    discovery.load(toy.engine)
    assert toy.name not in sys.modules


@pytest.mark.parametrize(
    ("text", "error", "complaint"),
    [
        ("", TypeError, "declares no patch"),
        (GOOD.replace("@PATCH.around\n", ""), TypeError, "no replacement"),
        (GOOD.replace("{id!r}", "'toy.feature.other'"), ValueError, "a file's place says 'toy.feature.first'"),
    ],
)
def test_file_that_declares_nothing_usable(toy: Any, text: str, error: type[Exception], complaint: str) -> None:
    declare(toy, "feature/first", text.format(id="toy.feature.first", name=toy.name))
    with pytest.raises(error, match=complaint):
        discovery.load(toy.engine)


def test_vllms_declarations_import_neither_torch_nor_vllm() -> None:
    script = (
        "import sys\n"
        "from atom_patches.core import discovery\n"
        "from atom_patches.vllm.engine import ENGINE\n"
        "before = set(sys.modules)\n"
        "assert len(discovery.load(ENGINE)) > 3\n"
        "heavy = {name.partition('.')[0] for name in set(sys.modules) - before} & {'torch', 'vllm', 'numpy'}\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
