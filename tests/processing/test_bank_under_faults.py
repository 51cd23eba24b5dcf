"""The bank in processors, on a broker and PostgreSQL, while its processes are killed and frozen, and all is scaled.

``ANABRANCH_BANK_S`` is how long it is struck, in seconds; ``ANABRANCH_PLANTED`` names a bug of `planted`, for
workers and desks.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psycopg
import pytest
from confluent_kafka import Producer

import anabranch
import checker
from anabranch.client.client import Client
from anabranch.core.stream_settings import derived_table
from anabranch.errors import AnabranchError, DerivationMissing, RetryError
from anabranch.ledger import Ledger
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.codec import LEVEL
from anabranch.protocol.schemas.records import Derivation
from anabranch.topics.names import journal_topic
from anabranch.types import Event
from checker.recorder import Unknown
from tests.cluster import ControllerProcess
from tests.conftest import Broker
from tests.ledger.places import PostgresPlace
from tests.owned import send_signal, start_module
from tests.postgres import Postgres, server
from tests.processing import bank
from tests.processing.bank import (
    ACCOUNTS,
    BRANCHES,
    DERIVED,
    DERIVES,
    IN_TABLE,
    NOTE,
    OWNERS,
    VERSIONS,
    Command,
    Names,
    unique,
)
from tests.processing.recorded import VARIABLE, recorder_in
from tests.processing.workers import Failed, WorkerProcess, kill_one
from tests.tables.recorded import RecordedTables
from tests.workload.children import read_on
from tests.workload.last import (
    Given,
    Log,
    read_entries,
    read_events,
    read_with_plain,
    record_log,
)
from tests.workload.writers import PlainWriter, Plan, Write

SEED = int(os.environ.get("ANABRANCH_SEED", time.time_ns() % 1_000_000))
SECONDS = float(os.environ.get("ANABRANCH_BANK_S", "45"))
DERIVED_SECONDS = float(os.environ.get("ANABRANCH_BANK_S", "30"))
PATIENCE_S = 60.0
SESSION_S = 2.0
AFTER_S = 2.0  # how long a desk that was frozen works again, before it is killed
AHEAD = 60  # commands without an outcome, at most
APART_S = 300.0
GROUP = ("-X", "session.timeout.ms=2000", "-X", "heartbeat.interval.ms=300")
CONTROLLER = ("--session-timeout", "2", "--chunk-bytes", "16384")
WANTED = {
    *("kill_worker", "freeze_worker", "kill_desk", "freeze_desk", "kill_leader", "freeze_leader"),
    *("kill_database", "freeze_database"),
}


@dataclass
class DeskProcess(WorkerProcess):
    """A desk. ``arguments``: all but the folder, the history and the tasks."""

    history: Path = Path()
    tasks: tuple[int, ...] = ()
    woken: float = 0.0

    def start(self, *_: str) -> None:
        words = [*self.arguments, str(self.folder), str(self.history), *map(str, self.tasks)]
        with self.log_file.open("ab") as log:
            self._logged = log.tell()
            self.process = start_module(
                "tests.processing.desk",
                words,
                output=log,
                environment=os.environ | self.environment,
            )


@dataclass
class Faults:
    """All processes of the bank, and what strikes them. ``derives``: the accounts have derived tables."""

    bootstrap: str
    database: Postgres
    folder: Path
    chance: random.Random
    derives: bool = False
    prefix: str = field(default_factory=lambda: f"bf{uuid.uuid4().hex[:6]}")
    done: Counter[str] = field(default_factory=Counter)
    troubles: Counter[str] = field(default_factory=Counter)
    outcomes: int = 0
    written: int = 0

    def __post_init__(self) -> None:
        self.dsn = self.database.dsn()
        self.names, self.history = Names(f"{self.prefix}-s"), self.folder / "history"
        self.history.mkdir()
        self.recorder = recorder_in(self.history, "test")
        self.over, self.errors = threading.Event(), list[BaseException]()
        self._desks, self._threads = 0, list[threading.Thread]()
        self.environment = {
            "ANABRANCH_PREFIX": self.prefix,
            "ANABRANCH_TRIAL_SCOPE": self.names.scope,
            VARIABLE: str(self.history),
            **({DERIVES: "yes"} if self.derives else {}),
        }
        self.version = 1  # of the derived tables
        self.controllers = [
            ControllerProcess(self.bootstrap, self.folder / f"c{n}", self.prefix, CONTROLLER)
            for n in range(2)
        ]
        self.workers = [
            WorkerProcess(
                self.folder / f"w{n}", ("--bootstrap", self.bootstrap, *GROUP), self.environment,
                "tests.processing.recorded", "tests.processing.bank:app",
            )
            for n in range(2)
        ]  # fmt: skip
        self.desks = [self.desk((0, 1)), self.desk((2, 3))]
        self.zombies: list[DeskProcess] = []
        self.recovery: subprocess.Popen[bytes] | None = None
        self.client: Client
        self.others: RecordedTables

    def desk(self, tasks: tuple[int, ...]) -> DeskProcess:
        self._desks += 1
        words = (self.bootstrap, self.prefix, self.dsn, self.names.scope)
        folder = self.folder / f"d{self._desks}"
        return DeskProcess(folder, words, self.environment, history=self.history, tasks=tasks)

    def start(self, stack: ExitStack) -> None:
        """All of it, until the first outcome is there."""
        stack.callback(self.kill_all)
        self.controllers[0].start()
        self.controllers[0].wait_leading()  # the topics are there
        self.controllers[1].start()
        connect = partial(anabranch.connect, self.bootstrap, prefix=self.prefix, timeout=20.0)
        with connect(lane=ADMIN_LANE) as operator:
            operator.feature_level(raise_to=LEVEL)
            if self.derives:
                operator.grant("open", self.names.accounts, ("operate",))
        self.client = stack.enter_context(connect())
        self.names.create(self.client)
        self.names.open_accounts(self.recorder, self.client)
        if self.derives:
            bank.derive(self.client, self.names)
        place = PostgresPlace(self.dsn)
        with closing(place.connect()) as connection:
            bank.open_database(connection.cursor())
            connection.commit()
        Ledger(place.connect).create(self.client)
        replica = stack.enter_context(
            self.client.replica(self.names.accounts, folder=self.folder / "others")
        )
        self.others = RecordedTables(lambda: self.recorder, replica, self.names.scope, unique())
        for process in (*self.workers, *self.desks):
            process.start()
        self.recovery = self.recover_always()
        stack.callback(self.recovery.kill)
        stack.callback(self.join)
        stack.callback(self.over.set)
        acts = [self.collect, self.write, self.move, self.blind, self.hold, self.plain, self.scale]
        if self.derives:
            acts += [self.rename, self.level]
        for act in acts:
            thread = threading.Thread(
                target=partial(self.guarded, act), name=act.__name__, daemon=True
            )
            self._threads.append(thread)
            thread.start()
        self.until(lambda: self.outcomes > 0, "the first outcome")

    def recover_always(self) -> subprocess.Popen[bytes]:
        words = [
            "ledger",
            "recover",
            "--bootstrap",
            self.bootstrap,
            "--cluster-prefix",
            self.prefix,
        ]
        words += ["--database", self.dsn, "--older-than", "1s", "--every", "1s"]
        with (self.folder / "recovery.log").open("ab") as log:
            return start_module("anabranch.cli", words, output=log, environment=os.environ)

    # -- others ---------------------------------------------------------------------------------------

    def guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - raised by `look`
            self.errors.append(error)

    def while_it_lasts(self, pause: float) -> Iterator[random.Random]:
        own = random.Random(self.chance.random())
        while not self.over.wait(own.uniform(0.0, 2 * pause)):
            yield own

    def attempt(self, act: Callable[[], object]) -> None:
        """Controllers may be away, locks broken, and outcomes unknown."""
        try:
            act()
        except (AnabranchError, Unknown) as error:
            self.troubles[type(error).__name__] += 1

    def collect(self) -> None:
        """Count the outcomes."""
        with self.client.read([self.names.done, self.names.rejected], timeout=0.5) as reader:
            while not self.over.is_set():
                for _ in read_on(reader):
                    self.outcomes += 1

    def write(self) -> None:
        """Commands; not many more than are carried out."""
        for chance in self.while_it_lasts(0.03):
            if self.written < self.outcomes + AHEAD:
                self.attempt(partial(self.write_some, chance))

    def write_some(self, chance: random.Random) -> None:
        with self.client.begin(self.names.scope) as txn:
            writes = bank.writing(self.recorder, txn, self.names, f"commands.{unique()}")
            count = chance.randint(1, 6)
            for _ in range(count):
                source, target = chance.sample(ACCOUNTS, 2)
                made = Command(f"c{unique()}", source, target, chance.randint(1, 40))
                writes.write(self.names.commands, made.value, source.encode())
            writes.commit(timeout=20.0)
            self.written += count

    def move(self) -> None:
        for chance in self.while_it_lasts(0.1):
            source, target = chance.sample(range(len(IN_TABLE)), 2)
            self.attempt(partial(bank.move, self.others, self.names, source, target))

    def blind(self) -> None:
        for chance in self.while_it_lasts(0.15):
            first = chance.randrange(100)
            self.attempt(partial(self.blind_once, first))

    def blind_once(self, first: int) -> None:
        """A source of derived tables does not take it."""
        try:
            bank.blind(self.recorder, self.client, self.names, first)
        except DerivationMissing:
            self.done["refused"] += 1
            if not self.derives:
                raise
        else:
            assert not self.derives, "rows without entries were taken"

    def rename(self) -> None:
        for chance in self.while_it_lasts(0.1):
            account, name = chance.choice(IN_TABLE), chance.choice(OWNERS)
            self.attempt(partial(bank.rename, self.others, self.names, account, name))

    def level(self) -> None:
        for chance in self.while_it_lasts(0.1):
            self.attempt(partial(bank.level, self.others, self.names, chance.choice(BRANCHES)))

    def hold(self) -> None:
        """Long transactions, one after the other: with locks, or by the journal alone."""
        for chance in self.while_it_lasts(0.3):
            with_locks = self.derives or chance.random() < 0.6
            self.attempt(partial(self.hold_rows if with_locks else self.hold_writes, chance))

    def hold_rows(self, chance: random.Random) -> None:
        txn = self.others.begin(keepalive=10.0, timeout=20.0)
        with txn.txn:
            for key in (f"{NOTE}long", chance.choice((f"{NOTE}long", IN_TABLE[0]))):
                txn.get(self.names.accounts, key.encode())
            txn.put(self.names.accounts, f"{NOTE}long".encode(), f"n.{unique()}".encode())
            txn.txn.flush()
            self.over.wait(chance.uniform(1.0, 12.0))
            txn.commit(timeout=20.0)
        self.done["long transactions with locks"] += 1

    def hold_writes(self, chance: random.Random) -> None:
        with self.client.begin(self.names.scope, keepalive=10.0) as begun:
            txn = bank.writing(self.recorder, begun, self.names, f"long.{unique()}")
            begun.token()
            for n in range(3):
                txn.write(self.names.accounts, f"n.{unique()}".encode(), f"{NOTE}{n}".encode())
                self.over.wait(chance.uniform(0.5, 4.0))
            txn.commit(timeout=20.0)
        self.done["long transactions"] += 1

    def plain(self) -> None:
        """Rows by a producer that knows nothing of transactions."""
        if self.derives:
            self.plain_in_vain()
            return
        spec = Write(
            self.bootstrap, self.prefix, "plain", streams=(self.names.accounts,),
            plan=Plan(plain=1.0, segments=1),
        )  # fmt: skip
        writer = PlainWriter(self.recorder, spec)
        while not self.over.is_set():
            self.attempt(partial(writer.one, self.over))  # type: ignore[arg-type]

    def plain_in_vain(self) -> None:
        """Rows of which the history knows nothing: a source of derived tables rejects them."""
        producer = Producer({"bootstrap.servers": self.bootstrap, "log_level": 0})
        for chance in self.while_it_lasts(0.2):
            key = chance.choice((*IN_TABLE, f"{NOTE}plain"))
            producer.produce(journal_topic(self.names.accounts), b"1/plain", key.encode())
            producer.flush(1.0)

    def scale(self) -> None:
        accounts, streams = self.names.accounts, self.names.streams
        tables = bank.derived_tables(self.names) if self.derives else []
        for chance in self.while_it_lasts(2.0):
            stream = chance.choice((*streams, accounts, accounts, *tables))
            self.attempt(partial(self.scale_to, stream, chance.randint(1, 4)))

    def scale_to(self, stream: str, count: int) -> None:
        with self.recorder.asking("scale", stream=stream):
            self.client.scale(stream, count)
        self.done["scalings"] += 1

    # -- strikes --------------------------------------------------------------------------------------

    def strike(self, seconds: float) -> None:
        """Strike for so long, and each way at least once."""
        until, kinds = time.monotonic() + seconds, sorted(WANTED)
        if self.derives:
            kinds += ["rebuild"] * (VERSIONS - 1)
        first = self.chance.sample(kinds, len(kinds))
        while first or time.monotonic() < until:
            # Commands are slow where derived tables change with the accounts.
            more = self.outcomes + self.chance.randint(1, 5 if self.derives else 25)
            self.until(lambda more=more: self.outcomes >= more, "outcomes")  # type: ignore[misc]
            kind = first.pop() if first else self.chance.choice(kinds)
            getattr(self, kind)()
            self.done[kind] += 1
            self.bury()

    def kill_worker(self) -> None:
        worker, _ = kill_one(self.workers, self.chance)
        self.pause(0.5)
        worker.start()

    def freeze_worker(self) -> None:
        worker = self.chance.choice([one for one in self.workers if not one.frozen])
        worker.freeze(self.chance.uniform(0.3, 2 * SESSION_S))
        while all(one.frozen for one in self.workers):
            self.pause(0.1)

    def kill_desk(self) -> None:
        """Its folder is kept, or lost."""
        desk = self.chance.choice(self.desks)
        desk.kill()
        if self.chance.random() < 0.3:
            shutil.rmtree(desk.folder, ignore_errors=True)
        desk.start()

    def freeze_desk(self) -> None:
        """Another one takes its tasks; then it goes on for a moment."""
        number = self.chance.randrange(len(self.desks))
        frozen = self.desks[number]
        frozen.freeze(seconds := self.chance.uniform(0.5, 5.0))
        frozen.woken = time.monotonic() + seconds
        self.zombies.append(frozen)
        self.desks[number] = self.desk(frozen.tasks)
        self.desks[number].start()

    def bury(self, *, late: bool = False) -> None:
        for desk in list(self.zombies):
            if late or time.monotonic() > desk.woken + AFTER_S:
                self.zombies.remove(desk)
                desk.kill()

    def leader(self) -> ControllerProcess:
        leading = [one for one in self.controllers if one.leading()]
        return self.chance.choice(leading or self.controllers)

    def kill_leader(self) -> None:
        leader = self.leader()
        leader.kill()
        leader.start()

    def freeze_leader(self) -> None:
        process = self.leader()
        pid = process.pid
        send_signal(pid, signal.SIGSTOP)
        try:
            time.sleep(self.chance.uniform(0.5, 2.5 * SESSION_S))
        finally:
            os.kill(pid, signal.SIGCONT)

    def rebuild(self) -> None:
        """Switch to the next version of each derived table that has one. A build that fails is repeated."""
        if self.version == VERSIONS:
            return
        for name in [
            name for name, (_, versions) in DERIVED.items() if self.version < len(versions)
        ]:
            source = self.names.accounts
            with anabranch.connect(self.bootstrap, prefix=self.prefix, timeout=20.0) as client:
                self.until(partial(self.is_declared, client), "a declaration")
                self.until(partial(self.is_rebuilt, client, name), "a build")
            table = derived_table(Derivation(source, name, self.version))
            self.recorder.note("end_derivation", table=table)
        self.version += 1

    def is_declared(self, client: Client) -> bool:
        try:
            bank.derive(client, self.names, self.version + 1)
        except RetryError as error:
            self.troubles[type(error).__name__] += 1
            return False
        return True

    def is_rebuilt(self, client: Client, name: str) -> bool:
        try:
            client.rebuild(self.names.accounts, name)
        except AnabranchError as error:
            self.troubles[type(error).__name__] += 1
            return False
        return True

    def kill_database(self) -> None:
        """As a power cut."""
        self.database.kill()
        self.database.start()

    def freeze_database(self) -> None:
        self.database.freeze(self.chance.uniform(0.2, 2.0))

    # -- looking --------------------------------------------------------------------------------------

    def look(self) -> None:
        """All that ran on is there."""
        if self.errors:
            raise self.errors[0]
        for process in (*self.workers, *self.desks):
            process.check()
        if self.recovery is not None and self.recovery.poll() is not None:
            text = (self.folder / "recovery.log").read_text(errors="replace")[-2000:]
            raise Failed(f"recovery ended by itself, {self.recovery.returncode}:\n{text}")
        for controller in self.controllers:
            if not controller.running:
                text = controller.log_file.read_text(errors="replace")[-4000:]
                raise Failed(f"a controller ended by itself:\n{text}")

    def pause(self, most: float) -> None:
        time.sleep(self.chance.uniform(0.0, most))

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        give_up = time.monotonic() + PATIENCE_S
        while not is_so():
            self.look()
            self.bury()
            if time.monotonic() > give_up:
                raise Failed(f"waited for {what}, {self.figures()}")
            time.sleep(0.02)

    def figures(self) -> str:
        what = {**self.done, "commands": self.written, "outcomes": self.outcomes}
        return f"{what}; troubles {dict(self.troubles)}; seed {SEED}"

    # -- the end --------------------------------------------------------------------------------------

    def kill_all(self) -> None:
        every: list[ControllerProcess | WorkerProcess] = [*self.controllers, *self.workers]
        for process in (*every, *self.desks, *self.zombies):
            if process.running:
                process.kill()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def finish(self) -> None:
        """Let all commands have an outcome, end all processes but the controllers, and record the log."""
        self.bury(late=True)
        writers = [thread for thread in self._threads if thread.name != "collect"]
        self.over.set()
        self.join()
        assert not any(thread.is_alive() for thread in writers)
        log = Log(self.bootstrap)
        with closing(log):
            streams = [self.names.done, self.names.rejected]
            commands = self._count(log, [self.names.commands])
            give_up = time.monotonic() + PATIENCE_S
            while self._count(log, streams) < commands and time.monotonic() < give_up:
                self.look()  # those that are missing then are anomalies
                time.sleep(0.5)
            for process in (*self.workers, *self.desks):
                while process.frozen:
                    time.sleep(0.1)
                process.end()
            assert self.recovery is not None
            self.recovery.kill()
            self._end_ledger()
            self.until_closed()
            self._record(log)

    def _count(self, log: Log, streams: list[str]) -> int:
        parts = [part for found in read_events(log, streams).values() for part in found.values()]
        return sum(len(events) for _, _, events in parts)

    def _end_ledger(self) -> None:
        """Recover until nothing is prepared; sessions of killed processes end soon."""
        ledger, give_up = Ledger(PostgresPlace(self.dsn).connect), time.monotonic() + PATIENCE_S
        while True:
            found = ledger.recover(self.client, older_than=-APART_S)
            assert not found.alarms, found.alarms
            if not found.held and not ledger.rows():
                return
            assert time.monotonic() < give_up, found
            time.sleep(0.1)

    def until_closed(self) -> None:
        """No transaction is open."""
        give_up = time.monotonic() + PATIENCE_S
        while True:
            with suppress(RetryError):
                if not self.client.transactions(self.names.scope):
                    return
            assert time.monotonic() < give_up, self.client.transactions(self.names.scope)
            time.sleep(0.2)

    def _record(self, log: Log) -> None:
        given, names = Given(self.history), self.names
        given.look()
        record_log(self.recorder, log, read_events(log, names.streams))
        until = time.monotonic() + PATIENCE_S
        read_with_plain(log, [names.accounts], given.plain, until)
        rows = read_events(log, [names.accounts], tables=True)
        record_log(self.recorder, log, rows, table=True)
        with closing(psycopg.connect(self.dsn)) as connection:
            self.rows = bank.record_database(self.recorder, connection.cursor(), names)
        if self.derives:
            bank.record_derivations(self.recorder, names)
            record_log(self.recorder, log, read_entries(log, bank.derived_tables(names)))
        bank.record_rules(self.recorder, names)

    def judge(self) -> tuple[checker.Report, Counter[str]]:
        """The checker's report, and what the commits did. Raises: AssertionError."""
        report = checker.judge(self.history)
        assert report.ok, "\n".join(map(str, report.anomalies[:8])) + f"\n{self.figures()}"
        names = self.names
        rows, outcomes = self._read(names.accounts), self._read(names.done, names.rejected)
        return report, bank.check_effects(rows, outcomes, self.rows, names)

    def _read(self, *streams: str) -> list[Event]:
        snapshot = self.client.snapshot(list(streams))
        return [event for stream in streams for event in snapshot.read(stream)]


@pytest.mark.long
@pytest.mark.broker
@pytest.mark.timeout(3 * SECONDS + 240)
def test_the_bank_is_right_under_faults(
    broker: Broker, tmp_path: Path, measured: Callable[[str], None]
) -> None:
    """Each command has one outcome, and the total is right after each commit."""
    print(f"ANABRANCH_SEED={SEED}")
    with server() as database, ExitStack() as stack:
        faults = Faults(broker.bootstrap, database, tmp_path, random.Random(SEED))
        faults.start(stack)
        faults.strike(SECONDS)
        faults.finish()
        report, found = faults.judge()
        measured(f"the bank: {faults.figures()}; {dict(found)}; {dict(report.counts)}")
    wanted = ("done", "rejected", "commits", "of others", "of the database")
    assert min(found[what] for what in wanted) > 0, found
    assert set(faults.done) >= WANTED


@pytest.mark.long
@pytest.mark.broker
@pytest.mark.timeout(3 * DERIVED_SECONDS + 240)
def test_derived_tables_of_the_bank_are_right_under_faults(
    broker: Broker, tmp_path: Path, measured: Callable[[str], None]
) -> None:
    """Entries follow from accounts after each commit, while versions are switched; no name is of two accounts."""
    print(f"ANABRANCH_SEED={SEED}")
    with server() as database, ExitStack() as stack:
        faults = Faults(broker.bootstrap, database, tmp_path, random.Random(SEED), derives=True)
        faults.start(stack)
        faults.strike(DERIVED_SECONDS)
        faults.finish()
        report, found = faults.judge()
        measured(f"the bank: {faults.figures()}; {dict(found)}; {dict(report.counts)}")
    assert min(found[what] for what in ("done", "commits", "of others", "of the database")) > 0, (
        found
    )
    assert set(faults.done) >= {*WANTED, "refused", "rebuild"}
    assert faults.version == VERSIONS
    judged = ("derived rows compared", "look-ups that hold at their commit", "commits with entries")
    assert min(report.counts[what] for what in judged) > 100, report.counts
    assert faults.troubles["UniqueViolation"] > 0
