"""The MLP with a gate, and routed experts with one such MLP beside them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from atom_patches.models.config import DecoderConfig
from atom_patches.models.parts import DeepseekParts, ExpertsShape, Group, Parts
from atom_patches.models.products import linear_in_float32


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x)); the output is a partial sum."""

    def __init__(self, hidden: int, intermediate: int, parts: Parts, *, group: Group, prefix: str) -> None:
        super().__init__()
        self.gate_up_proj = parts.column(
            hidden, (intermediate, intermediate), group=group, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = parts.row(intermediate, hidden, group=group, prefix=f"{prefix}.down_proj")

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=1)
        return self.down_proj(silu(gate) * up)


class Router(nn.Linear):
    """Scores of all experts; with a bias beside them, they are as exact as one product gives them, in float32."""

    def __init__(self, shape: ExpertsShape, parts: Parts) -> None:
        super().__init__(shape.hidden, shape.experts, bias=False)
        self.product = linear_in_float32 if shape.biased else parts.product(self.weight)
        self.e_score_correction_bias: nn.Parameter | None = None
        if shape.biased:
            self.e_score_correction_bias = nn.Parameter(torch.zeros(shape.experts, dtype=torch.float32))

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input, self.weight)


class SparseMlp(nn.Module):
    """Each row through the experts that its router chooses, and through a shared one, in some families behind a gate.

    The router is whole on every rank: all ranks that hold parts of an expert choose alike. The output is a partial sum.
    """

    def __init__(self, config: DecoderConfig, layer: int, parts: Parts, *, prefix: str) -> None:
        super().__init__()
        shape = config.experts
        assert shape is not None  # layers are sparse only in configurations with experts
        self.scale = config.routed_scale
        self.gate = Router(shape, parts)
        self.experts = _experts(layer, shape, self.gate, parts, prefix=f"{prefix}.experts")
        self.shared_expert: GatedMlp | None = None
        self.shared_gated = config.shared_gated
        if config.shared_intermediate:
            # As checkpoints call it: with several, which are one MLP, there is no gate.
            name = "shared_expert" if config.shared_gated else "shared_experts"
            self.shared_expert = GatedMlp(
                shape.hidden, config.shared_intermediate, parts, group="shared_expert", prefix=f"{prefix}.{name}"
            )
            if config.shared_gated:
                self.shared_expert_gate = nn.Linear(shape.hidden, 1, bias=False)
        self.taken_along = self._taken_along()

    def forward(self, x: Tensor) -> Tensor:
        # First, because experts may use x for their results.
        shared = None
        if self.shared_expert is not None and not self.taken_along:
            shared = self.shared_expert(x)
            if self.shared_gated:
                shared = shared * self.shared_expert_gate(x).sigmoid()
        routed: Tensor = self.experts(x, self.gate(x))
        if shared is None:
            return routed if self.scale == 1 else routed * self.scale
        return torch.add(shared, routed, alpha=self.scale)

    def _taken_along(self) -> bool:
        """Whether the routed experts' results contain the shared one's."""
        take_along = getattr(self.experts, "take_along", None)
        if take_along is None or self.shared_expert is None or not self.shared_gated:
            return False
        return take_along(self.shared_expert, self.shared_expert_gate)


def _experts(layer: int, shape: ExpertsShape, router: Router, parts: Parts, *, prefix: str) -> nn.Module:
    if router.e_score_correction_bias is None:
        return parts.experts(layer, shape, prefix=prefix)
    if not isinstance(parts, DeepseekParts):
        raise TypeError(f"{type(parts).__name__} has no experts that are chosen with a bias")
    return parts.biased_experts(layer, shape, router.e_score_correction_bias, prefix=prefix)
