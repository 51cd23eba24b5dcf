"""Holds: the timestamps on a stream that are given, and not merged yet.

An *entry* is such a timestamp. A prepare timestamp is an *open* entry: the commit will not be earlier. An entry is
*fixed* if the commit is decided, or if a commit that waits here has *taken* the timestamp. Merges of a stream go in
the order of (timestamp, id), and none goes past an open entry.

No wait is part of a cycle: merges wait for decisions, decisions and votes wait for no merge (H3).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from anabranch.protocol.schemas import records as r

# A waiting commit keeps the timestamp that it took for this long. If it kept none, it would never be merged into a
# stream that always has an open entry. If it kept it without end, a coordinator that is down would stop it, then
# the commits that wait for it, and so on (H4).
KEPT_MS = 100


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


class Holds:
    """The entries of all streams of a control partition. A transaction has one timestamp, on several streams."""

    def __init__(self) -> None:
        self._of: dict[str, dict[bytes, Entry]] = {}
        self._streams: dict[bytes, tuple[str, ...]] = {}
        # Commits that gave their timestamp back after `KEPT_MS`, and wait without one.
        self._late: set[bytes] = set()

    def put(self, txn_id: bytes, streams: Iterable[str], entry: Entry | None) -> None:
        """Replace the entry of a transaction; None: it is merged, aborted, or its timestamp is taken back."""
        for stream in self._streams.pop(txn_id, ()):
            its = self._of[stream]
            del its[txn_id]
            if not its:
                del self._of[stream]
        if entry is not None:
            self._streams[txn_id] = tuple(streams)
            for stream in self._streams[txn_id]:
                self._of.setdefault(stream, {})[txn_id] = entry

    def on(self, streams: Iterable[str] | None = None) -> Iterator[Entry]:
        """The entries on these streams; None: on all."""
        for stream in self._of if streams is None else streams:
            yield from self._of.get(stream, {}).values()

    def of(self, txn_id: bytes) -> Entry | None:
        """The entry of a transaction."""
        streams = self._streams.get(txn_id)
        return self._of[streams[0]][txn_id] if streams else None

    def may_go(self, at: int, txn_id: bytes, streams: Iterable[str]) -> bool:
        """Whether a commit at a timestamp may be merged now (H1, H2, L1).

        ``streams``: the streams that the commit writes, and the tables that it locks. Two coordinators may choose
        the same timestamp; then the lower id goes first.
        """
        for entry in self.on(streams):
            if entry.txn_id == txn_id:
                continue
            if (
                (entry.timestamp, entry.txn_id) < (at, txn_id)
                if entry.fixed
                else entry.timestamp <= at
            ):
                return False
        return True

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
            self.put(txn_id, streams, Entry(at, txn_id, fixed=True, since_ms=now_ms))
        return None

    def expire(self, now_ms: int) -> list[bytes]:
        """Take back timestamps that waiting commits have had for `KEPT_MS`. Returns these commits.

        No client has received them. A one-shot is then refused. Another commit still waits, and gets a new one when
        it is merged.
        """
        late = {entry.txn_id for entry in self.on() if 0 <= entry.since_ms <= now_ms - KEPT_MS}
        for txn_id in late:
            self.put(txn_id, (), None)
        self._late |= late
        return sorted(late)

    def give_up(self, txn_id: bytes) -> None:
        """Forget a commit that waits, because it is merged, refused or aborted."""
        self.put(txn_id, (), None)
        self._late.discard(txn_id)

    def safe_time(self, hybrid_time: int, streams: Collection[str] | None = None) -> int:
        """The time up to which nothing more will be merged into these streams (None: into any) (H5)."""
        return min([hybrid_time, *[entry.timestamp - 1 for entry in self.on(streams)]])


def instant(answers: Mapping[int, int], seen: int) -> tuple[int, list[int]]:
    """The time of a snapshot over several control partitions, and the partitions below it, to be asked again (T2).

    ``answers``: by control partition, what each answered to `SafeTime` of now, for its streams. Such an answer is
    fixed there, even if it is not safe yet. ``seen``: the highest time that the client has received.
    """
    at = max([seen, *answers.values()])
    return at, sorted(partition for partition, time in answers.items() if time < at)
