"""On the CPU, experts run on this package's operation instead of vLLM's kernel; a `setup` of traffic.py.

vLLM packs weights for its kernels after loading and drops them; here it keeps them, those of a shared expert, too.
"""

from __future__ import annotations

from typing import Any

from tests.vllm import layer_probe
from tests.vllm.kept_weights import keep_linear_weights

_along: list[bool] = []


def install() -> None:
    """From now on, in this process."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    from atom_patches.vllm.adapters.models import experts

    layer_probe.install()
    keep_linear_weights()
    experts._as_stored = lambda _: True
    UnquantizedFusedMoEMethod.process_weights_after_loading = lambda self, layer: None
    take_along = experts.RoutedExperts.take_along

    def noted(self: Any, shared: Any, gate: Any) -> bool:
        _along.append(take_along(self, shared, gate))
        return _along[-1]

    experts.RoutedExperts.take_along = noted


def report() -> dict[str, Any]:
    """What layer_probe reports, and for each layer whether it took its shared expert along."""
    return {**layer_probe.report(), "along": _along}
