"""GatedDeltaNet's operations with vLLM's signatures and layouts, computed by the torch references.

vLLM's block 0 is its null block and -1 its padding slot: both are padding to the references as well. What the
references do not serve (speculative decoding, states of several blocks) is refused by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from atom_patches.kernels import causal_conv1d as conv
from atom_patches.kernels import gated_delta_rule as delta
from atom_patches.kernels.gdn_gating import gdn_gating
from atom_patches.kernels.l2norm import l2norm


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | bool | None = "silu",
    metadata: Any = None,
    validate_data: bool = False,
    pad_slot_id: int = -1,
    null_block_id: int = 0,
    **unserved: Any,
) -> Tensor:
    """x [D, T] and the result are channels first; conv_states [blocks, D, W - 1] is updated in place."""
    _refuse("causal_conv1d_fn", unserved)
    if cache_indices is None:
        cache_indices = torch.arange(query_start_loc.numel() - 1, device=x.device)
    slots = cache_indices.masked_fill(cache_indices == pad_slot_id, -1)
    y = conv.causal_conv1d(
        x.T,
        weight,
        bias,
        cu_seqlens=query_start_loc,
        state=conv_states,
        slots=slots,
        has_initial_state=has_initial_state,
        activation=_activation(activation),
        null_slot=null_block_id,
    )
    return y.T


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | bool | None = None,
    conv_state_indices: Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int = 0,
    validate_data: bool = False,
    **unserved: Any,
) -> Tensor:
    """x [N, D], one token per request; conv_state [blocks, D, W - 1] is updated in place."""
    _refuse("causal_conv1d_update", unserved)
    if conv_state_indices is None:
        raise ValueError("causal_conv1d_update on the CPU needs conv_state_indices, the block of each request")
    return conv.causal_conv1d_update(
        x,
        weight,
        bias,
        state=conv_state,
        slots=conv_state_indices,
        activation=_activation(activation),
        null_slot=null_block_id,
    )


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """q, k, v, g, beta [B, T, ...]: B is 1 with cu_seqlens, else B sequences of T tokens. Chunks are planned anew."""
    batch, tokens = q.shape[:2]
    if cu_seqlens is None:
        cu_seqlens = torch.arange(batch + 1) * tokens
    elif batch != 1:
        raise ValueError(f"chunk_gated_delta_rule with cu_seqlens takes one flattened batch, got {batch}")
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    rows = [x.flatten(0, 1) for x in (q, k, v, g, beta)]
    output, state = delta.chunk_gated_delta_rule(*rows, cu_seqlens=cu_seqlens, initial_state=initial_state, scale=scale)
    return output.view(v.shape), state if output_final_state else None


def fused_post_conv_prep(
    conv_output: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    num_k_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    apply_l2norm: bool = True,
    output_g_exp: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """conv_output [T, 2 HK K + HV V] -> q, k [T, HK, K], v [T, HV, V], g (or exp g) and beta [T, HV] float32."""
    q, k, v = _heads(conv_output, num_k_heads, head_k_dim, head_v_dim)
    if apply_l2norm:
        q, k = l2norm(q), l2norm(k)
    g, beta = gdn_gating(a, b, A_log, dt_bias)
    return q.contiguous(), k.contiguous(), v.contiguous(), g.exp() if output_g_exp else g, beta


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """mixed_qkv [N, 2 HK K + HV V]; writes out [N, 1, HV, V] and initial_state [blocks, HV, V, K]; returns both."""
    value_heads, value_dim, key_dim = initial_state.shape[1:]
    key_heads = (mixed_qkv.shape[1] - value_heads * value_dim) // (2 * key_dim)
    q, k, v = _heads(mixed_qkv, key_heads, key_dim, value_dim)
    # Rounded, unlike in prefill, to the dtype of b, as upstream does in this one place.
    g, beta = gdn_gating(a, b, A_log, dt_bias)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q.float()), l2norm(k.float())
    y = delta.recurrent_gated_delta_rule(
        q, k, v, g, beta.to(b.dtype), state=initial_state, slots=ssm_state_indices, scale=scale
    )
    out[:, 0] = y.to(out.dtype)
    return out, initial_state


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    is_kda: bool = False,
    **unserved: Any,
) -> tuple[Tensor, Tensor]:
    """q, k [1, T, HK, K], v [1, T, HV, V], at most one token per request; updates initial_state [blocks, HV, V, K].

    Returns:
        the output [1, T, HV, V] and initial_state.
    """
    _refuse("fused_sigmoid_gating_delta_rule_update", unserved | {"is_kda": is_kda or None})
    if initial_state is None or ssm_state_indices is None or cu_seqlens is None or not inplace_final_state:
        raise ValueError(
            "fused_sigmoid_gating_delta_rule_update on the CPU serves decode steps only: it needs initial_state, "
            "ssm_state_indices, cu_seqlens and inplace_final_state=True"
        )
    if (beta, threshold) != (1.0, 20.0):
        raise ValueError(f"softplus with beta={beta}, threshold={threshold}: the CPU serves 1.0 and 20.0")
    slots = _slot_of_each_row(cu_seqlens, ssm_state_indices, q.shape[1])
    g, strength = gdn_gating(a, b, A_log, dt_bias)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q.float()), l2norm(k.float())
    y = delta.recurrent_gated_delta_rule(q[0], k[0], v[0], g, strength, state=initial_state, slots=slots, scale=scale)
    return y[None], initial_state


def prepare_chunk_indices(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    """[chunks, 2]: the number of each chunk's sequence among those with tokens, and its number in the sequence."""
    counts = _chunk_counts(cu_seqlens, chunk_size)
    counts = counts[counts > 0]
    sequence = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts)
    first = (counts.cumsum(0) - counts)[sequence]
    chunk = torch.arange(sequence.numel(), device=counts.device) - first
    return torch.stack([sequence, chunk], dim=1).to(cu_seqlens)


def prepare_chunk_offsets(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    """[N + 1]: how many chunks lie before each sequence, and their total."""
    counts = _chunk_counts(cu_seqlens, chunk_size)
    return torch.cat([counts.new_zeros(1), counts]).cumsum(-1)


def _chunk_counts(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    return (cu_seqlens.diff() + chunk_size - 1) // chunk_size


def _heads(packed: Tensor, key_heads: int, key_dim: int, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of [T, 2 HK K + HV V] as q, k [T, HK, K] and v [T, HV, V]."""
    keys = key_heads * key_dim
    q, k, v = packed.split([keys, keys, packed.shape[1] - 2 * keys], dim=1)
    return q.unflatten(1, (key_heads, key_dim)), k.unflatten(1, (key_heads, key_dim)), v.unflatten(1, (-1, value_dim))


def _slot_of_each_row(cu_seqlens: Tensor, slots: Tensor, rows: int) -> Tensor:
    """[rows] slots from those of sequences of at most one token; a row that no sequence owns gets -1."""
    lengths = cu_seqlens.diff()
    if slots.dim() != 1 or bool((lengths > 1).any()):
        raise ValueError("a decode step on the CPU takes at most one token and one state per request")
    owned = lengths == 1
    of_row = slots.new_full((rows,), -1)
    of_row[cu_seqlens[:-1][owned].long()] = slots[: lengths.numel()][owned]
    return of_row


def _activation(activation: str | bool | None) -> str | None:
    if isinstance(activation, bool):
        return "silu" if activation else None
    return activation


def _refuse(operation: str, unserved: dict[str, Any]) -> None:
    """Raise if upstream asked for something beyond one state and one token per decoding request."""
    asked = sorted(name for name, value in unserved.items() if value is not None and value != 0)
    if asked:
        raise ValueError(
            f"{operation} on the CPU does not serve {', '.join(asked)}: speculative decoding and states of several "
            "blocks per request are not available for GatedDeltaNet on the CPU platform"
        )
