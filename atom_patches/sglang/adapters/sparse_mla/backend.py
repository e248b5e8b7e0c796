"""The attention backend of SGLang that serves sparse latent attention with this package's kernels."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from atom_patches.kernels.mla_attention import mla_attention, mla_cache_write, sparse_mla_attention
from atom_patches.kernels.mla_attention.layout import Layout, layout_of
from atom_patches.models.lightning_indexer import IndexerShape
from atom_patches.runtime.sparse_plan import selection_rows
from atom_patches.sglang.adapters.sparse_mla.caches import latent_cache
from atom_patches.sglang.adapters.sparse_mla.sizes import indexer_shape, prefill_rows, rows_per_request, workspace
from atom_patches.sglang.adapters.sparse_mla.step import Everything, SparseStep, Tables

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class SparseMlaBackend(AttentionBackend):
    """Absorbed attention over the slots that a layer's indexer selected, or over everything while that is no more.

    Attributes:
        use_mha: read by SGLang's DeepSeek layers: they always hand over queries in the latent space.
        forward_metadata: the plan of the step that is running; SGLang clears it itself where a rank is idle.
    """

    use_mha = False

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__()
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.forward_metadata: SparseStep | None = None
        self.indexer: IndexerShape = indexer_shape(runner.model_config.hf_config)
        self.workspace = workspace(self.indexer)
        self.tables = Tables(
            runner.req_to_token_pool.req_to_token, runner.page_size, self.indexer.top_k, self.workspace
        )
        self.unit_scale = torch.ones(1, dtype=torch.float32, device=runner.device)
        self._selected = torch.full(
            (_selection_rows(runner), self.indexer.top_k), -1, dtype=torch.int32, device=runner.device
        )

    def selected(self, rows: int) -> Tensor:
        """Where the indexer of the layer that is running puts its slots: [rows, top_k] int32."""
        if rows <= self._selected.shape[0]:
            return self._selected[:rows]
        return self._selected.new_empty(rows, self._selected.shape[1])

    def plan(self, forward_batch: ForwardBatch) -> SparseStep | None:
        """The plan of the step that is running, None where the rank is idle.

        Raises:
            RuntimeError: SGLang runs the step without having had it planned.
        """
        if forward_batch.forward_mode.is_idle():
            return None
        if self.forward_metadata is None:
            raise RuntimeError(f"no plan was made for this step ({forward_batch.forward_mode.name})")
        return self.forward_metadata

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self.forward_metadata = self.tables.eager(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing: a graph's plan is made within it, from the inputs that SGLang keeps in place."""

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Nothing depends on the step's values; see `init_forward_metadata_in_graph`."""

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        self.forward_metadata = self.tables.captured(forward_batch)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **given: Any,
    ) -> Tensor:
        """Every mode alike; rows of padding and of idle ranks come out as zeros."""
        del v
        latent = q.view(-1, layer.tp_q_head_num, layer.v_head_dim)
        step = self.plan(forward_batch)
        if step is None:
            return torch.zeros_like(latent).flatten(1)
        rope = given["q_rope"].view(latent.shape[0], layer.tp_q_head_num, -1)
        cache = latent_cache(self.token_to_kv_pool, layer.layer_id)
        scale = self._scale_of(cache, layer.v_head_dim, rope.shape[-1])
        if save_kv_cache:
            key_rope = given["k_rope"].flatten(1)
            mla_cache_write(k.flatten(1), key_rope, step.slots, cache, cache_scale=scale)
        queries = torch.cat([latent, rope], dim=-1)
        options: dict[str, Any] = {"scale": layer.scaling, "cache_scale": scale, "value_size": layer.v_head_dim}
        if step.everything is not None:
            return _over_everything(queries, cache, step.everything, options)
        indices = given.get("topk_indices")
        if indices is None:
            raise RuntimeError(f"layer {layer.layer_id} selected nothing, and a request has more than it may see")
        return sparse_mla_attention(queries, cache, indices, **options)[0].flatten(1)

    def _scale_of(self, cache: Tensor, latent_size: int, rope_size: int) -> Tensor | None:
        """SGLang's FP8 without scales in the rows has none beside them either."""
        return self.unit_scale if layout_of(cache, latent_size, rope_size) is Layout.SCALED else None


def _over_everything(queries: Tensor, cache: Tensor, step: Everything, options: dict[str, Any]) -> Tensor:
    out, _ = mla_attention(
        queries,
        cache,
        step.table,
        cu_seqlens_q=step.cu_seqlens_q,
        seq_lens_k=step.seq_lens_k,
        max_seqlen_q=step.longest_q,
        max_seqlen_k=step.longest_k,
        **options,
    )
    return out.flatten(1)


def _selection_rows(runner: ModelRunner) -> int:
    args, running = runner.server_args, runner.max_running_requests
    if args.max_running_requests is None:
        logger.info("no --max-running-requests: slots are kept for the %d requests that SGLang derived", running)
    return selection_rows(running, rows_per_request(args), prefill_rows(args))
