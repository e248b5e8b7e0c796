"""A GatedDeltaNet layer: projections, the recurrence over a step's sequences, the gated norm, and out."""

from __future__ import annotations

from torch import Tensor, nn

from atom_patches.models.config import DecoderConfig
from atom_patches.models.gdn_core import GdnWeights, run_sequences
from atom_patches.models.norms import GatedRmsNorm
from atom_patches.models.parts import Parts
from atom_patches.runtime.context import current_gdn


class GatedDeltaNet(nn.Module):
    """One rank's heads; the output is a partial sum.

    Which rows belong to which sequence, and where states lie, it takes from the recurrent metadata that are bound.
    """

    def __init__(self, config: DecoderConfig, layer: int, parts: Parts, *, prefix: str) -> None:
        super().__init__()
        self.layer = layer
        self.heads = parts.local_heads(config.value_heads)
        self.value_size = config.value_size
        self.values = self.heads * config.value_size
        self.keys = parts.local_heads(config.key_heads) * config.key_size
        keys, values = config.keys, config.values
        self.in_proj_qkvz = parts.column(
            config.hidden, (keys, keys, values, values), group="attention", prefix=f"{prefix}.in_proj_qkvz"
        )
        self.in_proj_ba = parts.column(
            config.hidden,
            (config.value_heads, config.value_heads),
            group="attention",
            prefix=f"{prefix}.in_proj_ba",
        )
        # A filter for each channel, cut over ranks like the projection's channels; it is never called as a module.
        self.conv1d = parts.column(
            config.taps, (keys, keys, values), group="attention", prefix=f"{prefix}.conv1d", quantised=False
        )
        self.A_log = parts.head_parameter(config.value_heads)
        self.dt_bias = parts.head_parameter(config.value_heads)
        self.norm = GatedRmsNorm(config.value_size, config.eps, config.output_gate)
        self.recurrence = parts.recurrence(layer, self._run, self._weights)
        self.out_proj = parts.row(values, config.hidden, group="attention", prefix=f"{prefix}.out_proj")

    def forward(self, hidden: Tensor) -> Tensor:
        mixed, gate = self.in_proj_qkvz(hidden).split([2 * self.keys + self.values, self.values], dim=1)
        b, a = self.in_proj_ba(hidden).split(self.heads, dim=1)
        output = self.norm(self.recurrence(mixed, a, b), gate.unflatten(1, (self.heads, self.value_size)))
        return self.out_proj(output.flatten(1))

    def _run(self, mixed: Tensor, a: Tensor, b: Tensor) -> Tensor:
        binding = current_gdn()
        return run_sequences(mixed, a, b, self._weights(), binding, binding.states(self.layer))

    def _weights(self) -> GdnWeights:
        filters = self.conv1d.weight
        assert isinstance(filters, Tensor)
        return GdnWeights(filters, self.A_log, self.dt_bias)
