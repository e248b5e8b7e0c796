"""Prefill context parallelism for a hybrid model on vLLM: one prompt, half of its rows on each of two ranks.

    python examples/serve_hybrid_pcp.py            # a small checkpoint, made here; without a GPU on the CPU platform
    python examples/serve_hybrid_pcp.py MODEL      # a Qwen3-Next or Qwen3.5 of your own, on two GPUs

With the small checkpoint it prints

    VLLM_PLUGINS=atom python -m vllm.entrypoints.openai.api_server --model … --prefill-context-parallel-size 2 …
    400 prompt tokens, then 8 new ones: …
    1 split step, 200 rows on each of 2 ranks
    …: … patches of vllm.pcp in place
    …
"""

from __future__ import annotations

import sys

from serving import inherited, metric, post, prompt, server, show_processes, vllm_settings

TINY = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "4")


def main() -> None:
    if own := sys.argv[1:]:
        model, options = own[0], ()
    else:
        from checkpoints import checkpoint

        model, options = str(checkpoint("qwen3_next")), TINY
    command = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--prefill-context-parallel-size", "2", *options]
    environment = {**inherited(), **vllm_settings(ranks=2)}
    with server("hybrid_pcp", command, {"VLLM_PLUGINS": "atom"}, environment) as started:
        asked = {"prompt": prompt(400), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = post(started, "/v1/completions", model=model, return_token_ids=True, **asked)
        used, tokens = answer["usage"]["prompt_tokens"], answer["choices"][0]["token_ids"]
        print(f"{used} prompt tokens, then {len(tokens)} new ones: {' '.join(map(str, tokens))}")
        steps = metric(started, "vllm:atom_pcp_steps_total", step="split")
        rows = metric(started, "vllm:atom_pcp_rows_per_rank")
        print(f"{steps} split step, {rows} rows on each of 2 ranks")
        show_processes(started, "vllm.pcp")


if __name__ == "__main__":
    main()
