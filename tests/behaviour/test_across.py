"""Money over three control partitions, whose controllers and brokers are killed and frozen, while streams scale.

A transfer writes amounts, whose sum is 0, to streams of two or three scopes; some write to PostgreSQL, too, by a
ledger. So the sum of all amounts is 0 as of every time, if each transfer is in all of its streams, and in the
database, as of one time, or in none. Other clients move amounts between rows of tables of these scopes, as the rows
allow it. The checker judges all that was recorded, and the sum of all rows after each commit.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import psycopg
import pytest

import anabranch
import checker
from anabranch.errors import CrossScope, RetryError
from anabranch.infra.broker import EmbeddedBroker
from anabranch.infra.cluster import EmbeddedCluster
from anabranch.ledger import Ledger
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.codec import LEVEL
from checker.recorder import SUFFIX, Recorder
from tests import shifted
from tests.behaviour.test_times import Controllers
from tests.cluster import ControllerProcess
from tests.conftest import Broker
from tests.ledger.places import PostgresPlace
from tests.postgres import server
from tests.tables.recorded import RecordedTables, RecordedWrites
from tests.waiting import wait_until
from tests.workload.last import Log, read_events, record_log
from tests.workload.money import number_in
from tests.workload.recording import TROUBLE, RecordedTransaction, Row, id_of, seen

pytestmark = [pytest.mark.broker, pytest.mark.unsecured]

PARTITIONS = 3
AHEAD_S = (0.0, 5.0, 0.0)  # of the controllers' clocks
PATIENCE_S = 60.0
STRUCK_S = 20.0  # for so long controllers are struck, after a broker was
KEYS, EACH = [b"a", b"b", b"c", b"d"], 100  # rows of each table, and what each has at first
TOTAL = EACH * len(KEYS) * PARTITIONS  # of all tables
DATABASE = "database"  # the account that is no stream
Amounts = dict[str, int]  # by account


@dataclass
class Bank:
    """Accounts, and what was answered. ``done``: transfer -> its commit timestamp. ``place``: of the ledger."""

    bootstrap: str
    prefix: str
    folder: Path
    chance: random.Random
    place: PostgresPlace | None = None
    done: dict[int, int] = field(default_factory=dict)
    begun: dict[int, Amounts] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    looks: int = 0
    moved: int = 0
    paid: int = 0
    summed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.over, self.errors = threading.Event(), list[BaseException]()
        self.streams = [f"{self.prefix}{number}/accounts" for number in range(PARTITIONS)]
        self.tables = [f"{self.prefix}{number}/rows" for number in range(PARTITIONS)]

    def client(self, lane: str = "open") -> anabranch.Client:
        return anabranch.connect(self.bootstrap, prefix=self.prefix, lane=lane, timeout=PATIENCE_S)

    def open(self) -> None:
        """Make the streams, once controllers lead."""
        with self.client(ADMIN_LANE) as operator:
            operator.feature_level(raise_to=LEVEL)
        with self.client() as client:
            for stream in self.streams:
                client.create_stream(stream, 1)
            served = client.control_partitions(self.streams)
            assert sorted(served.values()) == list(range(PARTITIONS))
            for table in self.tables:
                client.create_table(table)
            recorder = Recorder(self.folder / f"start{SUFFIX}")
            while not self.opened(client, recorder):
                time.sleep(0.1)

    def opened(self, client: anabranch.Client, recorder: Recorder) -> bool:
        """Write the first rows of all tables in one transaction, unless a leader has not noticed the level yet."""
        home, label = scope_of(self.tables[0]), f"start{time.monotonic_ns()}"
        txn = RecordedWrites(recorder, client.begin(home), home, label)
        with suppress(RetryError, CrossScope):
            for table in self.tables:
                for key in KEYS:
                    row = f"{EACH}/{label}.{scope_of(table)}.{key.decode()}"
                    txn.write(table, row.encode(), key)
            txn.commit()
            return True
        return False

    # -- what runs meanwhile -------------------------------------------------------------------------

    def during(self, bodies: Iterable[Callable[[], None]], strike: Callable[[], None]) -> None:
        """Repeat these in threads of their own until ``strike`` returns."""

        def run(body: Callable[[], None]) -> None:
            try:
                while not self.over.is_set():
                    body()
            except BaseException as error:  # noqa: BLE001 - raised by `during`
                self.errors.append(error)
                self.over.set()

        threads = [threading.Thread(target=run, args=(body,), daemon=True) for body in bodies]
        for thread in threads:
            thread.start()
        try:
            strike()
        finally:
            self.over.set()
            for thread in threads:
                thread.join(2 * PATIENCE_S)
        for error in self.errors:
            raise error

    def transfers(self, client: anabranch.Client, seed: int) -> Callable[[], None]:
        chance, count = random.Random(seed), iter(range(1_000_000))
        recorder = Recorder(self.folder / f"client{seed}{SUFFIX}")

        def transfer() -> None:
            number = seed * 1_000_000 + next(count)
            rows = self.drawn(number, chance.sample(self.streams, chance.choice((2, 2, 3))), chance)
            home = scope_of(chance.choice(self.streams))
            txn = RecordedTransaction(recorder, client, home, f"t{number}")
            with suppress(*TROUBLE):
                txn.begin(chance.choice((None, 60)))
                txn.write(rows)
                if chance.random() < 0.1:
                    txn.abort()
                else:
                    self.done[number] = txn.commit().commit_timestamp or 0

        return transfer

    def drawn(self, number: int, accounts: list[str], chance: random.Random) -> list[Row]:
        """Begin a transfer between these accounts: the events of those that are streams."""
        amounts = [chance.randrange(-50, 50) for _ in accounts[1:]]
        self.begun[number] = dict(zip(accounts, [-sum(amounts), *amounts], strict=True))
        return [
            Row(account, str(number % 7), f"{number}/{place}/{amount}")
            for place, (account, amount) in enumerate(self.begun[number].items())
            if account != DATABASE
        ]

    def payments(self, client: anabranch.Client, seed: int) -> Callable[[], None]:
        """Transfers between the database and streams of two scopes; what is left undone is recovered meanwhile."""
        chance, count = random.Random(seed), iter(range(1_000_000))
        recorder = Recorder(self.folder / f"ledger{seed}{SUFFIX}")
        place = self.place
        assert place is not None
        ledger = Ledger(place.connect)
        ledger.create(client)

        def pay() -> None:
            number = seed * 1_000_000 + next(count)
            rows = self.drawn(number, [DATABASE, *chance.sample(self.streams, 2)], chance)
            txn = RecordedTransaction(recorder, client, scope_of(rows[0].stream), f"t{number}")
            with suppress(*TROUBLE, psycopg.Error):
                txn.begin(60)
                with paying(recorder, txn) as answer, ledger.commit(txn.txn) as cursor:
                    txn.write(rows)
                    place.order(cursor, str(number), self.begun[number][DATABASE])
                    answer()
                self.paid += 1
                if txn.txn.result is not None:
                    self.done[number] = txn.txn.result.commit_timestamp
            with suppress(RetryError):
                assert ledger.recover(client, older_than=AHEAD_S[1] + 3).alarms == {}

        return pay

    def recover(self, client: anabranch.Client) -> None:
        """End all that the ledger has prepared, and compare the database with the streams."""
        assert self.place is not None
        ledger = Ledger(self.place.connect)

        def is_over() -> bool:
            found = ledger.recover(client, older_than=-2 * max(AHEAD_S))
            assert found.alarms == {}
            return not found.held and not found.waiting and not ledger.rows()

        wait_until(is_over, PATIENCE_S)
        there = {number for number, *_ in read(client.snapshot(self.streams))}
        expected = {
            str(number): amounts[DATABASE]
            for number, amounts in self.begun.items()
            if DATABASE in amounts and number in there
        }
        assert dict(self.place.all("select id, amount from orders")) == expected

    def total(self, parts: Iterable[tuple[int, str, int, int]]) -> int:
        """The sum of these parts, and of what their transfers wrote to the database."""
        amounts = {number: self.begun[number].get(DATABASE, 0) for number, *_ in parts}
        return sum(amount for _, _, amount, _ in parts) + sum(amounts.values())

    def look(self, client: anabranch.Client, recorder: Recorder) -> None:
        """A snapshot of now has all that was answered, and the sum is 0."""
        answered, label = dict(self.done), f"s{self.looks}"
        asked = {"snapshot": label, "streams": self.streams, "asked_for": None}
        with suppress(RetryError):
            with recorder.asking("snapshot", **asked) as told:
                found = client.snapshot(self.streams)
                told["timestamp"] = found.timestamp
            events = []
            for stream in self.streams:
                with recorder.asking("snapshot_read", snapshot=label, stream=stream) as told:
                    its = list(found.read(stream))
                    told["events"] = [seen(event) for event in its]
                events += its
            parts = list(map(part_of, events))
            assert self.total(parts) == 0, found.timestamp
            assert found.timestamp >= max(answered.values(), default=0)
            assert answered.keys() <= {number for number, *_ in parts}
            self.looks += 1
        time.sleep(0.05)

    def recorded(self, replica: anabranch.Replica, name: str) -> dict[str, RecordedTables]:
        """The replica, for transactions that begin in the scope of each table."""
        recorder = Recorder(self.folder / f"{name}{SUFFIX}")
        return {
            table: RecordedTables(lambda: recorder, replica, scope_of(table), f"{name}.{table}")
            for table in self.tables
        }

    def move(self, by_table: dict[str, RecordedTables], chance: random.Random) -> None:
        """Move an amount from a row of a table to a row of another one, as the rows allow it."""
        (one, first), (other, second) = [
            (t, chance.choice(KEYS)) for t in chance.sample(self.tables, 2)
        ]

        def body(txn: Any) -> None:
            held, there = number_in(txn.get(one, first)), number_in(txn.get(other, second))
            amount = chance.randrange(held + 1)
            txn.put(one, first, b"%d/%s.from" % (held - amount, txn.name.encode()))
            txn.put(other, second, b"%d/%s.to" % (there + amount, txn.name.encode()))

        with suppress(*TROUBLE):
            by_table[one].transact(body)
            self.moved += 1

    def sum_up(self, by_table: dict[str, RecordedTables], at: int | None = None) -> None:
        with (
            suppress(RetryError),
            by_table[self.tables[0]].snapshot(at, timeout=PATIENCE_S) as view,
        ):
            held = [number_in(row) for table in self.tables for _, row in view.scan(table)]
            assert sum(held) == TOTAL, (view.timestamp, held)
            assert min(held) >= 0, held
            self.summed.append(view.timestamp)
        time.sleep(0.05)

    def scale(self, client: anabranch.Client) -> None:
        with suppress(RetryError):
            both = (*self.streams, *self.tables)
            client.scale(self.chance.choice(both), segments=self.chance.choice((1, 2, 3)))
            self.faults["scaled"] += 1
        self.over.wait(1.0)

    # -- faults ----------------------------------------------------------------------------------------

    def progress(self, more: int) -> None:
        """Wait for so many transfers that begin now."""
        before = set(self.begun)
        wait_until(lambda: self.errors or len(self.done.keys() - before) >= more, 2 * PATIENCE_S)

    def strike(self, process: ControllerProcess) -> None:
        self.chance.choice((self.kill, self.freeze))(process)

    def lose(self, node: EmbeddedBroker, process: ControllerProcess) -> None:
        """Kill a broker, and strike a controller before the broker is back."""
        node.kill()
        self.progress(3)
        self.strike(process)
        node.start()
        self.faults["brokers"] += 1

    def kill(self, process: ControllerProcess) -> None:
        process.kill()
        self.progress(5)
        process.start()
        self.faults["killed"] += 1

    def freeze(self, process: ControllerProcess) -> None:
        """For longer than its session: another one leads meanwhile, and it does not know."""
        process.signal(signal.SIGSTOP)
        try:
            self.progress(5)
        finally:
            process.signal(signal.SIGCONT)
        self.faults["frozen"] += 1

    # -- the end ---------------------------------------------------------------------------------------

    def check(self, client: anabranch.Client, snapshots: int) -> None:
        """All is as of one time, everywhere, and what was answered is there once."""
        events = read(client.snapshot(self.streams))
        found, times = defaultdict[int, Amounts](dict), defaultdict[int, set[int]](set)
        for number, stream, amount, at in events:
            assert stream not in found[number], f"transfer {number} is twice in {stream}"
            found[number][stream] = amount
            times[number].add(at)
        for number, amounts in found.items():
            whole = {
                account: its for account, its in self.begun[number].items() if account != DATABASE
            }
            assert amounts == whole, f"transfer {number} is torn"
            assert len(times[number]) == 1, f"transfer {number} has several times"
        for number, at in self.done.items():
            assert times[number] == {at}, f"transfer {number} was answered"
        stamps, total = [], 0
        for at, group in groupby(sorted(events, key=lambda one: one[3]), key=lambda one: one[3]):
            total += self.total(list(group))
            assert total == 0, f"as of {at}"
            stamps.append(at)
        for at in self.chance.sample(stamps, min(snapshots, len(stamps))):
            assert sorted(read(client.snapshot(self.streams, at))) == sorted(
                one for one in events if one[3] <= at
            )
        wait_until(lambda: not client.open_transactions(), PATIENCE_S)

    def judge(self) -> None:
        """What was recorded, by the checker."""
        with closing(Log(self.bootstrap)) as log:
            recorder = Recorder(self.folder / f"log{SUFFIX}")
            record_log(recorder, log, read_events(log, self.streams))
            record_log(recorder, log, read_events(log, self.tables, tables=True), table=True)
            recorder.note("total", tables=self.tables, changes=[], total=TOTAL)
        report = checker.judge(self.folder)
        assert report.ok, str(report)
        assert report.counts["totals after a commit"] > self.moved


@contextmanager
def paying(recorder: Recorder, txn: RecordedTransaction) -> Iterator[Callable[[], None]]:
    """Record the end of a transaction in a ledger. Gives what is to be called when the block has written all."""
    asked: list[int] = []

    def ask() -> None:
        asked.append(recorder.ask("commit", txn=txn.handle, writers=["own"], prepares=True))

    outcome, told = "unknown", dict[str, Any]()
    try:
        yield ask
        if (result := txn.txn.result) is not None:
            outcome, told = (
                "ok",
                {"txn_id": result.txn_id.hex(), "timestamp": result.commit_timestamp},
            )
            told["committed"] = result.counts.committed
    finally:
        for op in asked:
            recorder.told(op, outcome, **told)


def scope_of(stream: str) -> str:
    return stream.partition("/")[0]


def part_of(event: anabranch.Event) -> tuple[int, str, int, int]:
    """Transfer, stream, amount and commit timestamp of an event."""
    number, _, amount = id_of(event.value).split("/")
    return int(number), event.stream, int(amount), event.commit_timestamp


def read(snapshot: anabranch.Snapshot) -> list[tuple[int, str, int, int]]:
    return [part_of(event) for stream in snapshot.streams for event in snapshot.read(stream)]


@pytest.fixture
def bank(broker: Broker, unique: str, tmp_path: Path) -> Bank:
    return Bank(broker.bootstrap, f"m{unique}", tmp_path, random.Random(time.time_ns()))


@contextmanager
def controllers(bank: Bank) -> Iterator[list[ControllerProcess]]:
    """Three of them, which lead."""
    found = [
        ControllerProcess(
            bank.bootstrap,
            bank.folder / f"c{number}",
            bank.prefix,
            ("--session-timeout", "2", "--control-partitions", str(PARTITIONS)),
            shifted.environment(ahead_s),
            "tests.shifted",
        )
        for number, ahead_s in enumerate(AHEAD_S)
    ]
    with ExitStack() as stack:
        for process in found:
            stack.enter_context(process)
        wait_until(
            lambda: (
                {one for process in found for one in process.leading()} == set(range(PARTITIONS))
            ),
            2 * PATIENCE_S,
        )
        yield found


def run(bank: Bank, strike: Callable[[], None], snapshots: int) -> None:
    with ExitStack() as stack:
        client = [stack.enter_context(bank.client()) for _ in range(7)]
        chances = [random.Random(seed) for seed in range(2)]
        transfers = [bank.transfers(client[seed], seed + 1) for seed in range(3)]
        if bank.place is not None:
            transfers.append(bank.payments(client[6], 4))
        recorder = Recorder(bank.folder / f"looks{SUFFIX}")
        rows = stack.enter_context(client[5].replica(*bank.tables))
        movers, looker = bank.recorded(rows, "movers"), bank.recorded(rows, "sums")
        others = (
            lambda: bank.look(client[3], recorder),
            lambda: bank.scale(client[4]),
            lambda: bank.move(movers, chances[0]),
            lambda: bank.move(movers, chances[1]),
            lambda: bank.sum_up(looker),
        )

        def strike_and_wait() -> None:
            strike()
            wait_until(
                lambda: bank.errors or (bank.looks and bank.moved and bank.summed), 2 * PATIENCE_S
            )

        bank.during([*transfers, *others], strike_and_wait)
        if bank.place is not None:
            bank.recover(client[6])
        bank.check(client[0], snapshots)
        for at in [None, *bank.chance.sample(bank.summed, min(snapshots, len(bank.summed)))]:
            bank.sum_up(looker, at)
        bank.judge()
    assert bank.looks, "nobody looked"
    assert bank.moved, "no row was moved"


@pytest.mark.long
@pytest.mark.slow(6)
def test_money_is_whole_though_clocks_are_apart_and_leaders_change(bank: Bank) -> None:
    leaders = Controllers(bank.bootstrap, bank.prefix, bank.folder, PARTITIONS)
    try:
        for number, ahead_s in enumerate(AHEAD_S):
            leaders.lead(number, ahead_s)
        bank.open()

        def strike() -> None:
            for number, ahead_s in enumerate(AHEAD_S):
                bank.progress(3)
                leaders.lead(number, ahead_s)
            bank.progress(3)

        run(bank, strike, snapshots=3)
    finally:
        leaders.stop(*range(PARTITIONS))


@pytest.mark.long
@pytest.mark.timeout(500)
def test_money_is_whole_while_controllers_and_a_broker_die(
    unique: str, tmp_path: Path, measured: Callable[[str], None]
) -> None:
    """A broker of three dies while controllers are killed and frozen; some of the money is in PostgreSQL."""
    with EmbeddedCluster(3, quick_start=True) as cluster, server() as database:
        place = PostgresPlace(database.dsn()).made()
        chance = random.Random(time.time_ns())
        bank = Bank(cluster.bootstrap, f"m{unique}", tmp_path, chance, place)
        with controllers(bank) as processes:
            bank.open()

            def strike() -> None:
                bank.strike(chance.choice(processes))
                bank.lose(cluster.node(chance.randrange(1, 4)), chance.choice(processes))
                until = time.monotonic() + STRUCK_S
                while time.monotonic() < until and not bank.errors:
                    bank.progress(5)
                    bank.strike(chance.choice(processes))
                bank.progress(10)

            run(bank, strike, snapshots=10)
        cluster.kill()
    measured(
        f"money: {len(bank.done)} transfers, {bank.paid} with the database, {bank.moved} between rows; "
        f"{bank.looks} and {len(bank.summed)} snapshots of now; {dict(bank.faults)}"
    )
    assert bank.paid, "nothing was written to the database"
    assert bank.faults["scaled"], bank.faults
