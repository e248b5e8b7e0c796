"""The patch, the launches and the model of the drift drill on vLLM."""

from __future__ import annotations

from atom_patches.vllm.cpu import check_and_update_config
from atom_patches.vllm.pcp import total_cp_world_size
from tests import installed

ENVIRONMENT: dict[str, str] = {}
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
# On the releases that prefill context parallelism does not serve, what hybrids need on the CPU.
if total_cp_world_size.PATCH.id in installed.fitting():
    PATCH, MODEL, RANKS = total_cp_world_size.PATCH, DENSE, 2
else:
    PATCH, MODEL, RANKS = check_and_update_config.PATCH, HYBRID, 1
SERVER = (
    *("-m", "vllm.entrypoints.openai.api_server", "--model", "{model}", "--enforce-eager", "--port", "0"),
    *("--max-model-len", "64", "--skip-tokenizer-init", "--prefill-context-parallel-size", str(RANKS)),
)
CONFIGURE = f"""
import sys
import atom_patches
from atom_patches.core.registry import REGISTRY
from vllm.engine.arg_utils import EngineArgs
EngineArgs(
    model=sys.argv[1], enforce_eager=True, max_model_len=64, skip_tokenizer_init=True,
    prefill_context_parallel_size={RANKS},
).create_engine_config()
print("STATE " + next(report.state for report in REGISTRY.status("vllm") if report.id == sys.argv[2]))
"""
UNSUPPORTED = "vllm.cpu_ep"
EXPERTS = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
}
ASK_FOR_UNSUPPORTED = """
import sys
import atom_patches
from vllm.engine.arg_utils import EngineArgs
EngineArgs(
    model=sys.argv[1], enforce_eager=True, max_model_len=64, skip_tokenizer_init=True, tensor_parallel_size=2,
    enable_expert_parallel=True,
).create_engine_config()
print("CONFIGURED")
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
