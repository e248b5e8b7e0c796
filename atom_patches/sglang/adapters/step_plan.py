"""The plan of a step, from what SGLang says about it on every rank alike."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel

from atom_patches.runtime.step import StepMode, StepPlan

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

MODES = {
    ForwardMode.EXTEND: StepMode.EXTEND,
    ForwardMode.SPLIT_PREFILL: StepMode.EXTEND,
    ForwardMode.DECODE: StepMode.DECODE,
    ForwardMode.MIXED: StepMode.MIXED,
    ForwardMode.IDLE: StepMode.IDLE,
    ForwardMode.TARGET_VERIFY: StepMode.TARGET_VERIFY,
    ForwardMode.DRAFT_EXTEND_V2: StepMode.DRAFT_EXTEND,
}


def plan_step(batch: ForwardBatch, rows: int) -> StepPlan:
    """The plan of this rank's step, of which the engine hands `rows` rows to the model."""
    # SGLang verifies on an idle rank, too, but where it does not pad that rank's batch there is nothing to verify.
    mode = MODES[batch.forward_mode] if rows else StepMode.IDLE
    across = tokens_across_ranks(batch)
    if across is None:
        return StepPlan.of(mode, rows, global_mode=_global_mode(batch, mode))
    return StepPlan.of(
        mode,
        rows,
        global_mode=_global_mode(batch, mode),
        tokens_across_ranks=across,
        rank=get_parallel().attn_dp_rank if len(across) > 1 else 0,
    )


def tokens_across_ranks(batch: ForwardBatch) -> list[int] | None:
    """The rows that SGLang hands to the model on each data-parallel rank, padding included; None where there is one."""
    return batch.global_num_tokens_cpu


def _global_mode(batch: ForwardBatch, mode: StepMode) -> StepMode:
    """What all ranks do together. SGLang gathers it for two-batch overlap only, but always whether any rank extends."""
    across = tokens_across_ranks(batch)
    if across is None or len(across) == 1:
        return mode
    if batch.global_forward_mode is not None:
        together = MODES[ForwardMode(batch.global_forward_mode)]
        return together if mode in (StepMode.IDLE, together) else StepMode.MIXED
    if batch.is_extend_in_batch:
        return StepMode.MIXED  # perhaps all extend, but that is not known
    # Nobody extends, so whoever has requests does as this rank does.
    return _of_busy_ranks(batch) if mode is StepMode.IDLE else mode


def _of_busy_ranks(batch: ForwardBatch) -> StepMode:
    """What ranks with requests do while this one has none and none extends."""
    spec = batch.spec_info
    if spec is None:
        return StepMode.DECODE
    return StepMode.MIXED if spec.is_draft_input() else StepMode.TARGET_VERIFY
