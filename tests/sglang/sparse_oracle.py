"""Transformers' DeepSeek-V3.2 with the roundings of a served one, in plain torch; nothing here is the overlay's.

Transformers computes the indexer's scores in full precision. A server keeps its keys in FP8, so a token can be picked
that stands within rounding of the last place. Here keys and queries are rounded as the model's authors describe it:
turned by a Hadamard matrix, then E4M3 with a power of two as each row's scale. Sources: DeepSeek-AI, "DeepSeek-V3.2",
2025, section 2.1, and the published inference code's description of its index keys.

The KV cache is rounded, too, each token's latent and rotated key once, to what CACHES names.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0


def _bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _groups_of_128(x: Tensor) -> Tensor:
    """E4M3 with a float32 scale for every 128 values."""
    groups = x.unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / LARGEST
    return ((groups / scale).to(E4M3).float() * scale).flatten(-2)


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST, LARGEST).to(E4M3).float()


#: By the cache's name how it rounds latents and rotated keys.
CACHES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "bfloat16": (_bfloat16, _bfloat16),
    "packed": (_groups_of_128, _bfloat16),
    "scaled": (_e4m3, _e4m3),
}


@functools.cache
def hadamard(size: int) -> Tensor:
    """The orthogonal matrix of Sylvester's construction."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def index_rounded(x: Tensor) -> Tensor:
    """What is left of the indexer's keys or queries [..., D]."""
    x = x.float() @ hadamard(x.shape[-1])
    mantissa, exponent = torch.frexp(x.abs().amax(-1, keepdim=True).clamp_min(1e-4) / LARGEST)
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    return (x / scale).to(E4M3).float() * scale


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first values of x [T, any, D] turned, half against half; cos and sin [T, R]."""
    size = cos.shape[-1]
    first, second, rest = x.split([size // 2, size // 2, x.shape[-1] - size], -1)
    c, s = (half[:, None, : size // 2] for half in (cos, sin))
    return torch.cat([first * c - second * s, second * c + first * s, rest], -1)


def _query_and_key(indexer: Any, hidden: Tensor, residual: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens' own, turned: [T, H, D] and [T, D]."""
    query = indexer.wq_b(residual).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    key = indexer.k_norm(indexer.wk(hidden))
    return _rotated(query, cos, sin), _rotated(key[:, None], cos, sin)[:, 0]


def _scores(indexer: Any, hidden: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """What every query of one sequence scores all of its tokens' keys: [T, tokens]."""
    agreement = torch.einsum("thd,sd->ths", index_rounded(query), index_rounded(key)).relu()
    weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float()
    return torch.einsum("th,ths->ts", weights, agreement) * (indexer.n_heads * indexer.head_dim) ** -0.5


class Selection:
    """The forward pass of one layer's indexer, for one sequence."""

    def __init__(self, indexer: Any) -> None:
        self.indexer = indexer

    def __call__(
        self, hidden: Tensor, residual: Tensor, rotation: tuple[Tensor, Tensor], mask: Any, positions: Tensor,
        past_key_values: Any = None,
    ) -> Tensor:  # fmt: skip
        [hidden], [residual], [cos], [sin], [rows] = hidden, residual, *rotation, positions
        query, key = _query_and_key(self.indexer, hidden, residual, cos, sin)
        if past_key_values is not None:
            [key] = past_key_values.update_indexer(key[None], self.indexer.layer_idx)
        found = _scores(self.indexer, hidden, query, key)
        later = torch.arange(found.shape[1]) > rows[:, None]
        ranked = found.masked_fill(later, -math.inf).sort(dim=-1, descending=True, stable=True)
        return ranked.indices[None, :, : self.indexer.index_topk].int()


@contextlib.contextmanager
def served(cache: str, *models: Any) -> Iterator[None]:
    """Within, `models` round as a server with that KV cache does; those without an indexer stay as they are."""
    sparse = [model for model in models if model is not None and hasattr(model.config, "index_topk")]
    if not sparse:
        yield
        return
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as modeling

    latent, rotated = CACHES[cache]
    rotate = modeling.apply_rotary_pos_emb_interleave

    def rounding(*args: Any, **more: Any) -> tuple[Tensor, Tensor]:
        query, key = rotate(*args, **more)
        return query, rotated(key.float()).to(key.dtype)

    for layer in (layer for model in sparse for layer in model.model.layers):
        attention = layer.self_attn
        attention.kv_a_layernorm.register_forward_hook(lambda module, args, x: latent(x.float()).to(x.dtype))
        attention.indexer.forward = Selection(attention.indexer)
    modeling.apply_rotary_pos_emb_interleave = rounding
    try:
        yield
    finally:
        modeling.apply_rotary_pos_emb_interleave = rotate
