"""A prompt of one token begins from an empty recurrent state.

Why:         GatedDeltaNet's metadata counts every request with one row as a decode, and a decode goes on from whatever
             its state slot holds. A new prompt of one token in a slot that was used before goes on from another
             request's state.
How:         let the metadata count a request that is still in its prompt as a prefill, which knows whether it has an
             earlier state. The prefill operations give the same for one row as the decode operations.
Remove when: every release in `supports` tells a prompt of one token from a decode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atom_patches.core import Patch
from atom_patches.vllm.cpu._conditions import gated_delta_net, upstream_knows_prompts

PATCH = Patch(
    id="vllm.cpu.split_decodes_and_prefills",
    target="vllm.v1.attention.backends.gdn_attn:split_decodes_and_prefills",
    supports="vllm>=0.20.2,<0.28",
    kind="correctness",
    group="vllm.cpu_gdn",
    when=gated_delta_net,
    upstreamed=upstream_knows_prompts,
    relies_on=(
        "vllm.v1.attention.backends.utils:split_decodes_and_prefills",
        "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build",
    ),
    upstream="vllm-project/vllm#51565",
)


@PATCH.around
def _split_by_progress(original: Callable[..., Any]) -> Callable[..., Any]:
    def split_decodes_and_prefills(common_attn_metadata: Any, decode_threshold: int = 1) -> Any:
        return original(common_attn_metadata, decode_threshold, treat_short_extends_as_decodes=False)

    return split_decodes_and_prefills
