"""`models.parts.Exchange` of SGLang's communicator, where it has one.

SGLang's LayerCommunicator knows for every layout which ranks hold which rows before and behind attention and experts,
and moves them. A decoder calls it here and never names a group.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from sglang.srt.distributed import tensor_model_parallel_all_reduce
from sglang.srt.layers.communicator import LayerCommunicator, LayerScatterModes
from sglang.srt.layers.moe.utils import (
    get_moe_a2a_backend,
    should_skip_mlp_all_reduce,
    should_skip_post_experts_all_reduce,
)
from sglang.srt.runtime_context import get_forward, get_parallel
from torch import Tensor

from atom_patches.models.norms import RmsNorm
from atom_patches.models.parts import LayerPlace
from atom_patches.sglang.adapters.current import current_batch
from atom_patches.sglang.adapters.exchange import EngineNorm


class LayerExchange:
    """A plain object: the norms are the decoder layer's modules."""

    def __init__(self, place: LayerPlace, input_norm: RmsNorm, post_norm: RmsNorm) -> None:
        self._sparse = place.sparse
        modes = LayerScatterModes.init_new(
            layer_id=place.index,
            num_layers=place.layers,
            is_layer_sparse=place.sparse,
            is_previous_layer_sparse=place.previous_sparse,
            is_next_layer_sparse=place.next_sparse,
        )
        self._communicator = LayerCommunicator(
            layer_scatter_modes=modes,
            input_layernorm=EngineNorm(input_norm),
            post_attention_layernorm=EngineNorm(post_norm),
            allow_reduce_scatter=True,
            is_last_layer=place.index == place.layers - 1,
        )

    def before_attention(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._communicator.prepare_attn(hidden, residual, current_batch())

    def capture(self, residual: Tensor) -> Tensor:
        communicator = self._communicator
        rows = communicator._communicate_simple_fn(  # SGLang's own capture calls it
            hidden_states=residual, forward_batch=current_batch(), context=communicator._context
        )
        # What follows may write to the residual stream.
        return rows.clone() if rows is residual else rows

    def before_mlp(self, partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self._communicator.prepare_mlp(partial, residual, current_batch())

    def after_mlp(self, partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        batch = current_batch()
        with get_forward().scoped(mlp_reduce_scatter=self._communicator.should_use_reduce_scatter(batch)):
            whole = partial if self._summed() else tensor_model_parallel_all_reduce(partial)
        # Where the stream was spread over ranks, SGLang's last layer adds it before it gathers, and gives None for it.
        return self._communicator.postprocess_layer(whole, residual, batch)

    def _summed(self) -> bool:
        """Whether the ranks' shares need no all-reduce: there is one rank, or a dispatch or a scatter adds them."""
        if get_parallel().tp_size == 1:
            return True
        if not self._sparse:
            return should_skip_mlp_all_reduce()
        return not get_moe_a2a_backend().is_none() or should_skip_post_experts_all_reduce(is_tp_path=True)
