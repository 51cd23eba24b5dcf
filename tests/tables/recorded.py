"""A replica's transactions and snapshots, as histories have them (`docs/inside/checker.md`).

A row begins with an id, up to a space, that no other row ever has; so histories name rows by their ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from anabranch.client.own_writes import Local
from anabranch.client.replica import Replica
from anabranch.client.table_transaction import JoinedTransaction, TableTransaction
from anabranch.client.transaction import Transaction
from anabranch.core.derived_rows import Total
from anabranch.errors import (
    DeadlineExceeded,
    LocksBroken,
    ReceiptMismatch,
    TransactionAborted,
    UniqueViolation,
    WritersUnfinished,
)
from anabranch.protocol.ids import NO_TXN
from anabranch.tables.snapshot import TableSnapshot, bounds
from anabranch.types import Receipt, Result
from checker.recorder import Recorder

_REFUSED = (LocksBroken, TransactionAborted, WritersUnfinished, ReceiptMismatch)
OWN = "own"  # the writer that begins it


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
    by = error.by.hex() if error.by != NO_TXN else None  # empty: it was not told
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
        return RecordedTransaction.begun(self._recorder(), txn, self.label(), self._scope, seen)

    def join(self, whole: RecordedTransaction, token: bytes, **how: Any) -> RecordedPart:
        """As `Replica.join`: a part of that transaction."""
        recorder, writer = self._recorder(), self.label()
        isolation = "serializable" if whole.txn._reads_lock else "snapshot"
        with telling(recorder, writer, whole.name):
            part = self.replica.join(token, isolation=isolation, **how)  # type: ignore[arg-type]
        return RecordedPart(recorder, part, whole, writer)

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
        self,
        recorder: Recorder,
        view: TableSnapshot | TableTransaction | JoinedTransaction,
        of: dict[str, str],
    ) -> None:
        self._recorder, self.view, self._of = recorder, view, of
        self.timestamp = view.timestamp

    def own(self, _: str) -> set[bytes]:
        """Keys that it wrote, or may have."""
        return set()

    def get(self, table: str, key: bytes, *, lock: bool = True) -> bytes | None:
        """A row. ``lock`` False: only of a transaction."""
        how = {} if lock else {"lock": False}
        with self._reading(table, **_unlocked(how)) as told:
            row = self.view.get(table, key, **how)
            told |= {"low": text(key), "high": text(key + b"\0")}
            told |= self._told(table, [] if row is None else [(key, row)])
        return row

    def _told(self, table: str, found: Sequence[tuple[bytes, bytes]]) -> dict[str, Any]:
        own = self.own(table)  # behind the read: others may have written meanwhile
        rows = [[text(key), id_of(row)] for key, row in found if key not in own]
        return {"rows": rows, "own": [text(key) for key in sorted(own)]}

    def scan(
        self, table: str, low: bytes = b"", high: bytes | None = None, **how: Any
    ) -> Iterator[tuple[bytes, bytes]]:
        """Rows of a range; recorded is the part that was iterated over."""
        reverse = bool(how.get("reverse"))
        prefix = how.get("prefix")
        begin, end = (low, high) if prefix is None else bounds(None, None, prefix)
        found: list[tuple[bytes, bytes]] = []
        op = self._recorder.ask("read", table=table, reverse=reverse, **_unlocked(how), **self._of)
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
        where = {"low": text(begin), "high": None if end is None else text(end)}
        if found or is_whole:
            self._recorder.told(op, "ok", **where, **self._told(table, found))

    def lookup(
        self, table: str, index: str, value: bytes, begins: str
    ) -> list[tuple[bytes, bytes]]:
        """What an index has; ``begins``: the ids of its rows begin so, and no others."""
        with self._reading(table, begins=begins) as told:
            found = list(self.view.lookup(index, value))
            rows = [[text(key), id_of(row)] for key, row in found]
            told |= {"low": "", "high": None, "rows": rows}
        return found

    def look_up(self, table: str, derivation: str, value: bytes) -> list[tuple[bytes, bytes]]:
        """The rows that a derivation has under a value."""
        how: dict[str, Any] = {} if isinstance(self.view, TableSnapshot) else {"source": table}
        with self._reading(table, derivation=derivation, value=text(value)) as told:
            found = list(self.view.lookup(derivation, value, **how))
            told |= {"low": "", "high": None, **self._told(table, found)}
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


def _unlocked(how: Mapping[str, Any]) -> dict[str, Any]:
    """What a read without a lock is recorded with."""
    return {} if how.get("lock", True) else {"unlocked": True}


class RecordedWork(RecordedSnapshot):
    """What one process reads and writes in a transaction. ``writer``: its name. ``shared``: keys that all wrote."""

    view: TableTransaction | JoinedTransaction

    def __init__(
        self,
        recorder: Recorder,
        view: TableTransaction | JoinedTransaction,
        label: str,
        writer: str,
        shared: dict[str, set[bytes]],
    ) -> None:
        part = {} if writer == OWN else {"writer": writer}
        super().__init__(recorder, view, {"txn": label, **part})
        self.name, self.writer = label, writer
        self._shared = shared
        self._mine: dict[str, set[bytes]] = {}

    @property
    def wrote(self) -> bool:
        """Whether this process wrote, or may have."""
        return bool(self._mine)

    @property
    def is_alone(self) -> bool:
        """Whether it sees its own writes alone; else another's may hide them."""
        return isinstance(self.view._own, Local)

    def own(self, table: str) -> set[bytes]:
        return (self._mine if self.is_alone else self._shared).get(table, set())

    def put(self, table: str, key: bytes, row: bytes | None) -> None:
        """Write a row; None deletes it."""
        with self._writing(table, key, row):
            if row is None:
                self.view.delete(table, key)
            else:
                self.view.put(table, key, row)

    def write(self, stream: str, value: bytes, key: bytes) -> None:
        """Write an event to a stream that is no table of the replica."""
        self._mine.setdefault(stream, set()).add(key)
        asked = {"stream": stream, "events": [[text(key), id_of(value)]]}
        with telling(self._recorder, self.writer, self.name, **asked):
            self.view.write(stream, value, key)

    def total(self, table: str, derivation: str, group: bytes) -> Total:
        """The total that a derivation has of a group."""
        asked = {"table": table, "derivation": derivation, "value": text(group)}
        op = self._recorder.ask("look_up_total", **asked, **self._of)
        own = bool(self.own(table))
        try:
            found = self.view.total(derivation, group, source=table)
        except BaseException as error:
            self._recorder.told(op, "failed", **broken_of(error))
            raise
        self._recorder.told(op, "ok", sum=found.sum, count=found.rows, own=own)
        return found

    def delete(self, table: str, key: bytes) -> None:
        """Delete a row."""
        self.put(table, key, None)

    def insert(self, table: str, key: bytes, row: bytes) -> None:
        """Write a row that is not there."""
        self.get(table, key)
        with self._writing(table, key, row):
            self.view.insert(table, key, row)

    @contextmanager
    def _writing(self, table: str, key: bytes, row: bytes | None) -> Iterator[None]:
        for wrote in (self._mine, self._shared):
            wrote.setdefault(table, set()).add(key)
        asked = {"stream": table, "events": [[text(key), id_of(row)]]}
        with telling(self._recorder, self.writer, self.name, **asked):
            yield


@contextmanager
def telling(recorder: Recorder, writer: str, label: str, **asked: Any) -> Iterator[None]:
    """Note what a part writes, or that its locks are broken."""
    given = {"what": "write", "stream": "", "events": [], **asked}
    op = recorder.ask(**given, txn=label, writer=writer)
    try:
        yield
    except (LocksBroken, UniqueViolation) as error:
        recorder.told(op, "failed", **broken_of(error))
        raise
    except BaseException as error:
        recorder.told(op, "unknown", **broken_of(error))
        raise
    recorder.told(op, "ok")


class RecordedPart(RecordedWork):
    """A part of a transaction that was begun elsewhere."""

    view: JoinedTransaction

    def __init__(
        self, recorder: Recorder, part: JoinedTransaction, whole: RecordedTransaction, writer: str
    ) -> None:
        super().__init__(recorder, part, whole.name, writer, whole._shared)
        self.receipt: Receipt | None = None

    def finish(self, **how: Any) -> Receipt:
        """As `JoinedTransaction.finish`."""
        with telling(self._recorder, self.writer, self.name, what="finish"):
            self.receipt = self.view.finish(**how)
        return self.receipt


class RecordedTransaction(RecordedWork):
    """A transaction, by the process that began it."""

    view: TableTransaction

    def __init__(self, recorder: Recorder, txn: TableTransaction, label: str) -> None:
        super().__init__(recorder, txn, label, OWN, {})
        self.txn = txn
        self._op: int | None = None
        self._elsewhere = 0  # events in a database

    @classmethod
    def begun(
        cls, recorder: Recorder, txn: TableTransaction, label: str, scope: str, seen: int
    ) -> RecordedTransaction:
        """One that began just now. ``seen``: the time that its snapshot has to include."""
        isolation = "serializable" if txn._reads_lock else "snapshot"
        txn_id = None if txn.txn_id is None else txn.txn_id.hex()
        asked = {"txn": label, "scope": scope, "isolation": isolation, "seen": seen}
        with recorder.asking("begin", **asked) as told:
            told |= {"txn_id": txn_id, "snapshot": txn.timestamp}
        return cls(recorder, txn, label)

    @property
    def is_over(self) -> bool:
        """As `TableTransaction.is_over`."""
        return self.txn.is_over

    @property
    def scope(self) -> str:
        """Its scope: that of the first row that it writes, unless it has been opened."""
        return self.txn._scope() if self.txn._opened is None else self.txn._home

    def token(self) -> bytes:
        """As `TableTransaction.token`."""
        with telling(self._recorder, OWN, self.name):
            return self.txn.token(("write", "heartbeat", "state"))

    def note_write(
        self, stream: str, events: Sequence[list[str | None]], *, elsewhere: bool = False
    ) -> None:
        """Note events that it wrote to a stream: key and id. ``elsewhere``: to a database, by a ledger."""
        self._elsewhere += len(events) if elsewhere else 0
        self._recorder.note("write", txn=self.name, writer=OWN, stream=stream, events=list(events))

    def ask_commit(self, parts: Sequence[RecordedPart] | None = None, **more: Any) -> None:
        """Note that it is about to commit. ``parts``: None: all that finished. ``more``: fields of the request."""
        if self.wrote or more or self.txn._changes or self.txn._opened is not None:
            named = None if parts is None else [OWN, *(part.writer for part in parts)]
            asked = {"writers": named, "own": [OWN], "txn": self.name, "scope": self.scope, **more}
            self._op = self._recorder.ask("commit", **asked)

    def failed(self, error: BaseException) -> None:
        """Note how a commit went that was asked."""
        if self._op is None:
            return
        is_short = self.txn._opened is None
        refused = isinstance(error, (*_REFUSED, DeadlineExceeded) if is_short else _REFUSED)
        known = {"txn_id": self.txn.txn_id.hex()} if self.txn.txn_id else {}
        outcome = "failed" if refused else "unknown"
        self._recorder.told(self._op, outcome, **known, **broken_of(error))

    def committed(self, result: Result, unseen: int = 0) -> None:
        """Note that it is committed; or that it ended well, as of its snapshot, with nothing written.

        ``unseen``: events of the commit in tables of which no history is recorded.
        """
        if self._op is None:
            return
        if result.txn_id == NO_TXN:
            self._recorder.told(self._op, "failed", why="broken, and it read only")
        else:
            told = _told(result)
            told["committed"] += self._elsewhere - unseen
            if result.txn_id != self.txn.txn_id:
                told["replayed"] = True
            self._recorder.told(self._op, "ok", **told)

    def commit(self, parts: Sequence[RecordedPart] | None = None, **how: Any) -> Result:
        """As `TableTransaction.commit`, with the receipts of these parts."""
        self.ask_commit(parts)
        receipts = None if parts is None else [part.receipt for part in parts if part.receipt]
        try:
            result = self.txn.commit(receipts, **how)
        except BaseException as error:
            self.failed(error)
            raise
        self.committed(result)
        return result

    def abort(self) -> None:
        """As `TableTransaction.abort`."""
        if self.txn.is_over:
            return
        if self.txn._opened is None:
            self.txn.abort()  # nothing is sent
            return
        with self._recorder.asking("abort", txn=self.name):
            self.txn.abort()


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
