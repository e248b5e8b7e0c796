"""Attention to latents over SGLang's cache of them.

Each backend of SGLang wants the turned part of queries and keys beside the rest, or behind it. All take queries in the
space of the latents, for prefills too. A rank without requests gets zeros, and no cache is touched.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
from sglang.srt.runtime_context import get_server_args
from torch import Tensor, nn

from atom_patches.models.parts import LatentShape, RotaryShape
from atom_patches.sglang.adapters.current import current_batch
from atom_patches.sglang.adapters.server_args import attention_backends


class LatentPagedAttention(RadixAttention):
    """One latent and one turned key a token, for all heads of this rank."""

    def __init__(self, layer: int, shape: LatentShape, *, quant_config: Any, prefix: str) -> None:
        super().__init__(
            shape.heads, shape.latent + shape.rope, shape.scale, 1, layer,
            v_head_dim=shape.latent, quant_config=quant_config, prefix=prefix,
        )  # fmt: skip

    def forward(
        self, queries: Tensor, turned: Tensor, latents: Tensor, keys: Tensor, selected: Tensor | None
    ) -> Tensor:
        batch = current_batch()
        shape = queries.shape
        if batch.forward_mode.is_idle():
            return queries.new_zeros(shape)
        latents, keys = latents.unsqueeze(1), keys.unsqueeze(1)
        more: dict[str, Any] = {} if selected is None else {"topk_indices": selected}
        if _name_of_backend(batch.forward_mode) in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
            queries = queries.contiguous()
            output = super().forward(queries, latents, latents, batch, q_rope=turned, k_rope=keys, **more)
        else:
            whole, key = torch.cat([queries, turned], dim=-1), torch.cat([latents, keys], dim=-1)
            output = super().forward(whole, key, latents, batch, **more)
        return output.view(shape)


class ByHead(nn.Module):
    """SGLang's rotation of neighbours, which wants heads apart."""

    def __init__(self, rotary: nn.Module, size: int) -> None:
        super().__init__()
        self.rotary = rotary
        self.size = size

    def forward(self, positions: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        by_head = queries.unflatten(1, (-1, self.size)), keys.unflatten(1, (-1, self.size))
        queries, keys = self.rotary(positions, *by_head)
        return queries.flatten(1), keys.flatten(1)


def latent_scaling(shape: RotaryShape) -> dict[str, Any] | None:
    """SGLang's name for yarn as DeepSeek means it."""
    return None if shape.scaling is None else {**shape.scaling, "rope_type": "deepseek_yarn"}


def _name_of_backend(mode: Any) -> str:
    """Of the backend that runs steps of this mode, which SGLang may have named by runner."""
    backend = get_attn_backend()
    prefill, decode = attention_backends(get_server_args())
    decodes = mode.is_decode_or_idle()
    given = backend.decode_attention_backend_str if decodes else backend.prefill_attention_backend_str
    return given or (decode if decodes else prefill)
