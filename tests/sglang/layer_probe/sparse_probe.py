"""A plugin of SGLang's that writes down every call of the overlay's sparse attention and of its indexer.

One line of JSON a call and process, in the directory SPARSE_PROBE: which of the two, the layer, the step's mode, the
rows, and whether rows selected. Where graphs run, calls are seen while they are captured.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import wrapt

ADAPTERS = "atom_patches.sglang.adapters.sparse_mla"


def install() -> None:
    """Wrap both classes when they are imported."""
    wrapt.register_post_import_hook(_probe_attention, f"{ADAPTERS}.backend")
    wrapt.register_post_import_hook(_probe_indexer, f"{ADAPTERS}.indexer")


def _probe_attention(module: Any) -> None:
    forward = module.SparseMlaBackend.forward

    @functools.wraps(forward)
    def noted(self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **given: Any) -> Any:
        _note("attention", layer.layer_id, forward_batch, q.shape[0], given.get("topk_indices") is not None)
        return forward(self, q, k, v, layer, forward_batch, *args, **given)

    module.SparseMlaBackend.forward = noted


def _probe_indexer(module: Any) -> None:
    forward = module.SparseIndexer.forward

    @functools.wraps(forward)
    def noted(self: Any, x: Any, q_lora: Any, positions: Any, forward_batch: Any, layer_id: int, **given: Any) -> Any:
        selected = forward(self, x, q_lora, positions, forward_batch, layer_id, **given)
        _note("indexer", layer_id, forward_batch, q_lora.shape[0], selected is not None)
        return selected

    module.SparseIndexer.forward = noted


def _note(what: str, layer: int, batch: Any, rows: int, selected: bool) -> None:
    line = {"what": what, "layer": layer, "mode": batch.forward_mode.name, "rows": rows, "selected": selected}
    with (Path(os.environ["SPARSE_PROBE"]) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
