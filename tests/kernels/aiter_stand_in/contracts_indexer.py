"""Contracts of AITER's sparse indexer: its key cache (HIP) and its logits (Triton)."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import FLOAT16, Arguments, contract

CACHE = "amd-aiter 0.1.7.post2.dev18 csrc/kernels/cache_kernels.cu"
VLLM = "vllm-project/vllm v0.20.2 vllm/v1/attention/ops/rocm_aiter_mla_sparse.py"
FP8 = torch.float8_e4m3fn  # of gfx950; gfx942 has another, with half the range
INF = float("inf")


@contract(
    "aiter.ops.cache:indexer_k_quant_and_cache",
    "k kv_cache slot_mapping quant_block_size scale_fmt",
    f"{CACHE}: indexer_k_quant_and_cache",
    "ROCm/aiter 15fae53ccda3 op_tests/test_indexer_k_quant_and_cache.py",
)
def indexer_k_quant_and_cache(a: Arguments) -> None:
    """The cache is addressed by its sizes, not by its strides, and k by its row length; eight threads of sixteen values
    find the scale of a block, so that a block is 128 values."""
    k = a.tensor("k", shape=(None, None), dtype=FLOAT16, layout="contiguous", align=16)
    tokens, size = k.shape
    a.require(tokens > 0, "no rows: an empty grid is launched")
    a.require(a.integer("quant_block_size") == 128, "a scale is found over 128 values")
    a.require(size == 128, "a token of several scales is not covered")
    cache = a.tensor("kv_cache", shape=(None, None, size + 4), dtype=(torch.uint8, FP8), layout="contiguous")
    slots = a.tensor("slot_mapping", shape=(tokens,), dtype=torch.int64, layout="contiguous")
    a.require(int(slots.max()) < cache.shape[0] * cache.shape[1], "a slot lies behind the cache")
    scale = k.float().abs().amax(1).clamp_min(1e-4) / torch.tensor(448.0)
    a.require(a.get("scale_fmt") in ("ue8m0", ""), f"scale_fmt {a.get('scale_fmt')!r} is neither ue8m0 nor empty")
    if a.get("scale_fmt") == "ue8m0":
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    values = (k.float() * (1.0 / scale)[:, None]).to(FP8).view(torch.uint8)  # times the reciprocal, as the kernel does
    pages = cache.view(torch.uint8).view(cache.shape[0], -1)
    block = cache.shape[1]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, place = pages[slot // block], slot % block
            page[place * size : (place + 1) * size] = values[token]
            page[block * size :].view(torch.float32)[place] = scale[token]


@contract(
    "aiter.ops.cache:cp_gather_indexer_k_quant_cache",
    "kv_cache dst_k dst_scale block_table cu_seq_lens",
    f"{CACHE}: cp_gather_indexer_k_quant_cache",
)
def cp_gather_indexer_k_quant_cache(a: Arguments) -> None:
    """A token behind the last sequence reads the block table of no sequence: there must be none."""
    k = a.tensor("dst_k", shape=(None, 128), dtype=(FP8, torch.uint8), layout="contiguous", align=16)
    tokens = k.shape[0]
    a.require(tokens > 0, "no rows: an empty grid is launched")
    scales = a.tensor("dst_scale", shape=(tokens, 4), dtype=torch.uint8, layout="contiguous")
    cache = a.tensor("kv_cache", shape=(None, None, 132), dtype=(torch.uint8, FP8), layout="rows")
    a.require(
        cache[0].is_contiguous() and cache.stride(0) % 16 == 0, "blocks must be dense, 16 bytes apart or a multiple"
    )
    bounds = a.tensor("cu_seq_lens", shape=(None,), dtype=torch.int32, layout="contiguous")
    seqs = bounds.shape[0] - 1
    table = a.tensor("block_table", shape=(seqs, None), dtype=torch.int32, layout="contiguous")
    a.require(int(bounds[0]) == 0 and int(bounds[-1]) == tokens, "some token belongs to no sequence")
    block = cache.shape[1]
    a.require(int(bounds.diff().max()) <= table.shape[1] * block, "the block table is too short")
    for i, (first, last) in enumerate(zip(bounds.tolist(), bounds[1:].tolist(), strict=False)):
        pages = table[i, : -(-(last - first) // block)]
        a.require(bool(((pages >= 0) & (pages < cache.shape[0])).all()), "block_table names a block that is not there")
        for token in range(first, last):
            page = cache.view(torch.uint8)[int(table[i, (token - first) // block])].reshape(-1)
            place = (token - first) % block
            k.view(torch.uint8)[token] = page[place * 128 : (place + 1) * 128]
            scales[token] = page[block * 128 + place * 4 :][:4]


def fp8_mqa_logits(a: Arguments) -> Tensor:
    q = a.tensor("Q", shape=(None, None, None), dtype=FP8, layout="strided")
    rows, heads, size = q.shape
    a.require(rows > 0, "no rows: an empty grid is launched")
    a.require(heads & (heads - 1) == 0 and size & (size - 1) == 0, "heads and head size must be powers of two")
    key = a.tensor("KV", shape=(None, size), dtype=FP8, layout="strided")
    scales = a.tensor("kv_scales", shape=(key.shape[0],), dtype=torch.float32, layout="contiguous")
    weights = a.tensor("weights", shape=(rows, heads), dtype=torch.float32, layout="strided")
    starts = a.tensor("cu_starts", shape=(rows,), dtype=torch.int32, layout="contiguous")
    ends = a.tensor("cu_ends", shape=(rows,), dtype=torch.int32, layout="contiguous")
    logits = torch.full((rows, -(-key.shape[0] // 256) * 256), -INF)[:, : key.shape[0]]
    for row in range(rows):
        seen = slice(max(0, int(starts[row])), min(key.shape[0], int(ends[row])))
        logits[row, seen] = _scores(q[row], key[seen], scales[seen], weights[row])
    return logits


def deepgemm_fp8_paged_mqa_logits(a: Arguments) -> None:
    """Pages of one token: a key and its scale side by side. `out_logits` is -inf beforehand."""
    q = a.tensor("q_fp8", shape=(None, None, None, 128), dtype=FP8, layout="rows")
    batch, drafts, heads, size = q.shape
    a.require(batch > 0, "no rows: an empty grid is launched")
    a.require(drafts == 1, "several query rows a sequence are not covered")
    name = "kv_cache" if "kv_cache" in a.values else "kv_cache_fp8"
    cache = a.tensor(name, shape=(None, 1, 1, size + 4), dtype=(torch.uint8, FP8), layout="rows", align=4)
    weights = a.tensor("weights", shape=(batch, heads), dtype=torch.float32, layout="rows")
    lengths = a.tensor("context_lens", shape=(batch,), dtype=torch.int32, layout="contiguous")
    places = a.tensor("kv_indices", shape=(batch, None), dtype=torch.int32, layout="contiguous")
    longest = a.integer("max_model_len")
    out = a.tensor("out_logits", shape=(batch, longest), dtype=torch.float32, layout="rows")
    a.require(bool((out == -INF).all()), "out_logits must be -inf")
    a.require(
        int(lengths.max()) <= min(longest, places.shape[1]), "a context is longer than its indices, or the logits"
    )
    for row, length in enumerate(lengths.tolist()):
        used = places[row, :length]
        a.require(bool(((used >= 0) & (used < cache.shape[0])).all()), "kv_indices names a token that is not there")
        rows = cache.view(torch.uint8)[places[row, :length].long(), 0, 0]
        key, scale = rows[:, :size].contiguous().view(FP8), rows[:, size:].contiguous().view(torch.float32)[:, 0]
        out[row, :length] = _scores(q[row, 0], key, scale, weights[row])


def _scores(q: Tensor, key: Tensor, scale: Tensor, weights: Tensor) -> Tensor:
    """q [H, D], key [S, D] -> [S]"""
    return (torch.relu(q.float() @ key.float().T) * weights[:, None]).sum(0) * scale


for _home in ("aiter.ops.triton", "aiter.ops.triton.attention"):
    contract(
        f"{_home}.fp8_mqa_logits:fp8_mqa_logits",
        "Q KV kv_scales weights cu_starts cu_ends",
        "amd-aiter 0.1.7.post2.dev18 aiter/ops/triton/fp8_mqa_logits.py",
        "ROCm/aiter 01d9c94bf6cb aiter/ops/triton/attention/fp8_mqa_logits.py",
        f"{VLLM}: rocm_fp8_mqa_logits",
    )(fp8_mqa_logits)
    contract(
        f"{_home}.pa_mqa_logits:deepgemm_fp8_paged_mqa_logits",
        "q_fp8 kv_cache kv_cache_fp8 weights out_logits context_lens kv_indices max_model_len",
        "amd-aiter 0.1.7.post2.dev18 aiter/ops/triton/pa_mqa_logits.py",
        "ROCm/aiter 004ac5df7dab aiter/ops/triton/attention/pa_mqa_logits.py",
        f"{VLLM}: rocm_fp8_paged_mqa_logits",
    )(deepgemm_fp8_paged_mqa_logits)
