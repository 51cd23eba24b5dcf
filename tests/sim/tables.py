"""Processes with replicas of two tables: transactions with locks, snapshots, and writes that nobody locks.

Each notes what it read, and at which time; `check_tables` replays the log. What a transaction came to is what
the log says, so no outcome is in doubt there. Draws come from each process's own numbers.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from anabranch.batches.records import Record, encode_batch
from anabranch.client.client import Client
from anabranch.core.ids import NO_TXN
from anabranch.errors import (
    EventTooLarge,
    LocksBroken,
    NotAuthorized,
    SnapshotExpired,
    TransactionAborted,
    UnknownScope,
    UnknownStream,
)
from anabranch.ports import LogError, TopicPartition
from anabranch.tables.replica import Replica
from anabranch.topics.names import journal_topic
from anabranch.types import Receipt
from tests.sim.check_log import hold
from tests.sim.clients import REFUSED, beat
from tests.sim.readers import reading_client
from tests.sim.scaling import scale_somehow
from tests.sim.world import START_S, Process, World
from tests.sim.writers import FINE

if TYPE_CHECKING:
    from anabranch.tables.transaction import TableTransaction
    from tests.sim.faults import Faults
    from tests.sim.ledger import Ledger
    from tests.sim.ports import SimCluster

TABLES = ("s/rows", "rows/near")  # in scopes that commit together
KEYS = tuple(b"k%d" % number for number in range(5))
PAIR = b"pair"  # a row of each table: together never below LEAST, each 1 where there is none
LEAST = 1
_RESTART_S = 1.0
_TIMEOUT_S = 10.0
_ANYWAY = (*FINE, UnknownStream, UnknownScope, SnapshotExpired, LogError)


@dataclass(frozen=True, slots=True)
class Read:
    """What a read gave. ``limit`` 0: a point; else a scan, which looked at so many rows of [low, high)."""

    table: str
    low: bytes
    high: bytes | None
    rows: tuple[tuple[bytes, bytes], ...]
    limit: int = 0
    reverse: bool = False


@dataclass(slots=True)
class Done:
    """A transaction, or a snapshot. ``told``: its commit timestamp, if that was answered."""

    at: int  # the time of its snapshot
    reads: list[Read] = field(default_factory=list)
    txn: TableTransaction | None = None
    told: int = 0
    read_only: int = 0  # the commit timestamp of a long one that wrote nothing, or its snapshot + 1
    error: Exception | None = None
    receipts: list[Receipt] = field(default_factory=list)  # of others' parts in a long one

    @property
    def txn_id(self) -> bytes | None:
        return self.txn.txn_id if self.txn is not None else None


@dataclass(slots=True)
class Noted:
    """What all processes did."""

    done: list[Done] = field(default_factory=list)
    long: list[tuple[bytes, Done]] = field(default_factory=list)  # tokens
    told: int = 0  # the highest commit timestamp that anybody was told
    writes: int = 0

    def value(self, number: int) -> bytes:
        """A row's value, never used before."""
        self.writes += 1
        return b"%d/%d" % (number, self.writes)


def number_of(value: bytes | None) -> int:
    """The number in a row; 1 where there is none."""
    return 1 if value is None else int(value.split(b"/")[0])


class TableMachine:
    """A process with a replica; it is started again when it dies, with its folder, an older copy, or none."""

    def __init__(
        self,
        world: World,
        cluster: SimCluster,
        faults: Faults,
        ledger: Ledger,
        noted: Noted,
        number: int,
    ) -> None:
        self.world, self.cluster, self.faults, self.ledger = world, cluster, faults, ledger
        self._noted = noted
        self.name = f"t{number}"
        self._random = Random(f"{world.seed}/{self.name}")
        self._starts = 0
        self._jobs = 12
        self.done = False
        self._folder = Path(tempfile.mkdtemp(prefix="anabranch-sim-"))

    def start(self) -> None:
        """Start a process."""
        self._starts += 1
        skew = self.faults.weather.skew_s
        process = Process(
            f"{self.name}.{self._starts}", "client", skew=self._random.uniform(-skew, skew)
        )
        self.faults.jump_clock(process)
        process.on_death.append(lambda: self.world.later(_RESTART_S, self.start))
        self.world.spawn(process, "main", lambda: self._run(process))

    def close(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- its life -------------------------------------------------------------------------------------

    def _run(self, process: Process) -> None:
        settings = {"timeout": _TIMEOUT_S, "one_shot_bytes": self._random.choice((0, 1 << 18))}
        client = reading_client(self.cluster, process, self.ledger.prefix, **settings)
        self.world.spawn(process, "heart", lambda: beat(self.world, client, process))
        self._until_it_works(lambda: self._create(client))
        self._choose_folder()
        replica: Replica | None = None
        try:
            while not self.done:
                self.world.sleep(self._random.expovariate(1.5))
                replica = replica or self._try(lambda: self._open(client))
                if replica is None:
                    continue
                if self._jobs:
                    self._jobs -= 1
                    self._try(lambda r=replica: self._job(client, r))  # type: ignore[misc]
                    if self._random.random() < 0.1:
                        replica.close()
                        replica = None
                elif self.faults.calm:
                    # In calm nothing is in the way of one that goes on trying.
                    last = self._until_it_works(lambda r=replica: self._last(r))  # type: ignore[misc]
                    self.done = last
        finally:
            if replica is not None:
                with contextlib.suppress(BaseException):  # a dead process calls no port
                    replica._follower.close()
                replica._store.close()
                replica._closed = True

    def _try(self, call: Callable[[], Any]) -> Any:
        """What it gives; None where it may fail, and does."""
        troubled = (NotAuthorized, *REFUSED) if self.ledger.troubled else ()
        lawful = (NotAuthorized,) if self.ledger.lanes else ()
        try:
            return call()
        except (*_ANYWAY, NotAuthorized, *REFUSED) as error:
            if not isinstance(error, (*_ANYWAY, *troubled, *lawful)):
                raise
            self.world.note(self.name, f"{type(error).__name__}: {error}"[:300])
            return None

    def _until_it_works(self, call: Callable[[], bool]) -> bool:
        while not self._try(call):
            self.world.sleep(0.3)
        return True

    def _create(self, client: Client) -> bool:
        settings = {"table.history.ms": str(Random(f"{self.world.seed}/t").choice((1500, 3600000)))}
        client.create_table(TABLES[0], 2, settings, timeout=5.0)
        client.create_table(TABLES[1], 1, settings, near=TABLES[0].split("/")[0], timeout=5.0)
        return True

    def _choose_folder(self) -> None:
        """As the process left it, an older copy, or nothing."""
        now, old = self._folder / "now", self._folder / "old"
        chosen = self._random.choice(("same", "same", "old", "none"))
        if chosen != "same":
            shutil.rmtree(now, ignore_errors=True)
        if chosen == "old" and old.exists():
            shutil.copytree(old, now)
        if now.exists() and self._random.random() < 0.5:
            shutil.rmtree(old, ignore_errors=True)
            shutil.copytree(now, old)

    def _open(self, client: Client) -> Replica:
        return client.replica(*TABLES, folder=self._folder / "now", threads=False)

    # -- its work -------------------------------------------------------------------------------------

    def _job(self, client: Client, replica: Replica) -> None:
        kinds: list[tuple[float, Callable[[], None]]] = [
            (8, lambda: self._transactions(replica)),
            (4, lambda: self._long(replica)),
            (8, lambda: self._take_part(replica)),
            (3, lambda: self._snapshot(replica)),
            (3, lambda: self._blind(client)),
            (1, lambda: self._plain()),
            (0.5, lambda: scale_somehow(self.world, client, self._random.choice(TABLES))),
        ]
        self._random.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])[0]()

    def _transactions(self, replica: Replica) -> None:
        """One, or two that are under way at the same time."""
        begun = []
        for _ in range(self._random.choice((1, 1, 2))):
            txn = replica.begin(timeout=5.0)
            begun.append(self._note(txn.timestamp, txn))
            self._use(begun[-1], txn)
            if self._random.random() < 0.5:
                self.world.sleep(self._random.expovariate(4.0))
        for done in begun:
            if done.txn is not None and done.error is None:
                self._commit(done, done.txn)

    def _long(self, replica: Replica) -> None:
        """One that other processes take part in, by its token."""
        txn = replica.begin(keepalive=6.0, timeout=5.0)
        done = self._note(txn.timestamp, txn)
        try:
            self._share(done, txn)
        finally:
            if txn.result is None:  # else heartbeats would keep it open
                with contextlib.suppress(*FINE, NotAuthorized):
                    txn.abort()

    def _share(self, done: Done, txn: TableTransaction) -> None:
        first = self._random.random() < 0.6
        if first:
            self._use(done, txn)
        if done.error is not None:
            return
        try:
            self._noted.long.append((txn.token(), done))
        except LocksBroken as error:
            done.error = error
            return
        self.world.sleep(self._random.expovariate(0.3))
        if not first:
            self._use(done, txn)
        if done.error is None:
            self._commit(done, txn)

    def _take_part(self, replica: Replica) -> None:
        """What a part that is finished has read counts as the transaction's own, whoever's writes are taken."""
        begun = [
            (token, done)
            for token, done in self._noted.long
            if done.error is None and not (done.told or done.read_only)
        ]
        if not begun:
            return
        token, whole = self._random.choice(begun)
        with contextlib.suppress(LocksBroken, TransactionAborted):
            part = replica.join(token, timeout=5.0)
            done = self._note(part.timestamp)
            self._random.choice((self._rows, self._rows, self._absent, self._look))(done, part)
            receipt = part.finish(timeout=5.0)
            whole.reads += done.reads
            if self._random.random() < 0.8:
                whole.receipts.append(receipt)

    def _note(self, at: int, txn: TableTransaction | None = None) -> Done:
        self._noted.done.append(done := Done(at, txn=txn))
        return done

    def _use(self, done: Done, txn: TableTransaction) -> None:
        kind = self._random.choice((self._pair, self._rows, self._rows, self._absent, self._look))
        try:
            kind(done, txn)
        except LocksBroken as error:
            done.error = error

    def _commit(self, done: Done, txn: TableTransaction) -> None:
        for _ in range(2):  # a repeated call settles what is not known
            try:
                result = txn.commit(done.receipts or None, timeout=5.0)
            except (LocksBroken, TransactionAborted) as error:
                done.error = error
                return
            except EventTooLarge:  # it would have to be carried
                done.reads.clear()
                return
            except FINE as error:
                self.world.note(self.name, f"{type(error).__name__}: {error}"[:300])
                continue
            done.told = result.commit_timestamp
            if txn.txn_id and not result.counts.committed:
                done.told, done.read_only = 0, done.told + (result.txn_id == NO_TXN)
            self._noted.told = max(self._noted.told, done.told if txn.txn_id else 0)
            return

    def _get(self, done: Done, txn: Any, table: str, key: bytes) -> bytes | None:
        value: bytes | None = txn.get(table, key)
        done.reads.append(Read(table, key, None, () if value is None else ((key, value),)))
        return value

    def _scan(self, done: Done, txn: Any, table: str) -> None:
        low, high = self._random.choice((b"", *KEYS)), self._random.choice((None, b"k3", b"l"))
        if high is not None and low >= high:
            high = None
        limit, reverse = self._random.choice((1, 2, 100)), self._random.random() < 0.4
        rows = tuple(islice(txn.scan(table, low, high, reverse=reverse), limit))
        done.reads.append(Read(table, low, high, rows, limit, reverse))

    def _pair(self, done: Done, txn: TableTransaction) -> None:
        """Each takes from one row if both together allow it, else it gives."""
        found = {table: number_of(self._get(done, txn, table, PAIR)) for table in TABLES}
        table = self._random.choice(TABLES)
        change = -1 if sum(found.values()) > LEAST else self._random.choice((1, 2))
        txn.put(table, PAIR, self._noted.value(found[table] + change))

    def _rows(self, done: Done, txn: Any) -> None:
        """Points and ranges are read, then a row of them is written, or another one."""
        for _ in range(self._random.randint(1, 2)):
            if self._random.random() < 0.5:
                self._scan(done, txn, self._random.choice(TABLES))
            else:
                self._get(done, txn, self._random.choice(TABLES), self._random.choice(KEYS))
        for _ in range(self._random.randint(1, 2)):
            table, key = self._random.choice(TABLES), self._random.choice(KEYS)
            if self._random.random() < 0.25:
                txn.delete(table, key)
            else:
                txn.put(table, key, self._noted.value(0))
                right = txn.get(table, key)
                hold(right is not None and right.startswith(b"0/"), "an own write is not seen")

    def _absent(self, done: Done, txn: Any) -> None:
        table, key = self._random.choice(TABLES), self._random.choice(KEYS)
        if self._get(done, txn, table, key) is None:
            txn.insert(table, key, self._noted.value(0))
        else:
            txn.delete(table, key)

    def _look(self, done: Done, txn: Any) -> None:
        """It reads only."""
        for table in TABLES:
            self._scan(done, txn, table)
        self._get(done, txn, TABLES[0], self._random.choice(KEYS))

    def _snapshot(self, replica: Replica) -> None:
        """Of now, or as of an older time that was told."""
        at = None
        if self._random.random() < 0.5 and self._noted.done:
            at = self._random.choice(self._noted.done).at
        told = self._noted.told
        with replica.snapshot(at=at, timeout=5.0) as view:
            hold(at is not None or view.timestamp >= told, "a snapshot of now lacks a told commit")
            done = self._note(view.timestamp)
            for table in TABLES:
                rows = tuple(view.scan(table))
                done.reads.append(Read(table, b"", None, rows, limit=1 << 30))

    def _last(self, replica: Replica) -> bool:
        """A transaction that ends well, and what stands then."""

        def use(txn: TableTransaction) -> None:
            done = self._note(txn.timestamp, txn)
            self._scan(done, txn, TABLES[0])
            self._pair(done, txn)

        # An id that is too old, or too new, is refused each time.
        tasks = self.world._tasks
        skews = [t.process.skew for t in tasks if t.process.kind == "controller"]
        self.world.current.skew = self._random.choice(skews or [0.0])
        result = replica.transact(use, timeout=_TIMEOUT_S)
        self._noted.told = max(self._noted.told, result.commit_timestamp)
        self._snapshot(replica)
        return True

    def _blind(self, client: Client) -> None:
        with client.begin(TABLES[0].split("/")[0], keepalive=6.0) as txn:
            for _ in range(self._random.randint(1, 3)):
                value = None if self._random.random() < 0.25 else self._noted.value(0)
                txn.write(self._random.choice(TABLES), value, key=self._random.choice(KEYS))
            if self._random.random() < 0.5:
                self.world.sleep(self._random.expovariate(3.0))
            result = txn.commit(timeout=5.0)
            self._noted.told = max(self._noted.told, result.commit_timestamp)

    def _plain(self) -> None:
        """By a program that knows nothing of the library."""
        now_ms = int((START_S + self.world.now) * 1000)
        place = TopicPartition(journal_topic(self._random.choice(TABLES)), 0)
        record = Record(0, now_ms, self._random.choice(KEYS), self._noted.value(0))
        self.cluster.log_of(self.world.current).produce_batch(place, encode_batch([record]))
