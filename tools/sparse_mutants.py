"""Seeded faults of sparse attention on SGLang; `tools/mutants.py` makes each and runs the test that finds it."""

from __future__ import annotations

from kernel_mutants import Fault

ADAPTERS = "atom_patches/sglang/adapters/sparse_mla"
INDEXER = "atom_patches/models/lightning_indexer.py"
KERNELS = "atom_patches/kernels"
PLAN = "atom_patches/runtime/sparse_plan.py"
SELECTS = "tests/models/test_lightning_indexer.py"
PLANS = "tests/unit/test_sparse_plan.py"
STEPS = "tests/sglang/test_sparse_backend.py"
ENGINE = "tests/sglang/test_sparse_mla.py"
ORACLE = "tests/sglang/test_sparse_oracle.py::test_the_overlay_selects_the_same"

FAULTS = (
    # What is unused becomes the pool's slot 0.
    Fault(
        f"{KERNELS}/sparse_indexer/reference.py",
        f"{SELECTS}::test_what_is_unused_is_negative_and_so_is_padding",
        "return slots.masked_fill(~real, -1).int()",
        "return slots.masked_fill(~real, 0).int()",
    ),
    Fault(
        INDEXER,
        f"{SELECTS}::test_what_is_unused_is_negative_and_so_is_padding",
        "    out[selection.rows :] = -1",
        "    out[selection.rows :] = 0",
    ),
    # Whoever attends believes that used slots come first.
    Fault(
        f"{KERNELS}/mla_attention/reference.py",
        "tests/kernels/test_mla_attention.py::test_any_choice_of_tokens[triton-plain]",
        "        used = indices[some] >= 0\n",
        "        used = (indices[some] >= 0).sort(dim=1, descending=True).values\n",
    ),
    # All layers attend with what the first one selected.
    Fault(
        f"{ADAPTERS}/indexer.py",
        f"{ENGINE}::test_every_answer_is_the_oracle_s[pages of 64]",
        "        select(q, gates,",
        "        if layer_id == 0:\n            select(q, gates,",
    ),
    # Pages: the last one is forgotten; a page begins with its second token.
    Fault(PLAN, f"{PLANS}::test_pages_say_where_each_token_lies", "-(-tokens // page_size)", "tokens // page_size"),
    Fault(
        PLAN,
        f"{PLANS}::test_pages_say_where_each_token_lies",
        "slots_of[:, : pages * page_size : page_size]",
        "slots_of[:, 1 : pages * page_size + 1 : page_size]",
    ),
    # A row does not see itself.
    Fault(PLAN, f"{PLANS}::test_what_rows_see", "- ends[which] + rows + 1)", "- ends[which] + rows)"),
    # The second group of gathered keys is read as if the first were before it.
    Fault(f"{ADAPTERS}/step.py", STEPS, "starts = begins - bounds[group.first]", "starts = begins"),
    # Padding is written where the pool keeps its spare slot.
    Fault(
        f"{ADAPTERS}/step.py",
        f"{STEPS}::test_padding_and_idle_ranks_leave_the_caches_alone",
        "return slots.masked_fill(slots == 0, -1)",
        "return slots",
    ),
    # Rows of padding count as drafts of the requests before them.
    Fault(
        f"{ADAPTERS}/step.py",
        f"{STEPS}::test_verified_rows_are_padded_to_any_number",
        "return batch.spec_info.draft_token_num",
        "return batch.input_ids.shape[0] // batch.batch_size",
    ),
    # Prefills are not captured, and schedulers believe that they are.
    Fault(
        "atom_patches/sglang/adapters/prefill_graphs.py",
        f"{STEPS}::test_no_prefill_is_captured_and_schedulers_know",
        'prefill.backend = "disabled"',
        'decode.backend = "disabled"',
    ),
    # Rotary pairs of neighbours, which are the attention's, in the indexer.
    Fault(
        f"{ADAPTERS}/indexer.py",
        f"{ENGINE}::test_every_answer_is_the_oracle_s[pages of 64]",
        "index_topk, not is_neox_style)",
        "index_topk, is_neox_style)",
    ),
    # Keys are rounded with other scales than DeepSeek's.
    Fault(INDEXER, f"{ORACLE}[64]", "power_of_two=True)", "power_of_two=False)"),
    # Long requests do not select, or short ones do.
    Fault(
        f"{ADAPTERS}/step.py",
        f"{ENGINE}::test_every_answer_is_the_oracle_s[pages of 64]",
        "        if longest <= self.top_k:\n            everything",
        "        if True:\n            everything",
    ),
    Fault(
        f"{ADAPTERS}/step.py",
        f"{ENGINE}::test_rows_select_where_there_is_more_than_they_may_see_and_only_there[pages of 64]",
        "        if longest <= self.top_k:\n            everything",
        "        if False:\n            everything",
    ),
    # A draft does not see itself; of requests done in parts, all take the first ones' lines.
    Fault(
        f"{ADAPTERS}/step.py",
        f"{STEPS}::test_several_tokens_are_verified_at_once[plain-1-False]",
        "+ _numbers(per_request, table.device) + 1)",
        "+ _numbers(per_request, table.device))",
    ),
    Fault(
        INDEXER,
        f"{SELECTS}::test_a_line_of_the_table_for_every_row",
        "return self.table[begin:end], None",
        "return self.table, None",
    ),
    # Row t of a captured step is not in line t of SGLang's table.
    Fault(
        f"{ADAPTERS}/step.py",
        f"{STEPS}::test_a_captured_step_selects_like_any[plain-1]",
        "page_table(self.slots_of, None, pages, 1), batch.req_pool_indices.int()",
        "page_table(self.slots_of, None, pages, 1), _numbers(batch.batch_size, self.slots_of.device)",
    ),
    # The last page of a step is cut off.
    Fault(
        f"{ADAPTERS}/step.py",
        f"{STEPS}::test_a_prompt_longer_than_may_be_selected_then_decoding[plain-64]",
        "        pages = pages_for(longest, self.page_size)\n",
        "        pages = longest // self.page_size\n",
    ),
    # An idle rank hands on what is no zero.
    Fault(
        f"{ADAPTERS}/backend.py",
        f"{STEPS}::test_padding_and_idle_ranks_leave_the_caches_alone[plain-1]",
        "            return torch.zeros_like(latent).flatten(1)",
        "            return torch.full_like(latent, 3.0).flatten(1)",
    ),
)
