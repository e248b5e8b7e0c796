"""DeepSeek-V3.2's sparse attention on SGLang where SGLang's own kernels for it cannot run.

    python examples/sparse_mla.py                  # a small checkpoint, made here; without a GPU on a stand-in
    python examples/sparse_mla.py MODEL            # one of your own, on as many GPUs as it takes: add --tp-size N

With the small checkpoint it prints

    SGLANG_PLUGINS=atom python -m sglang.launch_server --model-path … --kv-cache-dtype fp8_e4m3 …
    200 prompt tokens, of which a row selects 16; then 8 new ones: …
    …: … patches of sglang.sparse_mla in place
    …
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dp_attention import flags
from serving import inherited, on_gpu, post, prompt, server, show_processes

from tests.sglang.environment import environment, options


def main() -> None:
    command = ["python", "-m", "sglang.launch_server", "--model-path"]
    asked = {"SGLANG_PLUGINS": "atom", **({"ATOM_SPARSE_MLA": "1"} if on_gpu() else {})}
    if own := sys.argv[1:]:
        model, variables = own[0], inherited()
        command = [*command, *own, "--kv-cache-dtype", "fp8_e4m3"]
    else:
        from checkpoints import checkpoint

        model, variables = str(checkpoint("deepseek_v32")), environment()
        tiny = options(attention_backend="dsa", kv_cache_dtype="fp8_e4m3", skip_server_warmup=True)
        command = [*command, model, *flags(**tiny)]
    with server("sparse_mla", command, asked, variables) as started:
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        answer = post(started, "/generate", input_ids=prompt(200), sampling_params=sampling)
        tokens, used = answer["output_ids"], answer["meta_info"]["prompt_tokens"]
        selected = json.loads((Path(model) / "config.json").read_text())["index_topk"]
        new = f"then {len(tokens)} new ones: {' '.join(map(str, tokens))}"
        print(f"{used} prompt tokens, of which a row selects {selected}; {new}")
        show_processes(started, "sglang.sparse_mla")


if __name__ == "__main__":
    main()
