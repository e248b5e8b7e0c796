"""Grouped-query attention by AITER's batch prefill (Composable Kernel); never run on AMD hardware.

`mha_batch_prefill_func` takes the engines' block table together with the lengths, and returns the log-sum-exp head by
head. Its tests have pages of 1 (then without the page dimension), 16 and 1024 tokens. It writes nothing for sequences
without keys and for rows of no sequence; those rows are set here. The table as a list of pages, which it asks for as
well but does not read beside a block table, is the table's rows at full length.

Whether what lies outside a window, or behind a sequence's end in its last page, is read and multiplied by 0 is not
documented: a stale NaN there may reach a result, as with the engines' own kernels.

Called as in AITER's `op_tests/test_batch_prefill.py`; function and commit are in `call_site`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.aiter_binding import Function
from atom_patches.kernels.registry import Verdict, no

PREFILL = Function(
    "aiter.ops.mha:mha_batch_prefill_func",
    ("q", "k", "v", "cu_seqlens_q", "kv_indptr", "kv_page_indices", "max_seqlen_q", "max_seqlen_k"),
    ("softmax_scale", "logits_soft_cap", "causal", "window_size", "return_lse", "block_table", "seqlen_k"),
    call_site="ROCm/aiter 008eeedf2da6 op_tests/test_batch_prefill.py: run_ck",
)
PAGES = (1, 16, 1024)
HEAD_SIZES = (64, 128, 192, 256)


def supports_paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    causal: bool,
    window: int | None,
    soft_cap: float,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    query_positions: Tensor | None,
    padded: bool,
) -> Verdict:
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.dtype == key_cache.dtype == value_cache.dtype:
        return no(f"bound for one dtype of 16 bits, not queries of {q.dtype} with a cache of {key_cache.dtype}")
    if k_scale is not None or v_scale is not None:
        return no("bound without scales of keys and values")
    if query_positions is not None:
        return no("AITER's queries are the last of their sequence; positions cannot be given")
    if key_cache.shape[1] not in PAGES:
        return no(f"AITER's tests have pages of {', '.join(map(str, PAGES))} tokens, not {key_cache.shape[1]}")
    if q.shape[2] not in HEAD_SIZES or value_cache.shape[3] not in HEAD_SIZES:
        return no(f"AITER's head sizes are {HEAD_SIZES}, not {q.shape[2]} and {value_cache.shape[3]}")
    for name, cache in (("keys", key_cache), ("values", value_cache)):
        reason = _misplaced(cache)
        if reason:
            return no(f"AITER cannot read the {name}: {reason}")
    return PREFILL.verdict()


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    causal: bool,
    window: int | None,
    soft_cap: float,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    query_positions: Tensor | None,
    padded: bool,
) -> tuple[Tensor, Tensor]:
    rows, heads, _ = q.shape
    seqs, most = block_table.shape
    if not rows or not seqs or not max_seqlen_k:
        out = torch.zeros((rows, heads, value_cache.shape[3]), dtype=q.dtype, device=q.device)
        return out, torch.full((heads, rows), -torch.inf, device=q.device).mT
    paged = key_cache.shape[1] > 1
    table = block_table.to(torch.int32).contiguous()
    bounds, lengths = cu_seqlens_q.to(torch.int32).contiguous(), seq_lens_k.to(torch.int32).contiguous()
    out, lse = PREFILL(
        q.contiguous(),
        key_cache if paged else key_cache[:, 0],
        value_cache if paged else value_cache[:, 0],
        bounds,
        torch.arange(0, (seqs + 1) * most, most, dtype=torch.int32, device=q.device)
        if most
        else torch.zeros_like(bounds),
        table.flatten(),
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=scale,
        logits_soft_cap=soft_cap,
        causal=causal,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        return_lse=True,
        block_table=table,
        seqlen_k=lengths,
    )
    row = torch.arange(rows, dtype=torch.int32, device=q.device)
    owner = (torch.searchsorted(bounds, row, right=True) - 1).clamp_(max=seqs - 1)
    visible = lengths[owner]
    if causal:
        visible = visible - (bounds[owner + 1] - 1 - row)
    blind = (visible <= 0) | (row >= bounds[-1])
    return out.masked_fill(blind[:, None, None], 0.0), lse.masked_fill(blind, -torch.inf).mT


def _misplaced(cache: Tensor) -> str:
    """What of the cache's strides AITER refuses: it reads 16 bytes at once, and heads lie inside a token."""
    page, token, head, value = cache.stride()
    step = 16 // cache.element_size()
    if value != 1:
        return "the values of a head are not dense"
    if cache.data_ptr() % 16 or any(stride % step for stride in (page, token, head)):
        return "heads, tokens and pages must lie 16 bytes apart, or a multiple"
    if head < cache.shape[3] or token < cache.shape[2] * head or page < cache.shape[1] * token:
        return "heads must lie inside a token, and tokens inside a page"
    return ""
