"""The run's output: table, JSON, progress; and the exit code."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from anabranch.cli.options import Target
from examples.flights import run as run_module
from examples.flights.__main__ import app
from examples.flights.cast import RAW_PROGRAM, raw_command
from examples.flights.display import Display, LineDisplay, make_display
from examples.flights.findings import Check
from examples.flights.report import Report, show_report
from examples.flights.run import Settings

GOOD = Report(
    checks=[Check("one thing", "was seen")],
    timeline=[(2.0, "later"), (1.0, "first")],
    seconds=61.2,
    measured={"commit_s": 1.5},
)
BAD = Report(
    checks=[*GOOD.checks, Check("another thing", "was seen", ("this differs", "and that"))],
    timeline=[],
    seconds=3.0,
    folder="/tmp/kept",
    picture="/tmp/drawn.svg",
)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The command's settings; its run is a good one, or a bad one with --keep."""
    found: list[Settings] = []

    def run_flights(settings: Settings, display: Display) -> Report:
        found.append(settings)
        display.note("something happened")
        return BAD if settings.keep else GOOD

    monkeypatch.setattr(run_module, "run_flights", run_flights)
    return found


def run(*options: str) -> Result:
    """A call of the program, as a shell would."""
    return CliRunner(env={"ANABRANCH_BOOTSTRAP": None}).invoke(app, list(options))


def test_a_good_run_ends_well(ran: list[Settings]) -> None:
    result = run()
    assert result.exit_code == 0
    assert ran == [Settings()]
    assert "one thing" in result.stdout
    assert "All 1 checks hold. 61 s." in result.stdout
    assert "something happened" in result.stderr


def test_a_difference_is_shown_and_exits_with_1(ran: list[Settings]) -> None:
    options = ("-b", "fake:9092", "--keep", "--rows", "1000", "-X", "a=b", "--picture", "f.svg")
    result = run(*options)
    assert result.exit_code == 1
    assert ran == [Settings("fake:9092", {"a": "b"}, 1000, keep=True, picture=Path("f.svg"))]
    for words in (
        "this differs",
        "and that",
        "1 of 2 checks found differences",
        "/tmp/kept",
        "/tmp/drawn.svg",
    ):
        assert words in result.stdout


def test_a_picture_that_can_not_be_written_is_refused_before_anything_starts(
    ran: list[Settings], tmp_path: Path
) -> None:
    result = run("--picture", str(tmp_path / "none" / "f.svg"))
    assert result.exit_code == 2
    assert "there is no folder" in result.stderr
    assert ran == []


def test_json(ran: list[Settings]) -> None:
    result = run("--json")
    assert result.stderr == ""
    assert json.loads(result.stdout) == {
        "ok": True,
        "seconds": 61.2,
        "folder": None,
        "picture": None,
        "checks": [{"title": "one thing", "ok": True, "seen": "was seen", "differences": []}],
        "timeline": [{"seconds": 1.0, "what": "first"}, {"seconds": 2.0, "what": "later"}],
        "measured": {"commit_s": 1.5},
    }
    bad = run("--json", "--keep")
    assert bad.exit_code == 1
    assert json.loads(bad.stdout)["checks"][1]["differences"] == ["this differs", "and that"]


def test_nothing_found_is_lost_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    show_report(BAD, as_json=False)
    assert "this differs" in capsys.readouterr().out


def test_notes_are_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with make_display(quiet=False) as display:
        assert isinstance(display, LineDisplay)
        display.state("busy")
        display.wrote(1, 2)
        display.tick(1, 0.1)
        display.note("now")
        display.note("a moment ago", at=display.started + 0.5)
    assert [what for _, what in display.timeline] == ["now", "a moment ago"]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" s  ")[1] for line in lines] == ["now", "a moment ago"]
    assert lines[1].strip().startswith("0.5 s")


def test_the_live_display(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with make_display(quiet=False) as display:
        display.state("doing something")
        display.wrote(50, 100)
        display.tick(7, 0.025)
        display.note("it happened")
        display.wrote(100, 100)
    shown = terminal.getvalue()
    for words in ("it happened", "7 small transactions", "in 25 ms"):
        assert words in shown


def test_the_raw_program_is_run_only_where_it_can_connect() -> None:
    arguments: Any = ("nyc/weather", Path("w.csv"), "origin", "abcd")
    command = raw_command(Target("b:1", "p", 1.0), *arguments)
    assert command is not None
    assert command[1:3] == [str(RAW_PROGRAM), "nyc/weather"]
    assert command[command.index("--token") + 1] == "abcd"
    assert "anabranch" not in [
        line.split()[1].split(".")[0]
        for line in RAW_PROGRAM.read_text().splitlines()
        if line.startswith(("import ", "from "))
    ]
    secured = Target("b:1", "p", 1.0, {"security.protocol": "SSL"})
    assert raw_command(secured, *arguments) is None
