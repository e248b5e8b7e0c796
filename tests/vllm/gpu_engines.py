"""The engines of the tests on GPUs, and how they are launched.

Most run several ranks on one GPU (staged_ranks.py), each rank a process of vLLM's external launcher, in bfloat16, since
FlashAttention 3 takes no float32. They are compared with the same engine on one rank of the same GPU.

On a machine without a GPU the tests are skipped. REHEARSE_GPU_TESTS=1 runs them on vLLM's CPU platform instead, with a
paged attention backend of plain torch and without compilation: for work on the tests themselves.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.vllm.gdn_oracle import ROOT, checkpoint, environment, free_port, prompt, run_engines
from tests.vllm.pcp_engines import Request, request
from tests.vllm.pcp_waves import STAGGERED
from tests.vllm.traffic import BEGINS

REHEARSAL = os.environ.get("REHEARSE_GPU_TESTS") == "1"
GPUS = torch.cuda.device_count()

#: The proportions of the published models: heads of 64, GatedDeltaNet heads of 128, 12 experts, 8 layers.
HYBRID, DENSE = "qwen3_next_demo", "qwen3_demo"
MOE = "qwen3_5_moe"

Wave = dict[str, Any]
Engine = dict[str, Any]
Answer = dict[str, Any]

EAGER: dict[str, Any] = {"enforce_eager": True}
#: Staged collectives cannot be captured.
COMPILED: dict[str, Any] = {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "NONE"}}
#: What vLLM does by itself, but for fewer sizes to capture, up to the rows of a whole step.
GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 32, 96, 232, 448]},
}


def wave(requests: list[Request], gdn: str = "auto", attention: str = "auto") -> Wave:
    """Requests, and how the ranks are to run recurrent layers and full attention meanwhile."""
    return {"requests": requests, "env": {"ATOM_PCP_GDN": gdn, "ATOM_PCP_ATTENTION": attention}}


def scored(seed: int) -> list[Request]:
    """Prompts that are scored token by token, then continued; the longest takes several steps."""
    return [request(prompt(n, seed), max_tokens=6, prompt_logprobs=2) for n in (33, 700, 2, 150)]


def shared_prefixes(gdn: str, attention: str) -> list[Wave]:
    """Prompts, then the same again beside others that begin like them. Cached blocks are of some 300 tokens."""
    long, short = prompt(700, seed=20), prompt(60, seed=3)
    first = [request(long), request(long[:620] + prompt(9, seed=4)), request(short)]
    grown = [request(long + prompt(61, seed=5)), request(short + prompt(11, seed=6))]
    return [wave(first, gdn, attention), wave([*first, *grown], gdn, attention)]


def engine(
    name: str | Path,
    waves: list[Wave],
    backend: str = "FLASH_ATTN",
    env: dict[str, str] | None = None,
    counts_graphs: bool = False,
    rehearsed_with: str = "tests.vllm.paged_backend",
    **more: Any,
) -> Engine:
    """The plan of one engine; `more` are options of LLM. A rehearsal calls `install` of `rehearsed_with`."""
    options: dict[str, Any] = {
        "dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 448,
        "enable_prefix_caching": True, "skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 30,
        "gpu_memory_utilization": 0.05, "async_scheduling": False, "gdn_prefill_backend": "triton",
        "attention_config": {"backend": backend}, "distributed_executor_backend": "external_launcher", **EAGER, **more,
    }  # fmt: skip
    # Experts as small as these would be left whole.
    env = {**({} if "enable_expert_parallel" in more else {"ATOM_PCP_MOE": "shard"}), **(env or {})}
    setups = ["tests.vllm.staged_ranks"] if options["distributed_executor_backend"] == "external_launcher" else []
    if REHEARSAL:
        options |= {**EAGER, "attention_config": {}, "compilation_config": {}}
        setups.append(rehearsed_with)
        if options["distributed_executor_backend"] == "uni":
            options["distributed_executor_backend"] = "external_launcher"
        if options["distributed_executor_backend"] == "mp":
            env |= {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    else:
        setups.append("tests.untuned")
        # FlashInfer's experts would be compiled first, for minutes.
        options |= {"moe_backend": "triton", "enable_flashinfer_autotune": False}
    return {
        "model": str(name if isinstance(name, Path) else checkpoint(name)),
        "waves": waves,
        "options": options,
        "setups": setups,
        "env": env,
        "counts_graphs": counts_graphs and not REHEARSAL,
    }


def hybrid_waves(heads_divide: bool) -> list[Wave]:
    """Each way to run recurrent layers, with each way to answer queries; then mixed steps, then prefix hits."""
    by_heads = "head_all_to_all" if heads_divide else "auto"
    modes = [("relay", "contiguous"), ("two_pass", "zigzag"), ("redundant", "zigzag"), (by_heads, "contiguous")]
    alone = [wave(scored(50 + index), *mode) for index, mode in enumerate(modes)]
    return [*alone, wave(STAGGERED, "two_pass", "zigzag"), wave(STAGGERED), *shared_prefixes("relay", "zigzag")]


@dataclass(frozen=True)
class Outcome:
    """What the engines of a launch gave, by rank; their logs; and why those that are missing are missing."""

    results: dict[str, list[dict[str, Any]]]
    logs: dict[str, list[str]]
    failure: str

    def of(self, key: str) -> list[dict[str, Any]]:
        """One engine's results by rank.

        Raises:
            AssertionError: that engine, or one before it, did not end.
        """
        assert key in self.results, f"no result of {key}: {self.failure}"
        return self.results[key]


def launch(
    folder: Path,
    engines: dict[str, Engine],
    ranks: int,
    env: dict[str, str],
    seconds: float = 280,
    script: str = "gpu_traffic.py",
) -> Outcome:
    """Run the engines one after the other in one process of `script` for each rank; all ranks share the first GPU.

    Engines with worker processes of vLLM's own have one process here, and a GPU for each worker.
    """
    for plan in engines.values():
        # A rank that is ahead must not find the store of the engine before.
        plan["env"] = {"MASTER_PORT": str(free_port()), **plan["env"]}
        plan["options"].setdefault("prefill_context_parallel_size", ranks)
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH")]))
    shared = environment(
        PYTHONPATH=path, ATOM_PCP_MIN_ROWS="1", WORLD_SIZE=str(ranks), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1",
        VLLM_HOST_IP="127.0.0.1", GLOO_SOCKET_IFNAME="lo", VLLM_CACHE_ROOT=str(folder / "cache"),
        VLLM_CPU_OMP_THREADS_BIND="nobind", **env,
    )  # fmt: skip
    if not engines:
        return Outcome({}, {}, "")
    failure = ""
    try:
        envs = [{**shared, "RANK": str(rank)} for rank in range(ranks)]
        run_engines(folder, [list(engines.values())] * ranks, envs, script, seconds)
    except AssertionError as error:
        failure = str(error)
    files = [folder / f"result{rank}.json" for rank in range(ranks)]
    done = [json.loads(file.read_text()) if file.exists() else [] for file in files]
    logs = [(folder / f"log{rank}.txt").read_text().split(BEGINS)[1:] for rank in range(ranks)]
    return Outcome(by_engine(engines, done), by_engine(engines, logs), failure)


def by_engine(engines: dict[str, Engine], by_rank: list[list[Any]]) -> dict[str, list[Any]]:
    """What every rank has of each engine that all ranks have something of."""
    return {key: list(ranks) for key, ranks in zip(engines, zip(*by_rank, strict=False), strict=False)}
