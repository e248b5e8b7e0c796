"""Contracts of AITER's gated delta rule (Triton)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .checks import FLOAT16, FLOATS, Arguments, contract

RULE = "ROCm/aiter 1604aa0eec83 aiter/ops/triton/gated_delta_net/gated_delta_rule.py: chunk_gated_delta_rule_opt_vk"
CHUNKS = "ROCm/aiter 063c07191010 aiter/ops/triton/_triton_kernels/gated_delta_rule/prefill/fused_cumsum_kkt.py"
INDEX = "ROCm/aiter 8d6713745619 aiter/ops/triton/_triton_kernels/gated_delta_rule/utils/index.py"
PACKED = "ROCm/aiter 162e47ef9ebb aiter/ops/triton/gated_delta_net/fused_rearrange_sigmoid_gdr.py"

#: What `prepare_chunk_indices` remembers: tensors by identity, with what they held when they were first seen.
_seen: list[tuple[Tensor, list[int]]] = []


@contract(
    "aiter.ops.triton.gated_delta_net.gated_delta_rule:chunk_gated_delta_rule_opt_vk",
    "q k v o g beta scale initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens state_dtype",
    RULE,
    CHUNKS,
    INDEX,
)
def chunk_gated_delta_rule_opt_vk(a: Arguments) -> tuple[Tensor, Tensor | None]:
    """Everything is addressed by its sizes. The chunks of a `cu_seqlens` are remembered by the tensor's identity, and
    number the sequences by counting first chunks, so that an empty sequence before another one shifts it."""
    q = a.tensor("q", shape=(1, None, None, None), dtype=FLOAT16, layout="contiguous")
    tokens, key_heads, size = q.shape[1:]
    k = a.tensor("k", shape=tuple(q.shape), dtype=q.dtype, layout="contiguous")
    v = a.tensor("v", shape=(1, tokens, None, None), dtype=q.dtype, layout="contiguous")
    heads, width = v.shape[2:]
    a.require(tokens > 0, "no rows: an empty grid is launched")
    a.require(heads % key_heads == 0, "value heads must be a multiple of key heads")
    a.require(size in (64, 128) and width in (64, 128), f"heads of {size} and {width} values are not in the tests")
    o = a.tensor("o", shape=tuple(v.shape), dtype=q.dtype, layout="contiguous")
    g = a.tensor("g", shape=(1, tokens, heads), dtype=torch.float32, layout="contiguous")
    a.require(bool(g.isfinite().all()), "g must be finite: differences of its sums are taken")
    beta = a.tensor("beta", shape=(1, tokens, heads), dtype=(q.dtype, torch.float32), layout="contiguous")
    bounds = a.tensor("cu_seqlens", shape=(None,), dtype=(torch.int32, torch.int64), layout="contiguous")
    known = next((held for tensor, held in _seen if tensor is bounds), None)
    if known is None:
        known = bounds.tolist()
        _seen.append((bounds, known))
        del _seen[:-8]
    a.require(known == bounds.tolist(), "cu_seqlens was changed in place; its chunks are remembered")
    lengths = bounds.diff()
    a.require(bool((lengths >= 0).all()) and int(bounds[-1]) <= tokens, "cu_seqlens does not fit the tokens")
    a.require(not bool(((lengths[:-1] == 0) & (lengths[1:] > 0)).any()), "an empty sequence before another one")
    sequences = bounds.shape[0] - 1
    demands = {"shape": (sequences, heads, width, size), "layout": "contiguous"}
    wanted = a.get("state_dtype")
    a.require(wanted in (torch.float32, torch.bfloat16), f"state_dtype is {wanted}")
    state = a.optional("initial_state", dtype=wanted, **demands)
    a.require(not a.flag("use_qk_l2norm_in_kernel"), "the norm inside is not covered")
    a.require(a.flag("output_final_state"), "a call without the final state is not covered")
    final = torch.empty(demands["shape"], dtype=wanted)
    for i in range(sequences):
        s = torch.zeros(heads, width, size) if state is None else state[i].float()
        for t in range(known[i], known[i + 1]):
            o[0, t], s = _step(q[0, t], k[0, t], v[0, t], g[0, t], beta[0, t], s, a.number("scale"))
        final[i] = s
    return o, final


@contract(
    "aiter.ops.triton.gated_delta_net.fused_rearrange_sigmoid_gdr:fused_rearrange_sigmoid_gated_delta_rule",
    "A_log a b dt_bias qkv key_dim value_dim head_k_dim head_v_dim scale initial_state inplace_final_state cu_seqlens "
    "ssm_state_indices use_qk_l2norm_in_kernel core_attn_out",
    PACKED,
    "vllm-project/vllm (main) GatedDeltaNet._forward_core_decode with VLLM_ROCM_USE_AITER",
)
def fused_rearrange_sigmoid_gated_delta_rule(a: Arguments) -> tuple[Tensor, Tensor]:
    """One token a sequence; a negative index leaves its output unwritten. Of the pool only the distance of two slots is
    read; the l2 norm's epsilon is 1e-6."""
    key_dim, value_dim, size, width = (a.integer(n) for n in ("key_dim", "value_dim", "head_k_dim", "head_v_dim"))
    a.require(key_dim % size == 0 and value_dim % width == 0, "dimensions must be multiples of their heads'")
    key_heads, heads = key_dim // size, value_dim // width
    a.require(heads % key_heads == 0, "value heads must be a multiple of key heads")
    qkv = a.tensor("qkv", shape=(None, 2 * key_dim + value_dim), dtype=FLOATS, layout="strided")
    tokens = qkv.shape[0]
    a.require(tokens > 0, "no rows: an empty grid is launched")
    log = a.tensor("A_log", shape=(heads,), dtype=torch.float32, layout="contiguous")
    decay = a.tensor("a", shape=(tokens, heads), dtype=qkv.dtype, layout="strided")
    write = a.tensor("b", shape=(tokens, heads), dtype=qkv.dtype, layout="strided")
    bias = a.tensor("dt_bias", shape=(heads,), dtype=FLOATS, layout="contiguous")
    pool = a.tensor("initial_state", shape=(None, heads, width, size), dtype=FLOATS, layout="rows")
    a.require(pool[:1].is_contiguous(), "a slot of the pool must be dense")
    a.require(a.flag("inplace_final_state") and a.flag("use_qk_l2norm_in_kernel"), "not covered otherwise")
    bounds = a.tensor("cu_seqlens", shape=(tokens + 1,), dtype=torch.int32, layout="contiguous")
    a.require(torch.equal(bounds, torch.arange(tokens + 1, dtype=torch.int32)), "more than a token a sequence")
    slots = a.tensor("ssm_state_indices", shape=(tokens,), dtype=torch.int32, layout="contiguous")
    a.require(bool((slots < pool.shape[0]).all()), "ssm_state_indices names a slot that is not there")
    scale = a.number("scale")
    a.require(scale > 0, "scale must be positive")
    core = a.tensor("core_attn_out", shape=(tokens * value_dim,), dtype=qkv.dtype, layout="contiguous")
    out = core.view(tokens, heads, width)
    g = -log.exp() * softplus(decay.float() + bias.float())
    beta = write.float().sigmoid()
    for t, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        q, k, v = qkv[t].float().split([key_dim, key_dim, value_dim])
        q, k = (_unit(x.view(key_heads, size)) for x in (q, k))
        out[t], pool[slot] = _step(q, k, v.view(heads, width), g[t], beta[t], pool[slot].float(), scale)
    return out[None], pool


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One token: q, k [HK, K], v [HV, V], g, beta [HV], state [HV, V, K]; what it reads, and the state after it."""
    q, k = (x.float().repeat_interleave(v.shape[0] // x.shape[0], 0) for x in (q, k))
    state = state * g.exp()[:, None, None]
    error = (v.float() - torch.einsum("hvk,hk->hv", state, k)) * beta.float()[:, None]
    state = state + error[:, :, None] * k[:, None]
    return torch.einsum("hvk,hk->hv", state, q) * scale, state
