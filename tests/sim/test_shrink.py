"""Failing runs are cut down, to ones that fail in the same way and replay exactly."""

from __future__ import annotations

from dataclasses import fields
from random import Random

import pytest

from tests.sim.mutants import MUTANTS
from tests.sim.shrink import Case, shrink, size_of
from tests.sim.simulation import simulate
from tests.sim.weather import Weather, parse

DROPPED = next(mutant for mutant in MUTANTS if mutant.name == "a merge is dropped")


@pytest.mark.soak
def test_a_planted_bug_that_needs_no_fault_is_shown_without_any() -> None:
    found = shrink(Case(24), DROPPED.plant)
    assert found.before.violation
    assert found.after.origin == found.before.origin
    assert not found.after.struck, size_of(found.after)
    assert found.after.steps * 5 < found.before.steps
    assert (found.after.drawn.clients, found.after.drawn.machines) == (1, 1)
    again = found.case.run(DROPPED.plant)
    assert again.digest == found.after.digest


def test_a_run_that_holds_is_not_cut_down() -> None:
    with pytest.raises(ValueError, match="seed 1 does not fail"):
        shrink(Case(1, {"work_s": 1.0, "clients": 1, "jobs": 1, "readers": 0, "workers": 0}))


@pytest.mark.soak
def test_faults_are_known_by_name_and_strike_alone() -> None:
    """With all of its faults by name a run is the same; with none, none strikes."""
    drawn = simulate(2)
    assert len(drawn.struck) > 10
    same = Case(2, only=frozenset(drawn.struck)).run()
    assert (same.digest, same.struck) == (drawn.digest, drawn.struck)
    without = Case(2, only=frozenset()).run()
    assert not without.struck
    assert without.digest != drawn.digest


def test_a_command_names_the_whole_case() -> None:
    case = Case(
        7, {"chunk_bytes": 16 << 20, "small": True, "delay": 0.005}, frozenset(("ab", "cd"))
    )
    words = case.command().split()
    given = parse(words[words.index("--weather") + 1].split(","))
    drawn = Weather.draw(Random(7))
    assert drawn.changed(given) == drawn.changed(case.changes)
    assert words[words.index("--faults") + 1] == "ab,cd"
    fair = {field.name: getattr(Weather(), field.name) for field in fields(Weather)}
    assert "--weather fair,readers=1 " in Case(7, fair | {"readers": 1}).command()
    assert Case(7, {}, frozenset()).command().endswith("--faults none --trace")
    with pytest.raises(ValueError, match="no such weather: 'rain'"):
        parse(["rain=1"])
    assert parse(Weather(readers=3).differences(Weather())) == {"readers": 3}
