"""`bench engine`: what follows from times, and what remains of a run that is cut short; tests/vllm has a real one."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from atom_patches.bench import engine_pair, seeded_model
from atom_patches.bench.engine_cells import DEFAULT, MODELS, SIDES, TARGETS, Cell, Found
from atom_patches.cli import bench_engine, main

STAND_IN = (str(Path(__file__).parent / "stand_in_side.py"),)
DECODE = Cell("decode", 16)


def found(stock: list[float], overlay: list[float], device: str = "cuda") -> Found:
    """One cell, measured in these rounds."""
    one = Found(MODELS["qwen8b"], device)
    for pair in zip(stock, overlay, strict=True):
        one.add(DECODE, {side: [seconds] for side, seconds in zip(SIDES, pair, strict=True)})
    return one


def test_a_ratio_is_that_of_each_round() -> None:
    """A slow round is slow for both, and says nothing about either."""
    ratio = found([1.0, 1.0, 9.0, 1.0, 1.0, 2.0], [0.5, 0.5, 4.5, 0.5, 0.5, 1.0]).ratio(DECODE)
    assert tuple(ratio) == (2.0, 2.0, 2.0)


def test_a_cell_that_is_slower_fails_and_an_interval_that_reaches_below_is_told() -> None:
    slow = found([0.98] * 6, [1.0] * 6)
    assert list(slow.findings()) == ["SLOWER  qwen8b, decode step, batch 16: 0.980 times as fast as stock"]
    unclear = found([1.0] * 6, [0.9] * 5 + [1.1])
    assert list(unclear.findings()) == []
    assert list(unclear.notes()) == ["note: qwen8b, decode step, batch 16: the interval reaches down to 0.909"]
    assert not [*found([0.5], [1.0], device="cpu").findings()], "times on a CPU say nothing"


def test_targets_are_of_cells_that_are_measured() -> None:
    measured = {(name, cell) for name in DEFAULT["cuda"] for cell in MODELS[name].cells}
    assert set(TARGETS) == measured
    assert set(bench_engine.NAMES) == set(MODELS) <= set(seeded_model.SIZES)


@pytest.mark.parametrize("name", ["tiny", "tiny-dense"])
def test_weights_follow_from_their_names_alone(name: str) -> None:
    size = seeded_model.SIZES[name]
    device = torch.device("cpu")
    for weight, shape in list(seeded_model.shapes(size))[:20]:
        one, other = (seeded_model.weight(weight, shape, size, device) for _ in range(2))
        assert tuple(one.shape) == shape and torch.equal(one, other), weight
    norm = seeded_model.weight("model.norm.weight", (64,), size, device).float().mean()
    assert norm == pytest.approx(1.0 if name == "tiny-dense" else 0.0, abs=0.1), "a hybrid's norms add one"


# The command


@pytest.fixture
def bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, dict[str, Any]]]:
    pytest.importorskip("vllm")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine_pair, "PROGRAM", STAND_IN)

    def bench(wrong: str = "", *options: str) -> tuple[int, str, dict[str, Any]]:
        monkeypatch.setenv("WRONG", wrong)
        status = main(["bench", "engine", "--device", "cpu", "--rounds", "2", *options])
        said = capsys.readouterr()
        return status, said.out + said.err, json.loads((tmp_path / "bench-engine" / "engine.json").read_text())

    return bench


def test_a_run(bench: Callable[..., Any], tmp_path: Path) -> None:
    status, out, found = bench("", "--models", "tiny", "--html", "r.html", "--json", "r.json")
    assert status == 0 and "nothing wrong" in out and "TINY MODELS ON A CPU" in out
    [model] = found["models"]
    cells = {cell["label"]: cell for cell in model["cells"]}
    assert set(cells) == {"decode step, batch 1", "decode step, batch 2", "prefill of 128"}
    assert cells["prefill of 128"]["ratio"]["median"] == pytest.approx(1.25)
    assert cells["prefill of 128"]["raw"]["stock"] == [[0.005, 0.005]] * 2
    assert re.search(r"prefill of 128 +5\.000 \[.*\] +4\.000 \[.*\] +1\.250 \[", out)
    assert json.loads((tmp_path / "r.json").read_text()) == found
    page = (tmp_path / "r.html").read_text()
    assert "<script" not in page and "1.25" in page and 'class="bad">Tiny models' in page


def test_a_side_that_ends_leaves_what_there_is_and_the_next_model(bench: Callable[..., Any]) -> None:
    status, out, found = bench("ends")
    assert status == 1
    assert [len(model["cells"]) for model in found["models"]] == [1, 1]
    assert out.count("INCOMPLETE") == 2 and "tiny.overlay ended with status 7:\na line of the log" in out


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("logprob", "DIFFERENT  tiny: prompt 1: log-probabilities are 0.8000 apart at token 1"),
        ("stock", "NOT APPLIED  tiny: the overlay's side ran vllm.model"),
    ],
)
def test_what_makes_figures_worthless(bench: Callable[..., Any], wrong: str, told: str) -> None:
    status, out, _ = bench(wrong, "--models", "tiny")
    assert status == 1 and told in out


def test_an_interrupted_run_says_what_was_not_begun() -> None:
    first = dataclasses.replace(found([1.0], [1.0]), broken="interrupted")
    document = bench_engine.document([first, Found(MODELS["tiny"], "cuda")])
    assert document["findings"] == ["INCOMPLETE  qwen8b: interrupted", "INCOMPLETE  tiny: not begun"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--layers", "3"], "--layers 3: tiny has them in fours"),
        (["--layers", "-4"], "take whole numbers above 0"),
        (["--rounds", "0"], "take whole numbers above 0"),
        (["--json", "no/r.json"], "there is no such directory"),
    ],
)
def test_one_clear_error(bench: Any, options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--device", "cpu", *options]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_told(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine"]) == 2
    assert "torch finds no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--models", "qwen"], ["--batches", "1,x"], ["--lengths", "0"]])
def test_what_is_not_understood(option: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "engine", *option])
