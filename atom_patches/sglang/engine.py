"""SGLang, as the core sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atom_patches.core import Engine, PatchError, Target, drift, reviewed

COMPILES = Target.parse("sglang.srt.compilation.backend:CompilerManager.compile")
"""Where SGLang turns a graph into an artefact. As reviewed, it never loads one that it has stored under a key of its
own: what is reused comes from Inductor's cache, where the key is the graph itself."""

OPTIONS = (
    "model_path",
    "tp_size",
    "pp_size",
    "dp_size",
    "enable_dp_attention",
    "ep_size",
    "moe_a2a_backend",
    "attention_backend",
    "speculative_algorithm",
    "quantization",
    "device",
    "dtype",
)


def bind_cache_key(config: Any, active: Mapping[str, str]) -> None:
    """Nothing to bind: SGLang's reviewed versions reuse compiled code by its content alone, which patches are part of.

    Raises:
        PatchError: a patch changes graphs, and SGLang's compilation is not the one of which that is known.
    """
    del config
    if active and not reviewed.is_known(ENGINE, COMPILES, drift.fingerprint(drift.current_lines(COMPILES))):
        raise PatchError(
            f"{', '.join(sorted(active))} change compiled graphs, and {COMPILES} is not as reviewed: it may load what "
            "was compiled without them. Install a release of sglang that is supported, or leave these patches off"
        )


def describe(config: Any) -> dict[str, str]:
    """The model and the parallel layout of a `ServerArgs`."""
    return {name: str(getattr(config, name)) for name in OPTIONS if hasattr(config, name)}


ENGINE = Engine(
    name="sglang",
    package="sglang",
    distributions=("sglang",),
    declarations="atom_patches.sglang",
    bind_cache_key=bind_cache_key,
    describe=describe,
    # Not the class of the configuration, which exists before SGLang loads its plugins.
    built="sglang.srt.managers.tokenizer_manager:TokenizerManager",
)
