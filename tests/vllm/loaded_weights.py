"""What a model's parameters hold when its weights are loaded, before vLLM lays them out; a `setup` of traffic.py."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch

from tests.vllm import layer_probe

#: What ATOM's modules are called beyond vLLM's.
OURS = re.compile(r"(?<=\.)decoder\.")
_loaded: dict[str, str] = {}


def install() -> None:
    """Look at every model that is loaded."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    layer_probe.install()
    load = DefaultModelLoader.load_weights
    if not hasattr(load, "probed"):

        def load_weights(self: Any, model: Any, *args: Any, **options: Any) -> None:
            load(self, model, *args, **options)
            _loaded.clear()
            for name, parameter in model.named_parameters():
                data = parameter.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
                shape = [size for size in parameter.shape if size != 1]  # filters of one channel, by vLLM
                _loaded[OURS.sub("", name)] = f"{shape} {hashlib.sha256(data).hexdigest()[:16]}"

        load_weights.probed = True  # pyright: ignore[reportFunctionMemberAccess]
        DefaultModelLoader.load_weights = load_weights


def report() -> dict[str, Any]:
    """What layer_probe reports, and each parameter's shape and digest."""
    return {**layer_probe.report(), "loaded": dict(_loaded)}
