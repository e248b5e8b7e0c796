"""DeepSeek-V3: attention to latents, experts that are chosen with a bias from the best groups, and shared ones."""

from __future__ import annotations

from typing import Any

from atom_patches.models.config import ATTENTION, DecoderConfig, LatentConfig, read_rotary, refuse_unusual
from atom_patches.models.decoder import Decoder
from atom_patches.models.parts import ExpertsShape, Parts, RotaryShape
from atom_patches.models.rotary import yarn_length

_USUAL: dict[str, object] = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "attention_bias": False,
    "swiglu_limit": None,
    "llama_4_scaling": None,
}
"""What configurations may say, and the only value that the decoder computes."""


def deepseek_v3_config(hf: Any) -> DecoderConfig:
    """From a checkpoint's configuration.

    Raises:
        ValueError: it asks for something that the decoder does not compute.
    """
    if getattr(hf, "index_topk", None) is not None:
        raise ValueError(f"index_topk must not be set for a DeepseekV3ForCausalLM, got {hf.index_topk!r}")
    return read_latent(hf)


def deepseek_v3(hf: Any, parts: Parts, *, prefix: str = "model") -> Decoder:
    """The decoder of a checkpoint's configuration."""
    return Decoder(deepseek_v3_config(hf), parts, prefix=prefix)


def read_latent(hf: Any) -> DecoderConfig:
    """What V3 and its successors share."""
    refuse_unusual(hf)
    for name, usual in _USUAL.items():
        if getattr(hf, name, usual) != usual:
            raise ValueError(f"{name} must be {usual!r}, got {getattr(hf, name)!r}")
    if not hf.q_lora_rank:
        raise ValueError("q_lora_rank must be set: queries without a latent are not computed")
    rotary = read_rotary(hf, hf.qk_rope_head_dim, latent=True)
    return DecoderConfig(
        vocabulary=hf.vocab_size,
        hidden=hf.hidden_size,
        eps=hf.rms_norm_eps,
        gemma=False,
        kinds=(ATTENTION,) * hf.num_hidden_layers,
        sparse=tuple(layer >= hf.first_k_dense_replace for layer in range(hf.num_hidden_layers)),
        heads=hf.num_attention_heads,
        kv_heads=1,
        head_size=hf.kv_lora_rank + hf.qk_rope_head_dim,
        qk_norm=False,
        gated=False,
        attention_bias=False,
        rotary=rotary,
        intermediate=hf.intermediate_size,
        experts=_experts(hf),
        shared_intermediate=hf.moe_intermediate_size * (hf.n_shared_experts or 0),
        shared_gated=False,
        routed_scale=hf.routed_scaling_factor,
        latent=LatentConfig(
            query_rank=hf.q_lora_rank,
            rank=hf.kv_lora_rank,
            plain=hf.qk_nope_head_dim,
            rope=hf.qk_rope_head_dim,
            value=hf.v_head_dim,
            scale=_scale(hf, rotary),
        ),
    )


def _experts(hf: Any) -> ExpertsShape:
    return ExpertsShape(
        experts=hf.n_routed_experts,
        chosen=hf.num_experts_per_tok,
        hidden=hf.hidden_size,
        intermediate=hf.moe_intermediate_size,
        renormalise=hf.norm_topk_prob,
        groups=hf.n_group or 1,
        chosen_groups=hf.topk_group or 1,
        biased=True,
    )


def _scale(hf: Any, rotary: RotaryShape) -> float:
    """Of the scores; yarn says by how much they are sharpened besides, over all of a head's values."""
    scale = (hf.qk_nope_head_dim + hf.qk_rope_head_dim) ** -0.5
    scaling: dict[str, Any] = dict(rotary.scaling or {})
    if scaling.get("mscale_all_dim"):
        scale *= yarn_length(scaling["factor"], scaling["mscale_all_dim"]) ** 2
    return scale
