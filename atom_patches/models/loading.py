"""A checkpoint into a decoder's parameters, each through the loader that its engine gave it.

An engine's layers know how a tensor is spread over ranks and, where weights are quantised, how scales and zero points
belong to them: what has a name in the checkpoint has the same one in the layer. Layers that a decoder has in the
model's own dtype, such as routers, get the product of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from atom_patches.models.weights import WeightPiece

if TYPE_CHECKING:
    from atom_patches.models.decoder import Decoder

SCALES = ("weight_scale_inv", "weight_scale")
"""What a quantised weight is multiplied by, in blocks, by row or as a whole."""
STORED = frozenset({torch.float8_e4m3fn, torch.int8})
"""What such a weight is stored in."""


def load_weights(decoder: Decoder, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Fill this stage's parameters; their names within the decoder.

    Raises:
        ValueError: a tensor has no place here, or one that it needs is missing.
    """
    loaded: set[str] = set()
    pieces = (_where_it_is(decoder, piece) for piece in decoder.map_weights(weights))
    for piece in _as_layers_want_them(decoder, pieces):
        loaded.update(_load(decoder.get_submodule(piece.module), piece))
    return loaded


def load_parameter(parameter: Any, tensor: Tensor, *shard: str | int) -> None:
    """One tensor by the parameter's own loader, or as it is.

    Raises:
        ValueError: it has another shape.
    """
    load = getattr(parameter, "weight_loader", None)
    if load is not None:
        load(parameter, tensor, *shard)
    elif parameter.shape == tensor.shape:
        parameter.data.copy_(tensor)
    elif parameter.numel() == tensor.numel() == 1:
        parameter.data.fill_(tensor.item())
    else:
        raise ValueError(f"a tensor {list(tensor.shape)} does not fill a parameter {list(parameter.shape)}")


def dequantise(weight: Tensor, scale: Tensor) -> Tensor:
    """The product in float32; a scale stands for a block of rows and columns, all blocks being of one size.

    Raises:
        ValueError: the scales do not divide the weight into such blocks.
    """
    whole = scale.float()
    if scale.numel() > 1:
        whole = whole.reshape(scale.shape[0], -1)
        for dimension, size in enumerate(weight.shape):
            count = whole.shape[dimension]
            if size % count:
                raise ValueError(f"{list(scale.shape)} scales do not divide a weight {list(weight.shape)} into blocks")
            whole = whole.repeat_interleave(size // count, dimension)
    return weight.float() * whole


def _where_it_is(decoder: Decoder, piece: WeightPiece) -> WeightPiece:
    """An engine's own module may run projections as one, and says so in `stacked`."""
    parent, _, name = piece.module.rpartition(".")
    stacked: dict[str, tuple[str, int]] = getattr(decoder.get_submodule(parent), "stacked", {})
    if name not in stacked:
        return piece
    layer, shard = stacked[name]
    return replace(piece, module=f"{parent}.{layer}", shard=shard)


def _as_layers_want_them(decoder: Decoder, pieces: Iterable[WeightPiece]) -> Iterator[WeightPiece]:
    waiting: dict[tuple[str, str | int | None], WeightPiece] = {}
    for piece in pieces:
        if not _wants_product(decoder.get_submodule(piece.module), piece):
            yield piece
            continue
        place = (piece.module, piece.shard)
        if place not in waiting:
            waiting[place] = piece
            continue
        both = {one.parameter == "weight": one.tensor for one in (waiting.pop(place), piece)}
        yield replace(piece, parameter="weight", tensor=dequantise(both[True], both[False]))
    if waiting:
        raise ValueError(f"quantised weights without scales, or the reverse: {', '.join(one for one, _ in waiting)}")


def _wants_product(module: nn.Module, piece: WeightPiece) -> bool:
    """Whether a piece is half of a quantised weight whose layer is not."""
    if piece.expert is not None:
        return False
    if piece.parameter in SCALES:
        return getattr(module, piece.parameter, None) is None
    own = getattr(module, "weight", None)
    return piece.parameter == "weight" and piece.tensor.dtype in STORED and own is not None and own.dtype not in STORED


def _load(module: Any, piece: WeightPiece) -> Iterator[str]:
    if piece.expert is not None:
        yield f"{piece.module}.{module.load(piece.parameter, piece.tensor, piece.shard, piece.expert)}"
        return
    parameter = getattr(module, piece.parameter, None)
    if parameter is not None:
        load_parameter(parameter, piece.tensor, *(() if piece.shard is None else (piece.shard,)))
        yield piece.name
    elif piece.parameter != "bias" or piece.tensor.any():  # some tools write biases of zeros
        raise ValueError(f"the checkpoint's {piece.name} {list(piece.tensor.shape)} has no place in this decoder")
