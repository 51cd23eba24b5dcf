"""Derived tables: tiny histories in which entries follow from the rows of their source, or do not.

Rows of s/a have ids of three parts: place, name, and a number. ``by-place`` is an index of the first part,
``by-name`` is unique, ``sums`` has totals of the numbers by place, and a worker derives ``later``, by the place.
"""

from __future__ import annotations

from typing import Any

import pytest

from checker import BrokenHistory
from tests.checker.table import Table
from tests.checker.tape import Tape

TABLE = Table()
wrong, right = TABLE.wrong, TABLE.right
SOURCE = "s/a"
PLACE, NAME, PLACE_2 = "s/a-by-place-v1", "s/a-by-name-v1", "s/a-by-place-v2"
SUMS, LATER = "s/a-sums-v1", "s/a-later-v1"
_DECLARED: dict[str, tuple[str, int, str, list[int]]] = {
    PLACE: ("by-place", 1, "index", [0]),
    NAME: ("by-name", 1, "unique", [1]),
    PLACE_2: ("by-place", 2, "index", [0, 1]),
    SUMS: ("sums", 1, "totals", [0]),
    LATER: ("later", 1, "asynchronous", [0]),
}
Rows = dict[str, str | None]


class Shop:
    """Commits of rows and entries, at 10, 20, …; ``of``: which derived tables there are."""

    def __init__(self, tape: Tape, *of: str) -> None:
        self.tape, self._of, self._count = tape, of, 0
        self._log: dict[str, list[list[Any]]] = {table: [] for table in (SOURCE, *of)}
        self._records: dict[str, list[list[Any]]] = {table: [] for table in (SOURCE, *of)}

    def commit(
        self,
        rows: Rows | None = None,
        *,
        first: Rows | None = None,
        fewer: int = 0,
        **entries: Rows,
    ) -> None:
        """``entries``: by the table's name and version; ``fewer``: so many events are not in the answer.

        ``first``: rows that the transaction writes before ``rows``.
        """
        self._count += 1
        number, at = self._count, 10 * self._count
        txn, txn_id = f"t{number}", f"{number:x}" * 32
        events = [*(first or {}).items(), *(rows or {}).items()]
        given = [[key, name] for key, name in events]
        if rows:
            self.tape.begin(txn, None)
            self.tape.do("p", "write", txn=txn, writer="own", stream=SOURCE, events=given)
        count = -fewer
        for table, its in {
            SOURCE: events,
            **{_table(n): list(e.items()) for n, e in entries.items()},
        }.items():
            log, start = self._log[table], 2 * len(self._log[table])
            log += [[start + n, key, row, txn_id] for n, (key, row) in enumerate(its)]
            if its:
                count += len(its)
                ranges = [[0, start, start + len(its)]]
                self._records[table].append([number, at, [txn_id], ranges])
        if rows:
            self.tape.commit(txn, txn_id, at, count, writers=["own"])

    def derive(self, *entries: tuple[int, str], through: int = 0) -> None:
        """A commit of a worker: each entry as of a commit of the source. ``through``: all up to it is there."""
        self._count += 1
        number, log = self._count, self._log[LATER]
        start, txn_id = 2 * len(log), f"{number:x}" * 32
        events: list[tuple[str, str | None, int | None]] = []
        for at, one in entries:
            [(key, row)] = index(one).items()
            events.append((key, row, at))
        if through:
            events.append(("\0\1\0\1\1", through.to_bytes(8, "big").decode("latin-1"), None))
        log += [[start + n, key, row, txn_id, at] for n, (key, row, at) in enumerate(events)]
        ranges = [[0, start, start + len(events)]]
        self._records[LATER].append([number, 10 * number, [txn_id], ranges])

    def end(self) -> None:
        for table, log in self._log.items():
            more = {"table": True} if table == SOURCE else {}
            told = {"start": 0, "end": 100, "events": log}
            self.tape.do("end", "log", told, stream=table, partition=0, **more)
            self.tape.commits(*self._records[table], stream=table)
        for table in self._of:
            name, version, kind, fields = _DECLARED[table]
            asked: dict[str, Any] = {
                "source": SOURCE,
                "name": name,
                "version": version,
                "type": kind,
            }
            self.tape.do("end", "derivation", table=table, fields=fields, number=2, **asked)

    def look_up(
        self, txn: str, value: str, *rows: tuple[str, str], at: int, of: str = "by-place"
    ) -> None:
        told = {"txn_id": None, "snapshot": at}
        self.tape.do("q", "begin", told, txn=txn, scope="s")
        found = {"low": "", "high": None, "rows": [list(row) for row in rows]}
        self.tape.do("q", "read", found, table=SOURCE, txn=txn, derivation=of, value=value)


def _table(name: str) -> str:
    return {"place": PLACE, "name": NAME, "place2": PLACE_2, "sums": SUMS}[name]


def ready(tape: Tape, *of: str) -> Shop:
    """Tables that are ready from 10 on."""
    shop = Shop(tape, *of)
    short = {PLACE: "place", NAME: "name", PLACE_2: "place2", SUMS: "sums"}
    state: Rows = {"\0": "ready"}
    states = {short[table]: state for table in of}
    shop.commit(None, fewer=0, **states)
    return shop


def index(*entries: str) -> Rows:
    """Entries of an index that come, each ``value key``, and those that go, after a ``-``."""
    return {
        "\0\0".join(one.removeprefix("-").split(" ")): None if one[0] == "-" else ""
        for one in entries
    }


@right
def entries_follow(tape: Tape) -> None:
    shop = ready(tape, PLACE, NAME)
    rows: Rows = {"a": "oslo/ann/1", "b": "oslo/bob/2", "c": "-/cat/3"}
    names: Rows = {"ann\0\0": "a", "bob\0\0": "b", "cat\0\0": "c"}
    shop.commit(rows, place=index("oslo a", "oslo b"), name=names)
    went: Rows = {"ann\0\0": None, "bob\0\0": "a"}
    shop.commit(
        {"a": "rome/bob/4", "b": None}, place=index("-oslo a", "-oslo b", "rome a"), name=went
    )
    shop.commit({"d": "oslo"}, place=index("oslo d"))
    shop.end()


@right
def values_with_a_zero_byte(tape: Tape) -> None:
    shop = ready(tape, PLACE)
    shop.commit({"a\0\0b": "o\0s/1"}, place={"o\0\xffs\0\0a\0\0b": ""})
    shop.end()


@wrong("wrong-entry")
def an_entry_is_missing(tape: Tape) -> None:
    shop = ready(tape, PLACE)
    shop.commit({"a": "oslo/ann/1", "b": "oslo/bob/2"}, place=index("oslo a"))
    shop.end()


@wrong("wrong-entry")
def an_entry_comes_a_commit_late(tape: Tape) -> None:
    shop = ready(tape, PLACE)
    shop.commit({"a": "oslo/ann/1"})
    shop.commit(place=index("oslo a"))
    shop.end()


@wrong("wrong-entry")
def an_entry_stays(tape: Tape) -> None:
    shop = ready(tape, PLACE)
    shop.commit({"a": "oslo/ann/1"}, place=index("oslo a"))
    shop.commit({"a": None})
    shop.end()


@wrong("wrong-entry")
def an_entry_names_another_row(tape: Tape) -> None:
    shop = ready(tape, NAME)
    shop.commit({"a": "oslo/ann/1"}, name={"ann\0\0": "b"})
    shop.end()


@wrong("wrong-entry")
def what_is_no_entry(tape: Tape) -> None:
    shop = ready(tape, PLACE)
    shop.commit(place={"oslo": ""})
    shop.end()


@wrong("wrong-entry")
def an_index_with_rows(tape: Tape) -> None:
    shop = ready(tape, PLACE)
    shop.commit({"a": "oslo/ann/1"}, place={"oslo\0\0a": "a"})
    shop.end()


@wrong("two-of-a-value")
def a_value_twice(tape: Tape) -> None:
    shop = ready(tape, NAME)
    shop.commit({"a": "oslo/ann/1"}, name={"ann\0\0": "a"})
    shop.commit({"b": "rome/ann/2"}, name={"ann\0\0": "b"})
    shop.end()


@right
def a_value_moves_in_one_commit(tape: Tape) -> None:
    shop = ready(tape, NAME)
    shop.commit({"a": "oslo/ann/1"}, name={"ann\0\0": "a"})
    shop.commit({"a": None, "b": "rome/ann/2"}, name={"ann\0\0": "b"})
    shop.end()


@right
def a_build_while_rows_change(tape: Tape) -> None:
    shop = Shop(tape, PLACE)
    shop.commit({"a": "oslo/ann/1", "b": "oslo/bob/2", "c": "rome/cat/3"})
    shop.commit(place={"\0": "building x"})
    shop.commit({"a": "rome/ann/4"}, place=index("-oslo a", "rome a"))
    shop.commit(place=index("oslo b", "rome c"))
    shop.commit(place={"\0": "ready"})
    shop.end()


@wrong("wrong-entry")
def a_build_that_forgets_a_row(tape: Tape) -> None:
    shop = Shop(tape, PLACE)
    shop.commit({"a": "oslo/ann/1", "b": "oslo/bob/2"})
    shop.commit(place=index("oslo a"))
    shop.commit(place={"\0": "ready"})
    shop.end()


@wrong("wrong-entry")
def a_build_with_a_row_that_is_gone(tape: Tape) -> None:
    shop = Shop(tape, PLACE)
    shop.commit({"a": "oslo/ann/1"})
    shop.commit({"a": None})
    shop.commit(place=index("oslo a"))
    shop.end()


@right
def rows_of_one_value_before_it_is_unique(tape: Tape) -> None:
    shop = Shop(tape, NAME)
    shop.commit({"a": "oslo/ann/1", "b": "rome/ann/2"})
    shop.commit(name={"ann\0\0": "a"})
    shop.commit({"b": None})
    shop.commit(name={"\0": "ready"})
    shop.end()


def switched(tape: Tape) -> Shop:
    """Version 2 is ready from 40 on."""
    shop = ready(tape, PLACE)
    shop._of = (PLACE, PLACE_2)
    shop._log[PLACE_2], shop._records[PLACE_2] = [], []
    shop.commit({"a": "oslo/ann/1"}, place=index("oslo a"))
    shop.commit(place2=index("oslo a", "ann a"))
    shop.commit(place={"\0": "retired"}, place2={"\0": "ready"})
    return shop


@right
def a_switch(tape: Tape) -> None:
    shop = switched(tape)
    shop.commit({"b": "rome/bob/2"}, place=index("rome b"), place2=index("rome b", "bob b"))
    shop.tape.do("p", "end_derivation", table=PLACE)
    shop.commit({"a": None}, place2=index("-oslo a", "-ann a"))
    shop.end()


@wrong("mixed-versions")
def two_versions_are_ready(tape: Tape) -> None:
    shop = ready(tape, PLACE, PLACE_2)
    shop.end()


@wrong("mixed-versions")
def an_entry_of_another_version(tape: Tape) -> None:
    shop = switched(tape)
    shop.commit({"b": "rome/bob/2"}, place=index("bob b"), place2=index("rome b", "bob b"))
    shop.end()


@wrong("mixed-versions")
def a_version_that_ended_is_written(tape: Tape) -> None:
    shop = switched(tape)
    shop.tape.do("p", "end_derivation", table=PLACE)
    shop.commit({"b": "rome/bob/2"}, place=index("rome b"), place2=index("rome b", "bob b"))
    shop.end()


@right
def a_look_up_of_each_version(tape: Tape) -> None:
    shop = switched(tape)
    for txn, value, at, rows in (
        ("q1", "oslo", 35, [("a", "oslo/ann/1")]),
        ("q2", "ann", 35, []),
        ("q3", "ann", 40, [("a", "oslo/ann/1")]),
    ):
        shop.look_up(txn, value, *rows, at=at)
    shop.end()


@wrong("snapshot-not-prefix")
def a_look_up_misses_a_row(tape: Tape) -> None:
    shop = switched(tape)
    shop.look_up("q", "ann", at=40)
    shop.end()


@wrong("snapshot-not-prefix")
def a_look_up_of_a_version_that_is_not_ready(tape: Tape) -> None:
    shop = switched(tape)
    shop.look_up("q", "ann", ("a", "oslo/ann/1"), at=35)
    shop.end()


def looked_up(tape: Tape, value: str, *rows: tuple[str, str], at: int) -> None:
    """Transaction t5 looks up a value, and commits another row at 50."""
    shop = switched(tape)
    told = {"txn_id": None, "snapshot": at}
    tape.do("p", "begin", told, txn="t5", scope="s")
    found = {"low": "", "high": None, "rows": [list(row) for row in rows]}
    tape.do("p", "read", found, table=SOURCE, txn="t5", derivation="by-place", value=value)
    tape.begin = lambda *_, **__: None  # type: ignore[method-assign]
    shop.commit({"b": "rome/bob/2"}, place=index("rome b"), place2=index("rome b", "bob b"))
    shop.end()


@right
def a_look_up_that_holds(tape: Tape) -> None:
    looked_up(tape, "ann", ("a", "oslo/ann/1"), at=40)


@wrong("write-skew")
def a_look_up_before_the_switch(tape: Tape) -> None:
    looked_up(tape, "oslo", ("a", "oslo/ann/1"), at=35)


@wrong("write-skew")
def a_row_came_since(tape: Tape) -> None:
    looked_up(tape, "oslo", at=15)


def totals(tape: Tape, *, then: str | None = "12 2") -> Shop:
    """Totals by place at 20 and 30. ``then``: that of oslo at 30."""
    shop = Shop(tape, SUMS)
    shop.commit({"a": "oslo/ann/5", "b": "rome/bob/3"})
    shop.commit(sums={"\0": "building x", "oslo\0\0": "5 1", "\0\1": "a"})
    shop.commit({"b": "oslo/bob/7"}, sums={"oslo\0\0": "12 2"})
    shop.commit(sums={"\0": "ready", "\0\1": None})
    shop.commit({"a": None}, sums={"oslo\0\0": then})
    return shop


@right
def totals_follow(tape: Tape) -> None:
    shop = totals(tape, then="7 1")
    shop.commit({"b": "-/bob/8"}, sums={"oslo\0\0": None})
    shop.end()


@wrong("wrong-entry")
def a_total_stays(tape: Tape) -> None:
    totals(tape).end()


@wrong("wrong-entry")
def a_total_of_no_rows(tape: Tape) -> None:
    shop = totals(tape, then="7 1")
    shop.commit({"b": None}, sums={"oslo\0\0": "0 0"})
    shop.end()


@wrong("wrong-entry")
def a_total_under_the_key_of_an_index(tape: Tape) -> None:
    shop = totals(tape, then="7 1")
    shop.commit(sums={"oslo\0\0b": "7 1"})
    shop.end()


def saw(tape: Tape, total: int, count: int, at: int, **told: bool) -> None:
    """Transaction t6 sees the total of oslo, and commits a row of another place at 60."""
    shop = totals(tape, then="7 1")
    tape.do("p", "begin", {"txn_id": None, "snapshot": at}, txn="t6", scope="s")
    asked = {"txn": "t6", "table": SOURCE, "derivation": "sums", "value": "oslo"}
    tape.do("p", "look_up_total", {"sum": total, "count": count, **told}, **asked)
    tape.begin = lambda *_, **__: None  # type: ignore[method-assign]
    shop.commit({"c": "-/cat/1"})
    shop.end()


@right
def a_total_that_is_right(tape: Tape) -> None:
    saw(tape, 7, 1, at=50)


@right
def a_total_with_own_writes(tape: Tape) -> None:
    saw(tape, 8, 2, at=50, own=True)


@wrong("snapshot-not-prefix")
def a_total_that_never_was(tape: Tape) -> None:
    saw(tape, 8, 2, at=50)


@wrong("write-skew")
def a_total_that_changed_since(tape: Tape) -> None:
    saw(tape, 12, 2, at=40)


@wrong("unexplained")
def entries_that_were_not_counted(tape: Tape) -> None:
    shop = ready(tape, PLACE)
    shop.commit({"a": "oslo/ann/1"}, place=index("oslo a"), fewer=1)
    shop.end()


@right
def a_log_that_was_not_read(tape: Tape) -> None:
    shop = ready(tape, PLACE)
    shop.commit({"a": "oslo/ann/1"})
    del shop._log[PLACE]
    shop.end()


def later(tape: Tape) -> Shop:
    """Row a comes at 10, and changes at 20."""
    shop = Shop(tape, LATER)
    shop.commit({"a": "oslo/ann/1"})
    shop.commit({"a": "rome/ann/2"})
    return shop


@right
def derived_later(tape: Tape) -> None:
    shop = later(tape)
    shop.derive((10, "oslo a"), (20, "-oslo a"), (20, "rome a"), through=20)
    shop.commit({"b": "oslo/bob/3"})  # at 40, and no worker comes to it
    shop.look_up("q", "oslo", ("a", "oslo/ann/1"), at=10, of="later")
    shop.end()


@right
def an_entry_that_comes_and_goes_in_one_commit(tape: Tape) -> None:
    shop = later(tape)
    shop.derive((10, "oslo a"), (10, "bonn a"), (10, "-bonn a"))
    shop.derive((20, "-oslo a"), (20, "rome a"), through=20)
    shop.end()


@wrong("wrong-entry")
def a_promised_entry_is_missing(tape: Tape) -> None:
    shop = later(tape)
    shop.derive((10, "oslo a"), (20, "-oslo a"), through=20)
    shop.end()


@wrong("wrong-entry")
def an_entry_has_the_worker_s_time(tape: Tape) -> None:
    shop = later(tape)
    shop.derive((10, "oslo a"), (30, "-oslo a"), (20, "rome a"), through=20)
    shop.end()


@wrong("wrong-entry")
def an_entry_comes_after_it_was_promised(tape: Tape) -> None:
    shop = later(tape)
    shop.derive((10, "oslo a"), (20, "-oslo a"), through=20)
    shop.derive((20, "rome a"))
    shop.end()


@wrong("wrong-entry")
def an_entry_is_derived_twice(tape: Tape) -> None:
    shop = later(tape)
    shop.derive((10, "oslo a"))
    shop.derive((10, "oslo a"), (20, "-oslo a"), (20, "rome a"), through=20)
    shop.end()


@right
def an_entry_comes_and_goes_with_the_parts_of_a_commit(tape: Tape) -> None:
    shop = Shop(tape, LATER)
    shop.commit({"a": None}, first={"a": "oslo/ann/1"})
    shop.derive((10, "oslo a"))
    shop.derive((10, "-oslo a"), through=10)
    shop.end()


@wrong("wrong-entry")
def a_part_of_a_commit_is_promised_as_the_whole(tape: Tape) -> None:
    shop = Shop(tape, LATER)
    shop.commit({"a": None}, first={"a": "oslo/ann/1"})
    shop.derive((10, "oslo a"), through=10)
    shop.derive((10, "-oslo a"))
    shop.end()


@wrong("wrong-entry")
def what_no_worker_writes(tape: Tape) -> None:
    shop = later(tape)
    shop.derive((10, "oslo a"), (20, "-oslo a"), (20, "rome a"))
    shop._log[LATER][0][2] = "a"
    shop.end()


@wrong("snapshot-not-prefix")
def a_look_up_before_it_is_derived(tape: Tape) -> None:
    shop = later(tape)
    shop.look_up("q", "rome", at=20, of="later")
    shop.end()


test_each_anomaly_is_named, test_a_sound_history_is_accepted = TABLE.tests()


@pytest.mark.parametrize(
    ("what", "asked"),
    [
        ("derivation", {"type": "sum"}),
        ("derivation", {"number": "2"}),
        ("derivation", {"fields": ["0"]}),
        ("derivation", {}),
        ("end_derivation", {"table": "s/other"}),
    ],
)
def test_a_declaration_that_is_not_as_it_should_be(what: str, asked: dict[str, Any]) -> None:
    tape = Tape()
    of: dict[str, Any] = {"table": PLACE, "source": SOURCE, "name": "n", "version": 1}
    of |= {"type": "index", "fields": [0]}
    tape.do("end", "derivation", **of)
    tape.do("end", what, **of | asked)
    with pytest.raises(BrokenHistory):
        tape.judge()
