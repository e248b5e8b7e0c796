"""One split step on one rank: metadata for the rows this rank runs, and the gathers that make rows whole again.

A split step travels in the place where vLLM itself carries a step's attention metadata, the forward context. So
it lives exactly as long as the forward pass, nests with it, and needs no state of its own: layers ask
:func:`current_split_step`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from vllm.distributed.parallel_state import GroupCoordinator, get_pcp_group
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata, GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from atom_patches.core import settings
from atom_patches.runtime.pcp import PcpPlan, Segment, plan_step
from atom_patches.runtime.pcp_attention_split import AttentionShape, QueryExchange, choose_layout
from atom_patches.runtime.pcp_cuts import Layout
from atom_patches.vllm.adapters.pcp_copies import on_device
from atom_patches.vllm.adapters.pcp_queries import QueryMover
from atom_patches.vllm.adapters.pcp_shapes import layers_in_a_row

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.utils import AttentionGroup

logger = logging.getLogger("atom_patches.pcp")

T = TypeVar("T")


@dataclass(frozen=True)
class RecurrentMetadata:
    """How a split step runs a group of recurrent layers that share their state slots.

    Attributes:
        replicated: metadata of the replicated requests; None if there are none.
        pooled: metadata of this rank's segments, with state slots by *global* lengths; None if it has none.
        whole: metadata of the whole step, as an unsplit engine builds it.
        slots: state slot of every request, int64 ``[requests]``.
        fresh: slots of the requests without earlier tokens, which begin from a zero state, int64.
    """

    replicated: GDNAttentionMetadata | None
    pooled: GDNAttentionMetadata | None
    whole: GDNAttentionMetadata
    slots: torch.Tensor
    fresh: torch.Tensor


class SplitStep(dict[str, Any]):
    """Attention metadata by layer name, as this rank runs the step, and how the step is split.

    Attributes:
        plan: how the step's rows are spread.
        group: the prefill-context-parallel group.
        recurrent: by recurrent layer, what :class:`RecurrentMetadata` holds.
        in_a_row: recurrent layers that follow each other before all ranks meet.
        queries: moves full attention's queries to where they are answered; None if they are answered where they are.
        local_rows: global row of each of this rank's rows, int64 ``[rows_per_rank]``, on the device.
    """

    def __init__(self, plan: PcpPlan, group: GroupCoordinator, device: torch.device) -> None:
        super().__init__()
        self.plan = plan
        self.group = group
        self.rank: int = group.rank_in_group
        self.recurrent: dict[str, RecurrentMetadata] = {}
        self.in_a_row = 1
        self.queries: QueryMover | None = None
        self._shared: dict[str, Any] = {}
        self.local_rows = on_device(plan.local_rows(self.rank), device)
        self._replicated_rows = on_device(plan.replicated_rows(), device)
        self._gathered_rows = on_device(plan.gathered_rows(), device)
        self._last_rows = _last_rows(plan, self.rank, device)

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What the step's first layer to ask under ``name`` made, for all layers."""
        if name not in self._shared:
            self._shared[name] = make()
        return self._shared[name]

    @property
    def num_replicated(self) -> int:
        return len(self.plan.replicated)

    @property
    def own_rows(self) -> slice:
        """This rank's slice of the pool among its local rows, without padding."""
        return slice(self.num_replicated, self.plan.rows_per_rank - self.plan.padding(self.rank))

    def take(self, rows: torch.Tensor | None, dim: int = 0) -> torch.Tensor | None:
        """This rank's rows of a tensor that has the step's rows along ``dim``."""
        return None if rows is None else rows.index_select(dim, self.local_rows)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """All rows of the step, in global order, from this rank's rows.

        Args:
            rows: ``[rows_per_rank, ...]``; what a graph's padding adds is left out.

        Returns:
            ``[num_tokens, ...]``; one all-gather of the pool's slices.
        """
        pooled = rows[self.num_replicated : self.plan.rows_per_rank]
        slices = self.group.all_gather(pooled.contiguous(), dim=0)
        whole = slices.index_select(0, self._gathered_rows)
        whole[self._replicated_rows] = rows[: self.num_replicated]
        return whole

    def gather_last(self, rows: torch.Tensor) -> torch.Tensor:
        """Like :meth:`gather`, but only the last row of each request is exchanged; the others are zero."""
        at = self._last_rows
        received = self.group.all_gather(rows[at.send], dim=0)
        whole = rows.new_zeros((self.plan.num_tokens, *rows.shape[1:]))
        whole[at.pooled] = received[at.received]
        whole[at.replicated] = rows[at.own]
        return whole


@dataclass(frozen=True)
class _LastRows:
    """The last row of each request on its way to every rank, int64 on the device.

    Attributes:
        send: local rows that this rank sends.
        pooled, received: global rows, and where they lie among what all ranks sent.
        replicated, own: global rows that every rank runs, and their local rows.
    """

    send: torch.Tensor
    pooled: torch.Tensor
    received: torch.Tensor
    replicated: torch.Tensor
    own: torch.Tensor


def _last_rows(plan: PcpPlan, rank: int, device: torch.device) -> _LastRows:
    exchange = plan.exchange([end - 1 for end in plan.query_start_loc[1:]])
    of_pool = exchange.global_rows, exchange.gathered_rows
    of_all = exchange.replicated_global, exchange.replicated_local
    return _LastRows(*(on_device(rows, device) for rows in (exchange.send_rows[rank], *of_pool, *of_all)))


def current_split_step() -> SplitStep | None:
    """The split step that the current forward pass runs, or None in any other forward pass."""
    metadata = get_forward_context().attn_metadata
    return metadata if isinstance(metadata, SplitStep) else None


@contextmanager
def layer_metadata(layer_name: str, metadata: Any) -> Iterator[None]:
    """Let one layer see other attention metadata than the step's."""
    context = get_forward_context()
    outer = context.attn_metadata
    context.attn_metadata = {layer_name: metadata}
    try:
        yield
    finally:
        context.attn_metadata = outer


def plan_batch(runner: GPUModelRunner, num_reqs: int) -> PcpPlan | None:
    """The plan of the batch that the runner has prepared, or None if the step is replicated."""
    starts = runner.query_start_loc.np[: num_reqs + 1]
    if starts[num_reqs] == num_reqs:
        return None  # decodes only: the step whose time on the host counts most
    lengths = (starts[1:] - starts[:-1]).tolist()
    return plan_rows(runner.vllm_config, lengths, runner.optimistic_seq_lens_cpu[:num_reqs].tolist())


def plan_rows(config: VllmConfig, lengths: Sequence[int], seq_lens: Sequence[int]) -> PcpPlan | None:
    """The plan of a step, or None if it is replicated.

    Args:
        config: of the engine.
        lengths: rows of every request, in batch order.
        seq_lens: tokens of every request after the step.
    """
    plan = plan_step(lengths, get_pcp_group().world_size, settings.pcp_min_rows())
    if plan is None or config.model_config.is_hybrid:
        return plan
    return replace(plan, layout=_attention_layout(config, plan, seq_lens))


def _attention_layout(config: VllmConfig, plan: PcpPlan, seq_lens: Sequence[int]) -> Layout:
    """How the step's full-attention queries are cut. Recurrent layers keep the rows themselves contiguous."""
    model: Any = config.model_config
    shape = AttentionShape(
        query_heads=model.get_num_attention_heads(config.parallel_config),
        head_size=model.get_head_size(),
        element_bytes=model.dtype.itemsize,
    )
    contexts = [seq_len - rows for seq_len, rows in zip(seq_lens, plan.query_lens, strict=True)]
    return choose_layout(settings.pcp_attention(), plan, contexts, shape, exchanged=model.is_hybrid)


def split_step(
    runner: GPUModelRunner,
    plan: PcpPlan,
    slot_mappings: dict[int, torch.Tensor],
    whole: dict[str, Any],
) -> SplitStep:
    """Build this rank's metadata of a split step.

    Args:
        runner: has prepared the batch, so its buffers hold the step's global lengths.
        plan: the step's plan.
        slot_mappings: by KV-cache group, the cache slot of every global row.
        whole: by layer, the metadata of the unsplit step.
    """
    step = SplitStep(plan, get_pcp_group(), runner.device)
    tables = runner.input_batch.block_table
    groups = [
        CacheGroup(members, tables[at].get_device_tensor(len(plan.query_lens)), slot_mappings[at])
        for at, members in enumerate(runner.attn_groups)
    ]
    fill_in(step, _runner_batch(runner, plan, step.rank), groups, whole)
    return step


class CacheGroup(NamedTuple):
    """The layers that share a block table.

    Attributes:
        members: the runner's attention groups.
        block_table: of every request of the step.
        slot_mapping: the cache slot of every global row.
    """

    members: Sequence[AttentionGroup]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


def fill_in(step: SplitStep, batch: StepBatch, groups: Sequence[CacheGroup], whole: dict[str, Any]) -> None:
    """Build a split step's metadata by layer."""
    attention = batch.local_queries()
    config = batch.config
    balances = config.model_config.is_hybrid and batch.moves_queries
    if balances and _attention_layout(config, batch.plan, batch.seq_lens) == "zigzag":
        step.queries = QueryMover(QueryExchange(batch.plan), step.group, batch.device)
        attention = batch.collected_queries(step.queries.exchange)
    built: dict[Any, RecurrentMetadata] = {}
    for members, block_table, slot_mapping in groups:
        for attention_group in members:
            builder = attention_group.get_metadata_builder(0)
            names = attention_group.layer_names
            if isinstance(builder, GDNAttentionMetadataBuilder):
                like = built.get(builder.kv_cache_spec)
                recurrent = _recurrent_metadata(builder, batch, block_table, slot_mapping, whole[names[0]], like)
                if batch.recurrent_groups_alike:
                    built[builder.kv_cache_spec] = recurrent
                step.recurrent.update(dict.fromkeys(names, recurrent))
                step.update(dict.fromkeys(names, recurrent.whole))
            else:
                local = batch.common(attention, block_table, slot_mapping)
                # Cut requests and padded rows count as requests; FlashAttention's schedule, made ahead, holds
                # `max_num_seqs` of them. Without it the kernel makes its own.
                many = len(attention) > config.scheduler_config.max_num_seqs
                step.update(dict.fromkeys(names, builder.build(0, local, fast_build=many)))
    step.in_a_row = layers_in_a_row(config, len(step.recurrent), len(step) - len(step.recurrent))
    if settings.pcp_debug():
        _trace_split(step)


@dataclass(frozen=True)
class _Query:
    """Some rows of a request, as attention sees them: they end at token ``seq_len`` of the request's sequence."""

    request: int
    rows: int
    seq_len: int


class StepBatch:
    """A prepared step, as all ranks know it, and subsets of it as metadata builders take them.

    Args:
        config: of the engine.
        device: of the step's tensors.
        plan: the step's plan.
        rank: this rank.
        seq_lens: tokens of every request after the step.
        prefilling: which requests have rows of their prompt in it.
    """

    moves_queries = True
    """Whether a hybrid's queries may be answered by other ranks than those whose rows they are."""

    recurrent_groups_alike = True
    """Whether the metadata of two groups of recurrent layers with equal caches differ in their state slots only."""

    def __init__(
        self,
        config: VllmConfig,
        device: torch.device,
        plan: PcpPlan,
        rank: int,
        seq_lens: list[int],
        prefilling: list[bool],
    ) -> None:
        self.config = config
        self.device = device
        self.plan = plan
        self.rank = rank
        self.segments = plan.segments(rank)
        self.seq_lens = seq_lens
        self.prefilling = prefilling
        self.mamba_cache_mode = config.cache_config.mamba_cache_mode

    def context_len(self, request: int) -> int:
        """Tokens of the request that earlier steps have computed."""
        return self.seq_lens[request] - self.plan.query_lens[request]

    @cached_property
    def device_seq_lens(self) -> torch.Tensor:
        """``seq_lens`` on the device, int64."""
        return on_device(self.seq_lens, self.device)

    @cached_property
    def fresh_requests(self) -> torch.Tensor:
        """The requests without earlier tokens, on the device, int64."""
        return on_device([at for at in range(len(self.seq_lens)) if self.context_len(at) == 0], self.device)

    def segment_queries(self) -> list[_Query]:
        """This rank's segments, with the length of the whole request: a state slot follows from that."""
        return [_Query(s.request, s.rows, self.seq_lens[s.request]) for s in self.segments]

    def replicated_queries(self) -> list[_Query]:
        return [_Query(i, 1, self.seq_lens[i]) for i in self.plan.replicated]

    def local_queries(self) -> list[_Query]:
        """All of this rank's rows. A padded row attends to the first token of a sequence, so it stays finite."""
        padding = [_Query(self.plan.pooled[0], 1, 1)] * self.plan.padding(self.rank)
        return self.replicated_queries() + self._causal(self.segments) + padding

    def collected_queries(self, exchange: QueryExchange) -> list[_Query]:
        """The rows that this rank answers after queries have moved."""
        return self.replicated_queries() + self._causal(self.plan.segments_of(exchange.cut, self.rank))

    def _causal(self, segments: Sequence[Segment]) -> list[_Query]:
        return [_Query(s.request, s.rows, self.context_len(s.request) + s.end) for s in segments]

    def common(
        self, queries: Sequence[_Query], block_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> CommonAttentionMetadata:
        """Metadata of ``queries`` as a batch of their own.

        The slot mapping stays the whole step's: keys and values are written after they were gathered.
        """
        rows = torch.tensor([query.rows for query in queries], dtype=torch.int32)
        starts = torch.nn.functional.pad(rows.cumsum(0, dtype=torch.int32), (1, 0))
        seq_lens = torch.tensor([query.seq_len for query in queries], dtype=torch.int32)
        requests = on_device([query.request for query in queries], self.device)
        return CommonAttentionMetadata(
            query_start_loc=on_device(starts, self.device, None),
            query_start_loc_cpu=starts,
            seq_lens=on_device(seq_lens, self.device, None),
            seq_lens_cpu_upper_bound=seq_lens,
            num_reqs=len(queries),
            num_actual_tokens=sum(query.rows for query in queries),
            max_query_len=max(query.rows for query in queries),
            max_seq_len=max(query.seq_len for query in queries),
            block_table_tensor=block_table.index_select(0, requests),
            slot_mapping=slot_mapping,
            causal=True,
            is_prefilling=torch.tensor([self.prefilling[query.request] for query in queries]),
            **self._host_lengths(seq_lens, rows),
        )

    def _host_lengths(self, seq_lens: torch.Tensor, rows: torch.Tensor) -> dict[str, Any]:
        """Further fields in which this runner's metadata have lengths."""
        return {"_seq_lens_cpu": seq_lens, "_num_computed_tokens_cpu": seq_lens - rows}


def _runner_batch(runner: GPUModelRunner, plan: PcpPlan, rank: int) -> StepBatch:
    batch, count = runner.input_batch, len(plan.query_lens)
    prefilling = (batch.num_computed_tokens_cpu[:count] < batch.num_prompt_tokens[:count]).tolist()
    seq_lens = runner.optimistic_seq_lens_cpu[:count].tolist()
    return StepBatch(runner.vllm_config, runner.device, plan, rank, seq_lens, prefilling)


def _recurrent_metadata(
    builder: GDNAttentionMetadataBuilder,
    batch: StepBatch,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    whole: GDNAttentionMetadata,
    like: RecurrentMetadata | None = None,
) -> RecurrentMetadata:
    """Metadata of the recurrent layers that share ``block_table``.

    Args:
        like: that of another group with equal caches. It lends all but the state slots, because the device has
            nothing to do until the last group's is built.
    """
    requests = block_table[: len(batch.plan.query_lens)]
    slots = mamba_get_block_table_tensor(
        requests, batch.device_seq_lens, builder.kv_cache_spec, batch.mamba_cache_mode
    )[:, 0]

    def build(queries: list[_Query], known: GDNAttentionMetadata | None) -> GDNAttentionMetadata | None:
        if not queries:
            return None
        if known is not None:
            own = slots.index_select(0, on_device([query.request for query in queries], batch.device))
            return replace(known, non_spec_state_indices_tensor=own)
        metadata = builder.build(0, batch.common(queries, block_table, slot_mapping))
        return _apart(metadata) if builder.use_full_cuda_graph else metadata

    return RecurrentMetadata(
        replicated=build(batch.replicated_queries(), like and like.replicated),
        pooled=build(batch.segment_queries(), like and like.pooled),
        whole=whole,
        slots=slots.long(),
        fresh=slots.long()[batch.fresh_requests],
    )


def _apart(metadata: GDNAttentionMetadata) -> GDNAttentionMetadata:
    """Metadata with tensors of its own: for full graphs, the builder puts all decodes into the same buffers."""
    copied = {
        name: value.clone()
        for name in ("non_spec_state_indices_tensor", "non_spec_query_start_loc")
        if (value := getattr(metadata, name)) is not None
    }
    return replace(metadata, **copied)


def _trace_split(step: SplitStep) -> None:
    plan = step.plan
    logger.info(
        "split: rank %d of %d runs %d rows of %d (%d replicated, pool rows %s, %d padded); attention is %s",
        step.rank,
        plan.world_size,
        plan.rows_per_rank,
        plan.num_tokens,
        step.num_replicated,
        " and ".join(f"[{start}, {end})" for start, end in plan.cut.pieces[step.rank]),
        plan.padding(step.rank),
        plan.layout if step.queries is None else "zigzag by exchange",
    )
