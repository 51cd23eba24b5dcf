"""Reads of a client: it opens readers, snapshots and replicas, and makes the rows of system tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from anabranch.client.reservation import keepalive_ms_of
from anabranch.client.shared import Shared
from anabranch.client.transaction import Transaction
from anabranch.core.stream_settings import derived_from, is_by_worker, is_table, versions_ms
from anabranch.core.stream_states import ACTIVE, CREATING, GIVEN_UP
from anabranch.errors import (
    AnabranchError,
    AskOutcomeError,
    BeginAgainError,
    EventTooLarge,
    InvalidArgument,
    NotAuthorized,
    NotReady,
    UndecodableValue,
    UnknownStream,
    UnsupportedSetting,
)
from anabranch.extras import need
from anabranch.presentation.system_tables import (
    CommitRow,
    commit_rows,
    lock_rows,
    table_rows,
    transaction_rows,
    version_rows,
)
from anabranch.protocol.defaults import KEEPALIVE_S
from anabranch.protocol.hybrid_time import to_text
from anabranch.protocol.legal_names import check_scope, check_type, split_stream
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.records import ProcessorInput
from anabranch.reading.history import SafeTimeOf, Start, check_at, check_start
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
from anabranch.reading.timeline import MOST_SEARCHED, read_timeline
from anabranch.reading.transaction_reader import TransactionReader
from anabranch.types import (
    Event,
    Listed,
    StreamDescription,
    TaskOwnership,
    Timeline,
    description_of,
    info_of,
    open_of,
)
from anabranch.values import (
    Decoder,
    Stream,
    dead_letters,
    name_of,
    names_of,
    place_of,
)

if TYPE_CHECKING:
    from anabranch.client.replica import Replica
    from anabranch.reading.task_reader import TaskReader
    from anabranch.tables.changes import Changes
    from anabranch.tables.indexes import Index
    from anabranch.tables.replica import ReadReplica, ReplicaSettings

Streams: TypeAlias = "str | Stream[Any, Any] | Sequence[str | Stream[Any, Any]]"


class Reading:
    """Calls of `Client` that read, with its arguments and errors; names are the same unless one is given."""

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
        streams: Streams,
        group: str | None,
        timeout: float | None,
        start: Start,
        ownership: TaskOwnership | None,
    ) -> Reader[Any, Any] | TaskReader:
        readers, names = self.readers(), streams_of(names_of(streams))
        if ownership is None:
            reader: Reader[Any, Any] = Reader(
                readers.ports,
                names,
                group,
                timeout,
                start,
                readers.timeout,
                decoders=self._decoders(streams),
            )
            return readers.add(reader)
        if self._decoders(streams):
            raise InvalidArgument("events of a task ownership are bytes: give the streams' names")
        if group is not None or start != "begin":
            raise InvalidArgument(
                "the task ownership says where to read on: give no group and no start"
            )
        need("numpy")
        from anabranch.reading.task_reader import TaskReader

        safe = self._safe_time_of(names, readers.ports.clock.monotonic() + readers.timeout)
        return readers.add(
            TaskReader(readers.ports, names, ownership, timeout, readers.timeout, safe)
        )

    def _safe_time_of(self, streams: Sequence[str], deadline: float) -> SafeTimeOf:
        session = self._session
        apart = len(set(session.control_partitions(streams, deadline).values())) > 1

        def ask(at: int | None, until: float) -> int:
            if at is None:
                return session.instant(streams, None, until)
            return session.reach(streams, at, until)

        return SafeTimeOf(apart, ask)

    def decoder(self, stream: Stream[Any, Any]) -> Decoder:
        """The decoder of one reader of a stream."""
        return Decoder(stream, self._bury)

    def _decoders(self, streams: Streams) -> dict[str, Decoder]:
        given = [streams] if isinstance(streams, str | Stream) else streams
        return {each.name: self.decoder(each) for each in given if isinstance(each, Stream)}

    def _bury(self, stream: str, event: Event, error: UndecodableValue) -> None:
        keepalive = keepalive_ms_of(KEEPALIVE_S)
        with self._shared.outside():  # the reader moves on, whatever becomes of a transaction
            dead_letter(
                lambda scope: Transaction(self._shared, scope, None, keepalive),
                stream,
                event,
                error,
            )

    def read_transactions(
        self,
        stream: str | Stream[Any, Any],
        group: str | None,
        timeout: float | None,
        start: Start,
        *,
        whole: bool = False,
    ) -> TransactionReader[Any, Any]:
        """As `Client.read_transactions`. ``whole``: raise `SnapshotExpired` instead of skipping deleted ones."""
        readers = self.readers()
        reader: TransactionReader[Any, Any] = TransactionReader(
            readers.ports,
            name_of(stream),
            group,
            timeout,
            start,
            readers.timeout,
            whole=whole,
            decoder=self.decoder(stream) if isinstance(stream, Stream) else None,
        )
        return readers.add(reader)

    def read_cut(
        self, stream: str, cut: StreamCut, decoder: Decoder | None
    ) -> SnapshotReader[Any, Any]:
        """A reader of a stream as of a snapshot."""
        readers = self.readers()
        reader: SnapshotReader[Any, Any] = SnapshotReader(
            readers.ports, stream, cut, readers.timeout, decoder
        )
        return readers.add(reader)

    def first_inputs(
        self, streams: Sequence[str], start: Start, deadline: float
    ) -> tuple[ProcessorInput, ...]:
        """The inputs of a new processor, each with the place where it starts."""
        readers, safe = self.readers(), self._safe_time_of(streams, deadline)
        if safe.apart and start == "end":
            start = safe.ask(None, deadline)
        elif safe.apart and start != "begin":
            start = self._session.instant(streams, check_at(start, "start"), deadline)
        with readers.source() as source:
            return first_inputs(
                source, streams, start, readers.timeout, deadline, is_safe=safe.apart
            )

    def plan(
        self, streams: Streams, at: At, since: At, mode: Mode, timeout: float | None
    ) -> SnapshotPlan:
        """The plan of a snapshot. Arguments: as of `Client.snapshot`."""
        readers = self.readers()
        names = streams_of(names_of(streams))
        check_mode(mode)
        asked, begin = check_at(at), check_at(since, "since")
        check_since(begin, asked)
        session, deadline = self._session, self._shared.deadline(timeout)
        if mode == "latest":
            timestamp = self._latest(names, deadline)
            if asked is not None and asked > timestamp:
                raise NotReady(
                    f"the histories have commits up to {to_text(timestamp)} only: mode 'snapshot' waits for later "
                    "ones"
                )
            timestamp = timestamp if asked is None else asked
        else:
            timestamp = session.instant(names, asked, deadline)
        check_since(begin, timestamp)
        with readers.source() as source:
            return take(source, names, timestamp, deadline, begin)

    def _latest(self, names: Sequence[str], deadline: float) -> int:
        """The time of a snapshot of mode 'latest'.

        The controllers are asked if the newest record does not say up to which time all histories are complete:
        they belong to several control partitions, or a commit waits for another control partition.
        """
        if self._session.serves_all(names, deadline):
            with self.readers().source() as source:
                last, is_safe = newest(source, names, deadline)
            if is_safe:
                return last
        return self._session.instant(names, None, deadline)

    def timeline(self, txn_id: bytes, timeout: float | None) -> Timeline:
        """The timeline of a transaction."""
        readers, session = self.readers(), self._session
        deadline = self._shared.deadline(timeout)
        opened = session.open_ones(r.ListOpen(None, txn_id, 1), deadline)[0]
        info, streams = info_of(opened.outcome), opened.outcome.streams
        if info.commit_timestamp and not streams:  # a one-shot: its row does not name its streams
            kept = [s.stream for s in session.streams(info.scope, deadline) if s.state == ACTIVE]
            streams = tuple(kept[:MOST_SEARCHED])
        with readers.source() as source:
            return read_timeline(
                source, info, streams, self._shared.ports.prefix, deadline, opened.waits
            )

    def progress(self, streams: str | Sequence[str], group: str, timeout: float | None) -> int:
        readers, names = self.readers(), streams_of(streams)
        if check_group(group) is None:
            raise InvalidArgument("progress is of a consumer group: give its name")
        session, deadline = self._session, self._shared.deadline(timeout)
        safe = session.instant(names, None, deadline)
        return group_progress(readers.ports, group, names, safe, readers.timeout)

    def replica(
        self,
        tables: Sequence[str | Stream[Any, Any]],
        folder: str | Path | None,
        timeout: float | None,
        *,
        threads: bool,
        index: Mapping[str, Index] | None,
    ) -> Replica:
        need("rocksdict", extra="tables")
        from anabranch.client.replica import Replica

        settings = self._replica_settings(
            names_of(tables), folder, timeout, threads=threads, index=index, derived=True
        )
        return Replica(self._shared, self.readers().ports, settings)

    def read_replica(
        self,
        table: str,
        folder: str | Path | None,
        timeout: float | None,
        *,
        threads: bool = True,
        hold: int | None = None,
    ) -> ReadReplica:
        """A replica of one table, only for reads. ``hold``: the hybrid time from which it keeps versions."""
        need("rocksdict", extra="tables")
        from anabranch.client.replica import ControllerTimes
        from anabranch.tables.replica import ReadReplica

        settings = self._replica_settings([table], folder, timeout, threads=threads, hold=hold)
        return ReadReplica(self.readers().ports, ControllerTimes(self._shared), settings)

    def _replica_settings(
        self,
        tables: Sequence[str],
        folder: str | Path | None,
        timeout: float | None,
        *,
        threads: bool,
        hold: int | None = None,
        index: Mapping[str, Index] | None = None,
        derived: bool = False,
    ) -> ReplicaSettings:
        """``derived``: with the tables that are derived from these ones."""
        from anabranch.tables.replica import ReplicaSettings

        if not tables:
            raise InvalidArgument("a replica is of at least one table: name it")
        if folder is not None:
            check_type("a folder", folder, str, Path)
        self.readers()
        deadline, names = self._shared.deadline(timeout), streams_of(tables)
        found = dict(zip(names, self._check_tables(names, deadline), strict=True))
        for made in self._shared.derivations.made_of(found) if derived else ():
            with suppress(UnknownStream):  # it is made later
                found |= zip([made], self._check_tables([made], deadline), strict=True)
        return ReplicaSettings(
            tables=tuple(found),
            cluster_id=self._session.cluster(deadline),
            folder=None if folder is None else Path(folder),
            history_ms=max(map(versions_ms, found.values())),
            timeout=self._shared.timeout,
            threaded=threads,
            hold=hold,
            index=index,
            derived={t: of for t in found if (of := derived_from(found[t])) is not None},
        )

    def changes(
        self,
        table: str | Stream[Any, Any],
        group: str | None,
        timeout: float | None,
        start: Start,
        *,
        until: At | Literal["end"],
        before: bool,
        folder: str | Path | None,
    ) -> Changes[Any, Any]:
        from anabranch.client.replica import ControllerTimes
        from anabranch.tables.changes import Changes, end_at

        shared, readers = self._shared, self.readers()
        begin = check_start(start)
        asked = None if until in (None, "end") else check_at(until, "until")
        decoder = self.decoder(table) if isinstance(table, Stream) else None
        name: str = name_of(table)
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
                if is_by_worker(self._check_tables([name], deadline)[0]):
                    raise InvalidArgument(
                        f"{name} is derived by a worker: its rows have the times of their source's commits, and "
                        "its changes come later; ask for changes without the rows before"
                    )
                rows = stack.enter_context(self.read_replica(name, folder, None, hold=0))
            else:
                self._check_tables([name], deadline)
            if until is not None:
                controller = ControllerTimes(shared)
                safe, last = controller.safe([name], asked or controller.last_timestamp, deadline)
                asked = safe if asked is None else asked
                end = end_at(readers.ports, name, asked, last[name], shared.timeout)
                timeout = shared.timeout if timeout is None else timeout
            reader = self.read_transactions(name, group, timeout, begin, whole=True)
            stack.pop_all()
        first = begin if isinstance(begin, int) else 0
        return Changes(
            name,
            reader,
            rows=rows,
            begin=first,
            end=end,
            timeout=shared.timeout,
            base_of=lambda: shared.session.describe(name, shared.deadline(None)).base,
            group=group,
            decoder=decoder,
        )

    def _check_tables(self, names: Sequence[str], deadline: float) -> list[Mapping[str, str]]:
        """The settings of these tables. Raises `InvalidArgument` for a stream that is not a table."""
        found = []
        for name in names:
            settings = self._session.describe(name, deadline).settings
            self._shared.derivations.learn(name, settings)
            if not is_table(settings):
                raise InvalidArgument(
                    f"{name} is a stream, and no table: make one with `create_table` (`anabranch table create`)"
                )
            found.append(settings)
        return found


def dead_letter(
    begin: Callable[[str], Transaction], stream: str, event: Event, error: UndecodableValue
) -> None:
    """Commit an event to the stream of dead letters. ``begin``: begins a transaction in a scope.

    Raises: as `Client.begin` and `Transaction.commit`.
    """
    place = place_of(event)
    fields = (event.value, event.key, event.headers, event.timestamp)
    refused: AnabranchError | None = None
    for letter in dead_letters(fields, place, error):
        try:
            with begin(split_stream(stream)[0]) as txn:
                txn.write(stream, *letter)
                txn.commit()
            return
        except (EventTooLarge, InvalidArgument) as larger:
            refused = larger
        except (BeginAgainError, AskOutcomeError) as trouble:
            raise NotReady(f"{place} is perhaps no dead letter yet: {trouble}") from trouble
    if refused is not None:
        raise type(refused)(f"{place} can't be a dead letter: {refused}") from refused


class SystemTables:
    """The rows of system tables."""

    def __init__(self, shared: Shared, reading: Reading) -> None:
        self._shared = shared
        self._session = shared.session
        self._reading = reading

    def rows(
        self,
        name: str,
        of: str | None,
        *,
        key: bytes | None,
        start: At,
        until: At,
        folder: str | Path | None,
        limit: int,
        timeout: float | None,
    ) -> Listed[Any]:
        """As `Client.system`, whose arguments `check_call` has checked."""
        missing: dict[int, AnabranchError] = {}
        deadline = self._shared.deadline(timeout)
        if name == "transactions":
            opened = self._session.open_ones(r.ListOpen(of, None, limit), deadline).each(open_of)
            wanted = r.ListTransactions(of, True, limit, None)
            listed = self._session.transactions(wanted, self._shared.deadline(timeout))
            found: Iterable[Any] = transaction_rows(
                opened, listed.each(info_of), self._session.wall()
            )
            missing = opened.missing | listed.missing
        elif name == "locks":
            locks = self._session.table_locks(r.ListTableLocks(of, limit), deadline)
            found, missing = lock_rows(locks), locks.missing
        elif name == "tables":
            streams = self._session.streams(of, deadline).each(description_of)
            missing = streams.missing
            found = table_rows(streams, self._newest(streams, self._shared.deadline(timeout)))
        elif name == "commits":
            found = self._commits(
                of or "", check_at(start, "start"), check_at(until), limit, deadline
            )
        else:
            table, row = of or "", key or b""
            with (
                self._reading.read_replica(table, folder, timeout) as replica,
                replica.snapshot(until, timeout=timeout) as view,
            ):
                found = list(islice(version_rows(table, view.versions(table, row)), limit))
        return Listed(islice(found, limit), missing)

    def _commits(
        self, of: str, above: int | None, until: int | None, limit: int, deadline: float
    ) -> list[CommitRow]:
        scope, slash, _ = of.partition("/")
        # Up to a safe time, the histories have all commits.
        until = self._session.instant([check_scope(scope)], until, deadline)
        if above is not None and above > until:
            raise InvalidArgument(f"start {to_text(above)} is later than {to_text(until)}, the end")
        if slash:
            names = [self._session.describe(of, deadline).stream]
        else:
            gone = {CREATING, *GIVEN_UP}
            found = self._session.streams(scope, deadline)
            names = [each.stream for each in found if each.state not in gone]
        left = max(0.1, deadline - self._session.now())
        return commit_rows(self._reading.readers().ports, names, above or 0, until, limit, left)

    def _newest(self, found: Sequence[StreamDescription], deadline: float) -> dict[str, int]:
        """The newest commit of each table among these streams, for scopes in which this lane may see all tables."""
        newest: dict[str, int] = {}
        tables = [
            each.stream for each in found if is_table(each.settings) and each.state != CREATING
        ]
        for _, its in groupby(tables, lambda table: table.partition("/")[0]):
            # `InvalidArgument` if a table was deleted meanwhile.
            with suppress(NotAuthorized, InvalidArgument):
                newest |= self._session.safe_tables(list(its), 0, deadline)[1]
        return newest
