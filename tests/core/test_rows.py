"""Keys of the status log and of the table, and the changes that lie over it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core import rows as k
from anabranch.core.rows import Entry
from anabranch.core.state import Overlay, State
from anabranch.errors import InvariantViolation, MalformedRecord
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import encode
from tests.core.tables import Memory

TXN = bytes(range(16))


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (k.TERM_KEY, "00" * 16 + "01"),
        (k.ROUND_KEY, "00" * 16 + "02"),
        (k.scope_key("nyc"), "00" * 16 + "03" + b"nyc".hex()),
        (k.stream_key("nyc/a"), "00" * 16 + "04" + b"nyc/a".hex()),
        (k.name_key("nyc", "a/b"), "00" * 16 + "05" + b"nyc/a/b".hex()),
        (k.txn_key(TXN), TXN.hex() + "10"),
        (k.participant_key(TXN, "nyc/a"), TXN.hex() + "11" + b"nyc/a".hex()),
        (k.writer_key(TXN, 1), TXN.hex() + "12" + "0000000000000001"),
        (k.writer_key(TXN, -1), TXN.hex() + "12" + "ffffffffffffffff"),
        (k.pending_key(TXN), TXN.hex() + "13"),
    ],
)
def test_keys_on_the_wire(key: bytes, text: str) -> None:
    assert key.hex() == text
    txn_id, entry, identifier = k.split_key(key)
    assert txn_id + bytes((entry,)) + identifier == key


@pytest.mark.parametrize("key", [b"", TXN, TXN + b"\x00", TXN + b"\x1f", TXN + b"\xff" + b"x"])
def test_other_keys_are_malformed(key: bytes) -> None:
    with pytest.raises(MalformedRecord):
        k.split_key(key)


def test_a_transactions_own_row_comes_first_of_its_rows() -> None:
    keys = [k.pending_key(TXN), k.writer_key(TXN, 0), k.participant_key(TXN, ""), k.txn_key(TXN)]
    assert min(keys) == k.txn_key(TXN)
    assert all(key.startswith(TXN) for key in keys)
    assert all(entry >= Entry.TXN for _, entry, _ in map(k.split_key, keys))


@given(st.lists(st.tuples(st.integers(0, 1 << 62), st.binary(min_size=16, max_size=16))))
def test_finished_ones_sort_by_their_end(ends: list[tuple[int, bytes]]) -> None:
    keys = sorted(k.finished_key(ms, txn_id) for ms, txn_id in ends)
    assert [(int.from_bytes(key[1:9], "big"), key[9:]) for key in keys] == sorted(ends)


@given(st.tuples(st.from_regex("[a-z]{1,3}", fullmatch=True), st.text(min_size=1)))
def test_names_of_unlike_scopes_never_meet(named: tuple[str, str]) -> None:
    scope, name = named
    rest = k.name_key(scope, name)[len(NO_TXN) + 1 :].decode()
    assert tuple(rest.split("/", 1)) == named


# -- changes over a table ----------------------------------------------------------------------

keys = st.binary(min_size=1, max_size=2) | st.sampled_from([b"s", b"sa", b"sb", b"s\xff", b"t"])
changes = st.lists(st.tuples(keys, st.none() | st.binary(max_size=1)), max_size=8)


@given(st.dictionaries(keys, st.binary(max_size=1)), st.lists(changes, max_size=3))
def test_changes_are_seen_as_if_they_were_written(
    below: dict[bytes, bytes], rounds: list[list[tuple[bytes, bytes | None]]]
) -> None:
    table, plain = Memory(below), Memory(below)
    overlay = Overlay(table)
    for changed in rounds:
        for key, value in changed:
            overlay.set(key, value)
            plain.write({key: value})
            assert overlay.get(key) == value
        for prefix in (b"", b"s", b"sa", b"s\xff", b"zz"):
            assert list(overlay.scan(prefix)) == list(plain.scan(prefix))
        for key in plain.rows.keys() | below.keys():
            assert overlay.get(key) == plain.get(key)
        table.write(overlay.take())
        assert overlay.take() == {}
    assert table.rows == plain.rows


def test_many_changes_between_two_scans() -> None:
    """More fresh keys than are put in their places one by one."""
    overlay, plain = Overlay(Memory()), Memory()
    for i in range(500):
        key = bytes((i * 7 % 251, i * 11 % 256))
        overlay.set(key, b"v")
        plain.write({key: b"v"})
        if i in (3, 40, 41, 200, 499):
            assert list(overlay.scan(b"")) == list(plain.scan(b""))
            assert list(overlay.scan(key[:1])) == list(plain.scan(key[:1]))


def test_a_scan_sees_the_changes_as_they_were_when_it_began() -> None:
    overlay = Overlay(Memory({b"a": b"1", b"c": b"1"}))
    overlay.set(b"b", b"1")
    seen = []
    for key, _ in overlay.scan(b""):
        seen.append(key)
        overlay.set(key + b"+", b"2")
    assert seen == [b"a", b"b", b"c"]


def test_a_row_of_the_wrong_kind_is_a_defect() -> None:
    state = State(Memory())
    name: Any = r.NameRow(TXN)
    state._table.set(k.STATUS + k.txn_key(TXN), state.apply(k.name_key("x", "y"), name))
    with pytest.raises(InvariantViolation, match="NameRow"):
        state.txn_row(TXN)
    assert state.holder("x", "y") == TXN
    assert state.holder("x", "z") is None


def test_a_pending_commit_of_an_older_build_is_read() -> None:
    """It had a list for each field of its askers."""
    former = r.FormerPendingCommitRow(
        (b"one", b"two"), (1, 2), ("open", "etl"), (b"digest-1", b"digest-2"), True, (), "name", 3, 4, None, None,
        (b"two",),
    )  # fmt: skip
    key = k.pending_key(bytes(15) + b"x")
    assert k.read_row(key, encode(former)) == r.PendingCommitRow(
        (r.Asker(b"one", 1, b"digest-1", "open", False), r.Asker(b"two", 2, b"digest-2", "etl", True)),
        True, (), "name", 3, 4,
    )  # fmt: skip
