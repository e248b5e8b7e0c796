"""A side of `bench engine` that is vLLM: `python -m atom_patches.bench.vllm_side FD PLAN`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from atom_patches.bench import engine_side, seeded_model
from atom_patches.bench.answers import CANDIDATES
from atom_patches.core import settings

SHARE = 0.6
"""Of the GPU's memory, what must be free for all sides together when they start."""

CACHES, CACHE = 16 << 30, 6 << 30
"""Bytes of all sides' caches together at most, and of one: five sides of the largest model fitted 139 GiB."""


class VllmSide(engine_side.Side):
    """vLLM's engine, in this process, scheduled ahead as vLLM does by default. A request is its name."""

    def __init__(self, plan: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        super().__init__(plan)
        seeded_model.register(self.size)
        self.captured = sorted({1, *plan["batches"]}) if self.cuda else []
        options = {
            "model": str(self.folder), "load_format": seeded_model.LOAD_FORMAT, "skip_tokenizer_init": True, "seed": 0,
            "max_model_len": self.longest, "max_num_batched_tokens": self.longest,
            "max_num_seqs": max([1, *plan["batches"]]), "enable_prefix_caching": False,
            "distributed_executor_backend": UniProcExecutor, "max_logprobs": CANDIDATES, "disable_log_stats": True,
            **(on_gpu(plan["batches"], plan["sides"]) if self.cuda else _on_cpu()),
        }  # fmt: skip
        self.llm: Any = LLM(**{**options, **self.more})
        self.engine = self.llm.llm_engine
        self.unread: list[list[Any]] = []
        self.outputs: dict[str, Any] = {}

    def model(self) -> nn.Module:
        return self.engine.model_executor.driver_worker.worker.model_runner.get_model()

    def fusions(self) -> list[str]:
        model = self.model()
        if not type(model).__module__.startswith("atom_patches."):
            return []
        from atom_patches.models.attention import Attention
        from atom_patches.models.few_rows import has_few_rows
        from atom_patches.vllm.adapters.models.experts import RoutedExperts

        layers = list(model.modules())
        attention = [layer for layer in layers if isinstance(layer, Attention)]
        built = {
            "experts": any(layer.own for layer in layers if isinstance(layer, RoutedExperts)),
            "qk_rope": any(layer.prepares for layer in attention),
            "kv_cache": any(layer.attends for layer in attention),
            "linear": has_few_rows(model),
        }
        return [fusion for fusion in settings.FUSIONS if built[fusion]]

    def versions(self) -> dict[str, str]:
        import vllm

        return {"vllm": vllm.__version__, "torch": torch.__version__}

    def graphs(self) -> str:
        captured = f"graphs of {', '.join(map(str, self.captured))} rows" if self.captured else "no graphs"
        return f"{captured}, prompts whole"

    def add(self, tokens: list[int], new: int, logprobs: bool) -> str:
        from vllm import SamplingParams

        name = str(self.requests)
        params = SamplingParams(
            temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=CANDIDATES if logprobs else None
        )
        self.engine.add_request(name, {"prompt_token_ids": tokens}, params)
        return name

    def step(self) -> None:
        self.unread.append(self.engine.step())  # read when it is asked for, not while it is timed

    def busy(self) -> bool:
        return self.engine.has_unfinished_requests()

    def generated(self, request: str) -> int:
        output = self._read().get(request)
        return 0 if output is None else len(output.outputs[0].token_ids)

    def answer(self, request: str) -> dict[str, list[Any]]:
        [sample] = self._read()[request].outputs
        pairs = list(zip(sample.token_ids, sample.logprobs, strict=True))
        return {
            "tokens": list(sample.token_ids),
            "logprobs": [ranked[token].logprob for token, ranked in pairs],
            "candidates": [[(token, one.logprob) for token, one in ranked.items()] for _, ranked in pairs],
        }

    def drop(self) -> None:
        self.engine.abort_request(list(self._read()))
        while self.busy():
            self.engine.step()
        self.outputs.clear()

    def _read(self) -> dict[str, Any]:
        for outputs in self.unread:
            self.outputs |= {output.request_id: output for output in outputs}
        self.unread.clear()
        return self.outputs


def _on_cpu() -> dict[str, Any]:
    return {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 28, "gpu_memory_utilization": 0.1}


def on_gpu(batches: list[int], sides: int) -> dict[str, Any]:
    """All engines are on the GPU at the same time, each with a cache of its own size."""
    return {
        "dtype": "bfloat16", "kv_cache_memory_bytes": min(CACHE, CACHES // sides),
        "gpu_memory_utilization": SHARE / sides,
        # FlashInfer's kernels would be compiled first, for minutes.
        "gdn_prefill_backend": "triton", "moe_backend": "triton", "enable_flashinfer_autotune": False,
        "compilation_config": {"cudagraph_capture_sizes": sorted({1, *batches})},
    }  # fmt: skip


if __name__ == "__main__":
    engine_side.serve(VllmSide)
