"""The conformance kit: the Python client keeps all rules, and each planted error breaks its rule."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


OWN = [name for name, one in SCENARIOS.items() if one.own]


def play_own(command: Sequence[str], *names: str) -> dict[str, Any]:
    """Scenarios that need a cluster of the kit's own: the report for programs."""
    only = [word for name in names for word in ("--only", name)]
    words = [sys.executable, "-m", "anabranch.cli", "conformance", "--json", *only, "--", *command]
    environment = os.environ | {"ANABRANCH_BOOTSTRAP": "127.0.0.1:1"}  # not read by the kit
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    found: dict[str, Any] = json.loads(done.stdout)
    broken = any(rule["failures"] for rule in found["rules"].values())
    assert done.returncode == broken, done.stderr
    return found


def check_error(cluster: Cluster, folder: Path, name: str) -> None:
    planted = ERRORS[name]
    command = (sys.executable, "-m", "tests.conformance.wrong", name)
    if planted.scenario in OWN:
        rules = play_own(command, planted.scenario)["rules"]
        assert rules[planted.rule]["failures"], rules
        return
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
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in ERRORS if name not in QUICK_ERRORS])
def test_every_planted_error_breaks_its_rule(cluster: Cluster, tmp_path: Path, name: str) -> None:
    check_error(cluster, tmp_path, name)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_python_client_keeps_all_rules(cluster: Cluster, tmp_path: Path) -> None:
    report = play(cluster, tmp_path, PYTHON)
    assert report.failures == []
    assert set(report.skipped) == set(OWN)
    own = play_own(PYTHON, *OWN)
    assert not own["not_played"]
    seen = {rule for rule in RULES if report.passed[rule] or own["rules"][rule]["passed"]}
    assert seen == set(RULES)
    assert [rule for rule in RULES if own["rules"][rule]["failures"]] == []


def test_each_scenario_names_rules_that_exist() -> None:
    assert {rule for one in SCENARIOS.values() for rule in one.rules} <= set(RULES)


def test_each_rule_has_a_planted_error() -> None:
    assert {planted.rule for planted in ERRORS.values()} == set(RULES)
