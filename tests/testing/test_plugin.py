"""The fixtures for users' tests, in a pytest of their own."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from anabranch.infra.fetch import CACHE_VARIABLE, cache_root
from tests.cluster import Cluster

pytest_plugins = ["pytester"]

NAME = "anabranch.testing.pytest_plugin"
ROOT = Path(__file__).resolve().parents[2]
CACHE = cache_root()  # pytester replaces the home folder
TESTS = """
import anabranch

def commit(client, scope):
    client.create_stream(f"{scope}/in")
    with client.begin(scope) as txn:
        txn.write(f"{scope}/in", b"value", key=b"key")
        txn.commit()
    with client.read(f"{scope}/in") as reader:
        assert next(reader).value == b"value"

known = []

def test_one(anabranch_client, anabranch_scope, anabranch_cluster):
    known[:] = [anabranch_cluster, anabranch_scope]
    commit(anabranch_client, anabranch_scope)

def test_another(anabranch_scope, anabranch_cluster):
    assert known[0] == anabranch_cluster and known[1] != anabranch_scope
    with anabranch.connect(anabranch_cluster) as client:
        commit(client, anabranch_scope)
"""
LEVEL_TEST = """
import anabranch

def test_all_features_are_enabled(anabranch_cluster):
    with anabranch.connect(anabranch_cluster, lane="admin") as operator:
        level = operator.feature_level()
    assert level.level == level.known
"""


@pytest.fixture
def user(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A user's folder with tests."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the plugin is named below
    monkeypatch.setenv(CACHE_VARIABLE, str(CACHE))
    pytester.makepyfile(TESTS)
    return pytester


@pytest.mark.long
@pytest.mark.slow(40)
@pytest.mark.broker
def test_a_session_has_one_cluster(user: pytest.Pytester) -> None:
    user.makepyfile(test_level=LEVEL_TEST)
    found = user.runpytest_subprocess("-p", NAME, timeout=110)
    found.assert_outcomes(passed=3)


@pytest.mark.broker
def test_a_given_cluster_is_used(user: pytest.Pytester, cluster: Cluster) -> None:
    option = f"--anabranch-bootstrap={cluster.bootstrap}"
    user.runpytest_subprocess("-p", NAME, option, timeout=60).assert_outcomes(passed=2)


def test_without_the_extra_the_error_names_it(user: pytest.Pytester) -> None:
    user.makeconftest("import sys\nsys.modules['jgo'] = None")
    found = user.runpytest_subprocess("-p", NAME, timeout=60)
    found.assert_outcomes(errors=2)
    found.stdout.fnmatch_lines(
        ["*NotInstalled: jgo is not installed; this gets it: pip install *[[]local[]]*"]
    )


def test_the_plugin_imports_nothing_heavy() -> None:
    code = f"import pytest, sys; before = set(sys.modules); import {NAME}; print(*set(sys.modules) - before)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(ran.stdout.split()) <= {"anabranch", "anabranch.testing", NAME, "uuid"}


def test_pytest_finds_the_plugin_by_the_module_name() -> None:
    """Else `-p` with that name and the entry point would load it twice, which pytest refuses."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {NAME: NAME}
    assert not [name for name in project["dependencies"] if name.startswith("pytest")]
