"""Processes in which several tasks call `transact` at the same rows, so that they come there as a chain.

The checker does not replay this table: a transaction of a chain reads what is committed only later. `check_chains`
replays its commits instead: what a committed transaction read is what was there just below it, and a call commits
once at most. What a call reports without a commit was true at one time, at or after the call began.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from anabranch.batches.records import Record, encode_batch
from anabranch.client.client import Client
from anabranch.client.replica import Replica
from anabranch.client.table_transaction import TableTransaction
from anabranch.errors import DeadlineExceeded, LocksBroken, TransactionAborted
from anabranch.ports import LogError, TopicPartition
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.schemas import records as r
from anabranch.topics.names import journal_topic
from tests.sim.check_log import hold
from tests.sim.picture import Picture
from tests.sim.tables import OwnTableMachine
from tests.sim.writers import CHAINED, FINE, SCOPE

NAME = "chain"  # of processes, with a number
HOT, KEYS = b"hot", (b"hot", b"hot", b"k1", b"k2", b"k3")
_OVER = (LocksBroken, TransactionAborted, DeadlineExceeded)  # nothing was written
Rows = dict[bytes, bytes | None]


class Refused(Exception):
    """What a function raises."""


@dataclass(slots=True)
class Try:
    """One call of the function. ``read``: rows with locks; ``wrote``: rows that it leaves."""

    read: Rows = field(default_factory=dict)
    wrote: Rows = field(default_factory=dict)
    refuses: bool = False


@dataclass(slots=True)
class Call:
    """A call of `transact`. ``seen``: what its client had seen. ``told``: the commit timestamp; 0: none."""

    seen: int
    tries: list[Try] = field(default_factory=list)
    told: int = 0
    is_over: bool = False
    reported: bool = False  # what the last try read, without a commit


@dataclass(slots=True)
class Chained:
    """What all processes called."""

    calls: list[Call] = field(default_factory=list)
    writes: int = 0


class ChainMachine(OwnTableMachine[Chained]):
    """A process with a replica of the table; it lives as a `TableMachine`."""

    title = NAME
    table = CHAINED

    # -- its work -------------------------------------------------------------------------------------

    def _job(self, client: Client, replica: Replica) -> None:
        kind = self._random.choices(
            (self._side_by_side, self._write_blindly, self._write_plainly), (8, 2, 1)
        )[0]
        kind(client, replica)

    def _side_by_side(self, client: Client, replica: Replica) -> None:
        """Several tasks call `transact`, one call after the other."""
        del client

        def work() -> None:
            for _ in range(self._random.choice((1, 2, 3))):
                self._call(replica)

        self._at_once(self._random.choice((2, 3, 4, 6)), work)

    def _call(self, replica: Replica) -> None:
        call = Call(replica._controller.last_timestamp)
        self._all_did.calls.append(call)

        def use(txn: TableTransaction) -> None:
            call.tries.append(now := Try())
            self._read_and_write(txn, now)
            if now.refuses:
                raise Refused

        try:
            result = replica.transact(use, timeout=5.0, name=self._name())
        except Refused:
            call.reported = call.is_over = True
        except FINE as error:
            self.world.note(self.name, f"{type(error).__name__}: {error}"[:300])
            call.is_over = isinstance(error, _OVER)
        else:
            if result.txn_id == NO_TXN:
                call.reported = call.is_over = True
            else:
                call.told = result.commit_timestamp

    def _name(self) -> str | None:
        self._all_did.writes += 1
        return f"c{self._all_did.writes}" if self._random.random() < 0.1 else None

    def _read_and_write(self, txn: TableTransaction, now: Try) -> None:
        keys = {HOT} if self._random.random() < 0.8 else set()
        keys |= {self._random.choice(KEYS) for _ in range(self._random.choice((0, 1, 2)))}
        for key in sorted(keys, key=lambda key: (key != HOT, key)):
            if self._random.random() < 0.1:
                txn.get(CHAINED, key, lock=False)
            now.read[key] = txn.get(CHAINED, key)
            if self._random.random() < 0.1:
                self.world.sleep(self._random.expovariate(20.0))
        if self._random.random() < 0.1:
            found = dict(txn.scan(CHAINED, b"k"))
            now.read.update({key: found.get(key) for key in KEYS if key >= b"k"})
        chance = self._random.random()
        now.refuses = chance < 0.1
        if chance < 0.2:
            return
        for key in sorted(keys) or [self._random.choice(KEYS)]:
            if self._random.random() < 0.8:
                self._all_did.writes += 1
                value = None if self._random.random() < 0.1 else b"w%d" % self._all_did.writes
                if value is None:
                    txn.delete(CHAINED, key)
                else:
                    txn.put(CHAINED, key, value)
                now.wrote[key] = value

    def _write_blindly(self, client: Client, replica: Replica) -> None:
        del replica
        with client.begin(SCOPE, keepalive=6.0) as txn:
            for key in {self._random.choice(KEYS) for _ in range(self._random.randint(1, 2))}:
                txn.write(CHAINED, self._other(), key)
            if self._random.random() < 0.5:
                txn.flush(timeout=5.0)  # then it commits from a journal
            txn.commit(timeout=5.0)

    def _write_plainly(self, client: Client, replica: Replica) -> None:
        """By a program that knows nothing of the library."""
        del client, replica
        record = Record(0, self.world.wall_ms, self._random.choice(KEYS), self._other())
        place = TopicPartition(journal_topic(CHAINED), 0)
        with contextlib.suppress(LogError):
            self.cluster.log_of(self.world.current).produce_batch(place, encode_batch([record]))

    def _other(self) -> bytes | None:
        self._all_did.writes += 1
        return None if self._random.random() < 0.2 else b"x%d" % self._all_did.writes

    def _last(self, client: Client, replica: Replica) -> bool:
        self.world.set_clocks()  # with a wrong clock each new id may be too old, or too new
        self._side_by_side(client, replica)
        return True


def check_chains(picture: Picture, chained: Chained) -> None:
    """What committed transactions read was there just below them, and each call is told the truth."""
    states: list[tuple[int, Rows]] = [(0, {})]
    of_value = {
        value: (call, one)
        for call in chained.calls
        for one in call.tries
        for value in one.wrote.values()
        if value is not None
    }
    found: dict[int, tuple[int, Try]] = {}  # by the call
    records = [record for stream, _, record in picture.commits() if stream == CHAINED]
    for record in sorted(records, key=lambda record: record.timestamp):
        rows, wrote = dict(states[-1][1]), _written(picture, record)
        whose = {id(of_value[v][1]): of_value[v] for v in wrote.values() if v in of_value}
        hold(len(whose) <= 1, f"a commit at {record.timestamp} has writes of several tries")
        for call, one in whose.values():
            hold(id(call) not in found, f"a call has committed twice, at {record.timestamp}")
            found[id(call)] = record.timestamp, one
            hold(wrote == one.wrote, f"a commit wrote {wrote} instead of {one.wrote}")
            below = {key: rows.get(key) for key in one.read}
            hold(below == one.read, f"one at {record.timestamp} read {one.read} of {below}")
        rows.update(wrote)
        states.append((record.timestamp, rows))
    for call in chained.calls:
        at, committed = found.get(id(call), (0, None))
        if committed is not None:
            hold(not call.is_over, f"a call at {at} is in the table, and told to have no effect")
            hold(not call.told or at == call.told, f"a call was told {call.told}, and is at {at}")
            hold(
                not call.told or committed is call.tries[-1],
                f"a call at {at} is not of its last try",
            )
        if call.reported:
            read = call.tries[-1].read
            true = [
                rows
                for number, (_, rows) in enumerate(states)
                if number + 1 == len(states) or states[number + 1][0] > call.seen
            ]
            same = any({key: rows.get(key) for key in read} == read for rows in true)
            hold(same, f"a call reported what was never there after {call.seen}: {read}")


def _written(picture: Picture, record: r.CommitRecord) -> Rows:
    """What a commit wrote, the last value of each key."""
    wrote: Rows = {}
    for part in record.segments:
        for event in picture.events[CHAINED, part.partition]:
            if part.first <= event.offset < part.end:
                wrote[event.record.key or b""] = event.record.value
    return wrote
