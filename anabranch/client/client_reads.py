"""The reading calls of a client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from anabranch.client.client_streams import entered
from anabranch.client.ports import ClientPorts
from anabranch.client.reservation import keepalive_ms_of
from anabranch.client.shared import Shared
from anabranch.client.transaction import Transaction
from anabranch.client.writer import Writer, join
from anabranch.core.hybrid_time import to_text
from anabranch.core.legal_names import check_type
from anabranch.core.stream_settings import is_table, versions_ms
from anabranch.errors import InvalidArgument, NotReady, UnsupportedSetting
from anabranch.extras import need
from anabranch.reading.committed_log import ReaderPorts
from anabranch.reading.history_search import Start, check_at, check_start
from anabranch.reading.iteration import check_group
from anabranch.reading.ordered_reader import Reader
from anabranch.reading.reader_factory import Readers
from anabranch.reading.snapshot import (
    At,
    Mode,
    Snapshot,
    SnapshotPlan,
    check_mode,
    check_since,
    newest,
    streams_of,
)
from anabranch.reading.tasks.groups import group_progress
from anabranch.reading.tasks.lag import Lag
from anabranch.reading.tasks.standing import (
    ConsumerGroup,
    count_events,
    group_of,
    groups_of,
    move_group,
)
from anabranch.reading.transaction_reader import TransactionReader
from anabranch.schemas.records import BaseRow
from anabranch.types import Tenure

if TYPE_CHECKING:
    from anabranch.reading.tasks.reader import TaskReader
    from anabranch.tables.changes import Changes
    from anabranch.tables.indexes import Index
    from anabranch.tables.read_back import Handle, ReadBack
    from anabranch.tables.replica import Replica


class _Controller:
    """The calls of a client that a replica makes: its `SafeTimes` and `Commits`."""

    def __init__(self, shared: Shared, ports: ReaderPorts) -> None:
        self._shared, self._ports = shared, ports
        self.deadline = shared.deadline
        session = shared.session
        self.random64, self.resolve = session.random64, session.resolve
        self.locked_shot = session.locked_shot
        self.entered = partial(entered, shared)
        self.lock_reads, self.state = session.lock_reads, session.state
        self.one_shot_bytes = shared.one_shot_bytes

    def new_txn_id(self, scope: str, deadline: float) -> bytes:
        self._shared.check()
        return self._shared.session.new_txn_id(scope, deadline)

    @property
    def last_timestamp(self) -> int:
        return self._shared.session.highest_timestamp

    def safe(self, tables: Sequence[str], at: int, deadline: float) -> tuple[int, dict[str, int]]:
        self._shared.check()
        session = self._shared.session
        scope = session.check_together(tables, deadline)
        told = session.safe_tables(scope, None, tables, deadline)
        if told.timestamp < at:
            session.instant(scope, at, deadline)
            told = session.safe_tables(scope, None, tables, deadline)
        return told.timestamp, {each.table: each.last for each in told.tables}

    def base(self, table: str, deadline: float) -> BaseRow | None:
        return self._shared.session.describe(table, deadline).base

    def oldest_snapshot(self, table: str, deadline: float) -> int:
        return self._shared.session.describe(table, deadline).oldest_snapshot

    def opening(self, scope: str, keepalive: float, snapshot: int) -> Transaction:
        keepalive_ms = keepalive_ms_of(keepalive)
        return Transaction(self._shared, scope, None, keepalive_ms, snapshot=snapshot)

    def reading_back(self, part: Handle) -> ReadBack:
        from anabranch.tables.read_back import ReadBack

        shared = self._shared
        return ReadBack(part, shared.session, self._ports, lambda: shared.deadline(None))

    def join(self, token: bytes, heartbeat: bool, label: str) -> Writer:
        return join(self._shared, token, heartbeat=heartbeat, label=label)


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
        self,
        streams: str | Sequence[str],
        at: At = None,
        since: At = None,
        mode: Mode = "snapshot",
        *,
        timeout: float | None = None,
    ) -> Snapshot:
        """Streams as of a commit timestamp; nothing of them is read yet. One control partition serves their scopes.

        ``at``: a hybrid time (that of a `Result`: the snapshot has that transaction) or a datetime with its time
        zone; one that is still to come is waited for, if it comes before the timeout. None: now, with all that
        anybody has committed before this call, and all that this client has seen. ``since``: only what was
        committed after this time. ``mode``: 'latest' takes what the histories have, with all that anybody has
        committed before this call, and asks no controller (but for where several scopes are, if there are several
        control partitions).

        Raises: UnknownScope, UnknownStream, CrossScope, InvalidArgument (also: ``since`` is later than the
        snapshot); SnapshotExpired (retention has passed it); NotReady (also: the time is not reached, or the
        histories end before it), DeadlineExceeded.
        """
        readers = self._readers()
        names = streams_of(streams)
        check_mode(mode)
        asked, begin = check_at(at), check_at(since, "since")
        check_since(begin, asked)
        session, deadline = self._shared.session, self._shared.deadline(timeout)
        if mode == "latest":
            if not session.serves_all(names, deadline):
                session.check_together(names, deadline)
            with readers.source() as source:
                timestamp = newest(source, names, deadline)
            if asked is not None and asked > timestamp:
                raise NotReady(
                    f"the histories have commits up to {to_text(timestamp)} only: mode 'snapshot' waits for later "
                    "ones"
                )
            timestamp = timestamp if asked is None else asked
        else:
            scope = session.check_together(names, deadline)
            timestamp = session.instant(scope, asked, deadline)
        check_since(begin, timestamp)
        return self.open_snapshot(readers.plan(names, timestamp, deadline, begin))

    def open_snapshot(self, plan: SnapshotPlan | str) -> Snapshot:
        """The snapshot of a plan, or what a position has left of one; another process may have made it.

        Nothing is sent. Raises: InvalidArgument.
        """
        if isinstance(plan, str):
            plan = SnapshotPlan.of_text(plan)
        if not isinstance(plan, SnapshotPlan):
            raise InvalidArgument(
                f"open_snapshot takes what snapshot.plan() or snapshot.position() gave, not {plan!r:.100}"
            )
        self._readers()
        return Snapshot(plan, lambda stream, cut: self._readers().read_cut(stream, cut))

    def progress(
        self, streams: str | Sequence[str], group: str, *, timeout: float | None = None
    ) -> int:
        """The time as of which a copy that this consumer group feeds is whole: the highest one, at most now.

        All that was committed up to it lies below the group's positions, in each of these streams. Take `snapshot`
        at this time to compare the copy.

        Raises: as `snapshot`; InvalidArgument: the group has no position in a stream.
        """
        readers, names = self._readers(), streams_of(streams)
        if check_group(group) is None:
            raise InvalidArgument("progress is of a consumer group: give its name")
        session, deadline = self._shared.session, self._shared.deadline(timeout)
        safe = session.instant(session.check_together(names, deadline), None, deadline)
        return group_progress(readers.ports, group, names, safe, readers.timeout)

    def count_events(self, stream: str) -> Lag:
        """The committed events that a stream has now, and the Unix ms of the oldest of their commits (0: none).

        Not ``exact``: of a long history offsets are counted, so the markers between events, too.

        Raises: UnknownStream, NotReady, NotAuthorized.
        """
        readers = self._readers()
        return count_events(readers.ports, stream, readers.timeout)

    def groups(self, stream: str | None = None) -> list[ConsumerGroup]:
        """The consumer groups with positions in a stream, or in any stream, by name, and how far they are behind.

        Those of plain Kafka consumers of streams' topics, too. A lag counts events, no markers; a stream in trouble
        says why, and is no error. Raises: NotReady, NotAuthorized, InvalidArgument.
        """
        readers = self._readers()
        return groups_of(readers.ports, readers.groups, stream, readers.timeout)

    def group(self, name: str) -> ConsumerGroup:
        """A consumer group, its members, and where it stands in streams.

        Raises: InvalidArgument (there is none of the name), NotReady, NotAuthorized (Describe on the group).
        """
        readers = self._readers()
        return group_of(readers.ports, readers.groups, name, readers.timeout)

    def reset_group(self, name: str, stream: str, start: Start) -> ConsumerGroup:
        """Let a consumer group go on from ``start``, as of `read`, in a stream. Repeating it is harmless.

        Raises: IllegalState (members are in it; nothing was changed), UnknownStream, InvalidArgument, NotReady,
        NotAuthorized (Read on the group), SnapshotExpired (retention has passed that time).
        """
        readers = self._readers()
        return move_group(readers.ports, readers.groups, name, stream, start, readers.timeout)

    def replica(
        self,
        *tables: str,
        folder: str | Path | None = None,
        timeout: float | None = None,
        threads: bool = True,
        index: Mapping[str, Index] | None = None,
    ) -> Replica:
        """A replica of tables of one control partition, in RocksDB; close it, or use it as a context manager.

        ``folder``: kept over restarts, of this replica alone; None: a temporary one. Its transactions and snapshots
        read all of the tables at one instant. ``threads`` False: who waits moves it, or calls its `step`.
        ``index``: names, each with a function of key and row that gives the values to look rows up by
        (`TableSnapshot.lookup`): bytes, several, or None; with several tables (table, function). A folder with
        other names is loaded again; another function needs another name.

        Raises: NotInstalled, UnknownStream, InvalidArgument (it is no table), CrossScope, IllegalState (the folder
        is in use, or of another cluster), NotReady, DeadlineExceeded.
        """
        return self._replica(tables, folder, timeout, threads=threads, index=index)

    def changes(
        self,
        table: str,
        group: str | None = None,
        timeout: float | None = None,
        start: Start = "begin",
        *,
        until: At | Literal["end"] = None,
        before: bool = False,
        folder: str | Path | None = None,
    ) -> Changes:
        """Changes of a table's rows in commit order, whatever wrote them; iterate over what is returned.

        ``group``, ``timeout`` and ``start`` are those of `read_transactions`. ``until``: end with what is committed
        up to this time, 'end' being now; with ``start`` it is the difference between two times, without ``group``.
        ``before``: with the row that was there, which takes a replica of the table in ``folder``, as of `replica`;
        a folder is for one such reader.

        Raises: as `read_transactions` and `replica`; InvalidArgument: ``until`` with a group, or below ``start``.
        While iterating: NotReady and DeadlineExceeded (going on is safe), SnapshotExpired, FixCallError.
        """
        from anabranch.tables.changes import Changes, end_at

        shared, readers = self._shared, self._readers()
        begin = check_start(start)
        asked = None if until in (None, "end") else check_at(until, "until")
        if until is not None and (group is not None or begin == "end"):
            raise InvalidArgument(
                "an end (`until`, --to) is for a difference: give no group, and a start that is a time"
            )
        check_since(begin if isinstance(begin, int) else None, asked)
        if folder is not None and not before:
            raise InvalidArgument(
                "a folder is for the rows before: ask for them (`before=True`, --before)"
            )
        with ExitStack() as stack:
            rows, end = None, None
            deadline = shared.deadline(None)  # ``timeout`` is that of silence
            if before:
                rows = stack.enter_context(self._replica([table], folder, None, held=0))
            else:
                self._check_tables([table], deadline)
            if until is not None:
                controller = _Controller(shared, readers.ports)
                safe, last = controller.safe([table], asked or controller.last_timestamp, deadline)
                asked = safe if asked is None else asked
                end = end_at(readers.ports, table, asked, last[table], shared.timeout)
                timeout = shared.timeout if timeout is None else timeout
            reader = readers.read_transactions(table, group, timeout, begin, whole=True)
            stack.pop_all()
        first = begin if isinstance(begin, int) else 0
        return Changes(
            table,
            reader,
            rows=rows,
            begin=first,
            end=end,
            timeout=shared.timeout,
            base_of=lambda: shared.session.describe(table, shared.deadline(None)).base,
            group=group,
        )

    def _replica(
        self,
        tables: Sequence[str],
        folder: str | Path | None,
        timeout: float | None,
        *,
        threads: bool = True,
        held: int | None = None,
        index: Mapping[str, Index] | None = None,
    ) -> Replica:
        need("rocksdict", extra="tables")
        from anabranch.tables.replica import Replica

        if not tables:
            raise InvalidArgument("a replica is of at least one table: name it")
        if folder is not None:
            check_type("a folder", folder, str, Path)
        ports, deadline = self._readers().ports, self._shared.deadline(timeout)
        session = self._shared.session
        names = streams_of(tables)
        session.check_together(names, deadline)
        controller = _Controller(self._shared, ports)
        found = self._check_tables(names, deadline)
        kept = [versions_ms(settings) for settings in found]
        return Replica(
            ports,
            controller,
            names,
            session.cluster(deadline),
            folder=None if folder is None else Path(folder),
            history_ms=max(kept),
            timeout=self._shared.timeout,
            threaded=threads,
            commits=controller,
            held=held,
            index=index,
        )

    def _check_tables(self, names: Sequence[str], deadline: float) -> list[Mapping[str, str]]:
        """The settings of these tables. `InvalidArgument`: one is none."""
        found = []
        for name in names:
            settings = self._shared.session.describe(name, deadline).settings
            if not is_table(settings):
                raise InvalidArgument(
                    f"{name} is a stream, and no table: make one with `create_table` (`anabranch table create`)"
                )
            found.append(settings)
        return found

    def together(self, streams: Sequence[str]) -> dict[str, int]:
        """Stream -> a number: streams with different ones never share a transaction. Raises: UnknownScope."""
        self._shared.check()
        return self._shared.session.together(streams, self._shared.deadline(None))

    def reader_ports(self) -> ReaderPorts:
        """The ports of this client's readers, for programs that read topics themselves."""
        return self._readers().ports

    def _readers(self) -> Readers:
        self._shared.check()
        if self._ports.readers is None:
            raise UnsupportedSetting("this client has no readers")
        return self._ports.readers
