"""Seeded faults in the kernels, their bindings and their benchmark; `tools/mutants.py` makes each and runs its test."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A file, the test that must fail, the text to replace (it occurs once), and what stands there instead."""

    path: str
    test: str
    old: str
    new: str


KERNELS = "atom_patches/kernels"
TESTS = "tests/kernels"
AITER = f"{TESTS}/test_aiter_contract.py::test_the_newest_lane_serves"

FAULTS = (
    Fault(
        f"{KERNELS}/add_rms_norm/aiter_impl.py",
        f"{AITER}[add_rms_norm: strided]",
        "residual.reshape(shape).contiguous(),",
        "residual.reshape(shape),",
    ),
    Fault(
        f"{KERNELS}/add_rms_norm/triton_impl.py",
        f"{TESTS}/test_add_rms_norm.py::test_the_norm_is_that_of_the_rounded_sum",
        "values = rounded.to(tl.float32)",
        "values = added",
    ),
    Fault(
        f"{KERNELS}/aiter_binding.py",
        f"{TESTS}/test_aiter_contract.py::test_a_drifted_signature_is_a_reason_not_an_error",
        "if known != function.positional:",
        "if set(known) != set(function.positional):",
    ),
    Fault(
        f"{KERNELS}/aiter_binding.py",
        f"{TESTS}/test_aiter_contract.py::test_a_drifted_signature_is_a_reason_not_an_error",
        "    if needed:\n",
        "    if needed and not known:\n",
    ),
    Fault(
        f"{KERNELS}/aiter_binding.py",
        f"{TESTS}/test_aiter_contract.py::test_a_drifted_signature_is_a_reason_not_an_error",
        "    _check.cache_clear()\n    _load.cache_clear()\n",
        "    _load.cache_clear()\n",
    ),
    Fault(
        f"{KERNELS}/benchmark.py",
        f"{TESTS}/test_benchmark.py::TestCheck::test_who_is_wrong_gets_no_time",
        'if touched else Served("timed", deviation=deviation)',
        'if not copies else Served("timed", deviation=deviation)',
    ),
    Fault(
        f"{KERNELS}/benchmark.py",
        f"{TESTS}/test_benchmark.py::TestCheck::test_a_wrong_provider_does_not_spoil_the_inputs_of_the_next",
        "copies = contract.clones(arguments)",
        "copies = arguments",
    ),
    Fault(
        f"{KERNELS}/benchmark.py",
        f"{TESTS}/test_benchmark.py::TestSets::test_together_they_exceed_the_cache_three_times",
        "int(3 * _cache(device)",
        "int(_cache(device)",
    ),
    Fault(
        f"{KERNELS}/causal_conv1d/aiter_impl.py",
        f"{AITER}[causal_conv1d: null slot 0]",
        "PAD = -1",
        "PAD = 0",
    ),
    Fault(
        f"{KERNELS}/causal_conv1d/aiter_impl.py",
        f"{AITER}[causal_conv1d: null slot 0]",
        "[tokens] * sequences",
        "[1] * sequences",
    ),
    Fault(
        f"{KERNELS}/causal_conv1d/aiter_impl.py",
        f"{AITER}[causal_conv1d_update: null slot 0]",
        "device=x.device).copy_(x)\n",
        "device=x.device).set_(x)\n",
    ),
    Fault(
        f"{KERNELS}/causal_conv1d/triton_impl.py",
        f"{TESTS}/test_causal_conv1d.py::test_sequences_of_several_blocks",
        "when = begin + i - (TAPS - 1)",
        "when = begin + i - TAPS",
    ),
    Fault(
        f"{KERNELS}/causal_conv1d/triton_impl.py",
        f"{TESTS}/test_causal_conv1d.py::test_no_rows_and_many_sequences",
        "bound // SIZE + i + 1 <= block",
        "bound // SIZE + i < block - 1",
    ),
    Fault(
        f"{KERNELS}/causal_conv1d/triton_impl.py",
        f"{TESTS}/test_causal_conv1d.py::test_without_flags_every_sequence_starts_from_zeros",
        "        before = inside & (when < 0) & goes_on\n",
        "        before = inside & (when < 0)\n",
    ),
    Fault(
        f"{KERNELS}/causal_conv1d/triton_impl.py",
        f"{TESTS}/test_causal_conv1d.py::test_no_rows_and_many_sequences",
        "tl.load(past_at + (place + length) * past_time",
        "tl.load(past_at + place * past_time",
    ),
    Fault(
        f"{KERNELS}/causal_conv1d/triton_impl.py",
        f"{TESTS}/test_causal_conv1d.py::test_padding",
        "    if (slot < 0) | (slot == null_slot):\n        tl.store(y_at, tl.zeros([BLOCK_D]",
        "    if slot < 0:\n        tl.store(y_at, tl.zeros([BLOCK_D]",
    ),
    Fault(
        f"{KERNELS}/causal_conv1d/triton_impl.py",
        f"{TESTS}/test_causal_conv1d.py::test_no_rows_and_many_sequences",
        "        if tap > 0:\n            window += (value,)",
        "        if tap < TAPS - 1:\n            window += (value,)",
    ),
    Fault(
        f"{KERNELS}/causal_conv1d/triton_impl.py",
        f"{TESTS}/test_causal_conv1d.py::test_no_rows_and_many_sequences",
        "state_at + (accepted - 1 + time + place) * state_time",
        "state_at + (accepted + time + place) * state_time",
    ),
    Fault(
        f"{KERNELS}/context_gather/triton_impl.py",
        f"{TESTS}/test_context_gather.py::test_strides[triton]",
        "(source * x_rows[i])[:, None]",
        "(source * out_rows[i])[:, None]",
    ),
    Fault(
        f"{KERNELS}/context_gather/triton_impl.py",
        f"{TESTS}/test_context_gather.py::test_strides[triton]",
        "            read = (named >= 0)[:, None] & inside",
        "            named = tl.maximum(named, 0)\n            read = (named >= 0)[:, None] & inside",
    ),
    Fault(
        f"{KERNELS}/fused_moe/aiter_impl.py",
        f"{AITER}[fused_moe: routed]",
        "topk_weights.masked_fill(padding, 0.0).float()",
        "topk_weights.float()",
    ),
    Fault(
        f"{KERNELS}/fused_moe/aiter_impl.py",
        f"{TESTS}/test_aiter_contract.py::test_experts_that_were_written_to_are_copied_again",
        "known is None or known[0] != version",
        "known is None",
    ),
    Fault(
        f"{KERNELS}/fused_moe/aiter_impl.py",
        f"{AITER}[fused_moe: routed]",
        "SHUFFLE(weight.detach().contiguous(), layout=LAYOUT)",
        "weight.detach().contiguous()",
    ),
    Fault(
        f"{KERNELS}/fused_moe/aiter_impl.py",
        f"{AITER}[moe_routing: a row of NaN]",
        "weights.masked_fill_(odd, 0.0).mul_(scaling)",
        "weights.mul_(scaling)",
    ),
    Fault(
        f"{KERNELS}/fused_moe/triton_impl.py",
        f"{TESTS}/test_fused_moe.py::test_scores_that_are_not_numbers_count_as_zero[softmax-triton]",
        'choice = tl.where(hit, float("-inf"), choice)',
        "choice = tl.where(hit, 0.0, choice)",
    ),
    Fault(
        f"{KERNELS}/fused_moe/triton_impl.py",
        f"{TESTS}/test_fused_moe.py::test_of_equal_groups_the_first_is_taken[True-triton]",
        "& (number[None, None, :] < number[None, :, None])",
        "& (number[None, None, :] > number[None, :, None])",
    ),
    Fault(
        f"{KERNELS}/fused_moe/triton_impl.py",
        f"{TESTS}/test_fused_moe.py::test_all_tokens_on_the_same_experts[37-triton]",
        "tl.where(before % BLOCK_M == 0, expert, -1)",
        "tl.where(before == 0, expert, -1)",
    ),
    Fault(
        f"{KERNELS}/fused_moe/triton_impl.py",
        f"{TESTS}/test_fused_moe.py::test_the_sort[4096-0]",
        "tl.minimum(rows, BLOCK_M), mask=written",
        "rows, mask=written",
    ),
    Fault(
        f"{KERNELS}/fused_moe/triton_impl.py",
        f"{TESTS}/test_fused_moe.py::test_padding[4-0-triton]",
        "tl.where(expert >= 0, part.to(tl.float32), 0.0)",
        "part.to(tl.float32)",
    ),
    Fault(
        f"{KERNELS}/fused_moe/triton_impl.py",
        f"{TESTS}/test_fused_moe.py::test_a_wide_shared_expert[triton]",
        "up = tl.where(extra, width * SHARED, width)",
        "up = tl.where(extra, width, width)",
    ),
    Fault(
        f"{KERNELS}/fused_moe/triton_impl.py",
        f"{TESTS}/test_fused_moe.py::test_a_block_about_half_full[17]",
        "return count <= BLOCK_M // 2",
        "return count <= BLOCK_M // 2 + 1",
    ),
    Fault(
        f"{KERNELS}/fused_moe/triton_impl.py",
        f"{TESTS}/test_fused_moe.py::test_a_configuration_changes_nothing",
        "token = (block % parts) * BLOCK_M + inner",
        "token = (block % parts) * ROWS + inner",
    ),
    Fault(
        f"{KERNELS}/fused_moe/triton_impl.py",
        f"{TESTS}/test_fused_moe.py::test_the_sort[16-0]",
        "total[None, :] + tl.cumsum(found, axis=0) - found",
        "tl.cumsum(found, axis=0) - found",
    ),
    Fault(
        f"{KERNELS}/gated_delta_rule/_recurrent_triton.py",
        f"{TESTS}/test_recurrent_gated_delta_rule.py::test_padding",
        "tl.load(slots_at + (accepted - 1) * slots_token)",
        "tl.load(slots_at)",
    ),
    Fault(
        f"{KERNELS}/gated_delta_rule/_recurrent_triton.py",
        f"{TESTS}/test_recurrent_gated_delta_rule.py::test_padding",
        "real = (after >= 0) & (after != null_slot)",
        "real = after >= 0",
    ),
    Fault(
        f"{KERNELS}/gated_delta_rule/_recurrent_triton.py",
        f"{TESTS}/test_recurrent_gated_delta_rule.py::test_padding",
        "    read = tl.sum(s * q[None, :], axis=1) + written * tl.sum(k * q, axis=0)",
        "    read = tl.sum(s * q[None, :], axis=1)",
    ),
    Fault(
        f"{KERNELS}/gated_delta_rule/_recurrent_triton.py",
        f"{TESTS}/test_recurrent_gated_delta_rule.py::test_padding",
        "in_v, in_k = value < V, key < K\n    if RAW",
        "in_v, in_k = value < V, key < BK\n    if RAW",
    ),
    Fault(
        f"{KERNELS}/gated_delta_rule/_recurrent_triton.py",
        f"{TESTS}/test_recurrent_gated_delta_rule.py::test_padding",
        "    if (slot < 0) | (slot == null_slot):\n        tl.store(y_at, ",
        "    if slot < 0:\n        tl.store(y_at, ",
    ),
    Fault(
        f"{KERNELS}/gated_delta_rule/_recurrent_triton.py",
        f"{TESTS}/test_gdn_decode.py::test_far_gates",
        "softplus = tl.maximum(x, 0.0) + ",
        "softplus = ",
    ),
    Fault(
        f"{KERNELS}/gated_delta_rule/aiter_impl.py",
        f"{AITER}[chunk_gated_delta_rule: resumed, with empty sequences]",
        "index_copy_(0, order, final)",
        "copy_(final)",
    ),
    Fault(
        f"{KERNELS}/gated_delta_rule/aiter_impl.py",
        f"{TESTS}/test_aiter_contract.py::test_a_refilled_buffer_of_sequence_starts_is_read_again",
        "cu_seqlens=bounds.to(torch.int32),",
        "cu_seqlens=cu_seqlens,",
    ),
    Fault(
        f"{KERNELS}/gated_delta_rule/aiter_impl.py",
        f"{AITER}[chunk_gated_delta_rule: resumed, with empty sequences]",
        "g.float().clamp(min=_LOG_ZERO)",
        "g.float()",
    ),
    Fault(
        f"{KERNELS}/gated_rms_norm/triton_impl.py",
        f"{TESTS}/test_gated_rms_norm.py::test_a_gate_inside_a_projection",
        "row_offsets(row, gate_outer, gate_inner, INNER)",
        "row_offsets(row, x_outer, x_inner, INNER)",
    ),
    Fault(
        f"{KERNELS}/gdn_chain/_decode_triton.py",
        f"{TESTS}/test_gdn_decode.py::test_a_served_shape",
        "    q, k, v = wide, wide[:, key_heads * keys :], wide[:, 2 * key_heads * keys :]\n    step_kernel",
        "    q, k, v = wide, wide[:, key_heads * keys :], wide[:, key_heads * keys :]\n    step_kernel",
    ),
    Fault(
        f"{KERNELS}/gdn_chain/_decode_triton.py",
        f"{TESTS}/test_gdn_decode.py::test_padding",
        "A_log.stride(0), dt_bias.stride(0),\n        STATE_V=ssm_state.stride(2), STATE_K=ssm_state.stride(3), HEADS",
        "A_log.stride(0), dt_bias.stride(0),\n        STATE_V=keys, STATE_K=1, HEADS",
    ),
    Fault(
        f"{KERNELS}/gdn_chain/_decode_triton.py",
        f"{TESTS}/test_gdn_decode.py::test_padding",
        "cu_seqlens, conv_state, slots[:, 0], num_accepted, activation",
        "cu_seqlens, conv_state, slots[:, -1], num_accepted, activation",
    ),
    Fault(
        f"{KERNELS}/gdn_chain/aiter_impl.py",
        f"{AITER}[gdn_decode: float32 states]",
        "(mixed_qkv.shape[1] - heads * width) // 2",
        "heads * width",
    ),
    Fault(
        f"{KERNELS}/gdn_chain/aiter_impl.py",
        f"{AITER}[gdn_decode: float32 states]",
        "out.masked_fill_(padding[:, None, None], 0.0)",
        "out",
    ),
    Fault(
        f"{KERNELS}/gdn_gating/triton_impl.py",
        f"{TESTS}/test_gating_and_l2norm.py::test_gating_by_every_provider",
        "b + wide * b_row",
        "b + wide * a_row",
    ),
    Fault(
        f"{KERNELS}/l2norm/triton_impl.py",
        f"{TESTS}/test_gating_and_l2norm.py::test_a_row_of_zeros_stays_zeros",
        "keep_dims=True) + eps)",
        "keep_dims=True))",
    ),
    Fault(
        f"{KERNELS}/merge_attention/triton_impl.py",
        f"{TESTS}/test_merge_attention.py::test_every_part_counts[9-triton]",
        "for first in range(0, last + 1, CHUNK)",
        "for first in range(0, last, CHUNK)",
    ),
    Fault(
        f"{KERNELS}/merge_attention/triton_impl.py",
        f"{TESTS}/test_merge_attention.py::test_neither_part_has_keys[triton]",
        'return tl.where(lse == float("inf"), float("-inf"), lse)',
        "return lse",
    ),
    Fault(
        f"{KERNELS}/merge_attention/triton_impl.py",
        f"{TESTS}/test_merge_attention.py::test_lses_that_lie_far_apart[triton]",
        "tl.load(from_b, mask=read_b, other=0.0).to(tl.float32) * (weight_b",
        "tl.load(from_b, mask=read_b, other=0.0).to(tl.float32) * (weight_a",
    ),
    Fault(
        f"{KERNELS}/mla_attention/aiter_impl.py",
        f"{AITER}[mla_attention: one row a sequence]",
        "seen.cumsum(1) - 1)",
        "seen.cumsum(1))",
    ),
    Fault(
        f"{KERNELS}/mla_attention/aiter_impl.py",
        f"{AITER}[sparse_mla_attention: scattered]",
        "lse.masked_fill(blind[:, None], -torch.inf)",
        "lse",
    ),
    Fault(
        f"{KERNELS}/paged_attention/_triton_kernel.py",
        f"{TESTS}/test_paged_attention.py::test_pages[triton-float32-16]",
        "tl.minimum(position + 1, keys)",
        "tl.minimum(position + 2, keys)",
    ),
    Fault(
        f"{KERNELS}/paged_attention/_triton_kernel.py",
        f"{TESTS}/test_paged_attention.py::test_pages_outside_the_window_may_be_gone[triton-float32-17]",
        "position - (window - 1), 0)",
        "position - window, 0)",
    ),
    Fault(
        f"{KERNELS}/paged_attention/_triton_kernel.py",
        f"{TESTS}/test_paged_attention.py::test_pages[triton-float32-128]",
        "needed = (key >= low) & (key < high)",
        "needed = key >= low",
    ),
    Fault(
        f"{KERNELS}/paged_attention/_triton_kernel.py",
        f"{TESTS}/test_paged_attention.py::test_pages_between_the_windows_of_rows_far_apart_may_be_gone[triton]",
        "needed &= tl.max(visible.to(tl.int32), axis=0) > 0",
        "pass",
    ),
    Fault(
        f"{KERNELS}/paged_attention/_triton_kernel.py",
        f"{TESTS}/test_paged_attention.py::test_pages[triton-float32-16]",
        "tl.minimum(stop, all_end // BLOCK_N * BLOCK_N)",
        "tl.minimum(stop, tl.cdiv(all_end, BLOCK_N) * BLOCK_N)",
    ),
    Fault(
        f"{KERNELS}/paged_attention/_triton_kernel.py",
        f"{TESTS}/test_paged_attention.py::test_decode_over_divided_keys[triton-float32-1-None]",
        "stop = tl.minimum(begin + share, high)",
        "stop = tl.minimum(begin + share - BLOCK_N, high)",
    ),
    Fault(
        f"{KERNELS}/paged_attention/aiter_impl.py",
        f"{AITER}[paged_attention: pages of 16]",
        "lse.masked_fill(blind, -torch.inf).mT",
        "lse.mT",
    ),
    Fault(
        f"{KERNELS}/paged_attention/aiter_impl.py",
        f"{AITER}[paged_attention: window and soft cap]",
        "(window - 1, 0)",
        "(window, 0)",
    ),
    Fault(
        f"{KERNELS}/paged_attention/triton_impl.py",
        f"{TESTS}/test_paged_attention.py::test_an_8_bit_cache[triton-1-cache0]",
        "_head_stride(k_scale), _head_stride(v_scale),",
        "0, 0,",
    ),
    Fault(
        f"{KERNELS}/paged_attention/triton_impl.py",
        f"{TESTS}/test_paged_attention.py::test_a_short_chunk_over_divided_keys[triton-float32]",
        "tiles = rows // block_q + seqs + int(padded)",
        "tiles = rows // block_q + seqs",
    ),
    Fault(
        f"{KERNELS}/paged_attention/triton_impl.py",
        f"{TESTS}/test_paged_attention.py::test_narrow_heads_never_take_the_warp_group_product[sizes0-16]",
        "by_sequence = max_seqlen_q * group <= (32 if narrow else 64)",
        "by_sequence = max_seqlen_q * group <= 64",
    ),
    Fault(
        f"{KERNELS}/qk_norm_rope_cache/aiter_impl.py",
        f"{AITER}[qk_norm_rope_cache: full, pairs]",
        "value=-1)",
        "value=0)",
    ),
    Fault(
        f"{KERNELS}/qk_norm_rope_cache/aiter_impl.py",
        f"{AITER}[qk_norm_rope_cache: full, pairs]",
        "is_neox=neox,",
        "is_neox=True,",
    ),
    Fault(
        f"{KERNELS}/qk_norm_rope_cache/triton_impl.py",
        f"{TESTS}/test_qk_norm_rope_cache.py::test_padding_and_surplus_tokens_are_written_nowhere",
        "mask=token < num_slots, other=-1",
        "mask=token < num_slots, other=0",
    ),
    Fault(
        f"{KERNELS}/qk_norm_rope_cache/triton_impl.py",
        f"{TESTS}/test_qk_norm_rope_cache.py::test_every_rotation",
        "(angle % 3 == 2) & (angle < 3 * WIDTH)",
        "(angle % 3 == 2) & (angle < 3 * HEIGHT)",
    ),
    Fault(
        f"{KERNELS}/qk_norm_rope_cache/triton_impl.py",
        f"{TESTS}/test_qk_norm_rope_cache.py::test_each_cache_at_strides_of_its_own",
        "block * value_block + row * value_row",
        "block * key_block + row * key_row",
    ),
    Fault(
        f"{KERNELS}/qk_norm_rope_cache/triton_impl.py",
        f"{TESTS}/test_qk_norm_rope_cache.py::test_the_heads_of_a_served_model",
        "partner_factor += 1.0",
        "pass",
    ),
    Fault(
        f"{KERNELS}/ranking.py",
        "tests/unit/test_bench.py::TestRanking::test_nobody_who_loses_to_the_engine_anywhere_comes_before_it",
        "key=lambda name: (_loses(reports, name), _relative(reports, name))",
        "key=lambda name: _relative(reports, name)",
    ),
    Fault(
        f"{KERNELS}/ranking.py",
        "tests/unit/test_bench.py::TestRanking::test_who_is_wrong_in_one_case_is_in_no_ranking",
        "if not any(_failed(report, name)",
        "if not all(_failed(report, name)",
    ),
    Fault(
        f"{KERNELS}/rms_norm/aiter_impl.py",
        f"{AITER}[rms_norm: gemma]",
        "weight.contiguous(), eps, 0, True)",
        "weight.contiguous(), eps, 0, False)",
    ),
    Fault(
        f"{KERNELS}/rms_norm/aiter_impl.py",
        f"{AITER}[rms_norm: 3-d rows of a wider tensor]",
        "rows = x.reshape(-1, x.shape[-1])",
        "rows = x",
    ),
    Fault(
        f"{KERNELS}/rms_norm/triton_impl.py",
        f"{TESTS}/test_rms_norm.py::test_many_rows_share_programs",
        "(row < count) & (column < SIZE)",
        "(row < count - 1) & (column < SIZE)",
    ),
    Fault(
        f"{KERNELS}/rows.py",
        f"{TESTS}/test_rms_norm.py::test_heads_of_a_wider_row",
        "+ (row % INNER).to(tl.int64) * inner_stride",
        "",
    ),
    Fault(
        f"{KERNELS}/sparse_indexer/aiter_impl.py",
        f"{AITER}[indexer_cache_gather: more than there are]",
        "(0, most - requests.shape[1], 0, 1)",
        "(0, most - requests.shape[1], 0, 0)",
    ),
    Fault(
        f"{KERNELS}/sparse_indexer/aiter_impl.py",
        f"{AITER}[indexer_logits_paged: queries of requests]",
        "lengths.masked_fill(requests < 0, 0)",
        "lengths",
    ),
    Fault(
        f"{KERNELS}/suite.py",
        f"{TESTS}/test_benchmark.py::TestSuite::test_only_the_case_that_loses_the_process_is_lost",
        "            if poisoned:\n                self._worker.stop()\n",
        "",
    ),
    Fault(
        f"{KERNELS}/timing.py",
        f"{TESTS}/test_benchmark.py::TestTiming::test_one_call_is_a_replay_over_its_calls",
        "_seconds(replay.start) / replay.calls",
        "_seconds(replay.start)",
    ),
    Fault(
        f"{KERNELS}/timing.py",
        f"{TESTS}/test_benchmark.py::TestTiming::test_a_call_that_waits_is_not_captured",
        'set_sync_debug_mode("error")',
        'set_sync_debug_mode("warn")',
    ),
    Fault(
        "atom_patches/cli/bench.py",
        "tests/unit/test_bench.py::TestOutput::test_auto_may_not_be_slower_than_the_engine",
        "ratio < SLOWEST",
        "ratio < 0.5",
    ),
)
