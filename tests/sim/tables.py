"""Processes with replicas of two tables: transactions with locks, snapshots, and writes that nobody locks.

What they read, write and are told is recorded; the checker replays all commits (`checker.tables`). Draws come from
each process's own numbers.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from anabranch.client.client import Client
from anabranch.client.own_writes import Writers
from anabranch.client.replica import Replica
from anabranch.errors import (
    LocksBroken,
    NotAuthorized,
    SnapshotExpired,
    TransactionAborted,
    UnknownScope,
    UnknownStream,
)
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.legal_names import ADMIN_LANE, base_stream
from anabranch.protocol.schemas.codec import LEVEL
from tests.sim.check_log import hold
from tests.sim.clients import REFUSED, beat
from tests.sim.readers import reading_client
from tests.sim.recorded import recorded_plain
from tests.sim.scaling import scale_somehow
from tests.sim.together import HOLD_S, Shared, Together
from tests.sim.together import REFUSED as OF_POSITIONS
from tests.sim.world import Process, World
from tests.sim.writers import (
    BESIDE,
    CHAINED,
    COUNTERS,
    FINE,
    FLATS,
    GOODS,
    TABLES,
    create_tables,
)
from tests.tables.recorded import (
    RecordedPart,
    RecordedTables,
    RecordedTransaction,
    RecordedWork,
    RecordedWrites,
)

if TYPE_CHECKING:
    from tests.sim.counters import Counted
    from tests.sim.faults import Faults
    from tests.sim.ledger import Ledger
    from tests.sim.picture import Picture
    from tests.sim.ports import SimCluster

All = TypeVar("All")
NAME = "t"  # of processes, with a number
COMPANIONS = tuple(map(base_stream, TABLES))
STREAMS = (*TABLES, *COMPANIONS)
KEYS = tuple(b"k%d" % number for number in range(5))
PAIR = b"pair"  # a row of each table: together never below LEAST, each 1 where there is none
HOT = b"hot"  # a row of the first table that all change
LEAST = 1
_WHOSE: tuple[Writers, ...] = ("own", "own", "all")  # writes that are read
_RESTART_S = 1.0
_TIMEOUT_S = 10.0
# In calm, a change of the hot row takes so long at most, although others change it, too.
_HOT_S = 2.0
# … and longer where a commit over control partitions waits for a stream in trouble: its locks stay frozen until it
# times out.
_COMMIT_S = 5.0
_ANYWAY = (*FINE, *OF_POSITIONS, UnknownStream, UnknownScope, SnapshotExpired)


@dataclass(slots=True)
class Long:
    """A long transaction that is open: others take part in it."""

    txn: RecordedTransaction
    token: bytes
    parts: list[RecordedPart] = field(default_factory=list)  # whose receipts came
    expired: bool = False  # a replica told somebody that its snapshot can't be read


@dataclass(slots=True)
class Noted:
    """What all processes did."""

    long: list[Long] = field(default_factory=list)
    times: list[int] = field(default_factory=list)  # of snapshots
    labels: int = 0
    told: int = 0  # the highest commit timestamp that anybody was told
    writes: int = 0
    together: Shared = field(default_factory=Shared)
    counted: Counted | None = None  # if rows with numbers are in the replicas, too

    def value(self, number: int, more: bytes = b"") -> bytes:
        """A row's value, never used before."""
        self.writes += 1
        return b"%d/%d%s" % (number, self.writes, more)


def number_of(value: bytes | None) -> int:
    """The number in a row; 1 where there is none."""
    return 1 if value is None else int(value.split(b"/")[0])


class Uses:
    """What transactions read and write."""

    def __init__(self, random: Random, noted: Noted) -> None:
        self._random, self._noted = random, noted

    def any(self, txn: RecordedWork) -> None:
        """One of these, but for a point alone."""
        self._random.choice((self.pair, self.rows, self.rows, self.absent, self.look))(txn)

    def scan(self, txn: RecordedWork, table: str) -> None:
        low, high = self._random.choice((b"", *KEYS)), self._random.choice((None, b"k3", b"l"))
        if high is not None and low >= high:
            high = None
        limit, reverse = self._random.choice((1, 2, 100)), self._random.random() < 0.4
        for _ in islice(txn.scan(table, low, high, reverse=reverse), limit):
            pass

    def pair(self, txn: RecordedWork) -> None:
        """Each takes from one row if both together allow it, else it gives."""
        found = {table: number_of(txn.get(table, PAIR)) for table in TABLES}
        table = self._random.choice(TABLES)
        change = -1 if sum(found.values()) > LEAST else self._random.choice((1, 2))
        txn.put(table, PAIR, self._noted.value(found[table] + change))

    def blind(self, txn: RecordedWork) -> None:
        """Write one of these rows without reading it."""
        txn.put(self._random.choice(TABLES), PAIR, self._noted.value(self._random.choice((1, 2))))

    def rows(self, txn: RecordedWork) -> None:
        """Points and ranges are read, then a row of them is written, or another one."""
        for _ in range(self._random.randint(1, 2)):
            if self._random.random() < 0.5:
                self.scan(txn, self._random.choice(TABLES))
            else:
                txn.get(self._random.choice(TABLES), self._random.choice(KEYS))
        for _ in range(self._random.randint(1, 2)):
            table, key = self._random.choice(TABLES), self._random.choice(KEYS)
            if self._random.random() < 0.25:
                txn.delete(table, key)
            else:
                txn.put(table, key, self._noted.value(0))
                right = txn.get(table, key)
                hold(
                    not txn.is_alone or (right is not None and right.startswith(b"0/")),
                    "an own write is not seen",
                )

    def point(self, txn: RecordedWork) -> None:
        txn.get(self._random.choice(TABLES), self._random.choice(KEYS))

    def absent(self, txn: RecordedWork) -> None:
        table, key = self._random.choice(TABLES), self._random.choice(KEYS)
        if txn.get(table, key) is None:
            txn.insert(table, key, self._noted.value(0))
        else:
            txn.delete(table, key)

    def look(self, txn: RecordedWork) -> None:
        """It reads only."""
        for table in TABLES:
            self.scan(txn, table)
        txn.get(TABLES[0], self._random.choice(KEYS))


class TableMachine:
    """A process with a replica; it is started again when it dies, with its folder, an older copy, or none."""

    title = NAME
    shot_bytes: tuple[int, ...] = (0, 1 << 18)

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
        self.name = f"{self.title}{number}"
        self._random = Random(f"{world.seed}/{self.name}")
        self._starts = 0
        self._jobs, self._bases = 12, 0
        self._uses = Uses(self._random, noted)
        self._together = Together(world, cluster, ledger, noted, self.name)
        self.done = False
        self._reopens = False  # the replica lacks a table
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
        settings: dict[str, Any] = {
            "timeout": _TIMEOUT_S,
            "one_shot_bytes": self._random.choice(self.shot_bytes),
        }
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
                    if self._random.random() < 0.1 or self._reopens:
                        replica.close()
                        replica, self._reopens = None, False
                elif self.faults.calm:
                    # In calm nothing is in the way of one that goes on trying.
                    last = self._until_it_works(lambda r=replica: self._last(client, r))  # type: ignore[misc]
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
        create_tables(self.world, client)
        if self._noted.counted is not None:
            client.create_table(COUNTERS, 2, timeout=5.0)
        self._together.create(client)
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
        index = {"number": (TABLES[0], lambda _, row: row.partition(b"/")[0])}
        tables = TABLES if self._noted.counted is None else (*TABLES, COUNTERS)
        return client.replica(*tables, folder=self._folder / "now", threads=False, index=index)

    # -- its work -------------------------------------------------------------------------------------

    def _job(self, client: Client, replica: Replica) -> None:
        rows = self._recorded(replica)
        if self._together.job(client, rows, self._uses):
            return
        kinds: list[tuple[float, Callable[[], None]]] = [
            (8, lambda: self._transactions(rows)),
            (4, lambda: self._long(rows)),
            (8, lambda: self._take_part(rows)),
            (3, lambda: self._snapshot(rows)),
            (3, lambda: self._blind(client)),
            (3, lambda: self._hot(rows)),
            (8, lambda: self._plain()),
            (2, self._compact),
            (0.5, lambda: scale_somehow(self.world, client, self._random.choice(TABLES))),
        ]
        if bursts := self.faults.weather.bursts:
            kinds.append((40 * bursts, lambda: self._meet(rows)))
        self._random.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])[0]()

    def _at_once(self, count: int, work: Callable[[], object]) -> None:
        """Do this in ``count`` tasks, and wait for all of them."""
        here, ends = self.world.current, list[object]()
        for number in range(count):
            self.world.spawn(here, f"call{number}", lambda: ends.append(work()))
        while len(ends) < count:
            self.world.sleep(0.02)

    def _meet(self, rows: RecordedTables) -> None:
        """Commit several transactions at once. Each reads what others write, also on other control partitions."""

        def one() -> None:
            txn = rows.begin(timeout=5.0)
            with contextlib.suppress(LocksBroken):  # the commit raises it again
                self._random.choice((self._uses.pair, self._uses.pair, self._uses.rows))(txn)
            self._commit(txn)

        self._at_once(self._random.choice((2, 3, 5)), lambda: self._try(one))

    def _recorded(self, replica: Replica) -> RecordedTables:
        self._noted.labels += 1
        history, name = self.ledger.history, f"{self.name}/{self._noted.labels}"
        return RecordedTables(lambda: history.here, replica, TABLES[0].split("/")[0], name)

    def _transactions(self, rows: RecordedTables) -> None:
        """One, or two that are under way at the same time."""
        begun = []
        for _ in range(self._random.choice((1, 1, 2))):
            isolation = self._random.choice(("serializable",) * 4 + ("snapshot",))
            begun.append(txn := rows.begin(isolation=isolation, timeout=5.0))
            self._noted.times.append(txn.timestamp)
            with contextlib.suppress(LocksBroken):  # the commit raises it again
                self._uses.any(txn)
            if self._random.random() < 0.5:
                self.world.sleep(self._random.expovariate(4.0))
        for txn in begun:
            self._commit(txn)

    def _long(self, rows: RecordedTables) -> None:
        """One that other processes take part in, by its token."""
        isolation = self._random.choice(("serializable",) * 4 + ("snapshot",))
        how = {"isolation": isolation, "writers": self._random.choice(_WHOSE)}
        txn = rows.begin(keepalive=6.0, timeout=5.0, **how)
        self._noted.times.append(txn.timestamp)
        try:
            with contextlib.suppress(LocksBroken):  # a broken one that only read ends well
                now, later = self._random.choice(
                    (
                        (self._uses.any, None),
                        (None, self._uses.any),
                        (self._uses.point, self._uses.point),
                    )
                )
                if now is not None:
                    now(txn)
                self._noted.long.append(long := Long(txn, txn.token()))
                self.world.sleep(self._random.expovariate(0.3))
                if long.parts:  # then others write what they read
                    self.world.sleep(self._random.expovariate(0.7))
                if later is not None:
                    later(txn)
                if self._random.random() < 0.2:
                    self._big(txn)
                expired = long.expired
                if self._random.random() < 0.9:
                    self._commit(txn, long.parts if self._random.random() < 0.6 else None)
                hold(not expired or txn.txn.result is None, "an open one's snapshot was not kept")
        finally:  # a handle that somebody holds beats for what is not ended
            self._noted.long = [long for long in self._noted.long if long.txn is not txn]
            with contextlib.suppress(*FINE, NotAuthorized):
                txn.abort()

    def _take_part(self, rows: RecordedTables) -> None:
        """What a part that is finished has read counts as the transaction's own, whoever's writes are taken."""
        found = [long for long in self._noted.long if not long.txn.txn.is_over]
        if not found:
            self._long(rows)
            return
        long = self._random.choice(found)
        with contextlib.suppress(LocksBroken, TransactionAborted):
            writers = self._random.choice(_WHOSE)
            try:
                part = rows.join(long.txn, long.token, writers=writers, timeout=5.0)
            except SnapshotExpired:
                long.expired = True
                raise
            kinds = (
                self._uses.rows,
                self._uses.rows,
                self._uses.absent,
                self._uses.look,
                self._uses.point,
            )
            self._random.choice(kinds)(part)
            part.finish(timeout=5.0)
            if self._random.random() < 0.8:
                long.parts.append(part)

    def _big(self, txn: RecordedTransaction) -> None:
        """It may be staged, with its locks frozen."""
        for _ in range(self._random.choice((3, 12))):
            value = self._noted.value(0, b" " + b"." * 100)
            txn.put(self._random.choice(TABLES), self._random.choice(KEYS), value)

    def _commit(self, txn: RecordedTransaction, parts: list[RecordedPart] | None = None) -> None:
        for _ in range(2):  # a repeated call settles what is not known
            try:
                result = txn.commit(None if parts is None else list(parts), timeout=5.0)
            except (LocksBroken, TransactionAborted):
                return
            except FINE as error:
                self.world.note(self.name, f"{type(error).__name__}: {error}"[:300])
                continue
            told = result.commit_timestamp if result.txn_id != NO_TXN else 0
            self._noted.told = max(self._noted.told, told)
            return

    def _snapshot(self, rows: RecordedTables) -> None:
        """Of now, or as of an older time that was told."""
        at = None
        if self._random.random() < 0.5 and self._noted.times:
            at = self._random.choice(self._noted.times)
        with rows.snapshot(at=at, timeout=5.0) as view:
            self._noted.times.append(view.timestamp)
            for table in TABLES:
                for _ in view.scan(table):
                    pass
            number = self._random.randrange(3)
            view.lookup(TABLES[0], "number", b"%d" % number, begins=f"{number}/")

    def _last(self, client: Client, replica: Replica) -> bool:
        """A transaction that ends well, and what stands then. Whatever is prepared is ended first."""
        self._together.settle(client)

        def use(txn: RecordedTransaction) -> None:
            self._uses.scan(txn, TABLES[0])
            self._uses.pair(txn)

        self.world.set_clocks()  # with a wrong clock each new id may be too old, or too new
        rows = self._recorded(replica)
        result = rows.transact(use, timeout=_TIMEOUT_S)
        self._noted.told = max(self._noted.told, result.commit_timestamp)
        weather = self.faults.weather
        is_frozen = weather.across and bool(self.ledger.troubled)
        # It may read a row of a worker's prepared transaction, which is in the database's hands for so long.
        is_prepared = bool(weather.prepared and weather.rows)
        most_s = _HOT_S + _COMMIT_S * is_frozen + HOLD_S * is_prepared
        for _ in range(3):
            began = self.world.now
            self._hot(rows)
            took_s = self.world.now - began
            hold(took_s <= most_s, f"a change of the hot row took {took_s:.1f} s")
        self._snapshot(rows)
        if self._random.random() < 0.2 and not (self.ledger.troubled or self.ledger.deleted):
            self._together.hold_a_lock(client, rows)
        return True

    def _hot(self, rows: RecordedTables) -> None:
        """Change the row that all change."""

        def use(txn: RecordedTransaction) -> None:
            if self._random.random() < 0.3:
                txn.get(TABLES[1], self._random.choice(KEYS))
            found = number_of(txn.get(TABLES[0], HOT))
            self.world.sleep(self._random.expovariate(50.0))
            txn.put(TABLES[0], HOT, self._noted.value(found + 1))

        result = rows.transact(use, timeout=_TIMEOUT_S)
        self._noted.told = max(self._noted.told, result.commit_timestamp)

    def _blind(self, client: Client) -> None:
        scope, recorder = TABLES[0].split("/")[0], self.ledger.history.here
        self._noted.labels += 1
        with client.begin(scope, keepalive=6.0) as begun:
            txn = RecordedWrites(recorder, begun, scope, f"blind/{self._noted.labels}")
            for _ in range(self._random.randint(1, 3)):
                value = None if self._random.random() < 0.25 else self._noted.value(0)
                txn.write(self._random.choice(TABLES), value, self._random.choice(KEYS))
            if self._random.random() < 0.5:
                self.world.sleep(self._random.expovariate(3.0))
            result = txn.commit(timeout=5.0)
            self._noted.told = max(self._noted.told, result.commit_timestamp)

    def _compact(self) -> None:
        """By an operator: the table begins at a base, and what that covers is deleted."""
        here, table = self.world.current, self._random.choice(TABLES)
        client = reading_client(self.cluster, here, self.ledger.prefix, ADMIN_LANE, timeout=5.0)
        self._bases += 1
        folder = (
            self._folder / f"base{self._bases}"
        )  # one that died may still have the last one open
        client.compact_table(table, plain_readers_lose_history=True, folder=folder, timeout=5.0)
        self.world.note(self.name, f"{table} is compacted")

    def _plain(self) -> None:
        """By a program that knows nothing of the library."""
        table, key = self._random.choice(TABLES), self._random.choice(KEYS)
        recorded_plain(self.ledger, self.cluster, table, 0, [(key, self._noted.value(0))])


class OwnTableMachine(TableMachine, Generic[All]):
    """A `TableMachine` of another table, which has its own check. ``all_did``: what all such processes did."""

    table: str
    shot_bytes = (1 << 18,)

    def __init__(
        self, world: World, cluster: SimCluster, faults: Faults, ledger: Ledger, all_did: All, number: int
    ) -> None:  # fmt: skip
        super().__init__(world, cluster, faults, ledger, Noted(), number)
        self._all_did = all_did

    def _create(self, client: Client) -> bool:
        here, prefix = self.world.current, self.ledger.prefix
        admin = reading_client(self.cluster, here, prefix, ADMIN_LANE, timeout=5.0)
        admin.feature_level(raise_to=LEVEL, timeout=5.0)
        client.create_table(self.table, 2, timeout=5.0)
        return True

    def _open(self, client: Client) -> Replica:
        return client.replica(self.table, folder=self._folder / "now", threads=False)


@contextmanager
def without_tables(picture: Picture) -> Iterator[None]:
    """Checks that know nothing of tables."""
    theirs = {*STREAMS, COUNTERS, CHAINED, BESIDE, GOODS, FLATS}
    theirs |= {
        stream for stream in picture.history if stream.startswith((f"{GOODS}-", f"{FLATS}-"))
    }
    history = {each: picture.history.pop(each) for each in theirs if each in picture.history}
    places = [place for place in picture.events if place[0] in theirs]
    events = {place: picture.events.pop(place) for place in places}
    yield
    picture.history |= history
    picture.events |= events
