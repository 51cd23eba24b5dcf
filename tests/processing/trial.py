"""Two workers, two controllers and a broker: SIGKILLs, zombies and scalings, and then all of it is a plain fold.

    python -m tests.processing.trial --events 300000 --kills 30 --zombies 5 --scalings 20 --seed 1

The seed decides what is written and who is struck; the speed of the machine, in what.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import anabranch
from anabranch.infra.broker import EmbeddedBroker
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.codec import LEVEL
from tests.cluster import ControllerProcess, words
from tests.processing import planted
from tests.processing.judging import Found, Seen
from tests.processing.program import GRACE_MS, WINDOW_MS
from tests.processing.workers import Failed, WorkerProcess, kill_one
from tests.processing.writing import END_S, FEEDERS, Writing
from tests.workload.children import read_on

STILL_S = 30.0  # without an output, while some are missing
SOME = 500  # outputs between two strikes
AT_ONCE = 0.3  # of them come without a pause
CONTROLLER = ("--chunk-bytes", str(128 << 10))


@dataclass(frozen=True)
class Plan:
    """How much of what. ``seconds``: how long it takes, at least. ``standby``: of a hundred workers.

    ``tables``: with those of `tests.processing.joined`. ``session``: seconds until a worker that is silent is out
    of its group.
    """

    events: int = 300_000
    kills: int = 30
    zombies: int = 5
    scalings: int = 20
    seed: int = 1
    seconds: float = 140.0
    standby: int = 50
    session: float = 6.0
    tables: bool = False
    bug: str = ""  # planted in workers


class Trial:
    """One run."""

    def __init__(
        self,
        bootstrap: str,
        folder: Path,
        plan: Plan,
        say: Callable[[str], None] = print,
        older: Mapping[str, str] = {},
    ) -> None:
        """``older``: the environment of an older build, which all processes have for the first half of the time."""
        self.plan = plan
        self._say = say
        self._older = older
        prefix = f"pt{uuid.uuid4().hex[:6]}"
        self.chance = random.Random(plan.seed)
        self.writing = Writing(bootstrap, prefix, f"{prefix}-s", plan.seed, plan.tables)
        self.done = self.writing.done
        self.controllers = [
            ControllerProcess(bootstrap, folder / f"c{n}", prefix, CONTROLLER, dict(older))
            for n in range(2)
        ]
        group = {
            "session.timeout.ms": plan.session * 1000,
            "heartbeat.interval.ms": plan.session * 150,
        }
        options = words({name: f"{ms:.0f}" for name, ms in group.items()})
        arguments = ("--bootstrap", bootstrap, *options)
        environment = {
            "ANABRANCH_PREFIX": prefix,
            "ANABRANCH_TRIAL_SCOPE": self.writing.scope,
            **older,
        }
        module = "tests.processing.planted" if plan.bug else "anabranch.cli"
        environment[planted.VARIABLE] = plan.bug
        program = f"tests.processing.{'joined' if plan.tables else 'program'}:app"
        self.workers = [
            WorkerProcess(folder / f"w{n}", arguments, environment, module, program)
            for n in range(2)
        ]
        self.seen: list[Seen] = []
        self.killed: list[tuple[float, int]] = []  # Unix seconds, and the pid
        self._errors: list[BaseException] = []
        self._began = time.monotonic()

    def run(self) -> Found:
        """All of it. Raises: AssertionError."""
        writing = self.writing
        with ExitStack() as stack:
            for controller in self.controllers:
                stack.callback(controller.kill)
                controller.start()
                if controller is self.controllers[0]:
                    controller.wait_leading()  # the topics are there
            stack.callback(self._kill_workers)
            client = stack.enter_context(writing.connect())
            if self.plan.tables:
                with writing.connect(ADMIN_LANE) as operator:
                    operator.feature_level(raise_to=LEVEL)
            writing.create(client)
            for worker in self.workers:
                self._start(worker)
            collector = stack.enter_context(client.read(writing.outputs))
            stack.callback(writing.over.set)
            threading.Thread(
                target=self._guarded, args=(lambda: self._collect(collector),), daemon=True
            ).start()
            writing.to_each_task(client)
            self._disturb()
            writing.to_each_task(client, 3 * (WINDOW_MS + GRACE_MS))  # closes what was before
            joined = len(writing.joined().joined) if self.plan.tables else 0
            self._wait_for(writing.fold().outputs + joined)
            for worker in self.workers:
                worker.check()
                worker.end()
            folders = [worker.folder for worker in self.workers]
            info = client.processor(f"{writing.scope}/sums")
            found = Found(writing, self.seen, info, folders)
            found.check()
            if self.plan.tables:
                found.check_tables(client)
            return found

    def note(self, what: str) -> None:
        """Say it, with the second."""
        self._say(f"{time.monotonic() - self._began:6.1f} s  {self._counts()}  {what}")

    def _counts(self) -> str:
        scalings = self.done["scalings"]
        return f"{self.writing.written:7} written, {len(self.seen):7} seen, {scalings:2} scalings"

    def _start(self, worker: WorkerProcess) -> None:
        worker.start(*["--standby"] * (self.chance.randrange(100) < self.plan.standby))

    # -- what happens ---------------------------------------------------------------------------------

    def _disturb(self) -> None:
        """Kill and freeze, while others write and scale."""
        plan, chance, writing = self.plan, self.chance, self.writing
        self._began = time.monotonic()
        works = [lambda: writing.scale(plan.events, plan.scalings)]
        works += [lambda n=n: writing.feed(plan.events, n) for n in range(FEEDERS)]  # type: ignore[misc]
        threads = [threading.Thread(target=self._guarded, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        kills = chance.choices([self._kill_worker, self._kill_controller], k=plan.kills)
        strikes = [*kills, *[self._freeze_worker] * plan.zombies, None]
        chance.shuffle(strikes)
        if self._older:
            strikes.insert(len(strikes) // 2, self._replace_all)
        try:
            for number, strike in enumerate(strikes):
                writing.allowed = plan.events * (number + 1) // len(strikes)
                at_once = chance.random() < AT_ONCE
                self._work(0 if at_once else SOME, 0.0 if at_once else plan.seconds / len(strikes))
                if strike is not None:
                    strike()
            moved, before = time.monotonic(), 0
            while any(thread.is_alive() for thread in threads):
                self._look_for(0.05)
                if before != writing.written:
                    moved, before = time.monotonic(), writing.written
                if time.monotonic() > moved + END_S:
                    raise Failed(f"the writers do not end: {self._counts()}")
        except BaseException:
            writing.over.set()
            raise
        finally:
            for thread in threads:
                thread.join()
        self._look()

    def _work(self, outputs: int, seconds: float) -> None:
        """Wait for that many outputs, and that time at least: what was struck before works again."""
        until, count = time.monotonic() + seconds, len(self.seen) + outputs
        give_up = until + STILL_S
        while time.monotonic() < until or len(self.seen) < count:
            self._look_for(0.05)
            if time.monotonic() > give_up:
                raise Failed(f"no {outputs} outputs in {STILL_S:g} s: {self._counts()}")

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised by `_look`
            self._errors.append(error)

    def _collect(self, reader: Iterable[anabranch.Event]) -> None:
        for event in read_on(reader):
            self.seen.append((time.monotonic(), event))

    def _look(self) -> None:
        """All that ran on is there."""
        if self._errors:
            raise self._errors[0]
        for worker in self.workers:
            worker.check()
        for controller in self.controllers:
            if controller.process is not None and not controller.running:
                text = controller.log_file.read_text(errors="replace")[-4000:]
                raise Failed(f"a controller ended by itself:\n{text}")

    def _look_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            self._look()
            time.sleep(min(0.05, until - now))

    def _kill_controller(self) -> None:
        controller = self.chance.choice(self.controllers)
        controller.kill()
        controller.process = None
        self.done["kills of controllers"] += 1
        self.note(f"{controller.folder.name} killed")
        self._look_for(self.chance.uniform(0.0, 2.0))
        controller.start()

    def _kill_worker(self) -> None:
        before = {one.pid for one in self.workers}
        worker, what = kill_one(self.workers, self.chance)
        gone = before - {one.pid for one in self.workers}
        self.killed += [(time.time(), pid) for pid in gone]
        self.done["kills of workers"] += len(gone)
        self.note(f"{worker.folder.name} killed; its folder is {what}")
        self._look_for(self.chance.uniform(0.0, 3.0))
        self._start(worker)

    def _freeze_worker(self) -> None:
        """It wakes some seconds after its session ended."""
        awake = [one for one in self.workers if not one.frozen]
        worker = self.chance.choice(awake)
        seconds = self.plan.session + self.chance.uniform(0.5, 4.0)
        worker.freeze(seconds)
        self.done["zombies"] += 1
        self.note(f"{worker.folder.name} is frozen for {seconds:.1f} s")
        while all(one.frozen for one in self.workers):
            self._look_for(0.1)

    def _replace_all(self) -> None:
        """Kill all processes of the older build; those of this one go on with their folders."""
        processes: list[ControllerProcess | WorkerProcess] = [*self.controllers, *self.workers]
        for process in processes:
            process.kill()
            process.process = None
            for name in self._older:
                process.environment.pop(name, None)
        self.note("all of the older build are killed")
        for process in processes:
            process.start()

    def _kill_workers(self) -> None:
        for worker in self.workers:
            if worker.running:
                worker.kill()

    def _wait_for(self, wanted: int) -> None:
        """Wait for that many outputs, and a little longer: there must be no more."""
        moved, count = time.monotonic(), 0
        while True:
            self._look()
            if count != len(self.seen):
                moved, count = time.monotonic(), len(self.seen)
            still = time.monotonic() - moved
            if still > STILL_S or (count >= wanted and still > 2.0):
                break
            time.sleep(0.05)
        self.note(f"{count} outputs of {wanted}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in vars(Plan()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    plan = Plan(**vars(parser.parse_args()))
    folder = Path(tempfile.mkdtemp(prefix="anabranch-trial-"))
    print(plan, folder, flush=True)
    with EmbeddedBroker(quick_start=True) as broker:
        trial = Trial(broker.bootstrap, folder, plan, lambda line: print(line, flush=True))
        found = trial.run()
        broker.kill()
    print(found.told())
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
