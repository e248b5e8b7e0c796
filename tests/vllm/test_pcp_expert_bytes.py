"""What `auto` takes for the bytes of all experts, from a configuration, is what a checkpoint's experts have."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from safetensors import safe_open  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402

from atom_patches.vllm.adapters.pcp_experts import whole_expert_bytes  # noqa: E402
from tests.vllm.gdn_oracle import checkpoint  # noqa: E402


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
def test_bytes_of_all_experts(name: str) -> None:
    folder = checkpoint(name)
    options = EngineArgs(model=str(folder), dtype="bfloat16", max_model_len=512, enforce_eager=True)
    found = whole_expert_bytes(options.create_engine_config())
    elements = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            elements += sum(weights.get_tensor(name).numel() for name in weights.keys() if ".experts." in name)  # noqa: SIM118
    assert found == 2 * elements > 0
