"""`compare -- COMMAND`: with a server that stands in for an engine's; tests/vllm and tests/sglang have real ones."""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom_patches.bench.answers import Answer, Token, compared, match
from atom_patches.bench.client import shifted
from atom_patches.bench.interval import ENOUGH, interval
from atom_patches.cli import compare_report, main

SERVER = [sys.executable, str(Path(__file__).parent / "stand_in_server.py")]

# Medians


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=40))
def test_an_interval_is_around_the_median(values: list[float]) -> None:
    found = interval(values)
    assert min(values) <= found.low <= found.median <= found.high <= max(values)


@pytest.mark.parametrize(("n", "ends"), [(1, (1, 1)), (5, (1, 5)), (ENOUGH, (1, 6)), (9, (2, 8)), (20, (6, 15))])
def test_ends_are_those_of_the_binomial_distribution(n: int, ends: tuple[int, int]) -> None:
    found = interval(list(range(n, 0, -1)))
    assert (found.low, found.high) == ends


# Answers


def said(tokens: list[int], logprob: float = -0.5) -> Answer:
    return Answer([*tokens], [logprob] * len(tokens), [[]] * len(tokens))


def one_token(token: int, **candidates: float) -> Answer:
    """The answer of a server to which tokens `_2` and so on are that likely."""
    ranked: list[tuple[Token, float]] = [(int(name[1:]), logprob) for name, logprob in candidates.items()]
    return Answer([token], [dict(ranked)[token]], [ranked])


def test_nothing_is_compared_behind_the_first_token_that_differs() -> None:
    found = match(said([1, 2, 3, 4], -0.5), Answer([1, 2, 9, 4], [-0.5, -0.4, -7.0, -9.0], [[]] * 4))
    assert found.gaps == pytest.approx([0, 0.1])
    assert found.parting is not None and (found.parting.place, found.parting.stock, found.parting.overlay) == (2, 3, 9)


@pytest.mark.parametrize(
    ("stock", "overlay", "is_wrong"),
    [
        # Either moved by half of what the one led by.
        (one_token(2, _2=-1.0, _3=-1.25), one_token(3, _2=-1.125, _3=-1.125), False),
        # Neither moved: the overlay took what is less likely to itself.
        (one_token(2, _2=-1.0, _3=-1.25), one_token(3, _2=-1.0, _3=-1.25), True),
        # As little as the first led by, and one moved further.
        (one_token(2, _2=-1.0, _3=-1.1), one_token(3, _2=-1.0, _3=-0.5), True),
        (one_token(2, _2=-1.0, _3=-1.1), one_token(3, _2=-2.0, _3=-1.1), True),
        # One is no candidate of the other server.
        (one_token(2, _2=-1.0, _4=-1.0), one_token(3, _2=-1.0, _3=-1.0), True),
        (one_token(2, _2=-1.0, _3=-1.0), one_token(3, _4=-1.0, _3=-1.0), True),
        (one_token(2, _2=-1.0, _3=math.nan), one_token(3, _2=-1.0, _3=-1.0), True),
    ],
)
def test_a_tie_is_no_difference(stock: Answer, overlay: Answer, is_wrong: bool) -> None:
    found = compared([stock], [overlay], 0.15)
    assert bool(found.wrong) == is_wrong
    assert (found.tokens, found.equal) == (1, 0)


def test_log_probabilities_that_are_apart_are_a_difference() -> None:
    assert compared([said([1])], [said([1], -0.6)], 0.2).wrong == []
    (why,) = compared([said([1])], [said([1], -0.8)], 0.2).wrong
    assert why == "prompt 1: log-probabilities are 0.3000 apart at token 0"
    assert compared([said([1, 2])], [Answer([1, 2], [-0.5, math.nan], [[], []])], 0.2).wrong


def test_an_answer_that_ends_early_is_a_difference() -> None:
    assert compared([said([1, 2])], [said([1])], 0.2).wrong == ["prompt 1: token 1 is '', not 2: one answer ends there"]
    assert compared([said([1])], [said([1, 2])], 0.2).wrong == ["prompt 1: token 1 is 2, not '': one answer ends there"]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(0, 30))
def test_prompts_of_another_round_are_as_long_and_others(tokens: list[int], number: int) -> None:
    ids, text = shifted([tokens, "a text"], number)
    assert sorted(ids) == sorted(tokens) and isinstance(text, str) and text.startswith(f"{number}.")


# The command


@pytest.fixture(autouse=True)
def private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATOM_PATCHES_STATE_DIR", str(tmp_path / "state"))
    for name in ("ATOM_PATCHES", "ATOM_MODELS", "VLLM_PLUGINS", "SGLANG_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def compare(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    status = main(["compare", "--new", "5", "--repeats", "2", *options])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_equal_servers_are_equal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "asked.jsonl").write_text('{"prompt": "one"}\n{"prompt": [1, 2, 3]}\n')
    status, out, _ = compare(
        capsys, "--prompts", "asked.jsonl", "--report", "r.html", "--logs", "logs", "--json", "--", *SERVER
    )
    assert status == 0
    found = json.loads(out)
    assert (found["answers"]["tokens"], found["answers"]["share"], found["findings"]) == (10, 1.0, [])
    assert found["overlay"] == "ATOM_MODELS=1" and found["applied"] == ["vllm.models.initialize_model"]
    assert len(found["throughput"]["stock"]["rounds"]) == 2 and found["throughput"]["ratio"]["median"] > 0
    page = (tmp_path / "r.html").read_text()
    assert "<script" not in page and "http" not in page and "one" in page
    assert {path.name for path in (tmp_path / "logs").glob("*.log")} == {"stock.log", "overlay.log"}


def test_a_broken_overlay_is_different(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = compare(capsys, "--overlay", "WRONG=token", "--", *SERVER)
    assert status == 1 and "DIFFERENT  prompt 1: token 2 is" in out and "prompt 8: token 2 is" in out


@pytest.mark.parametrize("engine", [(), ("--sglang",)])
def test_a_tie_is_told_and_is_no_difference(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, engine: tuple[str, ...]
) -> None:
    monkeypatch.setenv("WRONG", "tie")
    status, out, _ = compare(capsys, "--", *SERVER, *engine)
    assert status == 0
    assert "prompt 8 parts at token 2" in out and "a margin of 0.0100" in out
    assert "16 of 40 tokens of 8 answers are equal (40.0%)" in out


def test_an_overlay_that_does_nothing_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = compare(capsys, "--overlay", "APPLIES=0", "--", *SERVER)
    assert status == 1
    assert "NOT APPLIED" in out and "vllm.models.initialize_model is off: a reason" in out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), "compare needs a server's command"),
        (("--", "before.json", "after.json"), "two files of `bench` are for `bench compare`"),
        (("--", "no-such-command"), "there is no command 'no-such-command'"),
        (("--", "echo", "--model-impl", "atom"), "--model-impl is the overlay's"),
        (("--", "echo", "--prefill-context-parallel-size=2"), "would refuse it: give it as --overlay"),
        (("--", *SERVER, "--port", "x"), "--port x: not a port that is free"),
        (("--", *SERVER, "--port=99999"), "--port 99999: not a port that is free"),
        (("--", *SERVER, "--host", "10.0.0.1"), "--host 10.0.0.1: the server is asked on this machine"),
        (("--overlay", "'one", "--", *SERVER), "--overlay 'one: No closing quotation"),
        (("--prompts", "none.txt", "--", *SERVER), "--prompts none.txt: No such file"),
        (("--prompts", "empty.txt", "--", *SERVER), "there is no prompt in it"),
        (("--prompts", "bad.jsonl", "--", *SERVER), "--prompts bad.jsonl, line 2: not"),
        (("--report", "no/r.html", "--", *SERVER), "there is no such directory"),
        (("--", *SERVER, "--refuses"), "prompt 1: 400"),
        (("--start-limit", "1", "--", *SERVER, "--unhealthy"), "the server stock did not answer in 1 s"),
        (
            ("--", sys.executable, "-c", "print('no memory'); exit(3)"),
            "the server stock ended with status 3:\nno memory",
        ),
    ],
)
def test_one_clear_error(
    options: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "one"}\n{"prompt": [1.5]}\n')
    status, out, err = compare(capsys, *options)
    assert (status, out) == (1, "") and told in err


def test_nothing_is_started_where_everything_is_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOM_PATCHES", "0")
    assert "ATOM_PATCHES=0 keeps everything off" in compare(capsys, "--", *SERVER)[2]


def test_another_server_is_not_asked_instead(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"--port {port}: not a port that is free" in compare(capsys, "--", *SERVER, "--port", port)[2]


@pytest.mark.parametrize("option", [["--new", "0"], ["--repeats", "x"], ["--tolerance", "-1"]])
def test_what_is_no_number(option: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", *option, "--", "echo"])


def test_no_server_is_left(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Neither the server nor what it started."""
    code = "import subprocess, time; open('pid', 'w').write(str(subprocess.Popen(['sleep', '60']).pid)); time.sleep(60)"
    compare(capsys, "--start-limit", "2", "--", sys.executable, "-c", code)
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _runs(child):
        time.sleep(0.1)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


# The picture


def test_a_cell_a_token_and_black_where_answers_part() -> None:
    answers = compared([said([1, 2, 3]), said([4, 5, 6])], [said([1, 2, 3], -0.6), said([4, 9, 9])], 0.2).document()
    found: dict[str, Any] = {"answers": answers, "prompts": ["<a>", "b"], "new": 3}
    drawn = ET.fromstring(compare_report.strips(found))
    colours = [one.get("fill") for one in drawn.iter("rect")]
    assert colours == ["hsl(60 65% 45%)"] * 3 + ["hsl(120 65% 45%)", "#000", "#8884"]
    assert [one.text for one in drawn.iter("text")] == ["<a>", "b"]
