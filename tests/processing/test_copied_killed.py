"""Inputs change, and copies are made, while workers and the commands themselves are killed: all is exact."""

from __future__ import annotations

import json
import os
import random
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.client.client import Client
from anabranch.client.transaction import Transaction
from anabranch.errors import UnknownProcessor
from tests.cluster import ControllerProcess
from tests.conftest import Broker
from tests.owned import start_module
from tests.processing.workers import WorkerProcess

SEED = int(os.environ.get("ANABRANCH_SEED", time.time_ns() % 1_000_000))
KEYS = [b"k%d" % number for number in range(12)]
PATIENCE_S = 60.0
Rows = dict[bytes, list[Any]]


class Trial:
    """A scope with inputs `in` and `more`, and the processors of `tests.processing.copied`."""

    def __init__(self, client: Client, broker: Broker, prefix: str, folder: Path) -> None:
        self.client, self.folder = client, folder
        self.scope = f"{prefix}-s"
        self.chance = random.Random(SEED)
        self.environment = {"ANABRANCH_PREFIX": prefix, "ANABRANCH_TRIAL_SCOPE": self.scope}
        self.bootstrap = broker.bootstrap
        self.workers: list[WorkerProcess] = []
        self.number = 0
        self.written: dict[tuple[str, bytes], list[int]] = defaultdict(list)
        for name, segments in {"in": 2, "more": 3, "out-old": 1, "out-new": 1}.items():
            client.create_stream(self.of(name), segments=segments)

    def of(self, name: str) -> str:
        return f"{self.scope}/{name}"

    def start(self, name: str, inputs: str, count: int = 2) -> list[WorkerProcess]:
        """Workers of a program."""
        group = ("-X", "session.timeout.ms=2000", "-X", "heartbeat.interval.ms=300")
        given = {"ANABRANCH_TRIAL_NAME": name, "ANABRANCH_TRIAL_INPUTS": inputs}
        made = [
            WorkerProcess(
                self.folder / f"{name}-{len(self.workers) + number}",
                ("--bootstrap", self.bootstrap, *group),
                self.environment | given,
                program="tests.processing.copied:app",
            )
            for number in range(count)
        ]
        self.workers += made
        for worker in made:
            worker.start()
        return made

    def write(self, commits: int, *streams: str) -> None:
        for _ in range(commits):
            self.number += 1
            keys = self.chance.sample(KEYS, 6)

            def put(txn: Transaction, keys: Sequence[bytes] = keys) -> None:
                for stream in streams:
                    for key in keys:
                        txn.write(self.of(stream), b"%d" % self.number, key=key)

            self.client.transact(
                put, name=f"commit-{self.number}", scope=self.scope, timeout=PATIENCE_S
            )
            for stream in streams:
                for key in keys:
                    self.written[stream, key].append(self.number)
            time.sleep(0.02)

    def command(
        self, *arguments: str, is_done: Callable[[], bool], is_amid: Callable[[], bool]
    ) -> None:
        """Repeat a command until its work is done, and kill it three times, if possible in the middle."""
        killed, give_up = 0, time.monotonic() + PATIENCE_S
        while not is_done():
            assert time.monotonic() < give_up, arguments
            with (self.folder / "command.log").open("ab") as log:
                process = start_module(
                    "anabranch.cli",
                    ["processor", *arguments, "--bootstrap", self.bootstrap, "--timeout", "20"],
                    output=log,
                    environment=os.environ | self.environment,
                )
                while process.poll() is None:
                    if killed < 3 and is_amid():
                        time.sleep(self.chance.uniform(0.0, 0.3))
                        process.kill()
                        killed += 1
                    time.sleep(0.02)
            self.write(3, "in")
            self.strike()

    def end(self) -> None:
        for worker in self.workers:
            kill(worker)

    def strike(self) -> None:
        """Kill a worker and start it again."""
        worker = self.chance.choice(self.workers)
        if worker.running:
            worker.kill()
        worker.start()

    def out(self, name: str, is_done: Callable[[Rows], bool]) -> Rows:
        """What a processor wrote, once all is there, and a second later: there must be no more."""
        give_up, done = time.monotonic() + PATIENCE_S, 0
        while True:
            found: Rows = defaultdict(list)
            with self.client.read(self.of(f"out-{name}"), timeout=1.0) as reader:
                for event in reader:
                    found[event.key or b""].append(json.loads(event.value or b""))
            done += is_done(found)
            if done > 1 or time.monotonic() > give_up:
                return found

    def check_all(self, name: str, *streams: str) -> Rows:
        """Each event of these inputs was numbered once, by key and in order."""
        wanted = {
            key: Counter((s, n) for s in streams for n in self.written[s, key]) for key in KEYS
        }
        count = sum(map(Counter.total, wanted.values()))
        found = self.out(name, lambda found: sum(map(len, found.values())) >= count)
        for key in KEYS:
            assert [one[0] for one in found[key]] == list(range(1, len(found[key]) + 1)), key
            assert Counter((s, n) for _, s, n in found[key]) == wanted[key], key
        return found


def kill(process: ControllerProcess | WorkerProcess) -> None:
    if process.running:
        process.kill()


@pytest.fixture
def trial(broker: Broker, tmp_path: Path) -> Any:
    print(f"ANABRANCH_SEED={SEED}")
    prefix = f"pc{uuid.uuid4().hex[:6]}"
    controller = ControllerProcess(broker.bootstrap, tmp_path / "c", prefix)
    with ExitStack() as stack:
        stack.callback(kill, controller)
        controller.start()
        controller.wait_leading()
        client = stack.enter_context(
            anabranch.connect(broker.bootstrap, prefix=prefix, timeout=20.0)
        )
        with anabranch.connect(
            broker.bootstrap, prefix=prefix, timeout=20.0, lane="admin"
        ) as operator:
            operator.feature_level(raise_to=3)
        made = Trial(client, broker, prefix, tmp_path)
        stack.callback(made.end)
        yield made


@pytest.mark.long
@pytest.mark.broker
@pytest.mark.timeout(170)
def test_a_copy_under_kills_goes_on_exactly(trial: Trial) -> None:
    old, new = trial.of("old"), trial.of("new")
    trial.start("old", "in")
    trial.write(60, "in")

    def is_done() -> bool:
        try:
            return not trial.client.processor(new).phase
        except UnknownProcessor:
            return False

    def is_amid() -> bool:
        try:
            return trial.client.processor(new).phase == "copying"
        except UnknownProcessor:
            return False

    trial.command("copy", old, new, is_done=is_done, is_amid=is_amid)
    trial.start("new", "in")
    for _ in range(4):
        trial.write(15, "in")
        trial.strike()
    everything = trial.check_all("old", "in")
    found = trial.out(
        "new", lambda found: all(found[key][-1:] == everything[key][-1:] for key in KEYS)
    )
    for key in KEYS:
        assert found[key], "it has handled later events"
        begun = found[key][0][0] - 1
        assert begun > 0, "it has begun with state"
        assert found[key] == everything[key][begun:], key


@pytest.mark.long
@pytest.mark.broker
@pytest.mark.timeout(170)
def test_inputs_under_kills_change_exactly(trial: Trial) -> None:
    """Workers of both programs run, and are killed, while the inputs change."""
    old = trial.of("old")
    before = trial.start("old", "in")
    trial.write(40, "in")
    trial.write(10, "in", "more")
    wanted = {trial.of("in"), trial.of("more")}

    def is_done() -> bool:
        return {one.stream for one in trial.client.processor(old).inputs} == wanted

    add = ("--add-input", trial.of("more"), "--from", "begin")
    trial.out("old", bool)
    chance = trial.chance
    trial.command(
        "alter", old, *add, "--yes", is_done=is_done, is_amid=lambda: chance.random() < 0.02
    )
    trial.start("old", "in,more")
    for _ in range(3):
        trial.write(15, "in", "more")
        trial.strike()
    for worker in before:  # by now each was refused, as it was started again or before
        assert worker.process is not None
        assert worker.process.wait(PATIENCE_S) != 0
        assert "IllegalState" in worker.tail()
    trial.check_all("old", "in", "more")
