"""The residual stream of one layer between attention's rows and the experts' rows.

SGLang knows for every layout which ranks hold which rows before and behind attention and experts, and moves them: in
0.5.17 a communicator of each layer, later boundaries of a stack of layers, whose stages learn of their neighbours when
it is closed. A decoder calls either in the same way and never names a group.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from atom_patches.models.norms import RmsNorm
from atom_patches.models.parts import Exchange, LayerPlace

BOUNDARIES = importlib.util.find_spec("sglang.srt.layers.layer_boundary") is not None
"""Whether SGLang has boundaries, and no communicator."""


class EngineNorm:
    """A norm as SGLang calls it."""

    def __init__(self, norm: RmsNorm) -> None:
        self._norm = norm

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, addition: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return self._norm.alone(x)
        return self._norm.of_sum(x, residual if addition is None else residual + addition)


def exchange_of(place: LayerPlace, input_norm: RmsNorm, post_norm: RmsNorm) -> Exchange:
    """A layer's, made within `layers_of`."""
    if BOUNDARIES:
        from atom_patches.sglang.adapters import layer_boundaries as made
    else:
        from atom_patches.sglang.adapters import layer_communicator as made
    return made.LayerExchange(place, input_norm, post_norm)


def layers_of(places: Sequence[LayerPlace]) -> AbstractContextManager[object]:
    """The layers of this rank are made within; `places` names them, in order, at its end."""
    if not BOUNDARIES:
        return nullcontext()
    from atom_patches.sglang.adapters.layer_boundaries import stack_of

    return stack_of(places)
