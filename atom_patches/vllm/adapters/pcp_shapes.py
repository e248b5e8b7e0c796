"""The shape of a model's GatedDeltaNet layers, from its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atom_patches.runtime.pcp_gdn_cost import FLOAT32, GdnShape
from atom_patches.vllm.adapters.pcp_experts import experts_are_spread

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def layers_in_a_row(config: VllmConfig, recurrent: int, attention: int) -> int:
    """Recurrent layers that follow each other before all ranks meet: in full attention, and where rows meet experts.

    Args:
        config: of an engine.
        recurrent: the model's recurrent layers.
        attention: its full-attention layers, evenly between those.
    """
    return 1 if experts_are_spread(config) else max(1, recurrent // max(1, attention))


def gdn_shape(config: VllmConfig, state_bytes_each: int = FLOAT32, in_a_row: int = 1) -> GdnShape:
    """One layer, as a tensor-parallel rank has it.

    Args:
        config: of an engine whose model has such layers.
        state_bytes_each: bytes of an element of the recurrent state.
        in_a_row: as :func:`layers_in_a_row` counts them.
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
        in_a_row=in_a_row,
    )
