"""Parts in plain torch, for decoders without an engine: dense matrices, a cache of whole sequences, sums over threads.

Several ranks are threads of one process: `Ranks` says how many, and adds up what they hold parts of.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from plain_latent import CachedLatents, PlainIndexer, choose_with_bias
from step_rows import ROWS
from torch import Tensor, nn
from torch.nn.functional import linear, one_hot, scaled_dot_product_attention, silu

from atom_patches.models.decoder import Decoder
from atom_patches.models.lightning_indexer import IndexerShape
from atom_patches.models.norms import RmsNorm
from atom_patches.models.parts import (
    AttentionShape,
    ExpertsShape,
    Group,
    LatentShape,
    LayerPlace,
    Recurrence,
    RotaryShape,
    Stage,
)
from atom_patches.models.products import Product
from atom_patches.models.rotary import Rotary
from atom_patches.models.weights import WeightPiece


class Ranks:
    """A group of threads that hold parts of one model."""

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._given: list[Tensor | None] = [None] * size

    def total(self, rank: int, part: Tensor) -> Tensor:
        if self.size == 1:
            return part
        self._given[rank] = part
        self._barrier.wait()
        total = torch.stack([given for given in self._given if given is not None]).sum(0)
        self._barrier.wait()
        return total

    def abort(self) -> None:
        """Let the others fail, too."""
        self._barrier.abort()


class Column(nn.Module):
    def __init__(self, inputs: int, outputs: tuple[int, ...], rank: int, size: int, bias: bool = False) -> None:
        super().__init__()
        self.sizes = [total // size for total in outputs]
        assert [total % size for total in outputs] == [0] * len(outputs)
        self.rank = rank
        self.weight = nn.Parameter(torch.full((sum(self.sizes), inputs), torch.nan))
        self.bias = nn.Parameter(torch.full((sum(self.sizes),), torch.nan)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def load_piece(self, piece: WeightPiece) -> None:
        assert isinstance(piece.shard, int)
        self._load(piece, piece.shard, self.rank)

    def _load(self, piece: WeightPiece, index: int, place: int) -> None:
        rows = self.sizes[index]
        target = self.get_parameter(piece.parameter).data.split(self.sizes)[index]
        target.copy_(piece.tensor.narrow(0, place * rows, rows))


class Qkv(Column):
    def __init__(
        self, inputs: int, head_size: int, heads: int, kv_heads: int, rank: int, size: int, bias: bool
    ) -> None:
        self.repeated = max(1, size // kv_heads)
        outputs = (heads * head_size, *[kv_heads * self.repeated * head_size] * 2)
        super().__init__(inputs, outputs, rank, size, bias)

    def load_piece(self, piece: WeightPiece) -> None:
        index = "qkv".index(str(piece.shard))
        self._load(piece, index, self.rank if index == 0 else self.rank // self.repeated)


class Row(nn.Module):
    def __init__(self, inputs: int, outputs: int, rank: int, size: int, bias: bool) -> None:
        super().__init__()
        self.rank = rank
        self.weight = nn.Parameter(torch.full((outputs, inputs // size), torch.nan))
        self.bias = nn.Parameter(torch.full((outputs,), torch.nan)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, None if self.rank else self.bias)

    def load_piece(self, piece: WeightPiece) -> None:
        if piece.parameter == "bias":
            self.get_parameter("bias").data.copy_(piece.tensor)
            return
        columns = self.weight.shape[1]
        self.weight.data.copy_(piece.tensor.narrow(1, self.rank * columns, columns))


class Experts(nn.Module):
    """Each expert is cut over the ranks."""

    def __init__(self, shape: ExpertsShape, rank: int, size: int, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.shape, self.rank = shape, rank
        self._bias = [bias]  # the router's, and loaded there
        self.width = shape.intermediate // size
        count = shape.experts
        self.gate = nn.Parameter(torch.full((count, self.width, shape.hidden), torch.nan))
        self.up = nn.Parameter(torch.full((count, self.width, shape.hidden), torch.nan))
        self.down = nn.Parameter(torch.full((count, shape.hidden, self.width), torch.nan))

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        [bias] = self._bias
        if bias is None:
            weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(self.shape.chosen)
        else:
            weights, chosen = choose_with_bias(logits, bias, self.shape)
        if self.shape.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        share = (one_hot(chosen, self.shape.experts) * weights[..., None]).sum(1)  # [rows, experts]
        inner = silu(torch.einsum("th,eih->tei", x, self.gate)) * torch.einsum("th,eih->tei", x, self.up)
        return torch.einsum("tei,ehi,te->th", inner, self.down, share.to(x.dtype))

    def load_piece(self, piece: WeightPiece) -> None:
        assert isinstance(piece.shard, str) and piece.expert is not None
        target: Tensor = getattr(self, piece.shard).data[piece.expert]
        cut = 1 if piece.shard == "down" else 0
        target.copy_(piece.tensor.narrow(cut, self.rank * self.width, self.width))


class CachedAttention(nn.Module):
    """Every sequence's keys and values, whole."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__()
        self.shape = shape
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        size = self.shape.head_size
        q, k, v = (x.unflatten(1, (-1, size)) for x in (queries, keys, values))
        output = torch.zeros_like(q)
        start = 0
        for sequence, rows in ROWS.required():
            mine = slice(start, start + rows)
            start += rows
            if sequence in self.cache:
                before_k, before_v = self.cache[sequence]
                self.cache[sequence] = (torch.cat([before_k, k[mine]]), torch.cat([before_v, v[mine]]))
            else:
                self.cache[sequence] = (k[mine], v[mine])
            output[mine] = self._attend(q[mine], *self.cache[sequence])
        return output.flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        by_head = [x.transpose(0, 1)[None] for x in (q, k, v)]
        answer = scaled_dot_product_attention(*by_head, attn_mask=seen, scale=self.shape.scale, enable_gqa=True)
        return answer[0].transpose(0, 1)


@dataclass
class SumExchange:
    """All ranks run the same rows, and add up their parts."""

    input_norm: RmsNorm
    post_norm: RmsNorm
    ranks: Ranks
    rank: int
    adds_stream: bool

    def before_attention(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return (self.input_norm.alone(hidden), hidden) if residual is None else self.input_norm.of_sum(hidden, residual)

    def capture(self, residual: Tensor) -> Tensor:
        return residual.clone()

    def before_mlp(self, partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self.post_norm.of_sum(self.ranks.total(self.rank, partial), residual)

    def after_mlp(self, partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        total = self.ranks.total(self.rank, partial)
        return (total + residual, None) if self.adds_stream else (total, residual)


class Embedding(nn.Embedding):
    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__(vocabulary, hidden)
        self.weight.data.fill_(torch.nan)


@dataclass
class PlainParts:
    """What a decoder is made of on one rank.

    Attributes:
        part: the layers of this stage; None: all.
        adds_stream: whether exchanges add the residual stream themselves.
        places: what layers said about where they stand.
        recurrent: recurrent layers, in the order in which their inner parts ran.
    """

    ranks: Ranks = field(default_factory=Ranks)
    rank: int = 0
    part: Stage | None = None
    adds_stream: bool = False
    recurrent: list[int] = field(default_factory=list)
    places: list[LayerPlace] = field(default_factory=list)

    def stage(self, layers: int) -> Stage:
        return self.part or Stage(0, layers)

    def local_heads(self, total: int) -> int:
        return max(1, total // self.ranks.size)

    def embedding(self, vocabulary: int, hidden: int, *, prefix: str) -> nn.Module:
        return Embedding(vocabulary, hidden)

    def column(
        self, inputs: int, outputs: tuple[int, ...], *, group: Group, prefix: str, quantised: bool = True
    ) -> nn.Module:
        return Column(inputs, outputs, *((0, 1) if group == "whole" else (self.rank, self.ranks.size)))

    def qkv(
        self, inputs: int, head_size: int, heads: int, kv_heads: int, *, prefix: str, bias: bool = False
    ) -> nn.Module:
        return Qkv(inputs, head_size, heads, kv_heads, self.rank, self.ranks.size, bias)

    def row(self, inputs: int, outputs: int, *, group: Group, prefix: str, bias: bool = False) -> nn.Module:
        return Row(inputs, outputs, self.rank, self.ranks.size, bias)

    def product(self, weight: Tensor) -> Product:
        return linear

    def head_parameter(self, heads: int) -> nn.Parameter:
        return nn.Parameter(torch.full((heads // self.ranks.size,), torch.nan))

    def rotary(self, shape: RotaryShape) -> nn.Module:
        return Rotary(shape)

    def attention(self, layer: int, shape: AttentionShape, *, prefix: str) -> nn.Module:
        return CachedAttention(shape)

    def recurrence(self, layer: int, run: Recurrence, weights: object) -> Recurrence:
        def counted(mixed: Tensor, a: Tensor, b: Tensor) -> Tensor:
            self.recurrent.append(layer)
            return run(mixed, a, b)

        return counted

    def experts(self, layer: int, shape: ExpertsShape, *, prefix: str) -> nn.Module:
        return Experts(shape, self.rank, self.ranks.size)

    def biased_experts(self, layer: int, shape: ExpertsShape, bias: nn.Parameter, *, prefix: str) -> nn.Module:
        return Experts(shape, self.rank, self.ranks.size, bias)

    def latent_expansion(self, rank: int, outputs: int, *, prefix: str) -> nn.Module:
        return self.column(rank, (outputs,), group="attention", prefix=prefix)

    def latent_attention(
        self, layer: int, shape: LatentShape, expansion: nn.Module, indexer: nn.Module | None, *, prefix: str
    ) -> nn.Module:
        return CachedLatents(shape)

    def indexer(
        self, layer: int, shape: IndexerShape, hidden: int, query_rank: int, rotary: RotaryShape, *, prefix: str
    ) -> nn.Module:
        return PlainIndexer(shape, hidden, query_rank, rotary)

    def exchange(self, place: LayerPlace, input_norm: RmsNorm, post_norm: RmsNorm) -> SumExchange:
        self.places.append(place)
        return SumExchange(input_norm, post_norm, self.ranks, self.rank, self.adds_stream)


def load(decoder: Decoder, parts: PlainParts, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write a checkpoint into a decoder, all of it."""
    for norm in (module for module in decoder.modules() if type(module).__name__.endswith("RmsNorm")):
        nn.init.constant_(norm.get_parameter("weight"), torch.nan)
    with torch.no_grad():
        for piece in decoder.map_weights(weights):
            _load_piece(decoder, parts.rank, piece)
    missing = [name for name, parameter in decoder.named_parameters() if parameter.isnan().any()]
    assert not missing, f"not loaded: {missing}"
    decoder.requires_grad_(False).eval()


def _load_piece(decoder: Decoder, rank: int, piece: WeightPiece) -> None:
    target: Any = decoder.get_submodule(piece.module)
    if hasattr(target, "load_piece"):
        target.load_piece(piece)
        return
    parameter: Tensor = getattr(target, piece.parameter).data
    cut = piece.parameter in ("A_log", "dt_bias")
    parameter.copy_(piece.tensor.narrow(0, rank * len(parameter), len(parameter)) if cut else piece.tensor)
