"""The classes that SGLang builds for a checkpoint: its own shells of head and vision around an ATOM decoder."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.models import qwen3_5 as vision_language
from sglang.srt.models import qwen3_5_text as text
from torch import Tensor, nn

from atom_patches.sglang.adapters.language_model import Qwen3_5LanguageModel, Qwen3NextLanguageModel


class AtomQwen3_5ForCausalLM(text.Qwen3_5ForCausalLM):
    """Qwen3.5 without vision, dense."""

    body_cls = Qwen3_5LanguageModel


class AtomQwen3_5MoeForCausalLM(text.Qwen3_5MoeForCausalLM):
    """Qwen3.5 without vision, with experts."""

    body_cls = Qwen3_5LanguageModel


class AtomQwen3NextForCausalLM(text.Qwen3_5ForCausalLM):
    """Qwen3-Next; SGLang's shell of it has no pipeline stages, that of Qwen3.5 does the same besides."""

    body_cls = Qwen3NextLanguageModel


class _VisionLanguage:
    """The weights of a vision-language shell: the tower's are SGLang's, the language model's the decoder's."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        rest: list[tuple[str, Tensor]] = []
        shell: Any = self
        parameters: dict[str, nn.Parameter] = dict(shell.named_parameters(remove_duplicate=False))
        loaded: set[str] = set()
        for name, tensor in weights:
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


CLASSES: dict[str, type[nn.Module]] = {
    "Qwen3NextForCausalLM": AtomQwen3NextForCausalLM,
    "Qwen3_5ForCausalLM": AtomQwen3_5ForCausalLM,
    "Qwen3_5MoeForCausalLM": AtomQwen3_5MoeForCausalLM,
    "Qwen3_5ForConditionalGeneration": AtomQwen3_5ForConditionalGeneration,
    "Qwen3_5MoeForConditionalGeneration": AtomQwen3_5MoeForConditionalGeneration,
}


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


def _without_prefix(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        yield name.removeprefix("model.").removeprefix("language_model."), tensor
