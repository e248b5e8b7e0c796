"""How GatedDeltaNet layers are to run, as far as that is known before an engine exists.

Imports neither torch nor vLLM where the parent process decides; only :func:`cost_table` needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from atom_patches.core import settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LENGTHS = (512, 2_048, 16_384, 65_536, 262_144)
RANKS = (2, 4, 8)


def unserved_heads(config: VllmConfig) -> Iterator[str]:
    """One line if the recurrent layers' heads cannot be dealt out as the environment asks."""
    heads: Any = getattr(config.model_config.hf_text_config, "linear_num_key_heads", None)
    if settings.pcp_gdn() != "head_all_to_all" or not config.model_config.is_hybrid or not heads:
        return
    parallel = config.parallel_config
    ranks = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
    if heads % ranks:
        yield (
            f"ATOM_PCP_GDN is head_all_to_all, and the recurrent layers' {heads} key heads cannot be dealt out evenly "
            f"over {ranks} ranks (--tensor-parallel-size times --prefill-context-parallel-size); set it to auto, "
            "or pass other sizes"
        )


def cost_table() -> Iterator[str]:
    """What one layer of Qwen3-Next's shape is expected to take, and which way `auto` chooses."""
    from dataclasses import replace

    from atom_patches.runtime import pcp_host
    from atom_patches.runtime.pcp import plan_step
    from atom_patches.runtime.pcp_gdn_cost import MODES, GdnShape, admissible, choose, seconds

    shape = GdnShape(key_heads=16, value_heads=32, key_size=128, value_size=128)
    yield "one layer with 16 key and 32 value heads of 128, bfloat16, one prompt, as expected of H200 GPUs, in ms"
    yield f"{'prompt':>9} {'ranks':>5} " + " ".join(f"{mode:>15}" for mode in (*MODES, "relay/3")) + "  auto, auto/3"
    for ranks in RANKS:
        for length in LENGTHS:
            plan = plan_step([length], ranks, min_rows=1)
            assert plan is not None
            row = replace(shape, in_a_row=3)
            costs = [seconds(mode, plan, shape) if admissible(mode, ranks, shape) else None for mode in MODES]
            costs.append(seconds("relay", plan, row))
            columns = " ".join(" " * 15 if cost is None else f"{cost * 1e3:15.3f}" for cost in costs)
            yield f"{length:>9,} {ranks:>5} {columns}  {choose(plan, shape)}, {choose(plan, row)}"
    yield "/3: three such layers follow each other before ranks meet, as where experts exchange no rows"
    issued = ", ".join(f"{mode} {count}" for mode, count in pcp_host.RECURRENT.items())
    yield (
        f"within them, {pcp_host.SECONDS * 1e6:.0f} us for each operation that the host issues on two ranks: {issued}; "
        "runtime/pcp_host.py says how this was fitted"
    )
    yield "runtime/pcp_gdn_cost.py has the formulas, and says which rates were measured and which are assumed"
