"""Seeded faults in the runtime of a step and in the decoders; `tools/mutants.py` makes each and runs its test."""

from __future__ import annotations

from kernel_mutants import Fault

RUNTIME = "atom_patches/runtime"
MODELS = "atom_patches/models"
UNIT = "tests/unit"
TESTS = "tests/models"

FAULTS = (
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
        "self.shared_expert(x) * self.shared_expert_gate(x).sigmoid()",
        "self.shared_expert(x)",
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
)
