"""What a hybrid decoder needs to know of a checkpoint's configuration, whichever library read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atom_patches.models.parts import ExpertsShape, RotaryShape

ATTENTION = "attention"
RECURRENT = "recurrent"
_KINDS = {"full_attention": ATTENTION, "attention": ATTENTION, "linear_attention": RECURRENT}
_GATES = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}


@dataclass(frozen=True)
class HybridConfig:
    """A decoder of attention layers and GatedDeltaNet layers, each followed by an MLP or by experts.

    Attributes:
        kinds: per layer, `ATTENTION` or `RECURRENT`.
        sparse: per layer, whether it has experts.
        gated: whether attention's outputs are multiplied by a gate, which stands behind each head's query.
        taps: of the convolution in GatedDeltaNet layers.
        output_gate: activation of the gate of their output norm.
        intermediate: width of an MLP without experts.
        shared_intermediate: width of the MLP beside the experts; 0: there is none.
    """

    vocabulary: int
    hidden: int
    eps: float
    kinds: tuple[str, ...]
    sparse: tuple[bool, ...]
    heads: int
    kv_heads: int
    head_size: int
    gated: bool
    rotary: RotaryShape
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: int
    output_gate: str
    intermediate: int
    experts: ExpertsShape | None
    shared_intermediate: int

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


def read_config(hf: Any, sparse: tuple[bool, ...], experts: ExpertsShape | None, rotary: RotaryShape) -> HybridConfig:
    """From a text configuration in the Hugging Face spelling; what differs between families comes from the caller.

    Raises:
        ValueError: it asks for something that these decoders do not compute.
    """
    _refuse(hf)
    return HybridConfig(
        vocabulary=hf.vocab_size,
        hidden=hf.hidden_size,
        eps=hf.rms_norm_eps,
        kinds=_layer_kinds(hf),
        sparse=sparse,
        heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        head_size=rotary.head_size,
        gated=getattr(hf, "attn_output_gate", True),
        rotary=rotary,
        key_heads=hf.linear_num_key_heads,
        value_heads=hf.linear_num_value_heads,
        key_size=hf.linear_key_head_dim,
        value_size=hf.linear_value_head_dim,
        taps=hf.linear_conv_kernel_dim,
        output_gate=_output_gate(hf),
        intermediate=getattr(hf, "intermediate_size", 0) or 0,
        experts=experts,
        shared_intermediate=(getattr(hf, "shared_expert_intermediate_size", 0) or 0) if experts else 0,
    )


def read_rotary(hf: Any) -> RotaryShape:
    """The rotary positions of a text configuration, which libraries spell in two ways.

    Raises:
        ValueError: positions in time, height and width that are not interleaved.
    """
    said: dict[str, Any] = dict(getattr(hf, "rope_scaling", None) or {})
    said |= dict(getattr(hf, "rope_parameters", None) or {})
    head_size = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    turning = said.get("partial_rotary_factor", getattr(hf, "partial_rotary_factor", 1.0))
    sections = said.get("mrope_section")
    if sections and not said.get("mrope_interleaved", False):
        raise ValueError(
            "mrope_section without mrope_interleaved: positions in time, height and width must be interleaved"
        )
    kind = said.get("rope_type", said.get("type", "default"))
    return RotaryShape(
        head_size=head_size,
        rotary_size=int(head_size * turning),
        max_position=hf.max_position_embeddings,
        theta=float(said.get("rope_theta", getattr(hf, "rope_theta", 10000.0))),
        sections=(int(sections[0]), int(sections[1]), int(sections[2])) if sections else None,
        scaling=said if kind not in ("default", "mrope") else None,
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
    """By an engine's own list, from which it makes caches, else by the checkpoint's."""
    named = getattr(hf, "layers_block_type", None) or hf.layer_types
    unknown = set(named) - set(_KINDS)
    if unknown:
        raise ValueError(f"layers must be one of {', '.join(_KINDS)}, got {', '.join(sorted(unknown))}")
    return tuple(_KINDS[name] for name in named)


def _output_gate(hf: Any) -> str:
    name = getattr(hf, "output_gate_type", None) or hf.hidden_act
    if name not in _GATES:
        raise ValueError(f"output_gate_type must be one of {', '.join(_GATES)}, got {name!r}")
    return _GATES[name]


def _refuse(hf: Any) -> None:
    if hf.hidden_act != "silu":
        raise ValueError(f"hidden_act must be 'silu', got {hf.hidden_act!r}")
    if getattr(hf, "attention_bias", False):
        raise ValueError("attention_bias must be false: these decoders have projections without bias only")
