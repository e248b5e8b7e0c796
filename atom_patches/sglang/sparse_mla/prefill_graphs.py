"""Prefills are not captured: their selection depends on lengths that the host knows.

Why:         by default SGLang captures prefills in pieces, and for sparse attention calls parts of its own indexer
             between them.
How:         where a model runner would capture prefills, first turn that off in the configuration, as SGLang's own
             rules do for others: schedulers of data-parallel ranks ask there, too, how prefills run.
Remove when: SGLang captures prefills through its backend's own methods alone.
"""

from __future__ import annotations

import logging
from typing import Any

from atom_patches.core import Patch
from atom_patches.sglang.sparse_mla._config import GROUP, sparse_mla_asked

logger = logging.getLogger(__name__)

PATCH = Patch(
    id="sglang.sparse_mla.prefill_graphs",
    target="sglang.srt.model_executor.model_runner_components.cuda_graph_setup:capture_prefill_graph",
    supports="sglang>=0.5.17,<0.5.18",
    kind="correctness",
    group=GROUP,
    when=sparse_mla_asked,
    relies_on=(
        "sglang.srt.managers.scheduler_components.dp_attn:prepare_mlp_sync_batch_raw",
        "sglang.srt.model_executor.cuda_graph_config:check_cuda_graph_backend",
    ),
    upstream="none: graphs of prefills are made for SGLang's own sparse attention",
)


@PATCH.around
def without_graphs(original: Any) -> Any:
    """The runner of prefills: the eager one."""

    def capture_prefill_graph(*, model_runner: Any, **given: Any) -> Any:
        from atom_patches.sglang.adapters.prefill_graphs import turn_off

        logger.info("prefills are not captured: sparse attention plans them by lengths that the host knows")
        turn_off(model_runner)
        return original(model_runner=model_runner, **given)

    return capture_prefill_graph
