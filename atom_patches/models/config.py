"""What a decoder needs to know of a checkpoint's configuration, whichever library read it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from atom_patches.models.lightning_indexer import IndexerShape
from atom_patches.models.parts import ExpertsShape, RotaryShape

ATTENTION = "attention"
RECURRENT = "recurrent"
_KINDS = {"full_attention": ATTENTION, "attention": ATTENTION, "linear_attention": RECURRENT}
_UNSCALED = ("default", "mrope")
_SCALINGS: dict[str, tuple[set[str], set[str]]] = {
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, set()),
    "yarn": ({"factor", "original_max_position_embeddings"}, {"beta_fast", "beta_slow"}),
}
"""What a configuration may say about positions beyond those of the training: what it must name, and what it may."""
_USUAL: dict[str, object] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "bias": False,
    "qkv_bias": False,
    "use_sliding_window": False,
    "dual_chunk_attention_config": None,
    "rope_is_neox_style": True,
    "is_causal": True,
    "layer_scale": False,
    "logit_scale": 1.0,
}
"""What checkpoints of these families may set, and the only value that the decoders compute."""
_LATENT_YARN = {"mscale", "mscale_all_dim"}
_OF_ALL = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_GATES = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}


@dataclass(frozen=True)
class LatentConfig:
    """Attention to latents, as DeepSeek-V3 has it.

    Attributes:
        query_rank, rank: sizes of the latents of queries, and of keys and values.
        plain, rope: values of a head's query and key that positions leave, and turn.
        value: of a head.
        scale: of the scores.
    """

    query_rank: int
    rank: int
    plain: int
    rope: int
    value: int
    scale: float


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder of attention layers and, in hybrid models, GatedDeltaNet layers; each followed by an MLP or by experts.

    Attributes:
        gemma: whether norms multiply by 1 + weight instead of the weight; not those of GatedDeltaNet layers.
        kinds: per layer, `ATTENTION` or `RECURRENT`.
        sparse: per layer, whether it has experts.
        qk_norm: whether each head's queries and keys are normed.
        gated: whether attention's outputs are multiplied by a gate, which stands behind each head's query.
        attention_bias: whether attention's projections have one, in and out.
        key_heads, value_heads, key_size, value_size: of GatedDeltaNet layers; 0 where there are none.
        taps: of their convolution.
        output_gate: activation of the gate of their output norm.
        intermediate: width of an MLP without experts.
        shared_intermediate: width of the MLP beside the experts; 0: there is none.
        shared_gated: whether that has a gate of its own.
        routed_scale: by what the routed experts' sum is multiplied.
        latent: what attention is like where it is to latents; `kv_heads` and `head_size` are of no use then.
        indexer: what selects the tokens that are attended to; None: all are.
    """

    vocabulary: int
    hidden: int
    eps: float
    gemma: bool
    kinds: tuple[str, ...]
    sparse: tuple[bool, ...]
    heads: int
    kv_heads: int
    head_size: int
    qk_norm: bool
    gated: bool
    attention_bias: bool
    rotary: RotaryShape
    intermediate: int
    experts: ExpertsShape | None
    shared_intermediate: int = 0
    shared_gated: bool = True
    routed_scale: float = 1.0
    latent: LatentConfig | None = None
    indexer: IndexerShape | None = None
    key_heads: int = 0
    value_heads: int = 0
    key_size: int = 0
    value_size: int = 0
    taps: int = 0
    output_gate: str = ""

    @property
    def layers(self) -> int:
        """How many there are."""
        return len(self.kinds)

    @property
    def keys(self) -> int:
        """Channels of all keys, or queries, of a GatedDeltaNet layer."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Channels of all values of a GatedDeltaNet layer."""
        return self.value_heads * self.value_size


def read_hybrid(hf: Any, sparse: tuple[bool, ...], experts: ExpertsShape | None) -> DecoderConfig:
    """Of Qwen3-Next and Qwen3.5: gated attention in some layers, GatedDeltaNet in the others.

    Raises:
        ValueError: it asks for something that these decoders do not compute.
    """
    if getattr(hf, "attention_bias", False):
        raise ValueError("attention_bias must be false: projections of hybrid models have no bias here")
    return replace(
        read_dense(hf, sparse, experts, qk_norm=True),
        gemma=True,
        gated=getattr(hf, "attn_output_gate", True),
        key_heads=hf.linear_num_key_heads,
        value_heads=hf.linear_num_value_heads,
        key_size=hf.linear_key_head_dim,
        value_size=hf.linear_value_head_dim,
        taps=hf.linear_conv_kernel_dim,
        output_gate=_output_gate(hf),
        shared_intermediate=(getattr(hf, "shared_expert_intermediate_size", 0) or 0) if experts else 0,
    )


def read_dense(hf: Any, sparse: tuple[bool, ...], experts: ExpertsShape | None, *, qk_norm: bool) -> DecoderConfig:
    """From a text configuration in the Hugging Face spelling; what differs between families comes from the caller.

    Raises:
        ValueError: it asks for something that these decoders do not compute.
    """
    refuse_unusual(hf)
    rotary = read_rotary(hf)
    return DecoderConfig(
        vocabulary=hf.vocab_size,
        hidden=hf.hidden_size,
        eps=hf.rms_norm_eps,
        gemma=False,
        kinds=_layer_kinds(hf),
        sparse=sparse,
        heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        head_size=rotary.head_size,
        qk_norm=qk_norm,
        gated=False,
        attention_bias=bool(getattr(hf, "attention_bias", False)),
        rotary=rotary,
        intermediate=getattr(hf, "intermediate_size", 0) or 0,
        experts=experts,
    )


def read_rotary(hf: Any, head_size: int = 0, *, latent: bool = False) -> RotaryShape:
    """The rotary positions of a text configuration, which libraries spell in two ways.

    Args:
        head_size: if it is not the configuration's.
        latent: as DeepSeek means them: neighbours turn together, and yarn says by what it multiplies.

    Raises:
        ValueError: positions in time, height and width are not interleaved, or a scaling is not computed here.
    """
    said: dict[str, Any] = dict(getattr(hf, "rope_scaling", None) or {})
    said |= dict(getattr(hf, "rope_parameters", None) or {})
    head_size = head_size or getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    turning = said.get("partial_rotary_factor", getattr(hf, "partial_rotary_factor", 1.0))
    sections = said.get("mrope_section")
    if sections and not said.get("mrope_interleaved", False):
        raise ValueError(
            "mrope_section without mrope_interleaved: positions in time, height and width must be interleaved"
        )
    kind: str = said.get("rope_type", said.get("type", "default"))
    scaling = None if kind in _UNSCALED else _scaling(kind, said, _LATENT_YARN if latent else set())
    return RotaryShape(
        head_size=head_size,
        rotary_size=int(head_size * turning),
        max_position=hf.max_position_embeddings,
        theta=float(said.get("rope_theta", getattr(hf, "rope_theta", 10000.0))),
        sections=(int(sections[0]), int(sections[1]), int(sections[2])) if sections else None,
        scaling=scaling,
        interleaved=latent and getattr(hf, "rope_interleave", True),
    )


def _scaling(kind: str, said: dict[str, Any], more: set[str]) -> dict[str, object]:
    if kind not in _SCALINGS:
        raise ValueError(f"rope_type must be one of {', '.join((*_UNSCALED, *_SCALINGS))}, got {kind!r}")
    needed, allowed = _SCALINGS[kind]
    given = {name: value for name, value in said.items() if name not in _OF_ALL and value is not None}
    if needed - given.keys():
        raise ValueError(f"rope_type {kind!r} needs {', '.join(sorted(needed - given.keys()))} besides")
    if given.keys() - needed - allowed - more:
        others = ", ".join(sorted(given.keys() - needed - allowed - more))
        raise ValueError(f"rope_type {kind!r} is not computed with {others} here")
    return {"rope_type": kind, **given}


def read_sparse(hf: Any) -> tuple[bool, ...]:
    """Per layer, whether it has experts, as Qwen's configurations say it."""
    dense: list[int] = getattr(hf, "mlp_only_layers", None) or []
    step: int = getattr(hf, "decoder_sparse_step", 1)
    return tuple(
        hf.num_experts > 0 and layer not in dense and (layer + 1) % step == 0 for layer in range(hf.num_hidden_layers)
    )


def read_experts(hf: Any, renormalise: bool) -> ExpertsShape:
    """The experts of a text configuration."""
    return ExpertsShape(
        experts=hf.num_experts,
        chosen=hf.num_experts_per_tok,
        hidden=hf.hidden_size,
        intermediate=hf.moe_intermediate_size,
        renormalise=renormalise,
    )


def _layer_kinds(hf: Any) -> tuple[str, ...]:
    """By an engine's own list, from which it makes caches, else by the checkpoint's; without one all are attention."""
    listed = getattr(hf, "layers_block_type", None) or getattr(hf, "layer_types", None)
    named = listed or ["full_attention"] * hf.num_hidden_layers
    unknown = set(named) - set(_KINDS)
    if unknown:
        raise ValueError(f"layers must be one of {', '.join(_KINDS)}, got {', '.join(sorted(unknown))}")
    return tuple(_KINDS[name] for name in named)


def _output_gate(hf: Any) -> str:
    name = getattr(hf, "output_gate_type", None) or hf.hidden_act
    if name not in _GATES:
        raise ValueError(f"output_gate_type must be one of {', '.join(_GATES)}, got {name!r}")
    return _GATES[name]


def refuse_unusual(hf: Any) -> None:
    """Have a configuration say what all decoders here take for granted.

    Raises:
        ValueError: it says something else.
    """
    for name, usual in _USUAL.items():
        found = getattr(hf, name, usual)
        if found not in (usual, None):
            raise ValueError(f"{name} must be {usual!r}, got {found!r}")
