"""A step in which ranks without requests run one row, as SGLang's exchanges have to see it.

SGLang sizes the buffers of its exchanges by the rows of every rank. Where a rank had none, each rank replaces that 0
by the row that the idle rank runs, from the same numbers, so that all agree and nobody asks.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.dp_attention import _DpGatheredBufferWrapper as Buffers
from sglang.srt.layers.dp_attention import set_dp_buffer_len
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from atom_patches.runtime.idle import RequestFields, ReservedSlots, dummy_fields

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from atom_patches.runtime.idle import ModelInputs
    from atom_patches.runtime.step import StepPlan

RESERVED = ReservedSlots(request=0, cache=0, state=-1)
"""SGLang's pools keep their first row and slot for padding; a negative slot stands for no recurrent state."""


def with_dummy_rows(batch: ForwardBatch, plan: StepPlan, tokens: ModelInputs) -> ForwardBatch:
    """The batch as the decoder runs it: itself if every rank has rows, else a copy; the engine's is left alone."""
    changed: dict[str, object] = {}
    if plan.needs_dummy:
        changed |= _one_request(batch) | {"input_ids": tokens.input_ids, "positions": tokens.positions}
    if _counts_change(batch, plan):
        changed |= _counts(batch, plan.tokens_across_ranks)
    return dataclasses.replace(batch, **changed) if changed else batch


@contextmanager
def exchanging(batch: ForwardBatch, plan: StepPlan) -> Iterator[None]:
    """Size SGLang's exchanges by the plan within the block, and as they were afterwards."""
    if not _counts_change(batch, plan):
        yield
        return
    before = (
        Buffers._global_dp_buffer_len,
        Buffers._local_dp_buffer_len,
        Buffers._dp_max_padding,
        Buffers._global_num_tokens,
        Buffers._global_num_tokens_gpu,
    )
    across = list(plan.tokens_across_ranks)
    set_dp_buffer_len(sum(across), plan.physical_tokens, before[2], across, _on_device(batch, across))
    try:
        yield
    finally:
        set_dp_buffer_len(*before)


def _counts_change(batch: ForwardBatch, plan: StepPlan) -> bool:
    counts = batch.global_num_tokens_cpu
    return counts is not None and list(counts) != list(plan.tokens_across_ranks)


def _counts(batch: ForwardBatch, across: Sequence[int]) -> dict[str, object]:
    return {
        "global_num_tokens_cpu": list(across),
        "global_num_tokens_gpu": _on_device(batch, across),
        "global_dp_buffer_len": sum(across),
        # SGLang works these out of the numbers above, and keeps them.
        "dp_local_start_pos": None,
        "dp_local_num_tokens": None,
        **({"global_num_tokens_padded_cpu": list(across)} if hasattr(batch, "global_num_tokens_padded_cpu") else {}),
    }


def _on_device(batch: ForwardBatch, across: Sequence[int]) -> torch.Tensor:
    counts = batch.global_num_tokens_gpu
    return torch.tensor(list(across), dtype=counts.dtype).to(counts.device, non_blocking=True)


def _one_request(batch: ForwardBatch) -> dict[str, object]:
    """All that the batch says by request or by token, for one request of one token in reserved slots."""
    fields = dummy_fields(
        RequestFields(
            request_rows=batch.req_pool_indices,
            cache_slots=batch.out_cache_loc,
            seq_lens=batch.seq_lens,
            extend_lens=batch.extend_seq_lens,
            prefix_lens=batch.extend_prefix_lens,
        ),
        RESERVED,
    )
    return {
        "forward_mode": ForwardMode.IDLE,
        "batch_size": 1,
        "req_pool_indices": fields.request_rows,
        "out_cache_loc": fields.cache_slots,
        "seq_lens": fields.seq_lens,
        "seq_lens_cpu": None if batch.seq_lens_cpu is None else torch.ones(1, dtype=batch.seq_lens_cpu.dtype),
        "seq_lens_sum": 1,
        "extend_seq_lens": fields.extend_lens,
        "extend_prefix_lens": fields.prefix_lens,
    }
