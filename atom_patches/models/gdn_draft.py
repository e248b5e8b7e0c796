"""A GatedDeltaNet layer over drafted tokens, any of which may turn out to be the last accepted.

Live states stay as they are: nobody knows yet how far they will go. What they would be behind each drafted token goes
to the engine's draft states, from which it takes the accepted ones afterwards. Drafts are chains: each token goes on
from the one before.

The kernels for drafts go on from one of the states that an earlier draft left behind in the same pool. So each
sequence's live state is laid where a former draft's last one would lie; that place is written last.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.causal_conv1d import causal_conv1d_verify
from atom_patches.kernels.gated_delta_rule import verify_gated_delta_rule
from atom_patches.kernels.gdn_gating import gdn_gating
from atom_patches.kernels.l2norm import l2norm
from atom_patches.kernels.slots import is_real
from atom_patches.runtime.gdn import GdnBinding, LayerStates


def verify_drafts(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    binding: GdnBinding,
    states: LayerStates,
    *,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
) -> Tensor:
    """From the projections of the drafted rows to the outputs `[rows, value heads, value size]`; padding gives 0.

    Raises:
        ValueError: the layer has no draft states, or of fewer tokens.
    """
    draft_conv, draft_temporal = _draft_states(binding, states)
    rows = binding.draft_rows
    assert rows is not None  # a binding with sequences to verify has them
    drafted = binding.draft_tokens
    slots = binding.slots[binding.decodes : binding.first_prefill]
    real = is_real(slots, binding.null_slot)
    starts = torch.arange(binding.verifies + 1, dtype=torch.int32, device=mixed.device) * drafted
    accepted = torch.full_like(slots, drafted)

    wide = _convolve(mixed, conv_weight, starts, slots, real, accepted, rows, states.conv, draft_conv)
    heads, value_size, key_size = states.temporal.shape[1:]
    keys = (wide.shape[1] - heads * value_size) // 2
    q, k, v = wide.split([keys, keys, heads * value_size], dim=1)
    q, k = l2norm(q.unflatten(1, (-1, key_size))), l2norm(k.unflatten(1, (-1, key_size)))

    # [rows, drafted, …] as one pool, in which token t of a sequence has a slot.
    pool = draft_temporal.view(-1, *draft_temporal.shape[2:])
    pool_slots = rows[:, None].long() * draft_temporal.shape[1] + torch.arange(drafted, device=mixed.device)
    pool[pool_slots[:, -1]] = states.temporal[slots.clamp(min=0).long()].to(pool.dtype)
    return verify_gated_delta_rule(
        q, k, v.unflatten(1, (heads, value_size)), *gdn_gating(a, b, A_log, dt_bias), cu_seqlens=starts, state=pool,
        slots=torch.where(real[:, None], pool_slots, -1), num_accepted=accepted, null_slot=None,
    )  # fmt: skip


def _convolve(
    mixed: Tensor,
    weight: Tensor,
    starts: Tensor,
    slots: Tensor,
    real: Tensor,
    accepted: Tensor,
    rows: Tensor,
    live: Tensor,
    draft: Tensor,
) -> Tensor:
    """The convolved rows; each token's window goes to the draft states."""
    past, count, drafted = weight.shape[1] - 1, slots.shape[0], mixed.shape[0] // slots.shape[0]
    # What the convolution's kernel keeps of a draft: the inputs before it, then the drafted ones, window over window.
    inputs = live.new_zeros(count, live.shape[1], past - 1 + drafted)
    inputs[:, :, drafted - 1 :] = live[slots.clamp(min=0).long(), :, :past]
    own = torch.arange(count, dtype=slots.dtype, device=slots.device)
    wide = causal_conv1d_verify(
        mixed, weight, None, cu_seqlens=starts, state=inputs, slots=torch.where(real, own, -1), num_accepted=accepted,
        null_slot=None,
    )  # fmt: skip
    windows = inputs.unfold(2, past, 1)  # [sequences, channels, drafted, past]
    draft[rows.long(), :drafted] = windows.transpose(1, 2).to(draft.dtype)
    return wide


def _draft_states(binding: GdnBinding, states: LayerStates) -> tuple[Tensor, Tensor]:
    conv, temporal = states.draft_conv, states.draft_temporal
    if conv is None or temporal is None:
        raise ValueError("drafted tokens are to be verified, but the engine keeps no states for them")
    if min(conv.shape[1], temporal.shape[1]) < binding.draft_tokens:
        raise ValueError(
            f"{binding.draft_tokens} drafted tokens are to be verified, but the engine keeps states for "
            f"{min(conv.shape[1], temporal.shape[1])}"
        )
    return conv, temporal
