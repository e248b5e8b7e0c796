"""Full attention over SGLang's paged cache.

A rank without requests has nothing to attend to and plans no attention: its one row gets zeros, and no cache is
touched. SGLang's own short cut for idle ranks leaves the memory as it was found, which a row that is computed on
would carry.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor

from atom_patches.sglang.adapters.current import current_batch


class PagedAttention(RadixAttention):
    """q, k and v [rows, heads * head_dim] to the heads' outputs, of the batch that is running."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch = current_batch()
        if batch.forward_mode.is_idle():
            return q.new_zeros(q.shape[0], self.tp_q_head_num * self.v_head_dim)
        return super().forward(q, k, v, batch)
