"""What a configuration says about its model, in every release of SGLang that hands one over."""

from __future__ import annotations

import importlib
from typing import Any

# Until 0.5.17 the configuration has methods; later it is a record, and functions answer.
_FUNCTIONS = "sglang.srt.arg_groups.model_override_base"


def model_config(config: Any) -> Any:
    """SGLang's description of the model of a `ServerArgs`."""
    if hasattr(config, "get_model_config"):
        return config.get_model_config()
    return importlib.import_module(_FUNCTIONS).model_config_of(config)


def attention_backends(config: Any) -> set[str]:
    """The names of the attention backends for prefill and for decoding."""
    if hasattr(config, "get_attention_backends"):
        return set(config.get_attention_backends())
    return set(importlib.import_module(_FUNCTIONS).attention_backends_of(config))
