"""Threads that carry: one chunk at a time between them, and what ends one is raised."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from anabranch.controller.carrier import Carrier, Carriers, Job
from anabranch.ports import LogUncertain
from anabranch.protocol.schemas.records import StagedMergeRow

CHUNKS = 4
DEADLINE_S = 10.0


class WatchedCarrier(Carrier):
    """A carrier without a log: it counts who carries beside it."""

    staging = 0
    most = 0
    lock = threading.Lock()

    def __init__(self, *, fails: bool = False) -> None:
        self._fails = fails

    def chunk(self, job: Job, wall_ms: int) -> StagedMergeRow:
        with self.lock:
            WatchedCarrier.staging += 1
            WatchedCarrier.most = max(WatchedCarrier.most, WatchedCarrier.staging)
        time.sleep(0.01)
        with self.lock:
            WatchedCarrier.staging -= 1
        if self._fails:
            raise LogUncertain("the broker went away")
        count = job.row.count + 1
        job.row = replace(job.row, count=count, done=count == CHUNKS)
        return job.row

    def close(self) -> None:
        """It has no readers."""


@contextmanager
def staging(each: list[Carrier], jobs: int) -> Iterator[Carriers]:
    """Threads at work on so many jobs."""
    WatchedCarrier.staging = WatchedCarrier.most = 0
    carriers = Carriers(each, threads=True)
    try:
        for number in range(jobs):
            row = StagedMergeRow(
                b"t" * 16, "s/x", number, number, number + 2,
                cursor=0, first=-1, end=-1, count=0, done=False,
            )  # fmt: skip
            job = Job(row, deque(), 1_000_000)
            carriers._jobs[job.key] = job
            carriers._todo.put((job, 0))
        yield carriers
    finally:
        carriers.close()


def take_until(carriers: Carriers, count: int) -> list[StagedMergeRow]:
    rows: list[StagedMergeRow] = []
    until = time.monotonic() + DEADLINE_S
    while len(rows) < count:
        assert time.monotonic() < until, rows
        rows += carriers.take(0)
        time.sleep(0.001)
    return rows


def test_one_chunk_at_a_time() -> None:
    with staging([WatchedCarrier(), WatchedCarrier()], jobs=2) as carriers:
        rows = take_until(carriers, 2 * CHUNKS)
    assert WatchedCarrier.most == 1
    for number in range(2):
        mine = [row.count for row in rows if row.number == number]
        assert mine == list(range(1, CHUNKS + 1)), "each segment's chunks in order, none twice"
    assert sum(row.done for row in rows) == 2


def test_a_failure_does_not_hold_up_the_other_carrier() -> None:
    with staging([WatchedCarrier(fails=True), WatchedCarrier(fails=True)], jobs=2) as carriers:
        failures = 0
        until = time.monotonic() + DEADLINE_S
        while failures < 2:
            assert time.monotonic() < until
            try:
                carriers.take(0)
            except LogUncertain:
                failures += 1
            time.sleep(0.001)
