"""An ATOM decoder as SGLang calls the body of a language model: what stands between its inputs and its head."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from atom_patches.models import families
from atom_patches.models.decoder import Carried
from atom_patches.models.loading import load_weights
from atom_patches.runtime.idle import Fallback, ModelInputs
from atom_patches.sglang.adapters.forward_step import StepInputs, forward_step
from atom_patches.sglang.adapters.parts import SglangParts

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

Body = Tensor | tuple[Tensor, list[Tensor]] | PPProxyTensors
"""Hidden states; with captured ones besides; or, on a pipeline stage before the last, what the next one takes."""


class AtomLanguageModel(nn.Module):
    """The body, from token ids or embeddings to normed hidden states.

    What SGLang reads of it: `embed_tokens`, `layers`, `norm`, `start_layer`, `end_layer`, `pp_group`,
    `layers_to_capture`.
    """

    family: ClassVar[str]

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        self.pp_group = get_parallel().pp_group
        parts = SglangParts(quant_config)
        with parts.layers():
            self.decoder = families.make(self.family, config, parts, prefix=prefix)
        self.layers_to_capture: list[int] = []
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        self._position_axes = 3 if "mrope_section" in rope else 1

    @property
    def embed_tokens(self) -> nn.Module:
        return self.decoder.embed_tokens

    @property
    def layers(self) -> nn.Module:
        return self.decoder.layers

    @property
    def norm(self) -> nn.Module:
        return self.decoder.norm

    @property
    def start_layer(self) -> int:
        return self.decoder.stage.start

    @property
    def end_layer(self) -> int:
        return self.decoder.stage.end

    def get_input_embeddings(self) -> nn.Module | None:
        """None but in the first pipeline stage: vision-language wrappers ask in every stage, and use it in that one."""
        return getattr(self.decoder, "embed_tokens", None)

    def set_dflash_layers_to_capture(self, layers: list[int]) -> None:
        self.layers_to_capture = layers

    def set_eagle3_layers_to_capture(self, layers: list[int]) -> None:
        self.layers_to_capture = layers

    def prepare_before_cuda_graph_capture(self, model_runner: object) -> None:
        """Nothing: what a decoder's kernels need, they get in the passes before a capture."""

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor | None,
        forward_batch: ForwardBatch,
        input_embeds: Tensor | None = None,
        pp_proxy_tensors: PPProxyTensors | None = None,
        input_deepstack_embeds: Tensor | None = None,
    ) -> Body:
        carried = None
        if not self.pp_group.is_first_rank:
            assert pp_proxy_tensors is not None
            carried = Carried(pp_proxy_tensors["hidden_states"], pp_proxy_tensors.tensors.get("residual"))
        output = forward_step(
            self.decoder,
            forward_batch,
            StepInputs(ModelInputs(input_ids, positions, input_embeds), carried, input_deepstack_embeds),
            fallback=self._fallback(),
            capture=frozenset(self.layers_to_capture),
        )
        if not self.pp_group.is_last_rank:
            # What was added already is not sent: it is no tensor.
            rest = {} if output.residual is None else {"residual": output.residual}
            return PPProxyTensors({"hidden_states": output.hidden, **rest})
        return (output.hidden, list(output.captured)) if output.captured else output.hidden

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a checkpoint's weights, named as there but for a leading `model.`; return the parameters filled."""
        return {f"decoder.{name}" for name in load_weights(self.decoder, weights)}

    def _fallback(self) -> Fallback:
        return Fallback(next(self.parameters()).device, self._position_axes)


class DeepseekV3LanguageModel(AtomLanguageModel):
    """Of DeepSeek-V3."""

    family = "deepseek_v3"


class DeepseekV32LanguageModel(AtomLanguageModel):
    """Of DeepSeek-V3.2."""

    family = "deepseek_v32"


class LlamaLanguageModel(AtomLanguageModel):
    """Of Llama."""

    family = "llama"


class Qwen3LanguageModel(AtomLanguageModel):
    """Of Qwen3, dense."""

    family = "qwen3"


class Qwen3MoeLanguageModel(AtomLanguageModel):
    """Of Qwen3 with experts."""

    family = "qwen3_moe"


class Qwen3_5LanguageModel(AtomLanguageModel):
    """Of Qwen3.5: dense, with experts, or that of a vision-language model."""

    family = "qwen3_5"


class Qwen3NextLanguageModel(AtomLanguageModel):
    """Of Qwen3-Next."""

    family = "qwen3_next"
