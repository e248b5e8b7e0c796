"""What stock SGLang does to every row beside its matrix products, in plain torch.

Triton's interpreter runs these kernels one program a row and head: a minute for some hundred tokens.
"""

from __future__ import annotations

from typing import Any

from sglang_on_cpu.after_import import replace

OPS = "sglang.kernels.ops"


def fused_qkvzba_split_reshape_cat(
    mixed_qkvz: Any, mixed_ba: Any, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Any, Any, Any, Any]:
    """Rows that lie head by head of the keys, as Qwen3-Next's checkpoints have them: -> [q | k | v], z, b, a."""
    import torch

    rows, share = mixed_qkvz.shape[0], num_heads_v // num_heads_qk
    widths = [head_qk, head_qk, share * head_v, share * head_v]
    q, k, v, z = mixed_qkvz.view(rows, num_heads_qk, -1).split(widths, -1)
    b, a = mixed_ba.view(rows, num_heads_qk, -1).split([share, share], -1)
    qkv = torch.cat([part.reshape(rows, -1) for part in (q, k, v)], -1)
    return qkv, z.reshape(rows, num_heads_v, head_v), b.reshape(rows, -1), a.reshape(rows, -1)


def fused_qkvzba_split_reshape_cat_contiguous(
    mixed_qkvz: Any, mixed_ba: Any, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Any, Any, Any, Any]:
    """The same of rows [q | k | v | z] and [b | a], as Qwen3.5 has them."""
    rows, width = mixed_qkvz.shape[0], num_heads_v * head_v
    qkv, z = mixed_qkvz.split([2 * num_heads_qk * head_qk + width, width], -1)
    b, a = mixed_ba.split([num_heads_v, num_heads_v], -1)
    return qkv.contiguous(), z.reshape(rows, num_heads_v, head_v), b.contiguous(), a.contiguous()


def fused_gate_sigmoid_mul_add(hidden_states: Any, gate_weight: Any, shared_output: Any, final: Any) -> None:
    """Add the gated shared expert in place."""
    final += (hidden_states @ gate_weight).sigmoid()[:, None] * shared_output


def install() -> None:
    split = f"{OPS}.attention.triton_gdn_fused_proj"
    for one in (fused_qkvzba_split_reshape_cat, fused_qkvzba_split_reshape_cat_contiguous):
        replace(split, one.__name__, lambda original, one=one: one)
    elementwise = f"{OPS}.elementwise.elementwise"
    replace(elementwise, "fused_gate_sigmoid_mul_add", lambda original: fused_gate_sigmoid_mul_add)
