"""`bench engine`: what follows from times, and what remains of a run that is cut short; others run real engines."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from atom_patches.bench import engine_pair, engines, seeded_model, vllm_side
from atom_patches.bench.answers import Answer
from atom_patches.bench.engine_cells import DEFAULT, MODELS, TARGETS, Cell, Found
from atom_patches.cli import bench_engine, main
from atom_patches.core import settings

STAND_IN = (str(Path(__file__).parent / "stand_in_side.py"),)
DECODE = Cell("decode", 16)


def found(stock: list[float], overlay: list[float], device: str = "cuda", **others: list[float]) -> Found:
    """One cell, measured in these rounds; `others` are without the fusion of that name."""
    one = Found(MODELS["qwen8b"], device)
    rounds = {"stock": stock, "overlay": overlay, **{f"without {name}": times for name, times in others.items()}}
    for number in range(len(stock)):
        one.add(DECODE, {side: [times[number]] for side, times in rounds.items()})
    if others:
        one.fusions.built["overlay"] = ["qk_rope", "kv_cache"]
        one.fusions.built |= {f"without {name}": ["qk_rope"] if name == "kv_cache" else [] for name in others}
        one.fusions.measured = list(others)
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


@pytest.mark.parametrize("own", ["atom_patches.model", "sglang.srt.models.transformers.TransformersForCausalLM"])
def test_a_stock_side_that_is_not_the_engines_own_model_fails(own: str) -> None:
    one = found([1.0] * 6, [0.5] * 6)
    one.sides = {"stock": {"model": own}, "overlay": {"model": "atom_patches.model", "fusions": []}}
    assert list(one.findings()) == [f"NOT STOCK  qwen8b: stock's side ran {own}"]


# Engines


@pytest.mark.parametrize("engine", engines.ENGINES.values(), ids=lambda engine: engine.name)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_nothing_from_outside_steers_a_side(
    engine: engines.Engine, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ATOM_FUSIONS", "ATOM_PATCHES_STRICT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    stock, overlay = (engine.environment(device, one) for one in (engine.stock[device], engine.overlay))
    for found in (stock, overlay):
        assert not {"ATOM_FUSIONS", "ATOM_PATCHES_STRICT"} & set(found)
        assert found["PYTHONPATH"].endswith("/elsewhere")
    required = f"ATOM_PATCH_{engine.name.upper()}_MODELS"
    assert overlay["ATOM_MODELS"] == overlay[required] == "1", "a side that cannot have the decoder does not start"
    assert required not in stock and (stock["ATOM_PATCHES"] == "0" or stock["ATOM_MODELS"] == "0")
    differ = {name for name in {*stock, *overlay} if stock.get(name) != overlay.get(name)}
    assert all(name.startswith("ATOM_") for name in differ), "sides differ in this package's variables alone"


def test_fusions_that_a_decoder_must_have_are_those_of_its_layers() -> None:
    assert engines.VLLM.expected("cuda", experts=True) == ["experts", "qk_rope", "kv_cache", "linear"]
    assert engines.SGLANG.expected("cuda", experts=False) == ["linear"]
    assert engines.SGLANG.expected("cpu", experts=False) == []
    assert MODELS["qwen35b"].experts and not MODELS["qwen8b"].experts


def test_a_release_that_a_side_cannot_drive_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engines.importlib.metadata, "version", lambda name: "0.5.23")
    told = "bench engine drives SGLang 0.5.17; 0.5.23 is installed."
    assert engines.SGLANG.refusal("cuda") == told
    monkeypatch.setattr(engines.importlib.metadata, "version", lambda name: "0.5.17")
    assert engines.SGLANG.refusal("cuda") is None and engines.SGLANG.refusal("cpu") is None
    elsewhere = dataclasses.replace(engines.SGLANG, path={"cpu": (tmp_path / "none",)})
    assert "takes a checkout of this project" in (elsewhere.refusal("cpu") or "")
    assert elsewhere.refusal("cuda") is None


@pytest.mark.parametrize(
    ("asked", "there", "told"),
    [
        (None, (), "needs vLLM or SGLang, which"),
        ("sglang", ("vllm",), "needs SGLang, which"),
        ("vllm", ("sglang",), "needs vLLM, which"),
    ],
)
def test_an_engine_that_is_not_installed_is_told(
    asked: str | None, there: tuple[str, ...], told: str, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(engines.Engine, "installed", lambda engine: engine.name in there)
    assert main(["bench", "engine", "--device", "cpu", *(["--engine", asked] if asked else [])]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("there", [("vllm",), ("sglang",), ("vllm", "sglang")])
def test_the_installed_engine_is_measured(there: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.Engine, "installed", lambda engine: engine.name in there)
    assert bench_engine._engine(None).name == there[0]
    assert [bench_engine._engine(name).name for name in there] == list(there)


# Fusions


def test_what_a_fusion_brings_is_the_ratio_of_each_round() -> None:
    without = [0.6, 0.6, 5.4, 0.6, 0.6, 0.9]
    one = found([1.0] * 6, [0.5, 0.5, 4.5, 0.5, 0.5, 0.5], qk_rope=without, kv_cache=[0.5] * 6)
    ratio = one.ratio(DECODE, "without qk_rope")
    assert tuple(ratio) == pytest.approx((1.2, 1.2, 1.8)), "with it, the overlay is faster: above 1"
    [cell] = one.document()["cells"]
    assert cell["fusions"]["qk_rope"] == {
        "without": {"median": 0.6, "low": 0.6, "high": 5.4}, "ratio": {"median": ratio[0], "low": 1.2, "high": 1.8}
    }  # fmt: skip
    assert cell["fusions"]["kv_cache"]["ratio"]["median"] == 1.0
    assert cell["ratio"]["median"] == 2.0, "of stock and overlay, as ever"


def test_the_report_has_a_part_for_each_fusion() -> None:
    one = found([1.0] * 6, [0.5] * 6, qk_rope=[0.6] * 6, kv_cache=[0.55] * 6)
    one.fusions.unused = ["experts"]
    times = {"stock": 900.0, "overlay": 400.0, "without qk_rope": 500.0, "without kv_cache": 420.0}
    one.kernels[DECODE] = {side: {"gpu_us": 1000 * us} for side, us in times.items()}
    lines = bench_engine.text(bench_engine.document([one])).splitlines()
    start = lines.index(next(line for line in lines if "experts:" in line))
    assert lines[start].strip() == f"experts: {bench_engine.UNUSED}"
    said = [re.sub(r"  +", "  ", line.strip()) for line in lines[start + 1 : start + 7]]
    assert said == [
        "qk_rope and kv_cache:  without  with (overlay)  times as fast",
        "decode step, batch 16  600.000 [600.000, 600.000]  500.000 [500.000, 500.000]  1.200 [1.200, 1.200]",
        "on the GPU  500.000  400.000  1.250",
        "kv_cache:  without  with (overlay)  times as fast",
        "decode step, batch 16  550.000 [550.000, 550.000]  500.000 [500.000, 500.000]  1.100 [1.100, 1.100]",
        "on the GPU  420.000  400.000  1.050",
    ]
    page = bench_engine.page(bench_engine.document([one]))
    assert "<h3>qk_rope and kv_cache: times as fast with as without</h3>" in page and "<td>1.250</td>" not in page
    assert '<td class="n">1.250</td>' in page and f"<p>experts: {bench_engine.UNUSED}.</p>" in page


def test_two_sides_are_reported_without_a_word_of_fusions() -> None:
    document = bench_engine.document([found([1.0] * 6, [0.5] * 6)])
    assert "fusions" not in json.dumps(document)
    assert "fusion" not in bench_engine.text(document) + bench_engine.page(document)


def test_a_fusion_that_costs_more_than_it_brings_is_told() -> None:
    one = found([1.0] * 6, [0.5] * 6, kv_cache=[0.4] * 6)
    assert list(one.findings()) == []
    where = "note: qwen8b, decode step, batch 16:"
    assert list(one.notes()) == [f"{where} 0.800 times as fast with kv_cache as without"]


def test_a_side_that_is_not_what_it_should_be_fails() -> None:
    one = found([1.0] * 6, [0.5] * 6, qk_rope=[0.6] * 6, kv_cache=[0.5] * 6)
    answer = Answer([1], [-0.1], [[]])
    one.answers = {"stock": [answer], "overlay": [answer], "without qk_rope": [Answer([1], [-0.9], [[]])]}
    one.answers["without kv_cache"] = [answer]
    one.fusions.built["without kv_cache"] = ["qk_rope", "kv_cache"]
    assert list(one.findings()) == [
        "DIFFERENT  qwen8b: without qk_rope, prompt 1: log-probabilities are 0.8000 apart at token 0",
        "NOT AS ASKED  qwen8b: the side without kv_cache has qk_rope, kv_cache, and should have qk_rope",
    ]


@pytest.mark.parametrize("fusion", settings.FUSIONS)
def test_a_side_lacks_one_fusion_and_what_needs_it(fusion: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in engine_pair.without(engines.VLLM, fusion).variables.items():
        monkeypatch.setenv(name, value)
    gone = {"qk_rope": {"qk_rope", "kv_cache"}}.get(fusion, {fusion})
    assert settings.fusions() == set(settings.FUSIONS) - gone


@pytest.mark.parametrize(("sides", "gib"), [(2, 6), (3, 5.3), (4, 4), (5, 3.2)])
def test_memory_follows_the_number_of_sides(sides: int, gib: float) -> None:
    memory = vllm_side.on_gpu([16, 1], sides)
    assert memory["kv_cache_memory_bytes"] / (1 << 30) == pytest.approx(gib, abs=0.05)
    assert memory["gpu_memory_utilization"] == pytest.approx(0.6 / sides)


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
    stand_in = dataclasses.replace(engines.VLLM, program=STAND_IN)
    monkeypatch.setattr(engines, "ENGINES", {"vllm": stand_in})

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
    assert "a hybrid for the CPU, vLLM  (d, " in out
    assert "  stock: vllm.model, no graphs\n  overlay: atom_patches.model, qk_rope fused, kv_cache fused, no g" in out
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


def test_a_run_with_fusions(bench: Callable[..., Any]) -> None:
    status, out, found = bench("", "--models", "tiny", "--fusions")
    assert status == 0 and "nothing wrong" in out
    [model] = found["models"]
    assert model["fusions"] == {
        "built": {"overlay": ["qk_rope", "kv_cache"], "without qk_rope": [], "without kv_cache": ["qk_rope"]},
        "measured": {
            "qk_rope": {"side": "without qk_rope", "label": "qk_rope and kv_cache"},
            "kv_cache": {"side": "without kv_cache", "label": "kv_cache"},
        },
        "unused": ["experts", "linear"],
        "lost": [],
    }
    for cell in model["cells"]:
        assert cell["ratio"]["median"] == pytest.approx(1.25)
        gains = {fusion: one["ratio"]["median"] for fusion, one in cell["fusions"].items()}
        assert gains == pytest.approx({"qk_rope": 1.5, "kv_cache": 1.25})
        assert list(cell["rounds"]) == ["stock", "overlay", "without qk_rope", "without kv_cache"]
    assert re.search(r"qk_rope and kv_cache: +without +with .*\n +decode step, batch 1 +6\.000 \[.*\] +4\.000 \[", out)


def test_options_of_the_engine_reach_every_side(bench: Callable[..., Any], tmp_path: Path) -> None:
    bench("", "--models", "tiny", "--option", "attention_backend=triton", "--option", 'dtype="half"', "--option", "n=3")
    for side in ("stock", "overlay"):
        log = (tmp_path / "bench-engine" / f"tiny.{side}.log").read_text()
        assert "options {'attention_backend': 'triton', 'dtype': 'half', 'n': 3}" in log


def test_fusions_may_be_named(bench: Callable[..., Any]) -> None:
    _, _, found = bench("", "--models", "tiny", "--fusions", "kv_cache,experts")
    [model] = found["models"]
    assert (list(model["fusions"]["measured"]), model["fusions"]["unused"]) == (["kv_cache"], ["experts"])


def test_a_side_that_does_not_start_leaves_the_others(bench: Callable[..., Any]) -> None:
    status, out, found = bench("without-qk_rope:lost", "--models", "tiny", "--fusions")
    assert status == 1
    assert out.count("INCOMPLETE") == 1 and "INCOMPLETE  tiny: tiny.without-qk_rope ended with status 9" in out
    [model] = found["models"]
    assert [list(cell["fusions"]) for cell in model["cells"]] == [["kv_cache"]] * 3
    assert all(len(times) == 2 for cell in model["cells"] for times in cell["rounds"].values())


def test_a_side_that_ends_leaves_what_there_is_of_all(bench: Callable[..., Any]) -> None:
    status, out, found = bench("without-kv_cache:ends", "--models", "tiny", "--fusions")
    assert status == 1 and "INCOMPLETE  tiny: tiny.without-kv_cache ended with status 7:\na line of the log" in out
    [[cell]] = [model["cells"] for model in found["models"]]
    assert set(cell["fusions"]) == {"qk_rope", "kv_cache"}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("logprob", "DIFFERENT  tiny: prompt 1: log-probabilities are 0.8000 apart at token 1"),
        ("stock", "NOT APPLIED  tiny: the overlay's side ran vllm.model"),
        ("plain", "NOT AS ASKED  tiny: the overlay lacks qk_rope"),
        ("without-kv_cache:fused", "NOT AS ASKED  tiny: the side without kv_cache has qk_rope, kv_cache, and should"),
        ("without-qk_rope:logprob", "DIFFERENT  tiny: without qk_rope, prompt 1: log-probabilities are 0.8000 apart"),
    ],
)
def test_what_makes_figures_worthless(bench: Callable[..., Any], wrong: str, told: str) -> None:
    status, out, _ = bench(wrong, "--models", "tiny", *(["--fusions"] if ":" in wrong else []))
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


@pytest.mark.parametrize(
    "option",
    [
        ["--models", "qwen"],
        ["--batches", "1,x"],
        ["--lengths", "0"],
        ["--fusions", "moe"],
        ["--engine", "trt"],
        ["--option", "dtype"],
        ["--option", "--dtype=half"],
    ],  # fmt: skip
)
def test_what_is_not_understood(option: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "engine", *option])
