"""The timeline of a transaction: when each of its steps happened, read from logs afterwards.

The status log has a row for each change of a transaction, and its record has the time of the round that decided the
change. The history of each stream has the commit, and the broker wrote the time at which it ended the round into
the marker that follows. So no controller measures anything for a timeline. ``docs/how-to/tracing.md``
says which waits these logs do not show.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from anabranch.batches.compression import decompress
from anabranch.batches.format import HEADER_SIZE, read_header
from anabranch.batches.records import Record, decode_records
from anabranch.core.rows import TERM_KEY, Entry, partition_of, read_row, split_key
from anabranch.errors import AnabranchError, NotAuthorized, NotReady, count_of
from anabranch.ports import RawBatch, TopicPartition
from anabranch.protocol.hybrid_time import to_ms, to_text
from anabranch.protocol.ids import NO_TXN, control_partition_of, made_ms_of
from anabranch.protocol.schemas import records as r
from anabranch.reading.committed_log import CommittedLog, client_errors
from anabranch.reading.history import HistorySearch
from anabranch.topics.names import history_topic, status_topic
from anabranch.types import Timeline, TimelineStep, TransactionInfo

_FETCH_BYTES = 4 << 20
_LAST_MS = 60_000  # of a long transaction, this much of its end is read first
_LATEST_MS = 1 << 24  # a round ends within 4.6 hours
MOST_SEARCHED = 50  # streams of a scope in which the events of a one-shot are searched
_NAMED = 5  # writers, in a text


class StatusRow(NamedTuple):
    """A row of the status log: the Unix milliseconds of its round, its entry type, identifier and content."""

    at_ms: int
    entry: Entry
    identifier: bytes
    row: Any


@dataclass(slots=True)
class _Fold:
    """The state while steps are made from rows, which come in the order of the log."""

    steps: list[TimelineStep] = field(default_factory=list)
    labels: dict[bytes, str] = field(default_factory=dict)
    receipts: dict[bytes, int] = field(default_factory=dict)  # writer -> sequence
    seen: set[object] = field(default_factory=set)
    pending: r.PendingCommitRow | None = None
    staged: int = 0
    parts: set[int] = field(default_factory=set)  # the other control partitions that take part

    def add(self, row: StatusRow, what: str, about: str = "", waited_for: str = "") -> None:
        self.steps.append(TimelineStep(row.at_ms, "controller", what, about, waited_for))

    def first(self, *of: object) -> bool:
        """Whether this is the first call with these arguments."""
        new = of not in self.seen
        self.seen.add(of)
        return new

    def name(self, writer: bytes) -> str:
        label = self.labels.get(writer)
        return f"{writer.hex()} ({label})" if label else writer.hex()


def steps_of(rows: Iterable[StatusRow]) -> list[TimelineStep]:
    """The steps that rows of one transaction, and of leaders' terms, show. Rows come in the order of the log."""
    fold = _Fold()
    found = list(rows)
    fold.labels = {one.identifier: one.row.label for one in found if one.entry == Entry.LABEL}
    # A receipt in a commit counts from the round that decides on it, so it comes before the decision.
    for _, of_round in groupby(found, lambda row: row.at_ms):
        for one in sorted(
            of_round, key=lambda row: row.entry == Entry.TXN and row.row.state != "OPEN"
        ):
            _FOLDS.get(one.entry, _nothing)(fold, one)
    return fold.steps


def _nothing(_: _Fold, __: StatusRow) -> None:
    """Rows of this entry type make no step."""


def _leader(fold: _Fold, row: StatusRow) -> None:
    if not row.row.resigned:
        fold.add(row, "leader", f"term {row.row.term}: {row.row.leader}")


def _txn(fold: _Fold, row: StatusRow) -> None:
    state = row.row.state
    if not fold.first(Entry.TXN, state):
        return
    if state in ("COMMITTED", "ABORTED"):  # the end of the last part has no row of its own
        for number in sorted(fold.parts):
            _end_part(fold, row, number)
    if state == "OPEN":
        fold.add(row, "begun")
    elif state == "PREPARED":
        fold.add(row, "prepared", waited_for=_journals_of(fold))
        fold.pending = None
    elif state == "COMMIT_IN_PROGRESS":
        fold.add(row, "decided", waited_for=_journals_of(fold))
    elif state == "FINALIZE_IN_PROGRESS":
        # A prepared transaction skips COMMIT_IN_PROGRESS.
        staging = (Entry.TXN, "COMMIT_IN_PROGRESS") in fold.seen
        voted = _of_parts("votes", fold.parts) if (Entry.VOTES,) in fold.seen else ""
        fold.add(row, "staging" if staging else "decided", waited_for=voted)
    elif state == "COMMITTED":
        events = count_of(row.row.committed, "event")
        waited = f"{count_of(fold.staged, 'segment')} to be staged" if fold.staged else ""
        waited = _of_parts("merges", fold.parts) if fold.parts else waited
        fold.add(
            row, "merged", f"{events}, commit timestamp {to_text(row.row.commit_timestamp)}", waited
        )
    elif state == "ABORTED":
        fold.add(row, "aborted", row.row.reason)


def _of_parts(what: str, parts: Iterable[int]) -> str:
    numbers = sorted(parts)
    of = "control partition" if len(numbers) == 1 else "control partitions"
    return f"the {what} of {of} {', '.join(map(str, numbers))}"


def _part(fold: _Fold, row: StatusRow) -> None:
    number = partition_of(row.identifier)
    fold.parts.add(number)
    if fold.first(Entry.PARTITION, number, row.row.scopes):
        scopes = ", ".join(row.row.scopes)
        fold.add(row, "part opened", f"control partition {number}: {scopes}")
    if row.row.done:
        _end_part(fold, row, number)


def _end_part(fold: _Fold, row: StatusRow, number: int) -> None:
    if fold.first(Entry.PARTITION, number):
        fold.add(row, "part ended", f"control partition {number}")


def _votes(fold: _Fold, row: StatusRow) -> None:
    fold.seen.add((Entry.VOTES,))
    if fold.first(Entry.VOTES, row.row.votes_round):
        what = "votes taken back" if row.row.asks == "REOPEN" else "votes asked"
        fold.add(row, what, f"round of votes {row.row.votes_round}")


def _journals_of(fold: _Fold) -> str:
    """The wait of a commit that was logged as pending; empty if it was decided in the round that read it."""
    pending = fold.pending
    if pending is None:
        return ""
    streams = sorted({extent.stream for one in pending.writers for extent in one.extents})
    names = [fold.name(one.writer.to_bytes(8, "big", signed=True)) for one in pending.writers]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    found = f"the journals of {', '.join(streams)} to show the receipts of {', '.join(names[:_NAMED])}{more}"
    if not streams:
        found = "its turn"
    if pending.name is not None and pending.number is not None:
        found += f", or an earlier commit of series {pending.name}"
    return found


def _participant(fold: _Fold, row: StatusRow) -> None:
    if fold.first(Entry.PARTICIPANT, row.identifier):
        fold.add(row, "touched", row.row.stream)


def _writer(fold: _Fold, row: StatusRow) -> None:
    receipt, name = row.row.receipt, fold.name(row.identifier)
    if fold.receipts.get(row.identifier) == receipt.sequence:
        return
    fold.receipts[row.identifier] = receipt.sequence
    if not receipt.sequence:
        fold.add(row, "joined", f"writer {name}")
        return
    events = count_of(sum(extent.count for extent in receipt.extents), "event")
    fold.add(row, "receipt", f"writer {name}: {events}{', finished' if receipt.finished else ''}")


def _pending(fold: _Fold, row: StatusRow) -> None:
    if not row.row.decided and fold.pending is None:
        fold.pending = row.row
        fold.add(row, "commit asked", count_of(len(row.row.writers), "writer"))


def _staged(fold: _Fold, row: StatusRow) -> None:
    if row.row.done and fold.first(Entry.STAGED_MERGE, row.identifier):
        fold.staged += 1
        events = count_of(row.row.count, "event")
        fold.add(row, "staged", f"{row.row.stream}, journal partition {row.row.source}: {events}")


def _locks(fold: _Fold, row: StatusRow) -> None:
    if isinstance(row.row, r.ReadLockRow):
        tables = ", ".join(sorted({each.table for each in row.row.locks}))
        fold.add(row, "locked", tables)


_FOLDS = {
    Entry.TERM: _leader,
    Entry.TXN: _txn,
    Entry.PARTICIPANT: _participant,
    Entry.WRITER: _writer,
    Entry.PENDING_COMMIT: _pending,
    Entry.STAGED_MERGE: _staged,
    Entry.READ_LOCK: _locks,
    Entry.PARTITION: _part,
    Entry.VOTES: _votes,
}


# -- reading ----------------------------------------------------------------------------------------------


class _Reading:
    """Reads the logs for the timeline of one transaction. ``deadline``: monotonic seconds."""

    def __init__(
        self, source: CommittedLog, info: TransactionInfo, prefix: str, deadline: float
    ) -> None:
        self._source = source
        self._info = info
        self._deadline = deadline
        self._place = TopicPartition(status_topic(prefix), control_partition_of(info.txn_id))
        self.gaps: list[str] = []

    def rows(self) -> list[StatusRow]:
        """The transaction's rows in the status log, and those of leaders since it began."""
        info, place = self._info, self._place
        first = self._source.offset_for_time(place, info.begun_ms, self._deadline)
        end = self._source.end_offsets([place], self._deadline)[place]
        if first is None:
            return []
        middle = first
        if info.finished_ms - info.begun_ms > 2 * _LAST_MS:
            late = info.finished_ms - _LAST_MS
            middle = self._source.offset_for_time(place, late, self._deadline) or first
        # The end first: that is where a commit waits.
        last = list(self._between(middle, end))
        return [*self._between(first, middle), *last]

    def _between(self, first: int, end: int) -> Iterator[StatusRow]:
        at, clock = first, self._source.clock
        while at < end:
            if clock.monotonic() >= self._deadline:
                self.gaps.append(
                    f"the status log was read up to offset {at} only, not to {end}: give it more time"
                )
                return
            found = self._source.fetch(self._place, at, self._deadline, _FETCH_BYTES)
            if found is None:
                continue
            for batch in found.batches:
                if batch.base_offset >= end:
                    return
                rows = list(self._of(batch))
                yield from rows
                if any(
                    one.entry == Entry.TXN and one.row.state in ("COMMITTED", "ABORTED")
                    for one in rows
                ):
                    return
            at = found.next_offset

    def _of(self, batch: RawBatch) -> Iterator[StatusRow]:
        """The rows of a batch that the timeline needs. Other batches are not decoded."""
        with client_errors():
            header = read_header(batch.data, whole=False)
            body = decompress(header.compression, memoryview(batch.data)[HEADER_SIZE:])
            if self._info.txn_id not in body and TERM_KEY not in body:
                return
            records: Sequence[Record] = decode_records(batch.data)
        for one in records:
            key = one.key or b""
            if one.value is not None and (key == TERM_KEY or key.startswith(self._info.txn_id)):
                _, entry, identifier = split_key(key)
                yield StatusRow(one.timestamp_ms, entry, identifier, read_row(key, one.value))

    def readable(self, streams: Iterable[str]) -> Iterator[TimelineStep]:
        """When the commit became readable in each of these streams that has events of it."""
        at = self._info.commit_timestamp
        for stream in streams:
            left = self._deadline - self._source.clock.monotonic()
            if left <= 0:
                self.gaps.append(f"the history of {stream} was not read: give it more time")
                return
            try:
                ms = self._marker_ms(stream, at, left)
            except AnabranchError as error:  # the stream may be LOST, or deleted since
                self.gaps.append(f"the history of {stream} can't be read: {error}")
                continue
            if ms is not None:
                yield TimelineStep(ms, "broker", "readable", stream)

    def _marker_ms(self, stream: str, timestamp: int, timeout: float) -> int | None:
        """The time of the marker that ended the round of a commit; None if this stream has no event of it.

        Fetches leave markers out, but a search by time finds them: so the marker's time is found by bisection.
        """
        place = TopicPartition(history_topic(stream), 0)
        search = HistorySearch(self._source, stream, timeout)
        commit = next(iter(search.between(timestamp - 1, timestamp)), None)
        if commit is None or getattr(commit.record, "txn_id", NO_TXN) != self._info.txn_id:
            return None
        marker, low = commit.offset + 1, to_ms(commit.record.timestamp)
        for later in search.since(marker):
            if later.offset != marker:
                break
            marker, low = marker + 1, to_ms(later.record.timestamp)

        def is_later(ms: int) -> bool:
            """Whether the marker's time is at or after ``ms``; records up to ``low`` are before."""
            found = self._source.offset_for_time(place, ms, self._deadline)
            return found is not None and found <= marker

        if not is_later(low + 1):
            self.gaps.append(
                f"{stream} was readable in the millisecond of the commit timestamp, or the broker's clock is "
                "earlier than the controller's"
            )
            return None
        span = 1
        while span < _LATEST_MS and is_later(low + 1 + span):
            span *= 2
        low, high = low + 1 + span // 2, low + 1 + span
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if is_later(middle) else (low, middle)
        return low


def read_timeline(
    source: CommittedLog,
    info: TransactionInfo,
    streams: Sequence[str],
    prefix: str,
    deadline: float,
    waits: r.WaitInfo | None = None,
) -> Timeline:
    """The timeline of a transaction. Its ``gaps`` name the logs that can't be read.

    ``streams``: where it may have events. ``waits``: what its decided commit waits for at present. ``deadline``:
    monotonic seconds; then the timeline ends with what was read. Raises: NotReady, UnsupportedVersion.
    """
    reading = _Reading(source, info, prefix, deadline)
    steps = [TimelineStep(made_ms_of(info.txn_id), "client", "id made")]
    rows: list[StatusRow] = []
    try:
        rows = reading.rows()
    except (NotAuthorized, NotReady) as error:
        reading.gaps.append(f"the status log can't be read: {error}")
    steps += steps_of(rows) if rows else _known(info)
    if (
        rows
        and info.state == "COMMITTED"
        and info.streams
        and "decided" not in (s.what for s in steps)
    ):
        reading.gaps.append(
            "the status log is compacted here: of steps that change one row, only the last is there"
        )
    if info.commit_timestamp:
        steps += reading.readable(streams)
    waiting = "" if waits is None else waits.text
    return Timeline(info.txn_id, tuple(steps), waiting, tuple(reading.gaps))


def _known(info: TransactionInfo) -> Iterator[TimelineStep]:
    """The steps that a controller's answer has, where the status log can't be read."""
    last = "merged" if info.state == "COMMITTED" else "aborted"
    for at_ms, what, about in (
        (info.begun_ms, "begun", ""),
        (info.prepared_ms, "prepared", ""),
        (info.finished_ms, last, info.reason),
    ):
        if at_ms:
            yield TimelineStep(at_ms, "controller", what, about)
