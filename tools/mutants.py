"""Break one guarded place at a time in a copy of the checkout; some test must fail.

    python tools/mutants.py [WORD ...] [--list]

A mutant removes one patch (its file: the overlay then does not know the member) or changes one line of the code behind
it. For each, the tests that guard the place run until the first failure. One line a mutant names the test that failed;
a mutant that survives, or that no longer fits the code, fails the run. So does a test that fails without any mutant:
all of them run in such a copy first. With WORDs, only mutants that contain one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import build_env
import cli_mutants
import dp_mutants
import kernel_mutants
import lanes
import manager_mutants
import model_mutants
import sparse_mutants

ROOT = Path(__file__).resolve().parent.parent
SGLANG = "sglang-0.5.17"
COPIED = (
    "atom_patches", "atom_patches_boot.py", "benchmarks", "docs", "envs", "tests", "tools", ".github", "Makefile",
    "README.md", "pyproject.toml", "setup.py"
)  # fmt: skip
PCP = "tests/vllm/test_pcp.py"
HYBRID = (f"{PCP}::test_two_ranks[qwen3_next]",)
CACHING = (f"{PCP}::test_two_ranks[qwen3_next caching]",)
CHUNKED = (f"{PCP}::test_two_ranks[qwen3_5]",)
CROWDED = (f"{PCP}::test_two_ranks[qwen3_next crowded]",)
DENSE = (f"{PCP}::test_two_ranks[qwen3]",)
GRAPHS = ("tests/vllm/test_pcp_graphs.py",)
PADDING = ("tests/vllm/test_pcp_graph_padding.py",)
ROUTED = (f"{PCP}::test_ranks_agree_on_experts",)
ROUTING = ("tests/vllm/test_pcp_routing.py",)
BROADCAST = ("tests/vllm/test_pcp_broadcast.py",)
HOST_WAITS = ("tests/vllm/test_pcp_host_waits.py",)
LINKS = ("tests/vllm/test_pcp_links.py",)
LAUNCHES = ("tests/vllm/test_pcp_launches.py",)
BENCH = ("tests/unit/test_bench_pcp.py",)
CONFIGS = ("tests/vllm/test_pcp_refusals.py",)
PLAN = ("tests/unit/test_pcp_plan.py",)
CUTS = ("tests/unit/test_pcp_plan.py", "tests/unit/test_pcp_attention_split.py")
QUERIES = ("tests/vllm/test_pcp_queries.py",)
ZIGZAG = (f"{PCP}::test_a_backend_that_writes_its_cache_apart[qwen3_next paged]",)
REPLICATED = (f"{PCP}::test_replicated_experts_on_two_ranks",)
METRICS = ("tests/vllm/test_pcp_metrics.py::test_the_server_shows_them",)
FIGURES = ("tests/unit/test_pcp_figures.py",)
EXPERTS = ("tests/unit/test_pcp_experts.py",)
IN_PLACE = (f"{PCP}::test_every_member_is_in_place",)
GDN_PLAN = ("tests/unit/test_pcp_gdn.py",)
GDN_COST = ("tests/unit/test_pcp_gdn_cost.py",)
TWO_PASS = (f"{PCP}::test_two_ranks[qwen3_next two_pass]",)
TWO_PASS_CHUNKED = (f"{PCP}::test_two_ranks[qwen3_next chunked two_pass]",)
GDN_MODES_TESTS = ("tests/vllm/test_pcp_gdn_modes.py::test_the_packages_scan_ran",)
GDN_RANKS = ("tests/vllm/test_pcp_gdn_ranks.py",)
FINAL_STATES = ("tests/vllm/test_pcp_final_states.py",)
RELEASES = ("tests/unit/test_conditions.py",)
HEADS = (f"{PCP}::test_two_ranks[qwen3_next_heads all_to_all]",)


@dataclass(frozen=True)
class Mutant:
    """One change and the tests that must notice it.

    Attributes:
        path: the changed file, relative to the checkout.
        tests: pytest's arguments that select the tests that guard the place.
        old, new: the text to replace, once, and its replacement; None: the file is removed.
    """

    path: str
    tests: tuple[str, ...]
    old: str | None = None
    new: str | None = None

    @property
    def name(self) -> str:
        if self.old is None:
            return f"without {self.path}"
        return f"{self.path}: {_short(self.old)} -> {_short(self.new or 'nothing')}"


def _short(text: str) -> str:
    return " ".join(text.split())[:60]


def _removed(folder: str, tests: dict[str, tuple[str, ...]]) -> list[Mutant]:
    return [Mutant(f"atom_patches/vllm/{folder}/{name}.py", guards) for name, guards in tests.items()]


MEMBERS = _removed(
    "pcp",
    {
        "attention_metadata": (f"{PCP}::test_rows_shrink_on_two_ranks[qwen3_next]",),
        "attention_support": DENSE,
        "block_sizes": CONFIGS,
        "block_table": DENSE,
        "capture_split": GRAPHS,
        "cpu_attention": DENSE,
        "deepstack": ("tests/vllm/test_pcp_prompts.py::test_two_ranks[qwen3_vl pictures]",),
        "flash_attention": ("tests/vllm/test_pcp_backends.py",),
        "flash_attention_queries": ("tests/vllm/test_pcp_backends.py",),
        "gated_delta_net": HYBRID,
        "kv_cache_manager": CACHING,
        "memory_usage": CONFIGS,
        "model_forward": DENSE,
        "moe_combine": HYBRID,
        "moe_dispatch": HYBRID,
        "moe_parallel": REPLICATED,
        "ranks_agree": IN_PLACE,  # without it the ranks wait for each other until a launch gives up
        "metrics_scheduler": METRICS,
        "metrics_logger": METRICS,
        "profile_run": (f"{PCP}::test_memory_is_profiled_with_the_rows_of_the_worst_step",),
        "sampled_ids": (f"{PCP}::test_ranks_agree_on_sampled_ids",),
        "total_cp_world_size": DENSE,
        "triton_attention": ("tests/vllm/test_pcp_backends.py",),
        "triton_attention_queries": ("tests/vllm/test_pcp_backends.py",),
    },
)

IDLE = _removed("dp_idle", {"post_step": ("tests/vllm/test_dp_idle.py",)})

GDN = "tests/vllm/test_gdn_cpu.py"
LATENTS = "tests/vllm/test_attention.py::test_every_answer_to_latents_is_the_oracle_s"
PROCESSES = ("tests/vllm/test_processes.py", "-k", "VLLM_PLUGINS")
MEMBERS += _removed(
    "cpu",
    {
        **dict.fromkeys(
            (
                "causal_conv1d_fn",
                "causal_conv1d_update",
                "chunk_gated_delta_rule",
                "cleanup_profiling_kv_cache",
                "dispatch_cpu_unquantized_gemm",
                "fused_post_conv_prep",
                "fused_recurrent_packed_decode",
                "prepare_chunk_indices",
                "prepare_chunk_offsets",
                "update_block_size_for_backend",
            ),
            (f"{GDN}::test_chunked_prefill[qwen3_next]",),
        ),
        "all_gatherv": (f"{GDN}::test_data_parallel[qwen3_next]",),
        "check_and_update_config": CONFIGS,
        "split_decodes_and_prefills": (f"{PCP}::test_unsplit_engine_equals_the_oracle[qwen3_next crowded]",),
        "batch_memcpy": (f"{GDN}::test_prefix_caching[qwen3_next]",),
        "expert_map": (f"{GDN}::test_tensor_parallel[qwen3_5_moe]",),
        "expert_map_sgl": (f"{GDN}::test_what_is_applied_in_one_process",),
        "fused_sigmoid_gating_update": (f"{GDN}::test_decode_from_separate_projections",),
        "mla_process_weights": (f"{LATENTS}[latents]",),
        "rotary_embedding": (f"{LATENTS}[latents and plain positions]",),
        "reduce_scatterv": (f"{GDN}::test_data_parallel[qwen3_next]",),
    },
)
MEMBERS += _removed(
    "bootstrap",
    {
        "engine_args": CONFIGS,
        "engine_core": PROCESSES,
        "engine_core_shutdown": (
            "tests/vllm/test_pcp_workers.py::test_an_engine_without_pcp_in_the_same_process_is_stock",
        ),
        "worker": PROCESSES,
    },
)

CORE = [
    Mutant(
        "atom_patches/core/applying.py",
        ("tests/unit/test_registry.py",),
        "                self.take_back(group.members)\n                return Problem",
        "                return Problem",
    ),
    Mutant("atom_patches/core/stale.py", ("tests/unit/test_registry.py",), "names[name] = change.new", "pass"),
    Mutant("atom_patches/core/gates.py", ("tests/unit/test_registry.py",), "    if not faults:", "    if True:"),
    Mutant("atom_patches/core/registry.py", ("tests/unit/test_registry.py",), "overlay.release(config)", "pass"),
    Mutant(
        "atom_patches/core/reviewed.py",
        ("tests/unit/test_reviewed.py",),
        "(patch is None or all(str(one) in content for one in _recorded(patch, content)))",
        "True",
    ),
    Mutant(
        "atom_patches/core/reviewed.py",
        ("tests/unit/test_reviewed.py",),
        "next((one for one in sets if all(map(has, one))), sets[0] if sets else [])",
        "sets[0] if sets else []",
    ),
    Mutant(
        "tools/matrix.py",
        ("tests/unit/test_matrix.py",),
        "    targets = reviewed.assumed(patch, lambda target: found[str(target)] is not None)\n",
        "",
    ),
    Mutant(
        "atom_patches/core/overlay.py",
        RELEASES,
        "if finding.state is State.UPSTREAMED:\n            return",
        "if False:\n            return",
    ),
    Mutant("atom_patches/core/overlay.py", RELEASES, "if finding.state is State.UNSUPPORTED:", "if False:"),
    Mutant("atom_patches/core/telling.py", RELEASES, "if not misfits:", "if True:"),
    Mutant("atom_patches/core/demand.py", RELEASES, "    except TypeError:", "    except KeyError:"),
    Mutant(
        "atom_patches/core/conditions.py",
        RELEASES,
        "except (AttributeError, LookupError, TypeError)",
        "except KeyError",
    ),
    Mutant("atom_patches/core/source.py", RELEASES, "words in ast.unparse(one.node)", "bool(words)"),
    Mutant(
        "atom_patches/core/overlay.py",
        ("tests/unit/test_registry.py",),
        "self._failed_late[group] = error",
        "pass",
    ),
    Mutant(
        "atom_patches/core/source.py",
        ("tests/unit/test_source.py",),
        "find_spec(part, list",
        "find_spec(found, list",
    ),
]

GDN_MODES = "atom_patches/vllm/adapters/pcp_gdn"
STEP = "atom_patches/vllm/adapters/pcp_step.py"
TRANSITIONS = [
    Mutant(
        f"{GDN_MODES}/relay.py", HYBRID, "    call.states.unpack(call.metadata.slots[request : request + 1], packed)\n"
    ),
    Mutant(f"{GDN_MODES}/final_states.py", GDN_RANKS, "one.unpack(at, part.view(size))", "pass"),
    Mutant(f"{GDN_MODES}/final_states.py", GDN_RANKS, "len(layers) == len(call.step.recurrent)", "len(layers) == 1"),
    Mutant(f"{GDN_MODES}/final_states.py", FINAL_STATES, "many // len(finished)", "many"),
    Mutant(f"{GDN_MODES}/final_states.py", FINAL_STATES, "requests in finished.split(many)", "requests in [finished]"),
    Mutant(f"{GDN_MODES}/core_call.py", CROWDED, "        self.states.clear(self.metadata.fresh)\n"),
    Mutant(f"{GDN_MODES}/relay.py", GDN_RANKS, "slots[request : request + 1], packed", "slots[-1:], packed"),
    Mutant(f"{GDN_MODES}/two_pass.py", TWO_PASS, "halo, entering[None])", "halo, 0 * entering[None])"),
    Mutant(f"{GDN_MODES}/two_pass.py", TWO_PASS, "    share_final_states(call)\n"),
    Mutant(f"{GDN_MODES}/two_pass.py", GDN_RANKS, "halo, entering[None])", "0 * halo, entering[None])"),
    Mutant(f"{GDN_MODES}/two_pass.py", GDN_RANKS, "earlier.to(table.dtype)", "0 * earlier.to(table.dtype)"),
    Mutant(f"{GDN_MODES}/two_pass.py", GDN_RANKS, "[0].float() @ mapped[0]", "[0].float() @ mapped[0] * 0"),
    Mutant(f"{GDN_MODES}/two_pass.py", GDN_RANKS, "own.stop - segment.rows", "own.start"),
    Mutant(f"{GDN_MODES}/two_pass.py", GDN_RANKS, ".to(halo.dtype) if", ".to(halo.dtype) * 0 if"),
    Mutant(f"{GDN_MODES}/own_rows.py", GDN_RANKS, "[segments.order]", "[segments.order.flip(0)]"),
    Mutant(f"{GDN_MODES}/own_rows.py", GDN_RANKS, "call.core_attn_out[rows] = GDN", "_ = GDN"),
    Mutant(f"{GDN_MODES}/own_rows.py", GDN_MODES_TESTS, "provider in NOT_OURS", "True"),
    Mutant(
        f"{GDN_MODES}/head_all_to_all.py", GDN_RANKS, "        _share_final_states(call, share, *some)", "        pass"
    ),
    Mutant(
        f"{GDN_MODES}/head_all_to_all.py",
        GDN_RANKS,
        "share.channels.flatten()]",
        "share.channels.flatten().sort().values]",
    ),
    Mutant(
        f"{GDN_MODES}/head_all_to_all.py",
        HEADS,
        "transpose(0, 1).flatten(1, 2)[: len",
        "flip(0).transpose(0, 1).flatten(1, 2)[: len",
    ),
    Mutant("atom_patches/vllm/pcp/_recurrence.py", CONFIGS, "if heads % ranks:", "if False:"),
    Mutant(
        "atom_patches/runtime/pcp_gdn.py",
        GDN_PLAN,
        "torch.baddbmm(ends[between], state, maps[between])",
        "ends[between] + state",
    ),
    Mutant("atom_patches/runtime/pcp_gdn.py", GDN_PLAN, "sent + past + row", "sent + row"),
    Mutant("atom_patches/runtime/pcp_gdn.py", GDN_PLAN, " and len(plan.segments(first)) == 1", ""),
    Mutant(
        "atom_patches/runtime/pcp_gdn.py",
        GDN_PLAN,
        "2 * key_heads * key_size + values",
        "key_heads * key_size + values",
    ),
    Mutant("atom_patches/runtime/pcp_gdn_cost.py", GDN_COST, "max(at[rank], at[rank - 1] + hop)", "at[rank] + hop"),
    Mutant("atom_patches/runtime/pcp_gdn_cost.py", GDN_COST, "max(work, longest * rates.depth)", "work"),
    Mutant("atom_patches/runtime/pcp_gdn_cost.py", GDN_COST, " + rates.launch * pcp_host", " + 0 * pcp_host"),
    Mutant("atom_patches/runtime/pcp_host.py", GDN_COST, "SECONDS = 5e-6", "SECONDS = 5e-7"),
    Mutant("atom_patches/runtime/pcp_host.py", ("tests/unit/test_pcp_host.py",), "SPLIT = 1.029", "SPLIT = 1.0"),
    Mutant("atom_patches/runtime/pcp_host.py", GDN_COST, "return BETWEEN", 'return RECURRENT["relay"]'),
    Mutant("atom_patches/runtime/pcp_host.py", LAUNCHES, "QUERIES = 8", "QUERIES = 4"),
    Mutant("atom_patches/runtime/pcp_host.py", LAUNCHES, '"two_pass": 21', '"two_pass": 12'),
    Mutant("atom_patches/runtime/pcp_attention_split.py", CUTS, " - pcp_host.QUERIES * machine.launch", ""),
    Mutant("atom_patches/bench/pcp_model.py", BENCH, "self.at = [at + seconds for at in self.at]", "pass"),
    Mutant(STEP, CHUNKED, "self.context_len(s.request) + s.end", "s.end"),
    Mutant(STEP, CACHING, "_Query(s.request, s.rows, self.seq_lens[s.request])", "_Query(s.request, s.rows, s.end)"),
    Mutant(
        STEP,
        DENSE,
        "slices.index_select(0, self._gathered_rows)",
        "slices.index_select(0, self._gathered_rows.flip(0))",
    ),
    Mutant("atom_patches/vllm/pcp/model_forward.py", HYBRID, "if self.num_prompt_logprobs:", "if False:"),
    Mutant("atom_patches/runtime/pcp_figures.py", FIGURES, "plan.slice_size * world_size - plan.pool_size", "0"),
    Mutant(
        "atom_patches/runtime/pcp_figures.py",
        FIGURES,
        "handed_on * gdn.slot_bytes + final",
        "final",
    ),
    Mutant("atom_patches/runtime/pcp_figures.py", FIGURES, "if src != dst", "if True"),
    Mutant("atom_patches/runtime/pcp_figures.py", FIGURES, "pooled_rows=plan.pool_size", "pooled_rows=plan.slice_size"),
    Mutant("atom_patches/vllm/adapters/pcp_experts.py", EXPERTS, 'if asked == "ep" and not distributed:', "if False:"),
    Mutant(
        "atom_patches/vllm/adapters/pcp_experts.py",
        EXPERTS,
        " or not _cuts_evenly(config, _all_ranks(config)) else",
        " else",
    ),
    Mutant("atom_patches/vllm/adapters/pcp_experts.py", EXPERTS, 'asked in ("auto", "replicate") and', "False and"),
    Mutant("atom_patches/vllm/adapters/pcp_experts.py", EXPERTS, "if whole_experts_fit(config) or", "if"),
    Mutant("atom_patches/vllm/adapters/pcp_experts.py", EXPERTS, 'device_type != "cuda":', 'device_type == "":'),
    Mutant("atom_patches/vllm/adapters/pcp_experts.py", EXPERTS, "* config.cache_config.gpu_memory_utilization", ""),
    Mutant("atom_patches/vllm/adapters/pcp_experts.py", EXPERTS, "element // _other_ranks(config)", "element"),
    Mutant(
        "atom_patches/vllm/adapters/pcp_support.py",
        LINKS,
        'expert_mode(config) if config.model_config.is_moe else "none"',
        '"none"',
    ),
    Mutant(
        "atom_patches/vllm/pcp/moe_parallel.py",
        REPLICATED,
        "original(tp_size_, 1, dp_size_",
        "original(tp_size_, pcp_size_, dp_size_",
    ),
    Mutant("atom_patches/vllm/adapters/pcp_attention.py", PADDING, "slot_mapping[: len(key)]", "slot_mapping"),
    Mutant(
        "atom_patches/vllm/adapters/pcp_step.py",
        PADDING,
        "rows[self.num_replicated : self.plan.rows_per_rank]",
        "rows[self.num_replicated :]",
    ),
    Mutant("atom_patches/vllm/adapters/pcp_step.py", PADDING, "name: value.clone()", "name: value"),
    Mutant("atom_patches/vllm/pcp/gated_delta_net.py", PADDING, "rows[: step.plan.rows_per_rank]", "rows"),
    Mutant("atom_patches/vllm/adapters/pcp_support.py", PADDING, "nccl is not None and nccl.disabled", "False"),
    Mutant("atom_patches/vllm/adapters/pcp_graphs.py", DENSE, "step.take(positions, dim=-1)", "positions"),
    Mutant("atom_patches/vllm/adapters/pcp_graphs.py", GRAPHS, "descriptor = _split(descriptor)", "pass"),
    Mutant("atom_patches/vllm/adapters/pcp_graphs.py", GRAPHS, ", invalid_modes={CUDAGraphMode.FULL}", ""),
    Mutant(
        "atom_patches/vllm/adapters/pcp_graphs.py",
        GRAPHS,
        "SplitBatchDescriptor):\n        return False",
        "SplitBatchDescriptor):\n        return True",
    ),
    Mutant(
        "atom_patches/vllm/adapters/pcp_graphs.py", GRAPHS, "buffer.narrow(dim, 0, rows.shape[dim]).copy_(rows)", "pass"
    ),
    Mutant(
        "atom_patches/vllm/adapters/pcp_graphs.py",
        GRAPHS,
        "context.cudagraph_runtime_mode, context.batch_descriptor = outer",
        "pass",
    ),
    Mutant(
        "atom_patches/vllm/adapters/pcp_graphs.py",
        GRAPHS,
        "batch_descriptor=_split(descriptor),",
        "batch_descriptor=descriptor,",
    ),
    Mutant("atom_patches/vllm/adapters/pcp_graphs.py", GRAPHS, "real or _capturing_whole_rows.get()", "real"),
    Mutant("atom_patches/vllm/pcp/moe_dispatch.py", ROUTING, "agreed_logits(router_logits)", "router_logits"),
    Mutant("atom_patches/vllm/adapters/pcp_routing.py", ROUTING, "if first else", "if True else"),
    Mutant(
        "atom_patches/vllm/adapters/pcp_routing.py",
        BROADCAST,
        "broadcast(group, sent, src=0)",
        "group.broadcast(sent, 0)",
    ),
    Mutant("atom_patches/vllm/adapters/pcp_broadcast.py", BROADCAST, "nccl is None or nccl.disabled", "nccl is None"),
    Mutant("atom_patches/vllm/adapters/pcp_broadcast.py", BROADCAST, "nccl is None or nccl.disabled", "True"),
    Mutant(
        "atom_patches/vllm/adapters/pcp_broadcast.py",
        BROADCAST,
        "nccl.broadcast(tensor, src)",
        "nccl.broadcast(tensor, 0)",
    ),
    Mutant("atom_patches/vllm/pcp/sampled_ids.py", BROADCAST, "sampled_token_ids.contiguous()", "sampled_token_ids"),
    Mutant("atom_patches/vllm/adapters/pcp_links.py", LINKS, "        broadcast(group, rows, src=0)\n"),
    Mutant(
        "atom_patches/vllm/adapters/pcp_routing.py", ROUTING, "torch.where(are_copies, of_some[:1], of_some)", "of_some"
    ),
    Mutant("atom_patches/vllm/pcp/moe_dispatch.py", ROUTED, "if copies is not None:", "if False:"),
    Mutant("atom_patches/vllm/adapters/pcp_graphs.py", GRAPHS, "copies[replicated:] = False", "pass"),
    Mutant("atom_patches/vllm/adapters/pcp_graphs.py", GRAPHS, "if runner not in _copies:", "if True:"),
    Mutant("atom_patches/vllm/adapters/pcp_copies.py", HOST_WAITS, 'if device.type == "cuda":', "if False:"),
    Mutant("atom_patches/vllm/adapters/pcp_step.py", HOST_WAITS, "rows[at.send]", "rows[at.send.cpu()]"),
    Mutant(
        "atom_patches/vllm/cpu/_conditions.py",
        ("tests/vllm/test_gdn_cpu_adapters.py::test_compiled_experts_of_data_parallel_ranks_are_refused_by_name",),
        "verdict.ok and not config.model_config.enforce_eager",
        "False",
    ),
    Mutant(
        STEP,
        ("tests/vllm/test_pcp_recurrent_groups.py",),
        "return replace(known, non_spec_state_indices_tensor=own)",
        "return known",
    ),
    Mutant("atom_patches/vllm/pcp/ranks_agree.py", LINKS, "            open_links(self.vllm_config)\n", ""),
    Mutant("atom_patches/runtime/pcp.py", PLAN, "max(first - offset, 0)", "max(first - offset, 1)"),
    Mutant("atom_patches/runtime/pcp.py", PLAN, "not segments[-1].ends_request", "segments[-1].ends_request"),
    Mutant("atom_patches/runtime/pcp.py", PLAN, "len(plan.replicated) + offset", "offset"),
    Mutant("atom_patches/runtime/pcp_cuts.py", CUTS, "-(-pool_size // world_size)", "pool_size // world_size"),
    Mutant("atom_patches/runtime/pcp_cuts.py", CUTS, "(world_size - 1 - rank)", "rank"),
    Mutant("atom_patches/runtime/pcp_cuts.py", CUTS, "offset + row - start", "row - start"),
    Mutant("atom_patches/runtime/pcp_attention_split.py", CUTS, "in receivers for", "in reversed(receivers) for"),
    Mutant(
        "atom_patches/runtime/pcp_attention_split.py", CUTS, "[row[rank] for row in self.counts]", "self.sends(rank)"
    ),
    Mutant("atom_patches/runtime/pcp_attention_split.py", CUTS, "if gained > 0 else", "if gained >= 0 else"),
    Mutant("atom_patches/vllm/adapters/pcp_queries.py", QUERIES, "output[self._send_rows] = returned", "pass"),
    Mutant("atom_patches/vllm/adapters/pcp_queries.py", QUERIES, "(self._replicated + exchange", "(exchange"),
    Mutant("atom_patches/vllm/adapters/pcp_queries.py", QUERIES, "rows.view(torch.uint8) if rows", "rows if rows"),
    Mutant(
        "atom_patches/vllm/pcp/deepstack.py",
        ("tests/vllm/test_pcp_prompts.py::test_two_ranks[qwen3_vl pictures]",),
        "= level[step.local_rows]",
        "= level[: len(step.local_rows)]",
    ),
    Mutant("atom_patches/vllm/adapters/pcp_experts.py", EXPERTS, "math.lcm(tile, *_scale_block(config))", "tile"),
    Mutant(
        "atom_patches/vllm/adapters/pcp_step.py",
        ZIGZAG,
        "attention = batch.collected_queries(",
        "batch.collected_queries(",
    ),
    Mutant("atom_patches/runtime/pcp.py", PLAN, "decodes + -(-(max_tokens - decodes)", "-(-(max_tokens - decodes)"),
    Mutant(
        "atom_patches/vllm/adapters/pcp_support.py",
        ("tests/vllm/test_pcp_workers.py::test_ranks_with_different_settings_are_refused",),
        "if own != first:",
        "if False:",
    ),  # noqa: E501
]

COMMANDS = [Mutant(fault.path, (fault.test,), fault.old, fault.new) for fault in cli_mutants.FAULTS]
KERNELS = [Mutant(fault.path, (fault.test,), fault.old, fault.new) for fault in kernel_mutants.FAULTS]
MODELS = [Mutant(fault.path, (fault.test,), fault.old, fault.new) for fault in model_mutants.FAULTS]
MANAGER = [Mutant(fault.path, (fault.test,), fault.old, fault.new) for fault in manager_mutants.FAULTS]
DATA_PARALLEL = [Mutant(fault.path, (fault.test,), fault.old, fault.new) for fault in dp_mutants.FAULTS]
SPARSE_ENGINE = (f"{sparse_mutants.ENGINE}::test_every_answer_is_the_oracle_s[pages of 64]",)
SPARSE = [
    *(Mutant(fault.path, (fault.test,), fault.old, fault.new) for fault in sparse_mutants.FAULTS),
    *(Mutant(f"atom_patches/sglang/sparse_mla/{name}.py", SPARSE_ENGINE) for name in ("attention_backend", "indexer")),
]

MUTANTS = [*CORE, *COMMANDS, *DATA_PARALLEL, *KERNELS, *MANAGER, *MEMBERS, *IDLE, *MODELS, *SPARSE, *TRANSITIONS]


def apply(mutant: Mutant, checkout: Path) -> None:
    """Make the change in `checkout`.

    Raises:
        LookupError: the file is gone, or does not contain the text exactly once.
    """
    path = checkout / mutant.path
    if not path.exists():
        raise LookupError(f"{mutant.path} does not exist")
    if mutant.old is None:
        path.unlink()
        return
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise LookupError(f"{mutant.path} contains {_short(mutant.old)!r} {text.count(mutant.old)} times, not once")
    path.write_text(text.replace(mutant.old, mutant.new or ""))


def copy_checkout(target: Path) -> None:
    """Copy what the tests need."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, target / name)


def _interpreter(mutant: Mutant) -> str:
    """Tests of SGLang run in its environment, which has no vLLM, and some of vLLM in a later release's."""
    for beginning, name in (("tests/sglang", SGLANG), ("tests/vllm/test_pcp_manager", manager_mutants.LANE)):
        if any(test.startswith(beginning) for test in mutant.tests):
            return _python_of(name)
    return sys.executable


@cache
def _python_of(name: str) -> str:
    return str(lanes.environment(next(lane for lane in lanes.LANES if lane.name == name)))


def joined(python: str, checkout: Path) -> str:
    """An environment like that one, for the copy: where another checkout is installed, the command line refuses."""
    own = checkout / ".venv"
    shutil.copytree(Path(python).parents[1], own, symlinks=True)
    packages = build_env.site_packages(own)
    [record] = packages.glob("atom_patches-*.dist-info/direct_url.json")
    installed = json.loads(record.read_text())["url"].removeprefix("file://")
    for path in (record, *packages.glob("__editable__*")):
        path.write_text(path.read_text().replace(installed, str(checkout)))
    return str(own / "bin" / "python")


def run(python: str, mutant: Mutant | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest in a copy of the checkout, with the mutant."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as scratch:
        checkout = Path(scratch).resolve()
        copy_checkout(checkout)
        if mutant is not None:
            apply(mutant, checkout)
        command = [joined(python, checkout), "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        env = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
        limit = 1200 if mutant is not None else None
        return subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=limit)


def failures(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The tests that failed.

    Raises:
        RuntimeError: pytest could not run them.
    """
    found = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1) or (done.returncode == 1 and not found):
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}")
    return found


def failing_anyway(chosen: Sequence[Mutant]) -> list[str]:
    """The tests of these mutants that fail without any: they would find every one."""
    together: dict[str, dict[str, None]] = {}
    alone: dict[tuple[str, ...], None] = {}  # those with an option, which is not for others
    for mutant in chosen:
        python, has_option = _interpreter(mutant), any(one.startswith("-") for one in mutant.tests)
        if has_option:
            alone[(python, *mutant.tests)] = None
        else:
            together.setdefault(python, {}).update(dict.fromkeys(mutant.tests))
    runs = [*alone, *((python, *tests) for python, tests in together.items())]
    return [name for python, *tests in runs for name in failures(run(python, None, *tests))]


def first_failure(mutant: Mutant) -> str | None:
    """The name of the first test that fails with the mutant, or None if it survives."""
    done = run(_interpreter(mutant), mutant, "-x", *mutant.tests)
    if done.returncode < 0:
        return f"the tests crashed (signal {-done.returncode})"
    return next(iter(failures(done)), None)


def main() -> int:
    """Run the selected mutants; 0 if every one was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--list", action="store_true", help="name the mutants and run none")
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if not args.words or any(word in m.name for word in args.words)]
    if args.list:
        print(*(mutant.name for mutant in chosen), sep="\n")
        return 0
    survivors, failing = 0, failing_anyway(chosen)
    for test in failing:
        print(f"FAILS WITHOUT A MUTANT, TOO: {test}", flush=True)
    for mutant in chosen:
        started = time.monotonic()
        try:
            failed = first_failure(mutant)
        except LookupError as error:
            failed, survivors = f"DOES NOT FIT: {error}", survivors + 1
        if failed is None:
            failed, survivors = "SURVIVED", survivors + 1
        print(f"{mutant.name}  =>  {failed}  ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"mutants: {len(chosen) - survivors}/{len(chosen)} found")
    return 1 if survivors or failing or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
