"""`anabranch processor`: what its tables and documents say."""

from __future__ import annotations

import json

import pytest

from anabranch.cli.errors import ExitCode
from anabranch.cli.processor.commands import ranges
from anabranch.errors import UnknownProcessor
from tests.cli.conftest import Run
from tests.cli.fakes import TXN_ID, FakeClient

STAMP = "2023-11-14T22:13:20"


def squeezed(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def test_list(run: Run, fake: FakeClient) -> None:
    (told,) = json.loads(run("processor", "list", "nyc", "--json").stdout)["processors"]
    assert told["inputs"][0]["events_behind"] == 12_345
    assert told["inputs"][0]["exact"] is False
    assert told["inputs"][0]["seconds_behind"] > 1e6
    assert told["inputs"][1]["trouble"] == "UnknownStream: gone"
    assert (told["tasks"], told["held"], told["holders"]) == (4, 2, ["host:7"])
    assert told["oldest_last_commit"].startswith(STAMP)
    assert fake.calls[0] == ("processors", {"scope": "nyc"})
    shown = squeezed(run("processor", "list", "nyc").stdout)
    for part in ("nyc/delays", "nyc/flights, nyc/lost", "host:7", "~12,345, ?", STAMP):
        assert part in shown


@pytest.mark.usefixtures("fake")
def test_describe(run: Run) -> None:
    told = json.loads(run("processor", "describe", "nyc/delays", "--json").stdout)
    assert [task["holder"] for task in told["held_by"]] == [None, "host:7", "host:7", None]
    assert told["held_by"][2]["in_progress"] == TXN_ID.hex()
    places = [(one["tasks"], one["record"], one["segment"]) for one in told["positions"]]
    assert places == [([0, 3], 0, -1), ([1], 40, -1), ([2], 40, 1 << 32)]
    shown = squeezed(run("processor", "describe", "nyc/delays").stdout)
    for part in ("0, 3 0 - - ~12,345", "segment 0x100000000 to 17 0 0.000", "nyc/lost: UnknownS"):
        assert part in shown


@pytest.mark.parametrize("command", ["list", "describe"])
def test_errors_are_lines(run: Run, fake: FakeClient, command: str) -> None:
    fake.error = UnknownProcessor("there is no processor nyc/none")
    result = run("processor", command, "nyc/none")
    assert result.exit_code == ExitCode.USAGE
    assert "UnknownProcessor: there is no processor nyc/none ->" in result.stderr


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5], "0-2, 5"), ([0, 2, 3], "0, 2-3")]
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text
