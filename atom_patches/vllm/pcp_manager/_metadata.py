"""What both kinds of the runner's model states do about a split step's attention metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def build_split(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Build a split step's metadata from those of the whole step."""
    from atom_patches.vllm.adapters.pcp_manager import SplitBatch, split_metadata, whole_batch

    def prepare_attn(
        self: Any,
        input_batch: Any,
        cudagraph_mode: Any,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: Any,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        prepared = (block_tables, slot_mappings, attn_groups)
        whole = original(self, whole_batch(input_batch), cudagraph_mode, *prepared, *args, **kwargs)
        if not isinstance(input_batch, SplitBatch):
            return whole
        return split_metadata(self.vllm_config, input_batch, *prepared, whole)

    return prepare_attn
