"""A side of `bench engine` that is SGLang: `python -m atom_patches.bench.sglang_side FD PLAN`.

It is SGLang's own scheduler, with its worker, memory pools, attention backend and graphs, and without the processes
beside it: a step here is one turn of its loop that does not overlap host and GPU, from the choice of a batch until
the batch's tokens are on the host.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from atom_patches.bench import engine_side, seeded_model
from atom_patches.bench.answers import CANDIDATES
from atom_patches.core import settings

CHUNK = {"cuda": 8192, "cpu": 64}
"""Tokens of a prompt that one step takes: on an H200 what SGLang takes by default."""

MEMORY = 0.85
"""Of the memory that is free when a side begins, what may be taken. What is taken follows from the plan's sizes."""


class SglangSide(engine_side.Side):
    """SGLang's scheduler, in this process. A request is the scheduler's own object."""

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__(plan)
        _load_seeded(self.size)
        self.scheduler = _scheduler({**self._options(plan), **self.more})
        self.added: list[Any] = []
        for length in plan["lengths"]:  # kernels are compiled now, while other sides compile theirs
            self.prefill(length)
        logging.getLogger("sglang").setLevel(logging.WARNING)  # a line for every prefill would be timed with it

    def _options(self, plan: dict[str, Any]) -> dict[str, Any]:
        most = max([1, *plan["batches"]])
        chunk = CHUNK[plan["device"]]
        tokens = max(self.longest, most * (self.context + engine_side.ROOM)) + chunk
        return {
            "model_path": str(self.folder), "skip_tokenizer_init": True, "grammar_backend": "none", "random_seed": 0,
            "context_length": self.longest, "chunked_prefill_size": chunk, "max_total_tokens": tokens,
            "max_running_requests": most, "max_mamba_cache_size": 2 * most, "disable_radix_cache": True,
            # One step at a time, so that what a step takes is its own.
            "disable_overlap_schedule": True,
            **(_on_gpu(plan["batches"], plan["lengths"]) if self.cuda else _on_cpu()),
        }  # fmt: skip

    def model(self) -> nn.Module:
        return self._runner().model

    def fusions(self) -> list[str]:
        model = self.model()
        if not type(model).__module__.startswith("atom_patches."):
            return []
        from atom_patches.models.few_rows import has_few_rows
        from atom_patches.sglang.adapters.experts import RoutedExperts

        built = {
            "experts": any(layer.own for layer in model.modules() if isinstance(layer, RoutedExperts)),
            "linear": has_few_rows(model),
        }
        return [fusion for fusion in settings.FUSIONS if built.get(fusion)]

    def versions(self) -> dict[str, str]:
        from sglang.version import __version__

        return {"sglang": __version__, "torch": torch.__version__}

    def graphs(self) -> str:
        runner = self._runner()
        kinds = {"decode": runner.decode_cuda_graph_runner, "prefill": runner.prefill_cuda_graph_runner}
        return ", ".join([*(_captured(*one) for one in kinds.items()), f"prompts in chunks of {self._chunk():,}"])

    def add(self, tokens: list[int], new: int, logprobs: bool) -> Any:
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        params = SamplingParams(temperature=0, max_new_tokens=new, ignore_eos=True)
        params.normalize(None)
        self.scheduler.process_input_requests([
            TokenizedGenerateReqInput(
                rid=str(self.requests), input_text=None, input_ids=array("q", tokens), input_embeds=None,
                mm_inputs=None, token_type_ids=None, sampling_params=params, return_logprob=logprobs,
                logprob_start_len=-1, top_logprobs_num=CANDIDATES if logprobs else 0, token_ids_logprob=None,
                stream=False,
            )
        ])  # fmt: skip
        self.added.append(self.scheduler.waiting_queue[-1])
        return self.added[-1]

    def step(self) -> None:
        from sglang.srt.utils import DynamicGradMode

        scheduler = self.scheduler
        with DynamicGradMode():
            chosen = scheduler.get_next_batch_to_run(
                running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
            )
            scheduler.running_batch, batch = chosen.running_batch, chosen.batch_to_run
            if batch:
                scheduler.process_batch_result(batch, scheduler.run_batch(batch))
            scheduler.last_batch = batch

    def busy(self) -> bool:
        return not all(request.finished() for request in self.added)

    def generated(self, request: Any) -> int:
        return len(request.output_ids)

    def answer(self, request: Any) -> dict[str, list[Any]]:
        said = request.logprob
        ranked = zip(said.output_top_logprobs_idx, said.output_top_logprobs_val, strict=True)
        return {
            "tokens": list(map(int, request.output_ids)),
            "logprobs": list(map(float, said.output_token_logprobs_val)),
            "candidates": [[*zip(map(int, ids), map(float, values), strict=True)] for ids, values in ranked],
        }

    def drop(self) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        if self.busy():
            self.scheduler.abort_request(AbortReq(abort_all=True))
        while self.busy() or not self.scheduler.is_fully_idle():
            self.step()
        self.added.clear()
        self.scheduler.on_idle()  # which fails if a request kept some of a pool

    def _runner(self) -> Any:
        return self.scheduler.tp_worker.model_runner

    def _chunk(self) -> int:
        return self.scheduler.chunked_prefill_size


def _scheduler(options: dict[str, Any]) -> Any:
    """What a process of SGLang's for one scheduler makes, in this one."""
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.managers.scheduler import Scheduler, configure_scheduler_process
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    load_plugins()
    arguments = ServerArgs(**options)
    _set_envs_and_config(arguments)
    ports = PortArgs.init_new(arguments)
    configure_scheduler_process(arguments, 0, 0, 0, 0, 0, 0, None)
    publish(arguments, role="scheduler")
    return Scheduler(arguments, ports, 0, 0, 0, 0, 0, 0, None)


def _load_seeded(size: seeded_model.Size) -> None:
    """Have SGLang's loader of checkpoints read seeded weights, whichever class they are for.

    A format of its own would do, too, but decoders of this package take formats with published names alone.
    """
    from sglang.srt.model_loader.loader import DefaultModelLoader

    def weights(loader: Any, model_config: Any, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        yield from seeded_model.weights(size, next(model.parameters()).device)

    DefaultModelLoader._get_all_weights = weights


def _captured(kind: str, runner: Any) -> str:
    """The sizes of a runner's graphs, for people."""
    sizes = getattr(runner, "capture_bs", None) if kind == "decode" else getattr(runner, "capture_num_tokens", None)
    return f"{kind} graphs of {', '.join(map(str, sizes))} rows" if sizes else f"no {kind} graphs"


def _on_cpu() -> dict[str, Any]:
    return {
        "device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "disable_cuda_graph": True,
        "sampling_backend": "pytorch", "mem_fraction_static": 0.3,
    }  # fmt: skip


def _on_gpu(batches: list[int], lengths: list[int]) -> dict[str, Any]:
    """Options of a side on a GPU that others are on, too. Prefill graphs are those of the sizes that are measured."""
    chunk = CHUNK["cuda"]
    prefills = sorted({256, engine_side.CONTEXT["cuda"], *(min(length, chunk) for length in lengths)})
    return {
        "dtype": "bfloat16", "mem_fraction_static": MEMORY,
        "cuda_graph_bs_decode": sorted({1, *batches}), "cuda_graph_bs_prefill": prefills,
    }  # fmt: skip


if __name__ == "__main__":
    engine_side.serve(SglangSide)
