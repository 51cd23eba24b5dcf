"""A small recorded workload on a real broker, with a planted bug or none, for the history checker to judge.

Two processes of writers, one of readers, somebody who scales, and controllers that are left alone, killed,
frozen or overtaken (`Trial`). At the end everything calms down, all outcomes are asked for once more, and the
log is read raw. Run it by `scripts/mutants`.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import anabranch
from anabranch.errors import AnabranchError, RetryError
from anabranch.kafka.log import KafkaLog
from checker import judge
from checker.recorder import Recorder, Unknown
from checker.report import Report
from tests.crash.oracle import check_stream, read_stream
from tests.crash.zygote import Child, Zygote
from tests.faults.last import Log, read_events, record_log
from tests.mutants.catalogue import Mutant
from tests.mutants.processes import CALL_S, Lead, Read, Work
from tests.mutants.reading import LAST, take_snapshot
from tests.mutants.writing import ask_state, value_of

SEGMENTS = 2
MOST_SEGMENTS = 4
INVARIANT = "InvariantViolation"
START_S = 30.0
END_S = 30.0


@dataclass(frozen=True)
class Trial:
    """What happens to controllers meanwhile, at points drawn anew for each leader.

    ``kill``: where one is killed, and the next one leads. ``stop``: where one is frozen; its successor is frozen
    at ``meet``, the first one goes on, and then its successor. ``work_s``: how long all this lasts. ``machines``:
    how many have a controller's table; with one, each leader goes on with that of the one before.
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


@dataclass
class Workload:
    """One run. ``folder`` gets the histories and the controllers' tables."""

    zygote: Zygote
    bootstrap: str
    folder: Path
    mutant: Mutant | None = None
    trial: Trial = field(default_factory=Trial)
    seed: int = 0
    stopped: list[str] = field(default_factory=list)
    forked: int = 0
    leader: Child | None = None

    def __post_init__(self) -> None:
        self.prefix = f"mu{uuid.uuid4().hex[:6]}"
        self.streams = (f"{self.prefix}-s/a", f"{self.prefix}-s/b")
        self.chance = random.Random(self.seed)
        self.histories = self.folder / "histories"

    def run(self) -> Verdict:
        """All of it, and the judgement."""
        began = time.monotonic()
        self.histories.mkdir(parents=True)
        recorder = Recorder(self.histories / "main.history")
        leader = self._lead(())
        leader.wait_leading(START_S)
        with anabranch.connect(self.bootstrap, prefix=self.prefix, timeout=CALL_S) as client:
            for stream in self.streams:
                client.create_stream(stream, SEGMENTS)
            children = self._start_clients()
            self._stir(client, recorder)
            self._end(client, recorder, children)
        recorder.close()
        report = judge(self.histories)
        seconds = time.monotonic() - began
        return Verdict(report, self._ask_oracle(), self.stopped, seconds)

    def _ask_oracle(self) -> str:
        source = KafkaLog(self.bootstrap)
        try:
            for stream in self.streams:
                check_stream(read_stream(source, stream))
        except (AssertionError, KeyError) as error:  # a segment that no epoch has is not looked for
            return f"{type(error).__name__}: {error}"
        finally:
            source.close()
        return ""

    # -- processes ------------------------------------------------------------------------------------

    def _planted(self, *, by_clients: bool) -> str:
        return self.mutant.name if self.mutant and self.mutant.by_clients is by_clients else ""

    def _lead(self, points: tuple[str, ...]) -> Child:
        """One more controller, on the next machine: its table is old, or not there."""
        self.forked += 1
        place = self.folder / f"machine-{self.forked % self.trial.machines}"
        spec = Lead(
            self.bootstrap,
            self.prefix,
            f"c{self.forked}",
            folder=str(place / "table"),
            mutant=self._planted(by_clients=False),
            points=points,
            chunk_bytes=self.trial.chunk_bytes,
        )
        self.leader = self.zygote.fork(spec)
        return self.leader

    def _start_clients(self) -> list[Child]:
        mutant, folder = self._planted(by_clients=True), str(self.histories)
        children = [
            self.zygote.fork(
                Work(
                    self.bootstrap,
                    self.prefix,
                    f"w{n}",
                    streams=self.streams,
                    folder=folder,
                    seed=self.seed + n,
                    mutant=mutant,
                )
            )
            for n in range(2)
        ]
        read = Read(
            self.bootstrap, self.prefix, "r", streams=self.streams, folder=folder, mutant=mutant
        )
        children.append(self.zygote.fork(read))
        for child in children:
            child.wait_said("works", START_S)
        return children

    def _note_end(self, child: Child) -> None:
        """Of a controller that ended: by a point, fenced, or by itself."""
        if not child.killed:
            why = [event["why"] for event in child.said("failed")]
            if why or child.status not in (0, 3 << 8):
                self.stopped.append(f"{child.spec.name}: {why or child.status}")

    # -- the work -------------------------------------------------------------------------------------

    def _stir(self, client: anabranch.Client, recorder: Recorder) -> None:
        until = time.monotonic() + self.trial.work_s
        scale_at = 0.0
        if self.trial.kill or self.trial.stop:
            self._replace_leader()
        while time.monotonic() < until:
            if time.monotonic() >= scale_at:
                scale_at = time.monotonic() + self.chance.uniform(0.3, 0.9)
                self._scale(client, recorder)
            if self.trial.meet:
                self._meet()
            leader = self.leader
            if leader is not None and not leader.running:
                self._note_end(leader)
                self._lead(self._points())
            time.sleep(0.05)

    def _scale(self, client: anabranch.Client, recorder: Recorder) -> None:
        stream = self.chance.choice(self.streams)
        segments = self.chance.randint(1, MOST_SEGMENTS)
        with contextlib.suppress(AnabranchError), recorder.asking("scale", stream=stream):
            client.scale(stream, segments, timeout=2.0)

    def _points(self) -> tuple[str, ...]:
        n, few = self.chance.randint(5, 60), self.chance.randint(1, 6)
        kill = (
            [f"kill {self.chance.choice(self.trial.kill).format(n=n, few=few)}"]
            if self.trial.kill
            else []
        )
        stop = [f"stop {self.trial.stop.format(n=n)}"] if self.trial.stop else []
        return (*kill, *stop)

    def _replace_leader(self) -> None:
        """By one that is cut somewhere."""
        former = self.leader
        if former is not None:
            former.kill()
        self._lead(self._points())

    def _meet(self) -> None:
        """A leader and its successor get in each other's way."""
        first = self.leader
        assert first is not None
        if self.trial.stop:
            if not first.stopped:
                return
        else:
            with contextlib.suppress(AssertionError):
                first.wait_leading(2.0)
            time.sleep(self.chance.uniform(0.1, 0.5))
        second = self._lead((f"stop {self.trial.meet}", *self._points()))
        self._wait(lambda: second.stopped or not second.running, 2.0)
        first.go_on()
        self._wait(lambda: not first.running, 0.4)
        second.go_on()
        self._wait(lambda: not first.running, 1.5)
        first.kill()
        self._note_end(first)

    def _wait(self, done: Callable[[], bool], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not done():
            if time.monotonic() >= until:
                return False
            time.sleep(0.01)
        return True

    # -- the end --------------------------------------------------------------------------------------

    def _end(self, client: anabranch.Client, recorder: Recorder, children: list[Child]) -> None:
        former = self.leader
        if former is not None:
            former.kill()
            self._note_end(former)
        last = self._lead(())  # with the bug, and what it has learnt from the log alone
        *writers, readers = children
        for writer in writers:
            writer.signal(signal.SIGTERM)
        for writer in writers:
            writer.wait_ended(END_S)
        self._wait(lambda: last.leading or not last.running, START_S)
        scope = self.streams[0].partition("/")[0]
        until = time.monotonic() + 8.0
        with contextlib.suppress(RetryError):
            while client.transactions(scope, timeout=2.0) and time.monotonic() < until:
                time.sleep(0.1)
        self._say_last(client, recorder)
        readers.signal(signal.SIGTERM)
        for txn_id in known_ids(self.histories):
            if last.running:
                ask_state(client, recorder, txn_id, final=True)
        with contextlib.suppress(Unknown):
            take_snapshot(client, recorder, "last", self.streams)
        with contextlib.suppress(AssertionError):
            readers.wait_ended(END_S)
        if readers.running:
            self.stopped.append("the readers did not end")
            readers.kill()
        for child in children:
            self.stopped += [f"{child.spec.name}: {e['why']}" for e in child.said("failed")]
        last.kill()
        self._note_end(last)
        log = Log(self.bootstrap)
        try:
            record_log(recorder, log, read_events(log, list(self.streams)))
        finally:
            log.close()

    def _say_last(self, client: anabranch.Client, recorder: Recorder) -> None:
        """Events behind which nothing comes, in every segment."""
        ids = {stream: [f"last.{stream}.{n}" for n in range(60)] for stream in self.streams}
        (self.histories / LAST).write_text(json.dumps(ids))
        with (
            contextlib.suppress(AnabranchError),
            recorder.asking("begin", txn="last", scope=self.streams[0].partition("/")[0]) as told,
        ):
            txn = client.begin(self.streams[0].partition("/")[0])
            told["txn_id"] = None
        for stream, its in ids.items():
            pairs = [(f"last-{n}", id_) for n, id_ in enumerate(its)]
            with recorder.asking("write", txn="last", writer="own", stream=stream, events=pairs):
                for key, id_ in pairs:
                    txn.write(stream, value_of(id_, self.chance), key=key.encode())
        with (
            contextlib.suppress(AnabranchError),
            recorder.asking("commit", txn="last", writers=["own"]) as told,
        ):
            result = txn.commit()
            told.update(
                txn_id=result.txn_id.hex(),
                timestamp=result.commit_timestamp,
                committed=result.counts.committed,
            )


def known_ids(folder: Path) -> list[str]:
    """The transaction ids that anybody was told, in order. Some still write: their last line may be half a line."""
    found: dict[str, None] = {}
    for path in sorted(folder.glob("*.history")):
        for line in path.read_bytes().split(b"\n")[:-1]:
            entry = json.loads(line)
            if entry["kind"] == "told" and entry.get("txn_id"):
                found[entry["txn_id"]] = None
    return list(found)
