"""vLLM's own gated delta rule: the chunked operators in `_gated_delta_chunk`, the recurrent ones in
`_gated_delta_recurrent`."""

from __future__ import annotations

from ._gated_delta_chunk import *  # noqa: F403
from ._gated_delta_recurrent import *  # noqa: F403
