"""The processes of a run: started, replaced when they were killed, ended; and the verdict on what they recorded."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException

import anabranch
import checker
from anabranch.errors import AnabranchError, RetryError
from checker.recorder import SUFFIX, Failed, Recorder, Unknown
from tests.workload.groups import Watcher
from tests.workload.last import (
    Events,
    Given,
    Log,
    ids_of,
    read_events,
    read_with_plain,
    record_log,
    undecided,
    under_way,
)
from tests.workload.leaders import Leaders
from tests.workload.readers import Read
from tests.workload.recording import RecordedTransaction, Row, ask_state, take_snapshot
from tests.workload.writers import Help, Plan, Write, connect
from tests.workload.zygote import Child, Spec, Zygote

SEED = int(os.environ.get("ANABRANCH_SEED", time.time_ns() % 1_000_000))
READY_S = 60.0
LAST_ROWS = 60  # of the last transaction, in each stream: every segment gets some
FEW = 3  # fewer commits show nothing; how many there are is the machine's speed


@dataclass(frozen=True)
class Patience:
    """Seconds that parts of the end may take, and the whole of it.

    ``is_strict`` False: a part that takes too long, or fails, is a defect, and the others follow all the same.
    """

    end: float = 120.0
    catch_up: float = 60.0
    whole: float = 240.0
    is_strict: bool = True


class Crew:
    """Clients of one prefix, and the folder of their histories.

    Every wait has a deadline, and fails with what it waited for. What is done is printed with its second.
    """

    def __init__(
        self,
        zygote: Zygote,
        bootstrap: str,
        folder: Path,
        chance: random.Random,
        names: Sequence[str] = ("wide", "narrow"),
    ) -> None:
        self.zygote = zygote
        self.bootstrap = bootstrap
        self.folder = folder
        self.chance = chance
        self.prefix = f"w{uuid.uuid4().hex[:6]}"
        self.scope = f"{self.prefix}-scope"
        self.streams = tuple(f"{self.scope}/{name}" for name in names)
        self.history = folder / "history"
        self.history.mkdir(parents=True)
        self.is_quiet = False
        self.plan = Plan()
        self.patience = Patience()
        self.leaders: Leaders
        self.clients: list[Child] = []
        self.gone: list[Child] = []
        self.over = threading.Event()  # nothing is done to them any more
        self.scalings = 0
        self.troubles: Counter[str] = Counter()
        self.defects: list[str] = []
        self._forked = 0
        self._watcher: Watcher | None = None
        self._began = time.monotonic()
        self._finish_by = 0.0

    def note(self, what: object) -> None:
        """Print it with the second: a run that fails shows where it was."""
        if not self.is_quiet:
            print(f"{time.monotonic() - self._began:6.1f} s  {what}", flush=True)

    def connect(self) -> anabranch.Client:
        return connect(Spec(self.bootstrap, self.prefix), self.plan.call)

    # -- starting ---------------------------------------------------------------------------------------

    def start(self, leaders: Leaders, clients: Sequence[Spec]) -> None:
        """Start all of them, on new streams, until they work."""
        self.leaders = leaders
        leaders.start()
        self.create()
        self.begin(clients)

    def create(self) -> None:
        """Create the streams."""
        with self.connect() as client:
            for stream in self.streams:
                create = partial(client.create_stream, stream, self.plan.segments, timeout=READY_S)
                self.until_ready(create)

    def until_ready(self, create: Callable[[], object]) -> None:
        """Create something: only for some seconds does a client wait for the first topics."""
        until = time.monotonic() + READY_S
        while True:
            try:
                create()
                return
            except RetryError:
                if time.monotonic() > until:
                    raise

    def begin(self, clients: Sequence[Spec]) -> None:
        """Fork clients, and watch their groups, until they work."""
        for spec in clients:
            self.fork(spec)
        groups = {
            (spec.group, mode): list(streams)
            for spec in clients
            if isinstance(spec, Read) and spec.group
            for mode, streams in spec.reads
        }
        recorder = Recorder(self.history / f"watcher{SUFFIX}")
        self._watcher = Watcher(recorder, self.bootstrap, groups)
        for child in self.clients:
            child.wait_said("works", READY_S)
        self.note("all work")

    def _common(self) -> dict[str, Any]:
        return {
            "bootstrap": self.bootstrap,
            "prefix": self.prefix,
            "spool": str(self.history),
        }

    def writers(self, count: int, helpers: int = 0) -> list[Spec]:
        """Specifications of writers, and of helpers for their teams."""
        what = {"streams": self.streams, "plan": self.plan, **self._common()}
        return [*[Write(**what)] * count, *[Help(**what)] * helpers]

    def reader(self, mode: str, *, grouped: bool = False) -> Read:
        """Specification of a reader. Whole transactions are of one stream."""
        streams = self.streams[:1] if mode == "transactions" else self.streams
        group = f"{self.prefix}-{mode}" if grouped else None
        return Read(reads=((mode, streams),), group=group, call=self.plan.call, **self._common())

    def fork(self, spec: Spec) -> Child:
        """Start a process, with a name and a seed of its own."""
        self._forked += 1
        own: dict[str, Any] = {"name": f"{type(spec).__name__.lower()}-{self._forked}"}
        if hasattr(spec, "seed"):
            own["seed"] = self.chance.randrange(1 << 30)
        child = self.zygote.fork(replace(spec, **own))
        self.clients.append(child)
        return child

    def again(self, child: Child) -> Child:
        """Start another one in its place."""
        self.clients.remove(child)
        self.gone.append(child)
        return self.fork(child.spec)

    def of(self, *kinds: type[Spec]) -> list[Child]:
        return [child for child in self.clients if isinstance(child.spec, kinds)]

    # -- work -------------------------------------------------------------------------------------------

    def commits(self) -> int:
        """Commits answered by now."""
        return sum(len(child.said("commit")) for child in (*self.clients, *self.gone))

    def work_on(self, commits: int, seconds: float) -> None:
        """Wait for that many more commits, or that time: what is struck has something to lose."""
        until = time.monotonic() + seconds
        wanted = self.commits() + commits
        while self.commits() < wanted and time.monotonic() < until:
            time.sleep(0.05)

    def scale(self, client: anabranch.Client, recorder: Recorder, most: int = 5) -> None:
        """Scale the first stream once."""
        try:
            with recorder.asking("scale", stream=self.streams[0]):
                client.scale(self.streams[0], self.chance.randint(1, most))
            self.scalings += 1
        except RetryError as error:
            self.troubles[f"scale: {type(error).__name__}"] += 1

    def keep_scaling(self) -> None:
        """Scale now and then until it is over."""
        recorder = Recorder(self.history / f"scaler{SUFFIX}")
        with self.connect() as client:
            while not self.over.wait(self.chance.uniform(1.0, 4.0)):
                self.scale(client, recorder)

    # -- the end ----------------------------------------------------------------------------------------

    def finish(self) -> None:
        """End the run as `tests.workload` says."""
        with self.connect() as client:
            recorder = self._end_writing(client)
            given = Given(self.history)
            with self._bearing():
                self._ask_outcomes(recorder, client, given)
            with self._bearing():
                self._commit_last(recorder, client)
            with self._bearing():
                self._read_last(recorder, given)

    def finish_tables(self, look: Callable[[anabranch.Client, Recorder], None]) -> None:
        """End a run over tables; ``look`` reads them when nothing is written any more."""
        with self.connect() as client:
            recorder = self._end_writing(client)
            look(client, recorder)
        log = Log(self.bootstrap)
        try:
            record_log(recorder, log, read_events(log, self.streams, tables=True), table=True)
        finally:
            log.close()

    def _end_writing(self, client: anabranch.Client) -> Recorder:
        """Let all but readers end. Returns the recorder for what follows."""
        self.over.set()
        self._finish_by = time.monotonic() + self.patience.whole
        writing = [child for child in self.clients if not isinstance(child.spec, Read)]
        with self._bearing():
            self.leaders.check()
        with self._bearing():
            self.end(writing, signal.SIGTERM)
        with self._bearing():
            self.wait_ended(client)
        with self._bearing():
            self._wait_decided()
        return Recorder(self.history / f"last{SUFFIX}")

    @contextmanager
    def _bearing(self) -> Iterator[None]:
        """Note a failure as a defect, unless the run is strict."""
        try:
            yield
        except (AssertionError, AnabranchError, KafkaException, Failed, Unknown) as error:
            if self.patience.is_strict:
                raise
            self.defects.append(f"the end: {type(error).__name__}: {error}"[:1000])

    def end(self, children: Sequence[Child], number: signal.Signals) -> None:
        """Let clients end what is under way, at the same time."""
        for child in children:
            with self._waiting_for(child) as left:
                child.wait_said("works", left)  # before, it has no handler of signals
            child.signal(number)
        for child in children:
            self.note(f"waits for the end of {child.spec.name}")
            with self._bearing(), self._waiting_for(child) as left:
                child.wait_ended(left)
            if child.running:
                child.kill()
            if child.status != 0:
                self.defects.append(f"{child.spec.name}: {child.status}, {child.events[-3:]}")

    @contextmanager
    def _waiting_for(self, child: Child) -> Iterator[float]:
        """Seconds to wait; a wait that fails says what the client does."""

        def what() -> str:
            doing = under_way(self.history / f"{child.spec.name}{SUFFIX}")
            return f"the end of {child.spec.name}, which does {doing}"

        left = self._left(self.patience.end, what)
        try:
            yield left
        except AssertionError as error:
            hanging = undecided(self.bootstrap, self.prefix)
            raise AssertionError(
                f"waited {left:.0f} s for {what()}; undecided: {hanging}: {error}"
            ) from None

    def _left(self, seconds: float, what: Callable[[], str]) -> float:
        """At most ``seconds``; fails if the whole end takes too long, with what it waits for."""
        left = self._finish_by - time.monotonic()
        whole = self.patience.whole
        assert left > 0, f"the end took more than {whole:.0f} s; waited for {what()}"
        return min(seconds, left)

    def _count(self, child: Child) -> None:
        for event in child.said("trouble"):
            self.troubles[event["kind"]] += 1
        self.defects += [f"{child.spec.name}: {event['why']}" for event in child.said("failed")]

    def wait_ended(self, client: anabranch.Client) -> None:
        """Wait until no transaction is open: those of killed processes become stale first."""
        self.note("no transaction may be open")
        until = time.monotonic() + self._left(self.patience.end, lambda: "open transactions")
        while True:
            try:
                left: list[object] = [*client.transactions(self.scope)]
            except AnabranchError as error:
                left = [error]
            if not left:
                return
            assert time.monotonic() < until, f"still open: {left[:3]}"
            time.sleep(0.2)

    def _wait_decided(self) -> None:
        """No native transaction hangs: it would keep committed readers from the ends of streams and replies."""
        self.note("no native transaction may hang")
        until = time.monotonic() + self._left(self.patience.catch_up, lambda: "native transactions")
        while left := undecided(self.bootstrap, self.prefix):
            assert time.monotonic() < until, f"undecided: {left}"
            time.sleep(0.5)

    def _ask_outcomes(self, recorder: Recorder, client: anabranch.Client, given: Given) -> None:
        """Each transaction that was begun is known, and final, to two leaders."""
        given.look()
        for resolves in (False, True):
            self.note(f"asks for {len(given.begun)} outcomes")
            for txn_id in sorted(given.begun):
                state = self._outcome(recorder, client, bytes.fromhex(txn_id), resolves=resolves)
                if state not in ("committed", "aborted"):
                    self.defects.append(f"{txn_id} was begun, and is {state} at the end")
            if not resolves:
                self.leaders.hand_over()

    def _outcome(
        self, recorder: Recorder, client: anabranch.Client, txn_id: bytes, *, resolves: bool
    ) -> str:
        """Ask until it is answered: a takeover may last longer than a call."""
        while True:
            try:
                return ask_state(recorder, client, txn_id, final=resolves)
            except RetryError:
                if time.monotonic() > self._finish_by:
                    raise

    def _commit_last(self, recorder: Recorder, client: anabranch.Client) -> None:
        """After all of it, a transaction to every segment commits, and a snapshot has it."""
        rows = [
            Row(stream, f"last-{n}", f"last.{stream}.{n}")
            for stream in self.streams
            for n in range(LAST_ROWS)
        ]
        txn = RecordedTransaction(recorder, client, self.scope, "last").begin(self.plan.keepalive)
        txn.write(rows)
        txn.commit()
        take_snapshot(recorder, client, "last", self.streams)

    def _read_last(self, recorder: Recorder, given: Given) -> None:
        """Record the log when readers have all of it, or had the time: the checker says what is missing."""
        given.look()
        log = Log(self.bootstrap)
        try:
            until = time.monotonic() + self._left(self.patience.catch_up, lambda: "plain writes")
            found = read_with_plain(log, self.streams, given.plain, until)
            self._catch_up(given, found)
            self.end(self.of(Read), signal.SIGUSR2)
            if self._watcher is not None:
                self._watcher.close()
            self.note("records the log")
            record_log(recorder, log, found)
        finally:
            log.close()

    def _catch_up(self, given: Given, found: Events) -> None:
        wanted = {stream: ids_of(parts) for stream, parts in found.items()}
        self.note(f"readers are to have {sum(map(len, wanted.values()))} events")
        until = time.monotonic() + self._left(self.patience.catch_up, lambda: "readers")
        missing: dict[str, int] = {}
        while time.monotonic() < until:
            given.look()
            missing = {}
            for spec in (child.spec for child in self.of(Read)):
                assert isinstance(spec, Read)
                for mode, streams in spec.reads:
                    if mode != "snapshots":
                        missing[f"{spec.name} {mode}"] = given.missing(
                            spec.name, mode, streams, wanted
                        )
            if not any(missing.values()):
                return
            time.sleep(0.3)
        self.note(f"readers lack events: {missing}")

    def judged(self, measured: Callable[[str], None], what: str) -> None:
        """Fail on any anomaly or defect, or if too little was done for any to show."""
        for child in (*self.clients, *self.gone):
            self._count(child)
        report = checker.judge(self.history)
        measured(
            f"{what}: {self.commits()} commits answered, {self.scalings} scalings in "
            f"{time.monotonic() - self._began:.0f} s; troubles {dict(self.troubles)}; "
            f"{len(report.anomalies)} anomalies; {dict(report.counts)}; seed {SEED}"
        )
        assert not self.defects, self.defects[:3]
        assert not report.anomalies, "\n".join(map(str, report.anomalies[:5]))
        assert self.commits() > FEW, "too little was done under the faults"

    def close(self) -> None:
        """End all processes, also frozen ones."""
        self.over.set()
        if self._watcher is not None:
            self._watcher.close()
        for child in self.clients:
            child.kill()
        if hasattr(self, "leaders"):
            self.leaders.close()
