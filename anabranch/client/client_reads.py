"""The reading calls of a client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from anabranch.client.handle import Shared
from anabranch.client.ports import ClientPorts
from anabranch.errors import InvalidArgument, UnsupportedSetting
from anabranch.reading.committed_log import ReaderPorts
from anabranch.reading.history_search import Start
from anabranch.reading.ordered_reader import Reader
from anabranch.reading.reader_factory import Readers
from anabranch.reading.snapshot import At, Snapshot, SnapshotPlan, check_at, streams_of
from anabranch.reading.tasks.reader import TaskReader
from anabranch.reading.transaction_reader import TransactionReader
from anabranch.types import Tenure


class Reading:
    """See `Client`, which has these calls."""

    _ports: ClientPorts
    _shared: Shared

    @overload
    def read(
        self,
        streams: str | Sequence[str],
        group: str | None = None,
        timeout: float | None = None,
        start: Start = "begin",
        *,
        tenure: None = None,
    ) -> Reader: ...

    @overload
    def read(
        self, streams: str | Sequence[str], *, timeout: float | None = None, tenure: Tenure
    ) -> TaskReader: ...

    def read(
        self,
        streams: str | Sequence[str],
        group: str | None = None,
        timeout: float | None = None,
        start: Start = "begin",
        *,
        tenure: Tenure | None = None,
    ) -> Reader | TaskReader:
        """Committed events of one or more streams; iterate over what is returned, and close it.

        Events of one key come in commit order, however the stream is scaled meanwhile.

        ``group``: members of a group share the events, and go on where it stopped: each event comes at least
        once. None: all events, nothing is kept. ``timeout``: end after so many seconds without an event; None:
        never. ``start``, where there is no position yet: 'begin', 'end', or what was committed after a commit
        timestamp: a hybrid time (of a `Result`) or a datetime with its time zone.

        ``tenure``: events of these tasks of a processor alone, from where they stand; the reader's `consumed` moves
        their positions with a commit. Then without ``group`` and ``start``.

        Raises: UnknownStream, InvalidArgument, NotReady, DeadlineExceeded; while iterating NotReady and
        DeadlineExceeded (going on is safe), FixCallError.
        """
        if tenure is None:
            return self._readers().read(streams, group, timeout, start)
        if group is not None or start != "begin":
            raise InvalidArgument("a tenure says where to read on: give no group and no start")
        return self._readers().read_tasks(streams, tenure, timeout, self._shared.session.together)

    def read_transactions(
        self,
        stream: str,
        group: str | None = None,
        timeout: float | None = None,
        start: Start = "begin",
    ) -> TransactionReader:
        """Whole transactions of a stream in commit order; iterate over what is returned, and close it.

        A group has one active member; its position is committed after each transaction. The other arguments
        and errors are those of `read`.
        """
        return self._readers().read_transactions(stream, group, timeout, start)

    def snapshot(
        self, streams: str | Sequence[str], at: At = None, *, timeout: float | None = None
    ) -> Snapshot:
        """Streams as of a commit timestamp; nothing of them is read yet. One control partition serves their scopes.

        ``at``: a hybrid time (that of a `Result`: the snapshot has that transaction) or a datetime with its time
        zone; one that is still to come is waited for, until the timeout. None: now, with all that anybody has
        committed before this call.

        Raises: UnknownScope, UnknownStream, CrossScope, InvalidArgument; SnapshotExpired (retention has passed
        it); NotReady (also: the time is not reached), DeadlineExceeded.
        """
        readers = self._readers()
        names = streams_of(streams)
        deadline = self._shared.deadline(timeout)
        scope = self._shared.session.check_together(names, deadline)
        timestamp = self._shared.session.safe_time(scope, check_at(at), deadline)
        return self.open_snapshot(readers.plan(names, timestamp, deadline))

    def open_snapshot(self, plan: SnapshotPlan) -> Snapshot:
        """The snapshot of a plan, which another process may have made. Nothing is sent."""
        if not isinstance(plan, SnapshotPlan):
            raise InvalidArgument(
                f"open_snapshot takes what snapshot.plan() gave, not {plan!r:.100}"
            )
        self._readers()
        return Snapshot(plan, lambda stream, cut: self._readers().read_cut(stream, cut))

    def together(self, streams: Sequence[str]) -> dict[str, int]:
        """Stream -> a number: streams with different ones never share a transaction. Raises: UnknownScope."""
        return self._shared.session.together(streams, self._shared.deadline(None))

    def reader_ports(self) -> ReaderPorts:
        """The ports of this client's readers, for programs that read topics themselves."""
        return self._readers().ports

    def _readers(self) -> Readers:
        self._shared.check()
        if self._ports.readers is None:
            raise UnsupportedSetting("this client has no readers")
        return self._ports.readers
