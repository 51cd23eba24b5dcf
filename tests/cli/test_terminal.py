"""Names of others at a terminal: nothing in them moves the cursor, forges a line, or ends the command."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from anabranch.cli import txn
from anabranch.cli.output import print_headings, print_table
from anabranch.errors import NotReady
from anabranch.presentation.rows import transaction_row
from anabranch.types import Counts, Listed
from tests.cli.conftest import COMMAND, Run
from tests.cli.fakes import TXN_ID, FakeClient, event, transaction

# ESC, a line, a tab, a bell, C1's CSI, controls of writing direction, and a line's end by Unicode.
BAD = "\x1b[2Jb\r\nforged\t\a\x9b1m\u202e\u2066\u2028\x7f"
ACTS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
ID = TXN_ID.hex()
LISTS = {
    "txn list": "txn list",
    "finished": "txn list -f",
    "a transaction": f"txn describe {ID}",
    "locks": "txn locks",
    "series": "series list nyc",
    "processors": "processor list nyc",
    "a processor": "processor describe nyc/delays",
    "streams": "stream list",
    "a stream": "stream describe nyc/flights",
    "lanes": "lane list --lane admin",
    "commands": "command list",
    "audit-log": "audit-log",
    "groups": "group list",
    "a group": "group describe loaders",
    "events": "read nyc/flights",
    "transactions": "read nyc/flights -t",
}


def spoilt(value: Any) -> Any:
    """The same with `BAD` at the end of each text, and of all bytes but ids."""
    match value:
        case str():
            return value + BAD
        case bytes() if len(value) != len(TXN_ID):
            return value + BAD.encode()
        case Listed():
            return Listed([spoilt(each) for each in value], value.missing)
        case tuple() if hasattr(value, "_fields"):
            return type(value)(*(spoilt(each) for each in value))
        case tuple() | list():
            return type(value)(spoilt(each) for each in value)
        case Mapping():
            return {spoilt(name): spoilt(each) for name, each in value.items()}
        case _ if is_dataclass(value) and not isinstance(value, type):
            each = {one.name: spoilt(getattr(value, one.name)) for one in fields(value)}
            return replace(value, **each)
    return value


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, fake: FakeClient) -> FakeClient:
    """All that the client answers is spoilt."""

    def get(client: FakeClient, name: str) -> Any:
        found = object.__getattribute__(client, name)
        if name.startswith("_") or not callable(found):
            return found

        def call(*given: Any, **named: Any) -> Any:
            answer = found(*given, **named)
            if isinstance(answer, Iterator):
                return (spoilt(each) for each in answer)
            return answer if answer is client else spoilt(answer)

        return call

    monkeypatch.setattr(FakeClient, "__getattribute__", get)
    return fake


def texts(document: Any) -> Iterator[str]:
    if isinstance(document, str):
        yield document
    elif isinstance(document, list | dict):
        for each in document.values() if isinstance(document, dict) else document:
            yield from texts(each)


@pytest.mark.parametrize("name", LISTS)
def test_no_name_acts_on_the_terminal(run: Run, fake: FakeClient, name: str) -> None:
    arguments = LISTS[name].split()
    shown = run(*arguments)
    assert shown.exit_code == 0, shown.output
    tabs = 2 * len(fake.events) if name == "events" else 2 if name == "transactions" else 0
    assert ACTS.findall(shown.output) == ["\t"] * tabs
    assert "\\x1b[2Jb" in shown.output or name == "transactions"
    assert not re.search(r"^forged", shown.output, re.MULTILINE)
    exact = run(*arguments, "--json")
    assert ACTS.findall(exact.stdout) == []
    told = [text for line in exact.stdout.splitlines() for text in texts(json.loads(line))]
    assert any(text.endswith(BAD) for text in told)


def test_nor_do_errors(run: Run, fake: FakeClient) -> None:
    fake.error = NotReady(f"a transaction is named {BAD}")
    for more in ((), ("--json",), ("-v",)):
        result = run("stream", "list", *more)
        assert ACTS.findall(result.stderr) == []
    told = json.loads(run("stream", "list", "--json").stderr)["error"]["message"]
    assert told.endswith(BAD)


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_text_that_the_output_cannot_encode_ends_no_command(
    run: Run, fake: FakeClient, encoding: str
) -> None:
    fake.events = [event(0, value="caf\u00e9 \u20ac \U0001f600".encode())]
    run("stream", "list")  # sets the environment
    found: list[Result] = [
        CliRunner(charset=encoding).invoke(COMMAND, ["read", "nyc/flights", *more])
        for more in ([], ["--json"])
    ]
    assert [each.exit_code for each in found] == [0, 0]
    assert json.loads(found[1].stdout)["value"].startswith("caf\u00e9 \u20ac \U0001f600")
    fake.info = replace(fake.info, name="\u20ac")
    listed = CliRunner(charset=encoding).invoke(COMMAND, ["txn", "list"])
    assert listed.exit_code == 0, listed.output


class Screen(io.StringIO):
    """Standard output at a terminal."""

    def isatty(self) -> bool:
        return True


def at_terminal(
    monkeypatch: pytest.MonkeyPatch, width: int, show: Callable[[], None], **environment: str
) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    show()
    return screen.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_ids_are_whole_at_any_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    infos = [
        transaction(txn_id=bytes([n]) * 16, name=None, counts=Counts(5, 0, 0)) for n in range(3)
    ]
    rows = [transaction_row(info) for info in infos]
    shown = at_terminal(
        monkeypatch, width, lambda: print_table("Transactions", rows, txn._FINISHED_COLUMNS)
    )
    for row in rows:
        assert row["txn_id"] in shown
    plain = re.sub("\x1b\\[[0-9;]*m", "", shown)
    assert ("2023-11-14T22:13:20Z" in plain) is (width < 200)
    assert ("left out" in plain) is (width == 200), "only zeros"
    assert max(map(len, plain.splitlines())) <= width


def test_events_have_headings_at_a_terminal_only(
    run: Run, fake: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    headings = "PARTITION@OFFSET\tKEY\tVALUE\n"
    assert headings not in run("read", "nyc/flights").stdout
    shown = at_terminal(
        monkeypatch, 80, lambda: print_headings(("PARTITION@OFFSET", "KEY", "VALUE"))
    )
    assert shown == headings


def test_states_have_colours_at_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def show() -> None:
        print_table("t", [{"state": "LOST"}], ("state",))

    assert "\x1b[31mLOST" in at_terminal(monkeypatch, 80, show)
    assert "\x1b[31m" not in at_terminal(monkeypatch, 80, show, NO_COLOR="1")
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    show()
    assert "\x1b" not in file.getvalue()
    assert "LOST" in file.getvalue()
