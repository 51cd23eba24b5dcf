"""What is measured of a peer: rate, latency, restore, and the pause when a worker is killed."""

from __future__ import annotations

import itertools
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import anabranch
from bench.processing.ends import PARTITIONS, Ends, Readable, counted, ends, outputs
from bench.processing.peers import Job, Keeper, Peer, Worker, working
from bench.setting import Place, cpu_s, percentile

KEYS = 10_000
PER_S = 200  # inputs, where latency and pauses are measured
_SAMPLE_S = 0.05
_PATIENCE_S = 120.0
_CLOSE = 100  # a copy that lacks fewer rows is up to date
_BEFORE_S, _AFTERMATH_S = 3.0, 1.5

Seen = tuple[float, int, int]  # when, partition, n


@contextmanager
def _job(peer: Peer, place: Place, work: str, **more: Any) -> Iterator[tuple[Ends, Job]]:
    """Fresh ends, and a job with a fresh folder."""
    where = ends(place, streams=peer.streams)
    name = f"bench-{uuid.uuid4().hex[:8]}"
    with TemporaryDirectory(prefix="anabranch-bench-state-") as folder:
        more.setdefault("other", where.other)
        yield where, Job(place.bootstrap, name, where.source, where.target, work, folder, **more)


def rate(
    peer: Peer, place: Place, work: str, count: int, *, threads: int = 1, commit_ms: int = 100
) -> dict[str, float]:
    """Outputs/s in the steady middle: from when a quarter is readable to the last commit but one.

    The input is there before. All outputs are counted at the end by a read_committed consumer. ``cpu_us``: the
    worker's, for each event of the middle.
    """
    with _job(peer, place, work, threads=threads, commit_ms=commit_ms) as (where, job):
        if work in (
            "table",
            "join",
        ):  # each input has its row, or the event that it is a pair with, before
            where.fill(
                KEYS if work == "table" else count, KEYS if work == "table" else count, job.other
            )
        where.fill(count, count if work == "join" else KEYS)
        readable = Readable(place.bootstrap, where.output)
        steps = [(time.monotonic(), 0, 0.0)]
        with working(peer, job) as worker:
            while steps[-1][1] < count:
                time.sleep(_SAMPLE_S)
                now, found = time.monotonic(), readable()
                if found > steps[-1][1]:
                    steps.append((now, found, worker.cpu_s()))
                elif now > steps[-1][0] + _PATIENCE_S:
                    raise RuntimeError(f"{steps[-1][1]} of {count} outputs: {worker.said()[-3:]}")
                worker.said()
            found = counted(place, where.output, count)
    if found != count if peer.exactly_once else found < count:
        raise RuntimeError(f"{found} outputs of {count} inputs")
    began = next(i for i, step in enumerate(steps) if step[1] >= count / 4)
    if began > len(steps) - 3:
        raise RuntimeError(f"too few commits to tell a rate: {steps}")
    (t0, n0, cpu0), (t1, n1, cpu1) = steps[began], steps[-2]
    per_event = 1e6 / (n1 - n0)
    return {
        "per_s": round((n1 - n0) / (t1 - t0)),
        "cpu_us": round((cpu1 - cpu0) * per_event, 1),
        "start_s": round(steps[1][0] - steps[0][0], 1),
        "outputs": found,
    }


def latency(peer: Peer, place: Place, count: int, *, commit_ms: int = 100) -> dict[str, float]:
    """From an input's answer to its output readable, 200 inputs/s, the work map; the first third is to get warm."""
    with (
        _job(peer, place, "map", commit_ms=commit_ms) as (where, job),
        working(peer, job) as worker,
    ):
        sent: dict[int, float] = {}
        with (
            where.sending(lambda n: sent.__setitem__(n, time.monotonic())) as send,
            _watched(place, where) as seen,
        ):
            send(0)
            _until(lambda: bool(seen), worker)
            _paced(send, range(1, count), threading.Event())
            _until(lambda: len(seen) >= count and len(sent) >= count, worker)
    arrived = {n: at for at, _, n in seen}
    taken = sorted(1000 * (arrived[n + 1] - sent[n]) for n in range(count // 3, count))
    return {f"p{p}_ms": round(percentile(taken, p / 100), 1) for p in (50, 99)}


def restore(peer: Keeper, place: Place, rows: int, *, again: bool = False) -> dict[str, float]:
    """Rows/s of a store that is restored from its log into an empty folder, both tasks in one worker.

    From the start of the first task's restoring to the end of the last one's, as the worker says. ``again``: into
    the folder of a worker that has just ended.
    """
    with _job(peer, place, "count") as (where, job):
        peer.seed(where, job, rows)
        if again:
            with working(peer, job) as worker:
                _until(lambda: len(_said(worker, "restored")) == PARTITIONS, worker)
        with working(peer, job) as worker:
            _until(lambda: len(_said(worker, "restored")) == PARTITIONS, worker)
            starts, done = _said(worker, "restoring"), _said(worker, "restored")
    if sum(one["rows"] for one in done) != rows:
        raise RuntimeError(f"restored {done} of {rows} rows")
    seconds = (max(one["at"] for one in done) - min(one["at"] for one in starts)) / 1000
    return {"rows": rows, "s": round(seconds, 2), "per_s": round(rows / seconds)}


def killed(peer: Keeper, place: Place, rows: int, *, standby: bool) -> dict[str, float]:
    """Two workers, a task each; seconds from the SIGKILL of one to the first output of its task, readable again.

    ``standby``: each keeps a copy of the other's store. Without, the one that stays restores half of the rows.
    """
    told = {
        **peer.failover,
        "standby" if peer.streams else "num.standby.replicas": str(int(standby)),
    }
    with _job(peer, place, "count", settings=told) as (where, job), ExitStack() as stack:
        peer.seed(where, job, rows)
        workers = []
        for _ in range(2):
            folder = stack.enter_context(TemporaryDirectory(prefix="anabranch-bench-state-"))
            workers.append(stack.enter_context(working(peer, replace(job, folder=folder))))
        for worker in workers:
            _until(partial(_stands, worker, 2 if standby else 1), worker)
        stop = threading.Event()
        with where.sending(lambda _: None) as send, _watched(place, where) as seen:
            sender = threading.Thread(target=_paced, args=(send, itertools.count(), stop))
            sender.start()
            try:
                _until(lambda: len(_first_after(seen, 0.0)) == PARTITIONS, worker)
                time.sleep(_BEFORE_S)
                at = workers[0].kill()
                # A commit from before may become readable a moment later.
                _until(lambda: len(_first_after(seen, at + _AFTERMATH_S)) == PARTITIONS, worker)
            finally:
                stop.set()
                sender.join()
    again = max(_first_after(seen, at + _AFTERMATH_S).values())
    return {"rows": rows, "standby": standby, "s": round(again - at, 2)}


def many(peer: Peer, place: Place, processors: int, seconds: float) -> dict[str, float]:
    """So many processors, 16 in a process, each with a commit every 100 ms: commits/s, latencies, and
    the CPU of a commit in µs: of workers, controller, broker. (CPU includes inputs: 15 a second.)
    """
    with _job(peer, place, "map") as (where, job), ExitStack() as stack:
        workers, counts = [], []
        for at in range(0, processors, 16):
            counts.append(min(16, processors - at))
            told = {"workers": str(counts[-1])}
            folder = stack.enter_context(TemporaryDirectory(prefix="anabranch-bench-state-"))
            one = replace(job, name=f"{job.name}-{at}", folder=folder, settings=told)
            workers.append(stack.enter_context(working(peer, one)))
        stop = threading.Event()

        def cpu_of() -> list[float]:
            served = [cpu_s(place.controller), cpu_s(place.broker)]
            return [sum(worker.cpu_s() for worker in workers), *served]

        with where.sending(lambda _: None) as send:
            sender = threading.Thread(target=_paced, args=(send, itertools.count(), stop, 15))
            sender.start()
            try:
                for worker, count in zip(workers, counts, strict=True):
                    _until(partial(_committed, worker, count), worker)
                time.sleep(_BEFORE_S)
                begun = [len(_said(worker, "commits")) for worker in workers]
                cpu = cpu_of()
                time.sleep(seconds)
                lines = [_said(w, "commits")[at:] for w, at in zip(workers, begun, strict=True)]
                cpu = [after - before for before, after in zip(cpu, cpu_of(), strict=True)]
            finally:
                stop.set()
                sender.join()
    per_s = sum(sum(len(one["ms"]) for one in some) / len(some) for some in lines)
    taken = sorted(ms for some in lines for one in some for ms in one["ms"])
    found = {f"p{p}_ms": round(percentile(taken, p / 100), 1) for p in (50, 99)}
    commits = sum(len(one["ms"]) for some in lines for one in some)
    parts = zip(("workers", "controller", "broker"), cpu, strict=True)
    found |= {f"{part}_us": round(1e6 * used / commits, 1) for part, used in parts}
    return {"processors": processors, "per_s": round(per_s, 1), **found}


def scaling(peer: Peer, place: Place) -> dict[str, float]:
    """The longest pause between outputs in three seconds at rest, and while the input is scaled to four."""
    with _job(peer, place, "map") as (where, job), working(peer, job) as worker:
        stop = threading.Event()
        with where.sending(lambda _: None) as send, _watched(place, where) as seen:
            sender = threading.Thread(target=_paced, args=(send, itertools.count(), stop))
            sender.start()
            try:
                _until(lambda: bool(seen), worker)
                time.sleep(_BEFORE_S)
                begun = time.monotonic()
                time.sleep(_BEFORE_S)
                with anabranch.connect(place.bootstrap, timeout=60) as client:
                    at = time.monotonic()
                    client.scale(where.source, 2 * PARTITIONS)
                time.sleep(_BEFORE_S)
            finally:
                stop.set()
                sender.join()
    rest = [when for when, _, _ in seen if begun <= when <= at]
    after = [rest[-1], *(when for when, _, _ in seen if when > at)]
    return {
        name: round(1000 * max(b - a for a, b in itertools.pairwise(some)))
        for name, some in (("rest_ms", rest), ("scaling_ms", after))
    }


# -- parts ----------------------------------------------------------------------------------------------


@contextmanager
def _watched(place: Place, where: Ends) -> Iterator[list[Seen]]:
    """The outputs, as they become readable during the block."""
    seen: list[Seen] = []
    stop = threading.Event()

    def watch() -> None:
        with outputs(place, where.output) as consumer:
            while not stop.is_set():
                for message in consumer.consume(1000, 0.01):
                    if not message.error():
                        n = json.loads(message.value() or b"")["n"]
                        seen.append((time.monotonic(), message.partition() or 0, n))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def _paced(
    send: Callable[[int], None], numbers: Iterable[int], stop: threading.Event, per_s: int = PER_S
) -> None:
    due = time.monotonic()
    for n in numbers:
        if stop.wait(max(0.0, due - time.monotonic())):
            return
        send(n)
        due += 1 / per_s


def _until(holds: Callable[[], Any], worker: Worker) -> None:
    """Wait. `RuntimeError` if the worker ends, or after two minutes."""
    until = time.monotonic() + _PATIENCE_S
    while not holds():
        said = worker.said()
        if time.monotonic() > until:
            raise RuntimeError(f"nothing happens: {said[-3:]}")
        time.sleep(_SAMPLE_S)


def _said(worker: Worker, what: str) -> list[dict[str, Any]]:
    return [one for one in worker.said() if one["said"] == what]


def _committed(worker: Worker, processors: int) -> bool:
    """Each of its processors has committed: it has loaded its code."""
    return any(one["processors"] == processors for one in _said(worker, "commits"))


def _stands(worker: Worker, stores: int) -> Any:
    """It runs, and its copies of stores, so many, are up to date."""
    last = (worker.said() or [{"said": ""}])[-1]
    return (last["said"], last.get("stores")) == ("RUNNING", stores) and last["lag"] < _CLOSE


def _first_after(seen: list[Seen], since: float) -> dict[int, float]:
    """The first output of each partition after a time."""
    found: dict[int, float] = {}
    for at, partition, _ in list(seen):
        if at > since:
            found.setdefault(partition, at)
    return found
