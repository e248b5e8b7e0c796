"""Which checkpoints have an ATOM decoder, and the decoder's family; imports a family only to read or to make one."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atom_patches.models.config import DecoderConfig
    from atom_patches.models.decoder import Decoder
    from atom_patches.models.parts import Parts

ARCHITECTURES = {
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5",
}
"""By the name that checkpoints give: the module of this package."""


def read(family: str, hf: Any) -> DecoderConfig:
    """What a decoder of the family needs of a checkpoint's text configuration.

    Raises:
        ValueError: the decoder does not serve the checkpoint; the message says because of which setting.
    """
    return getattr(import_module(f"{__package__}.{family}"), f"{family}_config")(hf)


def refusal(family: str, hf: Any) -> str | None:
    """Why a decoder of the family does not serve a checkpoint with that text configuration; None: it does."""
    try:
        read(family, hf)
    except ValueError as error:
        return f"the checkpoint: {error}"
    except (AttributeError, LookupError, TypeError) as error:  # a setting is missing, or of another kind
        return f"the checkpoint: {type(error).__name__}: {error}"
    return None


def make(family: str, hf: Any, parts: Parts, *, prefix: str = "model") -> Decoder:
    """The family's decoder for a checkpoint's text configuration."""
    return getattr(import_module(f"{__package__}.{family}"), family)(hf, parts, prefix=prefix)
