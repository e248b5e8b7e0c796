"""The ForwardBatch of the step that is running.

Decoders know no ForwardBatch; the parts that SGLang provides read it here.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import TYPE_CHECKING

from atom_patches.runtime.scope import Scope

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

BATCH: Scope[ForwardBatch] = Scope("forward batch")
"""Bound by `forward_step` for as long as a decoder runs."""


def current_batch() -> ForwardBatch:
    """The batch that is running.

    Raises:
        LookupError: none is.
    """
    return BATCH.required()
