"""The queue of a leader's background jobs: slow work outside of rounds.

Topics are created, altered, grown and deleted; records are deleted; ends, histories and gaps are read. Each kind
of job has one helper thread, so a slow broker delays no round, and no job of another kind. The simulator has no
threads: there the caller's thread does the work at once.

The part that begins a job takes its result later, in the leader's own thread. A job that failed is begun again once
its pause is over (`TopicTrouble.is_pausing`). When the leadership ends, all jobs are dropped: the purpose of each
job is logged, so the next leader begins it again.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from anabranch.ports import LogUnavailable

T = TypeVar("T")
Kind = Literal["topics", "growth", "truncation", "histories", "markers", "foreign"]


class _AtOnce(Executor):
    """An executor that runs each call before `submit` returns."""

    def submit(self, call: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(call(*given, **named))
        except Exception as error:  # noqa: BLE001 raised by `result`
            done.set_exception(error)
        return done


class Jobs:
    """The jobs of one leadership, by kind and name (mostly a stream): one of each at a time."""

    def __init__(self, *, threads: bool) -> None:
        """``threads``: whether helper threads do the work; otherwise `begin` does the work."""
        self.closed = False
        self._threads = threads
        self._helpers: dict[Kind, Executor] = {}
        self._under_way: dict[tuple[Kind, str], tuple[Future[Any], object]] = {}

    def begin(
        self, kind: Kind, name: str, work: Callable[[], object], wanted: object = None
    ) -> None:
        """Begin a job. ``wanted``: on what its result depends, see `take`."""
        helper = self._helpers.get(kind)
        if helper is None:
            helper = ThreadPoolExecutor(1, f"anabranch-{kind}") if self._threads else _AtOnce()
            self._helpers[kind] = helper
        self._under_way[kind, name] = helper.submit(work), wanted

    def take(self, kind: Kind, name: str, wanted: object = None) -> Future[Any] | None:
        """Remove a job that has ended, and return it.

        None: the job has not ended, or it was begun with another value of ``wanted``.
        """
        future, begun_for = self._under_way[kind, name]
        if not future.done():
            return None
        del self._under_way[kind, name]
        return future if begun_for == wanted else None

    def run(
        self, kind: Kind, name: str, work: Callable[[], T], wanted: object = None
    ) -> Future[T] | None:
        """Begin a job unless it is under way; take it if it has ended. None: call again."""
        if not self.is_under_way(kind, name):
            self.begin(kind, name, work, wanted)
        return self.take(kind, name, wanted)

    def is_under_way(self, kind: Kind, name: str) -> bool:
        """Whether a job was begun and not taken."""
        return (kind, name) in self._under_way

    def is_running(self, kind: Kind, name: str) -> bool:
        """Whether a job was begun and has not ended."""
        found = self._under_way.get((kind, name))
        return found is not None and not found[0].done()

    def names(self, kind: Kind) -> set[str]:
        """The names of the jobs of a kind that were begun and not taken."""
        return {name for of, name in self._under_way if of == kind}

    def drop(self, kind: Kind, name: str) -> None:
        """Drop a job, because its result is not needed any more."""
        self._under_way.pop((kind, name), None)

    def check_open(self) -> None:
        """Stop work of a closed queue, because the next leader may have begun it again. Raises: LogUnavailable."""
        if self.closed:
            raise LogUnavailable("this process leads no more")

    def close(self) -> None:
        """End without waiting for jobs under way: the next leader begins them again.

        Such a job may still create topics of a stream that is forgotten by then, or add partitions, even to topics
        of a later stream of that name; this does no harm.
        """
        self.closed = True
        for helper in self._helpers.values():
            helper.shutdown(wait=False, cancel_futures=True)
        self._under_way.clear()
