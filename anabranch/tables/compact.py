"""Compacting a table: its rows as of a time are written to its companion stream, and the table then begins there.

Each step can be repeated, and another process can finish it: the rows are one transaction, whose number in the
companion's series is the second that they are as of. If two processes make the same base, only one is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from itertools import takewhile
from typing import Any, Protocol

from anabranch.core import limits
from anabranch.core import stream_settings as settings
from anabranch.core.decisions.scopes import text_of
from anabranch.core.hybrid_time import from_s, to_s, to_text
from anabranch.core.ids import NO_TXN, VERSION_HEADER, pack_version
from anabranch.core.legal_names import base_stream, split_stream
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    IllegalState,
    InvalidArgument,
    NotAuthorized,
    NotReady,
    UnknownStream,
)
from anabranch.reading.committed_log import ReaderPorts
from anabranch.reading.group_lag import HISTORY, ConsumerGroup, Lag
from anabranch.reading.history import HistorySearch
from anabranch.schemas.records import BaseRow, CommitRecord, SeriesInfo
from anabranch.tables.replica import Replica
from anabranch.types import StreamDescription, TransactionInfo

STEPS = 10  # bases within `table.history.ms`, at most
LEAST_ROWS = 1000  # a table with fewer rows counts as one with this many
# Limits of a batch.
_ROWS = 8192
_BYTES = 4 << 20
_MORE_BYTES = 1 << 10  # an event of a base is bigger than the table's by this at most
_LIKE_TABLE = (settings.REPLICATION, settings.MIN_ISR, "segment.bytes", "segment.ms")
Progress = Callable[[int], None]
Row = tuple[bytes, bytes, int, bytes]  # key, row, commit timestamp, transaction id


class Compacting(Protocol):
    """The calls of a client that a compaction makes."""

    def describe(self, stream: str) -> StreamDescription: ...

    def create_stream(
        self, stream: str, segments: int, settings: Mapping[str, Any]
    ) -> StreamDescription: ...

    def alter_stream(self, stream: str, settings: Mapping[str, Any]) -> StreamDescription: ...

    def effective_settings(self, stream: str) -> dict[str, str]: ...

    def series(self, scope: str, name: str) -> list[SeriesInfo]: ...

    def state(self, transaction: bytes) -> TransactionInfo: ...

    def streams(self, scope: None) -> list[StreamDescription]: ...

    def count_events(self, stream: str) -> Lag: ...

    def groups(self, stream: str) -> list[ConsumerGroup]: ...

    def reader_ports(self) -> ReaderPorts: ...

    def begin(self, scope: str) -> Any: ...

    def publish_base(self, table: str, timestamp: int, txn_id: bytes) -> BaseRow: ...


def compact(
    client: Compacting,
    table: str,
    open_replica: Callable[[int], Replica],
    timeout: float,
    progress: Progress,
) -> BaseRow:
    """Make a base of a table, or finish one that another process began, and let the table begin there.

    ``open_replica``: opens a replica that keeps versions from a time on. ``timeout``: seconds.
    """
    clock = client.reader_ports().clock
    deadline = clock.monotonic() + timeout
    found = client.describe(table)
    if not settings.is_table(found.settings):
        raise InvalidArgument(f"{table} is a stream, and no table")
    at, known = wanted_base(found), found.base
    if known is not None and at <= known.timestamp:
        # Replaced rows may not be deleted yet.
        base = client.publish_base(table, known.timestamp, known.txn_id)
        if held := _held(found):
            raise NotReady(
                f"{table} begins at its base of {to_text(base.timestamp)} already; a later one would end reads of "
                f"{held}"
            )
        return base
    # This finds a missing right first: no transaction has this id, so it has no other effect.
    with suppress(IllegalState, InvalidArgument, UnknownStream, NotReady):
        client.publish_base(table, at, NO_TXN)
    _check_groups(client, found, at, timeout)
    companion = _companion(client, found)
    scope = split_stream(table)[0]
    made = _made(client, companion, at)
    if made is None:
        with (
            open_replica(at) as replica,
            replica.snapshot(at=at, timeout=timeout) as view,
            client.begin(scope) as txn,
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
        made = _made(client, companion, at)
    if made is None:
        raise NotReady(f"the base of {table} is not committed: call again")
    return client.publish_base(table, from_s(made.number), made.txn_id)


def _made(client: Compacting, companion: str, at: int) -> SeriesInfo | None:
    """The last base, published or not, if it is as of this time or a later one."""
    for last in client.series(split_stream(companion)[0], companion):
        if last.number >= to_s(at) and client.state(last.txn_id).state == "COMMITTED":
            return last
    return None


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
    """Whether a table with this number of events has more for each row than `table.compact.ratio` allows.

    The rows of its base are counted. There is at most one base in the time that versions are kept, or in a minute:
    more bases would free little.
    """
    ratio, base = found.settings.get(settings.RATIO), found.base
    if ratio is None:
        return False
    least_s = max(60, history_ms(found) // 1000)
    if base is not None and to_s(wanted_base(found)) - to_s(base.timestamp) < least_s:
        return False
    return events > int(ratio) * max(LEAST_ROWS, base.rows if base is not None else 0)


def due_tables(client: Compacting, table: str | None) -> list[str]:
    """The tables that are due, of all tables or this one. Tables that can't be read now are skipped."""
    found = client.streams(None) if table is None else [client.describe(table)]
    due = []
    for each in found:
        if settings.RATIO in each.settings:
            with suppress(AnabranchError):
                if is_due(each, client.count_events(each.stream).events):
                    due.append(each.stream)
    return due


def _held(found: StreamDescription) -> str:
    """The open transactions whose reads a later base would end."""
    return ", ".join(text_of(each) for each in found.blockers if each.what == "transaction")


def _check_groups(client: Compacting, found: StreamDescription, at: int, timeout: float) -> None:
    """Raise `IllegalState` if a group has not read all that was committed up to the time of the base.

    `NotReady`: the table is younger than that time.
    """
    table, ports = found.stream, client.reader_ports()
    behind = []
    with closing(ports.committed_log(timeout)) as source:
        search = HistorySearch(source, table, timeout)
        base = search.as_of(at)
        if base is None:
            held = _held(found)
            why = f"it is younger than its {settings.VERSIONS_MS}"
            why = f"{held}: these reads need what would go" if held else why
            raise NotReady(f"nothing of {table} is to be compacted yet: {why}")
        for group in client.groups(table) if ports.groups is not None else ():
            if any(_has_unread(search, place.offsets, base.offset) for place in group.streams):
                behind.append(group.name)
    if behind:
        raise IllegalState(
            f"what was committed to {table} up to {to_text(at)} would be lost to {limits.cut(', '.join(behind))}: "
            "let them come so far, or move these groups (`anabranch group reset`)"
        )


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


def _companion(client: Compacting, table: StreamDescription) -> str:
    """The companion stream, which is created for the first base."""
    name, given = base_stream(table.stream), table.settings
    wanted = {n: given[n] for n in _LIKE_TABLE if n in given}
    size, most = _size(client, table), limits.MESSAGE.value
    if 0 < size <= most:
        wanted[settings.MAX_MESSAGE] = str(min(size + _MORE_BYTES, most))
    try:
        found = client.describe(name)
    except UnknownStream:
        client.create_stream(name, len(table.segments), {settings.BASE: table.stream, **wanted})
        return name
    if _size(client, found) < int(wanted.get(settings.MAX_MESSAGE, 0)):
        client.alter_stream(name, {settings.MAX_MESSAGE: wanted[settings.MAX_MESSAGE]})
    return name


def _size(client: Compacting, found: StreamDescription) -> int:
    """The biggest batch that a stream accepts; 0 if brokers do not report it."""
    told: Mapping[str, str] = found.settings
    with suppress(NotAuthorized):
        told = client.effective_settings(found.stream)
    return int(told.get(settings.MAX_MESSAGE, 0))


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
