"""`anabranch processor`: what its tables and documents say."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from anabranch.cli.errors import ExitCode
from anabranch.cli.processor import ranges
from anabranch.errors import UnknownProcessor
from anabranch.processing.operations import copies
from anabranch.protocol.schemas.records import ProcessorInfo
from tests.cli.conftest import Run
from tests.cli.fakes import TXN_ID, FakeClient, processor

STAMP = "2023-11-14T22:13:20"


def squeezed(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def test_a_processor_is_listed_with_its_lag(run: Run, fake: FakeClient) -> None:
    (told,) = json.loads(run("processor", "list", "nyc", "--json").stdout)["processors"]
    assert told["inputs"][0]["events_behind"] == 12_345
    assert told["inputs"][0]["exact"] is False
    assert told["inputs"][0]["seconds_behind"] > 1e6
    assert told["inputs"][1]["trouble"] == "UnknownStream: gone"
    assert (told["tasks"], told["held"], told["holders"]) == (4, 2, ["host:7"])
    assert told["trouble"] == "2 of 4 tasks without a worker"
    assert told["oldest_last_commit"].startswith(STAMP)
    assert fake.calls[0] == ("processors", {"scope": "nyc"})
    shown = squeezed(run("processor", "list", "nyc").stdout)
    parts = ("nyc/delays", "nyc/flights, nyc/lost", "host:7", "~12,345, ?", STAMP, "2 of 4 tasks")
    for part in parts:
        assert part in shown


@pytest.mark.usefixtures("fake")
def test_describe(run: Run) -> None:
    told = json.loads(run("processor", "describe", "nyc/delays", "--json").stdout)
    assert [task["holder"] for task in told["held_by"]] == [None, "host:7", "host:7", None]
    assert told["held_by"][2]["in_progress"] == TXN_ID.hex()
    places = [(one["tasks"], one["record"], one["segment"]) for one in told["positions"]]
    assert places == [([0, 3], 0, -1), ([1], 40, -1), ([2], 40, 1 << 32)]
    shown = squeezed(run("processor", "describe", "nyc/delays").stdout)
    assert "nyc/lost: UnknownStream: gone" in shown
    assert "2 of 4 tasks without a worker" in shown
    for part in ("0, 3 0 - - ~12,345", "segment 0@1 to 17 0 0.000", "stores: none; resets: 0"):
        assert part in shown


@pytest.mark.usefixtures("fake")
def test_describe_draws_the_topology(run: Run) -> None:
    told = json.loads(run("processor", "describe", "nyc/delays", "--json").stdout)["topology"]
    assert told["handlers"][0]["of"] == ["nyc/flights"]
    assert told["stores"] == {"totals": "a store of json"}
    lines = run("processor", "describe", "nyc/delays").stdout.split("\n")
    assert lines[:6] == [
        "nyc/flights  (~12,345 behind, " + lines[0].partition("behind, ")[2],
        "└─ count\\x1b[2J",
        "   ├─ [totals]",
        "   └─ > nyc/hours",
        "nyc/lost  (UnknownStream: gone)",
        "outputs of no handler that is known: nyc/other",
    ]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("command", ["copy", "savepoint"])
def test_a_copy_is_made(run: Run, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    asked = list[tuple[Any, ...]]()

    def made(
        _: object, origin: str, name: str, *, savepoint: bool, folder: object
    ) -> ProcessorInfo:
        asked.append((origin, name, savepoint, folder))
        return replace(processor(name), phase="savepoint" if savepoint else "")

    monkeypatch.setattr(copies, "copy_processor", made)
    given = ("processor", command, "nyc/delays", "nyc/kept")
    told = json.loads(run(*given, "--json").stdout)
    is_savepoint = command == "savepoint"
    assert told["phase"] == ("savepoint" if is_savepoint else None)
    assert (told["processor"], told["origin"], told["tasks"]) == ("nyc/kept", "nyc/delays", 4)
    assert run(*given).stdout == f"nyc/kept is a {command} of nyc/delays\n"
    assert asked[0] == ("nyc/delays", "nyc/kept", is_savepoint, None)


@pytest.mark.parametrize("command", ["list", "describe"])
def test_errors_are_lines(run: Run, fake: FakeClient, command: str) -> None:
    fake.error = UnknownProcessor("there is no processor nyc/none")
    result = run("processor", command, "nyc/none")
    assert result.exit_code == ExitCode.USAGE
    assert "UnknownProcessor: there is no processor nyc/none ->" in result.stderr


MOMENT = datetime(2026, 1, 2, tzinfo=UTC)
RESET, MADE = {"name": "nyc/delays", "keep_state": False}, {"name": "nyc/delays", "group": "g"}


@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        ("reset nyc/delays --to begin", ("reset_processor", {**RESET, "start": "begin"})),
        ("reset nyc/delays --to 0", ("reset_processor", {**RESET, "start": 0})),
        ("reset nyc/delays --to now", ("reset_processor", {**RESET, "start": "end"})),
        (
            f"reset nyc/delays --to {MOMENT:%Y-%m-%dT00:00Z}",
            ("reset_processor", {**RESET, "start": MOMENT}),
        ),
        (
            "reset nyc/delays --keep-state",
            ("reset_processor", {**RESET, "start": None, "keep_state": True}),
        ),
        (
            "alter nyc/delays --add-input nyc/a --add-input lax/a --from begin --drop-input nyc/b",
            (
                "alter_processor",
                {
                    "name": "nyc/delays",
                    "add": ["nyc/a", "lax/a"],
                    "start": "begin",
                    "drop": ["nyc/b"],
                },
            ),
        ),
        ("delete nyc/delays", ("delete_processor", {"name": "nyc/delays"})),
        ("import-group nyc/delays -g g", ("import_group", {**MADE, "inputs": (), "tasks": 16})),
    ],
)
def test_what_changes_a_processor_asks_first(
    run: Run, fake: FakeClient, arguments: str, call: tuple[str, object]
) -> None:
    asked = run("processor", *arguments.split())
    assert asked.exit_code == ExitCode.USAGE
    assert "--yes" in asked.stderr
    assert fake.calls == []
    done = run("processor", *arguments.split(), "--yes", "--json")
    assert (done.exit_code, fake.calls) == (0, [call])
    assert json.loads(done.stdout)["processor"] == "nyc/delays"
    assert "nyc/delays" in run("processor", *arguments.split(), "--yes").stdout


@pytest.mark.parametrize("to", [(), ("--to", "tomorrow")])
def test_reset_refuses(run: Run, fake: FakeClient, to: tuple[str, ...]) -> None:
    result = run("processor", "reset", "nyc/delays", "--yes", *to)
    assert result.exit_code == ExitCode.USAGE
    assert "--to" in result.stderr
    assert fake.calls == []


@pytest.mark.parametrize(
    "given", ["", "--from begin", "--add-input nyc/a", "--drop-input nyc/a --from end"]
)
def test_alter_refuses(run: Run, fake: FakeClient, given: str) -> None:
    result = run("processor", "alter", "nyc/delays", "--yes", *given.split())
    assert result.exit_code == ExitCode.USAGE
    assert "-input" in result.stderr
    assert fake.calls == []


def test_a_row_of_state_is_printed(run: Run, fake: FakeClient) -> None:
    get = ("processor", "get", "nyc/delays", "counts")
    assert run(*get, "text").stdout == "7\n"
    assert fake.calls[0][1] == {
        "name": "nyc/delays",
        "store": "counts",
        "key": b"text",
        "task": None,
    }
    assert json.loads(run(*get, "raw", "--task", "3", "--json").stdout)["value_base64"] == "/w=="
    assert fake.calls[1][1]["task"] == 3
    absent = run(*get, "none")
    assert (absent.exit_code, absent.stdout) == (ExitCode.DIFFERENCE, "")
    assert "NotFound: the store counts of nyc/delays has no 'none'" in absent.stderr


def test_a_program_decodes_a_row_of_state(
    run: Run, fake: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "decoding.py").write_text(
        "import json, anabranch\n"
        "app = anabranch.Processor('nyc/delays')\n"
        "counts = app.store('counts', value=(lambda one: b'', lambda data: (data, json.loads(data))))\n"
        "app.on(app.input('nyc/flights'))(lambda event: None)\n"
    )
    monkeypatch.chdir(tmp_path)
    get = ("processor", "get", "nyc/delays", "counts", "text", "--program", "decoding:app")
    assert run(*get).stdout == '["[7,8]", [7, 8]]\n'
    assert json.loads(run(*get, "--json").stdout)["value"] == ["[7,8]", [7, 8]]
    absent = run(*get[:4], "none", *get[5:])
    assert (absent.exit_code, absent.stdout) == (ExitCode.DIFFERENCE, "")
    other = run("processor", "get", "nyc/delays", "more", *get[4:])
    assert other.exit_code == ExitCode.USAGE
    assert "decoding:app has no store 'more': counts" in other.stderr


def test_a_group_makes_a_processor(run: Run, fake: FakeClient) -> None:
    given = ("--input", "nyc/flights", "--input", "nyc/weather", "--tasks", "4")
    assert run("processor", "import-group", "nyc/delays", "-g", "g", *given).exit_code == 0
    inputs = ["nyc/flights", "nyc/weather"]
    assert fake.calls == [("import_group", {**MADE, "inputs": inputs, "tasks": 4})]


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("tests.faust.counting:app", "run it with `faust -A tests.faust.counting:app worker`"),
        ("tests.faust.counting:ap", "tests.faust.counting has no `ap`"),
        ("tests.faust.counting:count", "is not an anabranch.Processor"),
        ("tests.faust.nothing:app", "there is no module"),
    ],
)
def test_what_can_t_be_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, target: str, text: str
) -> None:
    monkeypatch.setenv("SCOPE", "nyc")
    monkeypatch.setenv("BOOTSTRAP", "localhost:1")
    result = run("processor", "run", target)
    assert result.exit_code == ExitCode.USAGE
    assert text in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere' (PATH, line 1)"),
        ("app = (", "SyntaxError: '(' was never closed (broken.py, line 1)"),
        ("\nimport json\njson.loads('{')", "JSONDecodeError: Expecting property name"),
    ],
)
def test_a_module_that_fails_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, text: str
) -> None:
    (tmp_path / "broken.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    result = run("processor", "run", "broken:app")
    assert result.exit_code == ExitCode.USAGE
    wanted = f"the import of broken failed: {text}".replace("PATH", str(tmp_path / "broken.py"))
    assert wanted in result.stderr


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5], "0-2, 5"), ([0, 2, 3], "0, 2-3")]
)
def test_numbers_are_printed_as_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text
