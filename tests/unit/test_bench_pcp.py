"""`bench pcp`: the model of a split prefill against sums done by hand, the parts on a CPU, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from atom_patches.bench import pcp_answer, pcp_model, pcp_parts, pcp_text, pcp_worker
from atom_patches.bench.pcp_model import Estimate, Part, Variant, estimate
from atom_patches.cli import main
from atom_patches.kernels import registry, timing
from atom_patches.kernels.gdn_chain import GDN_PREFILL
from atom_patches.kernels.results import CaseReport, Ceilings, Machine, Served, Timing
from atom_patches.kernels.suite import Setup
from atom_patches.runtime import pcp_host
from atom_patches.runtime.link import Link

MODEL = pcp_model.SHAPES["qwen3.6-35b-a3b"]
TINY = pcp_model.SHAPES["tiny"]
NO_LINK = Link(float("inf"), 0.0)
MACHINE = Machine("GPU 1", "cuda", "vllm", {"torch": "2"}, Ceilings(4e12, 8e14, "made up"))

lengths = st.integers(64, 5000)
worlds = st.integers(2, 8)
variants = st.sampled_from(pcp_model.variants("auto"))


def pairs(part: Part) -> int:
    """Pairs of a query and a key that it sees."""
    return sum(rows * (keys - rows) + rows * (rows + 1) // 2 for rows, keys in part.pieces)


def work(part: Part) -> float:
    """Seconds in proportion to what a part computes; a second pass costs as much as the first."""
    if part.kind == "attention":
        return pairs(part) * 1e-3
    costs = {"recurrent_scan": 5.0, "recurrent_segment": 5.0, "experts": 7.0, "recurrent_in": 1.0}
    if part.kind in ("experts_share", "recurrent_heads"):
        return {"experts_share": 7.0, "recurrent_heads": 5.0}[part.kind] * part.rows / part.world
    return costs.get(part.kind, 0.0) * part.rows


def only(**kinds: float) -> Callable[[Part], float]:
    """These kinds take so long, whatever their rows; the others take nothing."""
    return lambda part: kinds.get(part.kind, 0.0)


def play(
    length: int,
    world: int,
    variant: Variant,
    seconds: Callable[[Part], float],
    link: Link = NO_LINK,
    launch: float = 0.0,
    surplus: float = 1.0,
) -> Estimate:
    return estimate(MODEL, length, world, variant, link, seconds, launch, surplus)


def variant(attention: Any = "zigzag", recurrent: str = "two_pass", experts: str = "replicate") -> Variant:
    return Variant(attention, recurrent, experts, "auto")


class TestModel:
    def test_one_rank_runs_every_layer_once_and_exchanges_nothing(self) -> None:
        recurrent = {"recurrent_in": 1, "recurrent_scan": 2, "recurrent_out": 3}
        found = play(1000, 1, variant(), only(**recurrent, attention_in_cached=5, attention=7, experts=11))
        assert found.seconds == 30 * (1 + 2 + 3) + 10 * (5 + 7) + 40 * 11
        assert found.slowest == found.seconds
        assert not found.exchanged

    @given(lengths, worlds, variants)
    def test_no_split_beats_the_bound(self, length: int, world: int, chosen: Variant) -> None:
        assume(pcp_model.runs(MODEL, world, chosen))
        link = Link(350e9, 20e-6)
        alone = play(length, 1, chosen, work, link).seconds
        found = play(length, world, chosen, work, link, launch=1e-4)
        assert found.seconds >= found.bound(alone, world) * (1 - 1e-9)
        assert found.seconds == pytest.approx(found.slowest + found.waiting + found.exchange + found.host)

    @given(lengths, worlds, variants)
    def test_attention_answers_every_pair_once(self, length: int, world: int, chosen: Variant) -> None:
        assume(pcp_model.runs(MODEL, world, chosen))
        asked = {part for part in pcp_model.parts(MODEL, length, world, chosen) if part.kind == "attention"}
        seen: list[Part] = []
        estimate(replace(MODEL, attention_layers=1), length, world, chosen, NO_LINK, lambda p: seen.append(p) or 0.0)
        attended = [part for part in seen if part.kind == "attention"]
        assert set(attended) == asked
        assert sum(map(pairs, attended)) == length * (length + 1) // 2

    @pytest.mark.parametrize("world", [2, 4, 8])
    def test_the_slowest_rank_of_contiguous_attention(self, world: int) -> None:
        length = 65536
        attention: Callable[[Part], float] = lambda part: float(pairs(part))  # noqa: E731
        alone = play(length, 1, variant(), attention).seconds
        contiguous = play(length, world, variant("contiguous"), attention).seconds
        zigzag = play(length, world, variant("zigzag"), attention).seconds
        assert contiguous / alone == pytest.approx((2 * world - 1) / world**2, rel=1e-3)
        assert zigzag / alone == pytest.approx(1 / world, rel=1e-3)

    def test_the_bound_shares_the_work_and_not_the_exchanges(self) -> None:
        exchanged = {"a": pcp_model.Exchanged(2, 10, 3.0), "b": pcp_model.Exchanged(1, 10, 1.0)}
        exchanged["hops"] = pcp_model.Exchanged(3, 10, 9.0, all_meet=False)
        assert Estimate(20.0, 15.0, exchanged).bound(40.0, 4) == 10.0 + 4.0

    def test_a_relay_waits_for_the_ranks_before_it_once_until_all_meet(self) -> None:
        """The first rank is three scans ahead after the first layer, and stays so until full attention."""
        found = play(1000, 4, variant(recurrent="relay"), only(recurrent_scan=1, recurrent_in=10, experts=100))
        assert found.waiting == 10 * 3
        assert found.seconds == 30 * (10 + 1) + 40 * 100 + found.waiting

    def test_a_relay_waits_in_every_layer_if_experts_exchange_rows(self) -> None:
        spread = variant(recurrent="relay", experts="ep")
        assert play(1000, 4, spread, only(recurrent_scan=1, experts_share=100)).waiting == 30 * 3

    def test_late_ranks_of_contiguous_attention_hide_a_relay(self) -> None:
        """A rank that is late by a scan, as it attended to more keys, waits for nobody."""

        def seconds(part: Part) -> float:
            return part.pieces[0][1] / 250 if part.kind == "attention" else float(part.kind == "recurrent_scan")

        # The first layers come before any attention.
        assert play(1000, 4, variant("contiguous", "relay"), seconds).waiting == 3

    @pytest.mark.parametrize(
        ("attention", "recurrent", "experts", "launches"),
        [
            ("contiguous", "relay", "replicate", 30 * 10 + 10 * 6),
            ("zigzag", "relay", "replicate", 30 * 10 + 10 * (6 + 8)),
            ("zigzag", "two_pass", "replicate", 30 * 21 + 10 * (6 + 8)),
            ("contiguous", "redundant", "ep", 30 * 12 + 10 * 6 + 40 * 3),
        ],
    )
    def test_what_the_host_issues_is_added(self, attention: str, recurrent: str, experts: str, launches: int) -> None:
        chosen = variant(attention, recurrent, experts)
        found = play(1000, 2, chosen, only(experts=1), launch=0.5)
        assert found.host == 0.5 * launches
        assert found.seconds == play(1000, 2, chosen, only(experts=1)).seconds + found.host
        assert found.waiting == 0
        assert play(1000, 1, chosen, only(), launch=0.5).seconds == 0

    def test_a_relay_pays_each_hop(self) -> None:
        link = Link(1e9, 0.5)
        found = play(1000, 4, variant(recurrent="relay"), only(), link).exchanged
        assert found["states"].count == 30 * 3
        assert found["states"].seconds == pytest.approx(30 * 3 * (0.5 + MODEL.gdn.slot_bytes / 1e9))
        assert found["states"].bytes == found["final states"].bytes == 30 * MODEL.gdn.slot_bytes
        assert found["final states"].count == 1

    def test_two_passes_scan_at_once(self) -> None:
        found = play(1000, 4, variant(), only(recurrent_scan=1, recurrent_segment=2, recurrent_enter=3))
        assert found.seconds == 30 * 6
        assert found.waiting == 0
        # Two ranks have nothing to compose: the second one goes on from the first one's state.
        assert play(1000, 2, variant(), only(recurrent_scan=1, recurrent_enter=3)).seconds == 30

    def test_heads_are_dealt_out_and_collected(self) -> None:
        found = play(1000, 4, variant(recurrent="head_all_to_all"), only(deal_out_heads=1, recurrent_heads=2))
        assert found.seconds == 30 * 3
        # 250 rows of a rank, of which it keeps the quarter that is of its heads.
        assert found.exchanged["rows by heads"].bytes == 30 * 250 * (8192 + 64) * 2 * 3 / 4
        assert found.exchanged["outputs by heads"].bytes == 30 * 250 * 4096 * 2 * 3 / 4
        assert not pcp_model.runs(MODEL, 3, variant(recurrent="head_all_to_all"))

    def test_overlay_kernels_are_the_engines_but_for_scans(self) -> None:
        asked = pcp_model.parts(MODEL, 1000, 4, variant()._replace(kernels="overlay"))
        own = {part.kind for part in asked if part.kernels == "auto"}
        assert own == {"recurrent_scan", "recurrent_segment", "recurrent_enter"}
        engine = pcp_model.parts(MODEL, 1000, 4, variant()._replace(kernels="engine"))
        assert {part.kind for part in engine if part.kernels == "auto"} == {"recurrent_segment", "recurrent_enter"}

    def test_only_some_ways(self) -> None:
        found = pcp_model.variants("auto", frozenset({"zigzag", "relay", "two_pass"}))
        assert {(one.attention, one.recurrent, one.experts) for one in found} == {
            ("zigzag", recurrent, experts) for recurrent in ("relay", "two_pass") for experts in ("replicate", "ep")
        }

    def test_a_redundant_scan_has_all_rows(self) -> None:
        rows: set[int] = set()
        play(1000, 4, variant(recurrent="redundant"), lambda part: rows.add(part.rows) or 0.0)
        scans = {p.rows for p in pcp_model.parts(MODEL, 1000, 4, variant(recurrent="redundant")) if "scan" in p.kind}
        assert scans == {1000}
        assert rows >= {250, 1000}

    @pytest.mark.parametrize("recurrent", ["relay", "two_pass"])
    def test_recurrent_layers_exchange_as_much_for_any_length(self, recurrent: str) -> None:
        kinds = {"halos", "states", "final states"}
        short, long = (play(n, 4, variant(recurrent=recurrent), only()).exchanged for n in (1000, 100_000))
        assert {k: one.bytes for k, one in short.items() if k in kinds} == {
            k: one.bytes for k, one in long.items() if k in kinds
        }
        assert "recurrent rows" not in short

    def test_bytes_of_the_model(self) -> None:
        found = play(65536, 4, variant(experts="ep"), only()).exchanged
        share = 3 / 4
        assert found["keys and values"].bytes == 10 * 65536 * 2 * 2 * 256 * 2 * share
        assert found["states"].bytes == 30 * 4 * 2 * 32 * 128 * 128 * 4 * share
        assert found["experts' rows"].bytes == 40 * 65536 * (2048 + 256) * 2 * share
        assert found["experts' sums"].bytes == 40 * 65536 * 2048 * 2 * share
        # Rank 1 has chunks 2 and 3 of 8 and answers 1 and 6: it gives two away.
        assert found["queries"].bytes == found["answers"].bytes == 10 * 16384 * 16 * 256 * 2

    def test_experts_of_their_own_exchange_nothing(self) -> None:
        assert not {"experts' rows", "experts' sums"} & set(play(1000, 2, variant(), only()).exchanged)

    def test_an_exchange_takes_the_link_and_all_meet(self) -> None:
        clocks = pcp_model.Clocks(2, Link(100.0, 0.5), lambda part: float(part.rows))
        clocks.work_each([Part("a", "auto", 1), Part("a", "auto", 3)])
        clocks.exchange("rows", 200)
        assert clocks.at == [5.5, 5.5]
        assert clocks.busy == [1.0, 3.0]

    @given(lengths, st.integers(1, 8), variants)
    def test_the_parts_are_those_that_are_asked_for(self, length: int, world: int, chosen: Variant) -> None:
        assume(pcp_model.runs(MODEL, world, chosen))
        asked: set[Part] = set()
        play(length, world, chosen, lambda part: asked.add(part) or 0.0)
        assert asked == set(pcp_model.parts(MODEL, length, world, chosen))

    def test_long_parts_count_in_proportion(self) -> None:
        part = Part("experts", "auto", 3 * pcp_model.ROW_LIMIT)
        assert part.measured() == (part._replace(rows=pcp_model.ROW_LIMIT), 3.0)
        attention = Part("attention", "engine", 262144, 1, ((262144, 262144),))
        assert attention.measured() == (attention, 1.0)


class TestParts:
    @pytest.mark.parametrize("kind", pcp_parts.KINDS)
    def test_every_kind_is_asked_for_and_runs(self, kind: str) -> None:
        asked = [
            part
            for world in (1, 2, 4)
            for one in pcp_model.variants("auto")
            if pcp_model.runs(TINY, world, one)
            for part in pcp_model.parts(TINY, 40, world, one)
            if part.kind == kind
        ]
        kernels = pcp_parts.Kernels("auto")
        for part in set(asked):
            call, arguments = pcp_parts.Parts(TINY, torch.device("cpu")).build(part, kernels)
            call(*arguments)
        assert asked
        assert set(kernels.served.values()) <= {"torch"}

    def test_attention_runs_the_queries_where_they_stand(self) -> None:
        """Both pieces of a rank's zigzag share come out as in the whole prompt's attention."""
        whole = Part("attention", "auto", 40, 1, ((40, 40),))
        share = Part("attention", "auto", 20, 1, ((10, 10), (10, 40)))
        builder = pcp_parts.Parts(TINY, torch.device("cpu"))
        call, arguments = builder.build(whole, pcp_parts.Kernels("auto"))
        expected, _ = call(*arguments)
        own, mine = builder.build(share, pcp_parts.Kernels("auto"))
        rows = torch.cat([arguments[0][:10], arguments[0][30:]])
        out, _ = own(rows, arguments[1], arguments[2], arguments[3].expand(2, -1), *mine[4:])
        torch.testing.assert_close(out, torch.cat([expected[:10], expected[30:]]))

    def test_the_share_of_experts_is_the_busiest_ranks(self) -> None:
        call, arguments = pcp_parts.Parts(TINY, torch.device("cpu")).build(
            Part("experts_share", "auto", 40, 3), pcp_parts.Kernels("auto")
        )
        local = arguments[-1]
        assert arguments[2].shape[0] == (local >= 0).sum()
        assert sorted(local[local >= 0].tolist()) == list(range(int((local >= 0).sum())))
        assert call(*arguments).shape == (40, TINY.hidden)
        # 8 experts over 3 ranks: 3, 3 and 2 of them.
        chosen = arguments[1].topk(TINY.top_k, dim=1).indices.flatten().bincount(minlength=8)
        assert chosen[local >= 0].sum() == max(int(part.sum()) for part in chosen.split([3, 3, 2]))

    def test_a_share_of_the_heads_goes_to_its_rank_and_comes_back(self) -> None:
        builder, kernels = pcp_parts.Parts(TINY, torch.device("cpu")), pcp_parts.Kernels("auto")
        deal, (qkv, channels, b, a) = builder.build(Part("deal_out_heads", "auto", 6, 2), kernels)
        sent = deal(qkv, channels, b, a)
        assert sent.shape == (2, 6, (TINY.gdn.channels + 2 * TINY.value_heads) // 2)
        torch.testing.assert_close(sent[1, :, -2:], a[:, 2:])
        collect, (received, output) = builder.build(Part("collect_heads", "auto", 6, 2), kernels)
        collect(received, output)
        torch.testing.assert_close(output[:, 2:], received[1])

    def test_a_reference_is_no_kernel_on_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pcp_parts, "_on_gpu", lambda arguments: True)
        call, arguments = pcp_parts.Parts(TINY, torch.device("cpu")).build(
            Part("recurrent_scan", "auto", 8), pcp_parts.Kernels("auto")
        )
        with pytest.raises(pcp_parts.NoKernel, match="no kernel serves gdn_prefill"):
            call(*arguments)

    def test_the_engine_is_asked_first_as_it_calls_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[str] = []
        monkeypatch.setattr(registry, "supports", lambda operation, provider, arguments: registry.YES)
        monkeypatch.setattr(registry, "engine_call", lambda operation: lambda *arguments: calls.append("own"))
        monkeypatch.setattr(registry, "implementation", lambda *found: lambda *arguments: calls.append(found[1]))
        for asked in ("engine", "auto"):
            kernels = pcp_parts.Kernels(asked)
            part = Part("recurrent_scan", asked, 8)
            call, arguments = pcp_parts.Parts(TINY, torch.device("cpu")).build(part, kernels)
            call(*arguments)
            call(*arguments)
            assert kernels.served == {GDN_PREFILL.name: {"engine": "engine", "auto": "torch"}[asked]}
        assert calls == ["own", "own", "torch", "torch"]


class TestWorker:
    def test_a_part_that_fails_says_why(self) -> None:
        part = Part("nothing", "auto", 8)
        device = torch.device("cpu")
        report = pcp_worker.measure(pcp_parts.Parts(TINY, device), pcp_worker.key_of(0, part), part, device)
        assert report.problem == "LookupError: no part is called 'nothing'"
        assert report.seconds(pcp_worker.NAME) is None

    @pytest.mark.parametrize(("once", "timed", "rounds"), [(0.01, "replays", 0), (0.1, "calls", 3), (0.9, "calls", 1)])
    def test_long_parts_are_timed_a_few_times(
        self, once: float, timed: str, rounds: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replays = Timing(1.0, 1.0, 1.0, 9, "replays")
        monkeypatch.setattr(timing, "seconds", lambda work: (work(), once)[1])
        monkeypatch.setattr(timing, "measure", lambda calls, sets, budget: {pcp_worker.NAME: replays})
        calls: list[int] = []
        found = pcp_worker._timed(lambda x: calls.append(x), [(1,)], torch.device("cuda"))
        assert isinstance(found, Timing)
        assert timed in found.how or found.how == "1 calls"
        assert len(calls) == 1 + max(rounds, 1)

    def test_a_part_that_fails_does_not_stop_the_others(self) -> None:
        parts = [Part("nothing", "auto", 8), Part("attention_out", "auto", 8)]
        warmed = list(pcp_worker.warm(parts, "tiny", Setup("cpu", None, ()), 1, 100.0))
        assert [part for part, _ in warmed] == parts
        assert [problem.partition(":")[0] for _, problem in warmed] == ["LookupError", ""]


def question(**changed: Any) -> pcp_answer.Question:
    return replace(pcp_answer.Question(MODEL, (65536,), (2, 4), ("engine", "auto"), NO_LINK), **changed)


def timed(part: Part, seconds: float) -> CaseReport:
    one = Timing(seconds, seconds, seconds, 3, "3 calls")
    return CaseReport("pcp", part.kind, "", providers={pcp_worker.NAME: Served("timed", timing=one)})


def answered(asked: pcp_answer.Question, seconds: Callable[[Part], float] = work) -> pcp_answer.Answer:
    answer = pcp_answer.Answer(asked, MACHINE)
    for part in asked.parts():
        answer.add(part, timed(part, seconds(part)))
    return answer


class TestAnswer:
    def test_every_part_that_is_needed_is_measured(self) -> None:
        assert all(row.estimate is not None for row in answered(question(lengths=(1000, 262144))).rows())

    def test_speed_ups_are_over_stock_and_over_the_same_kernels(self) -> None:
        """Kernels that are twice as fast gain twice as much over stock, and nothing over themselves."""

        def seconds(part: Part) -> float:
            return (1.0 if part.kernels == "auto" else 2.0) * part.rows * (part.kind == "experts") or 1e-9

        rows = [row for row in answered(question(), seconds).rows() if row.variant.experts == "replicate"]
        for row in rows:
            gained = row.world / pcp_host.SPLIT
            assert row.same == pytest.approx(gained)
            assert row.stock == pytest.approx(gained * (2 if row.variant.kernels == "auto" else 1))
            assert row.share == pytest.approx(1 / pcp_host.SPLIT)

    def test_a_part_without_time_costs_its_variants_only(self) -> None:
        answer = answered(question())
        lost = next(part for part in answer.times if part.kind == "recurrent_segment")
        del answer.times[lost]
        answer.add(lost, CaseReport("pcp", lost.kind, "", problem="out of memory"))
        told = {(row.variant.recurrent, row.world, bool(row.problem)) for row in answer.rows()}
        world = 65536 // lost.rows
        assert ("two_pass", world, True) in told
        assert ("relay", world, False) in told
        assert ("two_pass", 6 - world, False) in told
        text = pcp_text.render(answer)
        assert "not measured: recurrent_segment, auto" in text
        assert f"NOT MEASURED  recurrent_segment, auto, {lost.rows} rows: out of memory" in text

    def test_targets_stand_beside_what_was_reached(self) -> None:
        fast: Callable[[Part], float] = lambda part: pairs(part) + 1e-9  # noqa: E731
        text = pcp_text.render(answered(question(kernels=("engine",)), fast))
        assert "[target 1.7 and 90%: reached]" in text
        assert "[target 3.1: reached]" in text
        slow = answered(question(kernels=("engine",)), lambda part: 1.0)
        assert "[target 3.1: MISSED]" in pcp_text.render(slow)

    def test_the_document_holds_both_modes_of_the_experts(self) -> None:
        found = json.loads(json.dumps(pcp_answer.document(answered(question()))))
        assert {row["experts"] for row in found["results"]} == {"replicate", "ep"}
        assert len(found["results"]) == 2 * 2 * 16
        assert {"seconds", "bound", "share_of_bound", "exchanged", "speedup_over_stock"} <= set(found["results"][0])


class TestCommand:
    @pytest.mark.timeout(120)
    def test_a_run_on_a_cpu(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "found.json"
        options = ["--device", "cpu", "--shape", "tiny", "--lengths", "64", "--worlds", "2", "--kernels", "auto"]
        assert main(["bench", "pcp", *options, "--json", str(path)]) == 0
        text = capsys.readouterr().out
        assert "say nothing about a GPU" in text
        assert "64 tokens on 2 ranks" in text
        found = json.loads(path.read_text())
        assert all(part["seconds"] > 0 for part in found["parts"])
        assert len(found["results"]) == 16 and not found["problems"]
        row = next(row for row in found["results"] if row["recurrent"] == "relay")
        assert row["waiting"] > 0

    def test_what_is_out_of_time_is_told(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "found.json"
        options = ["--device", "cpu", "--shape", "tiny", "--lengths", "64", "--worlds", "2", "--limit", "0.001"]
        assert main(["bench", "pcp", *options, "--json", str(path)]) == 1
        assert "not begun within" in capsys.readouterr().out
        assert json.loads(path.read_text())["problems"]

    def test_the_parts_of_a_run_serve_another_link(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path, again = tmp_path / "found.json", tmp_path / "again.json"
        path.write_text(json.dumps(pcp_answer.document(answered(question()), finished=False)))
        options = ["bench", "pcp", "--lengths", "65536", "--worlds", "2,4", "--parts", str(path)]
        assert main([*options, "--link-bandwidth", "1", "--json", str(again)]) == 0
        assert "Modelled: exchanges at 1 GB/s" in capsys.readouterr().out
        slow = json.loads(again.read_text())
        assert slow["parts"] == json.loads(path.read_text())["parts"]
        rows = 65536 * 2 * 2 * 256 * 2 / 2
        first = slow["results"][0]["exchanged"]["keys and values"]
        assert first["seconds"] == pytest.approx(10 * (rows / 1e9 + 20e-6))
        path.write_text("{}")
        assert main(options) == 1
        assert "not a file that `bench pcp --json` wrote" in capsys.readouterr().err

    def test_a_run_takes_what_another_has_measured(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path, again = tmp_path / "found.json", tmp_path / "again.json"
        options = ["bench", "pcp", "--device", "cpu", "--shape", "tiny", "--lengths", "64", "--worlds", "2"]
        options += ["--kernels", "auto", "--only", "zigzag,relay,replicate"]
        assert main([*options, "--json", str(path)]) == 0
        found = json.loads(path.read_text())
        lost = found["parts"].pop()
        found["parts"][0]["seconds"] = 12345.0
        path.write_text(json.dumps(found))
        assert main([*options, "--more", str(path), "--json", str(again)]) == 0
        both = json.loads(again.read_text())
        assert "[1/1," in capsys.readouterr().err
        assert both["parts"][0]["seconds"] == 12345.0
        assert [part["kind"] for part in both["parts"]] == [*(one["kind"] for one in found["parts"]), lost["kind"]]
        found["machine"]["device"] = "another"
        path.write_text(json.dumps(found))
        assert main([*options, "--more", str(path)]) == 1
        assert "its device is another, and this machine's" in capsys.readouterr().err

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_no_gpu_is_told(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "pcp", "--engine", "none"]) == 2
        assert "torch finds no GPU here" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            (["--device", "cpu"], "--device cpu serves --shape tiny only"),
            (["--device", "cpu", "--shape", "tiny", "--lengths", "3"], "two rows a rank, got 3"),
            (["--device", "cpu", "--shape", "tiny", "--only", "zigzag,relais"], "two_pass, zigzag, got relais"),
            (["--device", "cpu", "--shape", "tiny", "--worlds", "1,2"], "--worlds takes numbers from 2 to 8, got 1,2"),
        ],
    )
    def test_what_cannot_be_asked(self, options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "pcp", *options]) == 1
        assert told in capsys.readouterr().err

    @pytest.mark.parametrize("options", [["--lengths", "1,x"], ["--worlds", "0"], ["--link-bandwidth", "-1"]])
    def test_what_is_no_number(self, options: list[str]) -> None:
        with pytest.raises(SystemExit):
            main(["bench", "pcp", *options])

    def test_the_other_command_still_takes_operators(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["bench", "--help"])
        assert "operators or families" in capsys.readouterr().out
