"""What a split step costs beyond its parts: operations that the host issues between the compiled pieces, and more.

A layer's launches, collectives among them, times one figure, are added to the device's time, which counts a little
more than the sum of its parts. SPLIT is fitted to what two H200 took to the first token of 16,384, 65,536 and 131,072
tokens, in the three modes that share the work, with either attention and whole experts: 18 times
(benchmarks/two-gpu-h200-2026-11-30.md, "All modes"):

    6.6 ms + 1.06 * SPLIT * device + launches * SECONDS

The first two constants are those of one GPU: what a request takes besides, and a layer in an engine over the sum of its
parts. `device` is what `bench pcp` computes, with attention at 707e12 operations a second. The fit is within 5.5 %, and
within 3.5 % for a relay. Launches leave no trace in these times: with both figures free, a launch would take -5 us. So
the host is ahead of the devices from 16,384 tokens on, and SECONDS is what a launch alone takes it, for shorter steps.

Other hosts, more ranks, and models of more than 12 layers were not measured. tests/vllm/test_pcp_launches.py counts
the launches.
"""

from __future__ import annotations

from collections.abc import Mapping

from atom_patches.runtime.pcp import PcpPlan

SECONDS = 5e-6
"""What one launch adds to a step."""

SPLIT = 1.029
"""How many times the sum of its parts, as one GPU runs them, a split step takes on the devices."""

RECURRENT: Mapping[str, int] = {"redundant": 12, "relay": 10, "two_pass": 21, "head_all_to_all": 29}
"""Launches of a GatedDeltaNet layer but for the scan of a rank's own rows, by mode, with a part of the final states."""

UNCUT, BETWEEN = 6, 13
"""The same of a relay or two passes where no cut falls inside a prompt, and of a relay's rank between two others."""

KEYS_AND_VALUES = 6
"""Launches of a full-attention layer, to gather keys and values."""

QUERIES = 8
"""Launches of a full-attention layer, to send queries away and to take the answers back."""

EXPERTS = 3
"""Launches of a layer whose experts are spread, to gather rows and their logits, and to scatter sums."""


def recurrent_launches(mode: str, plan: PcpPlan) -> int:
    """Launches of one GatedDeltaNet layer on the rank that has the most."""
    ranks = range(plan.world_size)
    if mode in ("relay", "two_pass") and not any(map(plan.receives_state, ranks)):
        return UNCUT
    if mode == "relay" and any(plan.receives_state(rank) and plan.sends_state(rank) for rank in ranks):
        return BETWEEN
    return RECURRENT[mode]
