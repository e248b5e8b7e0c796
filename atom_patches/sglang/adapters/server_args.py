"""What a configuration says, in every release of SGLang that hands one over.

Until 0.5.17 a `ServerArgs` has what was asked for and, in the same fields, what SGLang made of it, and methods besides.
Later it is a record of what was asked for alone, and functions answer.
"""

from __future__ import annotations

import importlib
from typing import Any

_FUNCTIONS = "sglang.srt.arg_groups.model_override_base"


def resolved(config: Any) -> Any:
    """The configuration as SGLang runs it, to read settings of."""
    if not is_record(config) or isinstance(config, (later := _later()).ResolvedView):
        return config
    return later.resolved_view(config)


def model_config(config: Any) -> Any:
    """SGLang's description of the model of a configuration, resolved or not."""
    return _later().model_config_of(config) if is_record(config) else config.get_model_config()


def attention_backends(config: Any) -> tuple[str, str]:
    """The names of the attention backends for prefill and for decoding."""
    if not is_record(config):
        return config.get_attention_backends()
    return _later().attention_backends_of(resolved(config))


def mamba_cache_chunk_size(config: Any) -> int:
    """Tokens between two places at which recurrent states may be cached."""
    if not is_record(config):
        return config.mamba_cache_chunk_size
    return importlib.import_module("sglang.srt.arg_groups.overrides").mamba_cache_chunk_size(config)


def attention_ranks(config: Any) -> int:
    """Data-parallel ranks of attention within one group of tensor-parallel ranks; `config` is resolved."""
    return getattr(config, "attn_dp_size", config.dp_size)


def is_record(config: Any) -> bool:
    """Whether this is a later release's configuration."""
    return not hasattr(config, "get_model_config")


def _later() -> Any:
    return importlib.import_module(_FUNCTIONS)
