"""The benchmark command and its table: what is printed, ranked and written, from findings made up for the test."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from atom_patches.cli import bench, bench_picture, main
from atom_patches.kernels import ranking, registry, suite
from atom_patches.kernels.results import CaseReport, Ceilings, Machine, Served, Timing
from atom_patches.kernels.suite import Key

MACHINE = Machine("GPU 1", "cuda", "vllm", {"torch": "2", "vllm": "0.20.2"}, Ceilings(4e12, 800e12, "copy; product"))


def timed(microseconds: float, how: str = "CUDA graph") -> Served:
    seconds = microseconds * 1e-6
    return Served("timed", deviation=0.0, timing=Timing(seconds, seconds, seconds, 9, how))


def case(label: str = "a", shape: str = "small", auto: str = "engine", **providers: Served) -> CaseReport:
    return CaseReport(
        "norms", "norm", label, shape_class=shape, bytes=4e6, flops=8e6, sets=3, auto=auto, providers=providers
    )


class TestRanking:
    def test_the_fastest_comes_first(self) -> None:
        report = case(torch=timed(30), engine=timed(12), triton=timed(10))
        assert ranking.rank([report]) == ["triton", "engine", "torch"]

    def test_several_cases_of_a_class_count_alike(self) -> None:
        reports = [case(triton=timed(10), engine=timed(20)), case(triton=timed(1000), engine=timed(1005))]
        assert ranking.rank(reports) == ["triton", "engine"]

    def test_nobody_who_loses_to_the_engine_anywhere_comes_before_it(self) -> None:
        reports = [case(triton=timed(10), engine=timed(100)), case(triton=timed(102), engine=timed(100))]
        assert ranking.rank(reports) == ["engine", "triton"]

    def test_within_the_noise_the_faster_mean_wins(self) -> None:
        reports = [case(triton=timed(10), engine=timed(100)), case(triton=timed(100.9), engine=timed(100))]
        assert ranking.rank(reports) == ["triton", "engine"]

    @pytest.mark.parametrize("state", ["wrong", "error"])
    def test_who_is_wrong_in_one_case_is_in_no_ranking(self, state: Any) -> None:
        reports = [case(triton=timed(10), engine=timed(100)), case(triton=Served(state, "?"), engine=timed(100))]
        assert ranking.rank(reports) == ["engine"]

    def test_who_refuses_a_case_is_ranked_by_the_others(self) -> None:
        reports = [case(triton=timed(10), engine=timed(100)), case(triton=Served("refused", "?"), engine=timed(100))]
        assert ranking.rank(reports) == ["triton", "engine"]
        assert ranking.automatic(reports) == ["triton", "engine"]

    def test_what_the_engine_itself_calls_is_the_baseline_and_in_no_ranking(self) -> None:
        own = timed(9).timing
        report = replace(case(triton=timed(10), engine=timed(15)), baseline=own)
        assert ranking.rank([report]) == ["triton", "engine"]
        assert report.ratio("triton") == pytest.approx(0.9)
        assert "baseline" in bench.render(found(report))


class TestTable:
    @pytest.fixture(autouse=True)
    def folder(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        monkeypatch.setattr(registry, "MEASURED", tmp_path)
        registry._measured.cache_clear()
        return tmp_path

    def test_the_registry_reads_what_was_recorded(self, folder: Path) -> None:
        path = ranking.record(MACHINE, [case(engine=timed(12), triton=timed(10))])
        assert path == folder / "GPU_1" / "vllm.json"
        table = {"norm": {"small": ["triton", "engine"]}}
        assert registry._measured("GPU 1", "atom_patches.vllm.kernels") == table

    def test_a_run_replaces_its_own_classes_only(self) -> None:
        ranking.record(MACHINE, [case(engine=timed(1)), case(shape="large", engine=timed(9), triton=timed(8))])
        path = ranking.record(MACHINE, [case(engine=timed(12), triton=timed(10))])
        table = json.loads(path.read_text())
        assert table["ranking"] == {"norm": {"large": ["triton", "engine"], "small": ["triton", "engine"]}}
        assert table["evidence"]["norm"]["small"] == {"run": 1, "microseconds": {"a": {"engine": 12.0, "triton": 10.0}}}
        assert table["evidence"]["norm"]["large"]["run"] == 0
        assert len(table["runs"]) == 2

    def test_a_run_that_nothing_stands_on_any_more_is_dropped(self) -> None:
        ranking.record(MACHINE, [case(engine=timed(1))])
        path = ranking.record(MACHINE, [case(engine=timed(2))])
        table = json.loads(path.read_text())
        assert len(table["runs"]) == 1
        assert table["runs"][0]["versions"] == {"torch": "2", "vllm": "0.20.2"}
        assert table["evidence"]["norm"]["small"]["run"] == 0

    def test_a_case_without_times_leaves_no_trace(self) -> None:
        path = ranking.record(MACHINE, [case(engine=Served("error", "?")), case(shape="b", engine=timed(1))])
        assert list(json.loads(path.read_text())["ranking"]["norm"]) == ["b"]


def found(*reports: CaseReport, **broken: str) -> bench.Found:
    result = bench.Found(MACHINE, broken)
    for report in reports:
        result.add(report)
    return result


class TestOutput:
    def test_a_line_says_speed_share_and_ratio(self) -> None:
        text = bench.render(found(case("16 x 8", engine=timed(4), triton=timed(2, "from the host"), auto="triton")))
        lines = [line.split() for line in text.splitlines()]
        assert ["engine", "4.0", "us", "1,000", "2.00", "25.0%", "1.00"] in lines
        assert ["triton", "2.0", "us", "2,000", "4.00", "50.0%", "2.00", "from", "the", "host"] in lines
        assert ["auto", "triton,", "2.00"] in lines
        assert text.endswith("1 cases, nothing wrong")

    def test_a_wrong_provider_gets_no_speed(self) -> None:
        result = found(case(engine=timed(4), triton=Served("wrong", "largest error 3")))
        line = next(line for line in bench.render(result).splitlines() if line.startswith("  triton"))
        assert line.split() == ["triton", "FAILED:", "largest", "error", "3"]
        assert list(bench._findings(result)) == ["FAILED  norm  a: triton: largest error 3"]

    def test_a_refusal_is_no_finding(self) -> None:
        assert not list(bench._findings(found(case(engine=timed(4), triton=Served("refused", "float64")))))

    def test_auto_may_not_be_slower_than_the_engine(self) -> None:
        (line,) = bench._findings(found(case(engine=timed(98), triton=timed(100), auto="triton")))
        assert line == "SLOWER  norm  a: auto takes triton, which is 0.98 times as fast as the engine"
        assert not list(bench._findings(found(case(engine=timed(99.5), triton=timed(100), auto="triton"))))

    def test_what_was_not_measured_is_a_finding(self) -> None:
        lost = CaseReport("norms", "norm", "b", problem="gave up after 90 s")
        result = found(lost, moe="SyntaxError: line 3")
        assert list(bench._findings(result)) == [
            "INCOMPLETE  moe: SyntaxError: line 3",
            "NOT MEASURED  norm  b: gave up after 90 s",
        ]
        assert "  not measured: gave up after 90 s" in bench.render(result)

    def test_the_document_is_plain_data(self) -> None:
        document = json.loads(json.dumps(bench.document(found(case(engine=timed(4), triton=timed(2), auto="triton")))))
        (one,) = document["cases"]
        assert one["ratios"] == {"engine": 1.0, "triton": 2.0}
        assert one["auto_ratio"] == 2.0
        assert one["floor"] == 1e-6
        assert document["machine"]["ceilings"]["bandwidth"] == 4e12


class FakeSuite:
    """Stands in for the worker: two cases, the second of which is only reached if the first is not interrupted."""

    machine = MACHINE
    broken: dict[str, str] = {}
    cases = [Key("norms", 0, "norm", "1 x 8"), Key("norms", 1, "norm", "16 x 8"), Key("moe", 0, "experts", "16 x 8")]
    interrupt = False
    closed = False

    def __init__(self, setup: suite.Setup) -> None:
        FakeSuite.setup = setup

    def run(self, keys: list[Key]) -> Any:
        for key in keys:
            yield case(key.label, shape=key.label, engine=timed(4), triton=timed(2))
            if FakeSuite.interrupt:
                raise KeyboardInterrupt

    def close(self) -> None:
        FakeSuite.closed = True


class TestCommand:
    @pytest.fixture(autouse=True)
    def fakes(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(suite, "Suite", FakeSuite)
        monkeypatch.setattr(registry, "MEASURED", tmp_path)
        monkeypatch.setattr(FakeSuite, "interrupt", False)
        monkeypatch.setattr(FakeSuite, "closed", False)
        monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: object())

    def test_filters_pick_families_operators_and_labels(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "experts"]) == 0
        assert "1 cases" in capsys.readouterr().out
        assert main(["bench", "norms", "experts", "--case", "16*"]) == 0
        assert "2 cases" in capsys.readouterr().out
        assert FakeSuite.closed

    def test_a_misspelt_operator_is_named_with_the_nearest(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "nomr"]) == 1
        assert "'nomr'; did you mean norm?" in capsys.readouterr().err
        assert FakeSuite.closed

    def test_what_it_finds_is_written_and_recorded(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        asked = ["bench", "norms", "--record", "--providers", "engine,aiter,triton"]
        assert main([*asked, "--json", str(tmp_path / "found.json")]) == 0
        assert [one["auto"] for one in json.loads((tmp_path / "found.json").read_text())["cases"]] == ["triton"] * 2
        assert json.loads((tmp_path / "GPU_1" / "vllm.json").read_text())["ranking"]["norm"].keys() == {
            "1 x 8",
            "16 x 8",
        }

    def test_an_interrupted_run_keeps_what_it_has(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(FakeSuite, "interrupt", True)
        assert main(["bench", "--json", str(tmp_path / "found.json")]) == 1
        assert len(json.loads((tmp_path / "found.json").read_text())["cases"]) == 1
        assert "INCOMPLETE  the run: interrupted" in capsys.readouterr().out

    def test_a_ranking_is_recorded_only_of_everyone(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "--record", "--providers", "triton,engine"]) == 1
        assert main(["bench", "--record", "--engine", "none"]) == 1
        assert "--record needs an engine and its, AITER's and Triton's kernels" in capsys.readouterr().err

    def test_providers_keep_their_order_and_their_names(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "--providers", "torch, engine"]) == 0
        assert FakeSuite.setup == suite.Setup("cuda", "vllm", ("engine", "torch"))
        with pytest.raises(SystemExit):
            main(["bench", "--providers", "cuda"])
        assert "'cuda' is no provider" in capsys.readouterr().err

    def test_without_a_gpu(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        def refuse(setup: suite.Setup) -> None:
            raise suite.NoDevice("no GPU")

        monkeypatch.setattr(suite, "Suite", refuse)
        assert main(["bench"]) == 2
        assert capsys.readouterr().err == "atom_patches: no GPU\n"


class TestPicture:
    def test_without_matplotlib_there_is_a_message(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(bench_picture.NoPicture, match="matplotlib is not installed"):
            bench_picture.draw(tmp_path / "a.svg", MACHINE, [(case(engine=timed(1), triton=timed(2)), "engine")])

    def test_without_ratios_there_is_a_message(self, tmp_path: Path) -> None:
        with pytest.raises(bench_picture.NoPicture, match="no case was timed against"):
            bench_picture.draw(tmp_path / "a.svg", MACHINE, [(case(torch=timed(2)), "torch")])

    def test_every_ratio_is_drawn(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        axes = Axes()
        figure = SimpleNamespace(subplots=lambda: axes, savefig=lambda path, metadata: path.write_text("drawn"))
        plot, figures = ModuleType("matplotlib"), ModuleType("matplotlib.figure")
        plot.rc_context = lambda options: pytest.MonkeyPatch.context()  # type: ignore[attr-defined]
        figures.Figure = lambda **options: figure  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "matplotlib", plot)
        monkeypatch.setitem(sys.modules, "matplotlib.figure", figures)
        shown = [
            (case("a", engine=timed(1), triton=timed(2)), "engine"),
            (case("b", engine=timed(80), torch=timed(4)), None),
        ]
        bench_picture.draw(tmp_path / "a.svg", MACHINE, shown)
        assert [text.strip() for text in axes.texts] == ["0.50", "20.00"]
        assert axes.names == ["norm  a  (engine)", "norm  b  (none)"]


class Axes:
    """Remembers what is written on it."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.names: list[str] = []

    def text(self, x: float, y: float, text: str, **_: Any) -> None:
        self.texts.append(text)

    def set_yticks(self, places: Any, names: list[str]) -> None:
        self.names = names

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kw: None
