"""What vLLM's experts are handed: no padding, which their alignment cannot count. The product itself needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from atom_patches.kernels.fused_moe import FUSED_MOE

binding = pytest.importorskip("atom_patches.vllm.kernels.fused_moe")


@pytest.mark.parametrize("ranks", [1, 2])
def test_padding_goes_to_an_expert_without_weight(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    def experts(
        x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, global_num_experts: int,
        expert_map: Tensor | None,
    ) -> Tensor:  # fmt: skip
        assert int(ids.min()) >= 0 and int(ids.max()) < global_num_experts
        return FUSED_MOE.reference(x, w13, w2, weights, ids, expert_map, None, None, None)

    monkeypatch.setattr(binding, "fused_experts", experts)
    generator = torch.Generator().manual_seed(0)
    x, w13, w2 = (torch.randn(shape, generator=generator) for shape in ((5, 16), (4, 16, 16), (4, 16, 8)))
    ids = torch.tensor([[0, 3], [-1, -1], [2, -1], [-1, 1], [1, 0]], dtype=torch.int32)
    where = None if ranks == 1 else torch.tensor([-1, 0, 1, 2, 3, -1], dtype=torch.int32)
    call: tuple[Any, ...] = (x, w13, w2, torch.rand(5, 2, generator=generator), ids, where, None, None, None)
    torch.testing.assert_close(binding.fused_moe(*call), FUSED_MOE.reference(*call))
