"""Compacting a table: its base, the rows as of a time, is written to the stream ``<table>-base``, its companion.

Each step can be repeated, and another process can finish it. One transaction writes the base, under a number in the
series of the companion's name: the base's time in seconds. If two processes make the same base, only one commits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from itertools import takewhile
from typing import Any

from anabranch.client.calls.reading import Reading
from anabranch.client.calls.streams import Streams
from anabranch.client.reservation import keepalive_ms_of
from anabranch.client.shared import Shared
from anabranch.client.transaction import Transaction
from anabranch.core import stream_settings as settings
from anabranch.core.decisions.scopes import text_of
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    IllegalState,
    InvalidArgument,
    NotAuthorized,
    NotReady,
    UnknownStream,
)
from anabranch.protocol import defaults, limits
from anabranch.protocol.hybrid_time import from_s, to_s, to_text
from anabranch.protocol.ids import NO_TXN, VERSION_HEADER, pack_version
from anabranch.protocol.legal_names import base_stream, split_stream
from anabranch.protocol.schemas.records import BaseRow, CommitRecord, SeriesInfo
from anabranch.reading.group_lag import HISTORY, ConsumerGroup, Lag, groups_of
from anabranch.reading.history import HistorySearch
from anabranch.tables.replica import ReadReplica
from anabranch.types import StreamDescription

STEPS = 10  # bases within `table.history.ms`, at most
LEAST_ROWS = 1000  # a table with fewer rows counts as one with this many
# Limits of a batch.
_ROWS = 8192
_BYTES = 4 << 20
_MORE_BYTES = 1 << 10  # an event of a base is bigger than the table's by this at most
_LIKE_TABLE = (settings.REPLICATION, settings.MIN_ISR, "segment.bytes", "segment.ms")
Row = tuple[bytes, bytes, int, bytes]  # key, row, commit timestamp, transaction id


class Compactor:
    """Makes bases of tables, for `Client.compact_table`."""

    def __init__(self, shared: Shared, streams: Streams, reading: Reading) -> None:
        self._shared, self._session = shared, shared.session
        self._streams, self._reading = streams, reading

    def _deadline(self) -> float:
        return self._shared.checked_deadline(None)

    def _describe(self, stream: str) -> StreamDescription:
        return self._streams.describe(stream, self._deadline())

    def _publish(self, table: str, timestamp: int, txn_id: bytes) -> BaseRow:
        return self._streams.publish_base(table, timestamp, txn_id, self._deadline())

    def _begin(self, scope: str) -> Transaction:
        self._shared.check()
        return Transaction(self._shared, scope, None, keepalive_ms_of(defaults.KEEPALIVE_S))

    def compact(
        self,
        table: str,
        open_replica: Callable[[int], ReadReplica],
        timeout: float,
        progress: Callable[[int], None],
    ) -> BaseRow:
        """As `Client.compact_table`. ``open_replica``: opens a replica that keeps versions from a time on."""
        clock = self._reading.readers().ports.clock
        deadline = clock.monotonic() + timeout
        found = self._describe(table)
        if not settings.is_table(found.settings):
            raise InvalidArgument(f"{table} is a stream, and no table")
        at, known = wanted_base(found), found.base
        if known is not None and at <= known.timestamp:
            # Replaced rows may not be deleted yet.
            base = self._publish(table, known.timestamp, known.txn_id)
            if blockers := _blockers(found):
                raise NotReady(
                    f"{table} begins at its base of {to_text(base.timestamp)} already; a later one would end "
                    f"reads of {blockers}"
                )
            return base
        # To find a missing right before the work: no transaction has this id, so it has no other effect.
        with suppress(IllegalState, InvalidArgument, UnknownStream, NotReady):
            self._publish(table, at, NO_TXN)
        self._check_groups(found, at, timeout)
        companion = self._companion(found)
        scope = split_stream(table)[0]
        made = self._made(companion, at)
        if made is None:
            with (
                open_replica(at) as replica,
                replica.snapshot(at=at, timeout=timeout) as view,
                self._begin(scope) as txn,
            ):
                written = 0
                for batch in _batches(view.stamped(table)):
                    written += txn.write_batch(companion, _arrow(batch))
                    progress(written)
                if not written:
                    txn.write(companion)  # so that the commit checks the right to write there
                left = max(1.0, deadline - clock.monotonic())
                with suppress(AlreadyCommitted):  # by another process, whose transaction counts
                    txn.commit(name=companion, number=to_s(at), timeout=left)
            made = self._made(companion, at)
        if made is None:
            raise NotReady(f"the base of {table} is not committed: call again")
        return self._publish(table, from_s(made.number), made.txn_id)

    def _made(self, companion: str, at: int) -> SeriesInfo | None:
        """The last committed base, published or not, if its time is this time or later."""
        scope, deadline = split_stream(companion)[0], self._deadline()
        for last in self._session.series(scope, companion, deadline):
            if last.number >= to_s(at):
                state = self._session.state(last.txn_id, None, self._shared.deadline(None)).state
                if state == "COMMITTED":
                    return last
        return None

    def _check_groups(self, found: StreamDescription, at: int, timeout: float) -> None:
        """Raise `IllegalState` if a group has not read all commits up to the base's time.

        Raise `NotReady` if the table is younger than that.
        """
        table, readers = found.stream, self._reading.readers()
        ports = readers.ports
        behind = []
        with closing(ports.committed_log(timeout)) as source:
            search = HistorySearch(source, table, timeout)
            base = search.as_of(at)
            if base is None:
                blockers = _blockers(found)
                why = f"it is younger than its {settings.VERSIONS_MS}"
                why = f"{blockers}: these reads need what would go" if blockers else why
                raise NotReady(f"nothing of {table} is to be compacted yet: {why}")
            groups: list[ConsumerGroup] = []
            if ports.groups is not None:
                groups = groups_of(ports, readers.groups, table, readers.timeout)
            for group in groups:
                if any(_has_unread(search, place.offsets, base.offset) for place in group.streams):
                    behind.append(group.name)
        if behind:
            raise IllegalState(
                f"what was committed to {table} up to {to_text(at)} would be lost to "
                f"{limits.cut(', '.join(behind))}: let them come so far, or move these groups "
                "(`anabranch group reset`)"
            )

    def _companion(self, table: StreamDescription) -> str:
        """The companion stream, which is created for the first base."""
        name, given = base_stream(table.stream), table.settings
        wanted = {n: given[n] for n in _LIKE_TABLE if n in given}
        size, most = self._size(table), limits.MESSAGE.value
        if 0 < size <= most:
            wanted[settings.MAX_MESSAGE] = str(min(size + _MORE_BYTES, most))
        try:
            found = self._describe(name)
        except UnknownStream:
            wanted = {settings.BASE: table.stream, **wanted}
            deadline = self._deadline()
            self._streams.create(
                name, len(table.segments), wanted, deadline, adopt=False, near=None
            )
            return name
        if self._size(found) < int(wanted.get(settings.MAX_MESSAGE, 0)):
            bigger = {settings.MAX_MESSAGE: wanted[settings.MAX_MESSAGE]}
            self._streams.alter(name, bigger, self._deadline())
        return name

    def _size(self, found: StreamDescription) -> int:
        """The biggest batch that a stream accepts; 0 if brokers do not report it."""
        reported: Mapping[str, str] = found.settings
        with suppress(NotAuthorized):
            reported = self._streams.settings(found.stream, self._deadline())
        return int(reported.get(settings.MAX_MESSAGE, 0))


def wanted_base(found: StreamDescription) -> int:
    """The time of the base at which a table should begin now: no snapshot needs older rows.

    The time moves in steps of several seconds, so that two processes at the same time make the same base.
    """
    step = max(1, history_ms(found) // 1000 // STEPS)
    return from_s(to_s(found.oldest_snapshot) // step * step)


def history_ms(found: StreamDescription) -> int:
    """How long versions of a table are kept, in milliseconds."""
    return settings.versions_ms(found.settings)


def is_due(found: StreamDescription, events: int) -> bool:
    """Whether a table has more than ``table.compact.ratio`` events for each row of its base.

    A table is not due again within the time that its versions are kept, or a minute: that would free little.
    """
    ratio, base = found.settings.get(settings.RATIO), found.base
    if ratio is None:
        return False
    least_s = max(60, history_ms(found) // 1000)
    if base is not None and to_s(wanted_base(found)) - to_s(base.timestamp) < least_s:
        return False
    return events > int(ratio) * max(LEAST_ROWS, base.rows if base is not None else 0)


def due_tables(found: Iterable[StreamDescription], count_events: Callable[[str], Lag]) -> list[str]:
    """The tables among these streams that are due. Tables that can't be read now are skipped."""
    due = []
    for each in found:
        if settings.RATIO in each.settings:
            with suppress(AnabranchError):
                if is_due(each, count_events(each.stream).events):
                    due.append(each.stream)
    return due


def _blockers(found: StreamDescription) -> str:
    """The open transactions whose reads a later base would end."""
    return ", ".join(text_of(each) for each in found.blockers if each.what == "transaction")


def _has_unread(search: HistorySearch, offsets: Mapping[int, int], until: int) -> bool:
    """Whether a group has not read all commits up to a record of the history. ``offsets``: the group's."""
    since = offsets.get(HISTORY)
    if since is None:
        near = search.not_beyond(offsets)
        since = until + 1 if near is None else near.offset
    missed = takewhile(lambda at: at.offset <= until, search.since(since))
    return any(
        HISTORY in offsets
        or any(at.end > offsets.get(at.partition, 0) for at in each.record.segments)
        for each in missed
        if isinstance(each.record, CommitRecord)
    )


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += len(row[0]) + len(row[1])
        if len(batch) == _ROWS or size >= _BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _arrow(rows: list[Row]) -> Any:
    """The events of these rows."""
    import pyarrow as pa

    keys, values, times, txn_ids = zip(*rows, strict=True)
    versions = [pack_version(*each) for each in zip(times, txn_ids, strict=True)]
    names = pa.array([VERSION_HEADER] * len(rows), pa.string())
    pairs = pa.StructArray.from_arrays([names, pa.array(versions, pa.binary())], ["key", "value"])
    headers = pa.ListArray.from_arrays(pa.array(range(len(rows) + 1), pa.int32()), pairs)
    of = [pa.array(column, pa.binary()) for column in (keys, values)]
    return pa.RecordBatch.from_arrays([*of, headers], ["key", "value", "headers"])
