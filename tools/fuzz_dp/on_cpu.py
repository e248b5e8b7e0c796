"""What SGLang does between forward passes and around a draft by kernels for GPUs alone, in plain torch.

On a GPU nothing of this is used. Two things could run interpreted, and take more time than the rest of a step. A
draft's rows are the last of their request, each seeing those before it: for attention, an extension by as many rows.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def install() -> None:
    """Wrap the backend, in this process."""
    from sglang.kernels.ops.speculative import cache_locs
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache import allocation

    original = TorchNativeAttnBackend.forward_extend

    @functools.wraps(original)
    def forward_extend(
        self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **options: Any
    ) -> Any:  # fmt: skip
        if forward_batch.forward_mode.is_target_verify():
            forward_batch = as_extension(forward_batch)
        return original(self, q, k, v, layer, forward_batch, *args, **options)

    TorchNativeAttnBackend.forward_extend = forward_extend
    cache_locs.assign_extend_cache_locs_uniform_func = slots_of_drafts
    allocation.assign_req_to_token_pool_func = note_slots
    dp_attention.memcpy_triton = copy_rows


def slots_of_drafts(
    req_pool_indices: Any, req_to_token: Any, start_offset: Any, batch_size: int, draft_token_num: int, device: Any
) -> Any:
    """The cache slots of `draft_token_num` rows of each request, from its row `start_offset` on."""
    import torch

    places = start_offset[:, None] + torch.arange(draft_token_num, device=device)
    return req_to_token[req_pool_indices[:, None], places].flatten().long()


def note_slots(
    req_pool_indices: Any, req_to_token: Any, start_offset: Any, end_offset: Any, out_cache_loc: Any, batch_size: int
) -> None:
    """Write down the slots of each request's rows from `start_offset` to `end_offset`."""
    taken = 0
    for row, begin, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, begin:end] = out_cache_loc[taken : taken + end - begin]
        taken += end - begin


def copy_rows(dst: Any, src: Any, dim: int, offset: Any, sz: Any, offset_src: bool) -> None:
    """Copy `sz` rows, from or to row `offset`."""
    begin, count = int(offset), int(sz)
    if offset_src:
        dst[:count] = src[begin : begin + count]
    else:
        dst[begin : begin + count] = src[:count]


def as_extension(batch: Any) -> Any:
    """The batch with its drafts' rows as rows of prompts."""
    import torch

    seen = copy.copy(batch)
    drafted = batch.spec_info.draft_token_num
    seen.extend_prefix_lens = batch.seq_lens
    seen.extend_seq_lens = torch.full_like(batch.seq_lens, drafted)
    seen.seq_lens = batch.seq_lens + drafted
    return seen


@contextmanager
def cuda_is_the_cpu() -> Iterator[None]:
    """Within the block, zeros for "cuda" lie in main memory."""
    import torch

    original = torch.zeros

    def zeros(*args: Any, **options: Any) -> Any:
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        return original(*args, **options)

    torch.zeros = zeros
    try:
        yield
    finally:
        torch.zeros = original
