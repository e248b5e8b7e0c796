"""A layer's recurrence in vLLM: its states in vLLM's cache, its place among vLLM's recurrent layers, one step's rows.

vLLM calls recurrent layers through an operation of its own, which splits compiled graphs and looks the layer up by its
name. What it finds here is the decoder's own recurrence, and the step's metadata as that wants them.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
    is_conv_state_dim_first,
)
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

from atom_patches.models.parts import Recurrence
from atom_patches.runtime import context
from atom_patches.runtime.gdn import GdnBinding, LayerStates
from atom_patches.vllm.adapters.pcp_gdn import run_core
from atom_patches.vllm.adapters.pcp_gdn.core_call import CoreCall
from atom_patches.vllm.adapters.pcp_gdn.core_layer import CoreLayer
from atom_patches.vllm.adapters.pcp_step import SplitStep

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

    from atom_patches.models.gdn_core import GdnWeights

Shapes = tuple[tuple[int, ...], tuple[int, ...]]
REHEARSED = 64
"""Sequences of the step in which memory is measured, at most."""


class RecurrentLayer(MambaBase):
    """One layer's recurrence, as vLLM finds it.

    Args:
        layer: its number.
        run: the decoder's.
        weights: the decoder's, once they are loaded.
        prefix: its name, by which vLLM assigns a cache and metadata.
        rehearses: whether it runs while vLLM measures memory, which one layer does for all.
    """

    mamba_type = "gdn_attention"  # pyright: ignore[reportAssignmentType]  # a property in vLLM

    def __init__(
        self,
        layer: int,
        run: Recurrence,
        weights: Callable[[], GdnWeights],
        config: VllmConfig,
        prefix: str,
        *,
        rehearses: bool,
    ) -> None:
        self.kv_cache: tuple[Tensor, ...] = ()
        self._layer = layer
        self._run = run
        self._weights = weights
        self._prefix = prefix
        self._shapes = state_shapes(config)
        self._dtypes = state_dtypes(config)
        self._rehearses = rehearses
        layers = config.compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"two layers are called {prefix}")
        layers[prefix] = self

    def get_state_shape(self) -> Shapes:
        return self._shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self._dtypes

    def __call__(self, mixed: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """What the decoder calls: within compiled graphs one operation, which writes to memory of the graph."""
        heads, value_size = self._shapes[1][:2]
        output = mixed.new_empty(mixed.shape[0], heads, value_size)
        torch.ops.vllm.gdn_attention_core(mixed, b, a, output, _encode_layer_name(self._prefix))
        return output

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        """What vLLM's operation calls."""
        metadata: Any = get_forward_context().attn_metadata
        if metadata is None:
            self._without_requests(mixed_qkv, a, b, core_attn_out)
            return
        if isinstance(metadata, SplitStep):
            self._own_rows(metadata, mixed_qkv, b, a, core_attn_out)
            return
        binding = bound(metadata[self._prefix], {self._layer: self._states()})
        with context.bind_gdn(binding):
            core_attn_out.copy_(self._run(mixed_qkv, a, b))

    def _own_rows(self, step: SplitStep, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        """A rank's part of a step that is split over prefill-context-parallel ranks."""
        # A graph may have padded the rows, of which nobody else writes the outputs.
        core_attn_out[step.own_rows.stop :].zero_()
        own = (rows[: step.plan.rows_per_rank] for rows in (mixed_qkv, b, a, core_attn_out))
        run_core(CoreCall(self._as_core_layer(), step, *own))

    def _as_core_layer(self) -> CoreLayer:
        """What runs, and what of it ranks compute together; `run` comes back here, with metadata of its own."""
        weights = self._weights()
        heads, value_size, key_size = self._shapes[1]
        key_heads = (weights.conv.shape[0] - heads * value_size) // (2 * key_size)
        return CoreLayer(
            self._prefix, self._forward_core, self.kv_cache, key_heads, heads, key_size, value_size,
            weights.conv, None, weights.A_log, weights.dt_bias,
        )  # fmt: skip

    def _states(self) -> LayerStates:
        conv, temporal = self.kv_cache
        return LayerStates(conv if is_conv_state_dim_first() else conv.transpose(-1, -2), temporal)

    def _without_requests(self, mixed: Tensor, a: Tensor, b: Tensor, output: Tensor) -> None:
        """Nobody reads the outputs. Once, the kernels run all the same, so that their memory is part of what vLLM
        measures, and so that they are compiled before requests come."""
        output.zero_()
        if not self._rehearses:
            return
        self._rehearses = False
        count = min(REHEARSED, mixed.shape[0])
        conv, temporal = (
            mixed.new_zeros((count + 1, *shape), dtype=dtype)
            for shape, dtype in zip(self._shapes, self._dtypes, strict=True)
        )
        states = LayerStates(conv if is_conv_state_dim_first() else conv.transpose(-1, -2), temporal)
        starts = torch.arange(count + 1, dtype=torch.int32, device=mixed.device)
        starts[-1] = mixed.shape[0]
        slots = torch.arange(1, count + 1, dtype=torch.int32, device=mixed.device)
        fresh = torch.zeros(count, dtype=torch.bool, device=mixed.device)
        layers = {self._layer: states}
        prefills = GdnBinding(starts, slots, fresh, layers, prefills=count, null_slot=NULL_BLOCK_ID)
        decodes = GdnBinding(starts, slots, fresh, layers, decodes=count, null_slot=NULL_BLOCK_ID)
        for binding in (prefills, decodes):
            with context.bind_gdn(binding):
                self._run(mixed, a, b)


def bound(metadata: GDNAttentionMetadata, layers: dict[int, LayerStates]) -> GdnBinding:
    """vLLM's metadata of a step as the decoder takes them."""
    count = metadata.num_decodes + metadata.num_prefills
    slots: Any = metadata.non_spec_state_indices_tensor
    starts: Any = metadata.non_spec_query_start_loc
    seen = metadata.has_initial_state
    if seen is None:  # only decodes, of which nobody asks; filling it would be a kernel of each layer
        seen = torch.empty(count, dtype=torch.bool, device=slots.device)
    return GdnBinding(
        query_start_loc=starts[: count + 1],
        slots=slots[:count],
        has_initial_state=seen,
        layers=layers,
        decodes=metadata.num_decodes,
        prefills=metadata.num_prefills,
        null_slot=NULL_BLOCK_ID,
    )


def state_shapes(config: VllmConfig) -> Shapes:
    """Of one block of convolution inputs and of recurrent states on this rank."""
    hf = config.model_config.hf_text_config
    return MambaStateShapeCalculator.gated_delta_net_state_shape(
        config.parallel_config.tensor_parallel_size, hf.linear_num_key_heads, hf.linear_num_value_heads,
        hf.linear_key_head_dim, hf.linear_value_head_dim, hf.linear_conv_kernel_dim, 0,
    )  # fmt: skip


def state_dtypes(config: VllmConfig) -> tuple[torch.dtype, ...]:
    """Of both."""
    cache = config.cache_config
    return MambaStateDtypeCalculator.gated_delta_net_state_dtype(
        config.model_config.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
    )
