"""What processes with a real SGLang are started with: on this machine's GPU if it has one, else on the stand-in."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SITE = HERE / "cpu_site"

#: Options of every engine. The stand-in has no graphs, and one step at a time.
ON_CPU: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "sampling_backend": "pytorch",
    "disable_cuda_graph": True, "disable_overlap_schedule": True, "mem_fraction_static": 0.3,
}  # fmt: skip
ON_GPU: dict[str, Any] = {
    "dtype": "bfloat16", "attention_backend": "triton", "sampling_backend": "pytorch", "cuda_graph_max_bs_decode": 8,
    "cuda_graph_backend_prefill": "disabled", "mem_fraction_static": 0.5,
}  # fmt: skip
#: Options of ranks that share a GPU, which takes collectives that no graph can hold (cpu_site/ranks_on_one_gpu.py).
SHARING: dict[str, Any] = {"disable_cuda_graph": True, "disable_custom_all_reduce": True}
ALL: dict[str, Any] = {
    "skip_tokenizer_init": True, "grammar_backend": "none", "random_seed": 0, "context_length": 1024,
    "max_total_tokens": 4096, "max_running_requests": 16, "max_mamba_cache_size": 64, "log_level": "warning",
}  # fmt: skip


@functools.cache
def gpus() -> int:
    """GPUs that torch finds here."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def options(**more: Any) -> dict[str, Any]:
    """The options of an engine for the tests' small models."""
    return {**ALL, **(ON_GPU if gpus() else ON_CPU), **(SHARING if share_a_gpu(more) else {}), **more}


def share_a_gpu(layout: dict[str, Any]) -> bool:
    """Whether an engine with these options has more ranks than there are GPUs."""
    return 0 < gpus() < layout.get("tp_size", 1) * layout.get("pp_size", 1)


def environment(*path: Path, **more: str) -> dict[str, str]:
    """This process's environment without what would steer engine or overlay.

    Args:
        path: folders for PYTHONPATH, before those that it has.
        more: variables to set.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ATOM_", "SGLANG_", "VLLM_"))}
    before = [str(folder) for folder in (SITE, *path)]
    kept |= {
        "PYTHONPATH": os.pathsep.join([*before, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if gpus():
        kept.pop("TORCHDYNAMO_DISABLE", None)  # tests set it for the CPU's sake
        return kept | {"SGLANG_UNTUNED": "1"} | more
    return kept | stand_in() | more


def stand_in() -> dict[str, str]:
    """What makes SGLang run on the CPU, beside `SITE` on PYTHONPATH."""
    return {
        "SGLANG_PLATFORM": "cpu_stand_in",
        "SGLANG_MAMBA_CONV_DTYPE": "float32",
        "TRITON_INTERPRET": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
