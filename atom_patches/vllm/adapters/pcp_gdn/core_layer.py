"""A GatedDeltaNet layer as the ways to run it in a split step take it, whoever's decoder it is of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from vllm.model_executor.layers.mamba.gdn_linear_attn import GatedDeltaNetAttention


@dataclass(frozen=True)
class CoreLayer:
    """One tensor-parallel rank's part of a layer.

    Attributes:
        name: by which the engine finds its metadata.
        run: its core on ``(mixed_qkv, b, a, core_attn_out)``, by the metadata in the forward context.
        kv_cache: convolution and recurrent states, each ``[slots, ...]``.
        key_heads, value_heads: of this rank.
        key_size, value_size: of one head.
        conv_weight: ``[channels, taps]``.
        conv_bias: ``[channels]``, or None.
        A_log, dt_bias: ``[value_heads]``.
        activation: behind the convolution.
    """

    name: str
    run: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    kv_cache: Sequence[Tensor]
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    conv_weight: Tensor
    conv_bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor
    activation: str = "silu"


def engine_layer(original: Callable[..., None], layer: GatedDeltaNetAttention) -> CoreLayer:
    """A layer of vLLM's own.

    Args:
        original: vLLM's ``_forward_core``.
        layer: whose.
    """

    def run(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        original(layer, mixed_qkv=mixed_qkv, b=b, a=a, core_attn_out=core_attn_out)

    weight: Any = layer.conv1d.weight
    return CoreLayer(
        layer.prefix, run, layer.kv_cache, layer.num_k_heads // layer.tp_size, layer.num_v_heads // layer.tp_size,
        layer.head_k_dim, layer.head_v_dim, weight.squeeze(1), layer.conv1d.bias, layer.A_log, layer.dt_bias,
        layer.activation,
    )  # fmt: skip
