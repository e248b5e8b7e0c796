"""The operators `gdn_decode` and `gdn_verify`: one token per row, or a few drafted ones per sequence, from the
projections to the output, over pools of states."""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.registry import Operation, bucket, dtype_name

from . import decode_reference as reference
from .prefill import TOLERANCE

_PACKAGE = __package__ or ""


def _fake(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    ssm_state: Tensor,
    *_: object,
) -> Tensor:
    shape = (mixed_qkv.shape[0], ssm_state.shape[1], ssm_state.shape[2])
    return torch.empty(shape, dtype=mixed_qkv.dtype, device=mixed_qkv.device)


def _shape_class(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    ssm_state: Tensor,
    *_: object,
) -> str:
    heads, value_size, key_size = ssm_state.shape[1:]
    shape = f"d{mixed_qkv.shape[1]} h{heads} k{key_size} v{value_size}"
    rows = bucket(mixed_qkv.shape[0], (1, 16, 64, 256))
    return f"{dtype_name(mixed_qkv.dtype)} {shape} state {dtype_name(ssm_state.dtype)} rows{rows}"


GDN_DECODE = Operation(
    package=_PACKAGE,
    name="gdn_decode",
    schema="(Tensor mixed_qkv, Tensor a, Tensor b, Tensor conv_weight, Tensor? conv_bias, Tensor(a!) conv_state, "
    "Tensor(b!) ssm_state, Tensor slots, Tensor A_log, Tensor dt_bias, float scale, float eps, str? activation, "
    "int? null_slot) -> Tensor",
    reference=reference.gdn_decode,
    fake=_fake,
    shape_class=_shape_class,
    tolerance=TOLERANCE,
    reference_reads=True,
    unmeasured=("triton", "engine", "torch"),  # bindings of engines are several kernels
)
GDN_VERIFY = Operation(
    package=_PACKAGE,
    name="gdn_verify",
    schema="(Tensor mixed_qkv, Tensor a, Tensor b, Tensor conv_weight, Tensor? conv_bias, Tensor(a!) conv_state, "
    "Tensor(b!) ssm_state, Tensor cu_seqlens, Tensor slots, Tensor num_accepted, Tensor A_log, Tensor dt_bias, "
    "float scale, float eps, str? activation, int? null_slot) -> Tensor",
    reference=reference.gdn_verify,
    fake=_fake,
    shape_class=_shape_class,
    tolerance=TOLERANCE,
    reference_reads=True,
    unmeasured=("triton", "engine", "torch"),  # bindings of engines are several kernels
)
OPERATIONS = (GDN_DECODE, GDN_VERIFY)


def gdn_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    ssm_state: Tensor,
    slots: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float | None = None,
    eps: float = 1e-6,
    activation: str | None = "silu",
    null_slot: int | None = 0,
) -> Tensor:
    """Run a GatedDeltaNet layer's inner part for one new token per row; both pools are updated in place.

    Args:
        mixed_qkv: [N, 2 HK K + HV V], the projections of all queries, then keys, then values, head by head.
        a, b: [N, HV], the projections that make the decay and the write strength.
        conv_weight, conv_bias: [D, W] and [D] or None, as in `kernels.causal_conv1d`.
        conv_state: [S, D, at least W - 1], the last inputs of every slot, oldest first.
        ssm_state: [S, HV, V, K], any strides: a pool kept as [S, HV, K, V] comes as a transposed view.
        slots: [N] integers, the state of each row; negative ones and `null_slot` are padding, the others distinct.
        A_log, dt_bias: [HV].
        scale: factor of the output; None means K ** -0.5.
        eps: of the l2 norm, see `kernels.l2norm`.
        activation: of the convolution, "silu" (also spelt "swish") or None.
        null_slot: the slot that stands for "none"; None when every non-negative slot is real.

    Returns:
        [N, HV, V] in mixed_qkv's dtype. Rows of padding are 0, and touch no state.

    Raises:
        ValueError: shapes that contradict the above, or an unknown activation.
    """
    _check(mixed_qkv, a, b, conv_weight, conv_bias, conv_state, ssm_state, A_log, dt_bias, activation)
    if tuple(slots.shape) != (mixed_qkv.shape[0],):
        raise ValueError(f"slots must be [{mixed_qkv.shape[0]}], one per row, got {[*slots.shape]}")
    scale = float(ssm_state.shape[3]) ** -0.5 if scale is None else scale
    return GDN_DECODE(
        mixed_qkv, a, b, conv_weight, conv_bias, conv_state, ssm_state, slots, A_log, dt_bias, scale, eps, activation,
        null_slot,
    )  # fmt: skip


def gdn_verify(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    ssm_state: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    num_accepted: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float | None = None,
    eps: float = 1e-6,
    activation: str | None = "silu",
    null_slot: int | None = 0,
) -> Tensor:
    """Run a GatedDeltaNet layer's inner part for the drafted tokens of each sequence, ready for any of them to be the
    last accepted.

    Args:
        mixed_qkv, a, b, conv_weight, conv_bias, ssm_state, A_log, dt_bias, scale, eps, activation, null_slot: as in
            `gdn_decode`, T rows instead of N.
        conv_state: [S, D, at least W - 2 + the longest draft], used as `kernels.causal_conv1d` says, in the slots
            slots[:, 0].
        cu_seqlens: [N + 1] integers, non-decreasing: sequence i owns the rows from cu_seqlens[i] up to, not including,
            cu_seqlens[i + 1], at most n of them.
        slots: [N, n] integers, distinct, used as `verify_gated_delta_rule` says; a padding sequence has padding only,
            and another one has none.
        num_accepted: [N] integers, 1 to n: how many tokens of the sequence's previous draft were accepted; 1 behind a
            prefill or a decode step into slots[:, 0].

    Returns:
        [T, HV, V] in mixed_qkv's dtype. Rows of padding and rows that no sequence owns are 0.

    Raises:
        ValueError: shapes that contradict the above, or an unknown activation.
    """
    _check(mixed_qkv, a, b, conv_weight, conv_bias, conv_state, ssm_state, A_log, dt_bias, activation)
    count = cu_seqlens.shape[0] - 1
    if slots.dim() != 2 or slots.shape[0] != count or not slots.shape[1] or tuple(num_accepted.shape) != (count,):
        raise ValueError(
            f"slots must be [{count}, n] and num_accepted [{count}], got {[*slots.shape]} and {[*num_accepted.shape]}"
        )
    scale = float(ssm_state.shape[3]) ** -0.5 if scale is None else scale
    return GDN_VERIFY(
        mixed_qkv, a, b, conv_weight, conv_bias, conv_state, ssm_state, cu_seqlens, slots, num_accepted, A_log, dt_bias,
        scale, eps, activation, null_slot,
    )  # fmt: skip


def _check(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    ssm_state: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    activation: str | None,
) -> None:
    if mixed_qkv.dim() != 2 or ssm_state.dim() != 4:
        raise ValueError(
            f"mixed_qkv must be [N, D] and ssm_state [S, HV, V, K], got {[*mixed_qkv.shape]} and {[*ssm_state.shape]}"
        )
    (rows, channels), (heads, value_size, key_size) = mixed_qkv.shape, ssm_state.shape[1:]
    keys = channels - heads * value_size
    if keys <= 0 or keys % (2 * key_size) or heads % (keys // (2 * key_size)):
        raise ValueError(
            f"mixed_qkv has {channels} channels: {heads} value heads of {value_size} and two times a divisor of "
            f"{heads} of key heads of {key_size} do not make them"
        )
    if tuple(a.shape) != (rows, heads) or tuple(b.shape) != (rows, heads):
        raise ValueError(f"a and b must be [{rows}, {heads}], got {[*a.shape]} and {[*b.shape]}")
    if conv_weight.dim() != 2 or conv_weight.shape[0] != channels or conv_weight.shape[1] < 2:
        raise ValueError(f"conv_weight must be [{channels}, W >= 2], got {[*conv_weight.shape]}")
    if conv_bias is not None and tuple(conv_bias.shape) != (channels,):
        raise ValueError(f"conv_bias must be [{channels}], got {[*conv_bias.shape]}")
    past = conv_weight.shape[1] - 1
    if conv_state.dim() != 3 or conv_state.shape[1] != channels or conv_state.shape[2] < past:
        raise ValueError(f"conv_state must be [S, {channels}, {past} or more], got {[*conv_state.shape]}")
    if tuple(A_log.shape) != (heads,) or tuple(dt_bias.shape) != (heads,):
        raise ValueError(f"A_log and dt_bias must be [{heads}], got {[*A_log.shape]} and {[*dt_bias.shape]}")
    if activation not in ("silu", "swish", None):
        raise ValueError(f"activation must be 'silu', 'swish' or None, got {activation!r}")


__all__ = ["GDN_DECODE", "GDN_VERIFY", "OPERATIONS", "gdn_decode", "gdn_verify"]
