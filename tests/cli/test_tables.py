"""`anabranch table`, with a client that keeps rows in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Self

import pytest

from anabranch.cli.errors import ExitCode
from anabranch.errors import UnknownStream
from anabranch.presentation.system_tables import table_rows
from anabranch.protocol.hybrid_time import read_moment
from anabranch.protocol.ids import NO_TXN
from anabranch.tables.replica import Lag
from anabranch.tables.store import Seen
from anabranch.types import StreamDescription
from tests.cli.conftest import Run
from tests.cli.fakes import TXN_ID, FakeClient, stream

AT = (1_700_000_000_123_456 << 12) + 5


@dataclass
class Rows:
    """A table: its replica, snapshot and transaction at once."""

    rows: dict[bytes, bytes] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=lambda: {"table": "true"})
    timestamp: int = AT

    def get(self, _table: str, key: bytes) -> bytes | None:
        return self.rows.get(key)

    def scan(self, _table: str, **bounds: Any) -> Iterator[tuple[bytes, bytes]]:
        begin = bounds.get("prefix", b"")
        return ((k, v) for k, v in sorted(self.rows.items()) if k.startswith(begin))

    def versions(self, _table: str, key: bytes) -> Iterator[Seen]:
        yield Seen(key, b"2", AT, TXN_ID)
        yield Seen(key, b"1", AT - 1, TXN_ID)

    def write(self, _table: str, value: bytes | None, key: bytes) -> None:
        self.rows[key] = value or b""

    def delete(self, _table: str, key: bytes) -> None:
        del self.rows[key]

    def delete_range(self, table: str, **bounds: bytes) -> int:
        found = list(self.scan(table, **bounds))
        for key, _ in found:
            del self.rows[key]
        return len(found)

    def truncate(self, table: str) -> int:
        return self.delete_range(table)

    def transact(self, function: Callable[[Rows], object]) -> SimpleNamespace:
        before = dict(self.rows)
        value = function(self)
        txn_id = NO_TXN if before == self.rows else TXN_ID
        return SimpleNamespace(txn_id=txn_id, commit_timestamp=AT, value=value)

    def lag(self) -> dict[str, Lag]:
        return {"a/b": Lag(0, 0.0)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        pass

    def commit(self) -> SimpleNamespace:
        return SimpleNamespace(txn_id=TXN_ID, commit_timestamp=AT)


@pytest.fixture
def table(fake: FakeClient, monkeypatch: pytest.MonkeyPatch) -> Rows:
    """The one table of the client that every command gets."""
    found = Rows()

    def describe(name: str) -> StreamDescription:
        return replace(stream(name), settings=found.settings)

    monkeypatch.setattr(fake, "describe", describe)
    for of, call in ((fake, "begin"), (fake, "replica"), (found, "snapshot")):
        monkeypatch.setattr(of, call, lambda *_, **__: found, raising=False)
    return found


def test_arguments_that_are_no_text_are_the_bytes_that_they_were(run: Run, table: Rows) -> None:
    key, row = (data.decode("utf-8", "surrogateescape") for data in (b"k\xff\n", b"\xfe"))
    told = run("table", "put", "a/b", key, row)
    assert told.stdout.startswith(r"a/b k\xff\n is written: ")
    assert table.rows == {b"k\xff\n": b"\xfe"}
    document = json.loads(run("table", "get", "a/b", key, "--json").stdout)
    assert (document["key_base64"], document["value_base64"]) == ("a/8K", "/g==")
    found = run("table", "scan", "a/b", "--prefix", key[:2], "--json")
    assert json.loads(found.stdout) == {"key_base64": "a/8K", "value_base64": "/g=="}
    absent = run("table", "get", "a/b", key[:1])
    assert (absent.exit_code, absent.stdout) == (ExitCode.DIFFERENCE, "")
    assert absent.stderr == "NotFound: a/b has no row k -> check the key\n"
    found = json.loads(run("table", "get", "a/b", key[:1], "--json").stdout)
    assert (found["found"], found["value"]) == (False, None)


@pytest.mark.usefixtures("table")
def test_times_that_are_shown_are_exact_when_they_are_given_back(run: Run) -> None:
    shown = run("table", "versions", "a/b", "k").stdout
    for text in ("20.123456Z+5", "20.123456Z+4", str(AT), str(AT - 1)):
        assert text in shown
    rows = json.loads(run("table", "versions", "a/b", "k", "--json").stdout)["versions"]
    assert [read_moment(row["since"]) for row in rows] == [AT, AT - 1]
    assert read_moment(rows[1]["until"]) == rows[1]["maxcsn"] == AT


def test_watching_a_table_that_nothing_would_compact_is_refused(
    run: Run, fake: FakeClient, table: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Watches(Exception):
        pass

    def sleep(_s: float) -> None:
        raise Watches

    monkeypatch.setattr("anabranch.cli.table.time.sleep", sleep)
    watch = ("table", "compact", "a/b", "--watch", "--plain-readers-lose-history")
    refused = run(*watch)
    assert refused.exit_code == ExitCode.USAGE
    assert "anabranch stream alter a/b --setting table.compact.ratio=4" in refused.stderr
    table.settings["table.compact.ratio"] = "4"
    monkeypatch.setattr("anabranch.client.calls.compact.due_tables", lambda *_: [])
    assert "Watches" in run(*watch).stderr
    monkeypatch.setattr(fake, "describe", FakeClient(error=UnknownStream("a/b")).describe)
    assert "UnknownStream" in run(*watch).stderr


@pytest.mark.usefixtures("table")
def test_scan_says_which_options_choose_keys(run: Run) -> None:
    refused = run("table", "scan", "a/b", "--prefix", "k", "--to", "l")
    assert refused.exit_code == ExitCode.USAGE
    assert "give --prefix, or --from and --to" in refused.stderr
    told = " ".join(run("table", "scan", "--help").stdout.split())
    assert "by --prefix, or by --from and --to." in told


def test_delete_says_whether_there_was_a_row(run: Run, table: Rows) -> None:
    table.rows[b"k"] = b"1"
    told = run("table", "delete", "a/b", "k").stdout
    assert told == f"a/b k is deleted: transaction {TXN_ID.hex()}\n"
    assert table.rows == {}
    assert run("table", "delete", "a/b", "k").stdout == "a/b k had no row\n"
    assert json.loads(run("table", "delete", "a/b", "k", "--json").stdout)["txn_id"] is None


def test_a_range_is_deleted_in_one_commit(run: Run, table: Rows) -> None:
    table.rows |= {b"a1": b"1", b"a2": b"2", b"b": b"3"}
    told = run("table", "delete", "a/b", "--prefix", "a").stdout
    assert told == f"2 rows of a/b are deleted: transaction {TXN_ID.hex()}\n"
    document = json.loads(run("table", "delete", "a/b", "--all", "--json").stdout)
    assert (document["deleted"], document["txn_id"]) == (1, TXN_ID.hex())
    assert run("table", "delete", "a/b", "--all").stdout == "0 rows of a/b are deleted\n"
    for chosen in ([], ["k", "--all"], ["k", "--prefix", "a"], ["--from", "a", "--all"]):
        refused = run("table", "delete", "a/b", *chosen)
        assert refused.exit_code == ExitCode.USAGE
        assert "give a key; or --prefix, or --from and --to; or --all" in refused.stderr


def test_a_row_is_one_line_whatever_is_in_it(
    run: Run, fake: FakeClient, table: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.rows[b"k\t"] = b"1\n\\\xff\xc3\xa9"
    assert run("table", "scan", "a/b").stdout == "k\\t\t1\\n\\\\\\xff\u00e9\n"
    found = [SimpleNamespace(commit_timestamp=AT, key=b"\n", before=None, after=None)]
    monkeypatch.setattr(fake, "changes", lambda *_, **__: nullcontext(found), raising=False)
    line = run("table", "changes", "a/b").stdout
    assert line == "2023-11-14T22:13:20.123456Z+5\t\\n\t-\t(deleted)\n"


def test_a_check_of_an_asynchronous_derivation(
    run: Run, fake: FakeClient, table: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    del table  # its settings name no derivation
    monkeypatch.setattr(fake, "check_derivation", lambda *_: [], raising=False)
    shown = run("table", "check", "a/b", "by-city", "json:dumps")
    assert shown.stdout == "by-city (asynchronous) of a/b is right\n"


@pytest.mark.parametrize("differences", [[], ["row 1 differs", "row 2 differs"]])
def test_a_check_names_the_kind_of_the_derivation(
    run: Run, fake: FakeClient, table: Rows, monkeypatch: pytest.MonkeyPatch, differences: list[str]
) -> None:
    table.settings |= {"derive.by-city": "1", "derived": "a/b by-city 1 totals"}
    monkeypatch.setattr(fake, "check_derivation", lambda *_: differences, raising=False)
    shown = run("table", "check", "a/b", "by-city", "json:dumps")
    if differences:
        assert shown.stdout == "row 1 differs\nrow 2 differs\n"
        assert "by-city (totals) of a/b has 2 differences" in shown.stderr
    else:
        assert shown.stdout == "by-city (totals) of a/b is right\n"
    document = json.loads(run("table", "check", "a/b", "by-city", "json:dumps", "--json").stdout)
    assert document["kind"] == "totals"
    assert document["differences"] == differences


def test_a_table_is_described_with_its_derivations(
    run: Run, fake: FakeClient, table: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with those of workers, which its settings don't name; and without versions that ended."""
    table.settings |= {"derive.by-city": "2"}
    derived = [
        "a/b by-city 1",
        "a/b by-city 2 unique",
        "a/b by-row 1 asynchronous",
        "a/c by-row 1 asynchronous",
    ]
    settings = {"a/b": table.settings} | {
        "a/{}-{}-v{}".format(*text.removeprefix("a/").split(" ")[:3]): {
            "table": "true",
            "derived": text,
        }
        for text in derived
    }
    rows = list(
        table_rows([replace(stream(name), settings=its) for name, its in settings.items()], {})
    )
    monkeypatch.setattr(fake, "system", lambda *_, **__: rows, raising=False)
    monkeypatch.setattr(
        fake, "count_events", lambda _: SimpleNamespace(events=0, exact=True), raising=False
    )
    (document,) = json.loads(run("table", "describe", "a/b", "--json").stdout)["tables"]
    assert document["derivations"] == [
        {"name": "by-city", "version": 2, "kind": "unique", "table": "a/b-by-city-v2"},
        {"name": "by-row", "version": 1, "kind": "asynchronous", "table": "a/b-by-row-v1"},
    ]
