"""Prefills of ATOM decoders are not captured.

Why:         by default SGLang captures prefills in pieces, around its own models' attention; steps of these decoders
             bind plans and recurrent states when they run, which a captured piece would keep from its capture.
How:         where a model runner would capture prefills, first turn that off in the configuration, as SGLang's own
             rules do for others: schedulers of data-parallel ranks ask there, too, how prefills run.
Remove when: the decoders' steps were shown to run right in captured prefills.
"""

from __future__ import annotations

import logging
from typing import Any

from atom_patches.core import Patch
from atom_patches.sglang.models._config import GROUP, SUPPORTS, atom_models_asked

logger = logging.getLogger(__name__)

PATCH = Patch(
    id="sglang.models.prefill_graphs",
    target="sglang.srt.model_executor.model_runner_components.cuda_graph_setup:capture_prefill_graph",
    supports=SUPPORTS,
    kind="correctness",
    group=GROUP,
    when=atom_models_asked,
    relies_on=(
        "sglang.srt.managers.scheduler_components.dp_attn:prepare_mlp_sync_batch_raw",
        "sglang.srt.model_executor.cuda_graph_config:check_cuda_graph_backend",
    ),
    upstream="none: it is about this package's decoders",
)


@PATCH.around
def without_graphs(original: Any) -> Any:
    """The runner of prefills: the eager one."""

    def capture_prefill_graph(*, model_runner: Any, **given: Any) -> Any:
        from atom_patches.sglang.adapters.prefill_graphs import turn_off

        logger.info("prefills are not captured: ATOM's decoders bind their plans when a step runs")
        turn_off(model_runner)
        return original(model_runner=model_runner, **given)

    return capture_prefill_graph
