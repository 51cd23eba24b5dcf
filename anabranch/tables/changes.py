"""The changes of a table's rows, in commit order, for `Client.changes`.

The table's transactions come from a `TransactionReader`; the rows before a change come from a replica.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

from anabranch.errors import NotReady, SnapshotExpired, UndecodableValue
from anabranch.protocol.hybrid_time import to_text
from anabranch.protocol.schemas.records import BaseRow
from anabranch.reading.committed_log import ReaderPorts
from anabranch.reading.history import HistorySearch
from anabranch.reading.iteration import Iteration
from anabranch.reading.transaction_reader import TransactionReader
from anabranch.types import Committed, K, V
from anabranch.values import Decoder

if TYPE_CHECKING:
    from anabranch.tables.replica import ReadReplica


class Change(NamedTuple, Generic[K, V]):
    """A commit's change of a table's row.

    ``before``: the row before; None if there was no row, or if it was not requested. ``after``: the new row; None
    if it is deleted. ``txn_id``: None for a plain write. ``commit_timestamp``: hybrid time.
    """

    table: str
    key: K
    before: V | None
    after: V | None
    commit_timestamp: int
    txn_id: bytes | None


class End(NamedTuple):
    """The time at which changes end. ``newest``: the table's newest commit at ``until``, or a later one."""

    until: int
    newest: int


def end_at(ports: ReaderPorts, table: str, until: int, newest: int, timeout: float) -> End:
    """The `End` of changes. ``newest``: from the controller: the time of the first EPOCH if there is no commit."""
    with closing(ports.committed_log(timeout)) as source:
        search = HistorySearch(source, table, timeout)
        if not search.commits(0, until, 1) and not search.is_cut():
            newest = 0
    return End(until, newest)


class Changes(Iteration[Change[K, V]], Generic[K, V]):
    """Changes of a table's rows in commit order. An iterator; close it, or use it as a context manager.

    A transaction changes a key once, to the last value that it wrote. Its keys are in byte order, and all its
    changes are in memory. The changes count as processed when the first change of the next transaction is
    requested. Then a group's position moves, so each change comes at least once. One thread at a time.
    """

    def __init__(
        self,
        table: str,
        reader: TransactionReader,
        *,
        rows: ReadReplica | None,
        begin: int,
        end: End | None,
        timeout: float,
        base_of: Callable[[], BaseRow | None],
        group: str | None,
        decoder: Decoder | None = None,
    ) -> None:
        """``rows``: a replica with the rows before; None if these are not requested.

        ``begin``: all changes are later than this hybrid time. ``timeout``: seconds in which ``rows`` has to catch
        up. ``base_of``: asks for the table's base.
        """
        super().__init__()
        self._table = table
        self._reader = reader
        self._rows = rows
        self._at, self._end = begin, end
        self._timeout = timeout
        self._base_of, self._group = base_of, group
        self._decoder = decoder
        self._transactions: Iterator[Committed] | None = None
        self._next: Committed | None = None  # read, and not split into changes yet
        self._left: deque[Change] = deque()
        self._closed = False

    def _free(self) -> None:
        self._reader.close()
        if self._rows is not None:
            self._rows.close()

    @property
    def skipped(self) -> int:
        """How many undecodable changes were skipped."""
        return 0 if self._decoder is None else self._decoder.skipped

    def _run(self) -> Generator[Change[Any, Any], None, None]:
        while not self._closed:
            while self._left:
                change = self._left.popleft()
                found = change if self._decoder is None else self._decoded(change, self._decoder)
                if found is not None:
                    yield found
            if self._end is not None and self._at >= min(self._end):
                return
            if self._next is None:
                self._transactions = self._transactions or iter(self._reader)
                try:
                    self._next = next(self._transactions, None)
                except SnapshotExpired as error:
                    raise self._expired() from error
            if self._next is None:
                self._transactions = None
                if self._end is not None and not self._closed:
                    raise NotReady(
                        f"{self._table} is read up to {to_text(self._at)}, not yet to {to_text(self._end.until)}: "
                        "continue reading, or give it more time"
                    )
                return
            # After an error it is still the next transaction.
            self._left.extend(self._taken_apart(self._next))
            self._at, self._next = self._next.commit_timestamp, None

    def _decoded(self, change: Change, decoder: Decoder) -> Change[Any, Any] | None:
        """The change, decoded; None if it is skipped. Raises: UndecodableValue, NotReady."""
        stream = decoder.stream
        try:
            key = stream.decode_key(change.key)
            before = stream.decode_value(change.key, change.before)
            after = stream.decode_value(change.key, change.after)
        except UndecodableValue:
            if stream.undecodable == "raise":
                raise
            decoder.skipped += 1
            return None
        except NotReady:
            self._left.appendleft(change)
            raise
        return change._replace(key=key, before=before, after=after)

    def _expired(self) -> SnapshotExpired:
        base = self._base_of()
        until = "the time of its base" if base is None else to_text(base.timestamp)
        move = f" (`anabranch group reset {self._group} {self._table} --to {until}`)"
        return SnapshotExpired(
            f"changes of {self._table} up to {until} are deleted, as it was compacted: read its rows, and start at "
            f"that time, or a later one{move if self._group is not None else ''}"
        )

    def _taken_apart(self, committed: Committed) -> list[Change]:
        at = committed.commit_timestamp
        if self._end is not None and at > self._end.until:
            return []
        after = {event.key: event.value for event in committed.events if event.key is not None}
        before = self._before(at, after) if self._rows is not None else {}
        return [
            Change(self._table, key, before.get(key), after[key], at, committed.txn_id)
            for key in sorted(after)
        ]

    def _before(self, at: int, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """The rows of these keys as of just before a commit."""
        rows, table = self._rows, self._table
        if rows is None:
            return {}
        rows.wait(at, {table: at}, rows.deadline(self._timeout))
        try:
            with rows.snapshot(at=at - 1) as then:
                found = then.get_many(table, keys)
        except SnapshotExpired as error:
            raise SnapshotExpired(
                f"the folder of these changes has no rows of {table} from before {to_text(at)} any more: "
                "give another folder, which is loaded from the beginning"
            ) from error
        rows.hold(at - 1)  # they are read again if reading restarts in this commit
        return found
