"""From a checkpoint's tensors to the parameters of a decoder.

Checkpoints keep projections apart that a decoder runs as one, and Qwen3-Next's pack those of GatedDeltaNet head by
head. Here each tensor becomes the pieces of one layout, whatever the checkpoint: queries, keys, values and gates end to
end. How a piece is spread over ranks and written is up to the engine.

Quantised checkpoints have further tensors beside a weight, scales for example, which are cut like the weight: those
with fewer rows have one for a block of the weight's rows, those with one element have it for all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from atom_patches.models.config import DecoderConfig
from atom_patches.models.parts import Stage

_OURS = re.compile(r"(?:(?:model|language_model)\.)*((?:layers\.\d+|embed_tokens|norm)\..+)")
_OTHERS = re.compile(r"(?:^|\.)(?:lm_head|visual|mtp)\.|\.rotary_emb\.inv_freq$")
_LAYER = re.compile(r"layers\.(\d+)\.")
_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(\w+)")
_ALL_EXPERTS = re.compile(r"(.+\.mlp\.experts)\.(gate_up|down)_proj(?:\.|_|$)(\w*)")
_CACHE_SCALE = re.compile(r"(.+\.self_attn)\.[kv]_proj\.([kv]_scale)")
#: A projection of the checkpoint -> the decoder's, and which of its outputs it is.
_STACKED: dict[str, tuple[str, str | int]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "q_a_proj": ("qkv_a_proj", 0),
    "kv_a_proj_with_mqa": ("qkv_a_proj", 1),
    "q_b_proj": ("q_b_proj", 0),
    "kv_b_proj": ("kv_b_proj", 0),
    "in_proj_z": ("in_proj_qkvz", 3),
    "in_proj_b": ("in_proj_ba", 0),
    "in_proj_a": ("in_proj_ba", 1),
}
#: What projections that a decoder runs as one are called, in checkpoints that do not pack those of recurrent layers.
_FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
#: Parameters whose first dimension is the projection's outputs, or blocks of them.
_CUT = frozenset({"weight", "weight_scale", "weight_scale_inv", "input_scale"})


@dataclass(frozen=True)
class WeightPiece:
    """A tensor, whole over all ranks, and the parameter that it is a part of.

    Attributes:
        module: its name in the decoder, such as `layers.3.self_attn.qkv_proj`.
        parameter: such as `weight`.
        shard: which of the module's outputs: an index, or "q", "k", "v"; of an expert "gate", "up" or "down". None: it
            has one only.
        expert: which expert; None where there are none.
    """

    module: str
    parameter: str
    tensor: Tensor
    shard: str | int | None = None
    expert: int | None = None

    @property
    def name(self) -> str:
        """The parameter's full name; of an expert's, without the expert."""
        return f"{self.module}.{self.parameter}"


def fused_names(*, packed: bool) -> dict[str, list[str]]:
    """By the last part of a module's name: what the checkpoint calls its parts, as lists of unquantised layers do.

    Args:
        packed: whether the checkpoint packs the projections of recurrent layers.
    """
    return {name: [name] if packed and name.startswith("in_proj") else list(parts) for name, parts in _FUSED.items()}


def map_weights(weights: Iterable[tuple[str, Tensor]], config: DecoderConfig, stage: Stage) -> Iterator[WeightPiece]:
    """Where the tensors of a checkpoint belong in one stage of a decoder.

    Output heads, vision towers, draft layers and what other stages run give nothing.

    Raises:
        ValueError: a name that is none of these families', or a tensor that cannot be cut.
    """
    for full, tensor in weights:
        if _OTHERS.search(full):
            continue
        ours = _OURS.fullmatch(full)
        if ours is None:
            raise ValueError(f"the checkpoint's tensor {full!r} belongs to no part of this decoder")
        if _runs_here(ours[1], stage):
            yield from _pieces(ours[1], tensor, config)


def _runs_here(name: str, stage: Stage) -> bool:
    layer = _LAYER.match(name)
    if layer is not None:
        return stage.start <= int(layer[1]) < stage.end
    return stage.first if name.startswith("embed_tokens") else stage.last


def _pieces(name: str, tensor: Tensor, config: DecoderConfig) -> Iterator[WeightPiece]:
    name = name.replace(".shared_experts.", ".shared_expert.")
    if (expert := _EXPERT.fullmatch(name)) is not None:
        yield WeightPiece(expert[1], expert[4], tensor, expert[3], int(expert[2]))
    elif (experts := _ALL_EXPERTS.fullmatch(name)) is not None:
        yield from _of_all_experts(experts[1], experts[2], experts[3] or "weight", tensor)
    elif (scale := _CACHE_SCALE.fullmatch(name)) is not None:
        yield WeightPiece(f"{scale[1]}.attn", scale[2], tensor)
    else:
        module, _, parameter = name.rpartition(".")
        yield from _of_projection(module, parameter, tensor, config)


def _of_projection(module: str, parameter: str, tensor: Tensor, config: DecoderConfig) -> Iterator[WeightPiece]:
    parent, _, last = module.rpartition(".")
    if last in _STACKED:
        stacked, shard = _STACKED[last]
        yield WeightPiece(f"{parent}.{stacked}", parameter, tensor, shard)
    elif last == "in_proj_qkv":
        parts = _cut(module, parameter, tensor, [config.keys, config.keys, config.values])
        yield from _numbered(f"{parent}.in_proj_qkvz", parameter, parts)
    elif last == "in_proj_qkvz":
        shared = config.value_heads // config.key_heads * config.value_size
        sizes = [config.key_size, config.key_size, shared, shared]
        yield from _numbered(module, parameter, _unpack(module, parameter, tensor, config.key_heads, sizes))
    elif last == "in_proj_ba":
        shared = config.value_heads // config.key_heads
        parts = _unpack(module, parameter, tensor, config.key_heads, [shared, shared])
        yield from _numbered(module, parameter, parts)
    elif last == "conv1d":
        parts = _cut(module, parameter, tensor.squeeze(1), [config.keys, config.keys, config.values])
        yield from _numbered(module, parameter, parts)
    else:
        yield WeightPiece(module, parameter, tensor)


def _of_all_experts(module: str, projection: str, parameter: str, tensor: Tensor) -> Iterator[WeightPiece]:
    """`[experts, outputs, inputs]` -> each expert's."""
    for expert, own in enumerate(tensor):
        if projection == "down":
            yield WeightPiece(module, parameter, own, "down", expert)
            continue
        gate, up = own.chunk(2, dim=0)
        yield WeightPiece(module, parameter, gate, "gate", expert)
        yield WeightPiece(module, parameter, up, "up", expert)


def _numbered(module: str, parameter: str, parts: Sequence[Tensor]) -> Iterator[WeightPiece]:
    for shard, part in enumerate(parts):
        yield WeightPiece(module, parameter, part, shard)


def _cut(module: str, parameter: str, tensor: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """Along the first dimension, in the proportion of sizes."""
    if tensor.numel() == 1:
        return [tensor] * len(sizes)
    rows = tensor.shape[0]
    total = sum(sizes)
    if parameter not in _CUT or any(rows * size % total for size in sizes):
        raise ValueError(f"{module}.{parameter} {list(tensor.shape)} cannot be cut into parts of {sizes} outputs")
    return tensor.split([rows * size // total for size in sizes], dim=0)


def _unpack(module: str, parameter: str, tensor: Tensor, heads: int, sizes: list[int]) -> Sequence[Tensor]:
    """From head by head, sizes in each, to one tensor for each size, of all heads."""
    if tensor.numel() == 1:
        return [tensor] * len(sizes)
    rows = tensor.shape[0]
    if rows % heads:
        raise ValueError(f"{module}.{parameter} {list(tensor.shape)} cannot be dealt out to {heads} heads")
    by_head = tensor.unflatten(0, (heads, rows // heads))
    parts = _cut(module, parameter, by_head.transpose(0, 1), sizes)
    return [part.transpose(0, 1).flatten(0, 1) for part in parts]
