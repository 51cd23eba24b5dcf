"""System tables: a cluster's transactions, locks, commits, tables and versions, as rows.

``pandas.DataFrame(client.system("commits", "bank"))`` accepts these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from anabranch.core.stream_settings import is_table, versions_ms
from anabranch.core.transaction_states import broken_text
from anabranch.errors import InvalidArgument
from anabranch.protocol.hybrid_time import to_datetime
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.legal_names import split_stream
from anabranch.protocol.schemas.records import TableLockInfo
from anabranch.reading.committed_log import ReaderPorts
from anabranch.reading.history import HistorySearch
from anabranch.types import OpenTransaction, StreamDescription, TransactionInfo

if TYPE_CHECKING:
    from anabranch.tables.store import Seen

MOST_ROWS = 10_000
# Name of a system table -> its required argument (empty: none), and its further arguments.
_ARGUMENTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "transactions": ("", ()),
    "locks": ("", ()),
    "commits": ("scope or stream", ("start", "until")),
    "tables": ("", ()),
    "versions": ("table", ("key", "until", "folder")),
}


class TransactionRow(NamedTuple):
    """A transaction. ``age``: seconds from its begin to its end, or until now. ``rows``: how many it committed.

    ``streams``, ``uncommitted_bytes`` and ``writers`` are empty or 0 unless it is open. ``commit_timestamp``:
    hybrid time; None if it is not committed. ``snapshot``: hybrid time of its reads of tables; None if it began
    without one. ``broken``: the first of its registered locks that broke, and the commit that broke it.
    """

    txn_id: bytes
    state: str
    scope: str
    owner: str
    name: str | None
    begun: datetime
    age: float
    commit_timestamp: int | None
    rows: int
    streams: tuple[str, ...]
    uncommitted_bytes: int
    writers: int
    reason: str
    snapshot: int | None
    broken: str | None


class LockRow(NamedTuple):
    """A table that an open transaction reads, and how many keys (``points``) and ranges of keys are locked there.

    ``frozen``: whether the locks are frozen, because of a staged merge. ``broken``: whether any lock of the
    transaction is broken, perhaps on another table. ``waiting``: ids of transactions that wait for its end;
    ``waits_for``: ids of transactions whose end it waits for; at most 100 each. An id of zeros means plain writes,
    a one-shot, or a transaction that the lane may not see.
    """

    txn_id: bytes
    table: str
    points: int
    ranges: int
    frozen: bool
    broken: bool
    waiting: tuple[bytes, ...]
    waits_for: tuple[bytes, ...]


class CommitRow(NamedTuple):
    """A commit, from the histories of the requested streams.

    ``txn_id``: None for plain writes. ``rows``: events in these streams; a row that was written twice counts twice.
    """

    commit_timestamp: int
    committed_at: datetime
    txn_id: bytes | None
    streams: tuple[str, ...]
    rows: int


class TableRow(NamedTuple):
    """A table. ``newest``: hybrid time of its newest commit or of its creation; None if the lane may not know it.

    ``history_ms``: how long replicas keep versions. ``base``: hybrid time of its base; None if the table has all
    commits from its first one on.
    """

    table: str
    scope: str
    state: str
    segments: int
    newest: int | None
    newest_at: datetime | None
    history_ms: int
    settings: Mapping[str, str]
    base: int | None


class VersionRow(NamedTuple):
    """A version of a row: ``mintid`` wrote it at ``mincsn``, ``maxtid`` replaced or deleted it at ``maxcsn``.

    A snapshot at S shows it if mincsn <= S < maxcsn, both hybrid times. ``maxcsn`` is None for the current version.
    Ids are None for plain writes. The names are those of ClickHouse's data parts.
    """

    table: str
    key: bytes
    value: bytes
    mincsn: int
    maxcsn: int | None
    mintid: bytes | None
    maxtid: bytes | None
    since: datetime
    until: datetime | None


def check_call(name: str, of: str | None, *, limit: object, **given: object) -> None:
    """Raise `InvalidArgument` unless these are legal arguments for a system table."""
    if name not in _ARGUMENTS:
        raise InvalidArgument(f"there is no system table {name!r:.100}: {', '.join(_ARGUMENTS)}")
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= MOST_ROWS:
        raise InvalidArgument(f"limit {limit!r}: 1 to {MOST_ROWS:,} rows")
    needed, allowed = _ARGUMENTS[name]
    if needed and of is None:
        raise InvalidArgument(f"system table {name!r} is of one {needed}: give it")
    for argument, value in given.items():
        if value is not None and argument not in allowed:
            raise InvalidArgument(f"system table {name!r} has no argument {argument!r}")
    if "key" in allowed and given["key"] is None:
        raise InvalidArgument(f"system table {name!r} is of one row: give its key")


def transaction_rows(
    opened: Iterable[OpenTransaction], listed: Iterable[TransactionInfo], now: float
) -> Iterator[TransactionRow]:
    """Rows of open transactions, the oldest first, then of the list's other transactions. ``now``: Unix seconds."""
    seen = set()
    for each in opened:
        seen.add(each.info.txn_id)
        yield _transaction(
            each.info, each.age, each.info.streams, each.uncommitted_bytes, each.writer_count
        )
    for info in listed:
        if info.txn_id not in seen:
            end_ms = info.finished_ms or now * 1000
            yield _transaction(info, max(0.0, (end_ms - info.begun_ms) / 1000))


def _transaction(
    info: TransactionInfo,
    age: float,
    streams: tuple[str, ...] = (),
    uncommitted_bytes: int = 0,
    writers: int = 0,
) -> TransactionRow:
    return TransactionRow(
        txn_id=info.txn_id,
        state=info.state,
        scope=info.scope,
        owner=info.owner,
        name=info.name,
        begun=datetime.fromtimestamp(info.begun_ms / 1000, UTC),
        age=age,
        commit_timestamp=info.commit_timestamp or None,
        rows=info.counts.committed if info.commit_timestamp else 0,
        streams=streams,
        uncommitted_bytes=uncommitted_bytes,
        writers=writers,
        reason=info.reason,
        snapshot=info.snapshot or None,
        broken=None if info.broken is None else broken_text(info.broken),
    )


def lock_rows(found: Iterable[TableLockInfo]) -> Iterator[LockRow]:
    """Rows of registered locks, from the controllers' replies."""
    for each in found:
        yield LockRow(*(getattr(each, column) for column in LockRow._fields))


def commit_rows(
    ports: ReaderPorts, streams: Sequence[str], above: int, until: int, limit: int, timeout: float
) -> list[CommitRow]:
    """The newest commits later than ``above``, up to the safe time ``until``, the newest first.

    ``timeout``: seconds for each search in a history. Raises: NotReady, NotAuthorized.
    """
    # A commit has the same timestamp in the histories of all its streams, and no other commit of the scope has it.
    found: dict[int, tuple[bytes, dict[str, int]]] = {}
    with closing(ports.committed_log(timeout)) as source:
        for stream in streams:
            for commit in HistorySearch(source, stream, timeout).commits(above, until, limit):
                _, rows = found.setdefault(commit.timestamp, (commit.txn_id, {}))
                rows[stream] = sum(part.count for part in commit.segments)
            if len(found) > limit:
                above = max(above, sorted(found)[-limit] - 1)  # older commits are beyond the limit
                found = {at: each for at, each in found.items() if at > above}
    return [
        CommitRow(
            at,
            to_datetime(at),
            None if txn_id == NO_TXN else txn_id,
            tuple(sorted(rows)),
            sum(rows.values()),
        )
        for at, (txn_id, rows) in sorted(found.items(), reverse=True)
    ]


def before_newest(
    commits: Callable[[int, int], Sequence[CommitRow]], until: int, count: int
) -> int | None:
    """A hybrid time after which at least ``count`` events were committed; None: there are not more than that.

    ``commits``: the newest commits up to a hybrid time, the newest first; its second argument limits their number.
    """
    while True:
        most = min(count, MOST_ROWS)
        found = commits(until, most)
        for commit in found:
            count -= commit.rows
            if count <= 0:
                return commit.commit_timestamp - 1
        if len(found) < most:
            return None
        until = found[-1].commit_timestamp - 1


def table_rows(found: Iterable[StreamDescription], newest: Mapping[str, int]) -> Iterator[TableRow]:
    """Rows of the streams that are tables. ``newest``: the newest commits of some tables; others are not known."""
    for each in found:
        if is_table(each.settings):
            last = newest.get(each.stream)
            yield TableRow(
                each.stream,
                split_stream(each.stream)[0],
                each.state,
                len(each.segments),
                last,
                None if last is None else to_datetime(last),
                versions_ms(each.settings),
                each.settings,
                None if each.base is None else each.base.timestamp,
            )


def version_rows(table: str, found: Iterable[Seen]) -> Iterator[VersionRow]:
    """Rows of the versions that a replica has of one key, the newest first."""
    newer: Seen | None = None
    for each in found:
        if each.value is not None:
            yield VersionRow(
                table,
                each.key,
                each.value,
                each.timestamp,
                newer and newer.timestamp,
                _written_by(each),
                newer and _written_by(newer),
                to_datetime(each.timestamp),
                newer and to_datetime(newer.timestamp),
            )
        newer = each


def _written_by(version: Seen) -> bytes | None:
    return None if version.txn_id == NO_TXN else version.txn_id
