"""`models.parts.Exchange` of SGLang's boundaries, where it has them.

SGLang hands an output and the residual stream before it from stage to stage in an object on the batch, which may also
leave sums to the stage behind. Here each call makes that object of two tensors and leaves two tensors, of which nobody
owes anything: a decoder may add to them in between, and every stage finds on the batch what it was given.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from sglang.srt.layers.layer_boundary import append_stages, declare_attn, declare_ffn, layer_stack
from sglang.srt.layers.layer_boundary.residual import batch as stream_of_batch
from sglang.srt.layers.layer_boundary.residual.add_norm import PLAIN_ADD
from sglang.srt.layers.layer_boundary.residual.stream import ResidualStream
from torch import Tensor

from atom_patches.models.norms import RmsNorm
from atom_patches.models.parts import LayerPlace
from atom_patches.sglang.adapters.current import current_batch
from atom_patches.sglang.adapters.exchange import EngineNorm

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def stack_of(places: Sequence[LayerPlace]) -> AbstractContextManager[object]:
    """The stack of a rank's layers. What other pipeline stages' layers next to it are is known when it is closed."""
    return layer_stack(
        previous_layers=[lambda: _before(places[0])],
        next_layers=[lambda: _behind(places[-1])],
    )


class LayerExchange:
    """A plain object: the norms are the decoder layer's modules."""

    def __init__(self, place: LayerPlace, input_norm: RmsNorm, post_norm: RmsNorm) -> None:
        self._first = place.index == 0
        attention, mlp = _declared(place.sparse, place.next_sparse)
        self._attention, self._mlp = append_stages((attention, EngineNorm(input_norm)), (mlp, EngineNorm(post_norm)))

    def before_attention(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        batch = current_batch()
        if residual is not None:
            hidden, batch.residual_stream = ResidualStream.from_handoff(hidden, residual, PLAIN_ADD)
        elif self._first:
            stream_of_batch.start(batch)
        else:
            stream_of_batch.set_written(hidden, batch)
        return self._attention.prepare(hidden, batch), _stream(batch)

    def capture(self, residual: Tensor) -> Tensor:
        batch = current_batch()
        move = self._attention.entry(batch).input_move  # SGLang's own capture calls it
        # What follows may write to the residual stream.
        return residual.clone() if move is None else move(hidden_states=residual, forward_batch=batch)

    def before_mlp(self, partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        batch = current_batch()
        batch.residual_stream = ResidualStream(residual)
        return self._mlp.prepare(self._attention.finish(partial, batch), batch), _stream(batch)

    def after_mlp(self, partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        batch = current_batch()
        batch.residual_stream = ResidualStream(residual)
        output = self._mlp.finish(partial, batch)
        # SGLang gives None for a stream that it has added the output to already.
        whole, rest = batch.residual_stream.export(output)
        stream_of_batch.clear(batch)
        return whole, rest


def _stream(batch: ForwardBatch) -> Tensor:
    """The residual stream that a stage has written, taken off the batch."""
    stream = stream_of_batch.written_residual(batch)
    stream_of_batch.clear(batch)
    return stream


def _declared(sparse: bool, next_sparse: bool) -> tuple[Any, Any]:
    """What a layer's attention and its MLP say of themselves."""
    return declare_attn(), declare_ffn(sparse=sparse, next_layer_sparse=next_sparse)


def _before(place: LayerPlace) -> tuple[Any, ...]:
    """The stages of the layer before a rank's first."""
    return _declared(place.previous_sparse, place.sparse) if place.index else ()


def _behind(place: LayerPlace) -> tuple[Any, ...]:
    """The stages of the layer behind a rank's last."""
    return _declared(place.next_sparse, place.next_sparse) if place.index + 1 < place.layers else ()
