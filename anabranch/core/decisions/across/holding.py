"""Holds: which commits wait for transactions across control partitions (`docs/inside/across.md`, section 6).

A prepared transaction whose coordinator is elsewhere holds the streams that it writes above its prepare timestamp.
`core.across.holds` has the rules; here is what a turn does by them. While there are no entries, all that a decision
asks is ``turn.holds.in_use``. Votes take their prepare timestamps here (H9), and `put_entry` follows each change of
what is promised or decided. The rest is called by what has to wait, or may not: merges, one-shots, plain writes,
EPOCH records and safe times.

- A decided commit waits as it is, with the reason ``hold``. Its timestamp is kept for `KEPT_MS` (H4).
- A one-shot waits in memory for as long, and is then `NotReady`. When it may go it is decided again from its
  beginning, so nothing that was checked before the wait needs to hold after it (H7).
- Plain writes wait in their journal. Those of one stream together are like a commit.
- A scaling does not wait: its EPOCH record carries a time before all that is still to be merged (H6).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from anabranch.core import work
from anabranch.core.across import holds
from anabranch.core.across.holds import Holds, WaitingShot
from anabranch.core.decisions.turn import Turn
from anabranch.core.locks import conflicts
from anabranch.core.memory import lately_ms
from anabranch.core.round import ReplyTo
from anabranch.core.state import State
from anabranch.errors import NotReady
from anabranch.protocol import hybrid_time, limits
from anabranch.protocol.schemas import records as r

# A prepare timestamp is at most this far ahead of the clock, and by this share of the allowed clock skew.
AHEAD_MS = 50
SKEW_SHARE = 10
_PLAIN = b"plain/"
NOT_READY = (
    "another control partition has yet to decide a transaction that writes to a stream of this command, or to a "
    "table that it read; nothing was changed: call again"
)


def put_entry(turn: Turn, txn_id: bytes) -> None:
    """Make a transaction's entry what its rows say. Call this after each change of these rows.

    The rows: its `TxnRow`, its `ParticipantRow`s, and its `CoordinatorRow` (here it is a participant) or `VotesRow`
    (here is its coordinator).
    """
    _put(turn.holds, turn.state, txn_id)


def prepare_timestamp(turn: Turn) -> int:
    """A prepare timestamp for a vote. Hybrid time does not reach it with this turn.

    The timestamp is as far ahead of the clock as a decision has taken lately, so commits until then are before it,
    and don't wait (H9). With commit wait it is not ahead, as answers would wait until the clock is there.
    """
    settings, fresh = turn.settings, turn.next_timestamp()
    most_ms = min(AHEAD_MS, settings.max_clock_skew_ms // SKEW_SHARE)
    ahead_ms = min(turn.across.decision_ms, most_ms) if settings.clock_error_ms is None else 0
    ahead_us = turn.now_us + 1000 * ahead_ms
    return hybrid_time.next_after(fresh - 1, ahead_us, hybrid_time.logical_of(fresh))


def note_decision(turn: Turn, took_ms: int) -> None:
    """Note how long a decision took from the vote."""
    turn.across.decision_ms = lately_ms(turn.across.decision_ms, min(took_ms, AHEAD_MS))


def holds_of(state: State) -> Holds:
    """The holds with which a new leader begins: what was promised or decided, and is not merged."""
    found = Holds()
    for txn_id in (*state.promised, *state.coordinated):
        _put(found, state, txn_id)
    return found


def _put(into: Holds, state: State, txn_id: bytes) -> None:
    row = state.txn_row(txn_id)
    promise, votes_row = state.coordinator_row(txn_id), state.votes_row(txn_id)
    entry = None if row is None else holds.entry_of(row, promise, votes_row)
    if entry is not None or into.in_use:
        into.put(txn_id, sorted(state.participants(txn_id)) if entry is not None else (), entry)


# -- merges ---------------------------------------------------------------------------------------------


def waits_still(turn: Turn, txn_id: bytes) -> bool:
    """Whether a decided commit that waited for an entry still has to wait."""
    since = turn.work
    turn.charge(work.LOOK)
    on = _blocked(turn, txn_id)
    turn.owe(turn.open(txn_id).row.owner, since)
    return on is not None


def blocks(turn: Turn, txn_id: bytes) -> str | None:
    """The stream on which a decided commit has to wait for an entry; None: it may be merged.

    If it has to wait, it takes a timestamp (H4).
    """
    if (on := _blocked(turn, txn_id)) is None:
        return None
    if not turn.open(txn_id).row.commit_timestamp:
        participants = turn.open(txn_id).participants
        turn.holds.admit(
            txn_id, sorted(participants), _locked(turn, txn_id), turn.now_ms, turn.next_timestamp()
        )
    return on


def taken(turn: Turn, txn_id: bytes) -> int:
    """The timestamp that a waiting commit took, and has not given back; 0: none."""
    entry = turn.holds.of(txn_id)
    return 0 if entry is None else entry.timestamp


def place_of(turn: Turn, txn_id: bytes) -> tuple[int, bytes]:
    """The sort key of merges: those with timestamps first, in the one order of them (H1)."""
    return turn.open(txn_id).row.commit_timestamp or taken(turn, txn_id) or hybrid_time.MAX, txn_id


def _blocked(turn: Turn, txn_id: bytes) -> str | None:
    """The first stream on which an entry is before a decided commit (H1, L1)."""
    txn = turn.open(txn_id)
    if txn.row.commit_timestamp:  # what it has locked is frozen, so it waits for its streams alone
        at, streams = txn.row.commit_timestamp, [*txn.participants]
    else:
        at = taken(turn, txn_id) or turn.coming_timestamp()
        streams = [*txn.participants, *_locked(turn, txn_id)]
    turn.charge(work.of_items(len(streams)))
    found = turn.holds.first(streams, at, txn_id)
    return None if found is None else found[0]


def _locked(turn: Turn, txn_id: bytes) -> Collection[str]:
    return turn.state.locks.of(txn_id).tables


def look_again(turn: Turn) -> None:
    """Let the next turn check the commits that wait for an entry, as one has ended."""
    turn.holds.freed = frozenset()
    for txn_id, wait in turn.merging.waits.as_dict().items():
        if wait.why == "hold":
            turn.merging.look_now(txn_id)


# -- one-shots ------------------------------------------------------------------------------------------


def admit(
    turn: Turn, command: r.OneShot, to: ReplyTo | None, streams: Collection[str]
) -> int | None:
    """The timestamp with which a one-shot commits now; None: it waits, and is decided again (`shots_to_decide`).

    ``streams``: the streams to which it writes. Raises: NotReady (too many wait).
    """
    locked = conflicts.named(command.locks)
    both = (*streams, *locked)
    turn.charge(work.of_items(len(both)))
    txn_id, waiting = command.txn_id, turn.holds.shots
    if txn_id not in waiting and not turn.holds.may_go(turn.coming_timestamp(), txn_id, both):
        limits_reached = (
            len(waiting) >= limits.HELD_COMMANDS.value or turn.holds.size >= limits.HELD_BYTES.value
        )
        if limits_reached:
            raise NotReady(NOT_READY)
    at = turn.holds.admit(txn_id, streams, locked, turn.now_ms, turn.next_timestamp())
    if at is None:
        size = min(turn.command_bytes, turn.settings.command_bytes)
        turn.holds.wait(txn_id, WaitingShot(command, to, turn.lane, turn.seen, size, both))
    return at


def check_free(turn: Turn, txn_id: bytes, streams: Collection[str]) -> None:
    """Raise `NotReady` if a commit to these streams would have to wait; no timestamp is taken."""
    if turn.holds.in_use and not turn.holds.may_go(turn.coming_timestamp(), txn_id, streams):
        raise NotReady(NOT_READY)


def give_back(turn: Turn) -> None:
    """Take timestamps back that commits have had for too long (H4), and answer the one-shots among them."""
    _gave_back(turn, turn.holds.expire(turn.now_ms))


def take_back(turn: Turn, txn_ids: Iterable[bytes]) -> None:
    """Take timestamps back that these waiting commits have, and answer the one-shots among them."""
    _gave_back(turn, turn.holds.take_back(txn_ids))


def _gave_back(turn: Turn, txn_ids: Iterable[bytes]) -> None:
    for txn_id in txn_ids:
        shot = turn.holds.shots.get(txn_id)
        if shot is not None:
            since = turn.work
            turn.reply(shot.to, r.Refusal("NotReady", NOT_READY))
            turn.owe(shot.lane, since)
        if shot is not None or txn_id.startswith(_PLAIN):
            # A one-shot comes again. Plain writes wait for one stream alone, so they may take another timestamp.
            turn.holds.give_up(txn_id)


def shots_to_decide(turn: Turn) -> Iterator[WaitingShot]:
    """The waiting one-shots that may go now, as entries ended; the caller decides each one.

    They go in the order of their timestamps. If one is then refused, it gives its timestamp back.
    """
    mine = turn.holds
    found = freed = mine.freed
    while freed:
        mine.freed = frozenset()
        for entry in mine.shots_on(freed):
            txn_id, since = entry.txn_id, turn.work
            shot = mine.shots[txn_id]
            turn.charge(work.LOOK)
            if mine.may_go(entry.timestamp, txn_id, shot.streams):
                mine.take_shot(txn_id)
                yield shot
                if txn_id not in mine.shots:
                    mine.give_up(txn_id)
            turn.owe(shot.lane, since)
        freed = mine.freed  # by these
        found |= freed
    mine.freed = found


# -- plain writes, epochs, safe times ---------------------------------------------------------------------


def plain_times(turn: Turn, streams: Iterable[str]) -> dict[str, int]:
    """For each of these streams that its plain writes may be committed in now, their timestamp."""
    found = {}
    for stream in sorted(set(streams)):
        turn.charge(work.LOOK)
        at = turn.holds.admit(_plain(stream), (stream,), (), turn.now_ms, turn.next_timestamp())
        if at is not None:
            found[stream] = at
    return found


def is_plain_held(held: Holds, stream: str, present: int) -> bool:
    """Whether plain writes of a stream have to wait for an entry. ``present``: the hybrid time."""
    mine = _plain(stream)
    entry = held.of(mine)
    return not held.may_go(present + 1 if entry is None else entry.timestamp, mine, (stream,))


def _plain(stream: str) -> bytes:
    """The id of the entry of a stream's plain writes. No transaction has it: a transaction's id has 16 bytes."""
    return _PLAIN + stream.encode()


def epoch_time(turn: Turn, stream: str, fresh: int) -> int:
    """The timestamp of an EPOCH record: ``fresh``, but before all that is still to be merged (H6)."""
    if not turn.holds.in_use:
        return fresh
    return turn.holds.safe_time(fresh, (stream,))


def is_safe(turn: Turn, at: int, streams: Collection[str]) -> bool:
    """Whether nothing at or below a time is left to be merged into these streams; empty: into any (H5)."""
    if not turn.holds.in_use:
        return True
    turn.charge(work.of_items(len(streams)))
    return turn.holds.safe_time(turn.hybrid_time, streams or None) >= at
