"""One side of engine.py: an engine that measures what it is told."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections import Counter
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch

CONTEXT = 1024
"""Tokens that each request has when its decode steps are timed, less than a hundred more at the end."""


def main() -> None:
    """Start the engine, say so, and answer until nobody asks."""
    plan = json.loads(sys.argv[1])
    started = time.monotonic()
    side = Side(plan)
    connection = Client(plan["address"], "AF_UNIX")
    connection.send_bytes(json.dumps({"seconds": round(time.monotonic() - started, 1), **side.about()}).encode())
    while True:
        connection.send_bytes(json.dumps(side.measure(json.loads(connection.recv_bytes()))).encode())


class Side:
    """An engine of the plan's size."""

    def __init__(self, plan: dict[str, Any]) -> None:
        sys.path.insert(0, str(Path(__file__).parent))
        import seeded_model
        from vllm import LLM
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        self.size = dataclasses.replace(seeded_model.SIZES[plan["size"]], num_hidden_layers=plan["layers"])
        seeded_model.register(self.size)
        longest = max([*plan["lengths"], CONTEXT]) + 256
        cuda = plan["device"] == "cuda"
        graphs = {"cudagraph_capture_sizes": sorted({1, *plan["batches"]}), "max_cudagraph_capture_size": None}
        platform: dict[str, Any] = {"dtype": "float32", "enforce_eager": True}
        if cuda:
            # FlashInfer's kernels would be compiled first, for minutes.
            platform = {
                "dtype": "bfloat16", "gdn_prefill_backend": "triton", "moe_backend": "triton",
                "enable_flashinfer_autotune": False, "compilation_config": {k: v for k, v in graphs.items() if v},
            }  # fmt: skip
        self.llm: Any = LLM(
            model=str(seeded_model.write_config(self.size, Path(plan["folder"]), longest)),
            load_format=seeded_model.LOAD_FORMAT, skip_tokenizer_init=True, seed=0, max_model_len=longest,
            max_num_batched_tokens=longest, max_num_seqs=max([1, *plan["batches"]]), enable_prefix_caching=False,
            distributed_executor_backend=UniProcExecutor, max_logprobs=2, disable_log_stats=True,
            async_scheduling=False, kv_cache_memory_bytes=(6 if cuda else 1) << 30, gpu_memory_utilization=0.3,
            **platform,
        )  # fmt: skip
        self.engine = self.llm.llm_engine
        self.cuda = cuda
        self.seed = 0

    def about(self) -> dict[str, Any]:
        """Which class runs, and where."""
        model = self.engine.model_executor.driver_worker.worker.model_runner.get_model()
        device = torch.cuda.get_device_name() if self.cuda else "cpu"
        return {"model": f"{type(model).__module__}.{type(model).__name__}", "device": device}

    def measure(self, cell: dict[str, Any]) -> Any:
        """What the cell asks for."""
        what, size = cell["what"], cell.get("size", 0)
        if what == "answers":
            return [self._answer(length) for length in cell["lengths"]]
        if what == "decode":
            return self._decode(size, cell["steps"])
        if what == "prefill":
            return [self._prefill(size) for _ in range(1 + cell["steps"])][1:]
        if what == "profile decode":
            return self._profiled(lambda profile: self._decode(size, cell["steps"], profile), cell["steps"])
        return self._profiled(lambda profile: self._prefill(size, profile), 1)

    def _add(self, length: int, new: int, logprobs: int | None = None) -> None:
        from vllm import SamplingParams

        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        tokens = torch.randint(0, self.size.vocab_size, (length,), generator=generator).tolist()
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=logprobs)
        self.engine.add_request(str(self.seed), {"prompt_token_ids": tokens}, params)

    def _answer(self, length: int) -> list[tuple[int, float]]:
        """Tokens with their log-probabilities."""
        self._add(length, new=12, logprobs=2)
        outputs: list[Any] = []
        while self.engine.has_unfinished_requests():
            outputs += self.engine.step()
        [sample] = outputs[-1].outputs
        return [(token, ranked[token].logprob) for token, ranked in zip(sample.token_ids, sample.logprobs, strict=True)]

    def _decode(self, batch: int, steps: int, profile: Any = None) -> list[float]:
        """Seconds of each step in which all requests decode."""
        for _ in range(batch):
            self._add(CONTEXT, new=CONTEXT // 8)
        seen: Counter[str] = Counter()
        while len(seen) < batch or min(seen.values()) < 3:  # prefilled, and warm
            for output in self.engine.step():
                seen[output.request_id] = len(output.outputs[0].token_ids)
        spans = []
        if profile is not None:
            profile.start()
        for _ in range(steps):
            began = time.perf_counter()
            self.engine.step()
            spans.append(time.perf_counter() - began)
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

    def _profiled(self, run: Any, steps: int) -> dict[str, Any]:
        """GPU time of a step, by kernel."""
        if not self.cuda:
            return {"gpu_us": 0, "launched": 0, "kernels": []}
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
