"""On the CPU, GatedDeltaNet layers take the way that they take on a GPU, with torch in place of kernels.

The CPU platform's own way wants bfloat16, in which the best of two tokens depends on how rows are cut. A report counts
the steps that were split, and the rows that this rank ran of them.
"""

from __future__ import annotations

from typing import Any

COUNTED: dict[str, int] = {"split": 0, "own": 0, "whole": 0}


def install() -> None:
    """Change vLLM's layer, once, and begin to count."""
    from vllm.model_executor.layers.mamba.gdn import (  # pyright: ignore[reportMissingImports]
        qwen_gdn_linear_attn as gdn,
    )

    from atom_patches.vllm.adapters import gdn_cpu, pcp_manager
    from atom_patches.vllm.pcp_manager import _config

    _config.HYBRID_DEVICES = frozenset({"cpu"})
    COUNTED.update(split=0, own=0, whole=0)
    if gdn.causal_conv1d_fn is gdn_cpu.causal_conv1d_fn:
        return
    for name in (
        "causal_conv1d_fn",
        "causal_conv1d_update",
        "fused_post_conv_prep",
        "fused_recurrent_gated_delta_rule_packed_decode",
        "fused_sigmoid_gating_delta_rule_update",
    ):
        assert hasattr(gdn, name)
        setattr(gdn, name, getattr(gdn_cpu, name))
    gdn.fla_chunk_gated_delta_rule = _chunk
    layer = gdn.QwenGatedDeltaNetAttention
    layer.forward_cpu = layer.forward_cuda
    manager = pcp_manager.SplitManager
    manager.partition_batch = _counting(manager.partition_batch)


def report() -> dict[str, int]:
    """What was counted since `install`."""
    return dict(COUNTED)


def _chunk(*args: Any, core_attn_out: None = None, **kwargs: Any) -> Any:
    from atom_patches.vllm.adapters import gdn_cpu

    assert core_attn_out is None
    return gdn_cpu.chunk_gated_delta_rule(*args, **kwargs)


def _counting(partition_batch: Any) -> Any:
    def counted(self: Any, input_batch: Any, batch_desc: Any) -> Any:
        own = partition_batch(self, input_batch, batch_desc)
        if own is not input_batch:
            COUNTED["split"] += 1
            COUNTED["own"] += own.num_tokens
            COUNTED["whole"] += input_batch.num_tokens
        return own

    return counted
