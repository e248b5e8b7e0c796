"""When the patches of this folder are wanted: decided from an engine's configuration alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atom_patches.core import PatchError, Verdict, source
from atom_patches.vllm.attention._config import attention_asked

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def gated_delta_net(config: VllmConfig) -> Verdict:
    """The CPU platform is to run a model with GatedDeltaNet layers.

    Raises:
        PatchError: it is to run it with speculative decoding, which the CPU operations do not serve.
    """
    verdict = _has_gated_delta_net(config)
    if verdict.ok and config.speculative_config is not None:
        raise PatchError(
            f"speculative decoding (--speculative-config, method {config.speculative_config.method!r}) is not "
            f"served for GatedDeltaNet models ({config.model_config.hf_text_config.model_type}) on vLLM's CPU "
            "platform: the CPU operations keep one state per request. Start without --speculative-config."
        )
    return verdict


def upstream_runs_it(_version: str) -> Verdict:
    """vLLM brings CPU kernels for GatedDeltaNet, which its layers then call instead of the operations patched here."""
    return source.defined("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:register_cpu_gdn_attention_ops")


def upstream_copies_states(_version: str) -> Verdict:
    """vLLM copies recurrent states between blocks on the CPU by itself."""
    return source.defined("vllm.utils.cpu_triton_utils:_batch_memcpy_impl")


def upstream_knows_prompts(_version: str) -> Verdict:
    """GatedDeltaNet's metadata tells a prompt of one token from a decode."""
    return source.mentions(
        "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build", "treat_short_extends_as_decodes=False"
    )


def upstream_sets_block_size_once(_version: str) -> Verdict:
    """The CPU platform chooses the default block size where it aligns blocks, which happens once."""
    return source.mentions("vllm.platforms.cpu:CpuPlatform.update_block_size_for_backend", "user_specified_block_size")


def data_parallel_moe(config: VllmConfig) -> Verdict:
    """Data-parallel ranks exchange the rows of their experts through the CPU communicator.

    Raises:
        PatchError: they are to do so in a compiled model. Numbers of rows that differ between ranks cannot be traced.
    """
    verdict = _shares_experts(config)
    if verdict.ok and not config.model_config.enforce_eager:
        raise PatchError(
            f"compilation is on, and experts of {config.parallel_config.data_parallel_size} data-parallel ranks "
            "(--data-parallel-size) are not served with it on vLLM's CPU platform: pass --enforce-eager"
        )
    return verdict


def _shares_experts(config: VllmConfig) -> Verdict:
    platform = _on_cpu(config)
    size = config.parallel_config.data_parallel_size
    if not platform.ok:
        return platform
    if size == 1 or not config.model_config.is_moe:
        return Verdict(False, "no experts shared by data-parallel ranks: needs an MoE model and data_parallel_size > 1")
    return Verdict(True, f"MoE model on the CPU platform with data_parallel_size={size}")


def expert_parallel(config: VllmConfig) -> Verdict:
    """Each CPU rank holds only some of the experts."""
    platform = _on_cpu(config)
    if not platform.ok:
        return platform
    parallel = config.parallel_config
    ranks = parallel.data_parallel_size * parallel.prefill_context_parallel_size * parallel.tensor_parallel_size
    if not parallel.enable_expert_parallel or ranks == 1 or not config.model_config.is_moe:
        return Verdict(False, "no distributed experts: needs an MoE model, --enable-expert-parallel and several ranks")
    return Verdict(True, f"MoE model on the CPU platform with experts distributed over {ranks} ranks")


def latents(config: VllmConfig) -> Verdict:
    """The CPU platform is to attend to latents, which only this package's attention does there."""
    platform = _on_cpu(config)
    if not platform.ok:
        return platform
    if not config.model_config.use_mla:
        return Verdict(False, f"model type {config.model_config.hf_text_config.model_type} has no attention to latents")
    asked = attention_asked(config)
    if not asked.ok:
        return Verdict(False, asked.reason)
    return Verdict(True, f"model type {config.model_config.hf_text_config.model_type} attends to latents on the CPU")


def served(config: VllmConfig) -> Verdict:
    """The CPU platform runs something that it runs only because of this package."""
    verdicts = [
        condition(config)
        for condition in (_has_gated_delta_net, _shares_experts, expert_parallel, _context_parallel, latents)
    ]
    wanted = [verdict for verdict in verdicts if verdict.ok]
    return wanted[0] if wanted else Verdict(False, "; ".join(dict.fromkeys(verdict.reason for verdict in verdicts)))


def _has_gated_delta_net(config: VllmConfig) -> Verdict:
    platform = _on_cpu(config)
    if not platform.ok:
        return platform
    text = config.model_config.hf_text_config
    if not config.model_config.is_hybrid or not hasattr(text, "linear_num_value_heads"):
        return Verdict(False, f"model type {text.model_type} has no GatedDeltaNet layers")
    return Verdict(True, f"model type {text.model_type} has GatedDeltaNet layers and the platform is CPU")


def _context_parallel(config: VllmConfig) -> Verdict:
    platform = _on_cpu(config)
    size = config.parallel_config.prefill_context_parallel_size
    if not platform.ok or size == 1:
        return Verdict(False, "prefill_context_parallel_size is 1" if platform.ok else platform.reason)
    return Verdict(True, f"prefill_context_parallel_size={size} on the CPU platform")


def _on_cpu(config: VllmConfig) -> Verdict:
    device = config.device_config.device_type
    if device != "cpu":
        return Verdict(False, f"the platform is {device}, not CPU")
    if config.model_config is None:
        return Verdict(False, "the configuration names no model")
    return Verdict(True, "the platform is CPU")
