"""The shape of a model's GatedDeltaNet layers, from its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atom_patches.runtime.pcp_gdn_cost import FLOAT32, GdnShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def gdn_shape(config: VllmConfig, state_bytes_each: int = FLOAT32) -> GdnShape:
    """One layer, as a tensor-parallel rank has it.

    Args:
        config: of an engine whose model has such layers.
        state_bytes_each: bytes of an element of the recurrent state.
    """
    text: Any = config.model_config.hf_text_config
    ranks = config.parallel_config.tensor_parallel_size
    return GdnShape(
        key_heads=text.linear_num_key_heads // ranks,
        value_heads=text.linear_num_value_heads // ranks,
        key_size=text.linear_key_head_dim,
        value_size=text.linear_value_head_dim,
        taps=text.linear_conv_kernel_dim,
        element_bytes=config.model_config.dtype.itemsize,
        state_bytes_each=state_bytes_each,
    )
