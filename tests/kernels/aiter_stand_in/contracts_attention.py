"""Contracts of AITER's attention over paged caches: grouped queries (Composable Kernel) and latents (assembly)."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import FLOAT16, Arguments, contract

PREFILL = "ROCm/aiter 0d7f6fb904f8 csrc/py_itfs_ck/mha_batch_prefill_kernels.cu"
PREFILL_TEST = "ROCm/aiter 008eeedf2da6 op_tests/test_batch_prefill.py"
INF = float("inf")


@contract(
    "aiter.ops.mha:mha_batch_prefill_func",
    "q k v cu_seqlens_q kv_indptr kv_page_indices max_seqlen_q max_seqlen_k softmax_scale logits_soft_cap causal "
    "window_size return_lse block_table seqlen_k",
    PREFILL,
    PREFILL_TEST,
)
def mha_batch_prefill_func(a: Arguments) -> tuple[Tensor, Tensor]:
    """Pages of 1 (three dimensions), 16 or 1024 tokens; what has no keys, and rows of no sequence, stay unwritten; a
    block table needs the lengths beside it. Every stride is a multiple of 16 bytes."""
    q = a.tensor("q", shape=(None, None, None), dtype=FLOAT16, layout="rows", align=16)
    rows, heads, size = q.shape
    paged = isinstance(a.get("k"), Tensor) and a.get("k").dim() == 4
    shape = (None, None, None, size) if paged else (None, None, size)
    k = a.tensor("k", shape=shape, dtype=q.dtype, layout="rows", align=16)
    v = a.tensor("v", shape=(*k.shape[:-1], None), dtype=q.dtype, layout="rows", align=16)
    a.require(size % 8 == 0 and v.shape[-1] % 8 == 0, "head sizes must be multiples of 8")
    a.require(size <= 256 and v.shape[-1] <= 256, "head sizes are at most 256")
    for name, cache in (("k", k), ("v", v)):
        kv_heads = cache.shape[-2]
        a.require(cache.stride(-2) >= cache.shape[-1] or kv_heads == 1, f"{name}: heads overlap")
        a.require(
            cache.stride(-3) >= kv_heads * cache.stride(-2),
            f"{name}: heads lie outside tokens, which needs another layout",
        )
        a.require(
            not paged or cache.stride(0) >= cache.shape[1] * cache.stride(1) or cache.shape[0] == 1,
            f"{name}: pages overlap",
        )
    if not paged:
        k, v = k[:, None], v[:, None]
    page, kv_heads = k.shape[1], k.shape[2]
    a.require(page in (1, 16, 1024), f"pages of {page} tokens have no kernel in the tests")
    a.require(paged == (page > 1), "pages of one token have three dimensions")
    a.require(heads % kv_heads == 0, "query heads do not divide among the key heads")
    starts = a.tensor("cu_seqlens_q", shape=(None,), dtype=torch.int32, layout="contiguous")
    seqs = starts.shape[0] - 1
    a.require(seqs > 0, "batch size must be positive")
    a.tensor("kv_indptr", shape=(seqs + 1,), dtype=torch.int32, layout="contiguous")
    a.tensor("kv_page_indices", shape=(None,), dtype=torch.int32, layout="contiguous")
    table = a.tensor("block_table", shape=(seqs, None), dtype=torch.int32, layout="rows")
    lengths = a.tensor("seqlen_k", shape=(seqs,), dtype=torch.int32, layout="contiguous")
    longest_q, longest_k = a.integer("max_seqlen_q"), a.integer("max_seqlen_k")
    a.require(longest_q >= int(starts.diff().max()), "max_seqlen_q is less than a length")
    a.require(longest_k >= int(lengths.max()), "max_seqlen_k is less than a length")
    window = a.get("window_size")
    a.require(isinstance(window, tuple) and len(window) in (2, 3), "window_size must be (left, right)")
    a.require(a.get("return_lse") is True, "a call without the log-sum-exp is not covered")
    causal = a.flag("causal")
    a.require(causal and window[1] in (0, -1) or not causal and tuple(window[:2]) == (-1, -1), "a window needs causal")
    scale, cap = a.number("softmax_scale"), a.number("logits_soft_cap")
    out = torch.empty(rows, heads, v.shape[-1], dtype=q.dtype)
    lse = torch.empty(heads, rows, dtype=torch.float32)
    bounds = starts.tolist()
    for i, keys in enumerate(lengths.tolist()):
        mine = slice(bounds[i], bounds[i + 1])
        if keys == 0 or mine.stop == mine.start:
            continue
        place = torch.arange(keys)
        pages = table[i, place // page].long()
        a.require(bool((pages < k.shape[0]).all()), "block_table names a page that is not there")
        key, value = (c[pages, place % page].float().repeat_interleave(heads // kv_heads, 1) for c in (k, v))
        score = torch.einsum("qhd,khd->hqk", q[mine].float(), key) * scale
        if cap > 0:
            score = cap * torch.tanh(score / cap)
        if causal:
            at = torch.arange(keys - (mine.stop - mine.start), keys)[:, None]
            hidden = place[None] > at
            if window[0] >= 0:
                hidden |= place[None] < at - window[0]
            score = score.masked_fill(hidden, -INF)
        lse[:, mine] = score.logsumexp(-1)
        weight = torch.softmax(score, -1).nan_to_num(0.0)
        out[mine] = torch.einsum("hqk,khd->qhd", weight, value).to(q.dtype)
    return out, lse


MLA = "ROCm/aiter 000edf30368d aiter/mla.py: mla_decode_fwd"
MLA_ASM = "amd-aiter 0.1.7.post2.dev18 csrc/py_itfs_cu/asm_mla.cu: mla_decode_stage1_asm_fwd"


@contract(
    "aiter.mla:mla_decode_fwd",
    "q kv_buffer o qo_indptr kv_indptr kv_indices kv_last_page_lens max_seqlen_q sm_scale return_lse",
    MLA,
    MLA_ASM,
    "vllm-project/vllm v0.20.2 vllm/v1/attention/backends/mla/rocm_aiter_mla.py: AiterMLAMetadataBuilder._build_decode",
    "vllm-project/vllm v0.20.2 vllm/v1/attention/backends/mla/rocm_aiter_mla_sparse.py: _forward_bf16_kv",
)
def mla_decode_fwd(a: Arguments) -> tuple[Tensor, Tensor | None]:
    """One query row a sequence, and pages of one token, which is how engines call it; bfloat16 of 16 or 128 heads, 576
    values a key of which 512 are the value: those have kernels. A sequence without tokens divides 0 by 0."""
    q = a.tensor("q", shape=(None, None, 576), dtype=torch.bfloat16, layout="contiguous")
    rows, heads = q.shape[:2]
    a.require(rows > 0, "no rows: an empty grid is launched")
    a.require(heads in (16, 128), f"there is no kernel for {heads} heads")
    buffer = a.tensor("kv_buffer", shape=(None, 1, 1, 576), dtype=torch.bfloat16, layout="contiguous")
    o = a.tensor("o", shape=(rows, heads, 512), dtype=torch.bfloat16, layout="contiguous")
    demands = {"dtype": torch.int32, "layout": "contiguous"}
    a.require(a.integer("max_seqlen_q") == 1, "more than one query row a sequence is not covered")
    queries = a.tensor("qo_indptr", shape=(rows + 1,), **demands)
    a.require(torch.equal(queries, torch.arange(rows + 1, dtype=torch.int32)), "a sequence without its query row")
    bounds = a.tensor("kv_indptr", shape=(rows + 1,), **demands)
    places = a.tensor("kv_indices", shape=(None,), **demands)
    last = a.tensor("kv_last_page_lens", shape=(rows,), **demands)
    a.require(bool((last == 1).all()), "a page of one token holds one token")
    a.require(int(bounds[0]) == 0 and bool((bounds.diff() >= 0).all()), "kv_indptr does not count from 0 upwards")
    a.require(int(bounds[-1]) <= places.shape[0], "kv_indptr counts more than kv_indices holds")
    used = places[: int(bounds[-1])]
    a.require(bool(((used >= 0) & (used < buffer.shape[0])).all()), "kv_indices names a token that is not there")
    lse = torch.empty(rows, heads, dtype=torch.float32)
    for row in range(rows):
        keys = buffer[places[bounds[row] : bounds[row + 1]].long(), 0, 0].float()
        score = q[row].float() @ keys.T * a.number("sm_scale")
        lse[row] = score.logsumexp(-1) if len(keys) else float("nan")
        o[row] = (torch.softmax(score, -1) @ keys[:, :512]).to(o.dtype) if len(keys) else float("nan")
    return torch.empty(0), lse if a.flag("return_lse") else None


@contract(
    "aiter.ops.cache:concat_and_cache_mla",
    "kv_c k_pe kv_cache slot_mapping kv_cache_dtype scale",
    "amd-aiter 0.1.7.post2.dev18 csrc/kernels/cache_kernels.cu: concat_and_cache_mla",
    "ROCm/aiter 0590d9a96e6d op_tests/test_concat_cache_mla.py",
)
def concat_and_cache_mla(a: Arguments) -> None:
    """One block of threads a token, which returns if its slot is negative; strides of rows and blocks are read."""
    slots = a.tensor("slot_mapping", shape=(None,), dtype=torch.int64, layout="contiguous")
    tokens = slots.shape[0]
    a.require(tokens > 0, "no rows: an empty grid is launched")
    latent = a.tensor("kv_c", shape=(None, None), dtype=FLOAT16, layout="rows", align=16)
    rope = a.tensor("k_pe", shape=(None, None), dtype=latent.dtype, layout="rows", align=16)
    a.require(latent.shape[0] >= tokens <= rope.shape[0], "fewer rows than slots")
    a.require(latent.shape[1] % 8 == rope.shape[1] % 8 == 0, "sizes must be multiples of 8 for the vectorised kernel")
    width = latent.shape[1] + rope.shape[1]
    a.require(a.get("kv_cache_dtype") == "auto", "a cache of another dtype is not covered")
    cache = a.tensor("kv_cache", shape=(None, None, width), dtype=latent.dtype, layout="rows", align=16)
    a.tensor("scale", shape=(1,), dtype=torch.float32, layout="contiguous")
    a.require(int(slots.max()) < cache.shape[0] * cache.shape[1], "a slot lies behind the cache")
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            cache[slot // cache.shape[1], slot % cache.shape[1]] = torch.cat([latent[token], rope[token]])
