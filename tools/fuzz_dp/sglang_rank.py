"""One data-parallel rank of a real SGLang: its worker, its memory pools, its batches; driven step by step.

What a scheduler does between two steps is done here by the schedule: batches are SGLang's ScheduleBatch, prepared by
its own methods, synchronised over ranks by its own `prepare_mlp_sync_batch_raw`, and run by its own TpModelWorker.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import array
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from . import on_cpu
from .schedule import DRAFT, LIMIT, REQUESTS, Action, Piece

VOCABULARY = 192  # divided by 2, 3, 4 and 8 ranks after SGLang's padding to 64
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "num_experts": 24,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "norm_topk_prob": True,
    "dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": None,
}


def write_model(folder: Path) -> None:
    """A model without weights: SGLang makes them up."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))


def server_args(model: Path, ranks: int, layout: str, port: int) -> Any:
    """Arguments of a server with data-parallel attention; experts are cut over all ranks ("tp") or dealt out ("ep")."""
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(
        model_path=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        device=_device(),
        dtype="float32",
        tp_size=ranks,
        dp_size=ranks,
        ep_size=ranks if layout == "ep" else 1,
        enable_dp_attention=True,
        disable_custom_all_reduce=True,
        disable_cuda_graph=True,
        disable_radix_cache=True,
        disable_overlap_schedule=True,
        attention_backend="torch_native" if _device() == "cpu" else "triton",
        sampling_backend="pytorch",
        grammar_backend="none",
        enable_mixed_chunk=True,
        max_total_tokens=2048,
        max_running_requests=2 * REQUESTS * ranks,
        max_mamba_cache_size=4 * REQUESTS * ranks,
        context_length=4 * LIMIT,
        mem_fraction_static=0.1,
        speculative_num_steps=DRAFT - 1,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=DRAFT,
        random_seed=0,
        log_level="error",
        dist_init_addr=f"127.0.0.1:{port}",
    )


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _parallel_state(rank: int, arguments: Any) -> Any:
    """Where this rank stands in every kind of parallelism, as SGLang's scheduler works it out."""
    from sglang.srt.distributed.parallel_state_wrapper import ParallelState
    from sglang.srt.layers.dp_attention import compute_dp_attention_world_info

    attention_rank, attention_size, data_rank, data_size = compute_dp_attention_world_info(
        arguments.enable_dp_attention, rank, arguments.tp_size, arguments.dp_size, arguments.attn_cp_size
    )
    return ParallelState(
        tp_rank=rank,
        tp_size=arguments.tp_size,
        pp_rank=0,
        pp_size=1,
        dp_rank=None,
        dp_size=arguments.dp_size,
        attn_tp_rank=attention_rank,
        attn_tp_size=attention_size,
        attn_cp_rank=0,
        attn_cp_size=arguments.attn_cp_size,
        attn_dp_rank=data_rank,
        attn_dp_size=data_size,
        moe_ep_rank=rank // (arguments.tp_size // arguments.ep_size),
        moe_ep_size=arguments.ep_size,
        moe_dp_rank=None,
        moe_dp_size=arguments.moe_dp_size,
        dcp_size=arguments.dcp_size,
        gpu_id=rank,
    )


class Rank:
    """A real worker and the requests that it runs."""

    def __init__(self, rank: int, arguments: Any, port: int) -> None:
        from sglang.srt.layers.moe import initialize_moe_config
        from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
        from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
        from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config
        from sglang.srt.managers.tp_worker import TpModelWorker
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.chunk_cache import ChunkCache
        from sglang.srt.server_args import set_global_server_args_for_scheduler

        self.arguments = arguments
        set_global_server_args_for_scheduler(arguments)
        initialize_moe_config(arguments)
        for initialize in (initialize_fp8_gemm_config, initialize_fp4_gemm_config, initialize_bf16_gemm_config):
            initialize(arguments)
        self.worker = TpModelWorker(arguments, gpu_id=rank, ps=_parallel_state(rank, arguments), nccl_port=port)
        with on_cpu.cuda_is_the_cpu() if _device() == "cpu" else nullcontext():
            self.worker.alloc_memory_pool()
        if _device() == "cpu":
            on_cpu.install()
        self.worker.init_attention_backends()
        self.worker.init_cuda_graphs()
        self.runner = self.worker.model_runner
        self.device = self.runner.device
        self.pools = self.worker.get_memory_pool()
        self.cache = ChunkCache(
            CacheInitParams(
                disable=True,
                req_to_token_pool=self.pools[0],
                token_to_kv_pool_allocator=self.pools[1],
                page_size=arguments.page_size,
            )
        )
        self.running: Any = None  # a ScheduleBatch of all requests whose prompts are done
        self.partial: Any = None  # the request whose prompt was cut

    def step(self, action: Action, verifying: bool) -> None:
        """One step as the action says; idle ranks take part as SGLang lets them.

        Args:
            action: this rank's.
            verifying: whether some rank verifies a draft: then an idle one goes along with an empty draft.
        """
        self._release({str(request) for request in action.ended})
        run = {"extend": self._extend, "mixed": self._extend, "decode": self._decode, "verify": self._verify}
        run.get("verify" if verifying else action.kind, self._idle)(action)

    def decoder(self) -> str:
        """The model's class, by its full name."""
        model = type(self.runner.model)
        return f"{model.__module__}.{model.__qualname__}"

    def layer_count(self) -> int:
        return int(CONFIG["num_hidden_layers"])

    def free_slots(self) -> tuple[int, int]:
        """What the pools have left; the same before and after a request's life."""
        return self.pools[1].available_size(), self.pools[0].available_size()

    def _batch(self, requests: list[Any]) -> Any:
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        return ScheduleBatch.init_new(
            requests, *self.pools, self.cache, self.worker.model_config, False, SpeculativeAlgorithm.NONE
        )

    def _idle_batch(self) -> Any:
        batch = self._batch([])
        batch.prepare_for_idle()
        return batch

    def _synchronise(self, batch: Any) -> Any:
        """SGLang's agreement on the step over all ranks; None becomes an idle batch."""
        from sglang.srt.managers.scheduler_components.dp_attn import prepare_mlp_sync_batch_raw
        from sglang.srt.runtime_context import get_parallel
        from sglang.srt.utils.common import require_mlp_tp_gather

        return prepare_mlp_sync_batch_raw(
            batch,
            model_runner=self.runner,
            dp_size=self.arguments.dp_size,
            attn_tp_size=get_parallel().attn_tp_size,
            attn_cp_size=self.runner.ps.attn_cp_size,
            tp_group=self.runner.tp_group,
            get_idle_batch=self._idle_batch,
            disable_cuda_graph=self.arguments.disable_cuda_graph,
            require_mlp_tp_gather=require_mlp_tp_gather(self.arguments),
            disable_overlap_schedule=self.arguments.disable_overlap_schedule,
            offload_tags=set(),
        )

    def _run(self, batch: Any) -> Any:
        """A forward pass; the tokens that follow, one a request."""
        return self.worker.forward_batch_generation(self._synchronise(batch)).next_token_ids

    def _idle(self, action: Action) -> None:
        self._run(None)

    def _extend(self, action: Action) -> None:
        import torch

        requests = [self._request(piece) for piece in action.pieces]
        batch = self._batch(requests)
        batch.prepare_for_extend()
        rows = batch.prefill_input_ids_cpu.to(self.device)
        batch.prefill_input_ids_cpu = None
        if action.kind == "mixed":
            self.running.prepare_for_decode()
            rows = torch.cat([rows, self.running.input_ids])
            batch.mix_with_running(self.running)
            self.running = None
        batch.input_ids = rows
        tokens = self._run(batch)
        self.partial = None
        for piece, request in zip(action.pieces, requests, strict=True):
            if not piece.last:
                self.partial = request
                self.cache.cache_unfinished_req(request, chunked=True)
        self._keep(batch, tokens)

    def _decode(self, action: Action) -> None:
        self.running.prepare_for_decode()
        self._keep(self.running, self._run(self.running))

    def _verify(self, action: Action) -> None:
        """Verify one chain of drafted rows for each request, of which one row is kept."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.speculative.eagle_utils import eagle_prepare_for_decode, eagle_prepare_for_verify

        batch = None
        if action.kind == "verify":
            batch = self.running
            batch.forward_mode = ForwardMode.DECODE
            eagle_prepare_for_decode(batch)
        batch = self._synchronise(batch)
        last = batch.input_ids
        batch.spec_info = self._draft(batch)
        run, _ = eagle_prepare_for_verify(batch.spec_info, self.pools[0], batch, self.worker)
        logits = self.worker.forward_batch_generation(None, forward_batch=run, is_verify=True).logits_output
        batch.spec_info = None
        tokens = logits.next_token_logits.view(-1, DRAFT, VOCABULARY)[:, 0].argmax(-1)
        if len(tokens) != len(batch.reqs):
            raise AssertionError(f"{len(tokens)} drafts were verified, not {len(batch.reqs)}")
        if batch is self.running:
            batch.input_ids = last
            self._accept(batch, tokens)

    def _draft(self, batch: Any) -> Any:
        """A chain for each request: the last token, and what might follow it."""
        import torch
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
        from sglang.srt.speculative.eagle_info import EagleVerifyInput

        if batch.forward_mode.is_idle():
            return EagleVerifyInput.create_idle_input(1, DRAFT - 1, DRAFT, self.device)
        count = len(batch.reqs)
        places = torch.arange(DRAFT, device=self.device)
        chain = torch.arange(count * DRAFT, device=self.device).view(count, DRAFT)
        following = torch.cat([places[1:], places.new_full((1,), -1)]).expand(count, DRAFT)
        widths = batch.seq_lens_cpu.tolist()
        causal = torch.ones(DRAFT, DRAFT, dtype=torch.bool, device=self.device).tril()
        masks = [torch.cat([causal.new_ones(DRAFT, width), causal], 1).flatten() for width in widths]
        return EagleVerifyInput(
            draft_token=((batch.input_ids[:, None] + places) % VOCABULARY).flatten(),
            custom_mask=torch.cat(masks),
            positions=(batch.seq_lens[:, None] + places).flatten(),
            retrieve_index=chain,
            retrieve_next_token=following,
            retrieve_next_sibling=torch.full_like(chain, -1),
            retrieve_cum_len=None,
            spec_steps=DRAFT - 1,
            topk=1,
            draft_token_num=DRAFT,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=sum(widths),
            seq_lens_cpu=batch.seq_lens_cpu,
        )

    def _accept(self, batch: Any, tokens: Any) -> None:
        """Keep one row of each draft, and give the rest back, so that the next step may be of any kind."""
        batch.seq_lens = batch.seq_lens + 1
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        batch.orig_seq_lens = batch.orig_seq_lens + 1
        batch.seq_lens_sum = None
        for request in batch.reqs:
            request.kv_committed_len += 1
            kept, taken = request.kv_committed_len, request.kv.kv_allocated_len
            self.pools[1].free(self.pools[0].req_to_token[request.req_pool_idx, kept:taken].clone())
            request.kv.kv_allocated_len = kept
        self._keep(batch, tokens)

    def _keep(self, batch: Any, tokens: Any) -> None:
        """The requests whose prompts are done, and what they said, are what runs from now on."""
        for request, token in zip(batch.reqs, tokens.tolist(), strict=True):
            if request is not self.partial:
                request.output_ids.append(token)
        batch.input_ids = tokens.long()
        batch.filter_batch(chunked_req_to_exclude=self.partial)
        if batch is self.running or not batch.reqs:
            return
        if self.running is None:
            self.running = batch
        else:
            self.running.merge_batch(batch)

    def _request(self, piece: Piece) -> Any:
        """The request of a piece, its rows set to those of the piece."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        if piece.begin:
            request = self.partial
        else:
            prompt = array.array("q", [(piece.request * 7 + i) % VOCABULARY for i in range(piece.length)])
            parameters = SamplingParams(temperature=0, max_new_tokens=LIMIT)
            parameters.normalize(None)
            request = Req(str(piece.request), "", prompt, parameters, vocab_size=VOCABULARY)
            request.full_untruncated_fill_ids = prompt[:]
        request.logprob_start_len = -1
        request.set_extend_range(piece.begin, piece.end)
        return request

    def _release(self, ended: set[str]) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache

        if not ended:
            return
        kept: list[int] = []
        for i, request in enumerate(self.running.reqs):
            if request.rid in ended:
                release_kv_cache(request, self.cache)
            else:
                kept.append(i)
        self.running.filter_batch(keep_indices=kept)
        if not kept:
            self.running = None
