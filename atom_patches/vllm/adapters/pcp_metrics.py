"""The figures of prefill context parallelism on their way from the scheduler to vLLM's `/metrics`.

Each step's figures travel with the statistics that the engine core sends to the front end for every step. They are in
the map of running LoRA adapters: the only one there that takes names of ours, that any front end passes over without
LoRA, and LoRA is refused under prefill context parallelism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from atom_patches.core import settings
from atom_patches.runtime.pcp_attention_split import AttentionShape
from atom_patches.runtime.pcp_figures import NONE, Dimensions, Modes, StepFigures, step_figures
from atom_patches.vllm.adapters.pcp_experts import expert_layers, expert_mode, experts_are_spread
from atom_patches.vllm.adapters.pcp_shapes import gdn_shape, layers_in_a_row

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.stats import SchedulerStats

ROWS = ("pooled", "replicated", "padding")
BYTES = ("key_value", "query", "recurrent", "hidden", "expert")


class StepCounter:
    """Computes the figures of a scheduler's steps."""

    def __init__(self, scheduler: Scheduler) -> None:
        config = scheduler.vllm_config
        self._ranks = config.parallel_config.prefill_context_parallel_size
        self._min_rows = settings.pcp_min_rows()
        self._dimensions = model_dimensions(config, scheduler.kv_cache_config)
        self._modes = asked_modes(config)

    def figures(self, output: SchedulerOutput) -> StepFigures:
        """The figures of one step that was scheduled, with at least one row."""
        contexts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        contexts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return step_figures(
            list(output.num_scheduled_tokens.values()),
            [contexts[request] for request in output.num_scheduled_tokens],
            self._ranks,
            self._min_rows,
            self._dimensions,
            self._modes,
        )


def asked_modes(config: VllmConfig) -> Modes:
    """How the layers of a model are to run in a split step."""
    model = config.model_config
    return Modes(
        attention=settings.pcp_attention(),
        gdn=settings.pcp_gdn() if model.is_hybrid else NONE,
        experts=expert_mode(config) if model.is_moe else NONE,
    )


def model_dimensions(config: VllmConfig, cache: KVCacheConfig) -> Dimensions:
    """A model's layers as one tensor-parallel rank has them.

    Args:
        config: the engine's configuration.
        cache: its cache, which lists the layers by kind.
    """
    model = config.model_config
    element = model.dtype.itemsize
    attention_layers = key_value_row = gdn_layers = state_bytes_each = 0
    for group in cache.kv_cache_groups:
        spec, layers = group.kv_cache_spec, len(group.layer_names)
        if isinstance(spec, FullAttentionSpec):
            attention_layers += layers
            key_value_row += layers * spec.num_kv_heads * (spec.head_size + spec.head_size_v) * element
        elif isinstance(spec, MambaSpec):
            gdn_layers += layers
            state_bytes_each = spec.dtypes[-1].itemsize
    in_a_row = layers_in_a_row(config, gdn_layers, attention_layers)
    return Dimensions(
        hidden_row=model.get_hidden_size() * element,
        attention=AttentionShape(
            query_heads=model.get_num_attention_heads(config.parallel_config),
            head_size=model.get_head_size(),
            element_bytes=element,
        ),
        attention_layers=attention_layers,
        key_value_row=key_value_row,
        gdn=gdn_shape(config, state_bytes_each, in_a_row) if gdn_layers else None,
        gdn_layers=gdn_layers,
        router_row=model.get_num_experts() * element,
        expert_layers=_spread_expert_layers(config),
    )


def _spread_expert_layers(config: VllmConfig) -> int:
    """Layers whose experts are spread over the prefill-context-parallel ranks."""
    return expert_layers(config) if experts_are_spread(config) else 0


class PcpStatLogger(AggregateStatLoggerBase):
    """Counters and gauges of prefill context parallelism in the registry of vLLM's own.

    Args:
        vllm_config: of the engines.
        engine_indexes: the engines whose steps are counted.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        own = ["model_name", "engine"]
        self._model = str(vllm_config.model_config.served_model_name)
        self._steps = Counter(
            "vllm:atom_pcp_steps",
            "Steps under prefill context parallelism, by whether they were split and how their layers ran.",
            [*own, "step", "attention", "gdn", "experts"],
        )
        self._rows = Counter(
            "vllm:atom_pcp_rows",
            "Rows: pooled (one rank runs each), replicated (every rank runs each), padding (of all ranks together).",
            [*own, "kind"],
        )
        self._bytes = Counter(
            "vllm:atom_pcp_exchanged_bytes",
            "Bytes that one rank received from the others on average, computed from plan and dimensions.",
            [*own, "what"],
        )
        self._rows_per_rank = Gauge(
            "vllm:atom_pcp_rows_per_rank",
            "Rows that each rank ran in the latest split step, padding included.",
            own,
            multiprocess_mode="mostrecent",
        )
        for engine in engine_indexes:
            self._start(engine)

    def _start(self, engine: int) -> None:
        """Show series at zero before the first step."""
        for kind in ROWS:
            self._rows.labels(self._model, str(engine), kind)
        for what in BYTES:
            self._bytes.labels(self._model, str(engine), what)
        self._rows_per_rank.labels(self._model, str(engine))

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Add one step's figures, if the statistics carry any."""
        figures = None if scheduler_stats is None else StepFigures.unpacked(scheduler_stats.running_lora_adapters)
        if figures is None:
            return
        own = (self._model, str(engine_idx))
        modes = figures.modes
        step = "split" if figures.split else "replicated"
        self._steps.labels(*own, step, modes.attention, modes.gdn, modes.experts).inc()
        # Of a step of decodes alone, nearly all are zero.
        for kind in ROWS:
            if rows := getattr(figures, f"{kind}_rows"):
                self._rows.labels(*own, kind).inc(rows)
        for what in BYTES:
            if received := getattr(figures, f"{what}_bytes"):
                self._bytes.labels(*own, what).inc(received)
        if figures.split:
            self._rows_per_rank.labels(*own).set(figures.rows_per_rank)

    def log_engine_initialized(self) -> None:
        """Nothing: the modes are labels of the steps."""
