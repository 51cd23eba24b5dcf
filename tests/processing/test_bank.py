"""The bank in processors: in memory in each run, and in the long suite on a broker, under SIGKILLs."""

from __future__ import annotations

import json
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import anabranch
from anabranch.client.client import Client
from anabranch.client.table_locks import Locks
from anabranch.client.transaction import Transaction
from anabranch.errors import AnabranchError, BeginAgainError, RetryError
from anabranch.processing.batch import BatchTables
from anabranch.processing.commits import Commits
from anabranch.processing.handlers import PART_S, Handlers
from anabranch.processing.worker import AllTasks, Worker
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.codec import LEVEL
from anabranch.types import Event
from tests.client.world import World
from tests.cluster import ControllerProcess
from tests.conftest import Broker
from tests.processing.bank import NOTE, TASKS, Names, command, judge, move, program
from tests.processing.workers import WorkerProcess

SEED = int(os.environ.get("ANABRANCH_SEED", time.time_ns() % 1_000_000))
COMMANDS = 100
PATIENCE_S = 60.0


class Killed(Exception):
    """A worker's process is gone."""


def read(client: Client, *streams: str) -> list[Event]:
    """All events."""
    with client.read(list(streams), timeout=1.0) as reader:
        return list(reader)


class Bank:
    """Two workers in memory, and others that write while handlers run. Commits may end as a kill would end them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.world, self.folder, self.chance = World(), folder, random.Random(seed)
        self.world.connect(lane=ADMIN_LANE).feature_level(raise_to=LEVEL)
        self.names = Names("bank")
        self.names.create(self.world.client)
        self.other = self.world.new_client()
        self.replica = self.other.replica(self.names.accounts, threads=False)
        self.commands: dict[int, dict[str, Any]] = {}
        self.workers: list[Worker | None] = [None, None]
        self.inside, self.at_work = False, set[int]()

    def start(self, number: int) -> Worker:
        app = program(
            self.names,
            self.meanwhile,
            commit_interval=0,
            cut_bytes=self.chance.choice((500, 8 << 20)),
            concurrency=1,
            concurrent=self.chance.random() < 0.5,
        )
        tasks = AllTasks(range(number, TASKS, 2))
        folder = self.folder / f"w{number}"
        made = self.workers[number] = Worker(
            app,
            self.world.new_client(one_shot_bytes=self.chance.choice((400, 1 << 18))),
            folder,
            tasks=tasks,
            threads=False,
            handlers=partial(Handlers, part_s=self.chance.choice((0.0, PART_S))),
        )
        return made

    def write(self) -> None:
        """Some commands, in one commit."""
        chance = self.chance
        with self.other.begin("bank") as txn:
            for _ in range(chance.randint(1, 4)):
                number = len(self.commands)
                made = command(
                    number, chance.randrange(12), chance.randrange(12), chance.randint(1, 60)
                )
                self.commands[number] = made
                txn.write(self.names.commands, json.dumps(made).encode(), b"%d" % number)
            txn.commit()

    def meanwhile(self) -> None:
        """Between a handler's reads and its writes: others write, or the other worker works."""
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
        with self.other.begin("bank") as txn:
            txn.write(self.names.accounts, b"1", NOTE + b"%d" % self.chance.randrange(3))
            txn.commit()

    def move(self) -> None:
        move(self.replica, self.names, self.chance.randrange(12), self.chance.randrange(12))

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
            worker._stack.close()
            self.workers[number] = None
        except (RetryError, BeginAgainError):
            worker._drop()
        finally:
            self.at_work.remove(number)

    @contextmanager
    def killed(self) -> Iterator[None]:
        """A kill before or after a commit, now and then."""
        commit, when = Commits._commit, self.chance.random()

        def until(own: Commits, *given: Any) -> None:
            if when < 0.05:
                raise Killed
            commit(own, *given)
            if when < 0.1:
                raise Killed

        with patch.object(Commits, "_commit", until):
            yield

    def run(self) -> None:
        while len(self.commands) < COMMANDS:
            self.chance.choice(
                (self.write, self.step, self.step, self.step, self.blind, self.move)
            )()
        still = 0
        while still < 40:
            before = self.outcomes()
            self.step()
            still = still + 1 if before == self.outcomes() else 0
        for worker in self.workers:
            if worker is not None:
                worker.close()
        self.replica.close()

    def outcomes(self) -> int:
        return sum(len(self.world.events(name)) for name in (self.names.done, self.names.rejected))

    def judge(self) -> Any:
        client, names = self.world.client, self.names
        return judge(
            self.commands,
            read(client, names.accounts),
            read(client, names.done, names.rejected),
            names,
        )


def test_the_bank_is_right_in_memory(tmp_path: Path) -> None:
    print(f"ANABRANCH_SEED={SEED}")
    bank = Bank(tmp_path, SEED)
    bank.run()
    found = bank.judge()
    assert min(found["done"], found["rejected"], found["commits"], found["of others"]) > 0, found


@contextmanager
def no_locks() -> Iterator[None]:
    """A batch is committed without its locks."""
    with (
        patch.object(Locks, "records", lambda *_: ()),
        patch.object(Locks, "validate", lambda *_: None),
    ):
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


@pytest.mark.parametrize(
    ("bug", "said"),
    [(no_locks, "the total is"), (lost_input, "without outcome"), (kept_writes, "the total is")],
)
def test_the_judge_finds_planted_bugs(
    tmp_path: Path, bug: Callable[[], AbstractContextManager[None]], said: str
) -> None:
    def run() -> None:
        for seed in range(5):
            bank = Bank(tmp_path / str(seed), seed)
            bank.run()
            bank.judge()

    with bug(), pytest.raises(AssertionError, match=said):
        run()


def kill_all(processes: Sequence[ControllerProcess | WorkerProcess]) -> None:
    for process in processes:
        if process.running:
            process.kill()


def write(client: Client, names: Names, commands: Mapping[int, dict[str, Any]]) -> None:
    """Write commands once, in one commit."""

    def put(txn: Transaction) -> None:
        for number, one in commands.items():
            txn.write(names.commands, json.dumps(one).encode(), b"%d" % number)

    client.transact(put, name=f"commands-{min(commands)}", scope=names.scope, timeout=60.0)


@pytest.mark.long
@pytest.mark.broker
@pytest.mark.timeout(170)
def test_the_bank_is_right_under_kills(broker: Broker, tmp_path: Path) -> None:
    """Two workers and two controllers are killed, while others write the accounts."""
    print(f"ANABRANCH_SEED={SEED}")
    chance, prefix = random.Random(SEED), f"pb{uuid.uuid4().hex[:6]}"
    names, commands = Names(f"{prefix}-s"), dict[int, dict[str, Any]]()
    environment = {"ANABRANCH_PREFIX": prefix, "ANABRANCH_TRIAL_SCOPE": names.scope}
    controllers = [
        ControllerProcess(broker.bootstrap, tmp_path / f"c{n}", prefix) for n in range(2)
    ]
    group = ("-X", "session.timeout.ms=2000", "-X", "heartbeat.interval.ms=300")
    workers = [
        WorkerProcess(
            tmp_path / f"w{n}", ("--bootstrap", broker.bootstrap, *group), environment,
            program="tests.processing.bank:app",
        )
        for n in range(2)
    ]  # fmt: skip
    over = threading.Event()
    with ExitStack() as stack:
        processes: list[ControllerProcess | WorkerProcess] = [*controllers, *workers]
        stack.callback(kill_all, processes)
        controllers[0].start()
        controllers[0].wait_leading()  # the topics are there
        controllers[1].start()
        client = stack.enter_context(
            anabranch.connect(broker.bootstrap, prefix=prefix, timeout=20.0)
        )
        with anabranch.connect(broker.bootstrap, prefix=prefix, lane=ADMIN_LANE) as operator:
            operator.feature_level(raise_to=LEVEL)
        names.create(client)
        for worker in workers:
            worker.start()
        replica = stack.enter_context(client.replica(names.accounts))

        def others() -> None:
            own = random.Random(SEED + 1)
            while not over.wait(0.05):
                with suppress(AnabranchError):
                    move(replica, names, own.randrange(12), own.randrange(12))
                with suppress(AnabranchError), client.begin(names.scope) as txn:
                    txn.write(names.accounts, b"1", NOTE + b"%d" % own.randrange(3))
                    txn.commit()

        beside = threading.Thread(target=others, daemon=True)
        beside.start()
        stack.callback(beside.join)
        stack.callback(over.set)
        until = time.monotonic() + 40.0
        strike = time.monotonic() + 8.0
        while time.monotonic() < until:
            number = len(commands)
            some = {
                number + n: command(
                    number + n, chance.randrange(12), chance.randrange(12), chance.randint(1, 60)
                )
                for n in range(chance.randint(1, 8))
            }
            write(client, names, some)
            commands |= some
            if time.monotonic() > strike:
                strike += chance.uniform(2.0, 6.0)
                process = chance.choice(processes)
                process.kill()
                process.start()
            time.sleep(0.02)
        give_up = time.monotonic() + PATIENCE_S
        with client.read([names.done, names.rejected]) as reader:
            outcomes = list[Event]()
            for event in reader:
                outcomes.append(event)
                if len(outcomes) == len(commands) or time.monotonic() > give_up:
                    break
        for worker in workers:
            worker.check()
            worker.end()
        over.set()
        beside.join()
        found = judge(
            commands, read(client, names.accounts), read(client, names.done, names.rejected), names
        )
        assert min(found["done"], found["rejected"], found["of others"]) > 0, found
