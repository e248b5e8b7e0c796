"""GatedDeltaNet of stock SGLang in plain torch: its Triton kernels take half a second a token in the interpreter.

Only what every step calls; a speculative step's kernels are interpreted. Layouts are SGLang's: rows of all sequences
one after the other, states [slots, value heads, V, K], the convolution's inputs [slots, channels, width - 1].
"""

from __future__ import annotations

from typing import Any

from sglang_on_cpu.after_import import replace

OPS = "sglang.kernels.ops"
CHUNK = 64


def _unit(x: Any) -> Any:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _convolve(window: Any, weight: Any, bias: Any, activation: Any) -> Any:
    """[channels, width - 1 + T] -> [channels, T]."""
    import torch.nn.functional as F

    out = F.conv1d(window[None], weight[:, None], bias, groups=weight.shape[0])[0]
    return F.silu(out) if activation in ("silu", "swish", True) else out


def causal_conv1d_fn(
    x: Any, weight: Any, bias: Any, conv_states: Any, query_start_loc: Any, seq_lens_cpu: Any, cache_indices: Any,
    has_initial_state: Any, activation: Any = "silu", **more: Any,
) -> Any:  # fmt: skip
    """x [channels, T] -> the same, the states moved on."""
    import torch

    out = torch.zeros_like(x)
    keep = weight.shape[1] - 1
    bounds = query_start_loc.tolist()
    for i, slot in enumerate(cache_indices.tolist()):
        begin, end = bounds[i : i + 2]
        if slot < 0 or begin == end:
            continue
        state = conv_states[slot]
        before = state[:, :keep] if has_initial_state[i] else torch.zeros_like(state[:, :keep])
        window = torch.cat([before, x[:, begin:end]], 1)
        out[:, begin:end] = _convolve(window, weight, bias, activation)
        state[:, :keep] = window[:, -keep:]
    return out


def _conv_update(interpreted: Any) -> Any:
    def causal_conv1d_update(
        x: Any, conv_state: Any, weight: Any, bias: Any = None, activation: Any = None, *args: Any,
        conv_state_indices: Any = None, **more: Any,
    ) -> Any:  # fmt: skip
        """x [requests, channels] -> the same, the states moved on by one token."""
        import torch

        if x.dim() != 2 or args or any(value is not None for value in more.values()):
            return interpreted(
                x, conv_state, weight, bias, activation, *args, conv_state_indices=conv_state_indices, **more
            )
        keep = weight.shape[1] - 1
        out = torch.zeros_like(x)
        for i, slot in enumerate(conv_state_indices.tolist()):
            if slot >= 0:
                window = torch.cat([conv_state[slot][:, :keep], x[i, :, None]], 1)
                out[i] = _convolve(window, weight, bias, activation)[:, 0]
                conv_state[slot][:, :keep] = window[:, 1:]
        return out

    return causal_conv1d_update


def _step(state: Any, q: Any, k: Any, v: Any, decay: Any, beta: Any) -> tuple[Any, Any]:
    """One token of one or several sequences: state [..., HV, V, K], q and k [..., HV, K], v [..., HV, V]."""
    state = state * decay[..., None, None]
    seen = (state * k[..., None, :]).sum(-1)
    state = state + ((v - seen) * beta[..., None])[..., None] * k[..., None, :]
    return (state * q[..., None, :]).sum(-1), state


def chunk_gated_delta_rule(
    q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float | None = None, initial_state: Any = None,
    initial_state_indices: Any = None, cu_seqlens: Any = None, head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False, inplace_update: bool = True,
) -> tuple[Any, None, Any]:  # fmt: skip
    """q, k [1, T, H, K], v [1, T, HV, V] -> out [1, T, HV, V]; states in place; states before each chunk of 64."""
    import torch

    assert use_qk_l2norm_in_kernel and not head_first and cu_seqlens is not None and inplace_update
    repeat = v.shape[2] // q.shape[2]
    queries = _unit(q[0].float()).repeat_interleave(repeat, 1) * (scale or q.shape[-1] ** -0.5)
    keys = _unit(k[0].float()).repeat_interleave(repeat, 1)
    values, decays, betas = v[0].float(), g[0].float().exp(), beta[0].float()
    out = torch.zeros_like(v)
    before: list[Any] = []
    bounds = cu_seqlens.tolist()
    for i, slot in enumerate(initial_state_indices.tolist()):
        state = initial_state[slot].float() if slot >= 0 else torch.zeros_like(initial_state[0], dtype=torch.float32)
        for n, t in enumerate(range(bounds[i], bounds[i + 1])):
            if n % CHUNK == 0:
                before.append(state)
            row, state = _step(state, queries[t], keys[t], values[t], decays[t], betas[t])
            out[0, t] = row
        if slot >= 0:
            initial_state[slot] = state
    return out, None, torch.stack(before)[None]


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: Any, a: Any, b: Any, A_log: Any, dt_bias: Any, scale: float, initial_state: Any, out: Any,
    ssm_state_indices: Any, use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """One token a request, rows [q | k | v]; out [B, 1, HV, V] and states in place; padded rows give zeros."""
    import torch.nn.functional as F

    assert use_qk_l2norm_in_kernel
    heads, width, key_width = initial_state.shape[1:]
    q, k, v = mixed_qkv.float().split([(mixed_qkv.shape[1] - heads * width) // 2] * 2 + [heads * width], -1)
    q, k = (_unit(x.unflatten(-1, (-1, key_width))) for x in (q, k))
    q, k = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q, k))
    decay = (-A_log.float().exp() * F.softplus(a.float() + dt_bias.float())).exp()
    out.zero_()
    rows = (ssm_state_indices >= 0).nonzero()[:, 0]
    slots = ssm_state_indices[rows].long()
    result, state = _step(
        initial_state[slots].float(), q[rows] * scale, k[rows], v.unflatten(-1, (heads, width))[rows],
        decay[rows], b.float().sigmoid()[rows],
    )  # fmt: skip
    out[rows, 0] = result.to(out.dtype)
    initial_state[slots] = state.to(initial_state.dtype)
    return out, initial_state


def fused_gdn_gating(
    A_log: Any, a: Any, b: Any, dt_bias: Any, beta: float = 1.0, threshold: float = 20.0
) -> tuple[Any, Any]:
    """The decay's logarithm and the update's strength, [1, T, HV] each."""
    import torch.nn.functional as F

    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float(), beta, threshold)
    return g[None], b.float().sigmoid()[None]


def install() -> None:
    conv, fla = f"{OPS}.mamba.causal_conv1d_triton", f"{OPS}.attention.fla"
    replace(conv, "causal_conv1d_fn", lambda original: causal_conv1d_fn)
    replace(conv, "causal_conv1d_update", _conv_update)
    replace(f"{fla}.chunk", "chunk_gated_delta_rule", lambda original: chunk_gated_delta_rule)
    packed = fused_recurrent_gated_delta_rule_packed_decode
    replace(f"{fla}.fused_recurrent", packed.__name__, lambda original: packed)
    replace(f"{fla}.fused_gdn_gating", "fused_gdn_gating", lambda original: fused_gdn_gating)
