"""The jobs of `bench.processing` with anabranch: ``python ours.py JOB``, a `Job` as JSON.

It says what a `Keeper`'s worker says. ``settings``: ``standby``; ``workers``: so many processors in this process,
in threads, each with all of its tasks.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

import anabranch
from anabranch import aggregates
from anabranch.processing.app import Processor
from anabranch.processing.run import spare_collections
from anabranch.processing.worker import AllTasks, Worker

JSON = msgspec.json.encode, msgspec.json.decode
_SAY_S = 0.2
_HOUR_S = 3600.0
_DAY_S = 86_400.0
_COUNTS = b"\x00\x02", b"\x00\x03"  # where the rows of the first store are


def say(what: str, **more: Any) -> None:
    """Print a line of JSON."""
    print(json.dumps({"said": what, "at": time.time() * 1000, **more}), flush=True)


def program(job: dict[str, Any], name: str) -> Processor:
    """The processor of a job's work."""
    tasks, interval = job["partitions"], job["commit_ms"] / 1000
    app = Processor(name, tasks=tasks, commit_interval=interval)
    codec = None if job["work"] == "batch" else JSON
    source = app.input(job["source"], value=codec)
    target = app.output(job["target"], value=codec)
    if job["work"] == "batch":

        @app.on(source, batch=True)
        def add_to_all(batch: pa.RecordBatch) -> None:
            text = batch["value"].cast(pa.string())
            parts = pc.extract_regex(text, r'^\{"n":(?P<n>\d+)(?P<more>.*)$')
            number = pc.add(pc.struct_field(parts, "n").cast(pa.int64()), 1).cast(pa.string())
            more = pc.struct_field(parts, "more")
            values = pc.binary_join_element_wise('{"n":', number, more, "")
            target.write_batch(pa.record_batch({"key": batch["key"], "value": values}))

    elif job["work"] == "map":

        @app.on(source)
        def add(event: anabranch.Event) -> None:
            value: Any = event.value
            value["n"] += 1
            target.write(value, key=event.key)

    elif job["work"] in ("table", "join"):
        other = app.input(job["other"], value=JSON)
        with_two_inputs(app, job["work"], source, other, target)

    elif job["work"] == "window":
        days = app.windows("days", _DAY_S, value=JSON)

        @app.on(source)
        def count_in_window(event: anabranch.Event) -> None:
            for window in days.of(event):
                window.value = (window.value or 0) + 1
                target.write({"n": window.value}, key=event.key)

    elif job["work"] == "session":
        visits = app.sessions("visits", _HOUR_S, value=JSON, into=aggregates.count())

        @app.on(source)
        def visit(event: anabranch.Event) -> None:
            target.write({"n": visits.add(event)}, key=event.key)

    else:
        counts = app.store("counts", value=JSON)

        @app.on(source)
        def count(event: anabranch.Event) -> None:
            key, value = event.key or b"", event.value
            counts[key] = value["n"] = counts.get(key, 0) + 1  # type: ignore[index]
            target.write(value, key=key)

    return app


def with_two_inputs(app: Processor, work: str, source: Any, other: Any, target: Any) -> None:
    """Join each event with the row of its key, or with the other events of its key."""
    if work == "table":
        rows = app.latest("rows", other)

        @app.on(source)
        def enrich(event: Any) -> None:
            target.write({**rows.get(event.key), **event.value}, key=event.key)

        return

    @app.join("pairs", source, other, within=_HOUR_S)
    def pair(one: Any, two: Any) -> None:
        target.write({**two.value, **one.value}, key=one.key)


class Telling(Worker):
    """A worker that says what it does."""

    said_at = 0.0

    def _take(self, wanted: frozenset[int]) -> None:
        if wanted and self._app.stores:
            say("restoring", tasks=sorted(wanted))
        super()._take(wanted)
        at = time.time() * 1000
        for task in wanted if self._app.stores else ():
            rows = sum(1 for _ in self._table.scan(task, *_COUNTS))
            say("restored", task=task, rows=rows, at=at)

    def step(self) -> None:
        super().step()
        if self._ownership is not None and time.monotonic() > self.said_at + _SAY_S:
            self.said_at = time.monotonic()
            others = (
                set(range(self._app.tasks)) - self._ownership.tasks.keys() if self._standby else ()
            )
            marks = [self._table.mark(task) for task in others]
            behind = sum(mark is None or mark.sequence < 0 for mark in marks)
            stores = len(self._ownership.tasks) + len(marks)
            say("RUNNING", stores=stores, lag=1000 * behind)


def _timed(taken: list[float], done: set[int], number: int, commit: Any, *of: Any) -> None:
    began = time.monotonic()
    commit(*of)
    taken.append(time.monotonic() - began)
    done.add(number)


def main(job: dict[str, Any]) -> None:
    """Work until SIGTERM."""
    settings = job["settings"]
    alone = int(settings.get("workers", 0))
    with anabranch.connect(job["bootstrap"], timeout=60) as client:
        if not alone:
            app = program(job, f"bench/{job['name']}")
            folder, standby = Path(job["folder"]), settings.get("standby") == "1"
            worker = Telling(app, client, folder, standby=standby)
            signal.signal(signal.SIGTERM, lambda *_: worker.stop.set())
            spare_collections()  # as of `run_worker`
            try:
                worker.run()
            finally:
                worker.close()
            return
        taken, done = list[float](), set[int]()
        for number in range(alone):
            app = program(job, f"bench/{job['name']}-{number}")
            folder = Path(job["folder"], str(number))
            one = Worker(app, client, folder, tasks=AllTasks(range(app.tasks)))
            timed = partial(_timed, taken, done, number, one._commits._commit)
            one._commits._commit = timed  # type: ignore[method-assign]
            threading.Thread(target=one.run, daemon=True).start()
        while True:
            time.sleep(1.0)
            some, taken[:] = sorted(taken), []
            say("commits", ms=[round(1000 * one, 1) for one in some], processors=len(done))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
