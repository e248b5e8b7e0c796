"""In a notebook or a script: import the package first, then use vLLM as ever. Run it whole, or cell by cell.

    python examples/notebook.py

Importing arms this process and those that it starts; `VLLM_PLUGINS` need not be set. It prints

    400 prompt tokens, then 8 new ones: …
    worker: … patches of vllm.pcp in place
    worker: … patches of vllm.pcp in place
"""

# %%
from __future__ import annotations

import atom_patches  # noqa: F401  # isort: skip  # before vLLM

import os

from serving import LOGS, prompt, vllm_settings  # also finds tools/

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", **vllm_settings(ranks=2)}


# %%
def main() -> None:
    from checkpoints import checkpoint
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(checkpoint("qwen3_next")),
        prefill_context_parallel_size=2,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=4,
    )
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (answer,) = llm.generate({"prompt_token_ids": prompt(400)}, sampling, use_tqdm=False)
    tokens = answer.outputs[0].token_ids
    print(f"{len(answer.prompt_token_ids)} prompt tokens, then {len(tokens)} new ones: {' '.join(map(str, tokens))}")
    show_workers()


# %%
def show_workers() -> None:
    """What `python -m atom_patches status` says about the workers."""
    from atom_patches.core import report

    for process in report.processes():
        if "worker" in process.roles:
            applied = sum(one.id.startswith("vllm.pcp.") and one.state == "applied" for one in process.patches)
            print(f"{' and '.join(process.roles)}: {applied} patches of vllm.pcp in place")


if __name__ == "__main__":  # vLLM's processes import this file again
    states = LOGS / "notebook.states"
    states.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ["ATOM_PATCHES_STATE_DIR"] = str(states)
    main()
