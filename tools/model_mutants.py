"""Seeded faults in the runtime of a step and in the decoders; `tools/mutants.py` makes each and runs its test."""

from __future__ import annotations

from kernel_mutants import Fault

RUNTIME = "atom_patches/runtime"
MODELS = "atom_patches/models"
UNIT = "tests/unit"
TESTS = "tests/models"
SGLANG = "atom_patches/sglang"
LOGITS = f"{TESTS}/test_decoders.py::test_ragged_prefill"
REFUSED = f"{TESTS}/test_weights.py::test_configurations_that_are_refused"
ASKED = f"{UNIT}/test_sglang_models_config.py"
ENGINES = "tests/sglang/test_atom_models_dense.py"
RELEASES = "tests/sglang/test_releases.py"
VLLM = "atom_patches/vllm"
CHOICE = f"{UNIT}/test_vllm_models_config.py::test_a_family"
LEFT = f"{UNIT}/test_vllm_models_config.py::test_what_is_not_served_is_left_to_stock_and_named"
VLLM_ENGINES = "tests/vllm/test_atom_models.py"
PRODUCTS = "tests/vllm/test_products.py"
SGLANG_PRODUCTS = "tests/sglang/test_products.py"
OURS_OF_FEW_ROWS = "test_products_of_few_rows_are_ours_unless_that_is_switched_off[moe products tp2]"
QUANTISED = "tests/vllm/test_atom_models_quantised.py"
ATTENTION = f"{VLLM}/adapters/paged_attention.py"
ATTENDS = "tests/vllm/test_attention.py::test_every_answer_is_the_oracle_s"
STEP = "tests/vllm/test_attention.py::test_a_step_is_stored_and_attended_to"
LATENT_ATTENTION = f"{VLLM}/adapters/latent_attention.py"
LATENT_PIECES = "atom_patches/runtime/latent_pieces.py"
OF_LATENTS = "tests/vllm/test_latent_attention.py"
LATENT_STEP = f"{OF_LATENTS}::test_a_step_is_stored_and_attended_to"
OF_RANKS = "tests/vllm/test_pcp_gdn_ranks.py::test_a_layer_of_an_atom_decoder"
ATTENTION_LEFT = f"{UNIT}/test_vllm_attention_config.py::test_what_is_not_served_is_left_to_vllm_and_named"

FAULTS = (
    Fault(
        f"{SGLANG}/models/_config.py",
        ASKED,
        'f"--speculative-algorithm {algorithm} with --speculative-eagle-topk',
        'f"--speculative-eagle-topk',
    ),
    Fault(
        f"{RUNTIME}/scope.py",
        f"{UNIT}/test_scope.py::test_the_value_before_a_block_holds_after_it",
        "        try:\n            yield value\n        finally:\n            self._current.reset(token)",
        "        yield value\n        self._current.reset(token)",
    ),
    Fault(
        f"{RUNTIME}/scope.py",
        f"{UNIT}/test_scope.py::test_the_value_before_a_block_holds_after_it",
        "self._current.reset(token)",
        "self._current.set(None)",
    ),
    Fault(
        f"{RUNTIME}/context.py",
        f"{UNIT}/test_gdn_binding.py::test_binding_replaces_one_field_and_restores",
        "STEP.entered(replace(outer, gdn=binding))",
        "STEP.entered(StepContext(gdn=binding))",
    ),
    Fault(
        f"{RUNTIME}/context.py",
        f"{UNIT}/test_gdn_binding.py::test_an_inner_step_does_not_see_outer_metadata",
        "STEP.entered(StepContext(plan))",
        "STEP.entered(replace(STEP.current() or StepContext(), plan=plan))",
    ),
    Fault(
        f"{RUNTIME}/step.py",
        f"{UNIT}/test_step.py::test_ranks_agree",
        "physical = tuple(max(1, count) for count in across)",
        "physical = tuple(max(1, count) if place == rank else count for place, count in enumerate(across))",
    ),
    Fault(
        f"{RUNTIME}/step.py",
        f"{UNIT}/test_step.py::test_decoding_is_uniform_only_if_nobody_does_anything_else",
        "return self.global_mode is StepMode.DECODE",
        "return self.mode is StepMode.DECODE",
    ),
    Fault(
        f"{RUNTIME}/step.py",
        f"{UNIT}/test_step.py::test_the_graph_holds_the_largest_rank",
        "_smallest_that_holds(max(physical), captured)",
        "_smallest_that_holds(physical[rank], captured)",
    ),
    Fault(
        f"{RUNTIME}/step.py",
        f"{UNIT}/test_step.py::test_every_rank_runs_rows",
        "return rows.narrow(dim, 0, self.logical_tokens)",
        "return rows",
    ),
    Fault(
        f"{RUNTIME}/step.py",
        f"{UNIT}/test_step.py::test_tokens_are_the_last_dimension_of_positions",
        "return positions.shape[-1]",
        "return positions.shape[0]",
    ),
    Fault(
        f"{RUNTIME}/idle.py",
        f"{UNIT}/test_idle.py::test_inputs",
        "device = fallback.device if given is None else given.device",
        "device = fallback.device",
    ),
    Fault(
        f"{RUNTIME}/idle.py",
        f"{UNIT}/test_idle.py::test_inputs",
        "positions=one_row(positions, dim=-1)",
        "positions=one_row(positions)",
    ),
    Fault(
        f"{RUNTIME}/idle.py",
        f"{UNIT}/test_idle.py::test_fields",
        '"state_slots": reserved.state',
        '"state_slots": reserved.request',
    ),
    Fault(
        f"{RUNTIME}/gdn.py",
        f"{UNIT}/test_gdn_binding.py::test_prefills_begin_behind_the_others",
        "return starts - self.rows_before_prefills if self.rows_before_prefills else starts",
        "return starts",
    ),
    Fault(
        f"{MODELS}/attention.py",
        f"{TESTS}/test_decoders.py::test_ragged_prefill",
        "output = output * gate.sigmoid()",
        "output = output * gate.tanh()",
    ),
    Fault(
        f"{MODELS}/rotary.py",
        f"{TESTS}/test_rotary.py::test_positions_in_three_dimensions",
        "index % 3 if index % 3 and index < 3 * shape.sections[index % 3] else 0",
        "index % 3 if index < 3 * shape.sections[0] else 0",
    ),
    Fault(
        f"{MODELS}/gated_delta_net.py",
        f"{TESTS}/test_decoders.py::test_ragged_prefill",
        "b, a = self.in_proj_ba(hidden)",
        "a, b = self.in_proj_ba(hidden)",
    ),
    Fault(
        f"{MODELS}/gdn_core.py",
        f"{TESTS}/test_decoders.py::test_decodes_beside_prefills",
        "has_initial_state=binding.has_initial_state[first:]",
        "has_initial_state=torch.ones_like(binding.has_initial_state[first:])",
    ),
    Fault(
        f"{MODELS}/gdn_core.py",
        f"{TESTS}/test_decoders.py::test_padding_changes_nothing",
        "    elif done < rows:\n        pieces.append(mixed.new_zeros(rows - done, heads, size))\n",
        "",
    ),
    Fault(
        f"{MODELS}/gdn_draft.py",
        f"{TESTS}/test_drafts.py::test_each_token_leaves_its_state",
        "rows[:, None].long() * draft_temporal.shape[1]",
        "torch.arange(len(rows))[:, None] * draft_temporal.shape[1]",
    ),
    Fault(
        f"{MODELS}/gdn_draft.py",
        f"{TESTS}/test_drafts.py::test_verification",
        "rows[:, None].long() * draft_temporal.shape[1]",
        "rows[:, None].long() * (drafted - 1)",
    ),
    Fault(
        f"{MODELS}/gdn_draft.py",
        f"{TESTS}/test_drafts.py::test_verification",
        "inputs[:, :, drafted - 1 :] = ",
        "inputs[:, :, :past] = ",
    ),
    Fault(
        f"{MODELS}/gdn_draft.py",
        f"{TESTS}/test_drafts.py::test_padding_among_drafts",
        "slots=torch.where(real[:, None], pool_slots, -1)",
        "slots=pool_slots",
    ),
    Fault(
        f"{MODELS}/mlp.py",
        f"{TESTS}/test_decoders.py::test_ragged_prefill",
        "            if self.shared_gated:\n",
        "            if False:\n",
    ),
    Fault(
        f"{MODELS}/decoder.py",
        f"{TESTS}/test_stages.py::test_stages",
        "            return carried\n",
        "            return carried.hidden, None\n",
    ),
    Fault(
        f"{MODELS}/decoder.py",
        f"{TESTS}/test_stages.py::test_deepstack",
        "hidden = hidden + added",
        "pass",
    ),
    Fault(
        f"{MODELS}/decoder.py",
        f"{TESTS}/test_decoders.py::test_captured_streams",
        "captured.append(self.exchange.capture(stream))",
        "captured.append(self.exchange.capture(hidden))",
    ),
    Fault(
        f"{MODELS}/weights.py",
        f"{TESTS}/test_weights.py::test_packed_projections",
        "by_head = tensor.unflatten(0, (heads, rows // heads))",
        "by_head = tensor.unflatten(0, (rows // heads, heads)).transpose(0, 1)",
    ),
    Fault(
        f"{MODELS}/weights.py",
        f"{TESTS}/test_stages.py::test_stages",
        'return stage.first if name.startswith("embed_tokens") else stage.last',
        "return stage.last",
    ),
    Fault(
        f"{MODELS}/decoder.py",
        f"{LOGITS}[llama_tied]",
        "self.norm = RmsNorm(config.hidden, config.eps, gemma=config.gemma)",
        "self.norm = RmsNorm(config.hidden, config.eps, gemma=True)",
    ),
    Fault(f"{MODELS}/attention.py", f"{LOGITS}[qwen3_tied]", "if self.normed else None", "if False else None"),
    Fault(
        f"{MODELS}/rotary.py",
        f"{LOGITS}[qwen3_tied]",
        "angle.cos()[:, None] * self.length, angle.sin()[:, None] * self.length",
        "angle.cos()[:, None], angle.sin()[:, None]",
    ),
    Fault(
        f"{MODELS}/rotary.py",
        f"{TESTS}/test_rotary.py::test_scaled_frequencies",
        "kept = ((turns - few) / (many - few)).clamp(0, 1)",
        "kept = (turns / many).clamp(0, 1)",
    ),
    Fault(
        f"{MODELS}/rotary.py",
        f"{TESTS}/test_rotary.py::test_scaled_frequencies",
        "last = min(math.ceil(place",
        "last = min(math.floor(place",
    ),
    Fault(
        f"{MODELS}/qwen3_moe.py",
        f"{LOGITS}[qwen3_moe_plain]",
        "renormalise=hf.norm_topk_prob",
        "renormalise=True",
    ),
    Fault(
        f"{MODELS}/config.py",
        f"{TESTS}/test_weights.py::test_layers_without_experts",
        "layer not in dense and ",
        "",
    ),
    Fault(
        f"{MODELS}/weights.py",
        f"{TESTS}/test_weights.py::test_fused_names_are_those_that_the_checkpoint_has",
        "[name] if packed and",
        "[name] if not packed and",
    ),
    Fault(
        f"{MODELS}/mlp.py",
        f"{TESTS}/test_weights.py::test_layers_are_called_what_the_checkpoint_calls_them",
        '"shared_expert" if config.shared_gated else "shared_experts"',
        '"shared_expert"',
    ),
    Fault(
        f"{MODELS}/deepseek_v3.py",
        f"{TESTS}/test_weights.py::test_experts_that_stand_in_no_groups",
        "groups=hf.n_group or 1",
        "groups=hf.n_group",
    ),
    Fault(
        f"{MODELS}/loading.py",
        f"{TESTS}/test_loading.py::test_a_scale_is_that_of_its_block",
        "whole = whole.repeat_interleave(size // count, dimension)",
        "whole = torch.cat([whole] * (size // count), dimension)",
    ),
    Fault(
        f"{MODELS}/loading.py",
        f"{TESTS}/test_loading.py::test_a_quantised_weight_without_its_scale",
        "    if waiting:\n",
        "    if False:\n",
    ),
    Fault(
        f"{MODELS}/loading.py",
        f"{TESTS}/test_loading.py::test_biases_of_zeros_may_be_there_and_others_must_have_a_place",
        " or piece.tensor.any()",
        "",
    ),
    Fault(
        f"{MODELS}/quantised.py",
        f"{TESTS}/test_quantised.py::test_formats_are_served_where_that_was_shown",
        "if not where.experts and config.experts is not None:",
        "if False:",
    ),
    Fault(
        f"{MODELS}/quantised.py",
        f"{TESTS}/test_quantised.py::test_formats_are_served_where_that_was_shown",
        "where is None or method not in where.methods",
        "where is None",
    ),
    Fault(
        f"{MODELS}/quantised.py",
        f"{TESTS}/test_quantised.py::test_others_are_refused_by_name",
        "if found != value and not (optional and not found):",
        "if found and found != value:",
    ),
    Fault(f"{MODELS}/config.py", REFUSED, "    if given.keys() - needed - allowed - more:\n", "    if False:\n"),
    Fault(f"{MODELS}/config.py", REFUSED, "        if found not in (usual, None):\n", "        if False:\n"),
    Fault(
        "atom_patches/core/overlay.py",
        f"{UNIT}/test_registry.py::test_what_was_asked_for_and_is_not_served_is_stock_and_one_warning",
        "        self._tell_unserved(verdicts)\n",
        "",
    ),
    Fault(f"{MODELS}/choice.py", ASKED, "    if required and not verdict.ok:\n", "    if False:\n"),
    Fault(f"{MODELS}/choice.py", ASKED, '    if impl not in ("auto", IMPL):\n', "    if False:\n"),
    Fault(f"{MODELS}/choice.py", ASKED, "    if family not in families:\n", "    if False:\n"),
    Fault(f"{MODELS}/choice.py", ASKED, "{'; '.join(found)}\", asked=True)", "{'; '.join(found)}\")"),
    Fault(
        f"{SGLANG}/models/_config.py",
        ASKED,
        'family not in HYBRIDS or algorithm == "STANDALONE"',
        "family not in HYBRIDS",
    ),
    Fault(f"{SGLANG}/models/_config.py", ASKED, "    if reason is not None:\n        yield reason\n", ""),
    Fault(f"{SGLANG}/models/_config.py", ASKED, " or model.quantization", ""),
    Fault(f"{SGLANG}/models/_config.py", ASKED, "config.cpu_offload_gb > 0 or ", ""),
    Fault(f"{MODELS}/choice.py", ASKED, 'no ATOM decoder", asked=True)', 'no ATOM decoder")'),
    Fault(f"{MODELS}/families.py", ASKED, "except (AttributeError, LookupError, TypeError)", "except AttributeError"),
    Fault(f"{MODELS}/deepseek_v32.py", REFUSED, "(getattr(hf, name, 1) or 1) > 1", "False"),
    Fault(
        f"{SGLANG}/models/registry.py",
        "tests/sglang/test_model_choice.py::test_the_class",
        "return CLASSES[architecture], architecture",
        "return model_class, architecture",
    ),
    # The head of a later stage is a matrix of its own, though the checkpoint has one for embedding and head.
    Fault(
        f"{SGLANG}/adapters/classes.py",
        f"{ENGINES}::test_every_answer_is_the_oracle_s[llama stages]",
        "        for _ in _tied(parameters, [(name, tensor)]):\n            pass\n",
        "",
    ),
    Fault(
        f"{SGLANG}/adapters/experts.py",
        f"{ENGINES}::test_every_answer_is_the_oracle_s[moe plain unfused]",
        "TopK(top_k=shape.chosen, renormalize=shape.renormalise,",
        "TopK(top_k=shape.chosen, renormalize=True,",
    ),
    Fault(
        f"{SGLANG}/adapters/experts.py",
        f"{ENGINES}::test_every_answer_is_the_oracle_s[moe plain tp2]",
        "renormalize=shape.renormalise, bias=bias,",
        "renormalize=True, bias=bias,",
    ),
    Fault(
        f"{SGLANG}/adapters/experts.py",
        f"{ENGINES}::test_every_answer_is_the_oracle_s[moe dp2 ep2]",
        "first = experts.moe_ep_rank * here",
        "first = 0",
    ),
    Fault(
        f"{SGLANG}/adapters/experts.py",
        f"{ENGINES}::test_experts_are_our_kernel_s_unless_that_is_switched_off[moe plain unfused]",
        '"experts" in settings.fusions() and ',
        "",
    ),
    Fault(
        f"{VLLM}/adapters/models/attention.py",
        f"{ATTENDS}[with an ATOM decoder]",
        "unflatten(1, (heads, 2, size))[:, :, 1]",
        "unflatten(1, (heads, 2, size))[:, :, 0]",
    ),
    Fault(
        f"{VLLM}/adapters/models/attention.py",
        f"{ATTENDS}[without norms]",
        '"key_cache": keys, "value_cache": values,',
        '"key_cache": values, "value_cache": keys,',
    ),
    Fault(
        f"{VLLM}/adapters/models/attention.py",
        "tests/vllm/test_atom_graph_splits.py::test_full_attention[False]",
        "        places.append(OPERATION)\n",
        "        pass\n",
    ),
    Fault(
        f"{VLLM}/adapters/models/attention.py",
        "tests/vllm/test_atom_graph_splits.py::test_full_attention[False]",
        "return (output if gates is None",
        "return (queries if gates is None",
    ),
    Fault(
        f"{VLLM}/adapters/models/attention.py",
        "tests/vllm/test_attention.py::test_the_write_to_the_cache_can_be_switched_off",
        '"kv_cache" in settings.fusions() and ',
        "",
    ),
    Fault(
        f"{VLLM}/adapters/pcp_gdn/state_slots.py",
        "tests/vllm/test_pcp_host_waits.py::test_recurrent_layers[relay-lengths0-0]",
        "tensor.index_fill_(0, slots, 0)",
        "tensor[slots] = 0",
    ),
    # What SGLang's releases do in different ways.
    Fault(f"{SGLANG}/models/_config.py", ASKED, "if is_record(config) and config.", "if False and config."),
    Fault(
        f"{SGLANG}/adapters/gdn_binding.py",
        f"{RELEASES}::test_recurrent_layers_run_the_mode_that_was_planned",
        'getattr(batch, "logical_forward_mode", batch.forward_mode)',
        "batch.forward_mode",
    ),
    Fault(
        f"{SGLANG}/adapters/classes.py",
        f"{RELEASES}::test_a_head_of_its_own_is_refused",
        "    if heads:\n",
        "    if False:\n",
    ),
    Fault(
        f"{SGLANG}/adapters/classes.py",
        f"{RELEASES}::test_a_head_of_its_own_is_refused",
        'if name.startswith("language_model."):',
        "if False:",
    ),
    Fault(f"{SGLANG}/models/_config.py", ASKED, "        if getattr(config, name, None):\n", "        if False:\n"),
    Fault(f"{SGLANG}/models/_config.py", ASKED, 'getattr(config, "enable_mis", False)', "False"),
    Fault(
        f"{SGLANG}/adapters/server_args.py", ASKED, 'getattr(config, "attn_dp_size", config.dp_size)', "config.dp_size"
    ),
    Fault(
        f"{VLLM}/adapters/models/recurrence.py",
        f"{OF_RANKS}[relay]",
        "core_attn_out[step.own_rows.stop :].zero_()",
        "pass",
    ),
    Fault(
        f"{VLLM}/adapters/models/recurrence.py",
        f"{OF_RANKS}[head_all_to_all]",
        "heads * value_size) // (2 * key_size)",
        "heads * value_size) // key_size",
    ),
    Fault(
        f"{VLLM}/adapters/models/experts.py",
        "tests/vllm/test_atom_models_pcp.py::test_vllm_s_kernels_run_experts_that_rows_travel_to",
        "dp_size == experts.moe_parallel_config.pcp_size == 1",
        "dp_size == 1",
    ),
    Fault(
        f"{SGLANG}/models/prefill_graphs.py",
        f"{RELEASES}::test_no_prefill_is_captured",
        "        turn_off(model_runner)\n",
        "",
    ),
    Fault(
        f"{MODELS}/latent_attention.py",
        f"{LOGITS}[deepseek_v3]",
        "self.kv_a_layernorm.alone(latents)",
        "latents",
    ),
    Fault(
        f"{MODELS}/latent_attention.py", f"{LOGITS}[deepseek_v32]", "None if self.indexer is None else ", "None and "
    ),
    Fault(
        f"{MODELS}/deepseek_v3.py",
        f"{LOGITS}[deepseek_v3]",
        'scaling["mscale_all_dim"]) ** 2',
        'scaling["mscale_all_dim"])',
    ),
    Fault(f"{MODELS}/mlp.py", f"{LOGITS}[deepseek_v3]", "routed, alpha=self.scale)", "routed)"),
    Fault(
        f"{MODELS}/rotary.py", f"{LOGITS}[deepseek_v3]", '    if scaling.get("mscale_all_dim"):\n', "    if False:\n"
    ),
    Fault(f"{SGLANG}/models/_config.py", ASKED, "    yield from _latents(config, family)\n", ""),
    Fault(
        f"{SGLANG}/adapters/latent.py",
        "tests/sglang/test_atom_models_sparse.py::test_every_answer_is_the_oracle_s[tp2]",
        "{} if selected is None else {",
        "{} if selected is not None else {",
    ),
    Fault(
        f"{MODELS}/choice.py",
        f"{CHOICE}_is_served_where_it_is_asked_for",
        " if architecture in served else None",
        "",
    ),
    Fault(
        f"{VLLM}/models/_config.py",
        LEFT,
        "    if parallel.decode_context_parallel_size != 1:\n",
        "    if parallel.decode_context_parallel_size > 2:\n",
    ),
    Fault(
        f"{VLLM}/models/_config.py",
        LEFT,
        "    if reason is not None:\n        yield reason\n",
        "",
    ),
    Fault(
        f"{VLLM}/bootstrap/model_config.py",
        "tests/unit/test_vllm_models_config.py::test_an_implementation_that_is_required_and_switched_off_is_an_error",
        "if self.model_impl == IMPL:",
        "if not self.model_impl:",
    ),
    Fault(
        f"{SGLANG}/bootstrap/server_args.py",
        "tests/sglang/test_model_choice.py::test_what_is_required_and_cannot_be_had_is_an_error",
        "if str(self.model_impl).lower() == IMPL:",
        "if not self.model_impl:",
    ),
    Fault(
        "atom_patches/core/conditions.py",
        "tests/unit/test_vllm_models_config.py::test_an_implementation_that_is_required_and_switched_off_is_an_error",
        'settings.feature(group) == "0"',
        'settings.feature(group) == "1"',
    ),
    Fault(
        f"{VLLM}/adapters/models/parts.py",
        f"{VLLM_ENGINES}::test_every_answer_is_the_oracle_s[qwen3_next]",
        "        self.quant_method = None\n",
        "",
    ),
    Fault(
        f"{MODELS}/few_rows.py",
        f"{TESTS}/test_few_rows.py::test_layers_that_stay_as_they_are",
        " and given.bias is None",
        "",
    ),
    Fault(
        f"{MODELS}/few_rows.py",
        f"{TESTS}/test_few_rows.py::test_layers_that_stay_as_they_are",
        "type(given.quant_method) is own",
        "isinstance(given.quant_method, own)",
    ),
    Fault(
        f"{MODELS}/few_rows.py",
        f"{TESTS}/test_few_rows.py::test_layers_that_stay_as_they_are",
        "return half and on_nvidia",
        "return on_nvidia",
    ),
    Fault(
        f"{MODELS}/few_rows.py",
        f"{TESTS}/test_few_rows.py::test_a_shape_that_was_not_measured_and_another_platform",
        " and tuple(weight.shape) in MEASURED",
        "",
    ),
    Fault(
        f"{MODELS}/few_rows.py",
        f"{TESTS}/test_few_rows.py::test_a_shape_that_was_not_measured_and_another_platform",
        " and on_nvidia(weight)",
        "",
    ),
    Fault(
        f"{MODELS}/few_rows.py",
        f"{TESTS}/test_few_rows.py::test_it_can_be_switched_off",
        '"linear" in settings.fusions() and ',
        "",
    ),
    Fault(
        f"{MODELS}/few_rows.py",
        f"{TESTS}/test_few_rows.py::test_what_was_measured",
        "persistent=False",
        "persistent=True",
    ),
    Fault(
        f"{MODELS}/few_rows.py",
        f"{TESTS}/test_few_rows.py::test_what_was_measured",
        "if wanted(weight) else linear",
        "if False else linear",
    ),
    Fault(
        f"{MODELS}/few_rows.py",
        f"{TESTS}/test_few_rows.py::test_what_was_measured",
        "== COUNTERS for",
        "!= COUNTERS for",
    ),
    Fault(
        f"{VLLM}/adapters/models/products.py",
        f"{PRODUCTS}::test_who_runs_for_how_many_rows",
        "if x.shape[0] <= MOST_ROWS:",
        "if x.shape[0] <= MOST_ROWS + 1:",
    ),
    Fault(
        f"{VLLM}/adapters/models/products.py",
        f"{PRODUCTS}::test_who_runs_for_how_many_rows[1-Routed]",
        "product_of(weight, torch.ops.atom_patches.few_rows)",
        "product_of(weight, lambda x, weight, arrived: nn.functional.linear(x, weight))",
    ),
    Fault(
        f"{VLLM}/adapters/models/parts.py",
        f"{VLLM_ENGINES}::test_linear_layers_take_our_product_of_few_rows",
        """bias=bias,
            quant_config=self._quant_config, prefix=prefix, return_bias=False,
        )  # fmt: skip
        return with_few_rows(layer)""",
        """bias=bias,
            quant_config=self._quant_config, prefix=prefix, return_bias=False,
        )  # fmt: skip
        return layer""",
    ),
    Fault(
        f"{MODELS}/mlp.py",
        f"{TESTS}/test_router.py::test_scores_are_the_engine_s_product",
        "parts.product(self.weight)",
        "nn.functional.linear",
    ),
    Fault(
        f"{MODELS}/mlp.py",
        f"{TESTS}/test_router.py::test_with_a_bias_they_are_in_float32",
        "linear_in_float32 if shape.biased else parts",
        "parts",
    ),
    Fault(
        f"{SGLANG}/adapters/products.py",
        f"{SGLANG_PRODUCTS}::test_who_runs_for_how_many_rows",
        "if bias is not None or x.shape[0] > MOST_ROWS:",
        "if bias is not None or x.shape[0] > MOST_ROWS + 1:",
    ),
    Fault(
        f"{SGLANG}/adapters/products.py",
        f"{SGLANG_PRODUCTS}::test_who_runs_for_how_many_rows",
        "    if x.shape[0] > MOST_ROWS:\n        return nn",
        "    if x.shape[0] >= MOST_ROWS:\n        return nn",
    ),
    Fault(
        f"{SGLANG}/adapters/products.py",
        f"{SGLANG_PRODUCTS}::test_a_bias_is_added_by_sglang_s_product",
        "if bias is not None or x",
        "if x",
    ),
    Fault(
        f"{SGLANG}/kernels/linear.py",
        f"{SGLANG_PRODUCTS}::test_sglang_s_own_product_behind_the_operation",
        "if x.numel() == 0",
        "if x.numel() < 0",
    ),
    Fault(
        f"{VLLM}/adapters/models/parts.py",
        f"{VLLM_ENGINES}::test_linear_layers_take_our_product_of_few_rows",
        "return product_of(weight)",
        "return nn.functional.linear",
    ),
    Fault(
        f"{SGLANG}/adapters/parts.py",
        f"{ENGINES}::{OURS_OF_FEW_ROWS}",
        "return with_few_rows(layer) if quantised else layer",
        "return layer",
    ),
    Fault(
        f"{SGLANG}/adapters/parts.py",
        f"{ENGINES}::{OURS_OF_FEW_ROWS}",
        """**spread_over(_ranks("attention")),
        )  # fmt: skip
        return with_few_rows(layer)""",
        """**spread_over(_ranks("attention")),
        )  # fmt: skip
        return layer""",
    ),
    Fault(
        f"{SGLANG}/adapters/parts.py",
        f"{ENGINES}::{OURS_OF_FEW_ROWS}",
        """**spread_over(_ranks(group)),
        )  # fmt: skip
        return with_few_rows(layer)""",
        """**spread_over(_ranks(group)),
        )  # fmt: skip
        return layer""",
    ),
    Fault(
        f"{SGLANG}/adapters/parts.py",
        f"{ENGINES}::{OURS_OF_FEW_ROWS}",
        "return product_of(weight)",
        "return torch.nn.functional.linear",
    ),
    # A checkpoint lists what it leaves unquantised under its own names, not under those of layers that run several.
    Fault(
        f"{VLLM}/adapters/models/classes.py",
        f"{QUANTISED}::test_every_answer_is_the_oracle_s[qwen3_next+fp8]",
        "packed_modules_mapping = fused_names(packed=True)",
        "packed_modules_mapping = fused_names(packed=False)",
    ),
    Fault(
        f"{VLLM}/adapters/models/experts.py",
        f"{QUANTISED}::test_a_quantised_shared_expert_runs_on_its_own",
        "if self.own and plain:",
        "if self.own:",
    ),
    Fault(
        f"{VLLM}/adapters/models/latent.py",
        f"{VLLM_ENGINES}::test_every_answer_is_the_oracle_s[deepseek_v3_groups]",
        "torch.cat([queries, turned], dim=2)",
        "torch.cat([turned, queries], dim=2)",
    ),
    Fault(
        f"{VLLM}/adapters/models/rotary.py",
        f"{VLLM_ENGINES}::test_every_answer_is_the_oracle_s[deepseek_v3_groups]",
        "is_neox_style=not shape.interleaved",
        "is_neox_style=True",
    ),
    Fault(
        f"{VLLM}/adapters/models/experts.py",
        f"{VLLM_ENGINES}::test_every_answer_is_the_oracle_s[deepseek_v3_groups]",
        '"topk_group": shape.chosen_groups}',
        '"topk_group": shape.groups}',
    ),
    Fault(
        f"{VLLM}/adapters/models/experts.py",
        f"{VLLM_ENGINES}::test_ranks_that_share_each_layer[deepseek_v3_groups]",
        "topk_group=shape.chosen_groups,",
        "topk_group=shape.groups,",
    ),
    Fault(
        f"{VLLM}/adapters/models/experts.py",
        f"{VLLM_ENGINES}::test_ranks_that_share_each_layer[deepseek_v3_groups]",
        "bias=bias, n_group",
        "bias=bias if bias is None else bias * 0, n_group",
    ),
    Fault(
        f"{VLLM}/adapters/models/parts.py",
        f"{VLLM_ENGINES}::test_ranks_that_share_each_layer[deepseek_v3_groups]",
        '        if group == "whole":\n',
        "        if False:\n",
    ),
    Fault(
        f"{VLLM}/adapters/models/indexer.py",
        f"{VLLM_ENGINES}::test_every_answer_is_the_oracle_s[deepseek_v32]",
        "interleaved=shape.interleaved",
        "interleaved=True",
    ),
    Fault(
        f"{MODELS}/loading.py",
        f"{VLLM_ENGINES}::test_every_answer_is_the_oracle_s[deepseek_v32]",
        "    if name not in stacked:\n",
        "    if True:\n",
    ),
    Fault(
        f"{VLLM}/models/_config.py",
        "tests/unit/test_vllm_models_config.py::test_a_cache_of_keys_and_values_is_stock_s",
        "not config.model_config.use_mla",
        "False",
    ),
    Fault(
        f"{VLLM}/adapters/models/exchange.py",
        f"{VLLM_ENGINES}::test_every_answer_is_the_oracle_s[llama_tied]",
        "return self._post_norm.of_sum(partial, residual)",
        "return self._post_norm.alone(partial), residual",
    ),
    Fault(
        f"{VLLM}/adapters/models/experts.py",
        f"{VLLM_ENGINES}::test_ranks_that_share_each_layer[qwen3_moe]",
        "expert_map=experts._expert_map",
        "expert_map=None",
    ),
    Fault(
        f"{VLLM}/adapters/models/experts.py",
        f"{VLLM_ENGINES}::test_our_kernel_takes_the_shared_expert_along",
        "            self._shared = (shared, gate)\n",
        "            pass\n",
    ),
    # Attention on this package's kernel.
    Fault(ATTENTION, STEP, "window=self.window", "window=None"),
    Fault(ATTENTION, STEP, "soft_cap=self.soft_cap", "soft_cap=0.0"),
    Fault(ATTENTION, STEP, "(slot_mapping >= 0)", "(slot_mapping > -2)"),
    Fault(ATTENTION, STEP, "_store(values, value, slot_mapping)", "_store(values, key, slot_mapping)"),
    Fault(
        ATTENTION,
        "tests/vllm/test_attention.py::test_a_graph_s_work_is_cut_for_the_longest_request",
        "metadata.max_seq_len = self.longest",
        "pass",
    ),
    Fault(ATTENTION, "tests/vllm/test_attention.py::test_other_layers_are_left_to_vllm", '"use_mla", "has_sink", ', ""),
    Fault(f"{VLLM}/attention/_config.py", ATTENTION_LEFT, "        if size != 1:\n", "        if size > 2:\n"),
    Fault(f"{VLLM}/attention/_config.py", ATTENTION_LEFT, "not in CACHES:", "is None:"),
    Fault(f"{VLLM}/attention/_config.py", ATTENTION_LEFT, "    if model.is_hybrid:\n", "    if False:\n"),
    # Attention to latents on them.
    Fault(
        "atom_patches/sglang/adapters/language_model.py",
        "tests/sglang/test_atom_models.py::test_every_answer_is_the_oracle_s[vision stages]",
        'return getattr(self.decoder, "embed_tokens", None)',
        "return self.embed_tokens",
    ),
    Fault(LATENT_ATTENTION, LATENT_STEP, "causal=piece.causal", "causal=False"),
    Fault(
        LATENT_ATTENTION,
        LATENT_STEP,
        "merge_attention(whole[rows], total[rows], found, lse)",
        "merge_attention(whole[rows], lse, found, lse)",
    ),
    Fault(LATENT_ATTENTION, LATENT_STEP, "            total[rows] = lse\n", ""),
    Fault(LATENT_ATTENTION, LATENT_STEP, "moved - start if start else moved", "moved"),
    Fault(
        LATENT_ATTENTION,
        f"{OF_LATENTS}::test_a_graph_s_work_is_cut_for_the_longest_request_and_reads_where_vllm_writes",
        "self._built(common_attn_metadata, self.longest)",
        "self.build(0, common_attn_metadata)",
    ),
    Fault(
        LATENT_ATTENTION,
        f"{OF_LATENTS}::test_a_piece_has_room_in_what_vllm_s_layer_measures",
        "(_measured(config, sizes) - results) // each",
        "_measured(config, sizes) // each",
    ),
    Fault(
        LATENT_ATTENTION,
        f"{OF_LATENTS}::test_other_layers_are_left_to_others",
        '("use_sparse", "has_sink",',
        '("has_sink",',
    ),
    Fault(LATENT_PIECES, LATENT_STEP, "first[owner] + place, -1", "first[owner] + place + 1, -1"),
    Fault(LATENT_PIECES, LATENT_STEP, "torch.where(place < counts[owner], ", "torch.where(place >= 0, "),
    Fault(
        LATENT_PIECES,
        f"{OF_LATENTS}::test_what_is_cached_comes_in_pieces_and_of_many_requests_together",
        "portion.pages <= free",
        "portion.pages < free",
    ),
    Fault(
        LATENT_PIECES,
        f"{OF_LATENTS}::test_the_host_waits_for_nothing",
        "most_keys=max(one.last - one.first for one in portions)",
        "most_keys=int(lengths_.max())",
    ),
    Fault(
        LATENT_PIECES,
        f"{OF_LATENTS}::test_a_chunk_that_is_longer_than_a_piece_sees_all_of_itself",
        "range(room, new, room)",
        "range(new, new)",
    ),
    Fault(
        LATENT_PIECES,
        f"{OF_LATENTS}::test_requests_without_a_past_stand_between_others_without_a_piece_of_their_own",
        "        while not piece[-1].pages:\n            piece.pop()\n",
        "        pass\n",
    ),
    Fault(
        f"{VLLM}/adapters/packed_weights.py",
        "tests/vllm/test_packed_weights.py::test_of_a_layer_that_has_been_packed",
        "packed.T.contiguous()",
        "packed.contiguous()",
    ),
    Fault(
        f"{VLLM}/cpu/_conditions.py",
        f"{UNIT}/test_vllm_attention_config.py"
        "::test_what_the_cpu_platform_lacks_for_latents_is_put_in_where_they_are_attended_to",
        "    if not config.model_config.use_mla:\n",
        "    if False:\n",
    ),
)
