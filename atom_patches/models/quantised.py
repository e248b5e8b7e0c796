"""What a checkpoint says about its quantised weights, and whether a decoder runs them.

The arithmetic is the engine's, in its own linear layers and experts. What a decoder has to do with it is names: which
tensors belong to which layer, and how those of packed projections are cut. So a format is served if that was shown for
it, engine by engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atom_patches.models.config import DecoderConfig

FP8_BLOCKS = "FP8 with scales of blocks"
INT8 = "INT8 with scales of rows"
GPTQ = "GPTQ with 4 bits"
AWQ = "AWQ with 4 bits"


@dataclass(frozen=True)
class Served:
    """Where a format is served.

    Attributes:
        methods: what the engine calls it, if it runs the checkpoint as it is.
        experts: also where a layer has experts.
        recurrent: also where layers are recurrent.
    """

    methods: frozenset[str]
    experts: bool = True
    recurrent: bool = True


def said(hf: Any) -> Mapping[str, Any] | None:
    """What a checkpoint's configuration says about quantisation; None: nothing."""
    for config in (hf, getattr(hf, "text_config", None)):
        for name in ("quantization_config", "compression_config"):
            found: Any = getattr(config, name, None)
            if found is not None:
                return found if isinstance(found, Mapping) else found.to_dict()
    return None


def refusal(method: str, hf: Any, config: DecoderConfig, served: Mapping[str, Served]) -> str | None:
    """Why a decoder does not run quantised weights; None: it does.

    Args:
        method: what the engine calls the quantisation that it is going to run.
        hf: the checkpoint's configuration.
        config: the decoder's.
        served: by format, what was shown for this engine.
    """
    own = said(hf)
    if own is None:
        return f"quantised weights ({method}), which the checkpoint's are not: leave --quantization out"
    try:
        name = read_format(own)
    except ValueError as error:
        return f"quantised weights ({method}): {error}"
    where = served.get(name)
    if where is None or method not in where.methods:
        return f"quantised weights ({method}): {name} is not among what is served"
    if not where.experts and config.experts is not None:
        return f"quantised weights ({method}): {name} of experts"
    if not where.recurrent and config.key_heads:
        return f"quantised weights ({method}): {name} of recurrent layers"
    return None


def read_format(own: Mapping[str, Any]) -> str:
    """The format's name.

    Raises:
        ValueError: it is none of those that decoders know.
    """
    method = own.get("quant_method")
    if method == "fp8":
        _want(own, activation_scheme="dynamic")
        _want(own, optional=True, fmt="e4m3")
        if not own.get("weight_block_size"):
            raise ValueError("weight_block_size must be set")
        return FP8_BLOCKS
    if method == "gptq":
        _want(own, bits=4)
        _want(own, optional=True, checkpoint_format="gptq", dynamic={})
        return GPTQ
    if method == "awq":
        _want(own, bits=4)
        _want(own, optional=True, version="gemm")
        return AWQ
    if method == "compressed-tensors":
        return _compressed(own)
    raise ValueError(f"quant_method must be one of awq, compressed-tensors, fp8, gptq, got {method!r}")


def _compressed(own: Mapping[str, Any]) -> str:
    _want(own, format="int-quantized")
    _want(own, optional=True, kv_cache_scheme={}, transform_config={})
    _want(own.get("sparsity_config") or {}, optional=True, format="dense")
    groups: Any = own.get("config_groups") or {}
    if len(groups) != 1:
        raise ValueError(f"config_groups must be one for all layers, got {len(groups)}")
    [group] = groups.values()
    _want(group, targets=["Linear"])
    _want(group.get("weights") or {}, type="int", num_bits=8, strategy="channel", symmetric=True)
    _want(group.get("input_activations") or {}, type="int", num_bits=8, strategy="token", symmetric=True, dynamic=True)
    return INT8


def _want(own: Mapping[str, Any], *, optional: bool = False, **wanted: object) -> None:
    """Have it say these things, or nothing where they are optional."""
    for name, value in wanted.items():
        found = own.get(name)
        if found != value and not (optional and not found):
            raise ValueError(f"{name} must be {value!r}, got {found!r}")
