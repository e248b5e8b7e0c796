"""The MLP with a gate, and routed experts with one such MLP beside them."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import silu

from atom_patches.models.parts import ExpertsShape, Group, Parts


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


class SparseMlp(nn.Module):
    """Each row through the experts that its router chooses, and through a shared one behind a gate of its own.

    The router is whole on every rank: all ranks that hold parts of an expert choose alike. The output is a partial sum.
    """

    def __init__(self, layer: int, shape: ExpertsShape, shared: int, parts: Parts, *, prefix: str) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.experts = parts.experts(layer, shape, prefix=f"{prefix}.experts")
        self.shared_expert: GatedMlp | None = None
        if shared:
            self.shared_expert = GatedMlp(
                shape.hidden, shared, parts, group="shared_expert", prefix=f"{prefix}.shared_expert"
            )
            self.shared_expert_gate = nn.Linear(shape.hidden, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # First, because experts may use x for their results.
        shared = None
        if self.shared_expert is not None:
            shared = self.shared_expert(x) * self.shared_expert_gate(x).sigmoid()
        routed: Tensor = self.experts(x, self.gate(x))
        return routed if shared is None else routed + shared
