"""The classes that SGLang builds for a checkpoint: its own shells of head and vision around an ATOM decoder."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.models import qwen3_5 as vision_language
from sglang.srt.models import qwen3_5_text as text
from torch import Tensor, nn

from atom_patches.models.weights import fused_names
from atom_patches.sglang.adapters.language_model import (
    DeepseekV3LanguageModel,
    DeepseekV32LanguageModel,
    LlamaLanguageModel,
    Qwen3_5LanguageModel,
    Qwen3LanguageModel,
    Qwen3MoeLanguageModel,
    Qwen3NextLanguageModel,
)


class _Shell:
    """What SGLang asks of a class before it makes one."""

    @staticmethod
    def shared_experts_fusion_disable_reason(hf_config: Any, quant_config: Any) -> str:
        """Why SGLang's router leaves shared experts alone."""
        return "An ATOM decoder has a shared expert beside the routed ones."


class _Text(_Shell):
    """The weights of a shell without vision. SGLang's loads no head in a stage that has one, but not the embedding."""

    packed_modules_mapping = fused_names(packed=False)
    """SGLang's quantisation looks here for what checkpoints call the parts of a layer."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        shell: Any = self
        body: Any = super()
        if not shell.config.tie_word_embeddings or shell.pp_group.world_size == 1:
            return body.load_weights(weights)
        return body.load_weights(_loading_head(dict(shell.named_parameters()), weights))


class AtomDeepseekV3ForCausalLM(_Text, text.Qwen3_5ForCausalLM):
    """DeepSeek-V3."""

    body_cls = DeepseekV3LanguageModel


class AtomDeepseekV32ForCausalLM(_Text, text.Qwen3_5ForCausalLM):
    """DeepSeek-V3.2."""

    body_cls = DeepseekV32LanguageModel


class AtomLlamaForCausalLM(_Text, text.Qwen3_5ForCausalLM):
    """Llama. SGLang's shell of Qwen3.5 is a text model's: it knows pipeline stages, tied heads and data parallelism."""

    body_cls = LlamaLanguageModel


class AtomQwen3ForCausalLM(_Text, text.Qwen3_5ForCausalLM):
    """Qwen3, dense."""

    body_cls = Qwen3LanguageModel


class AtomQwen3MoeForCausalLM(_Text, text.Qwen3_5MoeForCausalLM):
    """Qwen3 with experts."""

    body_cls = Qwen3MoeLanguageModel


class AtomQwen3_5ForCausalLM(_Text, text.Qwen3_5ForCausalLM):
    """Qwen3.5 without vision, dense."""

    body_cls = Qwen3_5LanguageModel


class AtomQwen3_5MoeForCausalLM(_Text, text.Qwen3_5MoeForCausalLM):
    """Qwen3.5 without vision, with experts."""

    body_cls = Qwen3_5LanguageModel


class AtomQwen3NextForCausalLM(_Text, text.Qwen3_5ForCausalLM):
    """Qwen3-Next; SGLang's shell of it has no pipeline stages."""

    packed_modules_mapping = fused_names(packed=True)
    body_cls = Qwen3NextLanguageModel


class _VisionLanguage(_Shell):
    """The weights of a vision-language shell: the tower's are SGLang's, the language model's the decoder's."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        rest: list[tuple[str, Tensor]] = []
        shell: Any = self
        parameters: dict[str, nn.Parameter] = dict(shell.named_parameters(remove_duplicate=False))
        loaded: set[str] = set()
        refuse_other_heads(parameters)
        for name, tensor in weights:
            refuse_headless(name)
            if name in ("lm_head.weight",) or "visual." in name:
                loaded.update(_load(parameters, _shell_name(name), tensor))
            else:
                rest.append((name, tensor))
        if shell.config.tie_word_embeddings:
            loaded.update(_tied(parameters, rest))
        return loaded | {f"model.{name}" for name in shell.model.load_weights(_without_prefix(rest))}


class AtomQwen3_5ForConditionalGeneration(_VisionLanguage, vision_language.Qwen3_5ForConditionalGeneration):
    """Qwen3.5 with vision, dense."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(
            config,  # pyright: ignore[reportCallIssue]
            quant_config,
            prefix,
            language_model_cls=Qwen3_5LanguageModel,
        )


class AtomQwen3_5MoeForConditionalGeneration(_VisionLanguage, vision_language.Qwen3_5MoeForConditionalGeneration):
    """Qwen3.5 with vision and experts."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(
            config,  # pyright: ignore[reportCallIssue]
            quant_config,
            prefix,
            language_model_cls=Qwen3_5LanguageModel,
        )


LEAVE = "leave ATOM_MODELS out, and SGLang's own model runs"

CLASSES: dict[str, type[nn.Module]] = {
    "DeepseekV3ForCausalLM": AtomDeepseekV3ForCausalLM,
    "DeepseekV32ForCausalLM": AtomDeepseekV32ForCausalLM,
    "LlamaForCausalLM": AtomLlamaForCausalLM,
    "Qwen3ForCausalLM": AtomQwen3ForCausalLM,
    "Qwen3MoeForCausalLM": AtomQwen3MoeForCausalLM,
    "Qwen3NextForCausalLM": AtomQwen3NextForCausalLM,
    "Qwen3_5ForCausalLM": AtomQwen3_5ForCausalLM,
    "Qwen3_5MoeForCausalLM": AtomQwen3_5MoeForCausalLM,
    "Qwen3_5ForConditionalGeneration": AtomQwen3_5ForConditionalGeneration,
    "Qwen3_5MoeForConditionalGeneration": AtomQwen3_5MoeForConditionalGeneration,
}


def refuse_other_heads(parameters: Iterable[str]) -> None:
    """Refuse a shell that answers with another head than the language model's.

    Raises:
        ValueError: one of its parameters, by name, is that of another.
    """
    heads = sorted(parameter for parameter in parameters if parameter.startswith("pooler."))
    if heads:
        raise ValueError(f"the checkpoint has a head that the ATOM decoder does not load ({heads[0]}): {LEAVE}")


def refuse_headless(name: str) -> None:
    """Refuse a checkpoint of a model without a head.

    Raises:
        ValueError: a tensor's name says so.
    """
    if name.startswith("language_model."):
        raise ValueError(f"the checkpoint is that of a model without a head ({name}): {LEAVE}")


def _shell_name(name: str) -> str:
    return name.replace("model.visual.", "visual.").replace("attn.qkv.", "attn.qkv_proj.")


def _load(parameters: dict[str, nn.Parameter], name: str, tensor: Tensor) -> Iterator[str]:
    """Load a parameter that this rank has."""
    parameter = parameters.get(name)
    if parameter is not None:
        getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
        yield name


def _tied(parameters: dict[str, nn.Parameter], weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    """The head of a model whose checkpoint has the embedding only, where the two are not one module."""
    for name, tensor in weights:
        if name.endswith("embed_tokens.weight"):
            yield from _load(parameters, "lm_head.weight", tensor)


def _loading_head(
    parameters: dict[str, nn.Parameter], weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """The same weights; the embedding is loaded into this stage's head, if it has one, as it goes by."""
    for name, tensor in weights:
        for _ in _tied(parameters, [(name, tensor)]):
            pass
        yield name, tensor


def _without_prefix(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        yield name.removeprefix("model.").removeprefix("language_model."), tensor
