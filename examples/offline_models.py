"""Generate without a server, on ATOM's decoders in vLLM: one family after the other, in this process.

    python examples/offline_models.py              # small checkpoints, made here; without a GPU, too
    python examples/offline_models.py MODEL        # a model of your own, on a GPU

`model_impl="atom"` requires ATOM's decoder; an engine that cannot have it does not start. With the small checkpoints it
prints

    llama: AtomLlamaForCausalLM, 40 prompt tokens, then 8 new ones: …
    qwen3: AtomQwen3ForCausalLM, 40 prompt tokens, then 8 new ones: …
    qwen3_moe: AtomQwen3MoeForCausalLM, 40 prompt tokens, then 8 new ones: …
    qwen3_next: AtomQwen3NextForCausalLM, 40 prompt tokens, then 8 new ones: …
    qwen3_5: AtomQwen3_5MoeForConditionalGeneration, 40 prompt tokens, then 8 new ones: …
"""

from __future__ import annotations

import atom_patches  # noqa: F401  # isort: skip  # before vLLM

import os
import sys
from typing import Any

from serve_models import FAMILIES, ON_GPU_ALONE, ours
from serving import prompt, vllm_settings

# One process: so the model's class can be asked for.
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **vllm_settings(ranks=1)}


def generate(name: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    small: dict[str, Any] = {}
    if path := ours(name):
        small = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4}
        small |= {"language_model_only": True} if name == "qwen3_5" else {}
    llm = LLM(model=path or name, model_impl="atom", distributed_executor_backend=UniProcExecutor, **small)
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (answer,) = llm.generate({"prompt_token_ids": prompt(40)}, sampling, use_tqdm=False)
    tokens = answer.outputs[0].token_ids
    (kind,) = llm.apply_model(lambda model: type(model).__name__)
    used = len(answer.prompt_token_ids or ())
    print(
        f"{name}: {kind}, {used} prompt tokens, then {len(tokens)} new ones: {' '.join(map(str, tokens))}", flush=True
    )


def main() -> None:
    for name in sys.argv[1:] or (name for name in FAMILIES if name not in ON_GPU_ALONE):
        generate(name)


if __name__ == "__main__":
    main()
