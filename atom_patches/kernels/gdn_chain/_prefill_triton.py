"""`gdn_prefill` in Triton: convolution and norms, then every chunk by itself, then the scan over the state pool."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from atom_patches.kernels.gated_delta_rule._chunk_triton import (
    DTYPES,
    on_cuda,
    padded,
    prepare,
    scan,
    supports_head,
)
from atom_patches.kernels.registry import Verdict, dtype_name, no

from ._prefill_kernels import convolve_kernel

__all__ = ["gdn_prefill", "gdn_prefill_segment", "supports_gdn_prefill", "supports_gdn_prefill_segment"]

ROWS, RUN = 64, 8
EARLY = True


def supports_gdn_prefill(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    ssm_state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor | None,
    cu_seqlens: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    eps: float,
    activation: str | None,
    null_slot: int | None,
) -> Verdict:
    return _supports(mixed_qkv, ssm_state.shape[3])


def _supports(mixed_qkv: Tensor, key_size: int) -> Verdict:
    if mixed_qkv.dtype not in DTYPES:
        return no(f"{dtype_name(mixed_qkv.dtype)} projections; float16, bfloat16 and float32 only")
    return supports_head(key_size)


def gdn_prefill(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    ssm_state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor | None,
    cu_seqlens: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    eps: float,
    activation: str | None,
    null_slot: int | None,
) -> Tensor:
    total, heads, value_size = mixed_qkv.shape[0], ssm_state.shape[1], ssm_state.shape[2]
    out = torch.empty(total, heads, value_size, dtype=mixed_qkv.dtype, device=mixed_qkv.device)
    if total == 0 or slots.shape[0] == 0:
        return out.zero_()
    conv_bias, slots, has_initial_state, cu_seqlens, A_log, dt_bias = _in_line(
        conv_bias, slots, has_initial_state, cu_seqlens, A_log, dt_bias
    )
    q, k, v = convolve(
        mixed_qkv, conv_weight, conv_bias, conv_state, slots, has_initial_state, cu_seqlens, eps, activation, null_slot,
        heads=(heads, value_size, ssm_state.shape[3]), update=True,
    )  # fmt: skip
    chunks = prepare(q, k, a, b, cu_seqlens, out=out, gates=(A_log, dt_bias))
    scan(
        q, k, v, chunks, cu_seqlens, out=out, initial=None if has_initial_state is None else ssm_state, final=ssm_state,
        slots=slots, resumed=has_initial_state, null_slot=null_slot, scale=scale,
    )  # fmt: skip
    return out


def supports_gdn_prefill_segment(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor | None,
    cu_seqlens: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    key_heads: int,
    key_size: int,
    eps: float,
    activation: str | None,
    null_slot: int | None,
) -> Verdict:
    return _supports(mixed_qkv, key_size)


def gdn_prefill_segment(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor | None,
    cu_seqlens: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    key_heads: int,
    key_size: int,
    eps: float,
    activation: str | None,
    null_slot: int | None,
) -> tuple[Tensor, Tensor]:
    count, heads, device = slots.shape[0], a.shape[1], mixed_qkv.device
    value_size = (mixed_qkv.shape[1] - 2 * key_heads * key_size) // heads
    final = torch.empty(count, heads, value_size, key_size, dtype=torch.float32, device=device)
    maps = torch.empty(count, heads, key_size, key_size, dtype=torch.float32, device=device)
    if mixed_qkv.shape[0] == 0 or count == 0:
        return final.zero_(), maps.copy_(torch.eye(key_size, device=device))
    conv_bias, slots, has_initial_state, cu_seqlens, A_log, dt_bias = _in_line(
        conv_bias, slots, has_initial_state, cu_seqlens, A_log, dt_bias
    )
    _, k, v = convolve(
        mixed_qkv, conv_weight, conv_bias, conv_state, slots, has_initial_state, cu_seqlens, eps, activation, null_slot,
        heads=(heads, value_size, key_size), update=False,
    )  # fmt: skip
    chunks = prepare(None, k, a, b, cu_seqlens, out=None, gates=(A_log, dt_bias))
    scan(None, k, v, chunks, cu_seqlens, final=final, maps=maps, slots=slots, null_slot=null_slot)
    return final, maps


def _in_line(
    bias: Tensor | None,
    slots: Tensor,
    resumed: Tensor | None,
    cu_seqlens: Tensor,
    decay_log: Tensor,
    decay_bias: Tensor,
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """The vectors as the kernels step through them; slots are a column of the block table in vLLM, for one."""
    return (
        None if bias is None else bias.contiguous(),
        slots.contiguous(),
        None if resumed is None else resumed.contiguous(),
        cu_seqlens.contiguous(),
        decay_log.contiguous(),
        decay_bias.contiguous(),
    )


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    resumed: Tensor | None,
    cu_seqlens: Tensor,
    eps: float,
    activation: str | None,
    null_slot: int | None,
    *,
    heads: tuple[int, int, int],
    update: bool,
    rows: int = ROWS,
    run: int = RUN,
    warps: int = 4,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch `convolve_kernel`: normalised q and k [T, HK, K], and v [T, HV, V], as views of head-major memory. Rows
    of padding sequences, and rows that no sequence owns, are not written.

    Args:
        bias, slots, resumed, cu_seqlens: contiguous.
        heads: (HV, V, K).
        update: whether the states are to hold the last inputs afterwards.
    """
    value_heads, value_size, key_size = heads
    total, channels = x.shape
    num_seqs, taps = slots.shape[0], weight.shape[1]
    key_heads = (channels - value_heads * value_size) // (2 * key_size)
    memory = torch.empty(total * channels, dtype=x.dtype, device=x.device)
    convolve_kernel[(2 * key_heads + value_heads, total // rows + num_seqs)](
        x, weight, weight if bias is None else bias, state, slots, slots if resumed is None else resumed, cu_seqlens,
        memory, num_seqs, total, eps, -1 if null_slot is None else null_slot,
        *x.stride(), *weight.stride(), *state.stride(),
        QK_HEADS=2 * key_heads, K=key_size, V=value_size, TAPS=taps, PAST=triton.next_power_of_2(taps - 1), ROWS=rows,
        RUN=run, EARLY=EARLY, BC=max(padded(key_size), padded(value_size)), SINGLE=num_seqs == 1,
        HAS_BIAS=bias is not None, SILU=activation is not None, FAST=x.dtype != torch.float32 and on_cuda(x.device),
        WITH_RESUMED=resumed is not None, WITH_NULL=null_slot is not None, WITH_UPDATE=update,
        num_warps=warps,  # type: ignore[call-arg]
    )  # fmt: skip
    unit, values = memory.split([2 * key_heads * total * key_size, value_heads * total * value_size])
    unit, values = unit.view(-1, total, key_size).transpose(0, 1), values.view(-1, total, value_size).transpose(0, 1)
    return unit[:, :key_heads], unit[:, key_heads:], values
