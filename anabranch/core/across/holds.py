"""Holds: the timestamps on a stream that are given, and not merged yet.

An *entry* is such a timestamp. A prepare timestamp is an *open* entry: the commit will not be earlier. An entry is
*fixed* if the commit is decided, or if a commit that waits here has *taken* the timestamp. Merges of a stream go in
the order of (timestamp, id), and none goes past an open entry.

No wait is part of a cycle: merges wait for decisions, decisions and votes wait for no merge (H3).

A leader keeps `Holds` in memory (`core.memory`): a successor makes the entries of promises and decisions again from
rows (`entry_of`), and forgets commits that wait here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from anabranch.core.round import ReplyTo
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


def entry_of(row: r.TxnRow, its: r.CoordinatorRow | None, votes: r.VotesRow | None) -> Entry | None:
    """The entry that a transaction's rows give on the streams that it writes; None: it holds nothing.

    So a successor holds the same streams. ``its``: the promise of a participant; ``votes``: of a coordinator.
    """
    if row.state not in ("PREPARED", "FINALIZE_IN_PROGRESS"):
        return None
    if row.state == "FINALIZE_IN_PROGRESS" and row.commit_timestamp:
        merged = votes is not None and votes.own_merged
        return None if merged else Entry(row.commit_timestamp, row.txn_id, fixed=True)
    if its is None or not its.prepare_timestamp:
        return None
    return Entry(its.prepare_timestamp, row.txn_id, fixed=False)


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


class Holds:
    """The entries of all streams of a control partition. A transaction has one timestamp, on several streams.

    A turn changes a draft, as of the other parts of the memory. There are few entries, so a draft copies them all
    when it is changed first. ``in_use``: whether there is anything at all; if not, nothing else needs to be asked.
    ``time``: the highest timestamp that was taken here: hybrid time is not below it. ``shots``: waiting one-shots.
    ``freed``: whether an entry ended in this turn.
    """

    # Shared by all that has no entries, so that a draft of those costs nothing.
    _of: dict[str, dict[bytes, Entry]] = _NONE
    _streams: dict[bytes, tuple[str, ...]] = _NONE
    # Commits that gave their timestamp back after `KEPT_MS`, and wait without one.
    _late: frozenset[bytes] = frozenset()
    shots: dict[bytes, WaitingShot] = _NONE
    in_use = False
    freed = False
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
        self._of, self._streams, self._late = draft._of, draft._streams, draft._late
        self.shots, self.in_use, self.time = draft.shots, draft.in_use, draft.time
        self._shared = True

    def rebase(self) -> None:
        """Nothing: a draft does not look at what is below it."""

    def _own(self) -> None:
        """Copy what is shared, before a change."""
        if self._shared:
            self._of = {stream: dict(its) for stream, its in self._of.items()}
            self._streams, self.shots = dict(self._streams), dict(self.shots)
            self._shared = False

    def _note(self) -> None:
        self.in_use = bool(self._streams or self._late)

    def put(self, txn_id: bytes, streams: Iterable[str], entry: Entry | None) -> None:
        """Replace the entry of a transaction; None: it is merged, aborted, or its timestamp is taken back."""
        self._own()
        self.freed |= txn_id in self._streams
        for stream in self._streams.pop(txn_id, ()):
            its = self._of[stream]
            del its[txn_id]
            if not its:
                del self._of[stream]
        if entry is not None:
            self._streams[txn_id] = tuple(streams)
            for stream in self._streams[txn_id]:
                self._of.setdefault(stream, {})[txn_id] = entry
        self._note()

    def on(self, streams: Iterable[str] | None = None) -> Iterator[Entry]:
        """The entries on these streams; None: on all."""
        for stream in self._of if streams is None else streams:
            yield from self._of.get(stream, {}).values()

    @property
    def streams(self) -> int:
        """The number of streams with entries."""
        return len(self._of)

    def of(self, txn_id: bytes) -> Entry | None:
        """The entry of a transaction."""
        streams = self._streams.get(txn_id)
        return self._of[streams[0]][txn_id] if streams else None

    def open_on(self, stream: str) -> Entry | None:
        """The first open entry on a stream: its transaction is not decided."""
        return min((one for one in self.on([stream]) if not one.fixed), default=None)

    def first(
        self, streams: Iterable[str], at: int, txn_id: bytes = b""
    ) -> tuple[str, Entry] | None:
        """A stream, and the entry on it, for which a commit at a timestamp has to wait (H1); None: it may go."""
        for stream in streams:
            for entry in self._of.get(stream, {}).values():
                if entry.txn_id != txn_id and (
                    (entry.timestamp, entry.txn_id) < (at, txn_id)
                    if entry.fixed
                    else entry.timestamp <= at
                ):
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
        since_ms = now_ms - KEPT_MS
        return self.take_back(e.txn_id for e in self.on() if 0 <= e.since_ms <= since_ms)

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
        taken = [entry.since_ms for entry in self.on() if entry.since_ms >= 0]
        return max(0, min(taken) + KEPT_MS - now_ms) if taken else None

    def wait(self, txn_id: bytes, shot: WaitingShot) -> None:
        """Keep a one-shot that waits with its timestamp, in place of a former copy of its command."""
        self._own()
        self.shots[txn_id] = shot

    def take_shot(self, txn_id: bytes) -> WaitingShot:
        """A waiting one-shot, which is decided again now; its timestamp stays."""
        self._own()
        return self.shots.pop(txn_id)

    def give_up(self, txn_id: bytes) -> None:
        """Forget a commit that waits, because it is merged, refused or aborted."""
        self.put(txn_id, (), None)
        self._late -= {txn_id}
        self.shots.pop(txn_id, None)
        self._note()

    def safe_time(self, hybrid_time: int, streams: Collection[str] | None = None) -> int:
        """The time up to which nothing more will be merged into these streams (None: into any) (H5)."""
        return min([hybrid_time, *[entry.timestamp - 1 for entry in self.on(streams)]])


def instant(answers: Mapping[int, int], seen: int, at: int | None = None) -> tuple[int, list[int]]:
    """The time of a snapshot over several control partitions, and the partitions below it, to be asked again (T2).

    ``answers``: by control partition, what each answered to `SafeTime` of now, for its streams. Such an answer is
    fixed there, even if it is not safe yet. ``seen``: the highest time that the client has received. ``at``: the
    time that the client wants, if it does not want the present one.
    """
    at = max([seen, *answers.values()]) if at is None else at
    return at, sorted(partition for partition, time in answers.items() if time < at)
