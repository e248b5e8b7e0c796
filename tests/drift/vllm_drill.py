"""The patch, the launches and the model of the drift drill on vLLM."""

from __future__ import annotations

from atom_patches.vllm.pcp import total_cp_world_size

PATCH = total_cp_world_size.PATCH
ENVIRONMENT: dict[str, str] = {}
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
SERVER = (
    *("-m", "vllm.entrypoints.openai.api_server", "--model", "{model}", "--enforce-eager", "--port", "0"),
    *("--max-model-len", "64", "--skip-tokenizer-init", "--prefill-context-parallel-size", "2"),
)
CONFIGURE = """
import sys
import atom_patches
from atom_patches.core.registry import REGISTRY
from vllm.engine.arg_utils import EngineArgs
EngineArgs(
    model=sys.argv[1], enforce_eager=True, max_model_len=64, skip_tokenizer_init=True, prefill_context_parallel_size=2
).create_engine_config()
print("STATE " + next(report.state for report in REGISTRY.status("vllm") if report.id == sys.argv[2]))
"""
OPTIMISATION = """
import atom_patches
from atom_patches.core import Patch, Verdict
from atom_patches.core.registry import Registry
from atom_patches.vllm.engine import ENGINE
import vllm.v1.worker.cp_utils as cp_utils
stock = cp_utils.get_total_cp_world_size
PATCH = Patch(
    id="vllm.test.faster", target="vllm.v1.worker.cp_utils:get_total_cp_world_size", supports="vllm>=0.20.2,<0.21",
    kind="optimisation", when=lambda config: Verdict(True, "always"),
)
PATCH.around(lambda original: lambda: 7)
class Config: additional_config = {}
import dataclasses
registry = Registry()
registry.arm(dataclasses.replace(ENGINE, describe=lambda config: {}), [PATCH])
first, second = Config(), Config()
registry.configure("vllm", first, "engine core")
registry.configure("vllm", second, "worker")
print("STATE", registry.status("vllm")[0].state, cp_utils.get_total_cp_world_size is stock)
"""
