"""Full attention over vLLM's paged cache, and one kernel for all between the projection and the attention."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import get_attention_context

from atom_patches.core import settings
from atom_patches.kernels.qk_norm_rope_cache import qk_norm_rope_cache
from atom_patches.models.parts import AttentionShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from atom_patches.models.norms import RmsNorm
    from atom_patches.vllm.adapters.models.rotary import Rotary

OPERATION = "atom_patches::rotate_into_cache"

HALVES = {
    "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend": 0,
    "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend": 1,
    "atom_patches.vllm.adapters.paged_attention.AtomPagedBackend": 0,
}
"""Backends that read a step's keys and values from the cache alone, by the dimension that parts keys from values."""


class PagedAttention(Attention):
    """vLLM's layer.

    Attributes:
        prepares: whether it takes the projection itself, by :meth:`attend`.
    """

    def __init__(self, shape: AttentionShape, config: VllmConfig, prefix: str) -> None:
        super().__init__(
            shape.heads, shape.head_size, shape.scale, num_kv_heads=shape.kv_heads,
            cache_config=config.cache_config, quant_config=config.quant_config, prefix=prefix,
        )  # fmt: skip
        self.prepares = "kv_cache" in settings.fusions() and _writes_as_it_is(self, config)
        if self.prepares:
            split_graphs(config)

    def attend(
        self, qkv: Tensor, positions: Tensor, rotary: Rotary, norms: tuple[RmsNorm, RmsNorm] | None, gated: bool
    ) -> Tensor:
        """From the projection to the outputs, times their gates, `[rows, heads * head size]`."""
        rows, heads, size = qkv.shape[0], self.num_heads, self.head_size
        # A graph reads its inputs where they were when it was captured. So what runs behind attention gets only what
        # was there before it: memory for the output, and the gates where the projection has them.
        output = qkv.new_empty(rows, heads, size)
        gates = qkv[:, : 2 * heads * size].unflatten(1, (heads, 2, size))[:, :, 1] if gated else None
        how = rotary.arguments((heads, self.num_kv_heads), norms)
        queries, keys = torch.ops.atom_patches.rotate_into_cache(
            qkv, positions, rotary.table, how.get("q_weight"), how.get("k_weight"), heads, self.num_kv_heads, size,
            how.get("eps", 0.0), how.get("gemma", False), gated, how["mrope_section"], self.layer_name,
        )  # fmt: skip
        # Keys stand in for values: these backends take both from the cache.
        torch.ops.vllm.unified_attention_with_output(queries, keys, keys, output, self.layer_name)
        return (output if gates is None else output * gates.sigmoid()).flatten(1)


def _halves(layer: Any) -> int | None:
    """The dimension of the layer's cache that parts keys from values, of a backend that is known here."""
    backend = layer.attn_backend
    return HALVES.get(f"{backend.__module__}.{backend.__qualname__}")


def _writes_as_it_is(layer: Attention, config: VllmConfig) -> bool:
    """Whether the layer's write to the cache is a copy of a rank's own rows."""
    parallel = config.parallel_config
    return (
        _halves(layer) is not None
        and layer.kv_cache_torch_dtype == config.model_config.dtype
        and parallel.prefill_context_parallel_size == parallel.decode_context_parallel_size == 1
    )


def split_graphs(config: VllmConfig) -> None:
    """Split compiled graphs at :func:`_rotate_into_cache`, if they are split at vLLM's own write to the cache.

    It finds its layer by a name, which is a constant in a graph: one name a graph would mean one compilation a layer.
    """
    places = config.compilation_config.splitting_ops
    if places is not None and "vllm::unified_kv_cache_update" in places and OPERATION not in places:
        places.append(OPERATION)


def _rotate_into_cache(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    gemma: bool,
    gated: bool,
    mrope_section: list[int] | None,
    layer: str,
) -> tuple[Tensor, Tensor]:
    """Queries and keys, `[rows, heads, size]`; keys and values are in the layer's cache."""
    _, attention, cache, slots = get_attention_context(layer)
    written: dict[str, Any] = {}
    if slots is not None:  # else memory is being measured
        halves = _halves(attention)
        assert halves is not None, "the layer prepares on a backend that is known here"
        keys, values = cache.unbind(halves)
        written = {"key_cache": keys, "value_cache": values, "slots": slots}
    queries, keys, *_ = qk_norm_rope_cache(
        qkv, positions, table, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        q_weight=q_weight, k_weight=k_weight, eps=eps, gemma=gemma, gated=gated,
        mrope_section=mrope_section, mrope_interleaved=mrope_section is not None, **written,
    )  # fmt: skip
    return queries, keys


def _shapes(qkv: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    num_q_heads, num_kv_heads, head_dim = arguments[4:7]
    rows = qkv.shape[0]
    return qkv.new_empty(rows, num_q_heads, head_dim), qkv.new_empty(rows, num_kv_heads, head_dim)


_library = torch.library.Library("atom_patches", "FRAGMENT")
_library.define(
    "rotate_into_cache(Tensor qkv, Tensor positions, Tensor table, Tensor? q_weight, Tensor? k_weight, "
    "int num_q_heads, int num_kv_heads, int head_dim, float eps, bool gemma, bool gated, int[]? mrope_section, "
    "str layer) -> (Tensor, Tensor)"
)
for _device in ("CPU", "CUDA"):
    _library.impl("rotate_into_cache", _rotate_into_cache, _device)
torch.library.register_fake(OPERATION, _shapes, lib=_library)
