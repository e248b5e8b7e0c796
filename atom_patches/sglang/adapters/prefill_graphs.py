"""Prefills that are not captured, said where SGLang's runners and schedulers look."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from sglang.srt.model_executor import cuda_graph_config


def turn_off(model_runner: Any) -> None:
    """Disable the capture of prefills in this process's configuration.

    Where what was asked for and what is run are one object, that is changed; later, what is run is published, and
    replaced.
    """
    if not hasattr(cuda_graph_config, "with_phase"):
        model_runner.server_args.cuda_graph_config.prefill.backend = "disabled"
        return
    from sglang.srt.runtime_context import get_context, get_exec

    published = get_exec().graph.cuda_graph_config
    off = cuda_graph_config.with_phase(published, "prefill", backend="disabled")
    get_context().override("atom_patches", cuda_graph_config=off)
