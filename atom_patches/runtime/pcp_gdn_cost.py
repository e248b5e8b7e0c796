"""What each way to run a GatedDeltaNet layer in a split step costs, and so which one `auto` takes.

With R rows on the slowest rank, T rows in the pool, C rows of those that other ranks go on from, and P ranks, one layer
takes its launches on the host (pcp_host.py), and

    redundant        gather(R * row bytes)                                         + T * core
    relay            R * fused + the longest wait of one rank for the next / layers in a row + final states
    two_pass         gather(halo) + C * segment + gather(state + map)              + R * fused + final states
    head_all_to_all  scatter(R * row bytes) + max(T * fused / P, longest * depth)  + scatter(R * output bytes)
                     + gather(states / P)

where a collective takes a latency and what a rank receives over the bandwidth of its link. `relay` plays through what
it really waits for: a rank scans once the rank before it has, and that rank goes on meanwhile. So a prompt that lies on
all ranks takes as long as on one in the first of the layers that follow each other before all ranks meet, and no longer
than its share in the others. Final states are shared once a step, for all layers together.

All is computed from global lengths and the layer's shape, so all ranks choose alike.

`auto` does not take `head_all_to_all`. What that exchanges grows with the prompt, so whether it pays hangs on a link
that nobody knows here; on links as fast as the one below it is worth a try.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from atom_patches.runtime import pcp_host
from atom_patches.runtime.link import Link

if TYPE_CHECKING:
    from atom_patches.runtime.pcp import PcpPlan

Mode = Literal["redundant", "relay", "two_pass", "head_all_to_all"]
MODES: tuple[Mode, ...] = ("redundant", "relay", "two_pass", "head_all_to_all")
AUTOMATIC: tuple[Mode, ...] = ("redundant", "two_pass", "relay")
"""What `auto` chooses from; of equal costs the first."""

FLOAT32 = 4


@dataclass(frozen=True)
class GdnShape:
    """One GatedDeltaNet layer, as a tensor-parallel rank has it.

    Attributes:
        key_heads, value_heads: heads on this rank.
        key_size, value_size: of one head.
        taps: of the convolution.
        element_bytes: of activations and of the convolution's state.
        state_bytes_each: of an element of the recurrent state in its slot.
        in_a_row: such layers that a rank runs before all ranks meet, in full attention or where rows meet experts.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: int = 4
    element_bytes: int = 2
    state_bytes_each: int = FLOAT32
    in_a_row: int = 1

    @property
    def channels(self) -> int:
        """Queries, keys and values of one row."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    @property
    def row_bytes(self) -> int:
        """One row before the convolution, gates included."""
        return (self.channels + 2 * self.value_heads) * self.element_bytes

    @property
    def output_bytes(self) -> int:
        return self.value_heads * self.value_size * self.element_bytes

    @property
    def tail_bytes(self) -> int:
        """The convolution's state of one request."""
        return (self.taps - 1) * self.channels * self.element_bytes

    @property
    def slot_bytes(self) -> int:
        """Both states of one request, as they lie in their slots."""
        return self.tail_bytes + self.value_heads * self.value_size * self.key_size * self.state_bytes_each

    @property
    def size(self) -> float:
        """Work of one row, relative to one value head of 128 by 128."""
        return self.value_heads * self.key_size * self.value_size / 128**2


@dataclass(frozen=True)
class Rates:
    """Seconds of one row and one value head of 128 by 128, and of communication.

    The first three are H200 figures of one layer with 32 value heads and 16,384 rows, bfloat16, divided by both; see
    benchmarks/kernels-h200-2026-11-29. The depth is an assumption: a microsecond and a quarter for each chunk of 64
    rows that a scan takes one after the other, however few heads it has.

    Attributes:
        core: the engine's own convolution and scan.
        segment: `gdn_prefill_segment`.
        fused: `gdn_prefill`, which scans a rank's own rows on a GPU.
        depth: seconds of one row of the longest request that no number of idle processors makes shorter.
        link: between the ranks.
        launch: what an operation that the host issues adds.
    """

    core: float = 1704.5e-6 / 16384 / 32
    segment: float = 630.2e-6 / 16384 / 32
    fused: float = 714.5e-6 / 16384 / 32
    depth: float = 1.25e-6 / 64
    link: Link = Link()
    launch: float = pcp_host.SECONDS


H200 = Rates()


def seconds(mode: Mode, plan: PcpPlan, shape: GdnShape, rates: Rates = H200) -> float:
    """Seconds of one layer on the slowest rank, its exchange and its launches included."""
    return _on_devices(mode, plan, shape, rates) + rates.launch * pcp_host.recurrent_launches(mode, plan)


def _on_devices(mode: Mode, plan: PcpPlan, shape: GdnShape, rates: Rates) -> float:
    ranks, others = plan.world_size, plan.world_size - 1
    core = rates.core * shape.size
    if mode == "redundant":
        return rates.link.seconds(others * plan.slice_size * shape.row_bytes) + plan.pool_size * core
    if mode == "relay":
        return _relay(plan, shape, rates)
    if mode == "two_pass":
        scans = plan.slice_size * rates.fused * shape.size + _final_states(plan, shape, rates)
        if not any(two_pass_bytes(plan, shape)):
            return scans
        cut = max(plan.segments(rank)[-1].rows for rank in range(ranks) if plan.sends_state(rank))
        exchanged = sum(rates.link.seconds(others * sent) for sent in two_pass_bytes(plan, shape))
        return scans + cut * rates.segment * shape.size + exchanged
    work = plan.pool_size * rates.fused * shape.size / ranks
    longest = max(plan.query_lens[request] for request in plan.pooled)
    return (
        max(work, longest * rates.depth)
        + rates.link.seconds(others / ranks * plan.slice_size * shape.row_bytes)
        + rates.link.seconds(others / ranks * plan.slice_size * shape.output_bytes)
        + rates.link.seconds(others / ranks * len(plan.pooled) * shape.slot_bytes)
    )


def two_pass_bytes(plan: PcpPlan, shape: GdnShape) -> tuple[int, int]:
    """Bytes that a rank sends in the two collectives of a layer, whatever the step holds; none where no cut matters."""
    if not any(plan.receives_state(rank) for rank in range(plan.world_size)):
        return 0, 0
    return shape.tail_bytes, shape.value_heads * shape.key_size * (shape.value_size + shape.key_size) * FLOAT32


def admissible(mode: Mode, ranks: int, shape: GdnShape) -> bool:
    """Whether the shape can be run so."""
    return mode != "head_all_to_all" or shape.key_heads % ranks == 0


def choose(plan: PcpPlan, shape: GdnShape, rates: Rates = H200) -> Mode:
    """The cheapest of what `auto` chooses from."""
    return min(AUTOMATIC, key=lambda mode: seconds(mode, plan, shape, rates))


def _relay(plan: PcpPlan, shape: GdnShape, rates: Rates) -> float:
    hop = rates.link.seconds(shape.slot_bytes)
    at = [0.0] * plan.world_size
    for _ in range(shape.in_a_row):
        for rank in range(plan.world_size):
            if plan.receives_state(rank):
                at[rank] = max(at[rank], at[rank - 1] + hop)
            at[rank] += sum(segment.rows for segment in plan.segments(rank)) * rates.fused * shape.size
    return max(at) / shape.in_a_row + _final_states(plan, shape, rates)


def _final_states(plan: PcpPlan, shape: GdnShape, rates: Rates) -> float:
    """One layer's part of what is broadcast at the step's end."""
    return len(plan.pooled) * shape.slot_bytes / rates.link.bandwidth
