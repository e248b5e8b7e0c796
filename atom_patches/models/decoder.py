"""A decoder: its layers, and what goes in and out of the part of them that one rank runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from torch import Tensor, nn

from atom_patches.models.attention import Attention
from atom_patches.models.config import RECURRENT, DecoderConfig
from atom_patches.models.gated_delta_net import GatedDeltaNet
from atom_patches.models.latent_attention import LatentAttention
from atom_patches.models.mlp import GatedMlp, SparseMlp
from atom_patches.models.norms import RmsNorm
from atom_patches.models.parts import LayerPlace, Parts
from atom_patches.models.weights import WeightPiece, map_weights


class Carried(NamedTuple):
    """What one stage of layers hands to the next: the last layer's output, and the residual stream before it.

    The stream is None if an exchange added it already.
    """

    hidden: Tensor
    residual: Tensor | None


class DecoderOutput(NamedTuple):
    """What a stage of layers leaves.

    Attributes:
        hidden: `[rows, hidden]`, normed on the last stage.
        residual: what belongs to `hidden` for the next stage, as in `Carried`; None on the last.
        captured: the streams that were asked for, in the order of layers.
    """

    hidden: Tensor
    residual: Tensor | None
    captured: tuple[Tensor, ...]


class DecoderLayer(nn.Module):
    """Attention or recurrence, then an MLP or experts; names are those of the checkpoint."""

    def __init__(self, config: DecoderConfig, layer: int, parts: Parts, rotary: nn.Module, *, prefix: str) -> None:
        super().__init__()
        self.recurrent = config.kinds[layer] == RECURRENT
        if self.recurrent:
            self.linear_attn = GatedDeltaNet(config, layer, parts, prefix=f"{prefix}.linear_attn")
        else:
            kind = Attention if config.latent is None else LatentAttention
            self.self_attn = kind(config, layer, parts, rotary, prefix=f"{prefix}.self_attn")
        self.mlp: nn.Module
        if config.sparse[layer]:
            self.mlp = SparseMlp(config, layer, parts, prefix=f"{prefix}.mlp")
        else:
            self.mlp = GatedMlp(config.hidden, config.intermediate, parts, group="mlp", prefix=f"{prefix}.mlp")
        self.input_layernorm = RmsNorm(config.hidden, config.eps, gemma=config.gemma)
        self.post_attention_layernorm = RmsNorm(config.hidden, config.eps, gemma=config.gemma)
        self.exchange = parts.exchange(_place(config, layer), self.input_layernorm, self.post_attention_layernorm)

    def forward(
        self, positions: Tensor, hidden: Tensor, residual: Tensor | None, captured: list[Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's output and the residual stream before it; `captured` takes the stream that comes in."""
        hidden, stream = self.exchange.before_attention(hidden, residual)
        if captured is not None:
            captured.append(self.exchange.capture(stream))
        partial = self.linear_attn(hidden) if self.recurrent else self.self_attn(positions, hidden)
        hidden, stream = self.exchange.before_mlp(partial, stream)
        return self.exchange.after_mlp(self.mlp(hidden), stream)


class Decoder(nn.Module):
    """The layers of one stage, with the embedding on the first and the final norm on the last."""

    def __init__(self, config: DecoderConfig, parts: Parts, *, prefix: str = "model") -> None:
        super().__init__()
        self.config = config
        self.stage = parts.stage(config.layers)
        rotary = parts.rotary(config.rotary)
        if self.stage.first:
            self.embed_tokens = parts.embedding(config.vocabulary, config.hidden, prefix=f"{prefix}.embed_tokens")
        self.layers = nn.ModuleDict(
            {
                str(layer): DecoderLayer(config, layer, parts, rotary, prefix=f"{prefix}.layers.{layer}")
                for layer in range(self.stage.start, self.stage.end)
            }
        )
        if self.stage.last:
            self.norm = RmsNorm(config.hidden, config.eps, gemma=config.gemma)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        *,
        input_embeds: Tensor | None = None,
        carried: Carried | None = None,
        deepstack: Tensor | None = None,
        capture: Collection[int] = (),
    ) -> DecoderOutput:
        """Run this stage's layers.

        Args:
            input_ids: `[rows]`; not read if there are embeddings, nor on later stages.
            positions: `[rows]`, or `[3, rows]`.
            input_embeds: `[rows, hidden]`.
            carried: what the stage before left; None on the first.
            deepstack: `[rows, hidden * n]`, what is added to the outputs of the first n layers.
            capture: layers whose incoming stream is reported; the number of layers stands for the last one's outgoing.

        Raises:
            ValueError: an input that this stage needs is missing.
        """
        hidden, residual = self._enter(input_ids, input_embeds, carried)
        captured: list[Tensor] = []
        for name, layer in self.layers.items():
            index = int(name)
            hidden, residual = layer(positions, hidden, residual, captured if index in capture else None)
            added = _deepstack_of(deepstack, index, self.config.hidden)
            if added is not None:
                hidden = hidden + added
        if not self.stage.last:
            return DecoderOutput(hidden, residual, tuple(captured))
        if residual is None:
            hidden, stream = self.norm.alone(hidden), hidden
        else:
            hidden, stream = self.norm.of_sum(hidden, residual)
        if self.config.layers in capture:
            captured.append(stream)
        return DecoderOutput(hidden, None, tuple(captured))

    def map_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[WeightPiece]:
        """Where the tensors of a checkpoint belong in this stage."""
        return map_weights(weights, self.config, self.stage)

    def _enter(
        self, input_ids: Tensor | None, input_embeds: Tensor | None, carried: Carried | None
    ) -> tuple[Tensor, Tensor | None]:
        if not self.stage.first:
            if carried is None:
                raise ValueError("a stage behind the first needs what the stage before it left")
            return carried
        if input_embeds is not None:
            return input_embeds, None
        if input_ids is None:
            raise ValueError("the first stage needs token ids or embeddings")
        return self.embed_tokens(input_ids), None


def _place(config: DecoderConfig, layer: int) -> LayerPlace:
    sparse = config.sparse
    return LayerPlace(
        index=layer,
        layers=config.layers,
        sparse=sparse[layer],
        previous_sparse=sparse[max(layer - 1, 0)],
        next_sparse=sparse[min(layer + 1, config.layers - 1)],
    )


def _deepstack_of(deepstack: Tensor | None, layer: int, hidden: int) -> Tensor | None:
    """What is added behind a layer, `[rows, hidden]`."""
    if deepstack is None or not deepstack.numel() or (layer + 1) * hidden > deepstack.shape[1]:
        return None
    return deepstack[:, layer * hidden : (layer + 1) * hidden]
