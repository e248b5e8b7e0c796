"""layer_probe beside what lets pictures be processed (rich_prompts); a `setup` of traffic.py and dp_traffic.py."""

from __future__ import annotations

from tests.vllm import layer_probe, rich_prompts
from tests.vllm.layer_probe import report

__all__ = ["install", "report"]


def install() -> None:
    """From now on, in this process."""
    layer_probe.install()
    rich_prompts.install()
