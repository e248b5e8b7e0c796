"""Full attention in a split step: keys and values are made whole before they are written to the paged cache.

Queries stay local. Each rank writes the keys and values of the whole step, with the whole step's slots, and then
reads the cache with its own query start locations and lengths. So earlier prefill chunks, prefix-cache hits and
decodes need nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from atom_patches.core import settings
from atom_patches.vllm.adapters.pcp_step import SplitStep, current_split_step, logger


def gather_key_value(
    step: SplitStep, layer: Any, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the whole step from this rank's rows, in one all-gather.

    Args:
        layer: the attention layer.
        key: ``[rows_per_rank, kv_heads, head_size]``.
        value: ``[rows_per_rank, kv_heads, value_head_size]``.

    Returns:
        The same with ``num_tokens`` rows in global order.
    """
    sizes = [key.shape[-1], value.shape[-1]]
    whole_key, whole_value = step.gather(torch.cat([key, value], dim=-1)).split(sizes, dim=-1)
    if settings.pcp_debug():
        logger.info("%s: rank %d gathers %d keys and values", layer.layer_name, step.rank, whole_key.shape[0])
    return whole_key.contiguous(), whole_value.contiguous()


def gather_before_write(write: Callable[..., None]) -> Callable[..., None]:
    """Wrap a backend's ``do_kv_cache_update`` so that it writes the whole step.

    For backends that write the cache apart from ``forward`` (FlashAttention, Triton). The engine passes the
    whole step's slot mapping already.
    """

    def do_kv_cache_update(
        self: Any,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        step = current_split_step()
        if step is not None:
            key, value = gather_key_value(step, layer, key, value)
        write(self, layer, key, value, kv_cache, slot_mapping)

    return do_kv_cache_update


def writes_gathered(impl: Any) -> bool:
    """Whether an attention implementation's cache write is one that :func:`gather_before_write` made.

    Most backends have a ``do_kv_cache_update``; one that is not wrapped would write this rank's rows to others' slots.
    """
    write = getattr(type(impl), "do_kv_cache_update", None)
    return getattr(write, "__globals__", None) is globals()
