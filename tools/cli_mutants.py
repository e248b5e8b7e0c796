"""Seeded faults of the command line, its reports and the log; `tools/mutants.py` makes each, and a test finds it."""

from __future__ import annotations

from kernel_mutants import Fault

CLI = "atom_patches/cli"
HELP = "tests/unit/test_cli_help.py"
REPORTS = "tests/unit/test_bench_report.py"
LOG = "tests/unit/test_log.py"
BENCH = "atom_patches/bench"
COMPARE = "tests/unit/test_compare.py"
ENGINES = "tests/unit/test_bench_engine.py"

FAULTS = (
    Fault(f"{CLI}/colour.py", f"{HELP}::test_colours_only_where_they_are_seen_and_wanted", "stream.isatty() and", ""),
    Fault(
        f"{CLI}/status.py",
        f"{HELP}::test_a_feature_that_stands_alike_is_one_name_and_trouble_is_named_and_red",
        "names = ids if every or COLOURS.get(state, ATTENTION) == ATTENTION else _features(ids)",
        "names = ids if every else _features(ids)",
    ),
    Fault(
        f"{CLI}/status.py",
        f"{HELP}::test_a_release_that_others_are_written_for_is_one_quiet_line",
        'if patch["state"] != State.UNSUPPORTED.value:',
        "if True:",
    ),
    Fault(
        f"{CLI}/doctor.py",
        f"{HELP}::test_a_feature_for_another_release_is_no_problem",
        "if any(gates.reviewed_version(patch, found.version).ok for patch in patches):",
        "if False:",
    ),
    Fault(
        "atom_patches/core/report.py",
        "tests/unit/test_report.py::test_a_process_with_both_engines_speaks_of_each",
        '"{report.pid}-{report.engine}.json"',
        '"{report.pid}.json"',
    ),
    Fault(
        f"{CLI}/parsing.py",
        f"{HELP}::test_a_misspelt_word_gets_the_one_that_was_meant",
        "near = settings.nearest(word, self.by_name)",
        "near = None",
    ),
    Fault(f"{CLI}/completion.py", f"{HELP}::test_completion_offers_what_fits", "*values, *patches,", "*values,"),
    Fault(
        f"{CLI}/bench_compare.py",
        f"{REPORTS}::TestCompare::test_slower_than_the_limit_fails",
        "if pair.ratio < limit:",
        "if pair.ratio < 0:",
    ),
    Fault(
        f"{CLI}/bench_compare.py",
        f"{REPORTS}::TestCompare::test_who_is_timed_no_more_fails",
        "        if case in again:",
        "        if False:",
    ),
    Fault(
        f"{CLI}/bench_report.py",
        f"{REPORTS}::TestPage::test_bars_stay_on_the_axis",
        "min(max(ratio, LOWEST), HIGHEST)",
        "ratio",
    ),
    Fault(
        f"{CLI}/bench_report.py",
        f"{REPORTS}::TestPage::test_text_is_text",
        "return escape(f\"{machine['device']}",
        "return (f\"{machine['device']}",
    ),
    Fault("atom_patches/core/telling.py", LOG, "if line not in self._said:", "if True:"),
    Fault("atom_patches/core/log.py", LOG, "    if asked is not None:", "    if False:"),
    Fault(
        "atom_patches/core/report.py",
        "tests/unit/test_report.py::test_a_directory_that_was_refused_does_not_end_a_step_later",
        "    path = _write_own(mine)\n",
        "    _own[engine] = mine\n    path = _write_own(mine)\n",
    ),
    Fault(
        f"{BENCH}/answers.py",
        f"{COMPARE}::test_nothing_is_compared_behind_the_first_token_that_differs",
        "            return Match(gaps, length, _parting(stock, overlay, place))\n",
        "            continue\n",
    ),
    Fault(
        f"{BENCH}/answers.py",
        f"{COMPARE}::test_a_tie_is_no_difference",
        "found.apart <= tolerance",
        "found.apart <= 9",
    ),
    Fault(f"{BENCH}/answers.py", f"{COMPARE}::test_a_tie_is_no_difference", "max(*apart, *worse)", "max(apart)"),
    Fault(
        f"{BENCH}/answers.py",
        f"{COMPARE}::test_log_probabilities_that_are_apart_are_a_difference",
        "math.inf if math.isnan(distance) else distance",
        "distance",
    ),
    Fault(
        f"{BENCH}/client.py",
        f"{COMPARE}::test_a_tie_is_told_and_is_no_difference",
        'self._model().get("owned_by") == "sglang"',
        "False",
    ),
    Fault(
        f"{BENCH}/interval.py",
        f"{COMPARE}::test_ends_are_those_of_the_binomial_distribution",
        "range(k + 1)",
        "range(k)",
    ),
    Fault(
        f"{CLI}/compare.py",
        f"{COMPARE}::test_a_broken_overlay_is_different",
        '{"ATOM_PATCHES": "1", **self.variables}',
        '{"ATOM_PATCHES": "0", **self.variables}',
    ),
    Fault(
        f"{CLI}/compare_report.py",
        f"{COMPARE}::test_an_overlay_that_does_nothing_is_told",
        "    elif not applied:",
        "    elif False:",
    ),
    Fault(f"{BENCH}/server.py", f"{COMPARE}::test_no_server_is_left", "os.killpg(process.pid, signal.SIGKILL)", "pass"),
    Fault(
        f"{BENCH}/engine_cells.py",
        f"{ENGINES}::test_a_cell_that_is_slower_fails_and_an_interval_that_reaches_below_is_told",
        "ratio.median < LEAST:",
        "ratio.high < 0:",
    ),
    Fault(
        f"{BENCH}/engine_pair.py",
        f"{ENGINES}::test_a_side_that_ends_leaves_what_there_is_and_the_next_model",
        "            found.add(cell, spans)\n",
        "            found.add(cell, spans) if number else None\n",
    ),
    Fault(
        f"{BENCH}/engine_cells.py",
        f"{ENGINES}::test_what_a_fusion_brings_is_the_ratio_of_each_round",
        "self.ratio(cell, side)._asdict()",
        "self.ratio(cell)._asdict()",
    ),
    Fault(
        f"{BENCH}/engine_pair.py",
        f"{ENGINES}::test_a_run_with_fusions",
        "if one not in switched_off(fusion)]",
        "if one != fusion]",
    ),
    Fault(
        f"{BENCH}/engine_pair.py",
        f"{ENGINES}::test_a_side_lacks_one_fusion_and_what_needs_it",
        '{**engine.overlay, "ATOM_FUSIONS": ",".join(left) or "0"}',
        "engine.overlay",
    ),
)
