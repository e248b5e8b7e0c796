"""A Qwen3-Next or Qwen3 model of any size with seeded weights and no checkpoint: an engine gets each by its name.

Every rank makes each weight whole from its name alone and lets the engine's own loaders cut it, so all layouts run the
same model. As in tools/checkpoints.py, the context is heard at these scales, and a token's own code settles its
experts.
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

INTERVAL = 4
"""The last of so many layers of a hybrid is full attention."""


@dataclass(frozen=True)
class Size:
    """Dimensions by the names of the Hugging Face configuration; of Qwen3, if there are no others."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    intermediate_size: int

    def config(self) -> dict[str, Any]:
        """What the configuration has beside the dimensions."""
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_theta": 1e6}

    def layer(self, index: int) -> dict[str, Shape2]:
        """The weights of a layer, but for its norms."""
        return {**_attention(self, gates=1), **_mlp("mlp", self.hidden_size, self.intermediate_size)}


@dataclass(frozen=True)
class HybridSize(Size):
    """Of Qwen3-Next."""

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "linear_conv_kernel_dim": 4,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
            "full_attention_interval": INTERVAL,
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e7,
        }

    def layer(self, index: int) -> dict[str, Shape2]:
        # The queries' projection has the output's gates, too.
        full = index % INTERVAL == INTERVAL - 1
        found = {**(_attention(self, gates=2) if full else _gated_delta_net(self))}
        found["mlp.gate.weight"] = (self.num_experts, self.hidden_size)
        found["mlp.shared_expert_gate.weight"] = (1, self.hidden_size)
        for expert in range(self.num_experts):
            found |= _mlp(f"mlp.experts.{expert}", self.hidden_size, self.moe_intermediate_size)
        return found | _mlp("mlp.shared_expert", self.hidden_size, self.shared_expert_intermediate_size)


SIZES = {
    # Qwen3.6-35B-A3B with 12 of its 40 layers and a smaller vocabulary.
    "qwen35b": HybridSize(12, 2048, 16, 2, 256, 32768, 512, 16, 32, 128, 128, 256, 8, 512, 512),
    "qwen8b": Size(36, 4096, 32, 8, 128, 151936, 12288),
    "tiny": HybridSize(4, 64, 4, 2, 32, 512, 384, 2, 4, 32, 32, 12, 2, 384, 192),
    "tiny-dense": Size(4, 64, 4, 2, 32, 512, 192),
}


def write_config(size: Size, folder: Path, positions: int) -> Path:
    """The model's folder, with a configuration and nothing else."""
    values = {
        **asdict(size),
        **size.config(),
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values, indent=1))
    return folder


def shapes(size: Size) -> Iterator[tuple[str, Shape2]]:
    """Every weight of the checkpoint, by its name there."""
    hidden = size.hidden_size
    yield "model.embed_tokens.weight", (size.vocab_size, hidden)
    for index in range(size.num_hidden_layers):
        layer = f"model.layers.{index}"
        yield from ((f"{layer}.{name}", shape) for name, shape in size.layer(index).items())
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (size.vocab_size, hidden)


def _mlp(name: str, hidden: int, width: int) -> dict[str, Shape2]:
    return {
        f"{name}.gate_proj.weight": (width, hidden),
        f"{name}.up_proj.weight": (width, hidden),
        f"{name}.down_proj.weight": (hidden, width),
    }


def _attention(size: Size, gates: int) -> dict[str, Shape2]:
    hidden, head = size.hidden_size, size.head_dim
    queries, keys = size.num_attention_heads * head, size.num_key_value_heads * head
    return {
        "self_attn.q_proj.weight": (gates * queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
    }


def _gated_delta_net(size: HybridSize) -> dict[str, Shape2]:
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
        # A hybrid's norms add one to their weights, but for the gated one.
        values = 0.1 * values + ((SHARPNESS - 1) if name.endswith("q_norm.weight") else 0.0)
        added = isinstance(size, HybridSize) and not name.endswith("linear_attn.norm.weight")
        return (values if added else values + 1).bfloat16()
    if not name.endswith("embed_tokens.weight"):
        values *= shape[-1] ** -0.5
    return (_settled(name, values, size, generator) if isinstance(size, HybridSize) else values).bfloat16()


def _settled(name: str, values: torch.Tensor, size: HybridSize, generator: torch.Generator) -> torch.Tensor:
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


def weights(size: Size, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of the checkpoint, one after the other, bfloat16."""
    return ((name, weight(name, shape, size, device)) for name, shape in shapes(size))


def register(size: Size) -> None:
    """Teach vLLM the load format :data:`LOAD_FORMAT`, in this process."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class SeededLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            """Nothing is downloaded."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            model.load_weights(weights(size, next(model.parameters()).device))

    register_model_loader(LOAD_FORMAT)(SeededLoader)
