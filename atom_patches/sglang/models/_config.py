"""What the ATOM decoders read from SGLang's configuration, and what of it they leave to SGLang's own models.

Imports no SGLang, and a family's file only to read a checkpoint: the parent process decides here, before there is a
scheduler.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from atom_patches.core import Verdict
from atom_patches.models import families, quantised
from atom_patches.models.choice import decoder_asked
from atom_patches.models.quantised import Served
from atom_patches.sglang.adapters.server_args import (
    attention_backends,
    attention_ranks,
    is_record,
    model_config,
    resolved,
)
from atom_patches.sglang.sparse_mla._config import sparse_mla_asked

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs  # pyright: ignore[reportMissingImports]

GROUP = "sglang.models"

SUPPORTS = "sglang>=0.5.17,<0.5.24,!=0.5.18,!=0.5.19,!=0.5.20,!=0.5.21,!=0.5.22"
"""The releases that the group was reviewed for."""

HYBRIDS = frozenset({"qwen3_5", "qwen3_next"})
"""Families with recurrent layers, whose drafts are verified."""

LATENT_BACKENDS = frozenset({"fa3", "torch_native", "triton"})
"""Attention backends of SGLang that take a prefill's queries in the space of the latents."""

PUBLISHED = frozenset({"auto", "pt", "safetensors", "fastsafetensors", "npcache", "runai_streamer", "dummy"})
"""Formats whose weights come under the published names; others have those of SGLang's own model, or lay out anew."""

LATER = (
    "enable_layernorm_sp",
    "enable_paged_experts",
    "enable_dense_mlp_attn_tp",
    "enable_shared_experts_attn_tp",
    "enable_nvidia_megakernel",
    "enable_amd_monokernel",
    "enable_return_aux_hidden_states",
    "language_model_only",
    "uno_lora_path",
)
"""Options of later releases than 0.5.17 that are about SGLang's own decoders, or were not tried with these."""

QUANTISED = {quantised.FP8_BLOCKS: Served(frozenset({"fp8"}))}
"""Formats of weights that SGLang's layers run for an ATOM decoder."""

EXCHANGES = frozenset({"none", "mori", "deepep"})
"""All-to-all backends whose dispatch and combine belong to the experts that SGLang builds."""


def atom_models_asked(config: ServerArgs) -> Verdict:
    """Whether the configuration's model runs on an ATOM decoder.

    Raises:
        PatchError: --model-impl atom, and it cannot.
    """
    return decoder_asked(
        "SGLang", str(config.model_impl).lower(), partial(_architecture, config), partial(unserved, config)
    )


def _architecture(config: ServerArgs) -> str:
    return str(model_config(config).hf_config.architectures[0])


def unserved(config: ServerArgs, family: str) -> Iterator[str]:
    """A few words for each setting that the ATOM decoder does not serve: what was found, and what to do."""
    config = resolved(config)
    reason = families.refusal(family, model_config(config).hf_text_config) or _quantisation(config, family)
    if reason is not None:
        yield reason
    yield from _layout(config)
    yield from _formats(config)
    yield from _states(config)
    yield from _latents(config, family)
    yield from _drafts(config, family)
    yield from _graphs(config)
    yield from _later(config, family)


def _quantisation(config: ServerArgs, family: str) -> str | None:
    model = model_config(config)
    # The checkpoint's own, too, wherever it declares that; SGLang has looked for it.
    method = config.quantization or model.quantization
    if not method:
        return None
    return quantised.refusal(str(method), model.hf_config, families.read(family, model.hf_text_config), QUANTISED)


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
    if config.init_expert_location != "trivial" or config.ep_dispatch_algorithm is not None:
        yield "experts in another order (--init-expert-location, --ep-dispatch-algorithm): leave these out"
    if config.cpu_offload_gb > 0 or config.offload_group_size > 0:
        yield "weights that are moved away (--cpu-offload-gb, --offload-group-size): leave these out"
    yield from _exchange(config)


def _exchange(config: ServerArgs) -> Iterator[str]:
    backend = str(config.moe_a2a_backend)
    if backend not in EXCHANGES:
        yield f"--moe-a2a-backend {backend}: use one of {', '.join(sorted(EXCHANGES))}"
    elif backend == "mori" and importlib.util.find_spec("mori") is None:
        yield "--moe-a2a-backend mori without the package mori: install it, or leave the option out"
    if backend != "none" and (ranks := attention_ranks(config)) < config.tp_size:
        yield (
            f"--dp-size {ranks} below --tp-size {config.tp_size} with --moe-a2a-backend {backend}: an idle "
            "rank's one row cannot be dealt out over several ranks; make the two sizes equal"
        )


def _formats(config: ServerArgs) -> Iterator[str]:
    if str(config.load_format) not in PUBLISHED:
        yield f"--load-format {config.load_format}: use one of {', '.join(sorted(PUBLISHED))}"
    if config.enable_deterministic_inference:
        yield "--enable-deterministic-inference: leave it out"
    torchao = getattr(config, "torchao_config", None)  # an option of older releases
    if torchao:
        yield f"--torchao-config {torchao}: leave it out"
    if config.enable_lora:
        yield "--enable-lora: leave it out"
    if config.is_embedding:
        yield "--is-embedding: leave it out"
    if config.rl_on_policy_target is not None:
        yield f"--rl-on-policy-target {config.rl_on_policy_target}: leave it out"
    if config.encoder_only or config.language_only:
        yield "--encoder-only and --language-only: leave them out"


def _states(config: ServerArgs) -> Iterator[str]:
    if config.enable_linear_replayssm or config.enable_linear_replayssm_spec:
        yield "--enable-linear-replayssm and --enable-linear-replayssm-spec: leave them out"
    if config.enable_unified_memory or config.enable_page_major_kv_layout:
        yield "--enable-unified-memory and --enable-page-major-kv-layout: leave them out"


def _latents(config: ServerArgs, family: str) -> Iterator[str]:
    """What DeepSeek's attention needs of a backend: that prefills, too, come in the space of the latents."""
    if family not in ("deepseek_v3", "deepseek_v32"):
        return
    if family == "deepseek_v32":
        asked = sparse_mla_asked(config)
        if not asked.ok:
            yield f"sparse attention on SGLang's own kernels ({asked.reason})"
        return
    named = set(attention_backends(config))
    if named - LATENT_BACKENDS:
        yield (
            f"--attention-backend {', '.join(sorted(map(str, named - LATENT_BACKENDS)))}: "
            f"use one of {', '.join(sorted(LATENT_BACKENDS))}"
        )


def _drafts(config: ServerArgs, family: str) -> Iterator[str]:
    algorithm = config.speculative_algorithm
    if algorithm is None:
        return
    if family not in HYBRIDS or algorithm == "STANDALONE":  # whose draft may be of a family that has a decoder here
        yield f"--speculative-algorithm {algorithm}: leave it out"
    elif (config.speculative_eagle_topk or 1) > 1:
        yield (
            f"--speculative-algorithm {algorithm} with --speculative-eagle-topk {config.speculative_eagle_topk}: trees "
            "of drafts are not verified; use 1"
        )


def _graphs(config: ServerArgs) -> Iterator[str]:
    prefill = config.cuda_graph_config.prefill.backend
    if ("prefill", "backend") in config._cuda_graph_config_locked and prefill != "disabled":
        yield f"--cuda-graph-backend-prefill {prefill}: leave it out"
    if config.enable_torch_compile:
        yield "--enable-torch-compile: leave it out"


def _later(config: ServerArgs, family: str) -> Iterator[str]:
    for name in LATER:
        if getattr(config, name, None):
            yield f"--{name.replace('_', '-')}: leave it out"
    if getattr(config, "startup_weight_load_mode", "serial") != "serial":
        yield f"--startup-weight-load-mode {config.startup_weight_load_mode}: use serial"
    if is_record(config) and config.speculative_algorithm is not None:
        yield f"--speculative-algorithm {config.speculative_algorithm}: leave it out, no draft ran on this release"
    if family in HYBRIDS and getattr(config, "enable_mis", False):
        yield "--enable-mis: leave it out, recurrent states would pass from item to item"
