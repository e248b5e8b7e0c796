"""Prefills are not captured: their selection depends on lengths that the host knows.

Why:         by default SGLang captures prefills in pieces, and for sparse attention calls parts of its own indexer
             between them.
How:         where a model runner would capture prefills, give it the runner without graphs.
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
    relies_on=("sglang.srt.model_executor.model_runner_components.cuda_graph_setup:GraphCapture",),
    upstream="none: graphs of prefills are made for SGLang's own sparse attention",
)


@PATCH.around
def without_graphs(original: Any) -> Any:
    """The runner of prefills: the eager one."""
    del original

    def capture_prefill_graph(*, model_runner: Any, eager_runner: Any, force_for_draft_worker: bool = False) -> Any:
        del force_for_draft_worker
        from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import (  # pyright: ignore[reportMissingImports]
            GraphCapture,
        )

        logger.info("prefills are not captured: sparse attention plans them by lengths that the host knows")
        return GraphCapture(
            runner=None if model_runner.is_draft_worker else eager_runner,
            memory_phase="draft_prefill" if model_runner.is_draft_worker else "prefill",
            memory_usage_gb=0,
            capture_time=0,
        )

    return capture_prefill_graph
