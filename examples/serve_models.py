"""Serve a family of models on ATOM's decoders, with vLLM or SGLang, whichever is installed.

    python examples/serve_models.py                      # Qwen3, a small checkpoint, made here; without a GPU, too
    python examples/serve_models.py llama qwen3_next     # these families, or `all`: one server after the other
    python examples/serve_models.py MODEL                # a model of your own, on a GPU

`ATOM_MODELS=1` leaves what no decoder serves to the engine's own. It prints

    ATOM_MODELS=1 …_PLUGINS=atom python -m … --model… …
    40 prompt tokens, then 8 new ones: …
    …: … patches of ….models in place
    …
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from serving import inherited, on_gpu, post, prompt, server, show_processes, vllm_settings

#: A small checkpoint of each family.
FAMILIES = {
    "llama": "llama_tied",
    "qwen3": "qwen3_tied",
    "qwen3_moe": "qwen3_moe",
    "qwen3_next": "qwen3_next",
    "qwen3_5": "qwen3_5_moe",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v32": "deepseek_v32",
}
#: vLLM's CPU platform has no attention to latents.
ON_GPU_ALONE = ("deepseek_v3", "deepseek_v32")
VLLM = importlib.util.find_spec("vllm") is not None


def ours(name: str) -> str | None:
    """The small checkpoint of a family; none for a model of your own."""
    if name not in FAMILIES:
        return None
    from checkpoints import checkpoint

    return str(checkpoint(FAMILIES[name]))


def serve_with_vllm(name: str) -> None:
    path = ours(name)
    command = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", path or name]
    if path:
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4"]
        command += ["--language-model-only"] if name == "qwen3_5" else []
    asked = {"ATOM_MODELS": "1", "VLLM_PLUGINS": "atom"}
    with server(
        f"models-vllm-{name.replace('/', '_')}", command, asked, {**inherited(), **vllm_settings(ranks=1)}
    ) as started:
        said = {"prompt": prompt(40), "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = post(started, "/v1/completions", model=path or name, **said)
        show(answer["usage"]["prompt_tokens"], answer["choices"][0]["token_ids"])
        show_processes(started, "vllm.models")


def serve_with_sglang(name: str) -> None:
    from dp_attention import flags

    from tests.sglang.environment import environment, options

    path = ours(name)
    command = ["python", "-m", "sglang.launch_server", "--model-path", path or name]
    asked = {"ATOM_MODELS": "1", "SGLANG_PLUGINS": "atom"}
    if path:
        sparse: dict[str, Any] = {"attention_backend": "dsa"} if name == "deepseek_v32" else {}
        command += flags(**options(skip_server_warmup=True, **sparse))
    with server(
        f"models-sglang-{name.replace('/', '_')}", command, asked, environment() if path else inherited()
    ) as started:
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        answer = post(started, "/generate", input_ids=prompt(40), sampling_params=sampling)
        show(answer["meta_info"]["prompt_tokens"], answer["output_ids"])
        show_processes(started, "sglang.models")


def show(used: int, tokens: list[int]) -> None:
    print(f"{used} prompt tokens, then {len(tokens)} new ones: {' '.join(map(str, tokens))}", flush=True)


def main() -> None:
    names = sys.argv[1:] or ["qwen3"]
    for name in FAMILIES if names == ["all"] else names:
        if VLLM and name in ON_GPU_ALONE and not on_gpu():
            print(f"{name}: vLLM has no attention to latents without a GPU")
        elif VLLM:
            serve_with_vllm(name)
        else:
            serve_with_sglang(name)


if __name__ == "__main__":
    main()
