"""Rotary positions with vLLM's tables of angles: its own operation, or one kernel with the norms before it."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.rotary_embedding import get_rope

from atom_patches.core import settings
from atom_patches.kernels.qk_norm_rope_cache import qk_norm_rope_cache
from atom_patches.models.norms import RmsNorm
from atom_patches.models.parts import RotaryShape


def vllm_rotary(shape: RotaryShape, *, latent: bool) -> nn.Module:
    """vLLM's layer; of attention to latents, which means another yarn."""
    said: dict[str, Any] = {"rope_type": "default", **(shape.scaling or {}), "rope_theta": shape.theta}
    said["rope_dim"] = shape.rotary_size
    if shape.sections is not None:
        said |= {"mrope_section": list(shape.sections), "mrope_interleaved": True}
    if latent and shape.scaling is not None:
        said["rope_type"] = "deepseek_yarn"
    return get_rope(shape.head_size, shape.max_position, is_neox_style=not shape.interleaved, rope_parameters=said)


class Rotary(nn.Module):
    """Turns queries and keys."""

    def __init__(self, shape: RotaryShape) -> None:
        super().__init__()
        self.shape = shape
        self.rope = vllm_rotary(shape, latent=shape.interleaved)
        self.prepares = "qk_rope" in settings.fusions()

    def forward(self, positions: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        if not self.shape.interleaved:
            return self.rope(positions, queries, keys)
        by_head = [x.unflatten(1, (-1, self.shape.head_size)) for x in (queries, keys)]  # as DeepSeek's yarn wants them
        queries, keys = self.rope(positions, *by_head)
        return queries.flatten(1), keys.flatten(1)

    def prepare(
        self, qkv: Tensor, positions: Tensor, heads: tuple[int, int], norms: tuple[RmsNorm, RmsNorm] | None, gated: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """From the projection to queries, keys, values and the gate, all `[rows, heads, size]`."""
        return qk_norm_rope_cache(
            qkv, positions, self.table, gated=gated, mrope_interleaved=self.shape.sections is not None,
            **self.arguments(heads, norms),
        )  # fmt: skip

    @property
    def table(self) -> Tensor:
        """Of cosines and sines, `[positions, rotary size]`."""
        table: Any = self.rope.cos_sin_cache
        return table

    def arguments(self, heads: tuple[int, int], norms: tuple[RmsNorm, RmsNorm] | None) -> dict[str, Any]:
        """What `qk_norm_rope_cache` is told of a layer with so many heads of queries and of keys."""
        said: dict[str, Any] = {"num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim": self.shape.head_size}
        said["mrope_section"] = None if self.shape.sections is None else list(self.shape.sections)
        if norms is not None:
            of_queries, of_keys = norms
            said |= {"q_weight": of_queries.weight, "k_weight": of_keys.weight}
            said |= {"eps": of_queries.variance_epsilon, "gemma": of_queries.gemma}
        return said
