"""What SGLang's configuration says about the sizes of sparse attention. Imports no engine."""

from __future__ import annotations

import logging
from typing import Any

from atom_patches.core import settings
from atom_patches.models.lightning_indexer import IndexerShape
from atom_patches.runtime.sparse_plan import Workspace, selection_rows

logger = logging.getLogger(__name__)

#: What SGLang 0.5.17 derives at most where the user sets no limit.
MOST_RUNNING = 4096


def indexer_shape(config: Any) -> IndexerShape:
    """The indexer of a checkpoint's configuration."""
    return IndexerShape(
        heads=config.index_n_heads,
        head_size=config.index_head_dim,
        rope_size=config.qk_rope_head_dim,
        top_k=config.index_topk,
        interleaved=bool(getattr(config, "indexer_rope_interleave", False)),
    )


def workspace(shape: IndexerShape) -> Workspace:
    """The bound that the user, or the default, sets to what is held while rows select."""
    return shape.workspace(settings.sparse_mla_workspace_mib() << 20)


def rows_per_request(args: Any) -> int:
    """Rows of a request in a step that decodes, or verifies drafts."""
    return args.speculative_num_draft_tokens or 1


def prefill_rows(args: Any) -> int:
    """Rows of a prefill step."""
    chunk = args.chunked_prefill_size
    return chunk if chunk and chunk > 0 else args.max_prefill_tokens


def held_bytes(args: Any, config: Any) -> int:
    """Bytes beside the caches: the slots that are selected, and what selecting takes."""
    shape = indexer_shape(config)
    rows = selection_rows(args.max_running_requests or MOST_RUNNING, rows_per_request(args), prefill_rows(args))
    kept, at_once = 4 * rows * shape.top_k, workspace(shape).budget
    logger.info(
        "sparse attention holds %d MiB of selected slots (%d rows of %d) and %d MiB while rows select",
        kept >> 20,
        rows,
        shape.top_k,
        at_once >> 20,
    )
    return kept + at_once
