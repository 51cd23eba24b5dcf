"""`ReadReplica`: tables in a folder, followed by a thread or step by step, and snapshots of them.

A replica is complete through a time when it has stored all commits up to it. The controller's reports (`observe`)
prove that for tables without new commits. Calls wait for a time; a step stores commits, and sweeps old versions.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from heapq import heapify, heappop, heappush
from math import inf
from pathlib import Path
from typing import NamedTuple, Self
from weakref import WeakSet

from anabranch.backoff import Backoff
from anabranch.core.stream_settings import DEFAULT_VERSIONS_MS, LEAST_HISTORY_MS, Derived
from anabranch.errors import AnabranchError, IllegalState, NotReady, RetryError
from anabranch.ports import Clock, TableError
from anabranch.protocol import defaults
from anabranch.protocol.hybrid_time import from_us, to_text, to_us
from anabranch.reading.committed_log import ReaderPorts
from anabranch.reading.history import check_at
from anabranch.reading.iteration import check_timeout
from anabranch.tables.follow import Follower, SafeTimes
from anabranch.tables.indexes import Index, indexed
from anabranch.tables.snapshot import TableSnapshot, take_snapshot
from anabranch.tables.store import Store
from anabranch.waits import Condition, Lock, Signal, here

log = logging.getLogger("anabranch.client")

_WAIT_S = 0.5  # length of a step without new commits
_PAUSE_S = 0.5  # after an error
_TURN_S = 0.05  # the longest wait for the answer to another thread's question, or command
_ASK_S = 1.0  # for the question before a sweep
_LEAST_SWEPT = from_us(LEAST_HISTORY_MS * 1000)  # hybrid time between two sweeps of a table


class Lag(NamedTuple):
    """The lag of a table: history records that are not stored, and seconds from its complete time to now.

    ``seconds`` is infinite while nothing of the table is stored; then brokers may not have been asked yet.
    """

    records: int
    seconds: float

    @classmethod
    def of(cls, records: int, complete: int, now: float) -> Lag:
        """``complete``: hybrid time; 0 if nothing is stored. ``now``: Unix seconds."""
        return cls(records, max(0.0, now - to_us(complete) / 1e6) if complete else inf)


class _Waiting(NamedTuple):
    """A thread that waits for a time. ``number``: orders waits for equal times."""

    timestamp: int
    number: int
    wake: Signal


@contextmanager
def in_turn(lock: Lock, seconds: float) -> Iterator[None]:
    """Take a lock; after ``seconds`` of waiting, continue without the lock."""
    has_lock = lock.acquire(timeout=seconds)
    try:
        yield
    finally:
        if has_lock:
            lock.release()


class Waiters:
    """Threads that wait for times, in the order of the times.

    With a condition variable each commit would wake all of them: that cost 64 threads a fifth of their time.
    """

    def __init__(self, lock: Condition) -> None:
        """``lock``: guards what the threads wait for."""
        self._lock = lock
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()

    def wait(self, timestamp: int, seconds: float, is_over: Callable[[], bool]) -> None:
        """Sleep until `wake` reaches ``timestamp``, or `wake_all`. If ``is_over`` is true already, don't sleep."""
        wake = here().signal()
        own = _Waiting(timestamp, next(self._numbers), wake)
        with self._lock:
            if is_over():
                return
            heappush(self._waiting, own)
        if not wake.wait(seconds):
            with self._lock:
                if own in self._waiting:
                    self._waiting.remove(own)
                    heapify(self._waiting)

    def wake(self, is_reached: Callable[[int], bool]) -> None:
        """Wake the threads whose time is reached. The caller has the lock."""
        while self._waiting and is_reached(self._waiting[0].timestamp):
            heappop(self._waiting).wake.set()

    def wake_all(self) -> None:
        """Wake all threads. The caller has the lock."""
        self.wake(lambda _: True)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSettings:
    """The tables of a replica, its folder, and how it is kept up to date.

    ``folder``: None for a temporary one. ``history_ms``: how long versions are kept. ``timeout``: seconds.
    ``threaded``: whether a thread advances the replica; otherwise `step` and waiting calls do. ``hold``: the time
    for `ReadReplica.hold`, or None. ``index``: name -> function, or (table, function). ``derived``: the derivations
    of derived tables.
    """

    tables: Sequence[str]
    cluster_id: str
    folder: Path | None = None
    history_ms: int = DEFAULT_VERSIONS_MS
    timeout: float = defaults.TIMEOUT_S
    threaded: bool = True
    hold: int | None = None
    index: Mapping[str, Index] | None = None
    derived: Mapping[str, Derived] = field(default_factory=dict)


class ReadReplica:
    """Tables in a folder. Close it, or use it as a context manager. Thread-safe, except for `step`."""

    def __init__(
        self, ports: ReaderPorts, controller: SafeTimes, settings: ReplicaSettings
    ) -> None:
        """Raises: IllegalState (the folder is in use, or belongs to another cluster)."""
        self._clock: Clock = ports.clock
        self._controller = controller
        self._timeout = settings.timeout
        self._history = from_us(max(settings.history_ms, LEAST_HISTORY_MS) * 1000)
        indexes = indexed(settings.index, tuple(settings.tables))
        self._temporary = (
            tempfile.mkdtemp(prefix="anabranch-replica-") if settings.folder is None else None
        )
        place = Path(self._temporary or settings.folder or "", "rows")
        try:
            self._store = here().run(lambda: Store(place, settings.cluster_id, indexes))
        except BaseException:
            self._remove_temporary()
            raise
        self._derived = settings.derived
        by_workers = {t: of for t, of in self._derived.items() if of.asynchronous}
        self.without_locks = frozenset(by_workers)  # tables that transactions can't lock
        self._follower = Follower(
            self._store, ports, settings.tables, settings.timeout, controller.base, by_workers
        )
        self.tables = self._follower.streams
        self._moved = here().condition()
        self._turn = here().lock()  # decides which waiting thread asks or steps
        self._waiters = Waiters(self._moved)
        self._reports_due = 0
        self._open: WeakSet[TableSnapshot] = WeakSet()  # weak: lost snapshots keep no versions
        self._sweeping: Iterator[int] | None = None
        self._swept: dict[str, int] = {}
        # Pauses before a failed sweep is repeated.
        first_s, longest_s = (
            LEAST_HISTORY_MS / 1000,
            max(settings.history_ms / 2, LEAST_HISTORY_MS) / 1000,
        )
        self._pauses = {t: Backoff(first_s, longest_s, self._clock) for t in self.tables}
        self._failure: Exception | None = None
        self._trouble = ""
        self._hold_from, self._closed = settings.hold, False
        # The newest commit that broke locks of a transaction here: the next one's snapshot includes it.
        self.broken_at = 0
        self._thread: threading.Thread | None = None
        if settings.threaded:
            self._thread = threading.Thread(target=self._run, name="replica", daemon=True)
            try:
                self._thread.start()
            except BaseException:  # there are too many threads
                self._thread = None
                self.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop, and close the folder and all open snapshots. In a forked child it does nothing."""
        if self._store.forked:
            return
        with self._moved:
            if self._closed:
                return
            self._closed = True
            for snapshot in self._open:
                snapshot.is_open = False
            self._moved.notify_all()
            self._waiters.wake_all()
        here().run(self._end)

    def _end(self) -> None:
        self._follower.close()
        if self._thread is not None:
            self._thread.join()
        with suppress(TableError):  # the rows are also in the log
            self._follower.save()
        self._store.close(self._failure)
        self._remove_temporary()

    def _remove_temporary(self) -> None:
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    # -- progress -------------------------------------------------------------------------------------

    @property
    def timestamp(self) -> int:
        """The highest complete snapshot, hybrid time; 0 before the first one."""
        return self._follower.timestamp

    @property
    def last(self) -> dict[str, int]:
        """Table -> timestamp of its newest stored commit."""
        return dict(self._follower.last)

    @property
    def complete(self) -> dict[str, int]:
        """Table -> hybrid time up to which every commit is stored."""
        return dict(self._follower.complete)

    def lag(self) -> dict[str, Lag]:
        """The lag of each table by the brokers' last answers, without asking them again."""
        self._store.check_fork()
        now, behind = self._clock.wall(), self._follower.behind()
        return {t: Lag.of(behind.get(t, 0), at, now) for t, at in self.complete.items()}

    @contextmanager
    def report_due(self) -> Iterator[None]:
        """For the time of a command whose answer will be observed: other threads wait for that before they ask.

        A reply raises the time that the client has seen to the end of its round, of which the reply to another
        thread may be the first report.
        """
        with self._moved:
            self._reports_due += 1
        try:
            yield
        finally:
            with self._moved:
                self._reports_due -= 1

    def observe(self, timestamp: int, last: Mapping[str, int]) -> None:
        """Note a report of the controller, as `Follower.observe`, and wake the threads that waited for it."""
        if self._follower.observe(timestamp, last):
            with self._moved:
                self._waiters.wake(self._is_complete)

    def wait(self, timestamp: int, last: Mapping[str, int], deadline: float) -> None:
        """Wait until all tables are complete up to ``timestamp``.

        ``last``: as for `observe`; if it is empty, the controller is asked. Raises: NotReady (at the deadline,
        monotonic seconds), UnknownStream, SnapshotExpired, MalformedRecord, NotAuthorized, TableError (the disk).
        """
        self._store.check_fork()
        if last:
            self.observe(timestamp, last)
        elif self._is_complete(timestamp):
            return
        if not self._follower.will_reach(timestamp) and self._reports_due:
            self._waiters.wait(timestamp, _TURN_S, partial(self._is_over, timestamp))
        if not self._follower.will_reach(timestamp):
            with in_turn(self._turn, _TURN_S):  # usually another thread's answer is enough
                if not self._follower.will_reach(timestamp):
                    self.observe(
                        *self._controller.safe(self._follower.reported_of, timestamp, deadline)
                    )
        if self._thread is None:
            self._failure = None  # without a thread, nothing else tries again
        while not self._is_complete(timestamp):
            if (failure := self._failure) is not None:  # the thread may clear it meanwhile
                raise failure
            left = deadline - self._clock.monotonic()
            if left <= 0 or self._closed:
                raise NotReady(self._why(timestamp))
            if self._thread is None:
                with self._turn:
                    if not self._is_complete(timestamp):
                        self._attempt(min(deadline, self._clock.monotonic() + _WAIT_S))
                continue
            self._waiters.wait(timestamp, left, partial(self._is_over, timestamp))

    def _is_over(self, timestamp: int) -> bool:
        return self._closed or self._failure is not None or self._is_complete(timestamp)

    def _is_complete(self, timestamp: int) -> bool:
        return not self._store.loading and self._follower.timestamp >= timestamp

    def _why(self, timestamp: int) -> str:
        if self._closed:
            return "the replica is closed: open another one"
        behind = [f"{t} up to {to_text(at)}" for t, at in self.complete.items() if at < timestamp]
        trouble = f" ({self._trouble})" if self._trouble else ""
        state = "is being loaded" if self._store.loading else f"has {', '.join(behind)}"
        return f"the replica {state}, not yet {to_text(timestamp)}{trouble}: ask again, or give it more time"

    def marks(self) -> dict[str, tuple[int, int]]:
        """As `Follower.marks`."""
        return self._follower.marks()

    # -- steps ----------------------------------------------------------------------------------------

    def step(self, deadline: float) -> bool:
        """Do a piece of work, or wait for work until ``deadline``. Returns whether work came. Raises: as `wait`."""
        self._store.check_fork()
        came = self._follower.step(deadline)
        floor = self._follower.floor
        # An idle table has to be complete up to another table's base.
        if not self._follower.will_reach(floor):
            self.observe(
                *self._controller.safe(self._follower.reported_of, floor, self.deadline(None))
            )
        if not self._store.loading:
            self._sweep()
        elif self._follower.at_end:
            self._store.end_loading()
        with self._moved:
            self._waiters.wake(self._is_complete)
        return came

    def _run(self) -> None:
        while not self._closed:
            self._attempt(self._clock.monotonic() + _WAIT_S)

    def _attempt(self, deadline: float) -> None:
        """Do a step. Waiting calls raise the step's error, unless it is transient; later attempts repeat the step.

        Without a thread, errors of other libraries are raised at once: the caller's signal handler may have raised
        them.
        """
        try:
            self.step(deadline)
            self._failure, self._trouble = None, ""
            return
        except RetryError as error:
            self._trouble = str(error)
        except Exception as error:
            if self._thread is None and not isinstance(error, AnabranchError | TableError):
                raise
            self._failure = error
        if self._closed:
            return
        foreseen = isinstance(self._failure or NotReady(), AnabranchError | TableError)
        kind = logging.INFO if foreseen else logging.ERROR
        log.log(kind, "replica of %s: %s", ", ".join(self.tables), self._failure or self._trouble)
        with self._moved:
            if self._failure is not None:
                self._waiters.wake_all()
            if self._thread is not None:
                self._moved.wait(_PAUSE_S)
                return
        self._clock.sleep(max(0.0, min(_PAUSE_S, deadline - self._clock.monotonic())))

    def _sweep(self) -> None:
        """Do a piece of the sweep under way, or begin one if enough time has passed since the last."""
        if self._sweeping is not None:
            if next(self._sweeping, None) is None:
                self._sweeping = None
            return
        for table in self.tables:
            wanted, every = self._floor(), max(self._history // 2, _LEAST_SWEPT)
            pauses = self._pauses[table]
            if wanted - self._swept.get(table, 0) >= every and pauses.is_over:
                try:
                    oldest = self._controller.oldest_snapshot(table, self.deadline(_ASK_S))
                except AnabranchError as error:
                    log.info("%s is not swept for now: %s", table, error)
                    pauses.begin()
                    return
                self._swept[table] = wanted
                pauses.reset()
                with self._moved:  # so that no snapshot of a time before the floor begins meanwhile
                    floor = min(self._floor(), oldest or wanted)
                    if floor > self._store.marks[table].floor:
                        self._follower.save()  # after a crash, the complete time must not be below the floor
                        self._sweeping = self._store.sweep(table, floor)
                return

    def _floor(self) -> int:
        """The time from which this replica keeps versions: one for all tables, because they are read together."""
        hold = self.timestamp if self._hold_from is None else self._hold_from
        with self._moved:
            return min(self.timestamp - self._history, hold, *(s.timestamp for s in self._open))

    def hold(self, timestamp: int) -> None:
        """Keep all versions that snapshots of this time and later need; earlier versions may be swept."""
        with self._moved:
            self._hold_from = timestamp

    # -- snapshots ------------------------------------------------------------------------------------

    def snapshot(
        self, at: int | datetime | None = None, *, fresh: bool = True, timeout: float | None = None
    ) -> TableSnapshot:
        """A snapshot of all tables as of ``at``; None: with all that was committed before this call.

        ``fresh`` False: as of the newest complete time, without asking the controller. ``timeout``: seconds.
        Raises: SnapshotExpired (versions of ``at`` are swept), NotReady (``at`` is in the future, or the tables
        are not complete up to it in time), and as `wait`.
        """
        deadline, wanted = self.deadline(timeout), check_at(at)
        least = max(1, wanted or 0)
        if fresh and wanted is None:
            seen = self._controller.last_timestamp
            least, last = self._controller.safe(self._follower.reported_of, seen, deadline)
            self.observe(least, last)
        return self._open_snapshot(least, wanted, deadline)

    def _open_snapshot(self, least: int, wanted: int | None, deadline: float) -> TableSnapshot:
        while True:
            self.wait(least, {}, deadline)
            with self._moved:
                if self._closed:
                    raise IllegalState("the replica is closed: open another one")
                time = max(least, self.timestamp) if wanted is None else wanted
                snapshot = take_snapshot(self._store, self.tables, time, self._ended, self._derived)
                if self._is_complete(time):  # otherwise a table was dropped meanwhile
                    self._open.add(snapshot)
                    return snapshot

    def deadline(self, timeout: float | None) -> float:
        """The deadline of a call that begins now, in monotonic seconds. ``timeout`` None: the replica's timeout."""
        seconds = check_timeout(timeout)
        return self._clock.monotonic() + (self._timeout if seconds is None else seconds)

    def _ended(self, snapshot: TableSnapshot) -> None:
        with self._moved:
            snapshot.is_open = False
            self._open.discard(snapshot)
