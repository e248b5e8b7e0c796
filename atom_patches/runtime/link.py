"""What a collective is assumed to take: the one place that says how fast ranks reach each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Between any two ranks of one host.

    The defaults are assumptions, not measurements: NVLink of an H200 as far as collectives use it, and a small
    collective among up to eight GPUs.

    Attributes:
        bandwidth: bytes per second that a rank sends, and receives at the same time.
        latency: seconds that any collective takes besides.
    """

    bandwidth: float = 350e9
    latency: float = 20e-6

    def seconds(self, received: float) -> float:
        """Seconds of a collective in which each rank receives that many bytes."""
        return self.latency + received / self.bandwidth
