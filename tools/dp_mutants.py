"""Seeded faults of data-parallel steps on SGLang; `tools/mutants.py` makes each and runs the test that finds it.

In the order of the faults that were seen in the field, then some of the reference plugin's.
"""

from __future__ import annotations

from kernel_mutants import Fault

ADAPTERS = "atom_patches/sglang/adapters"
RUNTIME = "atom_patches/runtime"
FUZZED = "tests/sglang/test_fuzz_dp.py::test_ranks_enter_the_same_collectives[2 ranks]"
THREE = "tests/sglang/test_fuzz_dp.py::test_ranks_enter_the_same_collectives[3 ranks, experts dealt]"
SNAPSHOTS = "tests/sglang/test_recurrence.py"
ASKED = "tests/unit/test_sglang_models_config.py"

FAULTS = (
    # An idle rank hands zero rows to its decoder.
    Fault(
        f"{ADAPTERS}/forward_step.py",
        FUZZED,
        "    if plan.needs_dummy:\n        carried",
        "    if False:\n        carried",
    ),
    # Its batch does not agree with the row that it runs.
    Fault(
        f"{ADAPTERS}/idle_rows.py",
        FUZZED,
        "    if plan.needs_dummy:\n        changed",
        "    if False:\n        changed",
    ),
    # The row is written where requests read.
    Fault(f"{ADAPTERS}/idle_rows.py", FUZZED, "request=0, cache=0, state=-1", "request=1, cache=1, state=1"),
    # Each rank makes the vector of all ranks' rows for itself.
    Fault(
        f"{RUNTIME}/step.py",
        FUZZED,
        "physical = tuple(max(1, count) for count in across)",
        "physical = tuple(max(1, count) if other == rank else count for other, count in enumerate(across))",
    ),
    # SGLang's exchanges do not hear of the row.
    Fault(
        f"{ADAPTERS}/idle_rows.py",
        FUZZED,
        "    if not _counts_change(batch, plan):\n        yield",
        "    if True:\n        yield",
    ),
    # The binder asks all ranks, on ranks with recurrent metadata only.
    Fault(
        f"{ADAPTERS}/gdn_binding.py",
        FUZZED,
        "    planned = backend.forward_metadata\n",
        "    planned = backend.forward_metadata\n    torch.distributed.all_reduce(torch.ones(1))\n",
    ),
    # A rank that decodes beside one that prefills believes that all decode.
    Fault(f"{ADAPTERS}/step_plan.py", FUZZED, "    if batch.is_extend_in_batch:\n", "    if False:\n"),
    # The row leaves the decoder.
    Fault(
        f"{ADAPTERS}/forward_step.py",
        FUZZED,
        "    if not plan.needs_dummy:\n        return output",
        "    if True:\n        return output",
    ),
    # A scope outlives its step.
    Fault(
        f"{RUNTIME}/scope.py",
        FUZZED,
        "        finally:\n            self._current.reset(token)",
        "        finally:\n            pass",
    ),
    # An idle rank binds the recurrent metadata of an earlier step.
    Fault(f"{ADAPTERS}/gdn_binding.py", FUZZED, "    if mode.is_idle():\n", "    if False:\n"),
    # A draft's rows count as a prompt's.
    Fault(f"{ADAPTERS}/gdn_binding.py", FUZZED, "    if mode.is_target_verify():\n", "    if False:\n"),
    # An idle rank is told to verify nothing.
    Fault(
        f"{ADAPTERS}/step_plan.py",
        THREE,
        "MODES[batch.forward_mode] if rows else StepMode.IDLE",
        "MODES[batch.forward_mode]",
    ),
    # What lies behind a snapshot begins without the state before it.
    Fault(
        f"{ADAPTERS}/recurrence.py",
        SNAPSHOTS,
        "binding.has_initial_state | (rows > 0)",
        "binding.has_initial_state",
    ),
    # A snapshot is taken where the rows end instead of the last whole chunk.
    Fault(f"{ADAPTERS}/recurrence.py", SNAPSHOTS, "wanted // chunk * chunk", "wanted"),
    # Padding's states go to the pool's last slot, which may be a snapshot's.
    Fault(
        f"{ADAPTERS}/recurrence.py",
        SNAPSHOTS,
        "binding.slots.clamp(min=RESERVED_SLOT)",
        "binding.slots",
    ),
    # States are copied whether SGLang wants a snapshot or not.
    Fault(
        f"{ADAPTERS}/recurrence.py",
        SNAPSHOTS,
        "torch.where(batch.mamba_track_mask[:count], batch.mamba_track_indices[:count], own)",
        "batch.mamba_track_indices[:count]",
    ),
    # The host waits for a prefill in every recurrent layer, to learn of which sequences a snapshot is wanted.
    Fault(
        f"{ADAPTERS}/recurrence.py",
        f"{SNAPSHOTS}::test_the_host_waits_for_nothing",
        "    states.conv[kept] = states.conv[own]\n",
        "    wanted = batch.mamba_track_mask[:count]\n    states.conv[kept[wanted]] = states.conv[own[wanted]]\n",
    ),
    # An option that is not served is served.
    Fault("atom_patches/sglang/models/_config.py", ASKED, "        if (size or 1) > 1:\n", "        if False:\n"),
)
