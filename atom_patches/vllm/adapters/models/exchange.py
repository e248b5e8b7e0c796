"""The residual stream of one layer.

vLLM's row-parallel layers and experts add up what ranks hold parts of, and its experts send rows to data-parallel ranks
and take them back, so that nothing is left to exchange here.
"""

from __future__ import annotations

from torch import Tensor

from atom_patches.models.norms import RmsNorm


class LayerExchange:
    """`models.parts.Exchange` of sums that are finished; a plain object: the norms are the decoder layer's modules."""

    def __init__(self, input_norm: RmsNorm, post_norm: RmsNorm) -> None:
        self._input_norm = input_norm
        self._post_norm = post_norm

    def before_attention(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self._input_norm.alone(hidden), hidden
        return self._input_norm.of_sum(hidden, residual)

    def capture(self, residual: Tensor) -> Tensor:
        return residual.clone()

    def before_mlp(self, partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self._post_norm.of_sum(partial, residual)

    def after_mlp(self, partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        return partial, residual
