"""The ATOM decoders on a GPU, in bfloat16, compiled and with CUDA graphs: what vLLM's own give, but for rounding."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.gpu_engines import DENSE, GPUS, GRAPHS, HYBRID, MOE, REHEARSAL, Engine, Outcome, engine, launch, wave
from tests.vllm.pcp_engines import request
from tests.vllm.pcp_waves import STAGGERED
from tests.vllm.test_pcp_gpu import ASKED, RECALL, RECALL_MODEL, RECALL_OPTIONS, check_equal, scored, tokens

pytestmark = pytest.mark.skipif(not REHEARSAL and GPUS < 1, reason="needs an NVIDIA GPU, and torch finds none")

SIDES = {"stock": {"ATOM_MODELS": "0"}, "atom": {"ATOM_MODELS": "1", "ATOM_PATCH_VLLM_MODELS": "1"}}
KEYS = ["hybrid", "dense", "experts", "recall"]


def plans() -> dict[str, Engine]:
    """Prompts that are scored and continued, steps that mix chunks and decodes, and prefixes from the cache."""
    options: dict[str, Any] = {**GRAPHS, "distributed_executor_backend": "uni"}
    waves = [wave(scored(50)), wave(STAGGERED), wave([request(tuple(range(1, 80)))])]
    return {
        "hybrid": engine(HYBRID, waves, **options),
        "dense": engine(DENSE, waves, **options),
        "experts": engine(MOE, waves, language_model_only=True, **options),
        "recall": engine(RECALL_MODEL, [wave(ASKED)], **{**options, **RECALL_OPTIONS}),
    }


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """Both at the same time, with the engines that the selected tests look at."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    keys = {call.params["key"] for call in calls if call is not None}

    def run(side: str) -> Outcome:
        folder: Path = tmp_path_factory.mktemp(side)
        chosen = {key: plan for key, plan in plans().items() if key in keys}
        return launch(folder, chosen, 1, {**SIDES[side], "TORCHDYNAMO_DISABLE": "0"})

    with ThreadPoolExecutor() as pool:
        return dict(zip(SIDES, pool.map(run, SIDES), strict=True))


@pytest.mark.parametrize("key", KEYS[:-1])
def test_answers_are_those_of_stock_but_for_rounding(sides: dict[str, Outcome], key: str) -> None:
    check_equal(sides["atom"].of(key), sides["stock"].of(key)[0])


@pytest.mark.parametrize("key", ["recall"])
@pytest.mark.parametrize("side", SIDES)
def test_what_stands_far_back_is_recalled_to_the_letter(sides: dict[str, Outcome], side: str, key: str) -> None:
    [result] = sides[side].of(key)
    assert tokens(result["waves"][0]) == [[asked.answer] for asked in RECALL]


@pytest.mark.parametrize("key", KEYS)
def test_each_side_ran_its_own_decoder(sides: dict[str, Outcome], key: str) -> None:
    states = {side: outcome.of(key)[0]["patches"]["vllm.models.initialize_model"] for side, outcome in sides.items()}
    assert states == {"stock": "inactive", "atom": "applied"}
