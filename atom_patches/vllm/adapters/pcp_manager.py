"""The step's split in the place where vLLM's second model runner asks for one, its prefill-context-parallel manager.

The engine's own manager deals out the rows of models with latent attention, and shards decodes. This one deals out
rows by :mod:`atom_patches.runtime.pcp`, which recurrent layers can run too, and replicates decodes. Caches are whole on
every rank, so block tables and slots are those of the whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed.parallel_state import get_pcp_group
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.pcp_manager import PCPManager  # pyright: ignore[reportMissingImports]

from atom_patches.core import settings
from atom_patches.runtime.pcp import plan_step
from atom_patches.vllm.adapters.pcp_step import CacheGroup, SplitStep, StepBatch, fill_in, plan_rows

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
    from vllm.v1.worker.utils import AttentionGroup


@dataclass
class SplitBatch(InputBatch):
    """This rank's rows of a step.

    What says something about requests (their number, lengths and slots) is the whole step's: a cut request is one
    request. Only what has a row for each token is this rank's.

    Attributes:
        whole: the step's batch.
        step: how it is split; its metadata are filled in later.
    """

    whole: InputBatch | None = None
    step: SplitStep | None = None


def whole_batch(input_batch: InputBatch) -> InputBatch:
    """The batch of the whole step."""
    if isinstance(input_batch, SplitBatch):
        assert input_batch.whole is not None
        return input_batch.whole
    return input_batch


class SplitManager(PCPManager):
    """Splits the runner's steps.

    Takes the same arguments as the engine's manager, most of which it has no use for: it needs no buffers of its own.
    Made by the class that :func:`manager_for` gives.
    """

    config: VllmConfig

    def __init__(self, *, device: torch.device, block_tables: BlockTables | None = None, **unused: Any) -> None:
        self.device = device
        self._block_tables = block_tables
        self._global_batch = None
        self._step: SplitStep | None = None
        self.draft_prefill_batch = None

    @staticmethod
    def validate_config(vllm_config: VllmConfig, supports_mm_inputs: bool) -> None:
        """Nothing: what is not served was refused before the engine was built."""

    def set_block_tables(self, block_tables: BlockTables | None) -> None:
        """From vLLM 0.33 on, the runner makes the manager before there are caches, and hands it their tables later."""
        self._block_tables = block_tables

    def get_num_tokens_for_dispatch(self, num_scheduled_tokens: np.ndarray, is_prefilling: np.ndarray) -> int:
        """Rows of one rank."""
        lengths = num_scheduled_tokens.tolist()
        plan = plan_step(lengths, get_pcp_group().world_size, settings.pcp_min_rows())
        return sum(lengths) if plan is None else plan.rows_per_rank

    def partition_batch(self, input_batch: InputBatch, batch_desc: BatchExecutionDescriptor) -> InputBatch:
        """This rank's batch: the whole one if the step is replicated."""
        self._global_batch, self._step = input_batch, None
        seq_lens = _seq_lens(input_batch)
        plan = plan_rows(self.config, input_batch.num_scheduled_tokens.tolist(), seq_lens)
        if plan is None:
            return input_batch
        assert batch_desc.cg_mode == CUDAGraphMode.NONE, "a split step runs in no graph"
        self._step = SplitStep(plan, get_pcp_group(), self.device)
        return _own_rows(input_batch, self._step)

    def prepare_attn(self, input_batch: InputBatch) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Block tables and slots of the whole step, as without a manager."""
        tables, whole = self._tables, whole_batch(input_batch)
        rows = tables.gather_block_tables(whole.idx_mapping, num_reqs_padded=whole.num_reqs_after_padding)
        slots = tables.compute_slot_mappings(
            whole.idx_mapping,
            whole.query_start_loc,
            whole.positions,
            num_tokens_padded=whole.num_tokens_after_padding,
        )
        return rows, slots

    def get_dummy_block_tables(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        return self._tables.get_dummy_block_tables(num_reqs)

    def get_dummy_slot_mappings(self, num_tokens: int) -> torch.Tensor:
        return self._tables.get_dummy_slot_mappings(num_tokens)

    def prepare_inputs_to_capture(self, input_batch: InputBatch) -> InputBatch:
        """Dummy steps are replicated, and replicated steps stay in the runner's buffers."""
        return input_batch

    prepare_inputs_for_capture_or_profile = prepare_inputs_to_capture
    """What vLLM 0.33 calls it, where a memory profile takes this way, too."""

    def restore_for_sampling(
        self, hidden_states: torch.Tensor, aux_hidden_states: list[torch.Tensor] | None
    ) -> tuple[torch.Tensor, list[torch.Tensor] | None, InputBatch]:
        """Hidden states of all rows, on every rank."""
        assert aux_hidden_states is None, "only speculative decoding takes these, and it is not served"
        if self._step is not None:
            hidden_states = self._step.gather(hidden_states)
        return hidden_states, None, self.global_batch

    @property
    def _tables(self) -> BlockTables:
        assert self._block_tables is not None, "a step before there are caches"
        return self._block_tables


def manager_for(config: VllmConfig) -> type[SplitManager]:
    """The manager of an engine: the runner makes it, and hands it no configuration."""
    return type(SplitManager.__name__, (SplitManager,), {"config": config})


def split_metadata(
    config: VllmConfig,
    input_batch: SplitBatch,
    block_tables: Sequence[torch.Tensor],
    slot_mappings: torch.Tensor,
    attn_groups: Sequence[Sequence[AttentionGroup]],
    whole: dict[str, Any],
) -> SplitStep:
    """This rank's attention metadata.

    Args:
        config: of the engine.
        input_batch: this rank's.
        block_tables: by KV-cache group, of every request.
        slot_mappings: by KV-cache group, of every row of the step.
        attn_groups: by KV-cache group.
        whole: by layer, the metadata of the whole step.
    """
    step: SplitStep | None = input_batch.step
    batch: Any = whole_batch(input_batch)
    assert step is not None
    prepared = _ManagedBatch(
        config, batch.positions.device, step.plan, step.rank, _seq_lens(batch), batch.is_prefilling_np.tolist()
    )
    groups = [
        CacheGroup(members, table[: batch.num_reqs], slots[: batch.num_tokens])
        for members, table, slots in zip(attn_groups, block_tables, slot_mappings, strict=True)
    ]
    fill_in(step, prepared, groups, whole)
    return step


class _ManagedBatch(StepBatch):
    """Its runner's metadata have the lengths on the host once only, and state slots in more than one field."""

    moves_queries = False
    recurrent_groups_alike = False

    def _host_lengths(self, seq_lens: torch.Tensor, rows: torch.Tensor) -> dict[str, Any]:
        return {}


def _seq_lens(batch: Any) -> list[int]:
    """Tokens of every request after the step. Without speculative decoding the host knows them."""
    return (batch.num_computed_tokens_np + batch.num_scheduled_tokens).tolist()


def _own_rows(whole: InputBatch, step: SplitStep) -> SplitBatch:
    taken = {field.name: getattr(whole, field.name) for field in fields(whole)}
    rows = step.plan.rows_per_rank
    taken.update(
        input_ids=whole.input_ids[step.local_rows],
        positions=whole.positions[step.local_rows],
        is_padding=torch.zeros(rows, dtype=torch.bool, device=step.local_rows.device),
        num_tokens=rows,
        num_tokens_after_padding=rows,
    )
    return SplitBatch(**taken, whole=whole, step=step)
