"""The conformance kit: the Python client keeps all rules, and each planted error breaks its rule."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from anabranch.conformance.play import Target
from anabranch.conformance.rules import RULES, Report
from anabranch.conformance.run import run
from anabranch.conformance.scenarios import SCENARIOS
from tests.cluster import Cluster
from tests.conformance.wrong import ERRORS

pytestmark = [pytest.mark.broker, pytest.mark.unsecured]

PYTHON = (sys.executable, "-m", "anabranch.conformance.python_client")
QUICK = ("begin-write-commit", "one-shot")
QUICK_ERRORS = ("sums-are-wrong",)


def play(cluster: Cluster, folder: Path, command: Sequence[str], *names: str) -> Report:
    return run(Target(cluster.bootstrap, cluster.prefix, "open", command, folder), names)


def check_error(cluster: Cluster, folder: Path, name: str) -> None:
    planted = ERRORS[name]
    command = (sys.executable, "-m", "tests.conformance.wrong", name)
    report = play(cluster, folder, command, planted.scenario)
    assert planted.rule in report.broken, report.lines()


def test_the_python_client_keeps_the_rules_of_every_transaction(
    cluster: Cluster, tmp_path: Path
) -> None:
    report = play(cluster, tmp_path, PYTHON, *QUICK)
    assert report.failures == []
    assert {rule for rule in RULES if report.passed[rule]} >= {"R2.1", "R5.3", "R7.1", "R9.1"}


@pytest.mark.parametrize("name", QUICK_ERRORS)
def test_a_planted_error_breaks_its_rule(cluster: Cluster, tmp_path: Path, name: str) -> None:
    check_error(cluster, tmp_path, name)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ERRORS if name not in QUICK_ERRORS])
def test_every_planted_error_breaks_its_rule(cluster: Cluster, tmp_path: Path, name: str) -> None:
    check_error(cluster, tmp_path, name)


@pytest.mark.long
def test_the_python_client_keeps_all_rules(cluster: Cluster, tmp_path: Path) -> None:
    report = play(cluster, tmp_path, PYTHON)
    assert report.failures == []
    assert set(report.skipped) == {one.name for one in SCENARIOS.values() if one.own}


def test_each_scenario_names_rules_that_exist() -> None:
    assert {rule for one in SCENARIOS.values() for rule in one.rules} <= set(RULES)
    assert {planted.rule for planted in ERRORS.values()} <= set(RULES)
