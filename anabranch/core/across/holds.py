"""Holds: the timestamps on a stream that are given, and not merged yet.

An *entry* is such a timestamp. A prepare timestamp is an *open* entry: the commit will not be earlier. An entry is
*fixed* if the commit is decided, or if a commit that waits here has *taken* the timestamp. Merges of a stream go in
the order of (timestamp, id), and none goes past an open entry.

No wait is part of a cycle: merges wait for decisions, decisions and votes wait for no merge (H3).

A leader keeps `Holds` in memory (`core.memory`): a successor makes the entries of promises and decisions again from
rows (`entry_of`), and forgets commits that wait here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Any, NamedTuple

from anabranch.core.round import ReplyTo
from anabranch.errors import InvariantViolation
from anabranch.protocol.schemas import records as r

# A waiting commit keeps the timestamp that it took for this long. If it kept none, it would never be merged into a
# stream that always has an open entry. If it kept it without end, a coordinator that is down would stop it, then
# the commits that wait for it, and so on (H4).
KEPT_MS = 100
_NONE: dict[Any, Any] = {}


class Entry(NamedTuple):
    """A timestamp of a transaction on its streams. ``since_ms``: when a waiting commit took it; -1: it did not."""

    timestamp: int
    txn_id: bytes
    fixed: bool
    since_ms: int = -1


def entry_of(
    row: r.TxnRow, promise: r.CoordinatorRow | None, votes_row: r.VotesRow | None
) -> Entry | None:
    """The entry that a transaction's rows give on the streams that it writes; None: it holds nothing.

    So a successor holds the same streams. ``promise``: of a participant; ``votes_row``: of a coordinator.
    """
    if row.state not in ("PREPARED", "FINALIZE_IN_PROGRESS"):
        return None
    if row.state == "FINALIZE_IN_PROGRESS" and row.commit_timestamp:
        merged = votes_row is not None and votes_row.own_merged
        return None if merged else Entry(row.commit_timestamp, row.txn_id, fixed=True)
    if promise is None or not promise.prepare_timestamp:
        return None
    return Entry(promise.prepare_timestamp, row.txn_id, fixed=False)


class WaitingShot(NamedTuple):
    """A one-shot that waits with its timestamp. The leader decides it again when it may go, as if it came then.

    ``lane``, ``seen``, ``size``: as `Turn` has them while the command is decided. ``streams``: the streams to which
    the one-shot writes, and the tables that it locks.
    """

    command: r.OneShot
    to: ReplyTo | None
    lane: str
    seen: int | None
    size: int
    streams: tuple[str, ...]


class _Line(NamedTuple):
    """The entries on a stream: open ones and fixed ones, each in their order. A change makes another `_Line`."""

    open: tuple[Entry, ...] = ()
    fixed: tuple[Entry, ...] = ()

    def with_(self, entry: Entry) -> _Line:
        if entry.fixed:
            return self._replace(fixed=_added(self.fixed, entry))
        return self._replace(open=_added(self.open, entry))

    def without(self, entry: Entry) -> _Line:
        if entry.fixed:
            return self._replace(fixed=_removed(self.fixed, entry))
        return self._replace(open=_removed(self.open, entry))


def _added(entries: tuple[Entry, ...], entry: Entry) -> tuple[Entry, ...]:
    at = bisect_left(entries, entry)
    return (*entries[:at], entry, *entries[at:])


def _removed(entries: tuple[Entry, ...], entry: Entry) -> tuple[Entry, ...]:
    at = bisect_left(entries, entry)
    return (*entries[:at], *entries[at + 1 :])


_NO_ENTRIES = _Line()


class Holds:
    """The entries of all streams of a control partition. A transaction has one timestamp, on several streams.

    A turn changes a draft, as of the other parts of the memory. Its first change copies the dicts. The entries on a
    stream are in order, so the work of a turn grows with the number of entries that end, not with that of all.

    ``in_use``: whether there is anything at all; if not, nothing else needs to be asked. ``time``: the highest
    timestamp that was taken here: hybrid time is not below it. ``shots``: waiting one-shots; ``size``: their bytes.
    ``freed``: the streams on which an entry has ended since the waiting commits were decided last.
    """

    # Shared by all that has no entries, so that a draft of those costs nothing.
    _of: dict[str, _Line] = _NONE
    _entries: dict[bytes, tuple[Entry, tuple[str, ...]]] = _NONE
    # When each waiting commit took its timestamp, in the order of time.
    _taken: dict[bytes, int] = _NONE
    # Commits that gave their timestamp back after `KEPT_MS`, and wait without one.
    _late: frozenset[bytes] = frozenset()
    shots: dict[bytes, WaitingShot] = _NONE
    # Entries of one-shots, by the streams for which they wait.
    _waiters: dict[str, tuple[Entry, ...]] = _NONE
    size = 0
    in_use = False
    freed: frozenset[str] = frozenset()
    time = 0
    _shared = True  # whether the dicts are also of the holds below

    def draft(self) -> Holds:
        """A copy that a turn may change."""
        found = Holds()
        if self.in_use:
            found.follow(self)
        return found

    def follow(self, draft: Holds) -> None:
        """Apply the changes of a draft of this."""
        self._of, self._entries, self._taken = draft._of, draft._entries, draft._taken
        self._late, self.in_use, self.time = draft._late, draft.in_use, draft.time
        self.shots, self._waiters, self.size = draft.shots, draft._waiters, draft.size
        self.freed = draft.freed
        self._shared = True

    def rebase(self) -> None:
        """Nothing: a draft does not look at what is below it."""

    def _own(self) -> None:
        """Copy what is shared, before a change."""
        if self._shared:
            self._of, self._entries, self._taken = {**self._of}, {**self._entries}, {**self._taken}
            self.shots, self._waiters = {**self.shots}, {**self._waiters}
            self._shared = False

    def _note(self) -> None:
        self.in_use = bool(self._entries or self._late)

    def put(self, txn_id: bytes, streams: Iterable[str], entry: Entry | None) -> None:
        """Replace the entry of a transaction; None: it is merged, aborted, or its timestamp is taken back."""
        if entry is None and txn_id not in self._entries:
            return
        self._own()
        former, held = self._entries.pop(txn_id, (None, ()))
        if former is not None:
            self.freed |= {*held}
            self._taken.pop(txn_id, None)
            self._drop_waiter(txn_id, former)
            for stream in held:
                left = self._of[stream].without(former)
                if left.open or left.fixed:
                    self._of[stream] = left
                else:
                    del self._of[stream]
        if entry is not None:
            self._entries[txn_id] = entry, tuple(streams)
            if entry.since_ms >= 0:
                self._taken[txn_id] = entry.since_ms
            for stream in self._entries[txn_id][1]:
                self._of[stream] = self._of.get(stream, _NO_ENTRIES).with_(entry)
        self._note()

    def on(self, streams: Iterable[str] | None = None) -> Iterator[Entry]:
        """The entries on these streams; None: on all."""
        for stream in self._of if streams is None else streams:
            line = self._of.get(stream, _NO_ENTRIES)
            yield from line.open
            yield from line.fixed

    @property
    def streams(self) -> int:
        """The number of streams with entries."""
        return len(self._of)

    def of(self, txn_id: bytes) -> Entry | None:
        """The entry of a transaction."""
        found = self._entries.get(txn_id)
        return found[0] if found else None

    def open_on(self, stream: str) -> Entry | None:
        """The first open entry on a stream: its transaction is not decided."""
        line = self._of.get(stream, _NO_ENTRIES)
        return line.open[0] if line.open else None

    def first(
        self, streams: Iterable[str], at: int, txn_id: bytes = b""
    ) -> tuple[str, Entry] | None:
        """A stream, and the entry on it, for which a commit at a timestamp has to wait (H1); None: it may go."""
        for stream in streams:
            if (line := self._of.get(stream)) is None:
                continue
            # The first entry of each kind decides, or the second one if the first is its own.
            for entry in line.open[:2]:
                if entry.txn_id != txn_id and entry.timestamp <= at:
                    return stream, entry
            for entry in line.fixed[:2]:
                if entry.txn_id != txn_id and (entry.timestamp, entry.txn_id) < (at, txn_id):
                    return stream, entry
        return None

    def may_go(self, at: int, txn_id: bytes, streams: Iterable[str]) -> bool:
        """Whether a commit at a timestamp may be merged now (H1, H2, L1).

        ``streams``: the streams that the commit writes, and the tables that it locks. Two coordinators may choose
        the same timestamp; then the lower id goes first.
        """
        return self.first(streams, at, txn_id) is None

    def admit(
        self,
        txn_id: bytes,
        streams: Collection[str],
        locked: Iterable[str],
        now_ms: int,
        fresh: int,
    ) -> int | None:
        """The timestamp with which a commit may be merged now; None: it waits, and keeps what it took (H4).

        ``fresh``: a timestamp later than all that were given here. The caller lets hybrid time reach it, whatever
        the answer is. ``now_ms``: a monotonic clock.
        """
        mine = self.of(txn_id)
        at = fresh if mine is None else mine.timestamp
        if self.may_go(at, txn_id, (*streams, *locked)):
            self.give_up(txn_id)
            return at
        if mine is None and txn_id not in self._late:
            self.time = max(self.time, at)
            self.put(txn_id, streams, Entry(at, txn_id, fixed=True, since_ms=now_ms))
        return None

    def expire(self, now_ms: int) -> list[bytes]:
        """Take back timestamps that waiting commits have had for `KEPT_MS`. Returns these commits.

        No client has received them. A one-shot is then refused. Another commit still waits, and gets a new one when
        it is merged.
        """
        until_ms = now_ms - KEPT_MS
        return self.take_back(
            [txn_id for txn_id, _ in takewhile(lambda one: one[1] <= until_ms, self._taken.items())]
        )

    def take_back(self, txn_ids: Iterable[bytes]) -> list[bytes]:
        """Take back the timestamps of these waiting commits, and return them."""
        late = set(txn_ids)
        for txn_id in late:
            self.put(txn_id, (), None)
        if late:
            self._late |= late
            self._note()
        return sorted(late)

    def due_ms(self, now_ms: int) -> int | None:
        """Milliseconds until a timestamp is taken back; None: no commit has one."""
        since_ms = next(iter(self._taken.values()), None)
        return None if since_ms is None else max(0, since_ms + KEPT_MS - now_ms)

    def wait(self, txn_id: bytes, shot: WaitingShot) -> None:
        """Keep a one-shot that waits with its timestamp, in place of a former copy of its command."""
        self.take_shot(txn_id)
        entry = self.of(txn_id)
        if entry is None:
            raise InvariantViolation("a one-shot waits without a timestamp")
        self._own()
        self.shots[txn_id] = shot
        self.size += shot.size
        for stream in {*shot.streams}:
            self._waiters[stream] = _added(self._waiters.get(stream, ()), entry)

    def take_shot(self, txn_id: bytes) -> None:
        """Remove a one-shot that waits, if it does: it is decided again now, or refused. Its timestamp stays."""
        if txn_id not in self.shots:
            return
        self._own()
        if (entry := self.of(txn_id)) is not None:
            self._drop_waiter(txn_id, entry)
        self.size -= self.shots.pop(txn_id).size

    def _drop_waiter(self, txn_id: bytes, entry: Entry) -> None:
        shot = self.shots.get(txn_id)
        for stream in {*shot.streams} if shot is not None else ():
            left = _removed(self._waiters[stream], entry)
            if left:
                self._waiters[stream] = left
            else:
                del self._waiters[stream]

    def shots_on(self, streams: Iterable[str]) -> list[Entry]:
        """The one-shots that wait for these streams, and have no earlier entry there that they still wait for."""
        found = set()
        for stream in streams:
            line, waiters = self._of.get(stream, _NO_ENTRIES), self._waiters.get(stream, ())
            ends = [entry.timestamp for entry in line.open[:1]]
            ends += [one.timestamp for one in line.fixed[:1] if one.txn_id not in self.shots]
            for waiter in waiters:
                if ends and waiter.timestamp > min(ends):
                    break
                found.add(waiter)
        return sorted(found)

    def give_up(self, txn_id: bytes) -> None:
        """Forget a commit that waits, because it is merged, refused or aborted."""
        self.take_shot(txn_id)
        self.put(txn_id, (), None)
        self._late -= {txn_id}
        self._note()

    def safe_time(self, hybrid_time: int, streams: Collection[str] | None = None) -> int:
        """The time up to which nothing more will be merged into these streams (None: into any) (H5)."""
        lines = [
            self._of.get(one, _NO_ENTRIES) for one in (self._of if streams is None else streams)
        ]
        firsts = [
            entry.timestamp - 1 for line in lines for entry in (*line.open[:1], *line.fixed[:1])
        ]
        return min([hybrid_time, *firsts])


def instant(answers: Mapping[int, int], seen: int, at: int | None = None) -> tuple[int, list[int]]:
    """The time of a snapshot over several control partitions, and the partitions below it, to be asked again (T2).

    ``answers``: by control partition, what each answered to `SafeTime` of now, for its streams. Such an answer is
    fixed there, even if it is not safe yet. ``seen``: the highest time that the client has received. ``at``: the
    time that the client wants, if it does not want the present one.
    """
    at = max([seen, *answers.values()]) if at is None else at
    return at, sorted(partition for partition, time in answers.items() if time < at)
