"""The locks of one process of a transaction on tables: what it read, and whether the replica has newer versions.

A short transaction sends its `Locks` with its commit. A long one registers them with the controller first, by
`RegisteredLocks`, which validates them again when the controller asks for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field

from anabranch.client.row_chain import SentRows
from anabranch.client.shared import Shared
from anabranch.core.locks.table_writes import fingerprint
from anabranch.core.transaction_states import locks_broken
from anabranch.errors import (
    AnabranchError,
    LocksBroken,
    RetryError,
    TooManyLocks,
    TransactionAborted,
)
from anabranch.protocol import limits
from anabranch.protocol.hybrid_time import to_text
from anabranch.protocol.ids import txn_text
from anabranch.protocol.schemas import records as r
from anabranch.tables.replica import ReadReplica
from anabranch.tables.snapshot import TableSnapshot
from anabranch.tables.store import Seen

_PARTS = 16  # ranges that a scan registers while it grows; then its whole range is registered


class Span:
    """A range of keys that is being read: so far from ``low`` up to ``high`` (None: to the end)."""

    __slots__ = ("_whole", "high", "low", "registered")

    def __init__(self, low: bytes, high: bytes | None) -> None:
        self.low, self.high = low, high
        self._whole = low, high
        self.registered: Sequence[r.LockedRange] = ()

    @property
    def record(self) -> r.LockedRange:
        """The range for the next command: the part read so far; after `_PARTS` parts, the scan's whole range."""
        part = r.LockedRange(self.low, self.high)
        is_part = len(self.registered) < _PARTS or part in self.registered
        return part if is_part else r.LockedRange(*self._whole)


class Locks:
    """The locks by table: points, each a key, and ranges. One thread at a time."""

    def __init__(self) -> None:
        self._points: dict[str, set[bytes]] = {}
        self._spans: dict[str, list[Span]] = {}
        self._whole: set[str] = set()  # tables that are locked as a whole
        self._count = 0
        self._registered: set[tuple[str, int]] = set()  # points
        self._followed: dict[tuple[str, bytes], SentRows] = {}  # by table and key
        self._followed_of: set[tuple[bytes, str]] = set()  # transactions and tables of these
        self._resolved: set[tuple[str, bytes]] = set()  # followed rows that are validated as points

    def point(self, table: str, key: bytes) -> None:
        """Lock a key, whether it has a row or not. Raises `TooManyLocks`."""
        points = self._points.setdefault(table, set())
        if key not in points and table not in self._whole:
            self._one_more()
            points.add(key)

    def follow(self, table: str, key: bytes, sent: SentRows) -> None:
        """Lock a key since a commit that is under way. Raises: TooManyLocks."""
        if (table, key) not in self._followed:
            self._one_more()
            self._followed[table, key] = sent
            self._followed_of.add((sent.txn_id, table))

    @property
    def follows_count(self) -> int:
        """How many entries `follows` has at most."""
        return len(self._followed_of)

    @property
    def followed(self) -> Collection[SentRows]:
        """The commits under way whose rows were read."""
        return self._followed.values()

    def span(self, table: str, low: bytes, high: bytes | None) -> Span:
        """Lock a range, which the caller may extend later. Raises `TooManyLocks`."""
        self._one_more()
        self._spans.setdefault(table, []).append(span := Span(low, high))
        return span

    def whole(self, table: str) -> None:
        """Lock a table; then keys of it need no locks of their own. Raises `TooManyLocks`."""
        if table not in self._whole:
            self.span(table, b"", None)
            self._whole.add(table)

    def _one_more(self) -> None:
        if self._count >= limits.LOCKS.value:
            raise TooManyLocks(
                f"the transaction has {self._count:,} locks, and may have no more: scan a range instead, or read "
                "with lock=False"
            )
        self._count += 1

    def validate(
        self, view: TableSnapshot, marks: Mapping[str, tuple[int, int]] | None = None
    ) -> LocksBroken | None:
        """The error if the replica has a version, later than the snapshot, of a locked key or range; else None.

        ``marks``: as for `records`. If the marks show no commit later than the snapshot, nothing is searched: the
        controller checks what is later than the marks. A table whose mark has no commit is being loaded again.
        Keys that follow a commit are searched once the marks include that commit.
        """
        if self._followed and marks is not None:
            found = self._validate_followed(view, marks)
            if found is not None:
                return found
        if marks is not None and all(0 < last <= view.timestamp for _, last in marks.values()):
            return None
        for table, keys in self._points.items():
            for key in keys:
                seen = view.get_version(table, key)
                if seen.timestamp > view.timestamp:
                    return broken(table, seen, view.timestamp)
        for table, spans in self._spans.items():
            for span in spans:
                for seen in view.walk(table, span.low, span.high):
                    if seen.timestamp > view.timestamp:
                        return broken(table, seen, view.timestamp)
        return None

    def _validate_followed(
        self, view: TableSnapshot, marks: Mapping[str, tuple[int, int]]
    ) -> LocksBroken | None:
        self._resolved.clear()
        for (table, key), sent in self._followed.items():
            at = sent.committed_at
            if sent.has_failed:
                return LocksBroken(
                    f"{table} {key!r:.100} was read as {txn_text(sent.txn_id)} writes it, which is not committed: "
                    "begin again",
                    table=table,
                    key=key,
                )
            if at and marks[table][0] >= at:
                seen = view.get_version(table, key)
                if seen.timestamp > at:
                    return broken(table, seen, at)
                self._resolved.add((table, key))
        return None

    def follows(self) -> tuple[r.FollowedRows, ...]:
        """The keys that `validate` has not found to be points, for a command."""
        if not self._followed:
            return ()
        found: dict[tuple[bytes, str], set[int]] = {}
        for row, sent in self._followed.items():
            if row not in self._resolved:
                found.setdefault((sent.txn_id, row[0]), set()).add(fingerprint(row[1]))
        return tuple(r.FollowedRows(*of, tuple(sorted(its))) for of, its in sorted(found.items()))

    def key_of(self, table: str, point: int) -> bytes:
        """The key of the lock with this fingerprint; empty without one."""
        keys: list[bytes] = [*self._points.get(table, ())]
        keys += [key for its, key in self._followed if its == table]
        for key in keys:
            if fingerprint(key) == point:
                return key
        return b""

    @property
    def tables(self) -> set[str]:
        """The locked tables."""
        return {*self._points, *self._spans, *[table for table, _ in self._followed]}

    def fresh(self, tables: Collection[str]) -> tuple[r.TableLocks, ...]:
        """As many unregistered locks of these tables as fit into a command; empty if all are registered."""
        left = limits.LOCK_BYTES.value
        found: list[r.TableLocks] = []
        for table in sorted({*self._points, *self._spans} & {*tables}):
            known = self._registered
            prints = {fingerprint(key) for key in self._points.get(table, ())}
            points = sorted(each for each in prints if (table, each) not in known)[: left // 8]
            left -= 8 * len(points)
            spans = [s.record for s in self._spans.get(table, ()) if s.record not in s.registered]
            ranges: list[r.LockedRange] = []
            for span in joined(spans):
                left -= len(span.low) + len(span.high or b"")
                # A single range that is too big is sent, and refused by the controller.
                if left < 0 and (found or points or ranges):
                    break
                ranges.append(span)
            if points or ranges:
                found.append(r.TableLocks(table, 0, 0, tuple(points), tuple(ranges)))
            if left <= 0:
                break
        return tuple(found)

    def registered(self, locks: Iterable[r.TableLocks]) -> None:
        """Note that these locks, and all within them, are registered."""
        for each in locks:
            self._registered.update((each.table, point) for point in each.points)
            for span in self._spans.get(each.table, ()):
                record = span.record
                known = record in span.registered
                if not known and any(_covers(whole, record) for whole in each.ranges):
                    span.registered = (*span.registered, record)

    def records(
        self, tables: Sequence[str], marks: Mapping[str, tuple[int, int]]
    ) -> tuple[r.TableLocks, ...]:
        """The locks for a command. ``marks``: table -> (time validated through, the replica's newest commit of it).

        All tables are named, so that the answer has the newest commits of tables without a lock, too.
        """
        keys = {table: [*self._points.get(table, ())] for table in tables}
        for table, key in self._resolved:
            keys[table].append(key)
        return tuple(
            r.TableLocks(
                table,
                *marks[table],
                tuple(sorted(set(map(fingerprint, keys[table])))),
                joined(self._spans.get(table, ())),
            )
            for table in sorted(tables)
        )


def _covers(whole: r.LockedRange, part: r.LockedRange) -> bool:
    if whole.low > part.low:
        return False
    return whole.high is None or (part.high is not None and part.high <= whole.high)


def broken(table: str, seen: Seen, snapshot: int) -> LocksBroken:
    """The error for a row that was read at a snapshot, and written later."""
    return LocksBroken(
        f"{table} {seen.key!r:.100} was read as of {to_text(snapshot)}, and written by {txn_text(seen.txn_id)} at "
        f"{to_text(seen.timestamp)}: begin again",
        table=table,
        key=seen.key,
        by=seen.txn_id,
        commit_timestamp=seen.timestamp,
    )


def joined(spans: Iterable[Span | r.LockedRange]) -> tuple[r.LockedRange, ...]:
    """The union of ranges as a command needs it: rising and disjoint."""
    found: list[r.LockedRange] = []
    for span in sorted(spans, key=lambda span: span.low):
        before = found[-1] if found else None
        if before is None or (before.high is not None and span.low > before.high):
            found.append(r.LockedRange(span.low, span.high))
        elif before.high is not None and (span.high is None or span.high > before.high):
            found[-1] = r.LockedRange(before.low, span.high)
    return tuple(found)


@contextmanager
def explained(
    shared: Shared, token: bytes, places: Iterable[int | None] = (None,)
) -> Iterator[None]:
    """Make an error about broken locks name the lock, and the transaction that broke it.

    ``places``: the control partitions where the transaction has locks; None: its own one.
    """
    try:
        yield
    except (TransactionAborted, LocksBroken) as error:
        if isinstance(error, LocksBroken) and error.table:
            raise
        for place in places:
            answer = None
            with suppress(AnabranchError):
                deadline, question = shared.deadline(None), r.ListLocks(token, 0, 0)
                answer = shared.session.lock_reads(question, deadline, place)
            if answer is not None and answer.broken is not None:
                raise locks_broken(answer.broken) from error
        raise


def name_tables(
    shared: Shared, identity: tuple[bytes, int], tables: Sequence[str], deadline: float
) -> list[r.ReadsLocked]:
    """Make the controllers of these tables keep them readable for a transaction. Returns their answers.

    Its own controller comes first, and the others join it.
    """
    token, session = identity[0], shared.session
    return [
        session.lock_reads(r.LockReads(*identity, 0, tables=its), deadline, place)
        for place, its in session.places(token, tables, deadline).items()
    ]


class SentLocks:
    """The locks of a transaction that is sent as one command (`anabranch.client.transaction.Reads`)."""

    validated: tuple[r.Validated, ...] = ()

    def __init__(
        self, replica: ReadReplica, view: TableSnapshot, locks: Locks, tables: Sequence[str]
    ) -> None:
        """``tables``: the tables that the command names."""
        self._replica, self._view, self._locks, self._tables = replica, view, locks, tables

    def locks(self) -> tuple[r.TableLocks, ...]:
        # Take the marks before validating, so that the validation includes everything up to them.
        marks = self._replica.marks()
        found = self._locks.validate(self._view, marks)
        if found is not None:
            raise found
        return self._locks.records(self._tables, marks)

    def revalidate(self, answer: r.Revalidate, deadline: float) -> None:
        last = {each.table: each.last for each in answer.tables}
        self._replica.wait(answer.timestamp, last, deadline)


@dataclass(slots=True)
class _Place:
    """A process's locks of the tables of one control partition, each in one of three states.

    After an error the next call continues from the present one:

    - *sent*: in a command without an answer, which is repeated unchanged;
    - *registered*: the controller has it, and the replica was not searched for newer versions yet;
    - *validated* through a time. The controller may ask for a later time.

    ``number``: the control partition; None: that of the transaction. ``through``: (writer, set) -> validated
    through. ``reported``: what of it is reported; the commit reports those of the transaction's own control
    partition.
    """

    number: int | None
    tables: tuple[str, ...]
    sequence: int = 0
    sent: r.LockReads | None = None
    registered: r.ReadsLocked | None = None  # the answer
    through: dict[tuple[int, int], int] = field(default_factory=dict)
    reported: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def validated(self) -> tuple[r.Validated, ...]:
        return tuple(r.Validated(*which, through) for which, through in self.through.items())


class RegisteredLocks:
    """Registers and validates the reads of one process of an open transaction.

    Each control partition has the locks of its tables, in sets with numbers of their own.
    """

    def __init__(
        self,
        shared: Shared,
        identity: tuple[bytes, int],
        replica: ReadReplica,
        view: TableSnapshot,
        locks: Locks,
        read_from: Mapping[int, int],
    ) -> None:
        self._shared, self._session = shared, shared.session
        self._replica = replica
        self._token, self._writer = identity
        self._view, self._locks = view, locks
        self._read_from = read_from
        self._reported_from: dict[int, int] = {}
        places = shared.session.places(self._token, replica.tables, shared.deadline(None))
        self._places = [_Place(*each) for each in places.items()]
        self._home = self._places[0]

    @property
    def validated(self) -> tuple[r.Validated, ...]:
        """The validated sets, for the commit."""
        return self._home.validated

    def locks(self) -> tuple[r.TableLocks, ...]:
        """No locks: the controllers have registered them already."""
        return ()

    def flush(self, deadline: float) -> None:
        """Register what was read, validate it, and report that to the controllers.

        Then other processes may rely on what was read.

        Raises: LocksBroken, TooManyLocks, TooMuchLocked, NotReady (the replica did not catch up in time).
        """
        if self.register(deadline):
            self._report(self._home, deadline)

    def register(self, deadline: float) -> bool:
        """Register what was read, and validate it. Returns whether that was new, to report. Raises: as `flush`.

        A report to other control partitions leaves at once, as the commit does not go there.
        """
        for place in self._places:
            if place.sent is not None:
                self._register(place, place.sent, deadline)
        sources = self._fresh_sources()
        for place in self._places:
            while (locks := self._locks.fresh(place.tables)) or sources:
                command = r.LockReads(
                    self._token,
                    self._writer,
                    place.sequence + 1,
                    locks,
                    sources,
                    tables=place.tables,
                )
                self._register(place, command, deadline)
                sources = ()
        due = {place.number: place.registered for place in self._places if place.registered}
        self._validate(due, deadline)
        for place in self._places:
            place.registered = None
        self._report_elsewhere(deadline)
        return bool(due)

    def _fresh_sources(self) -> tuple[r.WriterAt, ...]:
        fresh = self._read_from.items() - self._reported_from.items()
        self._reported_from = dict(self._read_from)
        return tuple(r.WriterAt(*each) for each in sorted(fresh))

    def _register(self, place: _Place, command: r.LockReads, deadline: float) -> None:
        place.sent = command  # repeated unchanged if it is not answered
        place.registered = self._ask(command, place, deadline)
        place.sent, place.sequence = None, command.sequence
        self._locks.registered(command.locks)

    def _report_elsewhere(self, deadline: float) -> None:
        for place in self._places:
            if place is not self._home and place.reported != place.through:
                self._report(place, deadline)

    def _report(self, place: _Place, deadline: float) -> None:
        through = dict(place.through)
        self._ask(
            r.LockReads(self._token, self._writer, 0, validated=place.validated), place, deadline
        )
        place.reported = through

    def explained(self) -> AbstractContextManager[None]:
        """As the function `explained`, for this transaction."""
        return explained(self._shared, self._token, [place.number for place in self._places])

    def _ask(self, command: r.LockReads, place: _Place, deadline: float) -> r.ReadsLocked:
        with self.explained():
            answer = self._session.lock_reads(command, deadline, place.number)
        if answer.broken is not None:
            raise locks_broken(answer.broken)
        return answer

    def check_open(self, deadline: float) -> None:
        """If the controller answers that the transaction is over, raise the error for that."""
        with suppress(RetryError, LocksBroken), self.explained():
            self._session.lock_reads(r.LockReads(self._token, self._writer, 0), deadline)

    def _validate(
        self, reported: Mapping[int | None, r.ReadsLocked | r.Revalidate], deadline: float
    ) -> None:
        """Validate all locks of this process through the times that controllers reported, by their places."""
        for answer in reported.values():
            last = {each.table: each.last for each in answer.tables}
            self._replica.wait(answer.timestamp, last, deadline)
        if not reported:
            return
        with self._shown() as view:
            found = self._locks.validate(view)
        if found is not None:
            raise found
        for place in self._places:
            if place.number in reported:
                its = {which: at for which, at in place.through.items() if which[0] != self._writer}
                if place.sequence:
                    its[self._writer, place.sequence] = reported[place.number].timestamp
                place.through = its

    @contextmanager
    def _shown(self) -> Iterator[TableSnapshot]:
        """The snapshot, or an equal one once it is closed: `commit` and `finish` may follow the ``with`` block."""
        if self._view.is_open:
            yield self._view
        else:
            with self._replica.snapshot(at=self._view.timestamp) as view:
                yield view.in_place_of(self._view)

    # -- validation for a commit --------------------------------------------------------------------------

    def revalidate(self, answer: r.Revalidate, deadline: float) -> None:
        """Validate the locks of the writers that a controller names, also of processes that have ended.

        With several control partitions any of them may have asked: then the locks are validated at all of them.
        """
        reported: dict[int | None, r.ReadsLocked | r.Revalidate] = {None: answer}
        if len(self._places) > 1:
            for place in self._places:
                question = r.LockReads(self._token, self._writer, 0, tables=place.tables)
                reported[place.number] = self._ask(question, place, deadline)
        self._validate(reported, deadline)
        for place in self._places:
            for writer in answer.writers:
                if writer != self._writer:
                    through = reported[place.number].timestamp
                    self._validate_of(place, writer, through, deadline)
        self._report_elsewhere(deadline)

    def _validate_of(self, place: _Place, writer: int, through: int, deadline: float) -> None:
        """Validate the locks of another writer, of whose keys only fingerprints are known here."""
        sequence = 0
        while True:
            question = r.ListLocks(self._token, writer, sequence)
            answer = self._session.lock_reads(question, deadline, place.number)
            if answer.broken is not None:
                raise locks_broken(answer.broken)
            if not answer.sequence:
                break
            sequence = answer.sequence
            for locks in answer.locks:
                self._search(locks)
        place.through[writer, sequence] = through

    def _search(self, locks: r.TableLocks) -> None:
        points, snapshot = set(locks.points), self._view.timestamp
        everything = (r.LockedRange(b"", None),) if points else ()
        with self._shown() as view:
            for span in (*everything, *locks.ranges):
                whole = span in everything
                for seen in view.walk(locks.table, span.low, span.high):
                    if seen.timestamp > snapshot and (not whole or fingerprint(seen.key) in points):
                        raise broken(locks.table, seen, snapshot)
