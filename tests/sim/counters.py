"""Processes that add to rows of a table, and others that write the same rows: each row is judged at each commit.

The checker does not replay this table, because its values are not what clients sent. `check_counters` replays its
commits: an addition makes of a row what was there just below it, and the number that was sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from anabranch.batches.records import Record, encode_batch
from anabranch.client.client import Client
from anabranch.client.replica import Replica
from anabranch.client.table_transaction import TableTransaction
from anabranch.core.locks.numbers import changed, number_in
from anabranch.errors import DeadlineExceeded, LocksBroken, TransactionAborted
from anabranch.ports import LogError, TopicPartition
from anabranch.protocol.ids import txn_text
from anabranch.protocol.schemas import records as r
from anabranch.topics.names import journal_topic
from tests.sim.check_log import hold
from tests.sim.picture import Picture
from tests.sim.tables import OwnTableMachine
from tests.sim.writers import COUNTERS, FINE, SCOPE

KEYS = (b"hot", b"hot", b"hot", b"warm", b"cold")
_KINDS: tuple[r.ChangeKind, ...] = ("ADD", "ADD", "ADD", "ADD", "MIN", "MAX")
_OVER = (LocksBroken, TransactionAborted, DeadlineExceeded)  # nothing was written


@dataclass(slots=True)
class Attempt:
    """A transaction that changes rows. ``told``: its commit timestamp; ``is_over``: told to have no effect."""

    changes: Mapping[bytes, tuple[r.ChangeKind, int]]
    told: int = 0
    is_over: bool = False


@dataclass(slots=True)
class Counted:
    """What all processes tried, by transaction id, and what snapshots had, by timestamp."""

    attempts: dict[bytes, Attempt] = field(default_factory=dict)
    seen: list[tuple[int, dict[bytes, bytes]]] = field(default_factory=list)

    def attempt(self, txn_id: bytes, changes: Mapping[bytes, tuple[r.ChangeKind, int]]) -> Attempt:
        """Note a transaction that is about to commit."""
        made = self.attempts[txn_id] = Attempt(changes)
        return made


class CounterMachine(OwnTableMachine[Counted]):
    """A process with a replica of the table; it lives as a `TableMachine`."""

    title = "n"
    table = COUNTERS

    # -- its work -------------------------------------------------------------------------------------

    def _job(self, client: Client, replica: Replica) -> None:
        kinds: list[tuple[float, Callable[[], None]]] = [
            (10, lambda: self._change(replica)),
            (2, lambda: self._put(replica)),
            (2, lambda: self._blind(client)),
            (2, self._plain),
            (2, lambda: self._observe(replica)),
        ]
        self._random.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])[0]()

    def _change(self, replica: Replica) -> None:
        """Several transactions, that more of them are in one round."""
        begun = []
        for _ in range(self._random.choice((1, 1, 2, 4))):
            txn = replica.begin(fresh=self._random.random() < 0.5, timeout=5.0)
            changes: dict[bytes, tuple[r.ChangeKind, int]] = {}
            for key in {self._random.choice(KEYS) for _ in range(self._random.choice((1, 1, 2)))}:
                changes[key] = (self._random.choice(_KINDS), self._random.randint(-9, 9))
            for key, (kind, number) in sorted(changes.items()):
                change = {"ADD": txn.add, "MIN": txn.min, "MAX": txn.max}[kind]
                change(COUNTERS, key, number)
            begun.append((txn, changes))
        for txn, changes in begun:
            self._commit_changes(txn, changes)

    def _commit_changes(
        self, txn: TableTransaction, changes: Mapping[bytes, tuple[r.ChangeKind, int]]
    ) -> None:
        with contextlib.suppress(*FINE):
            attempt = self._all_did.attempt(txn.assign_id(), changes)
            for _ in range(2):  # a repeated call settles what is not known
                try:
                    result = txn.commit(timeout=5.0)
                except FINE as error:
                    self.world.note(self.name, f"{type(error).__name__}: {error}"[:300])
                    attempt.is_over = isinstance(error, _OVER)
                    if attempt.is_over or txn.txn_id is None:
                        return
                    continue
                attempt.told = result.commit_timestamp
                hold(result.counts.committed == len(changes), "a change is not counted")
                return

    def _number(self) -> bytes:
        return b"%d" % self._random.randint(-99, 99)

    def _put(self, replica: Replica) -> None:
        """A row is read and written, with a lock."""
        with contextlib.suppress(LocksBroken), replica.begin(timeout=5.0) as txn:
            key = self._random.choice(KEYS)
            txn.put(COUNTERS, key, b"%d" % (int(txn.get(COUNTERS, key) or b"0") + 1))
            txn.commit(timeout=5.0)

    def _blind(self, client: Client) -> None:
        with client.begin(SCOPE, keepalive=6.0) as txn:
            for _ in range(self._random.randint(1, 2)):
                value = None if self._random.random() < 0.3 else self._number()
                txn.write(COUNTERS, value, self._random.choice(KEYS))
            if self._random.random() < 0.5:
                txn.flush(timeout=5.0)  # then it commits from a journal
            txn.commit(timeout=5.0)

    def _plain(self) -> None:
        """By a program that knows nothing of the library."""
        record = Record(0, self.world.wall_ms, self._random.choice(KEYS), self._number())
        place = TopicPartition(journal_topic(COUNTERS), 0)
        with contextlib.suppress(LogError):
            self.cluster.log_of(self.world.current).produce_batch(place, encode_batch([record]))

    def _observe(self, replica: Replica) -> None:
        with replica.snapshot(timeout=5.0) as view:
            self._all_did.seen.append((view.timestamp, dict(view.scan(COUNTERS))))

    def _last(self, client: Client, replica: Replica) -> bool:
        del client
        self.world.set_clocks()  # with a wrong clock each new id may be too old, or too new
        self._change(replica)
        self._observe(replica)
        return True


def check_counters(picture: Picture, counted: Counted) -> None:
    """Each change is in the table once if it was told so, and at each timestamp each row is right."""
    rows: dict[bytes, bytes] = {}
    looks = sorted(counted.seen, key=lambda look: look[0])
    found: dict[bytes, int] = {}
    records = [record for stream, _, record in picture.commits() if stream == COUNTERS]
    for record in sorted(records, key=lambda record: record.timestamp):
        while looks and looks[0][0] < record.timestamp:
            _check_look(rows, *looks.pop(0))
        wrote = _written(picture, record)
        attempt = counted.attempts.get(record.txn_id)
        if attempt is not None:
            who = txn_text(record.txn_id)
            hold(record.txn_id not in found, f"{who} changed its rows twice")
            found[record.txn_id] = record.timestamp
            due = {
                key: b"%d" % changed(kind, number_in(rows.get(key)), number)
                for key, (kind, number) in attempt.changes.items()
            }
            hold(wrote == due, f"{who} made {wrote} of {rows} by {attempt.changes}")
        for key, value in wrote.items():
            if value is None:
                rows.pop(key, None)
            else:
                rows[key] = value
    for look in looks:
        _check_look(rows, *look)
    for txn_id, attempt in counted.attempts.items():
        at, who = found.get(txn_id, 0), txn_text(txn_id)
        hold(not attempt.told or at == attempt.told, f"{who} was told {attempt.told}, is at {at}")
        hold(not (attempt.is_over and at), f"{who} is in the table, and told to have no effect")


def _check_look(rows: Mapping[bytes, bytes], at: int, seen: Mapping[bytes, bytes]) -> None:
    hold(dict(rows) == seen, f"a snapshot at {at} had {seen}, and the log {dict(rows)}")


def _written(picture: Picture, record: r.CommitRecord) -> dict[bytes, bytes | None]:
    """What a commit wrote, the last value of each key."""
    wrote: dict[bytes, bytes | None] = {}
    for part in record.segments:
        for event in picture.events[COUNTERS, part.partition]:
            if part.first <= event.offset < part.end:
                wrote[event.record.key or b""] = event.record.value
    return wrote
