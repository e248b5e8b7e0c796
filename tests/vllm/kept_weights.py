"""On the CPU, vLLM packs the weights of linear layers for its kernels after loading, and drops them; here they stay."""

from __future__ import annotations


def keep_linear_weights() -> None:
    """From now on, in this process."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    UnquantizedLinearMethod.process_weights_after_loading = lambda self, layer: utils.dispatch_cpu_unquantized_gemm(
        layer, remove_weight=False
    )
