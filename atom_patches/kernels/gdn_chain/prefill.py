"""The operator `gdn_prefill`: ragged sequences from the projections to the output, over pools of states."""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.registry import Operation, bucket, dtype_name

from . import prefill_reference as reference

_PACKAGE = __package__ or ""

#: Largest (relative, absolute) difference from the reference, per input dtype.
TOLERANCE = {"float32": (1e-4, 1e-5), "bfloat16": (2e-2, 2e-2), "float16": (4e-3, 4e-3)}


def _fake(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    ssm_state: Tensor,
    *rest: object,
) -> Tensor:
    return mixed_qkv.new_empty((mixed_qkv.shape[0], ssm_state.shape[1], ssm_state.shape[2]))


def _shape_class(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    ssm_state: Tensor,
    slots: Tensor,
    *rest: object,
) -> str:
    heads, value_size, key_size = ssm_state.shape[1:]
    shape = f"d{mixed_qkv.shape[1]} h{heads} k{key_size} v{value_size}"
    rows, sequences = bucket(mixed_qkv.shape[0], (4096,)), bucket(slots.shape[0], (8,))
    return f"{dtype_name(mixed_qkv.dtype)} {shape} rows{rows} sequences{sequences}"


GDN_PREFILL = Operation(
    package=_PACKAGE,
    name="gdn_prefill",
    schema="(Tensor mixed_qkv, Tensor a, Tensor b, Tensor conv_weight, Tensor? conv_bias, Tensor(a!) conv_state, "
    "Tensor(b!) ssm_state, Tensor slots, Tensor? has_initial_state, Tensor cu_seqlens, Tensor A_log, Tensor dt_bias, "
    "float scale, float eps, str? activation, int? null_slot) -> Tensor",
    reference=reference.gdn_prefill,
    fake=_fake,
    shape_class=_shape_class,
    tolerance=TOLERANCE,
    reference_reads=True,
    unmeasured=("triton", "engine", "torch"),  # bindings of engines wait for the device
)


def _fake_segment(
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
    *rest: object,
) -> tuple[Tensor, Tensor]:
    heads = a.shape[1]
    value_size = (mixed_qkv.shape[1] - 2 * key_heads * key_size) // heads
    ends = mixed_qkv.new_empty((slots.shape[0], heads, value_size, key_size), dtype=torch.float32)
    return ends, mixed_qkv.new_empty((slots.shape[0], heads, key_size, key_size), dtype=torch.float32)


def _segment_class(
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
    *rest: object,
) -> str:
    shape = f"d{mixed_qkv.shape[1]} h{key_heads}:{a.shape[1]} k{key_size}"
    rows, sequences = bucket(mixed_qkv.shape[0], (4096,)), bucket(slots.shape[0], (8,))
    return f"{dtype_name(mixed_qkv.dtype)} {shape} rows{rows} sequences{sequences}"


GDN_PREFILL_SEGMENT = Operation(
    package=_PACKAGE,
    name="gdn_prefill_segment",
    schema="(Tensor mixed_qkv, Tensor a, Tensor b, Tensor conv_weight, Tensor? conv_bias, Tensor conv_state, "
    "Tensor slots, Tensor? has_initial_state, Tensor cu_seqlens, Tensor A_log, Tensor dt_bias, int key_heads, "
    "int key_size, float eps, str? activation, int? null_slot) -> (Tensor, Tensor)",
    reference=reference.gdn_prefill_segment,
    fake=_fake_segment,
    shape_class=_segment_class,
    tolerance=TOLERANCE,
    reference_reads=True,
)
OPERATIONS = (GDN_PREFILL, GDN_PREFILL_SEGMENT)


def gdn_prefill(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    ssm_state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor | None,
    cu_seqlens: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float | None = None,
    eps: float = 1e-6,
    activation: str | None = "silu",
    null_slot: int | None = 0,
) -> Tensor:
    """Run a GatedDeltaNet layer's inner part over ragged sequences; both pools are updated in place.

    Args:
        mixed_qkv: [T, 2 HK K + HV V], the projections of all queries, then keys, then values, head by head.
        a, b: [T, HV], the projections that make the decay and the write strength.
        conv_weight, conv_bias: [D, W] and [D] or None, as in `kernels.causal_conv1d`.
        conv_state: [S, D, at least W - 1], the last inputs of every slot, oldest first.
        ssm_state: [S, HV, V, K], any strides: a pool kept as [S, HV, K, V] comes as a transposed view.
        slots: [N] integers, distinct; negative ones and `null_slot` are padding.
        has_initial_state: [N] bool; a sequence without one starts from zeros, whatever its slot holds. None: no
            sequence has one.
        cu_seqlens: [N + 1] integers, non-decreasing: sequence i owns the rows from cu_seqlens[i] up to, not
            including, cu_seqlens[i + 1]. The reference reads it on the host, the other providers do not.
        A_log, dt_bias: [HV].
        scale: factor of the output; None means K ** -0.5.
        eps: of the l2 norm, see `kernels.l2norm`.
        activation: of the convolution, "silu" (also spelt "swish") or None.
        null_slot: the slot that stands for "none"; None when every non-negative slot is real.

    Returns:
        [T, HV, V] in mixed_qkv's dtype. Rows of padding and rows that no sequence owns are 0. States of padding and
        of sequences without rows are left as they were.

    Raises:
        ValueError: shapes that contradict the above, or an unknown activation.
    """
    if ssm_state.dim() != 4:
        raise ValueError(f"ssm_state must be [S, HV, V, K], got {[*ssm_state.shape]}")
    heads, value_size, key_size = ssm_state.shape[1:]
    _check_channels(mixed_qkv.shape[1], heads, value_size, key_size)
    _check(mixed_qkv, a, b, heads, conv_weight, conv_bias, conv_state, slots, has_initial_state, cu_seqlens)
    _check_gates(a, A_log, dt_bias, activation)
    return GDN_PREFILL(
        mixed_qkv, a, b, conv_weight, conv_bias, conv_state, ssm_state, slots, has_initial_state, cu_seqlens, A_log,
        dt_bias, float(ssm_state.shape[3]) ** -0.5 if scale is None else scale, eps, activation, null_slot,
    )  # fmt: skip


def gdn_prefill_segment(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    *,
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
    eps: float = 1e-6,
    activation: str | None = "silu",
    null_slot: int | None = 0,
) -> tuple[Tensor, Tensor]:
    """What `gdn_prefill` will do to the recurrent state of each sequence, whatever it is: S_end = N + S_0 E.

    For a long prompt cut into segments that are scanned in parallel: see `gated_delta_rule`'s
    `chunk_gated_delta_rule_segment`. Nothing is updated: `gdn_prefill` follows, once the states are known.

    Args:
        key_heads, key_size: HK and K.
        conv_state, slots, has_initial_state: the inputs before each sequence, only read; has_initial_state says
            nothing about recurrent states here.
        others: as for `gdn_prefill`.

    Returns:
        N [N, HV, V, K] and E [N, HV, K, K], both float32; for padding and for sequences without rows, zeros and
        the identity.

    Raises:
        ValueError: shapes that contradict the above, or an unknown activation.
    """
    heads = a.shape[-1]
    _check_channels(mixed_qkv.shape[1], heads, (mixed_qkv.shape[1] - 2 * key_heads * key_size) // heads, key_size)
    _check(mixed_qkv, a, b, heads, conv_weight, conv_bias, conv_state, slots, has_initial_state, cu_seqlens)
    _check_gates(a, A_log, dt_bias, activation)
    return GDN_PREFILL_SEGMENT(
        mixed_qkv, a, b, conv_weight, conv_bias, conv_state, slots, has_initial_state, cu_seqlens, A_log, dt_bias,
        key_heads, key_size, eps, activation, null_slot,
    )  # fmt: skip


def _check_channels(channels: int, heads: int, value_size: int, key_size: int) -> None:
    keys = channels - heads * value_size
    if keys <= 0 or keys % (2 * key_size) or heads % (keys // (2 * key_size)):
        raise ValueError(
            f"mixed_qkv has {channels} channels: {heads} value heads of {value_size} and two times a divisor of "
            f"{heads} of key heads of {key_size} do not make them"
        )


def _check_gates(a: Tensor, A_log: Tensor, dt_bias: Tensor, activation: str | None) -> None:
    if A_log.shape != a.shape[1:] or dt_bias.shape != a.shape[1:]:
        raise ValueError(f"A_log and dt_bias must be [{a.shape[1]}], got {[*A_log.shape]} and {[*dt_bias.shape]}")
    if activation not in ("silu", "swish", None):
        raise ValueError(f"activation must be 'silu', 'swish' or None, got {activation!r}")


def _check(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    heads: int,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor | None,
    cu_seqlens: Tensor,
) -> None:
    rows, channels = mixed_qkv.shape
    if tuple(a.shape) != (rows, heads) or tuple(b.shape) != (rows, heads):
        raise ValueError(f"a and b must be [{rows}, {heads}], got {[*a.shape]} and {[*b.shape]}")
    if conv_weight.dim() != 2 or conv_weight.shape[0] != channels or conv_weight.shape[1] < 2:
        raise ValueError(f"conv_weight must be [{channels}, W >= 2], got {[*conv_weight.shape]}")
    if conv_bias is not None and tuple(conv_bias.shape) != (channels,):
        raise ValueError(f"conv_bias must be [{channels}], got {[*conv_bias.shape]}")
    past = conv_weight.shape[1] - 1
    if conv_state.dim() != 3 or conv_state.shape[1] != channels or conv_state.shape[2] < past:
        raise ValueError(f"conv_state must be [S, {channels}, {past} or more], got {[*conv_state.shape]}")
    count = cu_seqlens.shape[0] - 1
    if tuple(slots.shape) != (count,):
        raise ValueError(f"slots must be [{count}], one per sequence, got {[*slots.shape]}")
    if has_initial_state is not None and tuple(has_initial_state.shape) != (count,):
        raise ValueError(f"has_initial_state must be [{count}], got {[*has_initial_state.shape]}")


__all__ = [
    "GDN_PREFILL",
    "GDN_PREFILL_SEGMENT",
    "OPERATIONS",
    "TOLERANCE",
    "gdn_prefill",
    "gdn_prefill_segment",
]
