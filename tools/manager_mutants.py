"""Seeded faults of prefill context parallelism on vLLM's second model runner; `tools/mutants.py` runs them.

The tests run in the environment of the release that has the manager.
"""

from __future__ import annotations

from kernel_mutants import Fault

LANE = "vllm-0.32.0"
GROUP = "atom_patches/vllm/pcp_manager"
MANAGER = "atom_patches/vllm/adapters/pcp_manager.py"
ENGINES = "tests/vllm/test_pcp_manager.py::test_two_ranks"
ROWS = "tests/vllm/test_pcp_manager_rows.py"
CONFIG = "tests/unit/test_pcp_manager_config.py"
BROADCAST = "tests/vllm/test_pcp_broadcast.py"

FAULTS = (
    # A rank's positions are those of the step's first rows.
    Fault(MANAGER, ROWS, "positions=whole.positions[step.local_rows]", "positions=whole.positions[:rows]"),
    # What is sampled from is this rank's rows.
    Fault(MANAGER, ROWS, "hidden_states = self._step.gather(hidden_states)", "pass"),
    # The runner prepares a step of as many rows as a rank would have without padding.
    Fault(MANAGER, ROWS, "plan is None else plan.rows_per_rank", "plan is None else sum(lengths)"),
    Fault(MANAGER, ROWS, "assert batch_desc.cg_mode == CUDAGraphMode.NONE", "assert True"),
    # The runner of a release that makes the manager before its caches is given a manager without any.
    Fault(
        MANAGER,
        f"{ROWS}::test_caches_are_addressed_as_without_a_split_and_may_come_after_the_manager",
        'and hands it their tables later."""\n        self._block_tables = block_tables',
        'and hands it their tables later."""',
    ),
    # A step without requests goes to buffers that this manager does not have.
    Fault(
        MANAGER,
        f"{ROWS}::test_a_step_without_requests_stays_in_the_runners_buffers",
        "    prepare_inputs_for_capture_or_profile = prepare_inputs_to_capture\n",
        "",
    ),
    # Attention reads caches by the slots and tables of this rank's requests.
    Fault(f"{GROUP}/cpu_attention.py", f"{ENGINES}[qwen3]", "return gather_before_write(original)", "return original"),
    Fault(f"{GROUP}/gated_delta_net.py", f"{ENGINES}[qwen3_5 relay]", "if step is None:", "if True:"),
    Fault(
        f"{GROUP}/model_inputs.py",
        f"{ENGINES}[qwen3_5 relay]",
        "input_batch.step.take(rows, dim=-1)",
        "rows[..., : input_batch.num_tokens]",
    ),
    # A rank goes on with the ids that it sampled itself.
    Fault(
        f"{GROUP}/sampled_ids.py",
        BROADCAST,
        "broadcast(get_pcp_group(), output.sampled_token_ids.contiguous(), src=0)",
        "output.sampled_token_ids",
    ),
    Fault(f"{GROUP}/_config.py", CONFIG, "    if not model.enforce_eager:", "    if False:"),
    Fault(f"{GROUP}/_config.py", CONFIG, "model.is_hybrid and cache.enable_prefix_caching", "False"),
    Fault(f"{GROUP}/_config.py", CONFIG, "    if config.model_config.use_mla:", "    if False:"),
)
