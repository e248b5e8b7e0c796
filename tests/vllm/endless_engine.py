"""Start an engine on two prefill-context-parallel ranks as a script does, and let it answer for ever.

    python endless_engine.py MODEL

It prints a line whenever a prompt has been answered.
"""

from __future__ import annotations

import sys
from typing import Any


def main() -> None:  # a spawned child imports this module, but does not run this function
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=sys.argv[1],
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=2,
        prefill_context_parallel_size=2,
        enable_prefix_caching=False,
    )
    sampling = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, detokenize=False)
    prompts: list[Any] = [{"prompt_token_ids": list(range(1, 150))}] * 2
    while True:
        llm.generate(prompts, sampling, use_tqdm=False)
        print("answered", flush=True)


if __name__ == "__main__":
    main()
