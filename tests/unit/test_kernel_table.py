"""docs/kernels.md lists exactly the operators and providers that there are."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from atom_patches.core import settings
from tools import kernel_table


def test_the_document_is_up_to_date() -> None:
    text = kernel_table.DOCUMENT.read_text(encoding="utf-8")
    assert text == kernel_table.updated(text), "run: python tools/kernel_table.py --write"


def test_every_operator_has_a_row_and_a_reference() -> None:
    rows = kernel_table.tables().splitlines()
    for family in settings.kernel_families():
        for operation in importlib.import_module(f"atom_patches.kernels.{family}").OPERATIONS:
            (row,) = (row for row in rows if row.startswith(f"| `{operation.name}` | reference |"))
            assert row.count(" | ") == 5


def test_what_a_module_defines_includes_what_it_takes_from_its_siblings(tmp_path: Path) -> None:
    (tmp_path / "impl.py").write_text("from ._a import *\nfrom ._b import second, third as other\ndef first(): ...\n")
    (tmp_path / "_a.py").write_text("import os\ndef zeroth():\n    def inner(): ...\n")
    assert kernel_table.defined(tmp_path / "impl.py") == {"first", "second", "other", "zeroth"}
    assert kernel_table.defined(tmp_path / "missing.py") == set()


def test_a_measured_kernel_says_how_it_compares(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    impl = tmp_path / "triton_impl.py"
    impl.write_text("def norm(): ...\ndef unmeasured(): ...\ndef alone(): ...\n")
    times = {"a": {"engine": 4.0, "triton": 2.0}, "b": {"engine": 3.0, "triton": 4.0}, "c": {"torch": 1.0}}
    found = {
        "norm": {"small": {"run": 0, "microseconds": times}},
        "alone": {"x": {"microseconds": {"a": {"triton": 1}}}},
    }
    (tmp_path / "GPU_1").mkdir()
    (tmp_path / "GPU_1" / "vllm.json").write_text(json.dumps({"gpu": "GPU 1", "engine": "vllm", "evidence": found}))
    monkeypatch.setattr(kernel_table, "MEASURED", tmp_path)
    assert kernel_table._triton("norm", impl) == "0.75–2.00 × vLLM, GPU 1"
    beside = {"norm": {"small": {"microseconds": {"a": {"engine": 9.0, "baseline": 3.0, "triton": 1.0}}}}}
    (tmp_path / "GPU_1" / "sglang.json").write_text(
        json.dumps({"gpu": "GPU 1", "engine": "sglang", "evidence": beside | {"alone": found["alone"]}})
    )
    assert kernel_table._triton("norm", impl) == "0.75–2.00 × vLLM, 3.00 × SGLang, GPU 1"
    assert kernel_table._triton("alone", impl) == "right on GPU 1"
    assert kernel_table._triton("unmeasured", impl) == "yes"
    assert kernel_table._triton("missing", impl) == "–"


def test_only_what_lies_between_the_markers_changes() -> None:
    text = f"before\n{kernel_table.START}\nold\n{kernel_table.END}\nafter\n"
    new = kernel_table.updated(text)
    assert new == f"before\n{kernel_table.START}\n\n{kernel_table.tables()}\n\n{kernel_table.END}\nafter\n"
    assert kernel_table.updated(new) == new


@pytest.mark.parametrize("text", ["none", kernel_table.START, f"{kernel_table.END}\n{kernel_table.START}"])
def test_missing_markers_are_named(text: str) -> None:
    with pytest.raises(SystemExit, match="end of kernels"):
        kernel_table.updated(text)


def test_a_change_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    document = tmp_path / "kernels.md"
    document.write_text(kernel_table.updated(f"{kernel_table.START}{kernel_table.END}"))
    monkeypatch.setattr(kernel_table, "DOCUMENT", document)
    monkeypatch.setattr("sys.argv", ["kernel_table.py", "--check"])
    assert kernel_table.main() == 0
    document.write_text(document.read_text().replace("`rms_norm`", "`norm`"))
    assert kernel_table.main() == 1
