"""`Leaders` with tables, and transactions that read and lock rows there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anabranch.core.locks.table_writes import Keys, fingerprint
from anabranch.protocol.schemas import records as r
from tests.core.across.leaders import SCOPES, Leader, Leaders
from tests.core.harness import event


class Tables(Leaders):
    """Each control partition has a table ``t``, too. Transactions read at a snapshot of now."""

    def __init__(self, count: int = 2, **changes: Any) -> None:
        super().__init__(count, **changes)
        for number, one in enumerate(self.all):
            one.create(f"{SCOPES[number]}/t", table="true")
            one.created(f"{SCOPES[number]}/t", 0, 0)
        self.sets = 0

    def number(self, stream: str) -> int:
        """The control partition that has the stream."""
        return SCOPES.index(stream.partition("/")[0])

    def of(self, stream: str) -> Leader:
        return self[self.number(stream)]

    def open(self, label: str, home: int = 0) -> None:
        for one in self.all:
            one.ask("now", r.SafeTime(SCOPES[one.settings.control_partition], None, ()))
        now = min(one.state.round.hybrid_time for one in self.all)
        if label not in self[0].ids:
            self[home].id(label)
        begin = self[home].beginning(label, scope=SCOPES[home])
        self[home].ask(f"begin {label}", replace(begin, snapshot=now))

    def register(self, label: str, table: str, *keys: bytes, writer: str = "w") -> int | str:
        """Register locks. Returns the time of the answer, or what was answered instead."""
        self.sets += 1
        one, points = self.of(table), tuple(sorted(map(fingerprint, keys)))
        locks = (r.TableLocks(table, 0, 0, points, ()),)
        command = r.LockReads(one.token(label), one.writer(writer), self.sets, locks)
        before = len(one.rounds)
        said = one.ask(f"lock {label}", command) or self.join()
        replies = [result for its in one.rounds[before:] for _, result in its.replies]
        times = [one.timestamp for one in replies if isinstance(one, r.ReadsLocked)]
        return times[-1] if times else said

    def validate(self, label: str, table: str, through: int, writer: str = "w") -> None:
        """Report that nobody has written what was registered last, up to a time."""
        one = self.of(table)
        valid = r.Validated(one.writer(writer), self.sets, through)
        one.ask("validate", r.LockReads(one.token(label), valid.writer, 0, validated=(valid,)))

    def read(self, label: str, table: str, *keys: bytes, writer: str = "w") -> str:
        """Register locks, and validate them."""
        found = self.register(label, table, *keys, writer=writer)
        if isinstance(found, str):
            return found
        self.validate(label, table, found, writer)
        return "locked"

    def lock(self, table: str, *keys: bytes) -> r.TableLocks:
        """Locks for a one-shot, since now."""
        one, points = self.of(table), tuple(sorted(map(fingerprint, keys)))
        last = one.state.tables[table].last
        return r.TableLocks(table, one.state.round.hybrid_time, last, points, ())

    def put(self, label: str, table: str, key: bytes, writer: str = "w1") -> None:
        """Write a row by the journal."""
        one = self.of(table)
        if label not in {one.label(txn_id) for txn_id in one.state.open} or table not in (
            one.state.open[one.id(label)].participants
        ):
            assert self.touch(label, table).startswith("touched"), table
        self.add(label, table, key, writer)

    def add(self, label: str, table: str, key: bytes, writer: str = "w1") -> None:
        """Write a row by the journal of a table that was touched."""
        self.of(table).write(label, writer, table, digest=Keys.of([key]).to_bytes())

    def shot(self, label: str, table: str, key: bytes, **given: Any) -> str:
        """A one-shot that writes a row."""
        scope = table.partition("/")[0]
        return self.of(table).one_shot(label, event(table, key), scope=scope, **given)

    def end(self, label: str, writer: str = "w1", **given: Any) -> str:
        home = self[int.from_bytes(self[0].id(label)[:2], "big")]
        receipts = [replace(self.receipt(label, writer), sequence=1)]
        return home.commit(label, receipts=[one for one in receipts if one.extents], **given)

    def deliver_of(self, label: str, receiver: int) -> None:
        """Deliver the messages of one transaction to one control partition."""
        self.collect()
        txn_id = self[0].id(label)
        mine = [m for m in self.bag if (m.record.txn_id, m.receiver) == (txn_id, receiver)]
        self.bag = [m for m in self.bag if m not in mine]
        self.seen += [f"{label}: {m}" for m in mine]
        self[receiver].receive(*mine)
        self.collect()

    def locked(self) -> list[int]:
        """How many locks each control partition has."""
        return [one.state.locks.count for one in self.all]
