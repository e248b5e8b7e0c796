"""Prefill context parallelism on vLLM's second model runner on a GPU: two ranks that share it give what one gives.

In bfloat16 and eager mode, with vLLM's own kernels; collectives are staged (staged_ranks.py). A rehearsal without a GPU
(gpu_engines.py) has Triton's interpreter, and no more than one attention backend.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from atom_patches.core import source
from atom_patches.vllm.pcp_manager import _config
from tests.vllm.gpu_engines import (
    DENSE,
    GPUS,
    REHEARSAL,
    Engine,
    Outcome,
    engine,
    launch,
    scored,
    shared_prefixes,
    wave,
)
from tests.vllm.pcp_waves import STAGGERED
from tests.vllm.test_pcp_gpu import DENSE_WAVES, check_equal

pytestmark = [
    pytest.mark.skipif(not REHEARSAL and GPUS < 1, reason="needs an NVIDIA GPU, and torch finds none"),
    pytest.mark.skipif(
        not source.defined(_config.MANAGER).ok, reason="this vLLM has no manager of prefill context parallelism"
    ),
]

#: A hybrid without experts, with GatedDeltaNet heads of 128.
HYBRID = "qwen3_5_demo"
MODES = ("relay", "two_pass", "head_all_to_all", "redundant")
#: Without a GPU, another program sets the interpreter up, and kernels take their time.
REHEARSED: dict[str, Any] = {"script": "second_runner_rehearsal.py", "seconds": 900} if REHEARSAL else {}
HYBRID_WAVES = [
    *(wave(scored(50 + index), mode, "contiguous") for index, mode in enumerate(MODES)),
    wave(STAGGERED, "two_pass", "contiguous"),
    wave(STAGGERED),
]
RUNNER = "vllm.v1.worker.gpu.model_runner"
BACKENDS = {
    "dense": "FLASH_ATTN",
    "dense triton": "TRITON_ATTN",
    "hybrid": "FLASH_ATTN",
    "hybrid triton": "TRITON_ATTN",
}
if REHEARSAL:
    BACKENDS = {"dense": "CPU_ATTN", "hybrid": "CPU_ATTN"}


def plans() -> dict[str, Engine]:
    """Chunks beside decodes, every way to share a recurrence, and prefixes from the cache where they are served."""
    # FlashInfer's would be compiled first, for minutes.
    shared: dict[str, Any] = {
        "env": {"VLLM_USE_FLASHINFER_SAMPLER": "0"}, "rehearsed_with": "tests.vllm.second_runner_gdn"
    }  # fmt: skip
    recurrent = {**shared, "enable_prefix_caching": False, "language_model_only": True}
    if REHEARSAL:
        recurrent["dtype"] = "float32"  # in bfloat16 the platform packs the convolution for kernels of its own
    cached = [*DENSE_WAVES, *shared_prefixes("auto", "auto")]
    engines = {
        "dense": engine(DENSE, cached, **shared),
        "dense triton": engine(DENSE, DENSE_WAVES, "TRITON_ATTN", **shared),
        "hybrid": engine(HYBRID, HYBRID_WAVES, **recurrent),
        "hybrid triton": engine(HYBRID, HYBRID_WAVES[-1:], "TRITON_ATTN", **recurrent),
    }
    return {key: engines[key] for key in BACKENDS}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Outcome]:
    """What one rank and what two gave."""

    def run(count: int) -> Outcome:
        folder = tmp_path_factory.mktemp(f"ranks{count}")
        return launch(folder, plans(), count, {"ATOM_PCP_DEBUG": "1"}, **REHEARSED)

    with ThreadPoolExecutor() as pool:
        return dict(zip((1, 2), pool.map(run, (1, 2)), strict=True))


@pytest.mark.parametrize("key", BACKENDS)
def test_two_ranks_on_one_gpu(ranks: dict[int, Outcome], key: str) -> None:
    check_equal(ranks[2].of(key), ranks[1].of(key)[0])


@pytest.mark.parametrize("key", BACKENDS)
def test_ranks_split_and_run_as_asked(ranks: dict[int, Outcome], key: str) -> None:
    """So that nothing above is equal because every rank ran everything."""
    for rank, log in enumerate(ranks[2].logs[key]):
        split = re.findall(rf"split: rank {rank} of 2 runs (\d+) rows of (\d+)", log)
        own, whole = (sum(int(rows[at]) for rows in split) for at in range(2))
        assert split and own < 0.6 * whole, split  # decodes run on both, and a slice may be padded by a row
        for mode in MODES if key == "hybrid" else ():
            assert f"layers.0.linear_attn: rank {rank} runs its recurrence as {mode}" in log


@pytest.mark.parametrize("key", BACKENDS)
def test_the_second_runner_and_the_backend_ran(ranks: dict[int, Outcome], key: str) -> None:
    for result in [*ranks[1].of(key), *ranks[2].of(key)]:
        [ran] = result["ran_on"]
        assert RUNNER in ran["runner"] and BACKENDS[key] in ran["backends"], ran


@pytest.mark.parametrize("key", BACKENDS)
def test_one_rank_is_the_engine_s_own(ranks: dict[int, Outcome], key: str) -> None:
    [alone], changed = ranks[1].of(key), ranks[2].of(key)
    states = [state for name, state in alone["patches"].items() if name.startswith("vllm.pcp_manager.")]
    assert states and set(states) == {"inactive"}
    assert all(alone["own"].values()), alone["own"]
    assert not any(result["own"][_config.MANAGER] for result in changed), "what tells them apart tells nothing"
