"""One side of `bench engine`: a vLLM engine in this process that measures what it is told, until nobody asks.

    python -m atom_patches.bench.engine_side FD PLAN

FD is the file descriptor of a connection; each message and each answer on it is JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atom_patches.bench import seeded_model
from atom_patches.core import settings

CONTEXT = {"cuda": 1024, "cpu": 32}
"""Tokens that each request has when its decode steps begin to be timed."""

ROOM = 256
"""Positions for what is generated."""

WARM = 3
"""Decode steps of each request before any is timed."""

PREFILLS = 3
"""Prefills of a round; one more before them is not timed."""

NEW = 12
"""Tokens of each answer that is compared."""

SHARE = 0.6
"""Of the GPU's memory, what must be free for all sides together when they start."""

CACHES, CACHE = 16 << 30, 6 << 30
"""Bytes of all sides' caches together at most, and of one: five sides of the largest model fitted 139 GiB."""


def main() -> None:
    """Start the engine, say so, and answer."""
    connection, plan = Connection(int(sys.argv[1])), json.loads(sys.argv[2])
    began = time.monotonic()
    side = Side(plan)
    _send(connection, {"seconds": round(time.monotonic() - began, 1), **side.about()})
    while True:
        try:
            asked = json.loads(connection.recv_bytes())
        except EOFError:
            return
        _send(connection, side.measure(**asked))


def _send(connection: Connection, value: Any) -> None:
    connection.send_bytes(json.dumps(value).encode())


class Side:
    """An engine of the plan's size."""

    def __init__(self, plan: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        size = seeded_model.SIZES[plan["size"]]
        self.size = dataclasses.replace(size, num_hidden_layers=plan["layers"] or size.num_hidden_layers)
        self.cuda = plan["device"] == "cuda"
        self.context = CONTEXT[plan["device"]]
        seeded_model.register(self.size)
        longest = max([*plan["lengths"], self.context]) + ROOM
        self.llm: Any = LLM(
            model=str(seeded_model.write_config(self.size, Path(plan["folder"]), longest)),
            load_format=seeded_model.LOAD_FORMAT, skip_tokenizer_init=True, seed=0, max_model_len=longest,
            max_num_batched_tokens=longest, max_num_seqs=max([1, *plan["batches"]]), enable_prefix_caching=False,
            distributed_executor_backend=UniProcExecutor, max_logprobs=2, disable_log_stats=True,
            # One step at a time, so that what a step takes is its own.
            async_scheduling=False, **(on_gpu(plan["batches"], plan["sides"]) if self.cuda else _on_cpu()),
        )  # fmt: skip
        self.engine = self.llm.llm_engine
        self.requests = 0

    def about(self) -> dict[str, Any]:
        """Which class runs, where, and on what."""
        import vllm

        model = self._model()
        device = torch.cuda.get_device_name() if self.cuda else "cpu"
        versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        return {"model": f"{type(model).__module__}.{type(model).__name__}", "device": device, "versions": versions}

    def measure(self, what: str, size: int, steps: int) -> Any:
        """What was asked; what it took of the device meanwhile is the other sides' again."""
        try:
            return self._measure(what, size, steps)
        finally:
            if self.cuda:
                torch.cuda.empty_cache()

    def _measure(self, what: str, size: int, steps: int) -> Any:
        """Fusions, answers, the seconds of decode steps or prefills, or the GPU time of one of them by kernel."""
        if what == "fusions":
            return _fusions(self._model())
        if what == "answers":
            return [self._answer(length) for length in (5, self.context // 2, size)]
        if what == "decode":
            return self._decode(size, steps)
        if what == "prefill":
            return [self._prefill(size) for _ in range(1 + PREFILLS)][1:]
        if what == "profile decode":
            return _profiled(lambda profile: self._decode(size, steps, profile), steps)
        return _profiled(lambda profile: self._prefill(size, profile), 1)

    def _model(self) -> Any:
        return self.engine.model_executor.driver_worker.worker.model_runner.get_model()

    def _add(self, length: int, new: int, logprobs: int | None = None) -> None:
        from vllm import SamplingParams

        self.requests += 1
        generator = torch.Generator().manual_seed(self.requests)
        tokens = torch.randint(0, self.size.vocab_size, (length,), generator=generator).tolist()
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=logprobs)
        self.engine.add_request(str(self.requests), {"prompt_token_ids": tokens}, params)

    def _answer(self, length: int) -> dict[str, list[Any]]:
        """As ``answers.Answer`` has them."""
        self._add(length, NEW, logprobs=2)
        outputs: list[Any] = []
        while self.engine.has_unfinished_requests():
            outputs += self.engine.step()
        [sample] = outputs[-1].outputs
        pairs = list(zip(sample.token_ids, sample.logprobs, strict=True))
        best = [sorted((one.logprob for one in ranked.values()), reverse=True) for _, ranked in pairs]
        return {
            "tokens": list(sample.token_ids),
            "logprobs": [
                ranked[token].logprob for token, ranked in zip(sample.token_ids, sample.logprobs, strict=True)
            ],
            "margins": [one[0] - one[1] for one in best],
        }

    def _decode(self, batch: int, steps: int, profile: Any = None) -> list[float]:
        """Seconds of each step in which all requests decode."""
        for _ in range(batch):
            self._add(self.context, ROOM)
        seen: Counter[str] = Counter()
        while len(seen) < batch or min(seen.values()) < WARM:
            for output in self.engine.step():
                seen[output.request_id] = len(output.outputs[0].token_ids)
        spans: list[float] = []
        if profile is not None:
            profile.start()
        for _ in range(steps):
            began = time.perf_counter()
            outputs = self.engine.step()
            spans.append(time.perf_counter() - began)
            if len(outputs) != batch:
                raise RuntimeError(
                    f"{len(outputs)} of {batch} requests decoded: the cache is too small for all at once"
                )
        if profile is not None:
            torch.cuda.synchronize()
            profile.stop()
        self.engine.abort_request(list(seen))
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return spans

    def _prefill(self, length: int, profile: Any = None) -> float:
        """Seconds to the first token."""
        self._add(length, new=1)
        if profile is not None:
            profile.start()
        began = time.perf_counter()
        while self.engine.has_unfinished_requests():
            self.engine.step()
        span = time.perf_counter() - began
        if profile is not None:
            torch.cuda.synchronize()
            profile.stop()
        return span


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


def _fusions(model: nn.Module) -> list[str]:
    """What the decoder's layers were built to run as one kernel; nothing in vLLM's own model."""
    if not type(model).__module__.startswith("atom_patches."):
        return []
    from atom_patches.models.attention import Attention
    from atom_patches.vllm.adapters.models.experts import RoutedExperts
    from atom_patches.vllm.adapters.models.products import FewRows

    layers = list(model.modules())
    attention = [layer for layer in layers if isinstance(layer, Attention)]
    built = {
        "experts": any(layer.own for layer in layers if isinstance(layer, RoutedExperts)),
        "qk_rope": any(layer.prepares for layer in attention),
        "kv_cache": any(layer.attends for layer in attention),
        "linear": any(isinstance(getattr(layer, "quant_method", None), FewRows) for layer in layers),
    }
    return [fusion for fusion in settings.FUSIONS if built[fusion]]


def _profiled(run: Callable[[Any], Any], steps: int) -> dict[str, Any]:
    """GPU time of a step in microseconds, and by kernel: name, time, launches."""
    run(None)
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    run(profile)
    micros: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in profile.events() or []:
        if str(event.device_type).endswith("CUDA"):
            micros[event.name] += event.device_time
            counts[event.name] += 1
    rows = [(name, us / steps, round(counts[name] / steps)) for name, us in micros.most_common(60)]
    return {"gpu_us": sum(micros.values()) / steps, "launched": sum(counts.values()) / steps, "kernels": rows}


if __name__ == "__main__":
    main()
