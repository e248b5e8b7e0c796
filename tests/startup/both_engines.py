"""vLLM and SGLang in one interpreter: run by `test_both_engines.py` in an environment with both, prints JSON.

Both engines' own plugin loaders arm the package; then real configurations come and go through the real hooks.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODEL = {
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


def load_plugins() -> dict[str, Any]:
    """Each engine's loader in turn; which engines the package waits for after it."""
    from importlib.metadata import entry_points

    found: dict[str, Any] = {"entry points": sorted(one.group for one in entry_points(name="atom"))}
    plugins = importlib.import_module("vllm.plugins")
    found["armed before"] = "atom_patches" in sys.modules
    plugins.load_general_plugins()
    from atom_patches import arming

    found["after vLLM's"] = sorted(arming._engaged)
    importlib.import_module("sglang.srt.plugins").load_plugins()
    found["after SGLang's"] = sorted(arming._engaged)
    return found


def patches_of(name: str) -> list[Any]:
    """The engine's patches that fit its release."""
    from atom_patches.core import State, discovery, gates

    engine = importlib.import_module(f"atom_patches.{name}.engine").ENGINE
    return [patch for patch in discovery.load(engine) if gates.fits(engine, patch).state is State.PENDING]


def at(patch: Any) -> Any:
    """The object at a patch's target, before any descriptor looks at it."""
    owner: Any = importlib.import_module(patch.site.module)
    *path, name = patch.site.qualname.split(".")
    for part in path:
        owner = getattr(owner, part)
    return vars(owner).get(name, "inherited")


class Watched:
    """What stands at every target of one engine, and what stood there while nothing was asked for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.patches = patches_of(name)
        self.stock = self.now()

    def now(self) -> dict[str, Any]:
        return {patch.id: at(patch) for patch in self.patches}

    def changed(self, before: dict[str, Any] | None = None) -> list[str]:
        """Patches at whose target something else stands than before, or than while nothing was asked for."""
        then = self.stock if before is None else before
        return sorted(name for name, found in self.now().items() if found is not then[name])

    def applied(self) -> list[str]:
        """Features that the package says are applied."""
        from atom_patches.core.registry import REGISTRY

        on = {one.id.rpartition(".")[0] for one in REGISTRY.status(self.name) if one.state == "applied"}
        return sorted(name for name in on if not name.endswith(".bootstrap"))


def vllm_asks(folder: str, ranks: int) -> Any:
    os.environ["ATOM_MODELS"] = "0"  # both engines read it
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(
        model=folder,
        enforce_eager=True,
        max_model_len=64,
        prefill_context_parallel_size=ranks,
        skip_tokenizer_init=True,
    )
    return args.create_engine_config()


def sglang_asks(folder: str, models: str) -> Any:
    os.environ["ATOM_MODELS"] = models
    from sglang.srt.server_args import ServerArgs  # pyright: ignore[reportMissingImports]

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
    args.check_server_args()
    return args


def status() -> list[str]:
    """The engines that `status` says this process was handed a configuration of."""
    command = [sys.executable, "-m", "atom_patches", "status", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return sorted(one["engine"] for one in json.loads(ran.stdout)["processes"] if one["pid"] == os.getpid())


def main() -> dict[str, Any]:
    found: dict[str, Any] = {"plugins": load_plugins()}
    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(json.dumps(MODEL))

    vllm, sglang = Watched("vllm"), Watched("sglang")
    vllm_config = vllm_asks(folder, 2)
    found["vLLM asks"] = {"vllm": vllm.applied(), "sglang changed": sglang.changed()}
    split = vllm.now()
    sglang_config = sglang_asks(folder, "1")
    found["both ask"] = {"vllm changed": vllm.changed(split), "sglang": sglang.applied()}
    found["status"] = status()
    decoders = sglang.now()
    del vllm_config
    one_rank = vllm_asks(folder, 1)
    found["SGLang asks"] = {"vllm changed": vllm.changed(), "sglang changed": sglang.changed(decoders)}
    del sglang_config, one_rank
    stock = sglang_asks(folder, "0")
    found["nobody asks"] = {"vllm changed": vllm.changed(), "sglang changed": sglang.changed()}
    del stock
    return found | {"taken back": taken_back((vllm, sglang))}


def taken_back(engines: tuple[Watched, ...]) -> dict[str, Any]:
    """Take back one engine's hooks, then the other's."""
    from atom_patches.core.registry import REGISTRY

    def ours() -> list[str]:
        """Engines of which at least one target holds a function of this package."""
        import atom_patches

        folder = os.path.dirname(atom_patches.__file__) + os.sep
        codes = {one.name: [getattr(what, "__code__", None) for what in one.now().values()] for one in engines}
        return [name for name in codes if any(code and code.co_filename.startswith(folder) for code in codes[name])]

    found: dict[str, Any] = {"at first": ours()}
    for one in engines:
        REGISTRY.revert(one.name, bootstrap=True)
        found[f"after {one.name}'s"] = ours()
    return found


if __name__ == "__main__":
    print("RESULT " + json.dumps(main()), flush=True)
    os._exit(0)
