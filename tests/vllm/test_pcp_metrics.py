"""The metrics of prefill context parallelism say what the ranks did: against counted bytes, and at the real server."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.running import environment, server
from tests.vllm.gdn_oracle import free_port, prompt
from tests.vllm.pcp_engines import engine, launch, request
from tests.vllm.test_processes import server_command
from tools.checkpoints import checkpoint

pytestmark = pytest.mark.long

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]

LONG, SHORT, ONE = prompt(150, seed=20), prompt(37, seed=1), prompt(1, seed=1)
#: One at a time, so that the scheduler's order is the batch's; each in one step, so that no step is without output.
ALONE = [[request(tokens)] for tokens in (LONG, SHORT, ONE)]
#: Key -> model and environment.
ENGINES = {
    "dense": ("qwen3", {"ATOM_PCP_ATTENTION": "zigzag"}),
    "relay shard": ("qwen3_next", {"ATOM_PCP_GDN": "relay", "ATOM_PCP_ATTENTION": "contiguous"}),
    "two_pass replicate": (
        "qwen3_next",
        {"ATOM_PCP_GDN": "two_pass", "ATOM_PCP_ATTENTION": "contiguous", "ATOM_PCP_MOE": "replicate"},
    ),
    "two_pass zigzag": ("qwen3_next", {"ATOM_PCP_GDN": "two_pass", "ATOM_PCP_ATTENTION": "zigzag"}),
    "heads": ("qwen3_next_heads", {"ATOM_PCP_GDN": "head_all_to_all", "ATOM_PCP_ATTENTION": "zigzag"}),
    "redundant shard": ("qwen3_next", {"ATOM_PCP_GDN": "redundant", "ATOM_PCP_ATTENTION": "contiguous"}),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Each engine by itself in its processes: the probe adds up over engines."""
    probe = "tests.vllm.exchange_probe"
    return {
        key: launch(
            tmp_path_factory.mktemp(key.replace(" ", "_")),
            2,
            {key: engine(model, ALONE, env=env, setup=probe, prefill_context_parallel_size=2)},
        )[key]
        for key, (model, env) in ENGINES.items()
    }


def series(metrics: list[dict[str, Any]]) -> Series:
    """Values by name and labels, without the model's name and the engine's number."""
    return {
        (one["name"], frozenset((k, v) for k, v in one["labels"].items() if k not in ("model_name", "engine"))): one[
            "value"
        ]
        for one in metrics
    }


def total(found: Series, name: str) -> float:
    return sum(value for (metric, _), value in found.items() if metric == name)


@pytest.mark.parametrize("key", ENGINES)
def test_bytes_are_those_that_ranks_received(results: dict[str, list[dict[str, Any]]], key: str) -> None:
    received = sum(sum(rank["report"].values()) for rank in results[key])
    for rank in results[key]:
        computed = total(series(rank["metrics"]), "vllm:atom_pcp_exchanged_bytes")
        assert computed == pytest.approx(received / 2, abs=1)


@pytest.mark.parametrize("key", ENGINES)
def test_steps_and_rows(results: dict[str, list[dict[str, Any]]], key: str) -> None:
    for rank in results[key]:
        found = series(rank["metrics"])
        steps = {labels: n for (name, labels), n in found.items() if name == "vllm:atom_pcp_steps"}
        split = {n for labels, n in steps.items() if ("step", "split") in labels}
        replicated = {n for labels, n in steps.items() if ("step", "replicated") in labels}
        # Two prompts are split; the third, of one token, and nine decodes each of all three are not.
        assert (split, replicated) == ({2.0}, {1.0 + 3 * 9})
        assert found["vllm:atom_pcp_rows", frozenset({("kind", "pooled")})] == 150 + 37
        assert found["vllm:atom_pcp_rows", frozenset({("kind", "replicated")})] == 1 + 3 * 9
        assert found["vllm:atom_pcp_rows", frozenset({("kind", "padding")})] == 1
        assert found["vllm:atom_pcp_rows_per_rank", frozenset()] == 19


def scrape(port: int) -> Series:
    """The overlay's series at `/metrics`."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: Series = {}
    for name, labels, value in re.findall(r"^(vllm:atom_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        pairs = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        del pairs["model_name"], pairs["engine"]
        found[name, frozenset(pairs.items())] = float(value)
    return {key: value for key, value in found.items() if not key[0].endswith("_created")}


def complete(port: int, tokens: tuple[int, ...], model: str) -> None:
    body = {"model": model, "prompt": list(tokens), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        assert answer.status == 200


def test_the_server_shows_them(tmp_path: Path) -> None:
    """150 tokens are split, then decoded; 16 are too few for two ranks of 64 rows."""
    model = str(checkpoint("qwen3_next"))
    port, env = free_port(), environment(tmp_path / "state", VLLM_CPU_OMP_THREADS_BIND="0|1", VLLM_PLUGINS="atom")
    with server(server_command(model, port), port, tmp_path, env):
        before = scrape(port)
        complete(port, LONG, model)
        complete(port, LONG[:16], model)
        after = scrape(port)
    assert total(before, "vllm:atom_pcp_steps_total") == total(before, "vllm:atom_pcp_exchanged_bytes_total") == 0
    assert before["vllm:atom_pcp_rows_total", frozenset({("kind", "pooled")})] == 0
    assert after["vllm:atom_pcp_rows_total", frozenset({("kind", "pooled")})] == 150
    # The short prompt, and three decodes of either.
    assert after["vllm:atom_pcp_rows_total", frozenset({("kind", "replicated")})] == 16 + 6
    assert after["vllm:atom_pcp_rows_per_rank", frozenset()] == 75
    steps = {labels: n for (name, labels), n in after.items() if name == "vllm:atom_pcp_steps_total"}
    [split] = [dict(labels) for labels in steps if ("step", "split") in labels]
    assert split["experts"] == "shard" and {split["gdn"], split["attention"]}.isdisjoint({"auto", "none"})
    assert steps[frozenset(split.items())] == 1
    # One attention layer of 2 heads of 32 float32 keys, and as many values; half of the rows are received.
    assert after["vllm:atom_pcp_exchanged_bytes_total", frozenset({("what", "key_value")})] == 75 * 2 * 32 * 2 * 4
