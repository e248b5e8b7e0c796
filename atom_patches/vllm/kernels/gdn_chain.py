"""vLLM's own sequence of kernels inside a GatedDeltaNet layer: prefill in `_gdn_prefill`, decode in
`_gdn_decode`."""

from __future__ import annotations

from ._gdn_decode import *  # noqa: F403
from ._gdn_prefill import *  # noqa: F403
