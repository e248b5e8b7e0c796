"""The chunked gated delta rule by AITER's Triton kernels; never run on AMD hardware.

`chunk_gated_delta_rule_opt_vk` keeps states as we do, [V, K]; everything has to be dense. Two of its habits need care.
It remembers the chunks of a `cu_seqlens` by the tensor's identity, so an engine's buffer that is refilled in place
would get the chunks of an earlier step: it is given a new tensor every time. And it numbers sequences by counting
first chunks, so that an empty one would shift those behind it: the empty ones are put last. To list the chunks it asks
the device for the lengths; a prefill by AITER is no part of a CUDA graph.

Nothing fits the other operators: AITER's recurrent rule keeps [K, V] and knows no slots, its decode kernels take the
projections (see `gdn_chain`), and it has no map of a segment.

Called as in AITER's `aiter/ops/triton/gated_delta_net/gated_delta_rule.py`; function and commit are in `call_site`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.aiter_binding import Function
from atom_patches.kernels.registry import Verdict, no

CHUNKED = Function(
    "aiter.ops.triton.gated_delta_net.gated_delta_rule:chunk_gated_delta_rule_opt_vk",
    ("q", "k", "v", "o", "g", "beta", "scale", "initial_state", "output_final_state"),
    ("cu_seqlens", "state_dtype"),
    call_site="ROCm/aiter 1604aa0eec83 aiter/ops/triton/gated_delta_net/gated_delta_rule.py: "
    "chunk_gated_delta_rule_opt_vk",
)
SIZES = (64, 128)

# exp() of anything below -104 is 0 in float32; AITER takes differences of sums, which -inf would turn into NaN.
_LOG_ZERO = -200.0


def supports_chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor | None,
    scale: float,
    chunk_size: int,
) -> Verdict:
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.dtype == k.dtype == v.dtype:
        return no(f"bound for one dtype of 16 bits, not {q.dtype}, {k.dtype} and {v.dtype}")
    if q.shape[2] not in SIZES or v.shape[2] not in SIZES:
        return no(f"AITER's heads have {' or '.join(map(str, SIZES))} values, not {q.shape[2]} and {v.shape[2]}")
    return CHUNKED.verdict()


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor | None,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    sequences = cu_seqlens.shape[0] - 1
    out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    shape = (sequences, v.shape[1], v.shape[2], k.shape[2])
    if initial_state is None:
        state = torch.zeros(shape, dtype=torch.float32, device=v.device)
    else:
        state = initial_state.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    if not v.shape[0] or not sequences:
        return out, state
    lengths = cu_seqlens.diff()
    order = torch.argsort((lengths == 0).to(torch.int8), stable=True)
    bounds = torch.cat([cu_seqlens[:1], cu_seqlens[:1] + lengths[order].cumsum(0)])
    _, final = CHUNKED(
        q.contiguous()[None],
        k.contiguous()[None],
        v.contiguous()[None],
        out[None],
        g.float().clamp(min=_LOG_ZERO).contiguous()[None],
        beta.float().contiguous()[None],
        scale,
        None if initial_state is None else state[order],
        True,
        cu_seqlens=bounds.to(torch.int32),
        state_dtype=torch.float32,
    )
    return out, torch.empty_like(state).index_copy_(0, order, final)
