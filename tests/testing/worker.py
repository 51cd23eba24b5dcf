"""What a program does by a driver, and by a real worker: the same, or a test says where it differs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabranch.client.client import Client
from anabranch.errors import AnabranchError
from anabranch.ports import Clock
from anabranch.processing.app import Processor
from anabranch.processing.table import Table
from anabranch.processing.worker import AllTasks, Worker
from anabranch.testing import Driver, InputEvent
from anabranch.testing.driver import START_MS
from anabranch.types import Event
from anabranch.values import event_decoder
from tests.testing.programs import Row

PATIENCE_S = 30.0  # for a worker that does less than the driver
_PLACE = re.compile(r"(\S+)\[0\]@(\d+)")
_END = b"\xff\xff\xff"  # after all rows of a task

Written = tuple[bytes | None, Any, list[tuple[str, bytes | None]], int]


@dataclass
class Found:
    """The effects of a program. ``rows``: by task, as stored. ``error``: the text of the error that ended it."""

    outputs: dict[str, list[Written]] = field(default_factory=dict)
    rows: list[dict[bytes, bytes]] = field(default_factory=list)
    error: str = ""


class Shifted:
    """A worker's clock, which begins when the driver's does. ``ahead_s``: by how much it was moved."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._began = clock, clock.monotonic()
        self.ahead_s = 0.0
        self.monotonic, self.sleep = clock.monotonic, clock.sleep

    def wall(self) -> float:
        return START_MS / 1000 + self._clock.monotonic() - self._began + self.ahead_s


class Trial:
    """One program, by a driver and by a worker on a cluster."""

    def __init__(self, row: Row, scope: str, client: Client, folder: Path, **more: Any) -> None:
        """``more``: arguments of the `Worker`."""
        self._row, self._client, self._folder, self._more = row, client, folder, more
        self._name: Callable[[str], str] = lambda name: f"{scope}/{row.name}-{name}"
        self._given = dict[str, int]()  # events written, by input

    def run(self) -> tuple[Found, Found]:
        """What the driver found, and the worker."""
        for stream in self._row.streams:
            self._client.create_stream(self._name(stream))
        app, driven = self._row.build(self._name), self._row.build(self._name)
        app.commit_interval = 0.0
        worker = Worker(
            app, self._client, self._folder, tasks=AllTasks(range(app.tasks)), **self._more
        )
        worker._clock = clock = Shifted(worker._clock)
        by_driver, by_worker = Found(), Found()
        with Driver(driven) as driver, closing(worker):
            for phase in self._phases():
                for step in phase:
                    if isinstance(step, float):
                        driver.advance(step)
                        clock.ahead_s += step
                    else:
                        self._write(app, step)
                        by_driver.error = error_of(lambda step=step: driver.transaction(step))  # type: ignore[misc]
                by_worker.error = error_of(
                    lambda: self._until_equal(worker, driver, bool(by_driver.error))
                )
                if by_driver.error or by_worker.error:
                    break
            by_driver.outputs = {name: written(driver.outputs(name)) for name in app.outputs}
            by_driver.rows = [rows.copy() for rows in driver._rows.by_task]
        by_worker.error = self._named(by_worker.error)
        by_worker.outputs = {name: self._read(app, name) for name in app.outputs}
        with closing(Table(self._folder)) as table:
            by_worker.rows = [dict(table.scan(task, b"", _END)) for task in range(app.tasks)]
        return by_driver, by_worker

    def _phases(self) -> Iterable[list[Any]]:
        """Steps after which the worker has to be as far as the driver.

        Those are the ends before the clock moves. A commit that fails drops all its input, so that a program that
        fails gets one transaction at a time.
        """
        phase: list[Any] = []
        for step in self._row.steps:
            if isinstance(step, float) or self._row.error:
                if phase:
                    yield phase
                phase = []
            phase.append(
                step
                if isinstance(step, float)
                else [event._replace(stream=self._name(event.stream)) for event in step]
            )
        yield phase

    def _write(self, app: Processor, events: list[InputEvent]) -> None:
        with self._client.begin(app.scope) as txn:
            for stream, value, key, timestamp, headers, _ in events:
                if not isinstance(value, bytes | None):
                    value = app.inputs[stream].codec.encode(value)
                assert not isinstance(key, bytes)
                raw = None if key is None else key.encode()
                txn.write(stream, value, key=raw, timestamp=timestamp, headers=headers)
            txn.commit()

    def _until_equal(self, worker: Worker, driver: Driver, fails: bool) -> None:
        """Let the worker work until it has consumed and written as much as the driver, and once more; or fails."""
        give_up = time.monotonic() + PATIENCE_S
        inputs = {stream: count for (stream, _), count in driver._offsets.items()}
        outputs = {name: len(driver.outputs(name)) for name in driver._written}
        values = worker.metrics.values
        while time.monotonic() < give_up:
            worker.step()
            worker._commits.wait()
            consumed = {name: values["processor_events_in"].get((name,), 0) for name in inputs}
            wrote = {name: values["processor_events_out"].get((name,), 0) for name in outputs}
            if not fails and consumed == inputs and wrote == outputs:
                break
        worker.step()
        worker._commits.wait()

    def _read(self, app: Processor, stream: str) -> list[Written]:
        output = app.outputs[stream]
        decode = event_decoder(output.key, output.value)
        found = [event if decode is None else decode(event) for event in self._events(stream)]
        return [
            (
                key,
                value,
                [(n, v and self._named(v.decode("latin-1")).encode("latin-1")) for n, v in some],
                at,
            )
            for key, value, some, at in written(found)
        ]

    def _events(self, stream: str) -> list[Event]:
        with self._client.snapshot(stream).read(stream) as reader:
            return list(reader)

    def _named(self, text: str) -> str:
        """A text in which places of events are as the driver counts them: without the offsets of markers."""

        def count(found: re.Match[str]) -> str:
            stream, offset = found.groups()
            before = sum(event.offset < int(offset) for event in self._events(stream))
            return f"{stream}[0]@{before}"

        return _PLACE.sub(count, text)


def written(events: list[Event]) -> list[Written]:
    """The parts of outputs that the program decides."""
    return [(each.key, each.value, list(each.headers), each.timestamp) for each in events]


def error_of(call: Callable[[], None]) -> str:
    """The error that a call raises, or an empty text."""
    try:
        call()
    except AnabranchError as error:
        return f"{type(error).__name__}: {error}"
    return ""
