"""Attention on this package's kernels on a GPU, in bfloat16, compiled and with CUDA graphs."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm.gdn_oracle import oracle, prompt
from tests.vllm.gpu_engines import GPUS, GRAPHS, REHEARSAL, Engine, Outcome, engine, launch, wave
from tests.vllm.pcp_engines import Request, request
from tests.vllm.rounding import distance
from tests.vllm.test_latent_attention import DEEPSEEK, Layer, run
from tests.vllm.test_pcp_gpu import (
    ASKED,
    RECALL,
    RECALL_MODEL,
    RECALL_OPTIONS,
    SMALL_GRAPHS,
    check_rounding,
    replays,
    tokens,
)
from tests.vllm.traffic import TOP

pytestmark = pytest.mark.skipif(not REHEARSAL and GPUS < 1, reason="needs an NVIDIA GPU, and torch finds none")

LATENTS = "deepseek_v3_dense"
LONG = prompt(700, seed=20)
#: Chunks beside decodes, and then prompts that begin with what is cached: many tokens more, a few, and one.
WAVES: list[list[Request]] = [
    [request(prompt(n, seed=50), max_tokens=6, prompt_logprobs=TOP) for n in (33, 700, 2, 150)],
    [request(LONG)],
    [request(LONG + prompt(n, seed=5)) for n in (130, 9, 1)],
]


def plans() -> dict[str, Engine]:
    options: dict[str, Any] = {**GRAPHS, "distributed_executor_backend": "uni", "attention_config": {}}
    latents = {"max_model_len": 1024, "env": {"ATOM_MODELS": "0"}}
    return {
        "recall": engine(RECALL_MODEL, [wave(ASKED)], **{**options, **RECALL_OPTIONS, **SMALL_GRAPHS}),
        "latents": engine(LATENTS, [wave(sent) for sent in WAVES], counts_graphs=True, **{**options, **latents}),
    }


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    asked = {"ATOM_ATTENTION": "1", "ATOM_PATCH_VLLM_ATTENTION": "1", "TORCHDYNAMO_DISABLE": "0"}
    folder: Path = tmp_path_factory.mktemp("attention")
    return launch(folder, plans(), 1, asked)


def test_what_stands_far_back_is_recalled_to_the_letter(engines: Outcome) -> None:
    [result] = engines.of("recall")
    assert tokens(result["waves"][0]) == [[asked.answer] for asked in RECALL]
    assert result["patches"]["vllm.attention.get_attn_backend"] == "applied"


def test_attention_to_latents_is_the_oracle_s_but_for_rounding(engines: Outcome) -> None:
    [result] = engines.of("latents")
    assert result["patches"]["vllm.attention.get_attn_backend"] == "applied" and result["leaked"] == 0
    for index, (sent, got) in enumerate(zip(WAVES, result["waves"], strict=True)):
        seen = distance(got, [expected(tuple(one["prompt"]), index == 0) for one in sent])
        print(f"wave {index}: {seen}")
        check_rounding(seen)  # on the CPU 0.10 at most, and 0.017 on average
    assert all(answer["cached"] >= 640 for answer in result["waves"][2])
    if not REHEARSAL:
        assert replays(result, "whole FULL"), result["graphs"]


@pytest.mark.parametrize("block", [16, 64])
def test_a_step_at_the_sizes_of_deepseek(block: int) -> None:
    """Decodes and short chunks in front, then chunks with more cached than a piece has, then a prompt."""
    torch.manual_seed(block)
    layer = Layer(DEEPSEEK, 16, torch.bfloat16, "cuda" if GPUS else "cpu")
    requests = [(1000, 1), (63, 1), (64, 1), (700, 20), (2000, 100), (10, 300), (0, 500)]
    step = run(requests, block, room=512, few=85, padding=3, layer=layer, within=2e-2)
    assert len(step.decode) == 2 and sum(not piece.causal for piece in step.pieces) == 4


@cache
def expected(asked: tuple[int, ...], scored: bool) -> dict[str, Any]:
    """The answer of transformers, in the form of an engine's."""
    chosen, logprobs = oracle(LATENTS).answer(asked, 6 if scored else 10)

    def named(rows: Any) -> list[dict[str, float]]:
        return [{str(int(t)): float(row[t]) for t in row.topk(TOP).indices} for row in rows]

    begins = len(asked) - 1
    return {
        "samples": [{"tokens": chosen, "logprobs": named(logprobs[begins:])}],
        "prompt_logprobs": [None, *named(logprobs[:begins])] if scored else [],
        "cached": None,
    }
