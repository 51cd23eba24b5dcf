"""Tables in memory, and what states derive from logs of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from anabranch.core.state import State
from anabranch.protocol.partitioner import SPACE
from anabranch.protocol.schemas.records import TxnRow

Row = tuple[bytes, bytes | None]


class Memory:
    """A table: a dict, scanned in key order."""

    def __init__(self, rows: Mapping[bytes, bytes] | None = None) -> None:
        self.rows: dict[bytes, bytes] = dict(rows or {})

    def get(self, key: bytes) -> bytes | None:
        return self.rows.get(key)

    def scan(self, prefix: bytes, first: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        rows = self.rows.items()
        yield from sorted((k, v) for k, v in rows if k.startswith(prefix) and k >= first)

    def scan_back(self, before: bytes) -> Iterator[tuple[bytes, bytes]]:
        yield from sorted(((key, v) for key, v in self.rows.items() if key < before), reverse=True)

    def write(self, changes: Mapping[bytes, bytes | None]) -> None:
        for key, value in changes.items():
            if value is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = value


def txn_rows(state: State) -> list[TxnRow]:
    """All transactions' rows, the newest id first."""
    return [row for _, row in state.txn_rows_below(None) if row is not None]


def table_of(state: State) -> dict[bytes, bytes]:
    """The whole table as the state sees it, changes not yet written included."""
    return dict(state._table.scan(b""))


def rows_of(table: Mapping[bytes, bytes], prefixes: bytes = b"sofm") -> dict[bytes, bytes]:
    """The rows that follow from the status log alone."""
    return {key: value for key, value in table.items() if key[0] in prefixes}


def views_of(state: State) -> dict[str, Any]:
    """The decoded views, as data to compare; also the orders that decisions follow."""
    return {
        "term": state.term,
        "round": state.round,
        "scopes": dict(state.scopes),
        "scope_owners": dict(state.scope_owners),
        "streams": dict(state.streams),
        "exclusive": dict(state.exclusive),
        "locked": {stream: dict(rows) for stream, rows in state.locked.items()},
        "held": {stream: held.of(((0, SPACE),)) for stream, held in state.held.items()},
        "changing": dict(state.changing),
        "open": {
            txn_id: (
                txn.row,
                dict(txn.participants),
                dict(txn.writers),
                dict(txn.lanes),
                txn.pending,
                txn.votes_row,
                dict(txn.partitions),
                txn.promised,
            )
            for txn_id, txn in state.open.items()
        },
        "lanes": dict(state.lanes),
        "grants": {lane: dict(granted) for lane, granted in state.grants.items() if granted},
        "committing": set(state.committing),
        "coordinated": set(state.coordinated),
        "asking": set(state.asking),
        "promised": set(state.promised),
    }


def fold(
    rounds: Iterable[Sequence[Row]],
    pieces: Sequence[int] = (),
    table: Memory | None = None,
) -> State:
    """The state of a log. ``pieces``: after so many rounds it is derived and written."""
    table = table or Memory()
    state = State(table)
    for i, rows in enumerate(rounds):
        if i in pieces:
            state.rederive()
            table.write(state.take_changes())
        for key, value in rows:
            state.fold_row(key, value)
    state.rederive()
    table.write(state.take_changes())
    return state
