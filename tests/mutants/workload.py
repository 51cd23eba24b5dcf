"""A small recorded workload on a real broker, with a planted bug or none, for the history checker to judge.

Two processes of writers, one of readers, scalings, and controllers that are left alone, killed, frozen or overtaken
(`Trial`). Run it by `scripts/mutants`.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import anabranch
from anabranch.errors import AnabranchError
from anabranch.kafka.log import KafkaLog
from checker import judge
from checker.recorder import SUFFIX, Recorder
from checker.report import Report
from tests.crash.oracle import check_stream, read_stream
from tests.mutants.catalogue import Mutant
from tests.workload.crew import Crew, Patience
from tests.workload.leaders import Forked
from tests.workload.writers import Plan
from tests.workload.zygote import Zygote

MOST_SEGMENTS = 4
INVARIANT = "InvariantViolation"
START_S = 30.0
# Short, as a planted bug may keep anything from its end.
PATIENCE = Patience(end=12.0, catch_up=12.0, whole=60.0, is_strict=False)
KINDS = {
    "one_shot": 4, "short": 4, "attempts": 3, "aborted": 2, "crowd": 2, "big": 1, "numbered": 2, "ask": 2,
}  # fmt: skip
PLAN = Plan(kinds=KINDS, keys=8, big=120, keepalive=2.0, forgotten=2.0, plain=0.2, call=8.0)


@dataclass(frozen=True)
class Trial:
    """What happens to controllers meanwhile, at points drawn for each leader.

    ``kill``: where one is killed, and the next one leads. ``stop``: where one is frozen; its successor is frozen
    at ``meet``, the first one continues, and then its successor. ``work_s``: how long all this lasts. ``machines``:
    how many have a controller's table; with one, each leader has that of the one before.
    """

    kill: tuple[str, ...] = ()
    stop: str = ""
    meet: str = ""
    work_s: float = 6.0
    chunk_bytes: int = 6 << 10
    machines: int = 3


TRIALS = {
    "steady": Trial(),
    "kills": Trial(
        kill=("end:commit|*|{n}|before", "end:commit|*|{n}|after", "append:*|*|{n}|after")
    ),
    # One machine, around the commit of a round that merges: what its table says then is believed, or passed over.
    "unborn": Trial(kill=("end:commit|*_round*data*|{few}|before",), machines=1),
    "passed": Trial(kill=("end:commit|*_round*data*|{few}|after",), machines=1),
    # About one batch is a chunk, so that a leader ends between two of a segment.
    "carrying": Trial(kill=("end:commit|*chunk*|{few}|after",), chunk_bytes=1 << 10),
    "zombies": Trial(stop="append:*|*_round*|{n}|before", meet="producer:b|*_round*|1|before"),
    "rivals": Trial(stop="", meet="producer:a|*|1|before"),
}


@dataclass
class Verdict:
    """``report``: the checker's. ``oracle``: what the log by itself shows to be wrong (`tests.crash.oracle`), which
    knows of epochs and key ranges. ``stopped``: what ended controllers or clients by themselves."""

    report: Report
    oracle: str
    stopped: list[str]
    seconds: float

    @property
    def found(self) -> bool:
        """By the checker."""
        return not self.report.ok

    @property
    def halted(self) -> bool:
        """Whether the product's own checks stopped a controller."""
        return any(INVARIANT in why for why in self.stopped)

    def __str__(self) -> str:
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(self.report.totals.items()))
        kinds = kinds or "no anomaly"
        oracle = f"; the log: {self.oracle[:100]}" if self.oracle else ""
        stopped = f"; stopped by itself: {self.stopped[0][:100]}" if self.stopped else ""
        return f"{kinds}{oracle}{stopped} ({self.seconds:.1f} s)"


class Workload:
    """One run. ``folder`` gets the histories and the controllers' tables."""

    def __init__(
        self,
        zygote: Zygote,
        bootstrap: str,
        folder: Path,
        mutant: Mutant | None = None,
        trial: Trial | None = None,
        seed: int = 0,
    ) -> None:
        self.trial = trial or Trial()
        self.crew = Crew(zygote, bootstrap, folder, random.Random(seed), ("a", "b"))
        self.crew.is_quiet = True
        self.crew.plan = PLAN
        self.crew.patience = PATIENCE
        self.chance = self.crew.chance
        name = mutant.name if mutant else ""
        self.in_clients = name if mutant and mutant.by_clients else ""
        how = {
            "mutant": "" if self.in_clients else name,
            "chunk_bytes": self.trial.chunk_bytes,
            "again": False,
            "tidy": True,
        }
        self.leaders = Forked(
            zygote, bootstrap, folder, self.crew.prefix, self.chance, self.trial.machines, 0.0, how
        )

    def run(self) -> Verdict:
        """All of it, and the judgement."""
        began = time.monotonic()
        crew = self.crew
        modes = ("ordered", "transactions", "raw")
        reads = [(mode, (stream,)) for mode in modes for stream in crew.streams]
        reader = replace(crew.reader("snapshots"), rests=False)
        reader = replace(reader, reads=(*reader.reads, *reads))
        try:
            clients = [*crew.writers(2), reader]
            crew.start(self.leaders, [replace(spec, mutant=self.in_clients) for spec in clients])
            with crew.connect() as client:
                self._stir(client, Recorder(crew.history / f"scaler{SUFFIX}"))
            self.leaders.last.kill()
            self.leaders.fork()  # with the bug, and what it learns from the log alone
            crew.finish()
            report = judge(crew.history)
        finally:
            crew.close()
        return Verdict(report, self._ask_oracle(), self._stopped(), time.monotonic() - began)

    def _ask_oracle(self) -> str:
        source = KafkaLog(self.crew.bootstrap)
        try:
            for stream in self.crew.streams:
                check_stream(read_stream(source, stream))
        except (AssertionError, KeyError) as error:  # a segment that no epoch has is not looked for
            return f"{type(error).__name__}: {error}"
        finally:
            source.close()
        return ""

    def _stopped(self) -> list[str]:
        """What ended by itself, neither by a point nor fenced; and what the end lacked."""
        found = []
        for child in (*self.leaders.children, *self.crew.clients):
            why = [event["why"] for event in child.said("failed")]
            if why or (not child.killed and child.status not in (0, 3 << 8)):
                found.append(f"{child.spec.name}: {why or child.status}")
        return [*found, *self.crew.defects]

    # -- the work -------------------------------------------------------------------------------------

    def _stir(self, client: anabranch.Client, recorder: Recorder) -> None:
        until = time.monotonic() + self.trial.work_s
        scale_at = 0.0
        if self.trial.kill or self.trial.stop:
            self.leaders.last.kill()
            self.leaders.fork(*self._points())
        while time.monotonic() < until:
            if time.monotonic() >= scale_at:
                scale_at = time.monotonic() + self.chance.uniform(0.3, 0.9)
                self._scale(client, recorder)
            if self.trial.meet:
                self._meet()
            if not self.leaders.last.running:
                self.leaders.fork(*self._points())
            time.sleep(0.05)

    def _scale(self, client: anabranch.Client, recorder: Recorder) -> None:
        stream = self.chance.choice(self.crew.streams)
        segments = self.chance.randint(1, MOST_SEGMENTS)
        with contextlib.suppress(AnabranchError), recorder.asking("scale", stream=stream):
            client.scale(stream, segments, timeout=2.0)

    def _points(self) -> list[str]:
        """Where the next leader is cut."""
        n, few = self.chance.randint(5, 60), self.chance.randint(1, 6)
        points = [f"kill {self.chance.choice(self.trial.kill)}"] if self.trial.kill else []
        points += [f"stop {self.trial.stop}"] if self.trial.stop else []
        return [point.format(n=n, few=few) for point in points]

    def _meet(self) -> None:
        """A leader and its successor get in each other's way."""
        first = self.leaders.last
        if self.trial.stop:
            if not first.stopped:
                return
        else:
            with contextlib.suppress(AssertionError):
                first.wait_leading(2.0)
            time.sleep(self.chance.uniform(0.1, 0.5))
        second = self.leaders.fork(f"stop {self.trial.meet}", *self._points())
        _wait(lambda: second.stopped or not second.running, 2.0)
        first.go_on()
        _wait(lambda: not first.running, 0.4)
        second.go_on()
        _wait(lambda: not first.running, 1.5)
        first.kill()


def _wait(done: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not done() and time.monotonic() < until:
        time.sleep(0.01)
