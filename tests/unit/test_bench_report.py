"""Reports: one HTML file by itself, and two runs compared."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atom_patches.cli import bench_report, main

Write = Callable[..., Path]


def timed(seconds: float) -> dict[str, Any]:
    return {"state": "timed", "reason": "", "timing": {"seconds": seconds}}


def case(label: str, problem: str = "", **providers: dict[str, Any]) -> dict[str, Any]:
    engine = providers.get("engine", {}).get("timing")
    ratios = {
        name: engine["seconds"] / one["timing"]["seconds"] if engine and one["timing"] else None
        for name, one in providers.items()
    }
    return {
        "operation": "norm", "label": label, "problem": problem, "providers": providers, "ratios": ratios,
        "auto": "triton", "floor": 1e-6,
    }  # fmt: skip


def document(*cases: dict[str, Any], device: str = "GPU <1>", kind: str = "cuda") -> dict[str, Any]:
    ceilings = {"bandwidth": 4e12, "rate": 8e14, "how": "copy; product"}
    machine = {"device": device, "kind": kind, "engine": "vllm", "versions": {"torch": "2"}, "ceilings": ceilings}
    return {"machine": machine, "cases": list(cases), "findings": []}


def drawn(page: str) -> ET.Element:
    return ET.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])


class TestPage:
    PAGE = bench_report.page(
        document(
            case("16 x 8", engine=timed(4e-6), triton=timed(2e-6)),
            case(
                "1 x 8",
                engine=timed(2e-6),
                triton=timed(4e-6),
                aiter={"state": "wrong", "reason": "3 < 4", "timing": None},
            ),
            case("lost", problem="gave up"),
        )
    )

    def test_it_loads_nothing_and_runs_nothing(self) -> None:
        assert "<script" not in self.PAGE and "http" not in self.PAGE and "url(" not in self.PAGE

    def test_text_is_text(self) -> None:
        assert "GPU &lt;1&gt;" in self.PAGE and "3 &lt; 4" in self.PAGE and "gave up" in self.PAGE

    def test_faster_is_to_the_right_of_the_engine_and_slower_to_the_left(self) -> None:
        bars = [one for one in drawn(self.PAGE).iter("rect") if one.get("height") == str(bench_report.BAR - 2)]
        engine = bench_report._place(1.0)
        places = [(float(one.get("x", 0)), float(one.get("width", 0))) for one in bars]
        assert len(places) == 2
        (fast, far), (slow, near) = places
        assert fast == pytest.approx(engine, abs=0.1) and slow + near == pytest.approx(engine, abs=0.1)
        assert far == pytest.approx(near, abs=0.1), "twice and half are as far away"

    def test_what_is_wrong_stands_out(self) -> None:
        assert '<td class="bad">WRONG</td>' in self.PAGE

    def test_every_figure_is_in_the_table(self) -> None:
        for figure in ("2.0 us", "4.0 us", "2.00", "0.50", "25.0%", "50.0%"):
            assert f">{figure}<" in self.PAGE

    def test_a_cpu_s_times_say_that_they_say_nothing(self) -> None:
        page = bench_report.page(document(case("a", torch=timed(1e-6)), kind="cpu"))
        assert "say nothing about a GPU" in page and "No case was timed against an engine" in page

    @pytest.mark.parametrize("ratio", [1e-6, 0.1, 10.0, 1e6])
    def test_bars_stay_on_the_axis(self, ratio: float) -> None:
        assert bench_report.LABEL <= bench_report._place(ratio) <= bench_report.LABEL + bench_report.PLOT


class TestCompare:
    @pytest.fixture
    def write(self, tmp_path: Path) -> Write:
        def write(name: str, *cases: dict[str, Any], **facts: Any) -> Path:
            path = tmp_path / f"{name}.json"
            path.write_text(json.dumps(document(*cases, **facts)))
            return path

        return write

    def compared(self, capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str]:
        status = main(["bench", "compare", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    def test_faster_is_fine(self, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
        before, after = (write(name, case("a", triton=timed(one))) for name, one in (("b", 4e-6), ("a", 2e-6)))
        status, text = self.compared(capsys, before, after)
        assert status == 0 and text.splitlines()[2].split() == ["triton", "4.0", "us", "2.0", "us", "2.00"]
        assert text.endswith("nothing got worse\n")

    def test_slower_than_the_limit_fails(self, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
        before, after = (write(name, case("a", triton=timed(one))) for name, one in (("b", 94e-6), ("a", 100e-6)))
        status, text = self.compared(capsys, before, after)
        assert status == 1 and "SLOWER  norm  a: triton is 0.94 times as fast as before" in text
        assert self.compared(capsys, before, after, "--limit", "0.9")[0] == 0

    def test_who_is_timed_no_more_fails(self, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
        before = write("b", case("a", triton=timed(1e-6), engine=timed(1e-6)), case("b", engine=timed(1e-6)))
        wrong = {"state": "wrong", "reason": "3", "timing": None}
        status, text = self.compared(capsys, before, write("a", case("a", triton=wrong, engine=timed(1e-6))))
        assert status == 1 and "LOST  norm  a: triton" in text
        assert "norm  b" not in text, "a case that was not run again is not lost"

    def test_another_machine_is_said(self, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
        before, after = (write(name, case("a", engine=timed(1e-6)), device=name) for name in ("H200", "B200"))
        assert "note: another device: H200, then B200" in self.compared(capsys, before, after)[1]

    def test_for_a_script_and_for_a_reader(
        self, write: Write, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        before, after = (write(name, case("a", triton=timed(one))) for name, one in (("b", 4e-6), ("a", 2e-6)))
        status, text = self.compared(capsys, before, after, "--json", "--html", tmp_path / "r.html")
        assert status == 0 and json.loads(text)["cases"][0]["ratio"] == 2.0
        page = (tmp_path / "r.html").read_text()
        assert len([one for one in drawn(page).iter("rect")]) == 2 and "Nothing got worse." in page

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"cases": [{}]}', '{"cases": 3}'])
    def test_other_files_are_refused_by_name(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
    ) -> None:
        path = tmp_path / "other.json"
        path.write_text(text)
        status, told = self.compared(capsys, path, path)
        assert status == 1 and f"{path}: not a file that `bench --json` wrote" in told

    def test_a_missing_file_is_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "No such file" in self.compared(capsys, tmp_path / "none", tmp_path / "none")[1]

    def test_nothing_in_common_is_an_error(self, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
        before, after = write("b", case("a", engine=timed(1))), write("a", case("b", engine=timed(1)))
        status, text = self.compared(capsys, before, after)
        assert status == 1 and "no timed case in common" in text
