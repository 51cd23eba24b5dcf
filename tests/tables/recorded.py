"""A replica's transactions and snapshots, as histories have them (`docs/checker.md`).

A row begins with an id, up to a space, that no other row ever has; so histories name rows by their ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from anabranch.client.transaction import Transaction
from anabranch.core.ids import NO_TXN
from anabranch.errors import DeadlineExceeded, LocksBroken, TransactionAborted
from anabranch.tables.replica import Replica
from anabranch.tables.snapshot import TableSnapshot, bounds
from anabranch.tables.transaction import TableTransaction
from anabranch.types import Result
from checker.recorder import Recorder

_WITHOUT_EFFECT = (LocksBroken, TransactionAborted, DeadlineExceeded)


def text(key: bytes) -> str:
    """A key; the order of texts is that of bytes."""
    return key.decode("latin-1")


def id_of(row: bytes | None) -> str | None:
    """A row's id."""
    return None if row is None else text(row).partition(" ")[0]


def broken_of(error: BaseException) -> dict[str, Any]:
    """What a failure tells of locks."""
    if not isinstance(error, LocksBroken):
        return {"why": f"{type(error).__name__}: {error}"[:300]}
    by = error.by.hex() if error.by != NO_TXN else None
    return {"broken": [error.table, text(error.key), by, error.commit_timestamp]}


def _told(result: Result) -> dict[str, Any]:
    committed = result.counts.committed
    return {
        "txn_id": result.txn_id.hex(), "timestamp": result.commit_timestamp, "committed": committed,
    }  # fmt: skip


class RecordedTables:
    """A replica, recorded. ``name``: of no other. ``recorder``: gives that of the process that runs."""

    def __init__(
        self, recorder: Callable[[], Recorder], replica: Replica, scope: str, name: str
    ) -> None:
        self.replica = replica
        self._recorder, self._scope, self._name = recorder, scope, name
        self._count = count()

    def label(self) -> str:
        """A name of no other transaction or snapshot."""
        return f"{self._name}#{next(self._count)}"

    def begin(self, **how: Any) -> RecordedTransaction:
        """As `Replica.begin`."""
        seen = self.replica._controller.last_timestamp
        return self._noted(self.replica.begin(**how), seen)

    def _noted(self, txn: TableTransaction, seen: int) -> RecordedTransaction:
        recorder, label = self._recorder(), self.label()
        isolation = "serializable" if txn._reads_lock else "snapshot"
        how = {"scope": self._scope, "isolation": isolation, "seen": seen}
        with recorder.asking("begin", txn=label, **how) as told:
            told |= {"txn_id": None, "snapshot": txn.timestamp}
        return RecordedTransaction(recorder, txn, label)

    def transact(self, function: Callable[[RecordedTransaction], object], **how: Any) -> Result:
        """As `Replica.transact`; each try is a transaction."""
        tries: list[RecordedTransaction] = []

        def noted(txn: TableTransaction) -> None:
            if tries:
                tries[-1].failed(tries[-1].txn._broken or TransactionAborted("by transact"))
            tries.append(self._noted(txn, 0))
            function(tries[-1])
            tries[-1].ask_commit()

        try:
            result = self.replica.transact(noted, **how)
        except BaseException as error:
            if tries:
                tries[-1].failed(error)
            raise
        tries[-1].committed(result)
        return result

    @contextmanager
    def snapshot(self, at: int | None = None, **how: Any) -> Iterator[RecordedSnapshot]:
        """As `Replica.snapshot`."""
        recorder, label = self._recorder(), self.label()
        more = {"stale": True} if not how.get("fresh", True) else {}
        tables = list(self.replica.tables)
        asked = {"snapshot": label, "streams": tables, "asked_for": at, **more}
        with recorder.asking("snapshot", **asked) as told:
            view = self.replica.snapshot(at=at, **how)
            told["timestamp"] = view.timestamp
        with view:
            yield RecordedSnapshot(recorder, view, {"snapshot": label})


class RecordedSnapshot:
    """A snapshot, or what a transaction reads."""

    def __init__(
        self, recorder: Recorder, view: TableSnapshot | TableTransaction, of: dict[str, str]
    ) -> None:
        self._recorder, self.view, self._of = recorder, view, of
        self.timestamp = view.timestamp

    def own(self, _: str) -> list[bytes]:
        """Keys that were written before."""
        return []

    def get(self, table: str, key: bytes) -> bytes | None:
        """A row."""
        if key in self.own(table):
            return self.view.get(table, key)
        with self._reading(table) as told:
            row = self.view.get(table, key)
            rows = [] if row is None else [[text(key), id_of(row)]]
            told |= {"low": text(key), "high": text(key + b"\0"), "rows": rows}
        return row

    def scan(
        self, table: str, low: bytes = b"", high: bytes | None = None, **how: Any
    ) -> Iterator[tuple[bytes, bytes]]:
        """Rows of a range; recorded is the part that was iterated over."""
        reverse = bool(how.get("reverse"))
        prefix = how.get("prefix")
        begin, end = (low, high) if prefix is None else bounds(None, None, prefix)
        own = self.own(table)
        found: list[tuple[bytes, bytes]] = []
        op = self._recorder.ask("read", table=table, reverse=reverse, **self._of)
        range_ = () if prefix is not None else (low, high)
        is_whole = False
        try:
            for row in self.view.scan(table, *range_, **how):
                found.append(row)
                yield row
            is_whole = how.get("limit") is None or len(found) < how["limit"]
        except (GeneratorExit, LocksBroken) as error:
            if isinstance(error, LocksBroken):
                self._recorder.told(op, "failed", **broken_of(error))
                raise
        if found and not is_whole:
            begin, end = (found[-1][0], end) if reverse else (begin, found[-1][0] + b"\0")
        rows = [[text(key), id_of(row)] for key, row in found if key not in own]
        where = {"low": text(begin), "high": None if end is None else text(end)}
        if found or is_whole:
            self._recorder.told(op, "ok", **where, rows=rows, own=[text(key) for key in own])

    def lookup(
        self, table: str, index: str, value: bytes, begins: str
    ) -> list[tuple[bytes, bytes]]:
        """What an index has; ``begins``: the ids of its rows begin so, and no others."""
        with self._reading(table, begins=begins) as told:
            found = list(self.view.lookup(index, value))  # type: ignore[union-attr]
            rows = [[text(key), id_of(row)] for key, row in found]
            told |= {"low": "", "high": None, "rows": rows}
        return found

    @contextmanager
    def _reading(self, table: str, **more: Any) -> Iterator[dict[str, Any]]:
        op = self._recorder.ask("read", table=table, **self._of, **more)
        told: dict[str, Any] = {}
        try:
            yield told
        except BaseException as error:
            self._recorder.told(op, "failed", **broken_of(error))
            raise
        self._recorder.told(op, "ok", **told)


class RecordedTransaction(RecordedSnapshot):
    """A transaction. Its writes are noted when it is asked to commit."""

    view: TableTransaction

    def __init__(self, recorder: Recorder, txn: TableTransaction, label: str) -> None:
        super().__init__(recorder, txn, {"txn": label})
        self.txn, self.name = txn, label
        self._written: dict[str, list[tuple[bytes, bytes | None]]] = {}
        self._op: int | None = None

    def own(self, table: str) -> list[bytes]:
        return [key for key, _ in self._written.get(table, ())]

    def put(self, table: str, key: bytes, row: bytes | None) -> None:
        """Write a row; None deletes it."""
        try:
            if row is None:
                self.txn.delete(table, key)
            else:
                self.txn.put(table, key, row)
        except LocksBroken as error:
            op = self._recorder.ask("write", writer="own", stream=table, events=[], **self._of)
            self._recorder.told(op, "failed", **broken_of(error))
            raise
        self._written.setdefault(table, []).append((key, row))

    def delete(self, table: str, key: bytes) -> None:
        """Delete a row."""
        self.put(table, key, None)

    def insert(self, table: str, key: bytes, row: bytes) -> None:
        """Write a row that is not there."""
        self.get(table, key)
        self.txn.insert(table, key, row)
        self._written.setdefault(table, []).append((key, row))

    def ask_commit(self) -> None:
        """Note that it is about to commit, and before the first time, what it wrote."""
        if self._op is None:
            for table, rows in self._written.items():
                events = [[text(key), id_of(row)] for key, row in rows]
                self._recorder.note("write", writer="own", stream=table, events=events, **self._of)
        if self._written:
            self._op = self._recorder.ask("commit", writers=["own"], **self._of)

    def failed(self, error: BaseException) -> None:
        """Note how a commit went that was asked."""
        if self._op is None:
            return
        outcome = "failed" if isinstance(error, _WITHOUT_EFFECT) else "unknown"
        known = {"txn_id": self.txn.txn_id.hex()} if self.txn.txn_id else {}
        self._recorder.told(self._op, outcome, **known, **broken_of(error))

    def committed(self, result: Result) -> None:
        """Note that it is committed."""
        if self._op is not None:
            self._recorder.told(self._op, "ok", **_told(result))

    def commit(self, **how: Any) -> Result:
        """As `TableTransaction.commit`."""
        self.ask_commit()
        try:
            result = self.txn.commit(**how)
        except BaseException as error:
            self.failed(error)
            raise
        self.committed(result)
        return result


class RecordedWrites:
    """A transaction that knows no locks, begun just now. ``label``: of no other."""

    def __init__(self, recorder: Recorder, txn: Transaction, scope: str, label: str) -> None:
        self._recorder, self.txn, self._of = recorder, txn, {"txn": label}
        recorder.told(recorder.ask("begin", scope=scope, **self._of), "ok", txn_id=None)

    def write(self, table: str, row: bytes | None, key: bytes) -> None:
        """As `Transaction.write`."""
        where = {"writer": "own", "stream": table, "events": [[text(key), id_of(row)]]}
        with self._recorder.asking("write", **where, **self._of):
            self.txn.write(table, row, key=key)

    def commit(self, **how: Any) -> Result:
        """As `Transaction.commit`."""
        op = self._recorder.ask("commit", writers=["own"], **self._of)
        try:
            result = self.txn.commit(**how)
        except BaseException as error:
            known = {"txn_id": self.txn.txn_id.hex()} if self.txn.txn_id else {}
            outcome = "failed" if isinstance(error, TransactionAborted) else "unknown"
            self._recorder.told(op, outcome, **known, **broken_of(error))
            raise
        self._recorder.told(op, "ok", **_told(result))
        return result
