"""Prefill context parallelism on vLLM's second model runner on a GPU: two ranks that share it give what one gives.

In bfloat16 and eager mode, with vLLM's own kernels; collectives are staged (staged_ranks.py).
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from atom_patches.core import source
from atom_patches.vllm.pcp_manager import _config
from tests.vllm.gpu_engines import DENSE, GPUS, Engine, Outcome, engine, launch, scored, shared_prefixes, wave
from tests.vllm.pcp_waves import STAGGERED
from tests.vllm.test_pcp_gpu import DENSE_WAVES, check_equal

pytestmark = [
    pytest.mark.skipif(GPUS < 1, reason="needs an NVIDIA GPU, and torch finds none"),
    pytest.mark.skipif(
        not source.defined(_config.MANAGER).ok, reason="this vLLM has no manager of prefill context parallelism"
    ),
]

#: A hybrid without experts, with GatedDeltaNet heads of 128.
HYBRID = "qwen3_5_demo"
MODES = ("relay", "two_pass", "head_all_to_all", "redundant")
HYBRID_WAVES = [
    *(wave(scored(50 + index), mode, "contiguous") for index, mode in enumerate(MODES)),
    wave(STAGGERED, "two_pass", "contiguous"),
    wave(STAGGERED),
]
KEYS = ["dense", "dense triton", "hybrid", "hybrid triton"]


def plans() -> dict[str, Engine]:
    """Chunks beside decodes, every way to share a recurrence, and prefixes from the cache where they are served."""
    # FlashInfer's would be compiled first, for minutes.
    env = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    recurrent: dict[str, Any] = {"enable_prefix_caching": False, "language_model_only": True}
    cached = [*DENSE_WAVES, *shared_prefixes("auto", "auto")]
    return {
        "dense": engine(DENSE, cached, env=env),
        "dense triton": engine(DENSE, DENSE_WAVES, "TRITON_ATTN", env=env),
        "hybrid": engine(HYBRID, HYBRID_WAVES, env=env, **recurrent),
        "hybrid triton": engine(HYBRID, HYBRID_WAVES[-1:], "TRITON_ATTN", env=env, **recurrent),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Outcome]:
    """What one rank and what two gave."""

    def run(count: int) -> Outcome:
        return launch(tmp_path_factory.mktemp(f"ranks{count}"), plans(), count, {"ATOM_PCP_DEBUG": "1"})

    with ThreadPoolExecutor() as pool:
        return dict(zip((1, 2), pool.map(run, (1, 2)), strict=True))


@pytest.mark.parametrize("key", KEYS)
def test_two_ranks_on_one_gpu(ranks: dict[int, Outcome], key: str) -> None:
    check_equal(ranks[2].of(key), ranks[1].of(key)[0])


@pytest.mark.parametrize("key", KEYS)
def test_ranks_split_and_run_as_asked(ranks: dict[int, Outcome], key: str) -> None:
    """So that nothing above is equal because every rank ran everything."""
    for rank, result in enumerate(ranks[2].of(key)):
        log = ranks[2].logs[key][rank]
        assert re.search(rf"split: rank {rank} of 2 runs \d+ rows of \d+", log)
        backend = "triton_attention" if "triton" in key else "flash_attention"
        assert result["patches"][f"vllm.pcp_manager.{backend}"] == "applied"
        for mode in MODES if key == "hybrid" else ():
            assert f"layers.0.linear_attn: rank {rank} runs its recurrence as {mode}" in log


@pytest.mark.parametrize("key", KEYS)
def test_one_rank_is_the_engine_s_own(ranks: dict[int, Outcome], key: str) -> None:
    [result] = ranks[1].of(key)
    states = [state for name, state in result["patches"].items() if name.startswith("vllm.pcp_manager.")]
    assert states and set(states) == {"inactive"}
