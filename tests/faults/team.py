"""What is done to those who work on an embedded cluster, and how it ends."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import anabranch
from anabranch.errors import AnabranchError, RetryError
from checker.recorder import Recorder
from tests.crash.zygote import Child
from tests.faults.acting import ask_state
from tests.faults.coordinators import wait_group, wait_transaction
from tests.faults.crew import Crew
from tests.faults.faults import Fault, strike
from tests.faults.helping import Help
from tests.faults.last import Given, Log, ids_of, read_with_plain, record_log, undecided, under_way
from tests.faults.reading import Read
from tests.faults.writing import Write

# The exit codes of a process that SIGTERM meets before it is a controller.
STARTING = (143, -signal.SIGTERM)
END_S = 120.0
CATCH_UP_S = 60.0
# All of the end together: whoever waits for longer fails, and says for what.
FINISH_S = 240.0


class Team(Crew):
    """A crew that suffers faults, and judges its own end."""

    # -- faults ---------------------------------------------------------------------------------------

    def suffer(self, fault: Fault) -> None:
        """Do it, hold it, undo it."""
        self._over.wait(fault.wait)
        self.note(fault)
        {
            "broker": self._broker,
            "brokers": self._brokers,
            "coordinator": self._coordinator,
            "controller": self._controller,
            "client": self._client,
        }[fault.whom](fault)
        with self._lock:
            self.done[f"{fault.how} {fault.whom}"] += 1

    def _broker(self, fault: Fault) -> None:
        self._strike([self.chance.choice(list(self.cluster.nodes))], fault)

    def _brokers(self, fault: Fault) -> None:
        self._strike(list(self.cluster.nodes), fault)

    def _coordinator(self, fault: Fault) -> None:
        """Of the controllers' native transactions, or of a group of readers; while it has such work."""
        groups = sorted(
            {g for c in self.clients if isinstance(c.spec, Read) and (g := c.spec.group)}
        )
        bootstrap = self.cluster.bootstrap
        if groups and self.chance.random() < 0.5:
            number, work = wait_group(bootstrap, self.chance.choice(groups))
        else:
            number, work = wait_transaction(bootstrap, self.prefix)
        if number not in self.cluster.nodes:  # none leads just now
            number = self.chance.choice(list(self.cluster.nodes))
        self.note(f"it is node {number}, with: {work}")
        self._strike([number], fault)
        self.struck[work] += 1

    def _strike(self, numbers: list[int], fault: Fault) -> None:
        nodes = [self.cluster.node(n) for n in numbers]
        strike(nodes, fault.how, lambda: self._over.wait(fault.hold))

    def _controller(self, fault: Fault) -> None:
        """Mostly of the one that leads."""
        leading = [c for c in self.controllers if c.leading()]
        some = leading if leading and self.chance.random() < 0.8 else self.controllers
        victim = self.chance.choice(some)
        self._check_running()
        if fault.how == "frozen":
            victim.signal(signal.SIGSTOP)
            self._over.wait(fault.hold)
            victim.signal(signal.SIGCONT)
            return
        if fault.how == "hard":
            victim.kill()
        elif (code := victim.stop()) not in (0, *STARTING):
            raise AssertionError(f"a controller ended with {code}: {victim.log_file}")
        self._over.wait(fault.hold)
        victim.start()

    def _check_running(self) -> None:
        """Controllers wait for brokers that are away, also when they start: none ends by itself."""
        for controller in self.controllers:
            assert controller.running, f"a controller ended by itself: {controller.log_file}"

    def _client(self, fault: Fault) -> None:
        victim = self.chance.choice(self.clients)
        assert victim.running, f"{victim.spec.name} ended by itself: {victim.events[-2:]}"
        if fault.how == "frozen":
            victim.signal(signal.SIGSTOP)
            self._over.wait(fault.hold)
            victim.go_on()
            return
        if fault.how == "hard":
            victim.kill()
        else:
            victim.signal(signal.SIGTERM)
            victim.wait_ended(END_S)
            # One that has just been forked does not listen to signals yet.
            good = (0,) if victim.said("works") else (0, signal.SIGTERM)
            assert victim.status in good, (
                f"{victim.spec.name}: {victim.status} {victim.events[-2:]}"
            )
        self._over.wait(fault.hold)
        self._again(victim)

    def over(self) -> None:
        """No fault is held any more."""
        self._over.set()

    def endure(self, plans: Iterable[Iterator[Fault]], seconds: float) -> None:
        """Suffer these plans for so long, each beside the others, while a stream is scaled."""
        problems: list[BaseException] = []
        until = time.monotonic() + seconds

        def work(plan: Iterator[Fault]) -> None:
            for fault in plan:
                if time.monotonic() > until or problems:
                    break
                self.suffer(fault)

        def guarded(body: Callable[[], None]) -> threading.Thread:
            def run() -> None:
                try:
                    body()
                except BaseException as error:  # noqa: BLE001 - raised again below
                    problems.append(error)

            return threading.Thread(target=run)

        scaler = guarded(self.scale)
        threads = [guarded(partial(work, plan)) for plan in plans]
        for thread in (*threads, scaler):
            thread.start()
        for thread in threads:
            thread.join()
        self.over()
        scaler.join()
        if problems:
            raise problems[0]

    def scale(self) -> None:
        """Now and then, until it is over."""
        recorder = Recorder(self.history / "scaler.history")
        chance = random.Random(self.chance.random())
        with self.connect() as client:
            while not self._over.wait(chance.uniform(1.0, 4.0)):
                try:
                    with recorder.asking("scale", stream=self.streams[0]):
                        client.scale(self.streams[0], chance.randint(1, 5))
                    self.scalings += 1
                except RetryError as error:
                    self.troubles[type(error).__name__] += 1

    # -- the end --------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Faults are over: everybody ends what is under way, catches up, and the log is read."""
        self._over.set()
        self._finish_by = time.monotonic() + FINISH_S
        self._check_running()
        for kind in (Write, Help):
            self._end([c for c in self.clients if isinstance(c.spec, kind)], signal.SIGTERM)
        recorder = Recorder(self.history / "last.history")
        given = Given(self.history)
        with self.connect() as client:
            self._wait_ended(client)
            self._wait_decided()
            given.look()
            for turn in range(2):
                self.note(f"asks for {len(given.begun)} outcomes")
                for txn_id in sorted(given.begun):
                    self._ask_outcome(recorder, client, bytes.fromhex(txn_id))
                if turn == 0:
                    self._move_lead()
        log = Log(self.cluster.bootstrap)
        try:
            self.note("reads the log")
            until = time.monotonic() + self._left(CATCH_UP_S, lambda: "the log")
            found = read_with_plain(log, self.streams, given.plain, until)
            self._catch_up(given, {stream: ids_of(parts) for stream, parts in found.items()})
            self._end([c for c in self.clients if isinstance(c.spec, Read)], signal.SIGUSR2)
            if self._watcher is not None:
                self._watcher.close()
            self.note("records the log")
            record_log(recorder, log, found)
        finally:
            log.close()
        for child in self._gone:
            self._count(child)
        self.told = given.told

    def _ask_outcome(self, recorder: Recorder, client: anabranch.Client, txn_id: bytes) -> None:
        """Until it is told: a takeover may last longer than a call."""
        while True:
            try:
                ask_state(recorder, client, txn_id, final=True)
                return
            except RetryError as error:
                self._left(END_S, lambda error=error: f"the end of {txn_id.hex()}: {error}")  # type: ignore[misc]

    def _left(self, seconds: float, what: Callable[[], str]) -> float:
        """So long one may wait; fails if the end takes too long, with what it waits for."""
        left = self._finish_by - time.monotonic()
        if left <= 0:
            raise AssertionError(f"the end took more than {FINISH_S:.0f} s; waited for {what()}")
        return min(seconds, left)

    def _end(self, children: Sequence[Child], number: signal.Signals) -> None:
        """Clients end what is under way, beside each other."""
        for child in children:
            self._tell(child, number)
        for child in children:
            self.note(f"waits for the end of {child.spec.name}")
            with self._waiting_for(child) as left:
                child.wait_ended(left)
            self._count(child)
            if child.status != 0:
                why = f"ended with {child.status}: {child.events[-3:]}"
                self.defects.append(f"{child.spec.name} {why}")

    def _tell(self, child: Child, number: signal.Signals) -> None:
        """It is to end; before it works, it listens to no signal."""
        with self._waiting_for(child) as left:
            child.wait_said("works", left)
        child.signal(number)

    @contextmanager
    def _waiting_for(self, child: Child) -> Iterator[float]:
        """Seconds to wait; a wait that fails says what the client is at."""

        def what() -> str:
            doing = under_way(self.history / f"{child.spec.name}.history")
            return f"the end of {child.spec.name}, which is at {doing}"

        left = self._left(END_S, what)
        try:
            yield left
        except AssertionError as error:
            hanging = undecided(self.cluster.bootstrap, self.prefix)
            raise AssertionError(
                f"waited {left:.0f} s for {what()}; undecided: {hanging}: {error}"
            ) from None

    def _count(self, child: Child) -> None:
        for event in child.said("trouble"):
            self.troubles[event["kind"].strip("_")] += 1
        self.defects += [f"{child.spec.name}: {e['why']}" for e in child.said("defect")]
        self.defects += [f"{child.spec.name}: {e['why']}" for e in child.said("failed")]

    def _wait_ended(self, client: anabranch.Client) -> None:
        """No transaction is open: those of the killed go stale first."""
        self.note("no transaction may be open")
        until = time.monotonic() + END_S
        while True:
            try:
                left: list[object] = [*client.transactions(self.scope)]
            except AnabranchError as error:
                left = [error]
            if not left:
                return
            assert time.monotonic() < until, f"still open after {END_S:.0f} s: {left[:3]}"
            self._left(END_S, lambda left=left: f"the end of {left[:3]}")  # type: ignore[misc]
            time.sleep(0.2)

    def _wait_decided(self) -> None:
        """No native transaction hangs: it would hold up committed readers of streams and of replies for ever."""
        self.note("no native transaction may hang")
        until = time.monotonic() + CATCH_UP_S
        while left := undecided(self.cluster.bootstrap, self.prefix):
            assert time.monotonic() < until, f"undecided for {CATCH_UP_S:.0f} s: {left}"
            time.sleep(0.5)

    def _move_lead(self) -> None:
        """Another controller answers from now on."""
        for controller in self.controllers:
            if controller.leading():
                controller.stop()
                return

    def _catch_up(self, given: Given, wanted: dict[str, set[str]]) -> None:
        """Until readers have been given everything, or had the time for it: the checker says what is missing."""
        self.note(f"readers are to have {sum(map(len, wanted.values()))} events")
        until = time.monotonic() + self._left(CATCH_UP_S, lambda: "readers")
        missing: dict[str, int] = {}
        while time.monotonic() < until:
            given.look()
            missing = {
                spec.name: count
                for child in self.clients
                if isinstance(spec := child.spec, Read)
                and spec.mode != "snapshots"
                and (
                    count := given.missing(
                        spec.name, spec.group, {s: wanted[s] for s in spec.streams}
                    )
                )
            }
            if not missing:
                return
            time.sleep(0.3)
        self.note(f"they were not given so many: {missing}")
