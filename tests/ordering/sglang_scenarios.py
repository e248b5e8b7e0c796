"""What `scenarios.py` does on SGLang alone: its plugin loader and its configurations."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import weakref
from typing import Any

import scenarios  # pyright: ignore[reportMissingImports]  # the running script


def by_plugin() -> scenarios.Results:
    """Armed by SGLang's own loader, after the modules that a script's first line imports."""
    os.environ.pop("ATOM_PATCHES", None)
    os.environ["SGLANG_PLUGINS"] = "atom"
    importlib.import_module("sglang.srt.entrypoints.engine")
    results: scenarios.Results = {"": {"armed before": "atom_patches" in sys.modules}}
    from sglang.srt.plugins import load_plugins  # pyright: ignore[reportMissingImports]

    load_plugins()
    for patch in scenarios.bootstrap():
        importlib.import_module(patch.site.module)
        results[patch.id] = {"ours": scenarios.is_ours(patch)}
    return results


DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
HYBRID = DENSE | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"],
}


def checked(model: dict[str, Any]) -> Any:
    """The configuration of an engine that is about to start, through the real hook."""
    from sglang.srt.server_args import ServerArgs  # pyright: ignore[reportMissingImports]

    folder = tempfile.mkdtemp()
    with open(f"{folder}/config.json", "w") as file:
        json.dump(model, file)
    args = ServerArgs(
        model_path=folder,
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        log_level="warning",
    )
    getattr(args, "resolve_once", lambda: None)()  # later releases settle the arguments before they are checked
    args.check_server_args()
    return args


def end(args: Any) -> None:
    """What the end of an engine does, where a configuration takes no weak references, so that nobody sees it go."""
    from atom_patches.core.registry import REGISTRY

    try:
        weakref.ref(args)
    except TypeError:
        REGISTRY.release("sglang", args)


def instances() -> scenarios.Results:
    """Real configurations, through the real hook: without ATOM decoders, with them, and without again."""
    import atom_patches  # noqa: F401
    from atom_patches.core.registry import REGISTRY

    os.environ["ATOM_MODELS"] = "qwen3_next"
    patches = scenarios.declared(force=False)
    scenarios.import_targets(patches)
    stock = {patch.id: scenarios.raw(patch) for patch in patches if patch.kind != "bootstrap"}

    first = checked(DENSE)
    chosen = scenarios.by_id(patches, stock)
    results: scenarios.Results = {
        name: {"stock at first": scenarios.raw(patch) is stock[name]} for name, patch in chosen
    }
    end(first)
    del first
    second = checked(HYBRID)
    on = {name for name, state in scenarios.states(REGISTRY).items() if state == "applied" and name in stock}
    changed = {patch.target for name, patch in chosen if name in on}  # two patches may have one target
    for name, patch in chosen:
        results[name]["on if applied"] = (scenarios.raw(patch) is not stock[name]) == (patch.target in changed)
    results[""] = {"patches on": bool(on)}
    end(second)
    del second
    third = checked(DENSE)
    for name, patch in chosen:
        results[name]["stock again"] = scenarios.raw(patch) is stock[name]
    del third
    return results
