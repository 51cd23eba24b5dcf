"""The client's side of the protocol: scopes, streams, series."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from anabranch.client.exchange import FIRST_RETRY_S, LONGEST_RETRY_S, Exchange, T
from anabranch.client.ports import ClientPorts
from anabranch.core.hybrid_time import to_text, to_us
from anabranch.core.ids import DIRECTORY, control_partition_of, made_ms_of
from anabranch.core.legal_names import check_scope, split_stream
from anabranch.core.tokens import id_named
from anabranch.errors import (
    CrossScope,
    DeadlineExceeded,
    NotAuthorized,
    NotReady,
    RetryError,
    UnknownScope,
)
from anabranch.schemas import records as r
from anabranch.types import Listed

log = logging.getLogger("anabranch.client")

P = TypeVar("P")


class StreamCalls(Exchange):
    """A call for each command about scopes, streams and series. Thread-safe."""

    def __init__(self, ports: ClientPorts) -> None:
        super().__init__(ports)
        self._scopes: dict[str, int] = {}

    def find_scope(
        self, scope: str, deadline: float, *, create: bool = False, near: str | None = None
    ) -> int:
        """The control partition of a scope; it never changes. `UnknownScope`."""
        known = self._scopes.get(scope)
        if known is None or near is not None:
            info = self.ask(DIRECTORY, r.FindScope(scope, create, near), r.ScopeInfo, deadline)
            known = self._scopes[scope] = info.control_partition
        return known

    def check_together(self, streams: Iterable[str], deadline: float, *, beside: str = "") -> str:
        """One of the scopes of these streams, or ``beside``, as one control partition serves them all.

        `CrossScope` if not; `UnknownScope`.
        """
        scopes = sorted({split_stream(stream)[0] for stream in streams} - {beside})
        first = beside or scopes.pop()
        for scope in scopes:
            here, there = (self.find_scope(one, deadline) for one in (first, scope))
            if here != there:
                raise CrossScope(
                    f"scope {first!r} is on control partition {here} and {scope!r} on {there}: one transaction, or "
                    "snapshot, is of one control partition; make new scopes with `near`"
                )
        return first

    def serves_all(self, streams: Iterable[str], deadline: float) -> bool:
        """Whether no controller has to be asked to know that one control partition serves all these streams."""
        if len({split_stream(stream)[0] for stream in streams}) == 1:
            return True
        self._bus.ready(deadline)
        return self._bus.control_partitions(deadline) == 1

    def together(self, streams: Iterable[str], deadline: float) -> dict[str, int]:
        """Stream -> a number: streams with different ones never share a transaction.

        The number is the control partition's; the same for all if that of one can't be known.
        """
        scopes = {stream: split_stream(stream)[0] for stream in streams}
        if len(set(scopes.values())) > 1:
            with suppress(NotReady, DeadlineExceeded, NotAuthorized):
                return {s: self.find_scope(scope, deadline) for s, scope in scopes.items()}
        return dict.fromkeys(scopes, DIRECTORY)

    def create_stream(
        self, command: r.CreateStream, deadline: float, *, near: str | None = None
    ) -> r.StreamInfo:
        """Create a stream, and its scope if needed. `StreamExists` if it exists with other settings."""
        scope, _ = split_stream(command.stream)
        pause = FIRST_RETRY_S
        while True:
            partition = self.find_scope(scope, deadline, create=True, near=near)
            try:
                return self.ask(partition, command, r.StreamList, deadline).streams[0]
            except UnknownScope as error:
                # The directory's message to that partition is on its way, or retention removed it unread: let the
                # directory send it again.
                if pause > LONGEST_RETRY_S or self.now() + pause >= deadline:
                    raise NotReady(
                        f"scope {scope!r} is new, and not known yet where it is served: call again"
                    ) from error
                self._scopes.pop(scope, None)
            self._clock.sleep(pause)
            pause *= 2

    def ask_of(self, name: str, command: Any, expected: type[T], deadline: float) -> T:
        """Ask the control partition of the scope of ``scope/name``. `UnknownScope`."""
        partition = self.find_scope(split_stream(name)[0], deadline)
        return self.ask(partition, command, expected, deadline)

    def ask_stream(self, stream: str, command: Any, deadline: float) -> r.StreamInfo:
        """Ask about a stream, or for a change of it. `UnknownScope`, `UnknownStream`."""
        return self.ask_of(stream, command, r.StreamList, deadline).streams[0]

    def describe(self, stream: str, deadline: float) -> r.StreamInfo:
        """One stream. `UnknownScope`, `UnknownStream`."""
        return self.ask_stream(stream, r.DescribeStreams(None, stream), deadline)

    def streams(self, scope: str | None, deadline: float) -> Listed[r.StreamInfo]:
        """All streams of a scope, or of the cluster, by name. `UnknownScope`."""

        def ask(partition: int, until: float) -> list[r.StreamInfo]:
            found: list[r.StreamInfo] = []
            after = None
            while True:
                command = r.DescribeStreams(scope, None, after)
                part = self.ask(partition, command, r.StreamList, until)
                found += part.streams
                after = part.more
                if after is None:
                    return found

        found = self.of_each(scope, ask, deadline)
        found.sort(key=lambda info: info.stream)
        return found

    def of_each(
        self, scope: str | None, ask: Callable[[int, float], list[T]], deadline: float
    ) -> Listed[T]:
        """A list of what all control partitions, or that of a scope, have. Raises if none answers.

        ``ask``: a function of a control partition and a deadline. Each partition gets a share of the time; those
        that don't answer are asked once more, in the time that the others have left.
        """
        partitions = self._partitions(scope, deadline)
        found: Listed[T] = Listed()
        answered = 0
        asked = deque(partitions)
        shares = len(partitions) if len(partitions) == 1 else 2 * len(partitions)
        while asked:
            partition = asked.popleft()
            again = partition in found.missing
            try:
                found += ask(partition, self.now() + (deadline - self.now()) / shares)
            except RetryError as error:
                found.missing[partition] = error
                shares -= 1
                if not again and shares:
                    asked.append(partition)
            else:
                found.missing.pop(partition, None)
                answered += 1
                shares -= 1 if again else 2
        if not answered:
            raise next(iter(found.missing.values()))
        for partition, why in found.missing.items():
            log.warning(
                "control partition %d does not answer, a list is incomplete: %s", partition, why
            )
        return found

    def _partitions(self, scope: str | None, deadline: float) -> Sequence[int]:
        if scope is not None:
            return [self.find_scope(check_scope(scope), deadline)]
        self._bus.ready(deadline)
        return range(self._bus.control_partitions(deadline))

    def safe_time(self, scope: str, at: int | None, deadline: float) -> int:
        """A timestamp (None: now) that all later commits of the scope exceed. `NotReady`: still to come."""
        return self.safe_tables(scope, at, (), deadline).timestamp

    def safe_tables(
        self, scope: str, at: int | None, tables: Sequence[str], deadline: float
    ) -> r.SafeTimeIs:
        """As `safe_time`, and the newest commits of tables: all up to that time are at or below them."""
        partition = self.find_scope(scope, deadline)
        return self.ask(partition, r.SafeTime(scope, at, tuple(tables)), r.SafeTimeIs, deadline)

    def instant(self, scope: str, at: int | None, deadline: float) -> int:
        """A safe timestamp: ``at``; or None: now, at or above all that this client has seen.

        `NotReady` at once if it lies too far ahead to come until the deadline.
        """
        seen = self.highest_timestamp
        now = self.safe_time(scope, None, deadline)
        wanted = max(now, seen) if at is None else at
        if wanted <= now:
            return wanted  # what is safe now made it safe
        ahead_s = (to_us(wanted) - to_us(now)) / 1e6
        if self.now() + ahead_s >= deadline:
            raise NotReady(
                f"the time {to_text(wanted)} is not reached yet: {ahead_s:,.3f} s are missing by the controller's "
                "clock, more than the timeout; ask later, or for now"
            )
        return self.safe_time(scope, wanted, deadline)

    def list_runs(
        self, token: bytes, stream: str, wanted: Sequence[r.RunsWanted], deadline: float
    ) -> r.RunList:
        """Places of an open transaction's records: some of those that are wanted, and what is left."""
        there = control_partition_of(id_named(token))
        return self.ask(there, r.ListRuns(token, stream, tuple(wanted)), r.RunList, deadline)

    def series(self, scope: str, name: str | None, deadline: float) -> list[r.SeriesInfo]:
        """The latest number of one series of a scope, or of all, by name. `UnknownScope`."""
        partition = self.find_scope(check_scope(scope), deadline)
        found: list[r.SeriesInfo] = []
        more = True
        while more:
            command = r.ListSeries(scope, name, found[-1].series if found else None)
            part = self.ask(partition, command, r.SeriesList, deadline)
            found += part.series
            more = part.more
        return found[::-1]

    def open_ones(self, wanted: r.ListOpen, deadline: float) -> Listed[r.OpenInfo]:
        """Open transactions, the oldest first, or one by its id. `UnknownScope`, `UnknownTransaction`."""
        if wanted.txn_id is not None:
            return Listed([self._open_one(wanted, control_partition_of(wanted.txn_id), deadline)])
        found = self._in_pages(wanted, r.OpenList, lambda part: part.transactions, deadline)
        found.sort(key=lambda info: made_ms_of(info.outcome.txn_id))
        del found[wanted.limit :]
        return found

    def _open_one(self, wanted: r.ListOpen, there: int, deadline: float) -> r.OpenInfo:
        part = self.ask(there, wanted, r.OpenList, deadline)
        (info,), writers = part.transactions, [*part.transactions[0].writers]
        while part.more is not None:
            part = self.ask(there, replace(wanted, after=part.more), r.OpenList, deadline)
            writers += part.transactions[0].writers
        return replace(info, writers=tuple(writers))

    def table_locks(self, wanted: r.ListTableLocks, deadline: float) -> Listed[r.TableLockInfo]:
        """Registered locks, by transaction and table. `UnknownScope`."""
        found = self._in_pages(wanted, r.TableLockList, lambda part: part.locks, deadline)
        found.sort(key=lambda info: (made_ms_of(info.txn_id), info.txn_id, info.table))
        return found

    def _in_pages(
        self,
        wanted: Any,
        expected: type[P],
        of: Callable[[P], Iterable[T]],
        deadline: float,
        *,
        by: str = "after",
    ) -> Listed[T]:
        """`of_each`, up to ``limit`` for each. ``by``: the field that says where to go on."""

        def ask(partition: int, until: float) -> list[T]:
            found: list[T] = []
            more = None
            while True:
                command = replace(wanted, limit=wanted.limit - len(found), **{by: more})
                part: Any = self.ask(partition, command, expected, until)
                found += of(part)
                more = part.more
                if more is None or len(found) >= wanted.limit:
                    return found

        return self.of_each(wanted.scope, ask, deadline)
