"""GatedDeltaNet layers in a split step.

Four ways to run the same recurrence, one file each, chosen by ``ATOM_PCP_GDN``:

- ``redundant``: every rank gathers all rows and scans the whole step. The oracle, and the cheapest for few rows.
- ``relay``: each rank scans its own rows and hands its state to the next rank, which goes on from there.
- ``two_pass``: each rank first finds what its rows do to any state; these are exchanged, and then all ranks scan their
  own rows at the same time.
- ``head_all_to_all``: each rank scans all rows of its share of the heads.

``auto`` takes the cheapest for the step at hand, see :mod:`atom_patches.runtime.pcp_gdn_cost`.

Afterwards every rank holds the final state of every request, so decodes and later chunks need nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from atom_patches.core import settings
from atom_patches.runtime import pcp_gdn_cost
from atom_patches.vllm.adapters.pcp_gdn import head_all_to_all, redundant, relay, two_pass
from atom_patches.vllm.adapters.pcp_gdn.core_call import CoreCall

MODES: Mapping[str, Callable[[CoreCall], None]] = {
    "redundant": redundant.run,
    "relay": relay.run,
    "two_pass": two_pass.run,
    "head_all_to_all": head_all_to_all.run,
}


def run_core(call: CoreCall) -> None:
    """Convolution and recurrence of one layer for this rank's rows."""
    mode = settings.pcp_gdn()
    if mode == "auto":
        # The step's layers are alike, so the first one decides for all.
        mode = call.step.once("gdn mode", lambda: pcp_gdn_cost.choose(call.step.plan, call.shape))
    call.trace("rank %d runs its recurrence as %s", call.step.rank, mode)
    MODES[mode](call)
