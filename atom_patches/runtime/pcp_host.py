"""What the host's part of a split step costs: operations that it issues one by one between the compiled pieces.

A layer's launches, collectives among them, times one figure. It is added to the device's time: what two H200 took
beyond kernels and exchanges was no less at 131,072 tokens than at 16,384, so devices wait for it, in whatever way
(benchmarks/two-gpu-h200-2026-11-30.md).

The figure is the least-squares fit of

    6.6 ms + 1.06 * device + launches * SECONDS

to the 24 times measured there (two ways to spread experts, three modes and `auto`, three lengths), each error relative
to its time. The first two constants are those of one GPU: what a request takes besides, and a layer in an engine over
the sum of its parts. `device` is what `bench pcp` computes, with attention at 707e12 operations a second. The fit is
within 6 % of the times at 65,536 and 131,072 tokens, and within 17 % at 16,384, where two runs of one mode were 16 %
apart. It gives the fastest mode in all six cases, and the order of all three in five: of the sixth, 16,384 tokens with
whole experts, `two_pass` and `relay` (both zigzag) change places, which were 5.6 ms apart.

A launch alone takes the host 5 to 10 us. A profile has since shown what most of the rest was, at 16,384 tokens: the
host waited for the device twice in each recurrent layer. It does not any more, and two modes measured again give 33 us
there, but as much as before at the longer lengths. The figure stays until all modes are measured again: it still says
which is the fastest. Other hosts, and models of more than 12 layers, were not measured.
tests/vllm/test_pcp_launches.py counts the launches.
"""

from __future__ import annotations

from collections.abc import Mapping

from atom_patches.runtime.pcp import PcpPlan

SECONDS = 80e-6
"""What one launch adds to a step."""

RECURRENT: Mapping[str, int] = {"redundant": 14, "relay": 12, "two_pass": 23, "head_all_to_all": 31}
"""Launches of a GatedDeltaNet layer but for the scan of a rank's own rows, by mode, with a part of the final states."""

UNCUT, BETWEEN = 8, 15
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
