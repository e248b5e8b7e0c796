"""What may be asked for at the same time, engine by engine: one line a feature, one line a family of models.

tools/feature_matrix.py meets every feature with every family and every other feature. A new line here is a row and a
column there, and the test of the document fails until `make feature-matrix` has run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EXPERTS, VISION, RECURRENT = "experts", "vision", "recurrent layers"


@dataclass(frozen=True)
class Family:
    """A family of models that has an ATOM decoder, and the checkpoint of tools/checkpoints.py that stands for it.

    Attributes:
        has: what some features need.
        options: of every engine with it.
        env: the same, in the environment.
        not_run: what runs engines with it, if those of the matrix do not.
    """

    name: str
    checkpoint: str
    has: frozenset[str] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    not_run: str = ""


@dataclass(frozen=True)
class Feature:
    """Something that a user may ask an engine for.

    Attributes:
        name: in the documents.
        option: what a message about it has to name.
        options: of the engine. Sizes in which ranks are multiplied with those of other features.
        env: the same, in the environment.
        needs: what a family must have for it to mean anything.
        on_ranks: it means nothing on one rank.
        in_stock: the engine that is compared with has it, too: otherwise its numbers, or its prompts, would be others.
        needs_gpu: the engine has it on a GPU alone, so that it cannot be asked for here.
        not_run: what runs engines with it, or why none does, if those of the matrix do not.
        weights: the format of the checkpoint's weights (tools/quantised.py).
    """

    name: str
    option: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    needs: str = ""
    on_ranks: bool = False
    in_stock: bool = False
    needs_gpu: bool = False
    not_run: str = ""
    weights: str = ""


@dataclass(frozen=True)
class Engine:
    """What is declared for one engine.

    Attributes:
        base: the family with which features meet each other.
        sizes: options whose product is the number of ranks.
        usual: options of every engine.
        not_together: features of which every two are served, and all of them are not.
    """

    name: str
    title: str
    version: str
    base: str
    sizes: tuple[str, ...]
    usual: Mapping[str, Any]
    families: tuple[Family, ...]
    features: tuple[Feature, ...]
    not_together: tuple[frozenset[str], ...] = ()

    def family(self, name: str) -> Family:
        [found] = [one for one in self.families if one.name == name]
        return found

    def feature(self, name: str) -> Feature:
        [found] = [one for one in self.features if one.name == name]
        return found


def has(*what: str) -> frozenset[str]:
    return frozenset(what)


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}

MODELS = "tests/vllm/test_atom_models.py"
LATENTS = f"{MODELS}, with ATOM attention: vLLM has none to latents on the CPU"
SELECTED = f"{MODELS}, which brings attention to selected latents, as vLLM has none on the CPU"
QUANTISED = "tests/{}/test_atom_models_quantised.py"

VLLM = Engine(
    name="vllm", title="vLLM", version="0.20.2", base="qwen3_5",
    sizes=("tensor_parallel_size", "prefill_context_parallel_size", "data_parallel_size", "pipeline_parallel_size"),
    usual={"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 1024, "enable_prefix_caching": False},
    families=(
        Family("llama", "llama_tied"),
        Family("qwen3", "qwen3_tied"),
        Family("qwen3_moe", "qwen3_moe", has(EXPERTS)),
        Family("qwen3_next", "qwen3_next", has(EXPERTS, RECURRENT)),
        Family("qwen3_5", "qwen3_5_moe", has(EXPERTS, RECURRENT, VISION), {"language_model_only": True}),
        Family("deepseek_v3", "deepseek_v3_groups", has(EXPERTS), not_run=LATENTS),
        Family("deepseek_v32", "deepseek_v32", has(EXPERTS), not_run=SELECTED),
    ),
    features=(
        Feature("tensor parallelism", "--tensor-parallel-size", {"tensor_parallel_size": 2}),
        Feature("PCP", "--prefill-context-parallel-size", {"prefill_context_parallel_size": 2}),
        Feature("data parallelism, idle ranks", "--data-parallel-size", {"data_parallel_size": 2}),
        Feature("expert parallelism", "--enable-expert-parallel", {"enable_expert_parallel": True}, needs=EXPERTS,
                on_ranks=True),
        Feature("pipeline stages", "--pipeline-parallel-size", {"pipeline_parallel_size": 2}, not_run=MODELS),
        Feature("chunked prefill", "--max-num-batched-tokens", {"max_num_batched_tokens": 96}),
        Feature("prefix caching", "--enable-prefix-caching", {"enable_prefix_caching": True, "block_size": 32}),
        Feature("pictures", "--language-model-only", {"language_model_only": False}, needs=VISION,
                in_stock=True),
        Feature("asynchronous scheduling", "--async-scheduling", {"async_scheduling": True}),
        Feature("torch.compile", "--enforce-eager", {"enforce_eager": False}, {"TORCHDYNAMO_DISABLE": "0"}),
        Feature("decode graphs", "--compilation-config", needs_gpu=True),
        Feature("FP8 KV cache", "--kv-cache-dtype", {"kv_cache_dtype": "fp8"}, in_stock=True),
        Feature("FP8 weights", "fp8", {"dtype": "bfloat16"}, weights="fp8", not_run=QUANTISED.format("vllm")),
        Feature("INT8 weights", "compressed-tensors", weights="int8", not_run=QUANTISED.format("vllm")),
        Feature("ATOM attention", "ATOM_ATTENTION", env={"ATOM_ATTENTION": "1"},
                not_run="tests/vllm/test_attention.py"),
        Feature("LoRA", "--enable-lora", {"enable_lora": True},
                not_run="vLLM's own CPU operations for it fail where prompts are scored"),
        Feature("drafts", "--speculative-config", {"speculative_config": NGRAM}, not_run="needs the package numba"),
        Feature("batch invariance", "VLLM_BATCH_INVARIANT", env={"VLLM_BATCH_INVARIANT": "1"}),
        Feature("weight offload", "--cpu-offload-gb", {"cpu_offload_gb": 1}),
        Feature("sleep", "--enable-sleep-mode", {"enable_sleep_mode": True}),
    ),
    not_together=(has("tensor parallelism", "data parallelism, idle ranks", "expert parallelism"),),
)  # fmt: skip

SPARSE: Mapping[str, Any] = {"attention_backend": "dsa", "kv_cache_dtype": "bfloat16"}

ON_GPU = "SGLang's kernels for it run on a GPU alone"
NO_STOCK = "tests/sglang/test_atom_models_dense.py, against transformers: SGLang's own decoder does not run on the CPU"

SGLANG = Engine(
    name="sglang", title="SGLang", version="0.5.17", base="qwen3_next",
    sizes=("tp_size", "pp_size"),
    usual={"chunked_prefill_size": -1, "disable_radix_cache": True},
    families=(
        Family("llama", "llama_tied"),
        Family("qwen3", "qwen3_tied"),
        # SGLang's own decoder, which is compared with, takes `mlp_only_layers` for layers with experts.
        Family("qwen3_moe", "qwen3_moe_throughout", has(EXPERTS)),
        Family("qwen3_next", "qwen3_next", has(EXPERTS, RECURRENT)),
        Family("qwen3_5", "qwen3_5_moe", has(EXPERTS, RECURRENT, VISION)),
        Family("deepseek_v3", "deepseek_v3", has(EXPERTS), not_run=NO_STOCK),
        Family("deepseek_v32", "deepseek_v32", has(EXPERTS), SPARSE, {"ATOM_SPARSE_MLA": "1"}),
    ),
    features=(
        Feature("tensor parallelism", "--tp-size", {"tp_size": 2}),
        Feature("data-parallel attention, idle ranks", "--enable-dp-attention",
                {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}),
        Feature("expert parallelism", "--ep-size", {"ep_size": 2}, needs=EXPERTS, on_ranks=True),
        Feature("pipeline stages", "--pp-size", {"pp_size": 2}),
        Feature("chunked prefill", "--chunked-prefill-size", {"chunked_prefill_size": 128}),
        Feature("prefix caching", "--disable-radix-cache", {"disable_radix_cache": False}),
        Feature("overlapped steps", "--disable-overlap-schedule", {"disable_overlap_schedule": False}),
        Feature("FP8 KV cache", "--kv-cache-dtype", {"kv_cache_dtype": "fp8_e4m3"}, in_stock=True),
        Feature("FP8 weights", "fp8", weights="fp8", not_run=QUANTISED.format("sglang")),
        Feature("decode graphs", "--cuda-graph-backend-decode", needs_gpu=True),
        Feature("torch.compile", "--enable-torch-compile", {"enable_torch_compile": True}, not_run=ON_GPU),
        Feature("LoRA", "--enable-lora", {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj"]},
                not_run=ON_GPU),
        Feature("trees of drafts", "--speculative-algorithm", {"speculative_algorithm": "NGRAM"}, not_run=ON_GPU),
        Feature("chains of drafts", "--speculative-algorithm",
                {"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 1}, not_run=ON_GPU),
        Feature("deterministic inference", "--enable-deterministic-inference",
                {"enable_deterministic_inference": True}),
        Feature("weight offload", "--cpu-offload-gb", {"cpu_offload_gb": 1}),
        Feature("sleep", "--enable-memory-saver", {"enable_memory_saver": True},
                not_run="needs the package torch_memory_saver"),
    ),
)  # fmt: skip

ENGINES = {engine.name: engine for engine in (VLLM, SGLANG)}
