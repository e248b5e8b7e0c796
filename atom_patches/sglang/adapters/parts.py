"""The parts of which SGLang's process builds an ATOM decoder."""

# pyright: reportMissingImports=false

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from sglang.srt.distributed import get_pp_indices
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.layers.moe.utils import get_moe_a2a_backend
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.model_loader.weight_utils import sharded_weight_loader
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from atom_patches.models.lightning_indexer import IndexerShape
from atom_patches.models.norms import RmsNorm
from atom_patches.models.parts import (
    AttentionShape,
    Exchange,
    ExpertsShape,
    Group,
    LatentShape,
    LayerPlace,
    RotaryShape,
    Stage,
)
from atom_patches.models.products import Product
from atom_patches.sglang.adapters.attention import PagedAttention
from atom_patches.sglang.adapters.exchange import exchange_of, layers_of
from atom_patches.sglang.adapters.experts import RoutedExperts
from atom_patches.sglang.adapters.latent import ByHead, LatentPagedAttention, latent_scaling
from atom_patches.sglang.adapters.linear import Column, QueryKeyValue, Ranks, Row, spread_over
from atom_patches.sglang.adapters.products import product_of, with_few_rows
from atom_patches.sglang.adapters.recurrence import Recurrence, Run


class SglangParts:
    """`models.parts.Parts` of SGLang's layers.

    Args:
        quant_config: SGLang's, None for unquantised weights.
    """

    def __init__(self, quant_config: Any) -> None:
        self._quant_config = quant_config
        self._places: list[LayerPlace] = []

    def stage(self, layers: int) -> Stage:
        group = get_parallel().pp_group
        start, end = get_pp_indices(layers, group.rank_in_group, group.world_size)
        return Stage(start, end, first=group.is_first_rank, last=group.is_last_rank)

    def local_heads(self, total: int) -> int:
        ranks = get_parallel().attn_tp_size
        if total % ranks and ranks % total:
            raise ValueError(
                f"{total} heads cannot be spread over {ranks} ranks of attention: neither number divides the other. "
                "Choose --tp-size and --dp-size so that their quotient divides the heads"
            )
        return max(1, total // ranks)

    def embedding(self, vocabulary: int, hidden: int, *, prefix: str) -> nn.Module:
        whole = is_dp_attention_enabled()  # ranks embed different tokens
        return VocabParallelEmbedding(vocabulary, hidden, org_num_embeddings=vocabulary, enable_tp=not whole)

    def column(
        self, inputs: int, outputs: tuple[int, ...], *, group: Group, prefix: str, quantised: bool = True
    ) -> nn.Module:
        quant = self._quant_config if quantised else None
        layer = Column(inputs, list(outputs), False, quant_config=quant, prefix=prefix, **spread_over(_ranks(group)))
        return with_few_rows(layer) if quantised else layer  # others are filters, and what attention multiplies by

    def qkv(
        self, inputs: int, head_size: int, heads: int, kv_heads: int, *, prefix: str, bias: bool = False
    ) -> nn.Module:
        layer = QueryKeyValue(
            inputs, head_size, heads, kv_heads, bias,
            quant_config=self._quant_config, prefix=prefix, **spread_over(_ranks("attention")),
        )  # fmt: skip
        return with_few_rows(layer)

    def row(self, inputs: int, outputs: int, *, group: Group, prefix: str, bias: bool = False) -> nn.Module:
        layer = Row(
            inputs, outputs, bias, input_is_parallel=True, reduce_results=False,
            quant_config=self._quant_config, prefix=prefix, **spread_over(_ranks(group)),
        )  # fmt: skip
        return with_few_rows(layer)

    def product(self, weight: Tensor) -> Product:
        return product_of(weight)

    def head_parameter(self, heads: int) -> nn.Parameter:
        parameter = nn.Parameter(torch.empty(self.local_heads(heads), dtype=torch.float32), requires_grad=False)
        parameter.weight_loader = sharded_weight_loader(0)  # pyright: ignore[reportAttributeAccessIssue]
        return parameter

    def rotary(self, shape: RotaryShape) -> nn.Module:
        scaling = dict((latent_scaling(shape) if shape.interleaved else shape.scaling) or {})
        if shape.sections is not None:
            scaling |= {"mrope_section": list(shape.sections), "mrope_interleaved": True}
            scaling.setdefault("rope_type", "default")
        rotary = get_rope(
            head_size=shape.head_size,
            rotary_dim=shape.rotary_size,
            max_position=shape.max_position,
            base=shape.theta,
            rope_scaling=scaling or None,
            is_neox_style=not shape.interleaved,
            dtype=torch.get_default_dtype(),
        )
        return ByHead(rotary, shape.head_size) if shape.interleaved else rotary

    def attention(self, layer: int, shape: AttentionShape, *, prefix: str) -> nn.Module:
        return PagedAttention(
            shape.heads, shape.head_size, shape.scale, shape.kv_heads, layer,
            quant_config=self._quant_config, prefix=prefix,
        )  # fmt: skip

    def recurrence(self, layer: int, run: Run, weights: object) -> Run:
        return Recurrence(layer, run)

    def experts(self, layer: int, shape: ExpertsShape, *, prefix: str) -> nn.Module:
        return RoutedExperts(layer, shape, quant_config=self._quant_config, prefix=prefix)

    def biased_experts(self, layer: int, shape: ExpertsShape, bias: nn.Parameter, *, prefix: str) -> nn.Module:
        return RoutedExperts(layer, shape, quant_config=self._quant_config, prefix=prefix, bias=bias)

    def latent_expansion(self, rank: int, outputs: int, *, prefix: str) -> nn.Module:
        return self.column(rank, (outputs,), group="attention", prefix=prefix, quantised=False)

    def latent_attention(
        self, layer: int, shape: LatentShape, expansion: nn.Module, indexer: nn.Module | None, *, prefix: str
    ) -> nn.Module:
        return LatentPagedAttention(layer, shape, quant_config=self._quant_config, prefix=prefix)

    def indexer(
        self, layer: int, shape: IndexerShape, hidden: int, query_rank: int, rotary: RotaryShape, *, prefix: str
    ) -> nn.Module:
        # Where SGLang's sparse attention is another one, this package's does not fit it, nor is it asked for.
        from atom_patches.sglang.adapters.latent_indexer import Indexer

        return Indexer(layer, shape, hidden, query_rank, rotary, quant_config=self._quant_config, prefix=prefix)

    def layers(self) -> AbstractContextManager[object]:
        """A decoder's layers are made within it."""
        return layers_of(self._places)

    def exchange(self, place: LayerPlace, input_norm: RmsNorm, post_norm: RmsNorm) -> Exchange:
        self._places.append(place)
        return exchange_of(place, input_norm, post_norm)


def _ranks(group: Group) -> Ranks:
    """Those over which a group's weights are spread."""
    if group == "attention":
        return "attn_tp"
    if group == "shared_expert" and not get_moe_a2a_backend().is_none():
        return "replicated"  # rows go to the experts' ranks, and each rank keeps its own for the shared expert
    return "replicated" if group == "whole" else "tp"
