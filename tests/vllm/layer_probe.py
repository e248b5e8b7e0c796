"""Counts which classes ran a model's decoder layers; a `setup` of traffic.py, whose worker is that process itself.

`report` gives the class of the model that was loaded last, and how often layers of each package ran since.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

LAYER = re.compile(r"(?:.*\.)?layers\.\d+")
_seen: dict[str, Any] = {"model": "", "layers": Counter[str](), "ran": Counter[str]()}


def install() -> None:
    """Look at every model that is loaded."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    load = BaseModelLoader.load_model
    if not hasattr(load, "probed"):

        def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
            model = load(self, *args, **kwargs)
            _watch(model)
            return model

        load_model.probed = True  # pyright: ignore[reportFunctionMemberAccess]
        BaseModelLoader.load_model = load_model


def _watch(model: Any) -> None:
    _seen.update(model=_class(model), layers=Counter(), ran=Counter())
    for name, module in model.named_modules():
        if LAYER.fullmatch(name):
            _seen["layers"][_package(module)] += 1
            module.register_forward_hook(lambda module, *_: _seen["ran"].update([_package(module)]))


def report() -> dict[str, Any]:
    """The class, its layers by package, and how often those ran."""
    return {"model": _seen["model"], "layers": dict(_seen["layers"]), "ran": dict(_seen["ran"])}


def _class(module: Any) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _package(module: Any) -> str:
    return type(module).__module__.partition(".")[0]
