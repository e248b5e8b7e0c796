"""Make the sampler of every rank but the first choose other tokens, as a rounding difference could."""

from __future__ import annotations

import os
from typing import Any


def install() -> None:
    """Shift each sampled id by one on ranks other than 0."""
    if os.environ["RANK"] == "0":
        return
    from vllm.v1.sample.sampler import Sampler

    original = Sampler.forward

    def forward(self: Sampler, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        output.sampled_token_ids = output.sampled_token_ids + 1
        return output

    Sampler.forward = forward
