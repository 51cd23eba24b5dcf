"""Money over three control partitions on a broker, whose controllers are killed and frozen, while streams scale.

A transfer writes amounts, whose sum is 0, to streams of two or three scopes. So the sum of all amounts is 0 as of
every time, if each transfer is in all of its streams at one time, or in none. Other clients move amounts between
rows of tables of these scopes, as the rows allow it.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

import anabranch
import checker
from anabranch.errors import RetryError
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.codec import LEVEL
from checker.recorder import SUFFIX, Recorder
from tests import shifted
from tests.behaviour.test_times import Controllers
from tests.cluster import ControllerProcess
from tests.conftest import Broker
from tests.waiting import wait_until
from tests.workload.last import Log, read_events, record_log
from tests.workload.recording import TROUBLE, RecordedTransaction, Row, id_of, seen

pytestmark = [pytest.mark.broker, pytest.mark.unsecured]

PARTITIONS = 3
AHEAD_S = (0.0, 5.0, 0.0)  # of the controllers' clocks
PATIENCE_S = 60.0
KEYS, EACH = [b"a", b"b", b"c", b"d"], 100  # rows of each table, and what each has at first
Amounts = dict[str, int]  # by stream


@dataclass
class Bank:
    """Streams, and what was answered. ``done``: transfer -> its commit timestamp."""

    bootstrap: str
    prefix: str
    folder: Path
    chance: random.Random
    done: dict[int, int] = field(default_factory=dict)
    begun: dict[int, Amounts] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    looks: int = 0
    moved: int = 0

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
            for table in self.tables:
                client.create_table(table)
                client.transact(self._opens(table))
        assert sorted(served.values()) == list(range(PARTITIONS))

    def _opens(self, table: str) -> Callable[[Any], None]:
        def body(txn: Any) -> None:
            for key in KEYS:
                txn.write(table, b"%d" % EACH, key=key)

        return body

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
            streams = chance.sample(self.streams, chance.choice((2, 2, 3)))
            amounts = [chance.randrange(-50, 50) for _ in streams[1:]]
            self.begun[number] = dict(zip(streams, [-sum(amounts), *amounts], strict=True))
            rows = [
                Row(stream, str(number % 7), f"{number}/{place}/{amount}")
                for place, (stream, amount) in enumerate(self.begun[number].items())
            ]
            home = chance.choice(self.streams).partition("/")[0]
            txn = RecordedTransaction(recorder, client, home, f"t{number}")
            with suppress(*TROUBLE):
                txn.begin(chance.choice((None, 60)))
                txn.write(rows)
                if chance.random() < 0.1:
                    txn.abort()
                else:
                    self.done[number] = txn.commit().commit_timestamp or 0

        return transfer

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
            assert sum(amount for _, _, amount, _ in parts) == 0, found.timestamp
            assert found.timestamp >= max(answered.values(), default=0)
            assert answered.keys() <= {number for number, *_ in parts}
            self.looks += 1
        time.sleep(0.05)

    def move(self, replica: anabranch.Replica, chance: random.Random) -> None:
        """Move an amount from a row of a table to a row of another one, as the rows allow it."""
        (one, first), (other, second) = [
            (t, chance.choice(KEYS)) for t in chance.sample(self.tables, 2)
        ]

        def body(txn: Any) -> None:
            held, there = int(txn.get(one, first)), int(txn.get(other, second))
            amount = chance.randrange(held + 1)
            txn.put(one, first, b"%d" % (held - amount))
            txn.put(other, second, b"%d" % (there + amount))

        with suppress(*TROUBLE):
            replica.transact(body)
            self.moved += 1

    def sum_up(self, replica: anabranch.Replica) -> None:
        with suppress(RetryError), replica.snapshot() as view:
            held = [int(value) for table in self.tables for _, value in view.scan(table)]
            assert sum(held) == EACH * len(KEYS) * PARTITIONS, (view.timestamp, held)
            assert min(held) >= 0, held
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
        wait_until(lambda: self.errors or len(self.done.keys() - before) >= more, PATIENCE_S)

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
            assert amounts == self.begun[number], f"transfer {number} is torn"
            assert len(times[number]) == 1, f"transfer {number} has several times"
        for number, at in self.done.items():
            assert times[number] == {at}, f"transfer {number} was answered"
        stamps, total = [], 0
        for at, group in groupby(sorted(events, key=lambda one: one[3]), key=lambda one: one[3]):
            total += sum(amount for _, _, amount, _ in group)
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
        report = checker.judge(self.folder)
        assert report.ok, str(report)


def part_of(event: anabranch.Event) -> tuple[int, str, int, int]:
    """Transfer, stream, amount and commit timestamp of an event."""
    number, _, amount = id_of(event.value).split("/")
    return int(number), event.stream, int(amount), event.commit_timestamp


def read(snapshot: anabranch.Snapshot) -> list[tuple[int, str, int, int]]:
    return [part_of(event) for stream in snapshot.streams for event in snapshot.read(stream)]


@pytest.fixture
def bank(broker: Broker, unique: str, tmp_path: Path) -> Bank:
    return Bank(broker.bootstrap, f"m{unique}", tmp_path, random.Random(time.time_ns()))


@pytest.fixture
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
            PATIENCE_S,
        )
        yield found


def run(bank: Bank, strike: Callable[[], None], snapshots: int = 20) -> None:
    with ExitStack() as stack:
        client = [stack.enter_context(bank.client()) for _ in range(6)]
        chances = [random.Random(seed) for seed in range(2)]
        transfers = [bank.transfers(client[seed], seed + 1) for seed in range(3)]
        recorder = Recorder(bank.folder / f"looks{SUFFIX}")
        rows = stack.enter_context(client[5].replica(*bank.tables))
        others = (
            lambda: bank.look(client[3], recorder),
            lambda: bank.scale(client[4]),
            lambda: bank.move(rows, chances[0]),
            lambda: bank.move(rows, chances[1]),
            lambda: bank.sum_up(rows),
        )
        bank.during([*transfers, *others], strike)
        bank.check(client[0], snapshots)
        bank.sum_up(rows)
        bank.judge()
    assert bank.looks, "nobody looked"
    assert bank.moved, "no row was moved"


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
@pytest.mark.timeout(240)
def test_money_is_whole_while_controllers_are_killed_and_frozen(
    bank: Bank, controllers: list[ControllerProcess]
) -> None:
    bank.open()

    def strike() -> None:
        until = time.monotonic() + 45
        while time.monotonic() < until and not bank.errors:
            bank.progress(10)
            how = bank.chance.choice((bank.kill, bank.freeze))
            how(bank.chance.choice(controllers))
        bank.progress(10)

    run(bank, strike)
    assert bank.faults["killed"] + bank.faults["frozen"] >= 2, bank.faults
    assert bank.faults["scaled"], bank.faults
