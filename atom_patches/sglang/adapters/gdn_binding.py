"""Recurrent metadata and states of a step, from what SGLang's linear-attention backend planned for it.

The backend keeps the plan of the last step that had one. A rank without requests plans nothing, so its binding comes
of the pools alone and never of that plan, which is another step's.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.model_executor.forward_context import get_attn_backend

from atom_patches.runtime.gdn import GdnBinding, LayerStates

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class PoolStates(Mapping[int, LayerStates]):
    """The states of each layer of a model, in SGLang's pool; looked up when a layer asks."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __getitem__(self, layer: int) -> LayerStates:
        if layer not in self._pool.mamba_map:
            raise KeyError(layer)
        cache = self._pool.mamba2_layer_cache(layer)
        windows = getattr(cache, "intermediate_conv_window", None)
        return LayerStates(
            conv=cache.conv[0],
            temporal=cache.temporal,
            draft_conv=windows[0] if windows else None,
            draft_temporal=getattr(cache, "intermediate_ssm", None),
        )

    def __iter__(self) -> Iterator[int]:
        return iter(self._pool.mamba_map)

    def __len__(self) -> int:
        return len(self._pool.mamba_map)


def linear_backend() -> Any | None:
    """What plans recurrent layers in this step; None for a model without any, as one that drafts."""
    backend = get_attn_backend()
    return backend.linear_attn_backend if isinstance(backend, HybridLinearAttnBackend) else None


def planned_mode(batch: ForwardBatch) -> Any:
    """The mode that the backend planned for.

    Where ranks are padded alike and some rank extends, SGLang says of a rank that decodes that it extends, too, by one
    token a request; it may keep what its recurrent layers do.
    """
    return getattr(batch, "logical_forward_mode", batch.forward_mode)


def gdn_binding(batch: ForwardBatch) -> GdnBinding | None:
    """The binding of this rank's step; None for a model without recurrent layers."""
    backend = linear_backend()
    if backend is None:
        return None
    layers = PoolStates(backend.req_to_token_pool)
    mode = planned_mode(batch)
    if mode.is_idle():
        return GdnBinding.idle(layers, torch.device(backend.device))
    planned = backend.forward_metadata
    if mode.is_decode():
        return _decode(planned, layers)
    if mode.is_target_verify():
        return _verify(planned, layers, batch, backend)
    return _prefill(planned, layers, batch)


def _decode(planned: Any, layers: Mapping[int, LayerStates]) -> GdnBinding:
    slots = planned.mamba_cache_indices
    return GdnBinding(
        query_start_loc=planned.query_start_loc,
        slots=slots,
        has_initial_state=torch.ones_like(slots, dtype=torch.bool),
        layers=layers,
        decodes=slots.shape[0],
    )


def _verify(planned: Any, layers: Mapping[int, LayerStates], batch: ForwardBatch, backend: Any) -> GdnBinding:
    drafted = batch.spec_info.draft_token_num
    count = planned.query_start_loc.shape[0] - 1
    slots = planned.mamba_cache_indices[:count]
    return GdnBinding(
        query_start_loc=planned.query_start_loc,
        slots=slots,
        has_initial_state=torch.ones_like(slots, dtype=torch.bool),
        layers=layers,
        verifies=count,
        draft_tokens=drafted,
        draft_rows=backend.verify_intermediate_state_indices[:count],
    )


def _prefill(planned: Any, layers: Mapping[int, LayerStates], batch: ForwardBatch) -> GdnBinding:
    count = planned.query_start_loc.shape[0] - 1
    return GdnBinding(
        query_start_loc=planned.query_start_loc,
        slots=planned.mamba_cache_indices[:count],
        has_initial_state=batch.extend_prefix_lens[:count] > 0,
        layers=layers,
        prefills=count,
    )
