"""What SGLang asks of a device before it serves a model with sparse attention.

With STAND_IN_LIKE_AMD=1 it sees an AMD GPU there: pages of one token, and FP8 caches without scales in their rows.
Otherwise pages have 64 tokens, and rows have scales, as on NVIDIA's.
"""

from __future__ import annotations

import os

from sglang_on_cpu.after_import import replace

LIKE_AMD = "STAND_IN_LIKE_AMD"


def install() -> None:
    replace("torch.cuda", "get_device_capability", lambda original: lambda device=None: (9, 4))
    if os.environ.get(LIKE_AMD) != "1":
        return
    replace("sglang.srt.arg_groups.overrides", "is_hip", lambda original: lambda: True)
    for name in ("mem_cache.memory_pool", "mem_cache.kv_cache_configurator"):
        replace(f"sglang.srt.{name}", "_is_hip", lambda original: True)
