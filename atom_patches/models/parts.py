"""What an engine provides for a decoder, and what it may rely on.

A decoder decides what is computed, in which order, and by which kernels. The engine decides how weights are spread over
ranks and quantised, where keys and values are cached, and what ranks exchange around attention and experts.

Weights are spread over two groups of ranks, which differ under data-parallel attention:

- `attention`: the ranks that hold parts of the heads of the same requests, only one rank if each has its own requests;
- `mlp`: the ranks that hold parts of an MLP. `shared_expert` is that of an MLP beside routed experts, which engines
  that send rows to experts keep whole on every rank.

`whole` is what every rank has all of.

A row-parallel layer and the experts return partial sums, or finished ones: decoders never reduce. The layer's
:class:`Exchange` does, after the sums of routed and shared experts were added.

Tensors of rows are `[rows, width]`, with at least one row. Modules are called as the methods that make them say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from atom_patches.models.lightning_indexer import IndexerShape
from atom_patches.models.norms import RmsNorm
from atom_patches.models.products import Product

if TYPE_CHECKING:
    from atom_patches.models.gdn_core import GdnWeights

Group = Literal["attention", "mlp", "shared_expert", "whole"]
#: From the projections of all rows, `[rows, channels]` and two of `[rows, value heads]`, to the outputs of a recurrent
#: layer, `[rows, value heads, value size]`.
Recurrence = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Stage:
    """The layers that this rank runs.

    Attributes:
        start, end: layers from `start` up to, not including, `end`.
        first: whether the embedding is here.
        last: whether the final norm is here.
    """

    start: int
    end: int
    first: bool = True
    last: bool = True


@dataclass(frozen=True)
class LayerPlace:
    """Where a layer stands, which decides what ranks exchange around it.

    Attributes:
        index: of the layer, among all of the model.
        layers: of the model.
        sparse: whether it has experts.
        previous_sparse, next_sparse: whether its neighbours have; the same as `sparse` where there is no neighbour.
    """

    index: int
    layers: int
    sparse: bool
    previous_sparse: bool
    next_sparse: bool


@dataclass(frozen=True)
class AttentionShape:
    """Heads of one rank: queries and outputs `[rows, heads * head_size]`, keys and values of `kv_heads`."""

    heads: int
    kv_heads: int
    head_size: int
    scale: float


@dataclass(frozen=True)
class LatentShape:
    """Attention of one rank's heads to tokens that are cached as one latent and one turned key each, for all heads.

    Attributes:
        latent, rope: sizes of both.
        query_rank: size of the latents that queries are made of.
        plain, value: of a head's query that positions leave, and of its value.
    """

    heads: int
    latent: int
    rope: int
    query_rank: int
    plain: int
    value: int
    scale: float


@dataclass(frozen=True)
class RotaryShape:
    """Rotary positions: the first and second half of the first `rotary_size` values turn together.

    Attributes:
        head_size: values of a head.
        rotary_size: how many of them turn.
        max_position: the largest position, plus one.
        theta: the base of the frequencies.
        sections: frequencies that turn by time, height and width, for positions `[3, rows]`; they are interleaved. None
            if positions are `[rows]`.
        scaling: what the checkpoint says about longer positions, `{"rope_type": …, …}`; None or "default": nothing.
        interleaved: neighbours turn together instead.
    """

    head_size: int
    rotary_size: int
    max_position: int
    theta: float
    sections: tuple[int, int, int] | None = None
    scaling: dict[str, object] | None = None
    interleaved: bool = False


@dataclass(frozen=True)
class ExpertsShape:
    """Routed experts, each an MLP with a gate (silu).

    Attributes:
        experts: how many there are.
        chosen: how many a row goes to.
        hidden, intermediate: the width of a row, and within an expert.
        renormalise: whether the chosen probabilities are scaled to a sum of 1.
        groups, chosen_groups: experts are chosen from so many groups of neighbours, of so many.
        biased: probabilities are sigmoids, not a softmax over all experts, and experts are chosen by them plus a bias;
            a group is rated by its two best.
    """

    experts: int
    chosen: int
    hidden: int
    intermediate: int
    renormalise: bool
    groups: int = 1
    chosen_groups: int = 1
    biased: bool = False


class Exchange(Protocol):
    """What ranks exchange in one layer, and the norms, which engines fuse with that.

    Between `before_mlp` and `after_mlp` there may be other rows than before and after: those of other ranks, too.
    """

    def before_attention(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(input_norm(sum), sum) with the sum of both; residual is None in the first layer, and where it was added."""
        ...

    def capture(self, residual: Tensor) -> Tensor:
        """The second result of `before_attention` as the engine reports hidden states; memory of its own."""
        ...

    def before_mlp(self, partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Finish the attention's sums; (post_norm(sum), sum) with the sum of both, gathered as the MLP needs them."""
        ...

    def after_mlp(self, partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        """Finish the MLP's sums; this rank's own rows of them and of the residual stream, None if that was added."""
        ...


class Parts(Protocol):
    """What an engine provides. `prefix` is a layer's name in the checkpoint, by which quantisation is looked up."""

    def stage(self, layers: int) -> Stage:
        """Which of a model's layers this rank runs."""
        ...

    def local_heads(self, total: int) -> int:
        """How many of an attention's or a recurrent layer's heads are here; at least 1.

        Raises:
            ValueError: they cannot be spread over the group `attention`.
        """
        ...

    def embedding(self, vocabulary: int, hidden: int, *, prefix: str) -> nn.Module:
        """`module(ids [rows]) -> [rows, hidden]`, finished."""
        ...

    def column(
        self, inputs: int, outputs: tuple[int, ...], *, group: Group, prefix: str, quantised: bool = True
    ) -> nn.Module:
        """`module(x) -> y`, outputs laid end to end, each spread over the ranks by itself; no bias.

        Without `quantised` it has a `weight` `[outputs of this rank, inputs]` in the model's dtype.
        """
        ...

    def qkv(
        self, inputs: int, head_size: int, heads: int, kv_heads: int, *, prefix: str, bias: bool = False
    ) -> nn.Module:
        """`module(x) -> [queries, keys, values]` of this rank's heads; key heads fewer than ranks are repeated."""
        ...

    def row(self, inputs: int, outputs: int, *, group: Group, prefix: str, bias: bool = False) -> nn.Module:
        """`module(x) -> y`, x being this rank's part of the inputs; a bias is in one rank's result only."""
        ...

    def product(self, weight: Tensor) -> Product:
        """How the product with weights in the model's dtype, whole on every rank and not quantised, is to be had.

        It is called with these weights, or with others at the same place, and may be a module.
        """
        ...

    def head_parameter(self, heads: int) -> nn.Parameter:
        """float32 `[heads of this rank]`, which loads its part of a tensor `[heads]`."""
        ...

    def rotary(self, shape: RotaryShape) -> nn.Module:
        """`module(positions, queries, keys) -> (queries, keys)`; `models.rotary.Rotary` is one.

        If it has a true `prepares`, it does all between projection and attention: `prepare(projection, positions, heads
        of queries and of keys, their norms or None, whether there are gates)` returns queries, keys, values and gates
        or None, `[rows, heads, head size]`.
        """
        ...

    def attention(self, layer: int, shape: AttentionShape, *, prefix: str) -> nn.Module:
        """`module(queries, keys, values) -> outputs`; it caches keys and values, and finds a row's earlier ones.

        If it has a true `prepares`, and so has the rotation, it does what that prepares, too: `attend(projection,
        positions, rotation, norms or None, whether there are gates)` returns outputs times gates.
        """
        ...

    def recurrence(self, layer: int, run: Recurrence, weights: Callable[[], GdnWeights]) -> Recurrence:
        """A recurrent layer's inner part, which is `run`, with whatever the engine does around it with the states.

        `run` takes the recurrent metadata that are bound when it is called. `weights`, once they are loaded, are for
        an engine that cuts the recurrence between ranks.
        """
        ...

    def experts(self, layer: int, shape: ExpertsShape, *, prefix: str) -> nn.Module:
        """`module(x [rows, hidden], router logits [rows, experts]) -> [rows, hidden]`; chooses by them as said.

        It may have `take_along(shared expert, its gate) -> bool`, called once: whether from then on its results contain
        those of the shared expert, a `GatedMlp`, times the sigmoid of the gate.
        """
        ...

    def exchange(self, place: LayerPlace, input_norm: RmsNorm, post_norm: RmsNorm) -> Exchange:
        """What ranks exchange in that layer; the norms belong to the layer."""
        ...


@runtime_checkable
class DeepseekParts(Protocol):
    """What an engine provides besides, for decoders of DeepSeek's."""

    def latent_expansion(self, rank: int, outputs: int, *, prefix: str) -> nn.Module:
        """From a latent to the key and value of every head, spread over the group `attention`; no decoder calls it.

        It has a `weight` `[outputs of this rank, rank]` in the model's dtype, but where attention expands.
        """
        ...

    def latent_attention(
        self, layer: int, shape: LatentShape, expansion: nn.Module, indexer: nn.Module | None, *, prefix: str
    ) -> nn.Module:
        """`module(queries [rows, heads, latent], turned queries [rows, heads, rope], latents [rows, latent], turned
        keys [rows, rope], selected) -> [rows, heads, latent]`; it caches latents and keys, and finds a row's earlier
        ones. `selected` is what the layer's indexer gave, None where all tokens are attended to.

        If it has a true `expands`, it makes keys and values by the expansion where that pays: it takes queries as heads
        have them, `[rows, heads, plain]`, and gives `[rows, heads, value]`.
        """
        ...

    def biased_experts(self, layer: int, shape: ExpertsShape, bias: nn.Parameter, *, prefix: str) -> nn.Module:
        """As `Parts.experts`, chosen with the bias `[experts]`, float32."""
        ...


@runtime_checkable
class IndexerParts(Protocol):
    """What an engine provides besides, for decoders whose attention is to selected tokens."""

    def indexer(
        self, layer: int, shape: IndexerShape, hidden: int, query_rank: int, rotary: RotaryShape, *, prefix: str
    ) -> nn.Module:
        """`module(hidden [rows, hidden], queries' latents [rows, query_rank], positions) -> what attention takes`.

        It has the projections `wq_b`, `wk` and `weights_proj`, and the norm `k_norm`; where it runs projections as one,
        `stacked` says for each in which layer, and which of its outputs it is.
        """
        ...
