"""The parts of which vLLM's worker builds an ATOM decoder."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from vllm.distributed import get_pp_group, get_tensor_model_parallel_world_size
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.utils import set_weight_attrs

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
from atom_patches.vllm.adapters.models.attention import PagedAttention
from atom_patches.vllm.adapters.models.exchange import LayerExchange
from atom_patches.vllm.adapters.models.experts import RoutedExperts
from atom_patches.vllm.adapters.models.products import product_of, with_few_rows
from atom_patches.vllm.adapters.models.recurrence import RecurrentLayer
from atom_patches.vllm.adapters.models.rotary import Rotary

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from atom_patches.models.gdn_core import GdnWeights


class Filters(MergedColumnParallelLinear):
    """A matrix that is never multiplied: nothing may pack it after loading."""

    def __init__(self, inputs: int, outputs: list[int], prefix: str) -> None:
        super().__init__(inputs, outputs, bias=False, prefix=prefix)
        self.quant_method = None


class VllmParts:
    """`models.parts.Parts` of vLLM's layers.

    Args:
        config: vLLM's.
        prefix: the decoder's name, by which vLLM finds its recurrent layers.
    """

    def __init__(self, config: VllmConfig, prefix: str) -> None:
        self._config = config
        self._quant_config = config.quant_config
        self._prefix = prefix
        self._recurrent_layers = 0
        self._selected: Tensor | None = None

    def stage(self, layers: int) -> Stage:
        group = get_pp_group()
        start, end = get_pp_indices(layers, group.rank_in_group, group.world_size)
        return Stage(start, end, first=group.is_first_rank, last=group.is_last_rank)

    def local_heads(self, total: int) -> int:
        ranks = get_tensor_model_parallel_world_size()
        if total % ranks and ranks % total:
            raise ValueError(
                f"{total} heads cannot be spread over {ranks} ranks: neither number divides the other. Choose "
                "--tensor-parallel-size so that it divides the heads"
            )
        return max(1, total // ranks)

    def embedding(self, vocabulary: int, hidden: int, *, prefix: str) -> nn.Module:
        return VocabParallelEmbedding(vocabulary, hidden, prefix=prefix)

    def column(
        self, inputs: int, outputs: tuple[int, ...], *, group: Group, prefix: str, quantised: bool = True
    ) -> nn.Module:
        if not quantised:
            return Filters(inputs, list(outputs), prefix)
        if group == "whole":
            from atom_patches.vllm.adapters.models.latent import Latents

            return Latents(inputs, list(outputs), self._quant_config, prefix)
        layer = MergedColumnParallelLinear(
            inputs, list(outputs), bias=False, quant_config=self._quant_config, prefix=prefix, return_bias=False
        )
        return with_few_rows(layer)

    def qkv(
        self, inputs: int, head_size: int, heads: int, kv_heads: int, *, prefix: str, bias: bool = False
    ) -> nn.Module:
        layer = QKVParallelLinear(
            inputs, head_size, heads, kv_heads, bias=bias,
            quant_config=self._quant_config, prefix=prefix, return_bias=False,
        )  # fmt: skip
        return with_few_rows(layer)

    def row(self, inputs: int, outputs: int, *, group: Group, prefix: str, bias: bool = False) -> nn.Module:
        layer = RowParallelLinear(
            inputs, outputs, bias=bias, quant_config=self._quant_config, prefix=prefix, return_bias=False
        )
        return with_few_rows(layer)

    def product(self, weight: Tensor) -> Product:
        return product_of(weight)

    def head_parameter(self, heads: int) -> nn.Parameter:
        parameter = nn.Parameter(torch.empty(self.local_heads(heads), dtype=torch.float32), requires_grad=False)
        set_weight_attrs(parameter, {"weight_loader": sharded_weight_loader(0)})
        return parameter

    def rotary(self, shape: RotaryShape) -> nn.Module:
        return Rotary(shape)

    def attention(self, layer: int, shape: AttentionShape, *, prefix: str) -> nn.Module:
        return PagedAttention(shape, self._config, prefix)

    def recurrence(self, layer: int, run: Recurrence, weights: Callable[[], GdnWeights]) -> RecurrentLayer:
        self._recurrent_layers += 1
        name = f"{self._prefix}.layers.{layer}.linear_attn"
        return RecurrentLayer(layer, run, weights, self._config, name, rehearses=self._recurrent_layers == 1)

    def experts(self, layer: int, shape: ExpertsShape, *, prefix: str) -> nn.Module:
        return RoutedExperts(shape, quant_config=self._quant_config, prefix=prefix)

    def biased_experts(self, layer: int, shape: ExpertsShape, bias: nn.Parameter, *, prefix: str) -> nn.Module:
        return RoutedExperts(shape, quant_config=self._quant_config, prefix=prefix, bias=bias)

    def latent_expansion(self, rank: int, outputs: int, *, prefix: str) -> nn.Module:
        return MergedColumnParallelLinear(rank, [outputs], bias=False, prefix=prefix)  # vLLM's attention calls it

    def latent_attention(
        self, layer: int, shape: LatentShape, expansion: nn.Module, indexer: nn.Module | None, *, prefix: str
    ) -> nn.Module:
        # Here, because only DeepSeek's families need vLLM's file of them.
        from atom_patches.vllm.adapters.models.latent import LatentPagedAttention

        return LatentPagedAttention(shape, expansion, indexer, self._config, prefix)

    def indexer(
        self, layer: int, shape: IndexerShape, hidden: int, query_rank: int, rotary: RotaryShape, *, prefix: str
    ) -> nn.Module:
        from atom_patches.vllm.adapters.models.indexer import LatentIndexer, selection_buffer

        if self._selected is None:  # of all layers
            self._selected = selection_buffer(shape, self._config)
        return LatentIndexer(shape, hidden, query_rank, rotary, self._config, self._selected, prefix)

    def exchange(self, place: LayerPlace, input_norm: RmsNorm, post_norm: RmsNorm) -> LayerExchange:
        return LayerExchange(input_norm, post_norm)
