"""Data-parallel attention on SGLang with the ATOM decoders, while one of two ranks has nothing to do.

    python examples/dp_attention.py                # a small checkpoint, made here; without a GPU on a stand-in
    python examples/dp_attention.py MODEL          # a Qwen3-Next or Qwen3.5 of your own, on two GPUs

With the small checkpoint it prints

    ATOM_MODELS=1 SGLANG_PLUGINS=atom python -m sglang.launch_server --model-path … --enable-dp-attention …
    on rank 0, 7 prompt tokens, then 8 new ones: …
    on rank 1, 33 prompt tokens, then 8 new ones: …
    …: … patches of sglang.models in place
    …
"""

from __future__ import annotations

import sys

from serving import inherited, post, prompt, server, show_processes

from tests.sglang.environment import environment, options


def flags(**wanted: object) -> list[str]:
    """Options as words of a command line."""
    words: list[str] = []
    for name, value in wanted.items():
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


def main() -> None:
    command = ["python", "-m", "sglang.launch_server", "--model-path"]
    layout = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
    if own := sys.argv[1:]:
        command, variables = [*command, own[0], *flags(**layout)], inherited()
    else:
        from checkpoints import checkpoint

        tiny = options(**layout, skip_server_warmup=True)
        command, variables = [*command, str(checkpoint("qwen3_next")), *flags(**tiny)], environment()
    with server("dp_attention", command, {"ATOM_MODELS": "1", "SGLANG_PLUGINS": "atom"}, variables) as started:
        for rank, length in ((0, 7), (1, 33)):
            sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
            answer = post(started, "/generate", input_ids=prompt(length), sampling_params=sampling, routed_dp_rank=rank)
            tokens = answer["output_ids"]
            used = answer["meta_info"]["prompt_tokens"]
            print(f"on rank {rank}, {used} prompt tokens, then {len(tokens)} new ones: {' '.join(map(str, tokens))}")
        show_processes(started, "sglang.models")


if __name__ == "__main__":
    main()
