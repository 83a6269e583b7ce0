"""The planted faults can be planted: a change of the code that one of them changes is told of by the fast tests."""

from __future__ import annotations

from mutants import MUTANTS, ROOT


def test_the_code_that_a_planted_fault_changes_stands_once() -> None:
    counts = {
        mutant.fault: (ROOT / "pbrl_lightning" / mutant.file).read_text(encoding="utf-8").count(mutant.old)
        for mutant in MUTANTS
    }
    assert {fault: count for fault, count in counts.items() if count != 1} == {}


def test_a_planted_fault_changes_something_and_has_tests() -> None:
    for mutant in MUTANTS:
        assert mutant.old != mutant.new, mutant.fault
        assert (ROOT / mutant.tests.split("::")[0]).is_file(), mutant.fault
