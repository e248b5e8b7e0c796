"""Whose product gives the scores of experts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from plain_parts import PlainParts
from torch import Tensor, nn

from atom_patches.models.mlp import Router
from atom_patches.models.parts import ExpertsShape
from atom_patches.models.products import Product


class Doubled(nn.Module):
    """A product that can be told from others, and has something of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return 2 * nn.functional.linear(x, weight)


@dataclass
class DoublingParts(PlainParts):
    asked: list[Tensor] = field(default_factory=list)

    def product(self, weight: Tensor) -> Product:
        self.asked.append(weight)
        return Doubled()


def router(parts: DoublingParts, *, biased: bool) -> Router:
    shape = ExpertsShape(6, 2, 8, 16, renormalise=True, biased=biased)
    return Router(shape, parts).bfloat16()


def test_scores_are_the_engine_s_product() -> None:
    parts, x = DoublingParts(), torch.randn(3, 8, dtype=torch.bfloat16)
    one = router(parts, biased=False)
    assert torch.equal(one(x), 2 * nn.functional.linear(x, one.weight))
    assert [weight is one.weight for weight in parts.asked] == [True]
    assert set(one.state_dict()) == {"weight"} and "product.counts" in dict(one.named_buffers())


def test_with_a_bias_they_are_in_float32() -> None:
    parts, x = DoublingParts(), torch.randn(3, 8, dtype=torch.bfloat16)
    one = router(parts, biased=True)
    assert torch.equal(one(x), nn.functional.linear(x.float(), one.weight.float()))
    assert not parts.asked
