"""What a collective takes: the one place that says how fast ranks reach each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Between any two ranks of one host.

    The bandwidth was measured between two H200 over NVLink, NCCL's all-gather and all-reduce of 256 MiB without
    multicast (benchmarks/link-h200-2026-11-30.md); smaller messages reach less. The latency is assumed: a small
    collective among up to eight GPUs.

    Attributes:
        bandwidth: bytes per second that a rank sends, and receives at the same time.
        latency: seconds that any collective takes besides.
    """

    bandwidth: float = 240e9
    latency: float = 20e-6

    def seconds(self, received: float) -> float:
        """Seconds of a collective in which each rank receives that many bytes."""
        return self.latency + received / self.bandwidth
