"""Whether sparse latent attention is to run on this package's kernels, and what of SGLang's configuration it refuses.

Imports no SGLang, and torch only where a device has to be asked: the parent process decides here before a scheduler
exists.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from atom_patches.core import PatchError, Verdict, settings
from atom_patches.core.conditions import refusals
from atom_patches.sglang.adapters.server_args import attention_backends, model_config, resolved

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs  # pyright: ignore[reportMissingImports]

OPTION = "ATOM_SPARSE_MLA"
GROUP = "sglang.sparse_mla"

ARCHITECTURES = frozenset({"DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"})
"""Architectures whose attention is sparse where their configuration says `index_topk`."""

DEVICES = frozenset({"cpu", "cuda"})
"""Where this package's kernels for it run; SGLang calls AMD's GPUs `cuda` as well."""

NAMES = frozenset({"dsa", "nsa"})
"""What SGLang calls its sparse attention backend."""

ALGORITHMS = frozenset({"STANDALONE"})
"""Ways to draft a chain, without a draft model that has sparse attention of its own. NGRAM's are trees: each suffix
that it finds makes a branch, whatever its breadth."""


def sparse_mla_asked(config: ServerArgs) -> Verdict:
    """Whether the configuration's model has sparse attention, and this package serves it.

    Raises:
        PatchError: it is to, together with an option that is not served.
    """
    asked = settings.sparse_mla()
    if asked == "0":
        return Verdict(False, f"{OPTION} is 0")
    config = resolved(config)
    hf_config = model_config(config).hf_config
    architecture = str(hf_config.architectures[0])
    if architecture not in ARCHITECTURES or getattr(hf_config, "index_topk", None) is None:
        return Verdict(False, f"{architecture} has no sparse latent attention that is served here")
    if not NAMES & set(attention_backends(config)):
        return Verdict(False, f"the attention backend is {config.attention_backend}, not dsa")
    found = Verdict(True, f"{OPTION} is 1") if asked == "1" else without_own_kernels(config)
    if found.ok:
        _refuse(config, hf_config)
    return found


def without_own_kernels(config: ServerArgs) -> Verdict:
    """Whether SGLang's own kernels for sparse attention cannot run here."""
    device = str(config.device)
    if device in ("npu", "xpu", "musa"):
        return Verdict(False, f"SGLang has sparse attention of its own for {device}")
    if device != "cuda":
        return Verdict(True, f"SGLang has no sparse attention for {device}")
    import torch

    kernels = {config.dsa_prefill_backend, config.dsa_decode_backend}
    if torch.version.hip is not None:
        needed = ("fast_hadamard_transform", "aiter" if "aiter" in kernels else "tilelang")
    else:
        major = torch.cuda.get_device_capability()[0]
        if major not in (9, 10) and (major, kernels) != (12, {"flashinfer_sparse_mla"}):
            return Verdict(True, f"SGLang's kernels for it are not for compute capability {major}.x")
        needed = ("deep_gemm", "flashinfer" if major == 12 else "sgl_kernel")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        return Verdict(True, f"SGLang's own kernels for it need {' and '.join(missing)}, not installed here")
    return Verdict(False, f"SGLang's own kernels for it are there; {OPTION}=1 takes this package's")


def _refuse(config: ServerArgs, hf_config: Any) -> None:
    found = refusals(
        itertools.chain(_layout(config, hf_config), _speculation(config), _features(config), _model(hf_config))
    )
    if found:
        reasons = "\n".join(f"  - {reason}" for reason in found)
        raise PatchError(
            f"sparse attention on this package's kernels ({OPTION}) does not serve:\n{reasons}\n"
            f"{OPTION}=0 leaves the model to SGLang"
        )


def _layout(config: ServerArgs, hf_config: Any) -> Iterator[str]:
    if str(config.device) not in DEVICES:
        yield f"--device {config.device}: use one of {', '.join(sorted(DEVICES))}"
    for option, name in (("--attn-cp-size", "attn_cp_size"), ("--dcp-size", "dcp_size")):
        if (getattr(config, name) or 1) > 1:
            yield f"{option} {getattr(config, name)}: leave it at 1"
    if config.enable_prefill_cp:
        yield "--enable-prefill-cp: leave it out"
    if config.enable_two_batch_overlap or config.enable_single_batch_overlap:
        yield "--enable-two-batch-overlap and --enable-single-batch-overlap: leave them out"
    if config.enable_pdmux:
        yield "--enable-pdmux: leave it out"
    if config.pp_size > 1 and _shares_selections(hf_config):
        yield f"--pp-size {config.pp_size} with a checkpoint whose layers share what they select: leave it at 1"
    if config.moe_a2a_backend == "pplx":  # it makes an idle rank's step a prompt, which may be longer than a request
        yield "--moe-a2a-backend pplx: use another one"
    if set(attention_backends(config)) - NAMES:
        yield "another attention backend for prefill or for decoding: use dsa for both"


def _shares_selections(hf_config: Any) -> bool:
    every = max(getattr(hf_config, name, 1) or 1 for name in ("index_topk_freq", "cli_factor"))
    return every > 1 or "S" in (getattr(hf_config, "index_topk_pattern", None) or "")


def _speculation(config: ServerArgs) -> Iterator[str]:
    algorithm = config.speculative_algorithm
    if algorithm is None:
        return
    if algorithm not in ALGORITHMS:
        yield f"--speculative-algorithm {algorithm}: use one of {', '.join(sorted(ALGORITHMS))}"
        return
    if (config.speculative_draft_attention_backend or "dsa") in NAMES:
        yield f"--speculative-algorithm {algorithm}: name the draft's own --speculative-draft-attention-backend"
    if (config.speculative_eagle_topk or 1) > 1:
        yield f"--speculative-eagle-topk {config.speculative_eagle_topk}: trees of drafts are not verified; use 1"


def _features(config: ServerArgs) -> Iterator[str]:
    for option, name in (
        ("--enable-hisparse", "enable_hisparse"),
        ("--enable-dsa-cache-layer-split", "enable_dsa_cache_layer_split"),
        ("--enable-return-indexer-topk", "enable_return_indexer_topk"),
        ("--enable-deterministic-inference", "enable_deterministic_inference"),
        ("--enable-torch-compile", "enable_torch_compile"),
        ("--enable-lora", "enable_lora"),
    ):
        if getattr(config, name):
            yield f"{option}: leave it out"
    if config.disaggregation_mode != "null":
        yield f"--disaggregation-mode {config.disaggregation_mode}: leave it out"
    asked = config.cuda_graph_config.prefill.backend
    if ("prefill", "backend") in config._cuda_graph_config_locked and asked != "disabled":
        yield f"--cuda-graph-backend-prefill {asked}: use disabled"


def _model(hf_config: Any) -> Iterator[str]:
    for name in ("index_init_tokens", "index_local_tokens"):
        if getattr(hf_config, name, 0):
            yield f"a checkpoint with {name}: use one without"
    size = hf_config.index_head_dim
    if size & (size - 1):
        yield f"a checkpoint with index_head_dim {size}: use one with a power of two"
