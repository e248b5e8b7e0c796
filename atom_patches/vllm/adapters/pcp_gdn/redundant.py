"""Every rank gathers all rows and runs the whole step, as an engine of one rank does."""

from __future__ import annotations

import torch

from atom_patches.vllm.adapters.pcp_gdn.core_call import CoreCall


def run(call: CoreCall) -> None:
    """Run the layer's core on the whole step, and keep this rank's rows."""
    step, out = call.step, call.core_attn_out
    call.states.clear(call.metadata.fresh)
    widths = [call.mixed_qkv.shape[1], call.b.shape[1], call.a.shape[1]]
    whole = step.gather(torch.cat([call.mixed_qkv, call.b, call.a], dim=1))
    whole_out = out.new_zeros((step.plan.num_tokens, *out.shape[1:]))
    mixed_qkv, b, a = (part.contiguous() for part in whole.split(widths, dim=1))
    call.run_on(call.metadata.whole, mixed_qkv, b, a, whole_out)
    out.copy_(whole_out[step.local_rows])
