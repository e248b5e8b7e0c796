"""The sparse indexer by AITER; never run on AMD hardware.

Bound are the key cache and the logits, where AITER's FP8 is OCP E4M3 (not on gfx942). Two things are not:
`top_k_per_row_*` takes whatever lies in a row's range, ours never takes -inf or NaN; and nothing there turns positions
into places of the cache.

Keys are written with scales that are powers of two only: AITER multiplies by the reciprocal of a scale, which of others
rounds to another value now and then. A token behind the last request would read the block table of none, so the
surplus is made a request of its own. The paged logits take pages of one token, where a key and its scale are
neighbours, and one query row a request: the request's row of the block table is copied for every query.

Called as in AITER's `op_tests/test_indexer_k_quant_and_cache.py`, AITER's `csrc/kernels/cache_kernels.cu`, AITER's
`aiter/ops/triton/attention/pa_mqa_logits.py`, AITER's `aiter/ops/triton/pa_mqa_logits.py` and vLLM's
`vllm/v1/attention/ops/rocm_aiter_mla_sparse.py`; function and commit are in `call_site`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from atom_patches.kernels.aiter_binding import Function, first, ocp_e4m3
from atom_patches.kernels.registry import YES, Verdict, no

from .reference import empty_logits

_VLLM = "vllm-project/vllm v0.20.2 vllm/v1/attention/ops/rocm_aiter_mla_sparse.py"
WRITE = Function(
    "aiter.ops.cache:indexer_k_quant_and_cache",
    ("k", "kv_cache", "slot_mapping", "quant_block_size", "scale_fmt"),
    call_site="ROCm/aiter 15fae53ccda3 op_tests/test_indexer_k_quant_and_cache.py: test_indexer_k_quant_and_cache",
)
GATHER = Function(
    "aiter.ops.cache:cp_gather_indexer_k_quant_cache",
    ("kv_cache", "dst_k", "dst_scale", "block_table", "cu_seq_lens"),
    call_site="amd-aiter 0.1.7.post2.dev18 csrc/kernels/cache_kernels.cu: cp_gather_indexer_k_quant_cache",
)
_LOGITS = ("Q", "KV", "kv_scales", "weights", "cu_starts", "cu_ends")
LOGITS = Function(
    "aiter.ops.triton.attention.fp8_mqa_logits:fp8_mqa_logits",
    _LOGITS,
    call_site=f"{_VLLM}: rocm_fp8_mqa_logits",
)
LOGITS_OLD = Function(
    "aiter.ops.triton.fp8_mqa_logits:fp8_mqa_logits", _LOGITS, call_site=f"{_VLLM}: rocm_fp8_mqa_logits"
)
_PAGED = ("weights", "out_logits", "context_lens", "kv_indices", "max_model_len")
PAGED = Function(
    "aiter.ops.triton.attention.pa_mqa_logits:deepgemm_fp8_paged_mqa_logits",
    ("q_fp8", "kv_cache", *_PAGED),
    call_site="ROCm/aiter 004ac5df7dab aiter/ops/triton/attention/pa_mqa_logits.py: deepgemm_fp8_paged_mqa_logits",
)
PAGED_OLD = Function(
    "aiter.ops.triton.pa_mqa_logits:deepgemm_fp8_paged_mqa_logits",
    ("q_fp8", "kv_cache_fp8", *_PAGED),
    call_site="amd-aiter 0.1.7.post2.dev18 aiter/ops/triton/pa_mqa_logits.py: deepgemm_fp8_paged_mqa_logits",
)
SIZE = 128


def supports_indexer_cache_write(key: Tensor, slots: Tensor, cache: Tensor, power_of_two: bool) -> Verdict:
    if not power_of_two:
        return no("AITER multiplies by the reciprocal of a scale; exact only if that is a power of two")
    if key.shape[1] != SIZE:
        return no(f"AITER finds one scale for {SIZE} values, not for {key.shape[1]}")
    if key.dtype not in (torch.bfloat16, torch.float16):
        return no(f"AITER's call sites quantise bfloat16 and float16, not {key.dtype}")
    if not cache.is_contiguous():
        return no("AITER addresses the cache by its sizes: it must be contiguous")
    return first(ocp_e4m3(key.device), WRITE.verdict())


def indexer_cache_write(key: Tensor, slots: Tensor, cache: Tensor, power_of_two: bool) -> None:
    if key.shape[0]:
        WRITE(_dense(key), cache, slots.to(torch.int64).contiguous(), SIZE, "ue8m0")


def supports_indexer_cache_gather(cache: Tensor, block_table: Tensor, cu_seqlens_k: Tensor, total: int) -> Verdict:
    if cache.shape[2] != SIZE + 4:
        return no(f"bound for keys of {SIZE} values, not {cache.shape[2] - 4}")
    if cache.shape[0] and (not cache[0].is_contiguous() or cache.stride(0) % 16 or cache.data_ptr() % 16):
        return no("AITER reads 16 bytes at once: blocks must be dense, and a multiple of that apart")
    return first(ocp_e4m3(cache.device), GATHER.verdict())


def indexer_cache_gather(cache: Tensor, block_table: Tensor, cu_seqlens_k: Tensor, total: int) -> tuple[Tensor, Tensor]:
    key = torch.zeros(total, SIZE, dtype=torch.float8_e4m3fn, device=cache.device)
    scale = torch.zeros(total, 4, dtype=torch.uint8, device=cache.device)
    if not total or not cache.shape[0]:
        return key, scale.view(torch.float32)[:, 0]
    requests = block_table[: cu_seqlens_k.shape[0] - 1].to(torch.int32)
    most = max(requests.shape[1], -(-total // cache.shape[1]))
    table = pad(requests, (0, most - requests.shape[1], 0, 1))
    bounds = pad(cu_seqlens_k.to(torch.int32), (0, 1), value=total)
    GATHER(cache, key, scale, table.contiguous(), bounds.contiguous())
    surplus = torch.arange(total, device=cache.device) >= cu_seqlens_k[-1]
    key.view(torch.uint8).masked_fill_(surplus[:, None], 0)
    return key, scale.masked_fill_(surplus[:, None], 0).view(torch.float32)[:, 0]


def supports_indexer_logits(
    q: Tensor, key: Tensor, key_scale: Tensor, weights: Tensor, start: Tensor, end: Tensor
) -> Verdict:
    return first(_powers_of_two(q), ocp_e4m3(q.device), _either(LOGITS, LOGITS_OLD))


def indexer_logits(q: Tensor, key: Tensor, key_scale: Tensor, weights: Tensor, start: Tensor, end: Tensor) -> Tensor:
    logits = empty_logits(q.shape[0], key.shape[0], q.device)
    if not logits.numel():
        return logits
    function = LOGITS if LOGITS.verdict().ok else LOGITS_OLD
    rows = (x.to(torch.int32).contiguous() for x in (start, end))
    return logits.copy_(function(q, key, key_scale.contiguous(), weights, *rows))


def supports_indexer_logits_paged(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    block_table: Tensor,
    requests: Tensor | None,
    lengths: Tensor,
    max_seqlen_k: int,
) -> Verdict:
    if cache.shape[1] != 1:
        return no(f"AITER's paged logits take pages of one token, not {cache.shape[1]}")
    if q.shape[2] != SIZE or q.stride(2) != 1:
        return no(f"bound for dense heads of {SIZE} values, not {q.shape[2]}")
    return first(_powers_of_two(q), ocp_e4m3(q.device), _either(PAGED, PAGED_OLD))


def indexer_logits_paged(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    block_table: Tensor,
    requests: Tensor | None,
    lengths: Tensor,
    max_seqlen_k: int,
) -> Tensor:
    logits = torch.full((q.shape[0], max_seqlen_k), -torch.inf, device=q.device)
    if not logits.numel() or not cache.shape[0] or not block_table.shape[1]:
        return logits
    table, seen = block_table[: q.shape[0]], lengths
    if requests is not None:
        table, seen = block_table[requests.clamp(min=0).long()], lengths.masked_fill(requests < 0, 0)
    function = PAGED if PAGED.verdict().ok else PAGED_OLD
    function(
        q[:, None],
        cache[:, :, None],
        weights if weights.stride(-1) == 1 else weights.contiguous(),
        logits,
        seen.clamp(max=min(max_seqlen_k, table.shape[1])).to(torch.int32).contiguous(),
        table.to(torch.int32).contiguous(),
        max_seqlen_k,
    )
    return logits


def _powers_of_two(q: Tensor) -> Verdict:
    heads, size = q.shape[1:]
    if heads & (heads - 1) or size & (size - 1):
        return no(f"AITER's heads and head sizes are powers of two, not {heads} and {size}")
    return YES


def _either(new: Function, old: Function) -> Verdict:
    """YES if one of them is there; else what is wrong with the newer."""
    return YES if old.verdict().ok else new.verdict()


def _dense(x: Tensor) -> Tensor:
    return x if x.is_contiguous() and not x.data_ptr() % 16 else x.contiguous().clone()
