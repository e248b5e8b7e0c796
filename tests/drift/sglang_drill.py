"""The patch, the launches and the model of the drift drill on SGLang."""

from __future__ import annotations

from atom_patches.sglang.models import registry

PATCH = registry.PATCH
ENVIRONMENT = {"ATOM_MODELS": "1"}
MODEL = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
SERVER = (
    *("-m", "sglang.launch_server", "--model-path", "{model}", "--device", "cpu", "--dtype", "float32"),
    *("--skip-tokenizer-init", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-cuda-graph", "--disable-overlap-schedule", "--log-level", "warning"),
)
CONFIGURE = """
import sys
import atom_patches
from atom_patches.core.registry import REGISTRY
from sglang.srt.server_args import ServerArgs
args = ServerArgs(
    model_path=sys.argv[1], device="cpu", dtype="float32", skip_tokenizer_init=True, attention_backend="torch_native",
    sampling_backend="pytorch", grammar_backend="none", disable_cuda_graph=True, disable_overlap_schedule=True,
)
getattr(args, "resolve_once", lambda: None)()  # later releases settle the arguments before they are checked
args.check_server_args()
print("STATE " + next(report.state for report in REGISTRY.status("sglang") if report.id == sys.argv[2]))
"""
UNSUPPORTED = "sglang.models"
EXPERTS = MODEL
ASK_FOR_UNSUPPORTED = CONFIGURE + 'print("CONFIGURED")'
OPTIMISATION = """
import dataclasses
import atom_patches
from atom_patches.core import Patch, Verdict
from atom_patches.core.registry import Registry
from atom_patches.sglang.engine import ENGINE
import sglang.srt.models.registry as models
stock = vars(models._ModelRegistry)["resolve_model_cls"]
PATCH = Patch(
    id="sglang.test.faster", target="sglang.srt.models.registry:_ModelRegistry.resolve_model_cls",
    supports="sglang>=0.5.17,<0.5.24", kind="optimisation", when=lambda config: Verdict(True, "always"),
)
PATCH.around(lambda original: lambda self, architectures: None)
class Config: pass
registry = Registry()
registry.arm(dataclasses.replace(ENGINE, describe=lambda config: {}), [PATCH])
first, second = Config(), Config()
registry.configure("sglang", first, "engine")
registry.configure("sglang", second, "scheduler")
print("STATE", registry.status("sglang")[0].state, vars(models._ModelRegistry)["resolve_model_cls"] is stock)
"""
