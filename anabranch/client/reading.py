"""Readers of a client: it opens readers, snapshots and replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from anabranch.client.reservation import keepalive_ms_of
from anabranch.client.shared import Shared, entered
from anabranch.client.transaction import Transaction
from anabranch.client.writer import Writer, join
from anabranch.core.hybrid_time import to_text
from anabranch.core.legal_names import check_type
from anabranch.core.stream_settings import is_table, versions_ms
from anabranch.errors import InvalidArgument, NotReady, UnsupportedSetting
from anabranch.extras import need
from anabranch.reading.committed_log import ReaderPorts
from anabranch.reading.history import Start, check_at, check_start
from anabranch.reading.iteration import Readers, check_group
from anabranch.reading.ordered_reader import Reader
from anabranch.reading.positions import first_inputs, group_progress
from anabranch.reading.snapshot import (
    At,
    Mode,
    SnapshotPlan,
    SnapshotReader,
    StreamCut,
    check_mode,
    check_since,
    newest,
    streams_of,
    take,
)
from anabranch.reading.transaction_reader import TransactionReader
from anabranch.schemas.records import BaseRow, ProcessorInput
from anabranch.types import TaskOwnership

if TYPE_CHECKING:
    from anabranch.reading.task_reader import TaskReader
    from anabranch.tables.changes import Changes
    from anabranch.tables.indexes import Index
    from anabranch.tables.read_back import Handle, ReadBack
    from anabranch.tables.replica import Replica


class Reading:
    """The calls of `Client` that read streams and tables, with the same arguments and errors."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._session = shared.session

    def readers(self) -> Readers:
        """The client's open readers. Raises: NotForkSafe, IllegalState, UnsupportedSetting."""
        self._shared.check()
        if self._shared.ports.readers is None:
            raise UnsupportedSetting("this client has no readers")
        return self._shared.ports.readers

    def read(
        self,
        streams: str | Sequence[str],
        group: str | None,
        timeout: float | None,
        start: Start,
        ownership: TaskOwnership | None,
    ) -> Reader | TaskReader:
        """As `Client.read`."""
        readers, names = self.readers(), streams_of(streams)
        if ownership is None:
            return readers.add(Reader(readers.ports, names, group, timeout, start, readers.timeout))
        if group is not None or start != "begin":
            raise InvalidArgument(
                "the task ownership says where to read on: give no group and no start"
            )
        need("numpy")
        from anabranch.reading.task_reader import TaskReader

        together = self._session.together(names, readers.ports.clock.monotonic() + readers.timeout)
        return readers.add(
            TaskReader(readers.ports, names, ownership, timeout, readers.timeout, together)
        )

    def read_transactions(
        self,
        stream: str,
        group: str | None,
        timeout: float | None,
        start: Start,
        *,
        whole: bool = False,
    ) -> TransactionReader:
        """As `Client.read_transactions`. ``whole``: it raises instead of skipping deleted ones."""
        readers = self.readers()
        return readers.add(
            TransactionReader(
                readers.ports, stream, group, timeout, start, readers.timeout, whole=whole
            )
        )

    def read_cut(self, stream: str, cut: StreamCut) -> SnapshotReader:
        """A reader of a stream as of a snapshot."""
        readers = self.readers()
        return readers.add(SnapshotReader(readers.ports, stream, cut, readers.timeout))

    def first_inputs(
        self, streams: Sequence[str], start: Start, deadline: float
    ) -> tuple[ProcessorInput, ...]:
        """The inputs of a new processor, each with the place where it starts."""
        readers, together = self.readers(), self._session.together(streams, deadline)
        with readers.source() as source:
            return first_inputs(source, streams, start, readers.timeout, deadline, together)

    def plan(
        self,
        streams: str | Sequence[str],
        at: At,
        since: At,
        mode: Mode,
        timeout: float | None,
    ) -> SnapshotPlan:
        """The plan of a snapshot. Arguments: as of `Client.snapshot`."""
        readers = self.readers()
        names = streams_of(streams)
        check_mode(mode)
        asked, begin = check_at(at), check_at(since, "since")
        check_since(begin, asked)
        session, deadline = self._session, self._shared.deadline(timeout)
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
        with readers.source() as source:
            return take(source, names, timestamp, deadline, begin)

    def progress(self, streams: str | Sequence[str], group: str, timeout: float | None) -> int:
        """As `Client.progress`."""
        readers, names = self.readers(), streams_of(streams)
        if check_group(group) is None:
            raise InvalidArgument("progress is of a consumer group: give its name")
        session, deadline = self._session, self._shared.deadline(timeout)
        safe = session.instant(session.check_together(names, deadline), None, deadline)
        return group_progress(readers.ports, group, names, safe, readers.timeout)

    def replica(
        self,
        tables: Sequence[str],
        folder: str | Path | None,
        timeout: float | None,
        *,
        threads: bool = True,
        held: int | None = None,
        index: Mapping[str, Index] | None = None,
    ) -> Replica:
        """As `Client.replica`. ``held``: the replica keeps versions from this hybrid time on."""
        need("rocksdict", extra="tables")
        from anabranch.tables.replica import Replica

        if not tables:
            raise InvalidArgument("a replica is of at least one table: name it")
        if folder is not None:
            check_type("a folder", folder, str, Path)
        ports, deadline = self.readers().ports, self._shared.deadline(timeout)
        session = self._session
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

    def changes(
        self,
        table: str,
        group: str | None,
        timeout: float | None,
        start: Start,
        *,
        until: At | Literal["end"],
        before: bool,
        folder: str | Path | None,
    ) -> Changes:
        """As `Client.changes`."""
        from anabranch.tables.changes import Changes, end_at

        shared, readers = self._shared, self.readers()
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
            deadline = shared.deadline(None)  # ``timeout`` limits the time without a change
            if before:
                rows = stack.enter_context(self.replica([table], folder, None, held=0))
            else:
                self._check_tables([table], deadline)
            if until is not None:
                controller = _Controller(shared, readers.ports)
                safe, last = controller.safe([table], asked or controller.last_timestamp, deadline)
                asked = safe if asked is None else asked
                end = end_at(readers.ports, table, asked, last[table], shared.timeout)
                timeout = shared.timeout if timeout is None else timeout
            reader = self.read_transactions(table, group, timeout, begin, whole=True)
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

    def _check_tables(self, names: Sequence[str], deadline: float) -> list[Mapping[str, str]]:
        """The settings of these tables. Raises `InvalidArgument` for a stream that is not a table."""
        found = []
        for name in names:
            settings = self._session.describe(name, deadline).settings
            if not is_table(settings):
                raise InvalidArgument(
                    f"{name} is a stream, and no table: make one with `create_table` (`anabranch table create`)"
                )
            found.append(settings)
        return found


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
