"""The classes that vLLM builds for a checkpoint: its own shells of vision, and its interfaces, around an ATOM decoder.

The class for an architecture is called Atom and the architecture's name.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFuncCalculator
from vllm.model_executor.models import qwen3_5 as vision_language
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.model_executor.models.qwen3_vl import Qwen3_VisionTransformer
from vllm.model_executor.models.utils import maybe_prefix

from atom_patches.models.weights import fused_names
from atom_patches.vllm.adapters.models.language_model import AtomForCausalLM
from atom_patches.vllm.adapters.models.recurrence import Shapes, state_dtypes, state_shapes

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class AtomDeepseekV3ForCausalLM(AtomForCausalLM):
    """DeepSeek-V3."""

    family = "deepseek_v3"


class AtomDeepseekV32ForCausalLM(AtomForCausalLM):
    """DeepSeek-V3.2."""

    family = "deepseek_v32"


class AtomLlamaForCausalLM(AtomForCausalLM):
    """Llama."""

    family = "llama"


class AtomQwen3ForCausalLM(AtomForCausalLM):
    """Qwen3, dense."""

    family = "qwen3"


class AtomQwen3MoeForCausalLM(AtomForCausalLM):
    """Qwen3 with experts."""

    family = "qwen3_moe"


class AtomHybridForCausalLM(AtomForCausalLM, HasInnerState, IsHybrid):
    """What vLLM asks the class of a model with recurrent layers."""

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> Shapes:
        return state_shapes(vllm_config)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return state_dtypes(vllm_config)

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        return MambaStateCopyFuncCalculator.gated_delta_net_state_copy_func()


class AtomQwen3NextForCausalLM(AtomHybridForCausalLM):
    """Qwen3-Next."""

    family = "qwen3_next"
    packed_modules_mapping = fused_names(packed=True)


class AtomQwen3_5LanguageModel(AtomHybridForCausalLM):
    """Of Qwen3.5, dense or with experts."""

    family = "qwen3_5"


class AtomQwen3_5ForConditionalGeneration(vision_language.Qwen3_5ForConditionalGeneration):
    """Qwen3.5 with vision, dense or with experts."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "model") -> None:
        nn.Module.__init__(self)
        model: Any = vllm_config.model_config
        self.config = model.hf_config
        self.multimodal_config = model.multimodal_config
        self.use_data_parallel = model.multimodal_config.mm_encoder_tp_mode == "data"
        self.is_multimodal_pruning_enabled = False
        with self._mark_tower_model(vllm_config, {"image", "video"}):
            self.visual = Qwen3_VisionTransformer(
                self.config.vision_config,
                norm_eps=getattr(self.config, "rms_norm_eps", 1e-6),
                quant_config=vllm_config.quant_config,
                prefix=maybe_prefix(prefix, "visual"),
            )
        with self._mark_language_model(vllm_config):
            self.language_model = AtomQwen3_5LanguageModel(
                vllm_config=vllm_config, prefix=maybe_prefix(prefix, "language_model")
            )
        self.make_empty_intermediate_tensors = self.language_model.make_empty_intermediate_tensors


class AtomQwen3_5MoeForConditionalGeneration(AtomQwen3_5ForConditionalGeneration):
    """The same decoder, under the other name that checkpoints have."""
