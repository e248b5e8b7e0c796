"""What `scenarios.py` does on vLLM alone: its platform plugin, its configurations, its compile-cache key."""

from __future__ import annotations

import json
import os
import pickle
import sys
from typing import Any

import scenarios  # pyright: ignore[reportMissingImports]  # the running script


def by_plugin() -> scenarios.Results:
    """Armed by vLLM's own platform plugin, in the middle of the import of the modules that take configurations."""
    os.environ.pop("ATOM_PATCHES", None)
    os.environ["VLLM_PLUGINS"] = "atom"
    results: scenarios.Results = {"": {"armed before": "atom_patches" in sys.modules}}
    from vllm.v1.engine.core import EngineCore

    results["vllm.bootstrap.engine_core"] = {"ours": scenarios.from_this_package(EngineCore.__init__.__code__)}
    results["vllm.bootstrap.engine_core_shutdown"] = {"ours": scenarios.from_this_package(EngineCore.shutdown.__code__)}
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    results["vllm.bootstrap.worker"] = {"ours": scenarios.from_this_package(WorkerWrapperBase.init_worker.__code__)}
    from vllm.engine.arg_utils import EngineArgs

    code = EngineArgs.create_engine_config.__code__
    results["vllm.bootstrap.engine_args"] = {"ours": scenarios.from_this_package(code)}
    code = EngineArgs.create_model_config.__code__
    results["vllm.bootstrap.model_config"] = {"ours": scenarios.from_this_package(code)}
    return results


TINY = {
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


class Hashed:
    """A user's own `additional_config` object."""

    def __init__(self, text: str) -> None:
        self.text = text

    def compute_hash(self) -> str:
        return self.text


def real_configuration(folder: str, ranks: int, additional: Any = None) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(
        model=folder,
        enforce_eager=True,
        max_model_len=64,
        prefill_context_parallel_size=ranks,
        skip_tokenizer_init=True,
        **({} if additional is None else {"additional_config": additional}),
    )
    return args.create_engine_config()


def instances() -> scenarios.Results:
    """Real configurations, through the real hook: pcp=2, then pcp=1 in the same process; and the compile-cache key."""
    import tempfile

    import atom_patches  # noqa: F401
    from atom_patches.core.registry import REGISTRY

    folder = tempfile.mkdtemp()
    with open(f"{folder}/config.json", "w") as file:
        json.dump(TINY, file)
    patches = scenarios.declared(force=False)
    scenarios.import_targets(patches)
    stock = {patch.id: scenarios.raw(patch) for patch in patches if patch.kind != "bootstrap"}

    one = real_configuration(folder, 1)
    chosen = scenarios.by_id(patches, stock)
    results: scenarios.Results = {
        name: {"stock at first": scenarios.raw(patch) is stock[name]} for name, patch in chosen
    }
    stock_hash, untouched = one.compute_hash(), one.additional_config == {}
    del one

    two = real_configuration(folder, 2)
    on = {name for name, state in scenarios.states(REGISTRY).items() if state == "applied" and name in stock}
    for name, patch in chosen:
        results[name]["on if applied"] = (scenarios.raw(patch) is not stock[name]) == (name in on)
    results[""] = cache_key(two, {"patches on": len(on) > 10 or sorted(on), "untouched when off": untouched})

    del two
    one = real_configuration(folder, 1)
    for name, patch in chosen:
        results[name]["stock again"] = scenarios.raw(patch) is stock[name]
    results[""]["key is the stock one again"] = one.compute_hash() == stock_hash
    results[""] |= user_objects(folder)
    return results


def cache_key(config: Any, results: dict[str, Any]) -> dict[str, Any]:
    """The key of a patched configuration: other than without, equal in a child, equal when bound again."""
    from atom_patches.vllm.engine import bind_cache_key

    key, active = config.compute_hash(), config.additional_config["atom_patches"]
    results["equal in a child"] = pickle.loads(pickle.dumps(config)).compute_hash() == key
    bind_cache_key(config, active)
    results["bound twice"] = config.compute_hash() == key
    bind_cache_key(config, {})
    results["differs from the unpatched"] = config.compute_hash() != key
    bind_cache_key(config, {**active, "vllm.other": "1"})
    results["differs with another patch"] = config.compute_hash() != key
    bind_cache_key(config, {name: "other" for name in active})
    results["differs with other code"] = config.compute_hash() != key
    bind_cache_key(config, active)
    return results


def user_objects(folder: str) -> dict[str, Any]:
    """A user's dictionary is not written to; a user's object keeps its hash's say."""
    mine = {"gdn_prefill_backend": "auto"}
    first = real_configuration(folder, 2, mine)
    results: dict[str, Any] = {
        "dictionary untouched": mine == {"gdn_prefill_backend": "auto"},
        "dictionary passed on": first.additional_config["gdn_prefill_backend"] == "auto",
    }
    keys = [real_configuration(folder, 2, Hashed(text)) for text in ("a", "a", "b")]
    hashes = [config.compute_hash() for config in keys]
    results["object's hash counts"] = hashes[0] == hashes[1] != hashes[2]
    results["object's attributes"] = keys[0].additional_config.text == "a"
    results["object pickles"] = pickle.loads(pickle.dumps(keys[0])).compute_hash() == hashes[0]
    return results
