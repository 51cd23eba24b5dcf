"""Forked processes of the recorded workload that may have a planted bug: controllers, and who writes and reads.

All are forked by `tests.crash.zygote.Zygote`; each client process records its own history file.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anabranch
from anabranch.clock import SystemClock
from anabranch.controller.controller import Controller
from anabranch.controller.rocksdb_table import open_checkpoint
from anabranch.core.decisions.turn import Settings
from anabranch.errors import NotLeader
from anabranch.kafka.log import KafkaLog
from anabranch.ports import Log, LogError, LogFenced, Table
from anabranch.topics.creation import create_control_topics
from checker.recorder import Recorder
from tests.crash.children import run_guarded, until_told
from tests.crash.points import Cut, Point
from tests.crash.zygote import Spec, say
from tests.failpoints import failing
from tests.mutants.catalogue import planted
from tests.mutants.reading import Readers
from tests.mutants.writing import Plainly, Writing

CALL_S = 8.0
IDLE_WAIT_S = 0.2
PAUSE_S = 0.05
TIDY: dict[str, Any] = {
    "clean_ms": 100,
    "clean_records": 30,
    "clean_bytes": 3_000,
    "move_bytes": 30_000,
}
ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(frozen=True)
class Lead(Spec):
    """A controller. ``points``: ``kill`` or ``stop``, a space, and where (`tests.crash.points`)."""

    folder: str = ""
    mutant: str = ""
    points: tuple[str, ...] = ()
    chunk_bytes: int = 16 << 20

    run = "tests.mutants.processes:lead"


@dataclass(frozen=True)
class Work(Spec):
    """A process of writers."""

    streams: tuple[str, ...] = ()
    folder: str = ""
    seed: int = 0
    mutant: str = ""

    run = "tests.mutants.processes:work"


@dataclass(frozen=True)
class Read(Spec):
    """A process of readers; at SIGTERM they read on to the events that are marked as the last ones."""

    streams: tuple[str, ...] = ()
    folder: str = ""
    mutant: str = ""
    tokens: tuple[str, ...] = ()

    run = "tests.mutants.processes:read"


# -- controllers --------------------------------------------------------------------------------------


def lead(number: int, told: dict[str, Any]) -> int:
    """Lead until SIGTERM (0), until fenced (3), or until the product's own checks stop it (1)."""
    spec = Lead(**told)
    cuts = []
    for text in spec.points:
        action, _, point = text.partition(" ")
        cuts.append(Cut(Point.parse(point), ACTIONS[action], armed=True, trace=""))

    def hook(name: str, phase: str) -> None:
        for cut in cuts:
            cut(name, phase)

    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ending.append(number))
    with planted(spec.mutant):
        return _lead(number, spec, hook, lambda: bool(ending))


def _lead(
    number: int, spec: Lead, hook: Callable[[str, str], None], ends: Callable[[], bool]
) -> int:
    clock = SystemClock()
    source: Log = failing(KafkaLog(spec.bootstrap), hook)
    create_control_topics(source, spec.prefix, control_partitions=1, reply_partitions=1)
    place = Path(spec.folder)
    table: Table = failing(open_checkpoint(place, source, clock, spec.prefix, 0), hook)
    settings = Settings(
        control_partition=0,
        control_partitions=1,
        prefix=spec.prefix,
        chunk_bytes=spec.chunk_bytes,
        trusts_open=True,
        **TIDY,
    )
    leader = f"{spec.name}/{os.getpid()}"
    controller = Controller(source, table, clock, settings, leader=leader)
    while not ends():
        try:
            controller.lead()
            say(number, "leads")
            while not ends():
                controller.step(IDLE_WAIT_S)
        except (LogFenced, NotLeader) as error:
            say(number, "lost", why=str(error))
            return 3
        except LogError as error:
            say(number, "lost", why=f"{type(error).__name__}: {error}")
            time.sleep(PAUSE_S)
    controller.resign()
    table.close()
    source.close()
    return 0


# -- clients ------------------------------------------------------------------------------------------


def _together(number: int, bodies: list[Callable[[], None]]) -> int:
    """Each in a thread; 1 if one of them failed."""
    return run_guarded(number, bodies, lambda why: say(number, "failed", why=why))


def work(number: int, told: dict[str, Any]) -> int:
    """Until SIGTERM; then what is under way is finished."""
    spec = Work(**told)
    ending = until_told()
    recorder = Recorder(Path(spec.folder) / f"{spec.name}.history")
    with (
        planted(spec.mutant),
        anabranch.connect(spec.bootstrap, prefix=spec.prefix, timeout=CALL_S) as client,
    ):

        def writing(thread: int) -> Callable[[], None]:
            chance = random.Random(f"{spec.seed}/{thread}")
            name = f"{spec.name}.{thread}"
            return lambda: Writing(client, recorder, spec.streams, name, chance).until(ending)

        plainly = Plainly(spec.bootstrap, recorder, spec.streams, spec.name, spec.seed)
        bodies = [writing(thread) for thread in range(3)]
        return _together(number, [*bodies, lambda: plainly.until(ending)])


def read(number: int, told: dict[str, Any]) -> int:
    """Until SIGTERM, and then to the last events."""
    spec = Read(**told)
    ending = until_told()
    recorder = Recorder(Path(spec.folder) / f"{spec.name}.history")
    with (
        planted(spec.mutant),
        anabranch.connect(spec.bootstrap, prefix=spec.prefix, timeout=CALL_S) as client,
    ):
        readers = Readers(client, spec.bootstrap, recorder, spec.name, ending)
        readers.ends_by(Path(spec.folder))
        bodies: list[Callable[[], None]] = [lambda: readers.snapshots(spec.streams)]
        for stream, mode in itertools.product(
            spec.streams, (readers.ordered, readers.whole, readers.raw)
        ):
            bodies.append(lambda stream=stream, mode=mode: mode(stream))  # type: ignore[misc]
        return _together(number, bodies)
