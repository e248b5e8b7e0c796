"""A Qwen3-Next model of any size with seeded weights and no checkpoint: vLLM gets each weight by its name.

Every rank makes each weight whole from its name alone and lets vLLM's own loaders cut it, so all layouts run the same
model. As in tools/checkpoints.py, the context is heard at these scales, and a token's own code settles its experts.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

CODE = 4.0
SHARPNESS = 3.0
LOAD_FORMAT = "seeded"
Shape2 = tuple[int, ...]


@dataclass(frozen=True)
class Size:
    """Dimensions by the names of the Hugging Face configuration."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    vocab_size: int


SIZES = {
    # Qwen3.6-35B-A3B with 12 of its 40 layers and a smaller vocabulary.
    "qwen35b": Size(12, 2048, 16, 2, 256, 16, 32, 128, 128, 256, 8, 512, 512, 32768),
    "tiny": Size(4, 64, 4, 2, 32, 2, 4, 32, 32, 12, 2, 384, 192, 512),
}


def write_config(size: Size, folder: Path, positions: int) -> Path:
    """The model's folder, with a configuration and nothing else."""
    values = {
        **asdict(size),
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "linear_conv_kernel_dim": 4,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "intermediate_size": size.moe_intermediate_size,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000.0,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values, indent=1))
    return folder


def shapes(size: Size) -> Iterator[tuple[str, Shape2]]:
    """Every weight of the checkpoint, by its name there."""
    hidden, experts = size.hidden_size, size.num_experts
    yield "model.embed_tokens.weight", (size.vocab_size, hidden)
    for index in range(size.num_hidden_layers):
        layer = f"model.layers.{index}"
        part = _full_attention(size) if index % 4 == 3 else _gated_delta_net(size)
        yield from ((f"{layer}.{name}", shape) for name, shape in part.items())
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate.weight", (experts, hidden)
        yield f"{layer}.mlp.shared_expert_gate.weight", (1, hidden)
        widths = {f"experts.{expert}": size.moe_intermediate_size for expert in range(experts)}
        for name, width in {**widths, "shared_expert": size.shared_expert_intermediate_size}.items():
            yield f"{layer}.mlp.{name}.gate_proj.weight", (width, hidden)
            yield f"{layer}.mlp.{name}.up_proj.weight", (width, hidden)
            yield f"{layer}.mlp.{name}.down_proj.weight", (hidden, width)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (size.vocab_size, hidden)


def _full_attention(size: Size) -> dict[str, Shape2]:
    hidden, head = size.hidden_size, size.head_dim
    queries, keys = size.num_attention_heads * head, size.num_key_value_heads * head
    return {
        "self_attn.q_proj.weight": (2 * queries, hidden),  # queries and their output gates
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
    }


def _gated_delta_net(size: Size) -> dict[str, Shape2]:
    hidden = size.hidden_size
    keys = size.linear_num_key_heads * size.linear_key_head_dim
    values = size.linear_num_value_heads * size.linear_value_head_dim
    return {
        "linear_attn.in_proj_qkvz.weight": (2 * keys + 2 * values, hidden),
        "linear_attn.in_proj_ba.weight": (2 * size.linear_num_value_heads, hidden),
        "linear_attn.conv1d.weight": (2 * keys + values, 1, 4),
        "linear_attn.A_log": (size.linear_num_value_heads,),
        "linear_attn.dt_bias": (size.linear_num_value_heads,),
        "linear_attn.norm.weight": (size.linear_value_head_dim,),
        "linear_attn.out_proj.weight": (hidden, values),
    }


def weight(name: str, shape: Shape2, size: Size, device: torch.device) -> torch.Tensor:
    """One weight, bfloat16, from its name."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    if name.endswith("A_log"):
        return torch.empty(shape, device=device).uniform_(math.log(0.002), math.log(0.5), generator=generator)
    if name.endswith("dt_bias"):
        return torch.rand(shape, generator=generator, device=device)
    values = torch.randn(shape, generator=generator, device=device)
    if len(shape) == 1:
        # These norms add one to their weights, but for the gated one.
        values = 0.1 * values + ((SHARPNESS - 1) if name.endswith("q_norm.weight") else 0.0)
        return (values + 1 if name.endswith("linear_attn.norm.weight") else values).bfloat16()
    if not name.endswith("embed_tokens.weight"):
        values *= shape[-1] ** -0.5
    return _settled(name, values, size, generator).bfloat16()


def _settled(name: str, values: torch.Tensor, size: Size, generator: torch.Generator) -> torch.Tensor:
    """The first channels of the residual stream hold the token's experts, and no layer writes there."""
    experts = size.num_experts
    if experts * 2 > size.hidden_size:
        return values
    if name.endswith("embed_tokens.weight"):
        ranks = torch.rand((len(values), experts), generator=generator, device=values.device).argsort(-1)
        values[:, :experts] = CODE * (ranks < size.num_experts_per_tok)
    elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
        values[:experts] = 0
    elif name.endswith("mlp.gate.weight"):
        values *= 0.2
        values[:, :experts] = 2 * torch.eye(experts, device=values.device)
    return values


def register(size: Size) -> None:
    """Teach vLLM the load format :data:`LOAD_FORMAT`, in this process."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class SeededLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            """Nothing is downloaded."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            device = next(model.parameters()).device
            model.load_weights((name, weight(name, shape, size, device)) for name, shape in shapes(size))

    register_model_loader(LOAD_FORMAT)(SeededLoader)
