"""Create engine configurations one after the other, as a launch does before any engine exists.

    python configs.py PLAN.json RESULT.json

PLAN is a list of options of EngineArgs; `env` sets environment variables for one of them, and `after` sets attributes
of the finished configuration that no option can reach here (another executor needs its package, the CPU platform turns
some options off). RESULT holds for each the error's text, or what the KV-cache layer makes of the accepted
configuration.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from enum import Enum
from pathlib import Path
from typing import Any


def outcome(options: dict[str, Any]) -> dict[str, Any]:
    """Try one configuration."""
    from vllm.engine.arg_utils import EngineArgs

    from atom_patches.core import PatchError

    after, outer = options.pop("after", {}), dict(os.environ)
    os.environ.update(options.pop("env", {}))
    try:
        config = EngineArgs(dtype="float32", max_model_len=512, **options).create_engine_config()
        return ask_again(config, after) if after else {"accepted": accounting(config)}
    except PatchError as error:
        return {"refused": str(error)}
    finally:
        os.environ.clear()
        os.environ.update(outer)


def ask_again(config: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """Change attributes of the configuration and decide once more."""
    from atom_patches.vllm.pcp._config import pcp_enabled

    for path, value in changes.items():
        *parts, name = path.split(".")
        owner = functools.reduce(getattr, parts, config)
        kind = type(getattr(owner, name))
        setattr(owner, name, kind[value] if issubclass(kind, Enum) else value)
    return {"accepted": pcp_enabled(config).reason}


def accounting(config: Any) -> dict[str, Any]:
    """Block sizes and bytes that vLLM's own functions derive from the configuration."""
    import torch
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    config.cache_config.block_size = 16
    handshake = block_size_after_handshake(config)
    cache = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return {
        "longest request": spec.max_memory_usage_bytes(config),
        "block sizes": list(resolve_kv_cache_block_sizes(cache, config)),
        "after the handshake": handshake,
    }


def block_size_after_handshake(config: Any) -> int:
    """The block size of an engine that has its caches, after the second validation of its configuration."""
    before = config.cache_config.block_size, config.cache_config.num_gpu_blocks
    config.cache_config.block_size, config.cache_config.num_gpu_blocks = 384, 100
    config.__post_init__()
    found = config.cache_config.block_size
    config.cache_config.block_size, config.cache_config.num_gpu_blocks = before
    return found


def main() -> None:
    plan, result = Path(sys.argv[1]), Path(sys.argv[2])
    result.write_text(json.dumps([outcome(options) for options in json.loads(plan.read_text())]))


if __name__ == "__main__":
    main()
