"""Forms that a history may not have: each field is asked for, and each rule between operations holds."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from checker import BrokenHistory, judge_entries
from tests.checker.table import ONE, TWO
from tests.checker.tape import Tape, row

# As `docs/inside/checker.md` has it: of each operation the fields that it is asked with, and told with.
FIELDS = {
    "begin": ("txn scope", "txn_id"),
    "write": ("txn writer stream events", ""),
    "finish": ("txn writer", ""),
    "commit": ("txn writers", "txn_id timestamp committed"),
    "abort": ("txn", ""),
    "state": ("txn_id", "state timestamp"),
    "plain": ("stream events", ""),
    "derivation": ("table source name version type fields", ""),
    "end_derivation": ("table", ""),
    "look_up_total": ("txn table derivation value", "sum count"),
    "scale": ("stream", ""),
    "delete": ("stream topic", ""),
    "open": ("reader mode streams group starts", ""),
    "poll": ("reader", "events"),
    "position": ("reader", ""),
    "resume": ("reader places", ""),
    "caught_up": ("reader", ""),
    "close": ("reader", ""),
    "snapshot": ("snapshot streams asked_for", "timestamp"),
    "snapshot_read": ("snapshot stream", "events"),
    "log": ("stream partition", "start end events"),
    "commits": ("stream", "records"),
}


def _all_operations() -> Tape:
    """One of each, in the order of `FIELDS`: an ask and what was told, in turn."""
    tape = Tape()
    rows = [row("a", 0, ONE, 10)]
    tape.begin("t", ONE)
    tape.write("t", "a")
    tape.do("p", "finish", txn="t", writer="w")
    tape.commit("t", ONE, 10, 1)
    tape.told("p", tape.ask("p", "abort", txn="t"), "failed")
    tape.do("p", "state", {"state": "committed", "timestamp": 10}, txn_id=ONE)
    tape.do("p", "plain", stream="s/b", events=[])
    of: dict[str, Any] = {
        "source": "s/a",
        "name": "n",
        "version": 1,
        "type": "index",
        "fields": [0],
    }
    tape.do("p", "derivation", table="s/a-n-v1", **of)
    tape.do("p", "end_derivation", table="s/a-n-v1")
    asked = {"txn": "t", "table": "s/a", "derivation": "n", "value": "x"}
    tape.do("p", "look_up_total", {"sum": 0, "count": 0}, **asked)
    tape.do("p", "scale", stream="s/a")
    tape.do("p", "delete", stream="s/b", topic="journal")
    tape.open("r", "raw", "g", starts="position")
    tape.poll("r", *rows)
    tape.do("r", "position", reader="r")
    tape.do("r", "resume", reader="r", places=[])
    tape.do("r", "caught_up", reader="r")
    tape.do("r", "close", reader="r")
    tape.do("r", "snapshot", {"timestamp": 10}, snapshot="n", streams=["s/a"], asked_for=None)
    tape.do("r", "snapshot_read", {"events": rows}, snapshot="n", stream="s/a")
    tape.log(0, [0, "k", "a", ONE])
    tape.commits([0, 10, [ONE], [[0, 0, 1]]])
    return tape


def test_each_field_is_asked_for() -> None:
    """Left out, or of a type that no field has: the line is named."""
    good = _all_operations().entries
    assert judge_entries(copy.deepcopy(good)).ok
    assert [entry["what"] for _, _, entry in good[::2]] == list(FIELDS)
    for index, (asked, told) in enumerate(FIELDS.values()):
        for at, names in ((2 * index, asked), (2 * index + 1, told)):
            for name in ["at", "op", "kind", *names.split()]:
                for value, why in ((None, "is missing"), (True, "is bool"), (1.5, "is float")):
                    entries = copy.deepcopy(good)
                    del entries[at][2][name]
                    if value is not None:
                        entries[at][2][name] = value
                    with pytest.raises(BrokenHistory) as error:
                        judge_entries(entries)
                    file, line, _ = good[at]
                    assert str(error.value) == f"{file}:{line}: {name!r} {why}"


def test_a_failed_call_has_no_results() -> None:
    """Only an answer with ok has results."""
    tape = Tape()
    tape.begin("t", ONE)
    for outcome in ("failed", "unknown"):
        tape.told("p", tape.ask("p", "commit", txn="t", writers=None), outcome)
    assert tape.judge().ok


def _changed(tape: Tape, what: str, told: bool, **fields: Any) -> None:
    at = 2 * list(FIELDS).index(what) + told
    tape.entries[at][2].update(fields)


@pytest.mark.parametrize(
    ("what", "told", "fields", "why"),
    [
        ("write", False, {"events": ["ka"]}, "write: event 0 is not [key or null, id]"),
        ("write", False, {"events": [[None, "x"], [1, "a"]]}, "event 1 is not [key or null, id]"),
        ("write", False, {"events": [["k", 1]]}, "event 0 is not [key or null, id]"),
        ("state", True, {"state": "over"}, "state: unknown state 'over'"),
        ("open", False, {"mode": "quick"}, "open: unknown mode 'quick'"),
        ("open", False, {"starts": "middle"}, "open: unknown start 'middle'"),
        ("poll", True, {"events": [["s/a"]]}, "poll: event 0 has not 7 fields"),
        ("poll", True, {"events": ["1234567"]}, "poll: event 0 has not 7 fields"),
        ("snapshot_read", False, {"snapshot": "m"}, "snapshot_read: nobody took 'm'"),
        ("snapshot_read", True, {"events": [["s/a"]]}, "event 0 has not 7 fields"),
        ("log", True, {"events": [[0, "k", "a", ONE], [1]]}, "log: event 1 has not 4 fields"),
    ],
)
def test_a_wrong_value_is_named(what: str, told: bool, fields: dict[str, Any], why: str) -> None:
    """With the operation that has it."""
    tape = _all_operations()
    _changed(tape, what, told, **fields)
    with pytest.raises(BrokenHistory) as error:
        tape.judge()
    assert why in str(error.value)


def _again(tape: Tape, what: str) -> None:
    at = 2 * list(FIELDS).index(what)
    (file, _, asked), (_, _, told) = tape.entries[at : at + 2]
    op = tape.ask(
        file, what, **{k: v for k, v in asked.items() if k not in ("at", "op", "kind", "what")}
    )
    more = {k: v for k, v in told.items() if k not in ("at", "op", "kind", "outcome")}
    tape.told(file, op, **more)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("begin", "'t' was begun before"),
        ("write", "event 'a' was written before"),
        ("open", "reader 'r' was opened before"),
        ("snapshot", "snapshot 'n' was taken before"),
        ("log", "s/a[0] was read before"),
        ("commits", "it was read before"),
    ],
)
def test_what_comes_only_once(what: str, why: str) -> None:
    """Names are unique, and the end is read once."""
    tape = _all_operations()
    _again(tape, what)
    with pytest.raises(BrokenHistory) as error:
        tape.judge()
    assert why in str(error.value)


def test_a_reader_belongs_to_one_process() -> None:
    """Its operations stand in one file."""
    tape = _all_operations()
    tape.poll("r", file="q")
    with pytest.raises(BrokenHistory) as error:
        tape.judge()
    assert "reader 'r' is another process's" in str(error.value)


def test_numbers_of_other_streams_and_partitions_are_no_repetition() -> None:
    """Different numbers are not the same one twice."""
    tape = _all_operations()
    tape.log(1)
    tape.log(0, stream="s/b")
    tape.commits(stream="s/b")
    assert tape.judge().ok


def test_a_new_process_has_numbers_of_its_own() -> None:
    """Operations are numbered in each file."""
    tape = Tape()
    tape.begin("t", ONE, file="p")
    tape.begin("u", TWO, file="q")
    op = tape.ask("p", "abort", txn="t")
    other = tape.ask("q", "abort", txn="u")
    assert op == other
    tape.told("q", other)
    tape.told("p", op, "failed")
    report = tape.judge()
    assert report.ok
    assert report.counts["operations without an answer"] == 0
