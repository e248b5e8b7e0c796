"""What the ATOM decoders read from, and refuse in, SGLang's configuration.

Imports neither torch nor SGLang: the parent process decides here before a scheduler exists.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from atom_patches.core import PatchError, Verdict, settings

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs  # pyright: ignore[reportMissingImports]

OPTION = "ATOM_MODELS"

FAMILIES = {
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5",
}
"""Architectures, as checkpoints name them, that an ATOM decoder serves, and the decoder's family."""

EXCHANGES = frozenset({"none", "mori", "deepep"})
"""All-to-all backends whose dispatch and combine belong to the experts that SGLang builds."""


def atom_models_asked(config: ServerArgs) -> Verdict:
    """Whether the configuration's model runs on an ATOM decoder.

    Raises:
        PatchError: it is to, together with an option that is not served.
    """
    families = settings.model_families()
    if not families:
        return Verdict(False, f"{OPTION} is 0")
    architecture = str(config.get_model_config().hf_config.architectures[0])
    family = FAMILIES.get(architecture)
    if family is None:
        return Verdict(False, f"{architecture} has no ATOM decoder")
    if family not in families:
        return Verdict(False, f"{OPTION} does not name {family}")
    found = list(unserved(config))
    if found:
        reasons = "\n".join(f"  - {reason}" for reason in found)
        raise PatchError(f"{OPTION} asks for the ATOM decoder of {architecture}, which does not serve:\n{reasons}")
    return Verdict(True, f"{OPTION} names {family}, the family of {architecture}")


def unserved(config: ServerArgs) -> Iterator[str]:
    """One sentence for each option that the ATOM decoders do not serve: what was found, and what to do."""
    yield from _layout(config)
    yield from _formats(config)
    yield from _states(config)
    yield from _graphs(config)


def _layout(config: ServerArgs) -> Iterator[str]:
    for option, name in (
        ("--attn-cp-size", "attn_cp_size"),
        ("--dcp-size", "dcp_size"),
        ("--moe-dp-size", "moe_dp_size"),
        ("--dwdp-size", "dwdp_size"),
    ):
        size = getattr(config, name)
        if (size or 1) > 1:
            yield f"{option} {size}: leave it at 1"
    if config.moe_dense_tp_size is not None:
        yield f"--moe-dense-tp-size {config.moe_dense_tp_size}: leave it out"
    if config.enable_two_batch_overlap or config.enable_single_batch_overlap:
        yield "--enable-two-batch-overlap and --enable-single-batch-overlap: leave them out"
    if config.enable_pdmux:
        yield "--enable-pdmux: leave it out"
    if config.elastic_ep_backend is not None or config.enable_eplb or config.ep_num_redundant_experts:
        yield "experts that move (--elastic-ep-backend, --enable-eplb, --ep-num-redundant-experts): leave these out"
    yield from _exchange(config)


def _exchange(config: ServerArgs) -> Iterator[str]:
    backend = str(config.moe_a2a_backend)
    if backend not in EXCHANGES:
        yield f"--moe-a2a-backend {backend}: use one of {', '.join(sorted(EXCHANGES))}"
    elif backend == "mori" and importlib.util.find_spec("mori") is None:
        yield "--moe-a2a-backend mori without the package mori: install it, or leave the option out"
    if backend != "none" and config.dp_size < config.tp_size:
        yield (
            f"--dp-size {config.dp_size} below --tp-size {config.tp_size} with --moe-a2a-backend {backend}: an idle "
            "rank's one row cannot be dealt out over several ranks; make the two sizes equal"
        )


def _formats(config: ServerArgs) -> Iterator[str]:
    model = config.get_model_config()
    found = config.quantization or _declared_quantisation(model.hf_config)
    if found:
        yield f"quantised weights ({found}): use an unquantised checkpoint"
    if config.torchao_config:
        yield f"--torchao-config {config.torchao_config}: leave it out"
    if config.enable_lora:
        yield "--enable-lora: leave it out"
    if config.encoder_only or config.language_only:
        yield "--encoder-only and --language-only: leave them out"


def _declared_quantisation(hf_config: Any) -> str:
    declared = getattr(hf_config, "quantization_config", None) or {}
    return str(declared.get("quant_method", "")) if isinstance(declared, dict) else "quantization_config"


def _states(config: ServerArgs) -> Iterator[str]:
    if config.enable_linear_replayssm or config.enable_linear_replayssm_spec:
        yield "--enable-linear-replayssm and --enable-linear-replayssm-spec: leave them out"
    if config.enable_unified_memory or config.enable_page_major_kv_layout:
        yield "--enable-unified-memory and --enable-page-major-kv-layout: leave them out"
    if config.speculative_algorithm is not None and (config.speculative_eagle_topk or 1) > 1:
        yield f"--speculative-eagle-topk {config.speculative_eagle_topk}: trees of drafts are not verified; use 1"


def _graphs(config: ServerArgs) -> Iterator[str]:
    prefill = config.cuda_graph_config.prefill.backend
    if str(config.device) == "cuda" and prefill != "disabled":
        yield f"CUDA graphs of prefills ({prefill}): use --cuda-graph-backend-prefill disabled"
    if config.enable_torch_compile:
        yield "--enable-torch-compile: leave it out"
