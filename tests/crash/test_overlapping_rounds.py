"""Leaders are killed or frozen between two rounds that overlap: each transaction has one outcome.

Several clients commit one-shots, move money between rows of a table, prepare transactions, and commit events
together with rows of a PostgreSQL, all at once. So while a round is being written, the next one is decided. Each
leader is cut at an append or an end of such a round: before it, once its request is sent, or after its answer. The
next leader goes on.
"""

from __future__ import annotations

import os
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest

import anabranch
from anabranch.errors import AnabranchError, LedgerDiffers, OutcomeUnknown, RetryError
from anabranch.kafka.log import KafkaLog
from anabranch.ledger import Ledger
from anabranch.ports import Log
from tests.conftest import Broker
from tests.crash.oracle import check_answers, check_stream, read_status, read_stream
from tests.crash.test_zombies import FENCED
from tests.ledger.places import PostgresPlace
from tests.ledger.test_kills import end
from tests.postgres import server
from tests.waiting import wait_until
from tests.workload.crew import SEED
from tests.workload.leaders import Forked
from tests.workload.points import Point
from tests.workload.steady import COMMITTED, UNKNOWN, Steady, steadily
from tests.workload.zygote import Child, Zygote

CUTS = int(os.environ.get("ANABRANCH_OVERLAP_CUTS", "120"))
CLIENTS, MOVERS, PREPARERS, PAYERS = 8, 2, 2, 3
LINGER_S = 0.0, 0.0, 0.05, 0.3, 1.2
ACCOUNTS, EACH = 6, 100
CUT_S = 60.0
SECRET = bytes(range(32))


class CutAt(NamedTuple):
    """What befalls a leader, and at which point of a round that overlaps with another one."""

    action: str
    call: str
    phase: str

    def point(self, nth: int) -> str:
        """As a `Lead` has it."""
        return f"{self.action} {Point(self.call, '*_overlap:*', nth, self.phase)}"


PHASES = "before", "sent", "after"
CALLS = "append:*", "end:commit"
KILLS = [CutAt("kill", call, phase) for call in CALLS for phase in PHASES]
FREEZES = [CutAt("stop", call, phase) for call in CALLS for phase in PHASES]
FEW = [KILLS[1], FREEZES[4]]
SOME = [*KILLS, FREEZES[1], FREEZES[4]]


@dataclass
class Payment:
    """One order in the database, which one event goes with. ``result``: as of a `Commit`."""

    value: bytes
    result: str = ""
    txn_id: bytes | None = None


@dataclass
class Load:
    """All that clients do at once, and what it has to come to."""

    client: anabranch.Client
    scope: str
    folder: Path
    database: PostgresPlace
    over: threading.Event = field(default_factory=threading.Event)
    prepared: dict[bytes, str] = field(default_factory=dict)  # by event: how its commit ended
    payments: list[Payment] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    moved: int = 0

    def __post_init__(self) -> None:
        self.stream, self.table = f"{self.scope}/events", f"{self.scope}/accounts"
        client, stream = self.client, self.stream
        self.steady = [Steady(client, stream, f"c{n}", pause=0.0) for n in range(CLIENTS)]
        self.ledger = Ledger(self.database.connect)

    def create(self) -> None:
        self.client.create_stream(self.stream, 2, timeout=CUT_S)
        self.client.create_table(self.table, 1, timeout=CUT_S)
        with self.client.begin(self.scope) as txn:
            for n in range(ACCOUNTS):
                txn.write(self.table, b"%d" % EACH, key=b"a%d" % n)
            txn.commit(timeout=CUT_S)
        self.database.made()
        self.ledger.create(self.client)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Let all clients work."""
        with ExitStack() as stack:
            rows = stack.enter_context(self.client.replica(self.table, folder=self.folder))
            work: list[Callable[[], None]] = [self._recover]
            work += [partial(self._move, rows, n) for n in range(MOVERS)]
            work += [partial(self._prepare, n) for n in range(PREPARERS)]
            work += [partial(self._pay, n) for n in range(PAYERS)]
            threads = [threading.Thread(target=one) for one in work]
            for thread in threads:
                thread.start()
            try:
                with steadily(*self.steady):
                    yield
            finally:
                self.over.set()
                for thread in threads:
                    thread.join(CUT_S)

    def _move(self, rows: anabranch.Replica, number: int) -> None:
        chance = random.Random(number)
        while not self.over.is_set():
            source, target = (b"a%d" % n for n in chance.sample(range(ACCOUNTS), 2))

            def body(txn: anabranch.TableTransaction) -> None:
                has, other = (int(txn.get(self.table, key) or b"0") for key in (source, target))  # noqa: B023
                txn.put(self.table, source, b"%d" % (has - 1))  # noqa: B023
                txn.put(self.table, target, b"%d" % (other + 1))  # noqa: B023

            try:
                rows.transact(body, timeout=CUT_S)
                self.moved += 1
            except OutcomeUnknown:
                pass  # the sum is the same either way
            except RetryError:
                time.sleep(0.05)
            except AnabranchError as error:
                self.wrong.append(f"a transfer: {error!r}")

    def _prepare(self, number: int) -> None:
        for count in range(1_000_000):
            if self.over.is_set():
                return
            value = b"p%d-%d" % (number, count)
            try:
                txn = self.client.begin(self.scope, keepalive=60)
                txn.write(self.stream, value, key=b"p")
                self.prepared[value] = UNKNOWN
                ready = txn.prepare(by=sha256(SECRET).digest(), attempt=b"1", timeout=CUT_S)
                self.client.commit(ready.txn_id, secret=SECRET, timeout=CUT_S)
                self.prepared[value] = COMMITTED
            except RetryError:
                time.sleep(0.05)
            except AnabranchError as error:
                self.wrong.append(f"a prepared one: {error!r}")

    def _pay(self, number: int) -> None:
        chance = random.Random(f"{SEED}/pay/{number}")

        def linger(step: str) -> None:
            """Leaders die, and recovery comes, while the events are prepared and the rows are not committed."""
            if step == "commit":
                time.sleep(chance.choice(LINGER_S))

        ledger = Ledger(lambda: self.database.connect(linger))
        for count in range(1_000_000):
            if self.over.is_set():
                return
            paid = Payment(b"o%d-%d" % (number, count))
            self.payments.append(paid)
            try:
                with (
                    self.client.begin(self.scope, keepalive=60) as txn,
                    ledger.commit(txn, timeout=CUT_S) as cursor,
                ):
                    paid.txn_id = txn.txn_id
                    txn.write(self.stream, paid.value, key=b"o")
                    if count % 2:
                        txn.flush()
                    self.database.order(cursor, paid.value.decode())
                paid.result = COMMITTED
            except OutcomeUnknown:
                paid.result = UNKNOWN
            except LedgerDiffers as error:
                self.wrong.append(f"a payment: {error!r}")
            except (AnabranchError, psycopg.Error) as error:
                paid.result = f"rolled back: {error!r}"
                time.sleep(0.05)

    def _recover(self) -> None:
        """As the recovery service does, while payments are under way."""
        while not self.over.wait(0.05):
            try:
                found = self.ledger.recover(self.client, older_than=0.0)
                self.wrong += [f"an alarm: {why}" for why in found.alarms.values()]
            except RetryError:
                pass  # the next call does the rest

    def wait_more(self, count: int = 10) -> None:
        """Wait until more is committed."""
        for one in self.steady[:2]:
            one.wait_more(count // 2)

    def wait_for_all_kinds(self) -> None:
        """Wait until there was a transfer, a prepared transaction and a payment."""

        def has_all_kinds() -> bool:
            paid = any(one.result == COMMITTED for one in self.payments)
            return bool(self.wrong) or min(self.moved, len(self.prepared), paid) > 0

        wait_until(has_all_kinds, CUT_S)

    def check(self, log: Log, prefix: str) -> str:
        """What clients were answered, and what the log shows, agree. Returns figures."""
        end(self.client, self.ledger)
        assert not self.wrong, self.wrong[:3]
        found = read_stream(log, self.stream)
        check_stream(found)
        check_stream(read_stream(log, self.table))
        check_answers(log, prefix)
        status = read_status(log, prefix)
        there = Counter(event.value for event in found.events)
        said = {one.value: one.result for client in self.steady for one in client.commits}
        said |= self.prepared | self._check_payments()
        assert set(there) <= set(said)
        for value, result in said.items():
            allowed = {COMMITTED: (1,), UNKNOWN: (0, 1)}.get(result, (0, 1) if not result else (0,))
            assert there[value] in allowed, (
                f"{value!r}: {result}, and is there {there[value]} times"
            )
        for client in self.steady:
            mine = [e.value for e in found.events if said[e.value] == COMMITTED]
            own = set(client.values)
            assert [v for v in mine if v in own] == client.values, "in the order of its commits"
        with (
            self.client.replica(self.table, folder=self.folder) as rows,
            rows.snapshot(timeout=CUT_S) as view,
        ):
            total = sum(int(row) for _, row in view.scan(self.table))
        assert total == ACCOUNTS * EACH, f"money: {total}"
        done = Counter(said.values())
        paid = sum(one.result == COMMITTED for one in self.payments)
        assert min(self.moved, done[COMMITTED], len(self.prepared), paid) > 0, "too little was done"
        return (
            f"{dict(done)}, {self.moved} transfers, {len(self.prepared)} prepared, {paid} of "
            f"{len(self.payments)} payments, {len(status.rounds)} rounds"
        )

    def _check_payments(self) -> dict[bytes, str]:
        """Callers, database and controllers agree. Returns the outcome of each event, as the database has it."""
        rows = {key.encode() for key in self.database.orders()}
        assert rows <= {one.value for one in self.payments}
        for one in self.payments:
            there = one.value in rows
            assert one.result == UNKNOWN or (one.result == COMMITTED) == there, f"{one}: {there}"
            if one.txn_id is not None:
                state = self.client.resolve(one.txn_id, timeout=CUT_S).state
                assert state == ("COMMITTED" if there else "ABORTED"), f"{one} is {state}"
        return {
            one.value: COMMITTED if one.value in rows else "not in the database"
            for one in self.payments
        }


@contextmanager
def loaded(
    zygote: Zygote, bootstrap: str, folder: Path, measured: Callable[[str], None]
) -> Iterator[tuple[Load, Forked]]:
    """Clients at work, and leaders; at the end, checks of all of it."""
    print(f"ANABRANCH_SEED={SEED}")
    prefix = f"or{uuid.uuid4().hex[:6]}"
    how = {"armed": False, "again": False}
    chance = random.Random(f"{SEED}/overlap")
    leaders = Forked(zygote, bootstrap, folder, prefix, chance, how=how)
    log = KafkaLog(bootstrap)
    try:
        leaders.start()
        with (
            server() as database,
            anabranch.connect(bootstrap, prefix=prefix, timeout=CUT_S) as client,
        ):
            place = PostgresPlace(database.dsn())
            load = Load(client, f"{prefix}-scope", folder / "rows", place)
            load.create()
            with load.working():
                yield load, leaders
            measured(load.check(log, prefix))
    finally:
        leaders.close()
        log.close()


def play(load: Load, leaders: Forked, cuts: Iterable[CutAt], chance: random.Random) -> None:
    """Let each leader come to its point, and the next one lead; then one that was frozen wakes up."""
    zombie: Child | None = None
    leaders.last.kill()  # two live leaders would fence each other for a while
    for at in cuts:
        leader = leaders.fork(at.point(chance.randrange(1, 4)))
        leader.wait_leading()
        load.wait_more()
        if zombie is not None:
            wake(zombie)
        zombie = None
        leader.arm()
        if at.action == "kill":
            leader.wait_ended(CUT_S)
            assert leader.killed, leader.status
        else:
            leader.wait_stopped(CUT_S)
            zombie = leader
    leaders.fork().wait_leading()
    load.wait_more()
    if zombie is not None:
        wake(zombie)
    load.wait_more()
    load.wait_for_all_kinds()


def wake(zombie: Child) -> None:
    """Let a frozen leader go on: it finds that another one leads, and ends."""
    zombie.go_on()
    zombie.wait_ended(CUT_S)
    assert zombie.status is not None
    assert zombie.status >> 8 == FENCED, zombie.status


@pytest.mark.broker
@pytest.mark.timeout(120 + 10 * CUTS)
@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param(FEW, id="few"),
        pytest.param(SOME, id="some", marks=pytest.mark.long),
        pytest.param(list(islice(cycle(KILLS + FREEZES), CUTS)), id="all", marks=pytest.mark.soak),
    ],
)
def test_leaders_are_cut_between_rounds_that_overlap(
    broker: Broker,
    zygote: Zygote,
    tmp_path: Path,
    measured: Callable[[str], None],
    cuts: list[CutAt],
) -> None:
    with loaded(zygote, broker.bootstrap, tmp_path, measured) as (load, leaders):
        play(load, leaders, cuts, random.Random(f"{SEED}/cuts"))
