"""The bank in processors, in memory: workers, a desk with a ledger of SQLite, others that write; planted bugs."""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import checker
from anabranch.client.client import Client
from anabranch.client.table_locks import Locks
from anabranch.errors import (
    AnabranchError,
    AskOutcomeError,
    BeginAgainError,
    OutcomeUnknown,
    ReservedByPrepared,
    RetryError,
)
from anabranch.ledger import Ledger
from anabranch.ledger.book import COMMIT, Book, Row
from anabranch.ports import LogUncertain, TopicPartition
from anabranch.processing.batch import BatchConflict, BatchTables
from anabranch.processing.commits import Commits, commit_until_known
from anabranch.processing.handlers import PART_S, Handlers
from anabranch.processing.tables import TaskTables
from anabranch.processing.worker import AllTasks, Worker
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.codec import LEVEL
from anabranch.topics.names import stream_topic
from anabranch.types import Event
from checker.recorder import SUFFIX, Recorder
from tests.client.world import World
from tests.ledger.places import SQLitePlace
from tests.mutants import planting, prepared
from tests.processing import bank
from tests.processing.bank import ACCOUNTS, IN_TABLE, NOTE, TASKS, Command, Names, unique
from tests.processing.desk import Desk
from tests.processing.recorded import WorkRecorder
from tests.tables.recorded import RecordedTables, RecordedTransaction
from tests.workload.recording import id_of, txn_of

SEED = int(os.environ.get("ANABRANCH_SEED", time.time_ns() % 1_000_000))
COMMANDS = 60
STILL = 12  # rounds without an outcome, after which there is none left
AGED_S = -1e8  # each prepared transaction is old enough to be recovered
KILLED, LOST = 0.05, 0.05  # how likely a commit is cut before and after it, and its answer lost
UNCERTAIN = 0.005  # … and what a client sends to the log is not answered
SEEDS = 8


class Killed(BaseException):
    """A process is gone."""


class Bank:
    """All of it in one thread. Processes are killed at their commits, and answers to commits are lost."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.world, self.folder, self.chance = World(), folder, random.Random(seed)
        self.world.connect(lane=ADMIN_LANE).feature_level(raise_to=LEVEL)
        self.names, self.history = Names("bank"), folder / "history"
        self.history.mkdir(parents=True)
        self.recorder = Recorder(self.history / f"bank{SUFFIX}")
        self.work = WorkRecorder(self.recorder)
        self.other = self.world.new_client()
        self.place = SQLitePlace(folder / "bank.db")
        Ledger(self.place.connect).create(self.other)
        self.names.create(self.other)
        with closing(self.place.connect()) as connection:
            bank.open_database(connection.cursor(), "?")
            connection.commit()
        self.names.open_accounts(self.recorder, self.other)
        replica = self.other.replica(self.names.accounts, threads=False)
        self.others = RecordedTables(lambda: self.recorder, replica, "bank", "others")
        self.workers: list[Worker | None] = [None, None]
        self.desk: Desk | None = None
        self.long: RecordedTransaction | None = None
        self.inside, self.at_work, self.written = False, set[int](), 0
        self.struck = Counter[str]()

    def run(self) -> None:
        """All of it, until no outcome is left."""
        try:
            with self.lost_answers(), self.work.installed():
                self.world.fault = self.uncertain
                while self.written < COMMANDS:
                    self.chance.choice((self.write, self.step, self.step, *self.acts()))()
                self.end()
        finally:
            for worker in self.workers:
                if worker is not None:
                    worker._stack.close()
            self.others.replica.close()

    def end(self) -> None:
        still = before = 0
        while still < STILL:
            for act in (self.step, self.step, self.at_the_desk, self.recover):
                act()
            still = still + 1 if before == self.outcomes() else 0
            before = self.outcomes()
        self.world.fault = None
        if self.long is not None:
            self.hold()
        for number, worker in enumerate(self.workers):
            if worker is not None:
                worker.close()
                self.workers[number] = None

    def uncertain(self, call: str) -> LogUncertain | None:
        """A client does not hear whether what it sent is in the log, now and then."""
        if call != "produce.after" or self.chance.random() > UNCERTAIN:
            return None
        self.struck["uncertain"] += 1
        return LogUncertain("no answer")

    def acts(self) -> list[Callable[[], None]]:
        """What others do."""
        return [
            self.step, self.blind, self.move, self.at_the_desk, self.recover, self.hold, self.scale,
        ]  # fmt: skip

    def write(self) -> None:
        """Some commands, in one commit."""
        chance = self.chance
        with self.other.begin("bank") as txn:
            writes = bank.writing(self.recorder, txn, self.names, f"commands.{unique()}")
            for _ in range(chance.randint(1, 4)):
                source, target = chance.sample(ACCOUNTS, 2)
                made = Command(f"c{self.written}", source, target, chance.randint(1, 60))
                self.written += 1
                writes.write(self.names.commands, made.value, source.encode())
            writes.commit()

    # -- others ---------------------------------------------------------------------------------------

    def meanwhile(self) -> None:
        """Between a handler's reads and its writes: others write, or work."""
        if self.inside or self.chance.random() > 0.15:
            return
        self.inside = True
        try:
            what = self.chance.choice((self.blind, self.move, self.step))
            with ThreadPoolExecutor(1) as thread:  # where no event loop runs, and no handler
                thread.submit(what).result()
        finally:
            self.inside = False

    def blind(self) -> None:
        with suppress(AnabranchError):
            bank.blind(self.recorder, self.other, self.names, self.chance.randrange(100))

    def move(self) -> None:
        with suppress(AnabranchError):
            bank.move(self.others, self.names, self.chance.randrange(8), self.chance.randrange(8))

    def hold(self) -> None:
        """Begin a long transaction with locks, or end it."""
        key = NOTE.encode() + b"long"
        if self.long is None:
            self.long = self.others.begin(keepalive=1e6)
            with suppress(AnabranchError):
                self.long.get(self.names.accounts, self.chance.choice((key, IN_TABLE[0].encode())))
                self.long.put(self.names.accounts, key, f"n.{unique()}".encode())
                self.long.txn.flush()
            return
        txn, self.long = self.long, None
        with suppress(AnabranchError):
            txn.commit(timeout=20.0)

    def scale(self) -> None:
        if self.chance.random() < 0.2:
            stream = self.chance.choice((*self.names.streams, self.names.accounts))
            with suppress(AnabranchError):
                self.other.scale(stream, self.chance.randint(1, 4))

    # -- the programs ---------------------------------------------------------------------------------

    def step(self) -> None:
        """One of the workers that is not at work does a step, and may be killed at its commit."""
        number = self.chance.randrange(2)
        if number in self.at_work:
            return
        worker = self.workers[number] or self.start(number)
        self.at_work.add(number)
        try:
            with self.killed():
                worker.step()
        except Killed:
            self.struck["workers killed"] += 1
            worker._stack.close()
            self.workers[number] = None
        except (RetryError, BeginAgainError, AskOutcomeError) as error:
            self.struck[type(error).__name__] += 1
            worker._drop()
        finally:
            self.at_work.remove(number)

    def start(self, number: int) -> Worker:
        chance = self.chance
        app = bank.program(
            self.names,
            self.meanwhile,
            commit_interval=0,
            cut_bytes=chance.choice((500, 8 << 20)),
            concurrency=1,
            concurrent=chance.random() < 0.5,
        )
        made = self.workers[number] = Worker(
            app,
            self.world.new_client(one_shot_bytes=chance.choice((400, 1 << 18))),
            self.folder / f"w{number}",
            tasks=AllTasks(range(number, TASKS, 2)),
            threads=False,
            handlers=partial(Handlers, part_s=chance.choice((0.0, PART_S))),
        )
        return made

    @contextmanager
    def killed(self) -> Iterator[None]:
        """A kill before or after a worker's commit, now and then."""
        commit, when = Commits._commit, self.chance.random()

        def until(own: Commits, *given: Any) -> None:
            if when < KILLED:
                raise Killed
            commit(own, *given)
            if when < 2 * KILLED:
                raise Killed

        with patch.object(Commits, "_commit", until):
            yield

    @contextmanager
    def lost_answers(self) -> Iterator[None]:
        """A worker's commit is not answered, now and then."""

        def lost(*given: Any) -> int:
            timestamp = commit_until_known(*given)
            if self.chance.random() < LOST:
                self.struck["answers lost"] += 1
                raise OutcomeUnknown("the answer is lost")
            return timestamp

        with patch("anabranch.processing.commits.commit_until_known", lost):
            yield

    def at_the_desk(self) -> None:
        """The desk carries out what there is, and may be killed at a commit of its database."""
        if self.inside:
            return
        when = self.chance.random()

        def hook(step: str) -> None:
            if step == ("commit" if when < 0.1 else "commit.after") and when < 0.2:
                self.struck[f"desk killed at {step}"] += 1
                raise Killed

        if self.desk is None:
            client = self.world.new_client(timeout=5.0)
            replica = client.replica(self.names.accounts, threads=False)
            ledger = Ledger(partial(self.place.connect, hook))
            self.desk = Desk(client, self.names, replica, ledger, self.work)
            self.desk.mark, self.desk.lock, self.desk.chance = "?", "", self.chance
            self.desk.before = self.meanwhile
        else:
            self.desk.ledger = Ledger(partial(self.place.connect, hook))
        try:
            self.desk.serve(range(TASKS), 1.0)
        except Killed:
            self.desk = None
            for act in self.chance.choices((self.step, self.blind, self.move), k=4):
                act()  # what it has prepared holds rows
        except (AnabranchError, sqlite3.Error) as error:
            self.struck[f"desk: {type(error).__name__}"] += 1

    def recover(self) -> None:
        """The ledger's recovery."""
        if not self.inside:
            found = Ledger(self.place.connect).recover(
                self.world.new_client(timeout=5.0), older_than=AGED_S
            )
            assert not found.alarms, found.alarms

    # -- the end --------------------------------------------------------------------------------------

    def outcomes(self) -> int:
        return sum(len(self.world.events(name)) for name in (self.names.done, self.names.rejected))

    def judge(self) -> tuple[checker.Report, Counter[str]]:
        """The checker's report; after it `check_effects`, if it found nothing."""
        names = self.names
        for stream in names.streams:
            record_log(self.recorder, self.world, stream)
        record_log(self.recorder, self.world, names.accounts, table=True)
        with closing(self.place.connect()) as connection:
            database = bank.record_database(self.recorder, connection.cursor(), names)
        bank.record_rules(self.recorder, names)
        report = checker.judge(self.history)
        if not report.ok:
            return report, Counter()
        rows, outcomes = (
            read(self.world.client, *some)
            for some in ((names.accounts,), (names.done, names.rejected))
        )
        return report, bank.check_effects(rows, outcomes, database, names)


def record_log(recorder: Recorder, world: World, stream: str, **more: Any) -> None:
    """Record what the log in memory has of a stream."""
    topic = stream_topic(stream)
    for number in range(world.cluster.topics[topic].partitions):
        events = [
            [
                event.offset,
                None if event.key is None else event.key.decode(),
                None if event.value is None else id_of(event.value),
                txn_of(event.headers),
            ]
            for event in world._read(TopicPartition(topic, number))
        ]
        with recorder.asking("log", stream=stream, partition=number, **more) as told:
            end = 1 + max((int(event[0] or 0) for event in events), default=-1)
            told |= {"start": 0, "end": end, "events": events}
    with recorder.asking("commits", stream=stream) as told:
        told["records"] = [
            [
                at,
                record.timestamp,
                [record.txn_id.hex()] if any(record.txn_id) else [],
                [[each.partition, each.first, each.end] for each in record.segments],
            ]
            for at, record in enumerate(world.commits(stream))
        ]


def read(client: Client, *streams: str) -> list[Event]:
    """All events."""
    with client.read(list(streams), timeout=1.0) as reader:
        return list(reader)


def test_the_bank_is_right_in_memory(tmp_path: Path) -> None:
    print(f"ANABRANCH_SEED={SEED}")
    made = Bank(tmp_path, SEED)
    made.run()
    report, found = made.judge()
    print(dict(made.struck), dict(report.counts))
    assert report.ok, "\n".join(map(str, report.anomalies[:5]))
    wanted = ("done", "rejected", "commits", "of others", "of the database")
    assert min(found[what] for what in wanted) > 0, found


# -- planted bugs -------------------------------------------------------------------------------------


@contextmanager
def no_locks() -> Iterator[None]:
    """A batch is committed without its locks."""
    with (
        patch.object(Locks, "records", lambda *_: ()),
        patch.object(Locks, "validate", lambda *_: None),
    ):
        yield


@contextmanager
def a_lock_forgotten() -> Iterator[None]:
    """The second row that a batch reads is not locked."""
    begin = TaskTables.begin

    def forgetful(own: TaskTables, least: int) -> Any:
        txn: Any = begin(own, least)
        seen = set[bytes]()
        get = txn.get

        def without(table: str, key: bytes, *, lock: bool = True) -> bytes | None:
            seen.add(key)
            found: bytes | None = get(table, key, lock=lock and len(seen) != 2)
            return found

        txn.get = without
        return txn

    with patch.object(TaskTables, "begin", forgetful):
        yield


@contextmanager
def lost_input() -> Iterator[None]:
    """After a conflict, the input of the batch is not handled again."""
    real = Handlers.again

    def again(own: Handlers, *given: Any) -> None:
        real(own, *given)
        own._left = []

    with patch.object(Handlers, "again", again):
        yield


@contextmanager
def kept_writes() -> Iterator[None]:
    """What a batch read is not read again after a conflict: it is committed as it was."""
    with (
        patch.object(BatchTables, "check", lambda _: None),
        patch.object(Locks, "validate", lambda *_: None),
    ):
        yield


@contextmanager
def given_up_after_a_hold() -> Iterator[None]:
    """After a wait for a prepared transaction, the input of the batch is not handled again."""
    commit, again = Commits._commit_batch, Handlers.again
    held: list[bool] = []

    def noted(own: Commits, *given: Any) -> None:
        held[:] = []
        try:
            commit(own, *given)
        except BatchConflict as error:
            held[:] = [isinstance(error.__cause__, ReservedByPrepared)]
            raise

    def forgetful(own: Handlers, *given: Any) -> None:
        again(own, *given)
        if held == [True]:
            own._left = []

    with (
        patch.object(Commits, "_commit_batch", noted),
        patch.object(Handlers, "again", forgetful),
    ):
        yield


@contextmanager
def positions_apart() -> Iterator[None]:
    """A ledger's transaction does not move the positions: another commit does, after it."""
    commit = Ledger.commit

    @contextmanager
    def apart(
        own: Ledger, txn: Any, *given: Any, consumed: Any = None, **how: Any
    ) -> Iterator[Any]:
        ownership, txn._ownership = txn._ownership, None
        with commit(own, txn, *given, **how) as cursor:
            yield cursor
        with txn._shared.outside():
            txn._replica.begin(ownership=ownership).commit(consumed=consumed)

    with patch.object(Ledger, "commit", apart):
        yield


@contextmanager
def written_twice_after_doubt() -> Iterator[None]:
    """A batch whose outcome is unknown is written once more, without its positions."""
    commit = Commits._commit

    def twice(own: Commits, ownership: Any, batch: Any, consumed: Any) -> None:
        try:
            commit(own, ownership, batch, consumed)
        except OutcomeUnknown:
            with own._client.begin(ownership.scope) as txn:
                for stream, written in batch.outputs.items():
                    for value, key, *_ in written:
                        txn.write(stream, value, key)
                txn.commit()
            raise

    with patch.object(Commits, "_commit", twice):
        yield


@planting.wrapping(Book, "decide")
def aborts_are_commits(usual: Any, book: Book, txn_id: bytes) -> Row | None:
    """Recovery takes each row of a ledger for `commit`."""
    row: Row | None = usual(book, txn_id)
    return row if row is None else row._replace(outcome=COMMIT)


Plant = Callable[[], AbstractContextManager[Any]]


@pytest.mark.parametrize(
    ("bug", "kinds"),
    [
        # Recovery finds that it can't do as the database says.
        (prepared.locks_not_frozen, {"lost-update", "write-skew", "LocksBroken"}),
        *(
            pytest.param(bug, kinds, marks=pytest.mark.long)
            for bug, kinds in (
                (no_locks, {"lost-update", "write-skew", "wrong-total"}),
                (positions_apart, {"two-outcomes", "consumed-twice"}),
                (a_lock_forgotten, {"lost-update", "write-skew"}),
                (kept_writes, {"lost-update", "write-skew", "wrong-total"}),
                (lost_input, {"no-outcome", "unconsumed"}),
                (given_up_after_a_hold, {"no-outcome", "unconsumed"}),
                (written_twice_after_doubt, {"two-outcomes", "duplicate"}),
                (aborts_are_commits, {"torn-transaction", "lost-write"}),
            )
        ),
    ],
)
def test_the_checker_finds_planted_bugs(tmp_path: Path, bug: Plant, kinds: set[str]) -> None:
    """In one of some runs; the first anomalies are named."""
    found = Counter[str]()
    for seed in range(SEEDS):
        made = Bank(tmp_path / str(seed), seed)
        try:
            with bug():
                made.run()
        except AnabranchError as error:
            found[type(error).__name__] += 1
        else:
            found += made.judge()[0].totals
        if found.keys() & kinds:
            return
    raise AssertionError(f"{bug.__name__} is not found; only {dict(found)}")
