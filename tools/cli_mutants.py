"""Seeded faults of the command line, its reports and the log; `tools/mutants.py` makes each, and a test finds it."""

from __future__ import annotations

from kernel_mutants import Fault

CLI = "atom_patches/cli"
HELP = "tests/unit/test_cli_help.py"
REPORTS = "tests/unit/test_bench_report.py"
LOG = "tests/unit/test_log.py"

FAULTS = (
    Fault(f"{CLI}/colour.py", f"{HELP}::test_colours_only_where_they_are_seen_and_wanted", "stream.isatty() and", ""),
    Fault(
        f"{CLI}/status.py",
        f"{HELP}::test_a_feature_that_stands_alike_is_one_name_and_trouble_is_named_and_red",
        'names = ids if every or COLOURS.get(state, "red") == "red" else _features(ids)',
        "names = ids if every else _features(ids)",
    ),
    Fault(
        f"{CLI}/parsing.py",
        f"{HELP}::test_a_misspelt_word_gets_the_one_that_was_meant",
        "near = settings.nearest(word, self.by_name)",
        "near = None",
    ),
    Fault(f"{CLI}/completion.py", f"{HELP}::test_completion_offers_what_fits", "*values, *patches,", "*values,"),
    Fault(
        f"{CLI}/compare.py",
        f"{REPORTS}::TestCompare::test_slower_than_the_limit_fails",
        "if pair.ratio < limit:",
        "if pair.ratio < 0:",
    ),
    Fault(
        f"{CLI}/compare.py",
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
        '    path = directory() / f"{mine.pid}.json"\n',
        '    _own = mine\n    path = directory() / f"{mine.pid}.json"\n',
    ),
)
