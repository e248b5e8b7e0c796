"""Weights in FP8 and attention to latents, selected ones too, on the CPU; a `setup` of traffic.py."""

from __future__ import annotations

from tests.vllm import layer_probe, plain_fp8, sparse_backend


def install() -> None:
    """From now on, in this process."""
    sparse_backend.install()
    plain_fp8.install()


report = layer_probe.report
