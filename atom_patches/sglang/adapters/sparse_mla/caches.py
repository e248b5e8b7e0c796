"""SGLang's pool of latents and index keys, one layer at a time, in pages as the kernels read them."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool


def latent_cache(pool: DSATokenToKVPool, layer: int) -> Tensor:
    """[pages, page size, row]: latents and rope values, in the format that the pool's row size tells."""
    tokens = pool.get_key_buffer(layer)
    if tokens.element_size() == 1:
        tokens = tokens.view(torch.uint8)  # whatever FP8 SGLang calls it by: its bytes are written and read here alone
    pages = tokens.shape[0] // pool.page_size
    return tokens[: pages * pool.page_size].view(pages, pool.page_size, tokens.shape[-1])


def index_cache(pool: DSATokenToKVPool, layer: int) -> Tensor:
    """[pages, page size, head size + 4] bytes: a page's keys, then their scales."""
    pages = pool.get_index_k_with_scale_buffer(layer)
    return pages.view(pages.shape[0], pool.page_size, -1)
