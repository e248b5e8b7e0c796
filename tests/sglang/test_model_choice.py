"""Which class SGLang builds for a checkpoint: by settings, by options, and by what the checkpoint asks for.

Real configurations in one process, through SGLang's own check of them, which is where a launch decides.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atom_patches.core import discovery, gates
from atom_patches.sglang.engine import ENGINE
from tests.sglang.environment import environment, options

STOCK = "sglang.srt.models.llama"
OURS = "atom_patches.sglang.adapters.classes"
#: What a checkpoint says of its quantisation under the older of two names.
QUANTISED = json.dumps({"compression_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}})
#: By name: the checkpoint, settings, options, the module of the class, and whether a line in the log says why.
CASES: dict[str, tuple[str, dict[str, str], dict[str, Any], str, bool]] = {
    "nothing asked for": ("llama_tied", {}, {}, STOCK, False),
    "every family": ("llama_tied", {"ATOM_MODELS": "1"}, {}, OURS, False),
    "the family": ("llama_tied", {"ATOM_MODELS": "qwen3,llama"}, {}, OURS, False),
    "another family": ("llama_tied", {"ATOM_MODELS": "qwen3"}, {}, STOCK, False),
    "required": ("llama_tied", {"ATOM_MODELS": "1", "ATOM_PATCH_SGLANG_MODELS": "1"}, {}, OURS, False),
    "switched off": ("llama_tied", {"ATOM_MODELS": "1", "ATOM_PATCH_SGLANG_MODELS": "0"}, {}, STOCK, False),
    "all switched off": ("llama_tied", {"ATOM_MODELS": "1", "ATOM_PATCHES": "0"}, {}, STOCK, False),
    "the option": ("llama_tied", {}, {"model_impl": "atom"}, OURS, False),
    "SGLang's own named": ("llama_tied", {"ATOM_MODELS": "1"}, {"model_impl": "sglang"}, STOCK, False),
    "an option that is not served": ("llama_tied", {"ATOM_MODELS": "1"}, {"cpu_offload_gb": 1}, STOCK, True),
    "a checkpoint that is not served": ("llama_linear", {"ATOM_MODELS": "1"}, {}, STOCK, True),
    "quantised weights": ("llama_tied", {"ATOM_MODELS": "1"}, {"json_model_override_args": QUANTISED}, STOCK, True),
}
#: DeepSeek-V3.2 asks for this package's sparse attention, whose patches fit fewer releases.
SPARSE = (
    "deepseek_v32", {"ATOM_MODELS": "1", "ATOM_SPARSE_MLA": "1"},
    {"attention_backend": "dsa", "kv_cache_dtype": "bfloat16"},
)  # fmt: skip
#: By name: the checkpoint, settings, options, and what the error says.
ERRORS: dict[str, tuple[str, dict[str, str], dict[str, Any], str]] = {
    "required by the environment": (
        "llama_linear", {"ATOM_MODELS": "1", "ATOM_PATCH_SGLANG_MODELS": "1"}, {},
        "rope_type must be one of default, mrope, llama3, yarn, got 'linear'",
    ),
    "required by the option": (
        "llama_tied", {}, {"model_impl": "atom", "cpu_offload_gb": 1}, "weights that are moved away (--cpu-offload-gb,",
    ),
    "required and switched off": (
        "llama_tied", {"ATOM_PATCH_SGLANG_MODELS": "0"}, {"model_impl": "atom"},
        "--model-impl atom requires sglang.models, but ATOM_PATCH_SGLANG_MODELS=0 keeps it off",
    ),
    "without a decoder": ("qwen3_vl", {}, {"model_impl": "atom"}, "Qwen3VLForConditionalGeneration has no ATOM"),
}  # fmt: skip

SCRIPT = """
import json, logging, os, sys
import atom_patches
from atom_patches.core import PatchError
from atom_patches.core.log import logger
from atom_patches.core.registry import REGISTRY
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.server_args import ServerArgs
from atom_patches.sglang.adapters.server_args import model_config

class Said(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())

logger().addHandler(Said(logging.WARNING))
found = {}
for name, (settings, options) in json.loads(sys.argv[1]).items():
    said, before = [], dict(os.environ)
    os.environ.update(settings)
    args = ServerArgs(**options)
    getattr(args, "resolve_once", lambda: None)()  # later releases settle the arguments before they are checked
    try:
        args.check_server_args()
        [architecture] = model_config(args).hf_config.architectures
        found[name] = [ModelRegistry.resolve_model_cls([architecture])[0].__module__, said]
    except PatchError as error:
        found[name] = ["error", [str(error)]]
    REGISTRY.release("sglang", args)  # as an engine that has ended: not every release's takes weak references
    os.environ.clear()
    os.environ.update(before)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, list[str]]]:
    """By case, the module of the class that SGLang takes, and what the overlay warned of, or `error` and its text."""
    from checkpoints import checkpoint

    plan = {
        name: (settings, options(model_path=str(checkpoint(model)), **more))
        for name, (model, settings, more, *_) in {**CASES, **ERRORS, "sparse attention": SPARSE}.items()
    }
    env = environment(ATOM_PATCHES_STATE_DIR=str(tmp_path_factory.mktemp("states")))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(plan)],
        env=env, capture_output=True, text=True, timeout=300, check=False, cwd=Path(__file__).parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_the_class(found: dict[str, tuple[str, list[str]]], name: str) -> None:
    module, said = found[name]
    assert module == CASES[name][3]
    told = [message for message in said if "sglang.models is not applied" in message]
    assert len(told) == CASES[name][4], said


@pytest.mark.parametrize("name", ERRORS)
def test_what_is_required_and_cannot_be_had_is_an_error(found: dict[str, tuple[str, list[str]]], name: str) -> None:
    outcome, [message] = found[name]
    assert outcome == "error"
    assert ERRORS[name][3] in message


def test_a_family_whose_attention_does_not_fit_stops_the_launch_by_name(
    found: dict[str, tuple[str, list[str]]],
) -> None:
    outcome, said = found["sparse attention"]
    if all(gates.fits(ENGINE, patch).fits for patch in discovery.load(ENGINE) if patch.group == "sglang.sparse_mla"):
        assert outcome == OURS
    else:
        stopped = [line for line in said[0].splitlines() if line.startswith("  - ")]
        assert outcome == "error" and len(stopped) == 1 and stopped[0].startswith("  - sglang.sparse_mla"), said
