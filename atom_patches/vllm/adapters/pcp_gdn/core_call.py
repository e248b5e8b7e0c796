"""One call of a GatedDeltaNet layer's core in a split step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from atom_patches.core import settings
from atom_patches.runtime.pcp_gdn_cost import GdnShape
from atom_patches.vllm.adapters.pcp_copies import on_device
from atom_patches.vllm.adapters.pcp_gdn.core_layer import CoreLayer
from atom_patches.vllm.adapters.pcp_gdn.state_slots import StateSlots
from atom_patches.vllm.adapters.pcp_step import RecurrentMetadata, SplitStep, layer_metadata, logger

if TYPE_CHECKING:
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata


@dataclass(frozen=True)
class CoreCall:
    """What the engine calls a layer's core with, and in which step.

    Attributes:
        layer: the layer.
        step: the step.
        mixed_qkv: ``[rows_per_rank, channels]``, before the convolution.
        b, a: ``[rows_per_rank, v_heads]``, the gates' inputs.
        core_attn_out: ``[rows_per_rank, v_heads, v_head_dim]``, to be written in place.
    """

    layer: CoreLayer
    step: SplitStep
    mixed_qkv: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor
    core_attn_out: torch.Tensor

    @property
    def metadata(self) -> RecurrentMetadata:
        return self.step.recurrent[self.layer.name]

    @cached_property
    def states(self) -> StateSlots:
        return StateSlots(self.layer.kv_cache)

    @cached_property
    def shape(self) -> GdnShape:
        layer = self.layer
        return GdnShape(
            key_heads=layer.key_heads,
            value_heads=layer.value_heads,
            key_size=layer.key_size,
            value_size=layer.value_size,
            taps=layer.conv_weight.shape[1],
            element_bytes=self.mixed_qkv.element_size(),
            state_bytes_each=self.states.recurrent.element_size(),
            in_a_row=self.step.in_a_row,
        )

    @property
    def pooled_slots(self) -> torch.Tensor:
        """State slots of the pooled requests, int64."""
        pooled = self.step.once("pooled", lambda: self.index(self.step.plan.pooled))
        return self.metadata.slots[pooled]

    def index(self, values: Any) -> torch.Tensor:
        """Whole numbers as int64 on the layer's device."""
        return on_device(values, self.mixed_qkv.device)

    def run(self, metadata: GDNAttentionMetadata, rows: slice) -> None:
        """The layer's own core on some of this rank's rows."""
        self.run_on(metadata, *(tensor[rows] for tensor in (self.mixed_qkv, self.b, self.a, self.core_attn_out)))

    def run_on(
        self, metadata: GDNAttentionMetadata, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:  # fmt: skip
        """The layer's own core on given rows."""
        with layer_metadata(self.layer.name, metadata):
            self.layer.run(mixed_qkv, b, a, core_attn_out)

    def begin(self) -> None:
        """Give new requests empty states, and run the replicated requests."""
        # A request of one row counts as a decode, and a decode goes on from what its slot holds.
        self.states.clear(self.metadata.fresh)
        if self.metadata.replicated is not None:
            self.run(self.metadata.replicated, slice(self.step.num_replicated))

    def trace(self, message: str, *values: Any) -> None:
        """Log a line about this layer if the user wants to see such."""
        if settings.pcp_debug():
            logger.info("%s: %s", self.layer.name, message % values)
