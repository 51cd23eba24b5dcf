"""The locked segments of exclusive streams: one-shots are refused there, and lists show them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from anabranch.core import work
from anabranch.core.authorize import sees
from anabranch.core.decisions.turn import Turn
from anabranch.core.locks.row_changes import Placed
from anabranch.core.locks.wait_die import Spans, meets
from anabranch.core.memory import SegmentAsk
from anabranch.core.state import State
from anabranch.core.stream_settings import hold_ms
from anabranch.errors import Locked
from anabranch.protocol.ids import NO_TXN, segment_number, txn_text
from anabranch.protocol.schemas import records as r

LEVEL = 4  # the feature level of exclusive streams
_LISTED = 100  # segments of an answer, and waiting transactions of each
_FEW = 10  # segments of each transaction in a list of several
_NAMED = 3  # segments, in a message


def locked_of(state: State, txn_id: bytes, stream: str) -> tuple[int, ...]:
    """The numbers of the segments of a stream that a transaction has locked."""
    row = state.locked.get(stream, {}).get(txn_id)
    return () if row is None else row.locked


def holders_of(turn: Turn, stream: str, spans: Spans) -> dict[bytes, Spans]:
    """The transactions that have locked keys of these spans, and which keys."""
    turn.charge(work.of_items(len(spans)))
    held = turn.state.held.get(stream)
    return {} if held is None else held.of(spans)


def check_free(turn: Turn, placed: Placed, *, locks: bool) -> None:
    """`Locked` if a transaction has locked a segment to which a single command writes.

    ``locks``: the command locks the segments to which it writes, so it also gives way to transactions that wait.
    """
    for stream in sorted(placed.keys() & turn.state.exclusive.keys()):
        segments = [segment for segment, _ in placed[stream]]
        spans = tuple([(s.low, s.high) for s in segments])
        others = [*holders_of(turn, stream, spans).items()]
        if locks:
            others += [(ask.txn_id, ask.spans) for ask in _open_asks(turn, stream)]
        for txn_id, its in others:
            if meets(spans, its):
                numbers = [segment_number(s.segment_id) for s in segments]
                text = met_text(turn, stream, numbers, txn_id)
                raise Locked(f"the command {text}; nothing was changed: call again")
        if locks and (met := plain_first(turn, stream, turn.wall_ms)):
            raise Locked(f"the command {met}; nothing was changed: call again")


def plain_first(turn: Turn, stream: str, made_ms: int) -> str:
    """A text if plain writes have waited for longer than the hold limit, and since before this time; or empty."""
    since_ms = turn.segment_asks.plain_since.get(stream, None)
    if since_ms is None or made_ms < since_ms:
        return ""
    waited_ms = turn.wall_ms - since_ms
    if waited_ms <= hold_ms(turn.state.streams[stream].settings):
        return ""
    return f"met plain writes of {stream}, which have waited for {waited_ms:,} ms"


def participant(turn: Turn, stream: str, epoch: int, segments: Iterable[int]) -> r.ParticipantRow:
    """The row of a participant that locks these segments now; it locks none if the stream is not exclusive."""
    if stream not in turn.state.exclusive:
        return r.ParticipantRow(stream, epoch)
    return r.ParticipantRow(stream, epoch, tuple(sorted(set(segments))), turn.wall_ms)


def met_text(turn: Turn, stream: str, segments: Sequence[int], by: bytes) -> str:
    """Whom an ask, or a command, met. The transaction may have ended by now."""
    what, other = segments_text(stream, segments), turn.state.txn_row(by)
    if other is None:
        return f"waits for {what}"
    met = f"met {txn_text(by)} of lane {other.owner}"
    row = turn.state.locked.get(stream, {}).get(by)
    if row is None:
        return f"{met}, which waits for {what}"
    held_ms = max(0, turn.wall_ms - row.locked_ms)
    return f"{met}, which has locked {segments_text(stream, row.locked)} for {held_ms:,} ms"


def segments_text(stream: str, segments: Sequence[int]) -> str:
    """A few segments of a stream, for a message."""
    named = ", ".join(map(str, segments[:_NAMED]))
    more = f" and {len(segments) - _NAMED:,} more" if len(segments) > _NAMED else ""
    return f"segment{'s' if len(segments) > 1 else ''} {named}{more} of {stream}"


def locked_in(turn: Turn, stream: str) -> tuple[r.LockedSegment, ...]:
    """The locked segments of a stream, some of them if there are many."""
    rows, asks = turn.state.locked.get(stream, {}), _open_asks(turn, stream)
    turn.charge(work.of_items(len(rows)))
    found = (
        each
        for txn_id in sorted(rows)
        for each in _listed(turn, stream, txn_id, rows[txn_id].locked, asks)
    )
    return tuple(islice(found, _LISTED))


def locked_by(turn: Turn, txn_id: bytes, *, full: bool) -> tuple[r.LockedSegment, ...]:
    """The segments that a transaction has locked, some of them if there are many; who waits, if it is ``full``."""
    if not turn.state.locked:
        return ()
    found = (
        each
        for stream in sorted(turn.state.open[txn_id].participants)
        for each in _listed(
            turn,
            stream,
            txn_id,
            locked_of(turn.state, txn_id, stream),
            _open_asks(turn, stream) if full else (),
        )
    )
    return tuple(islice(found, _LISTED if full else _FEW))


def _listed(
    turn: Turn, stream: str, txn_id: bytes, numbers: Sequence[int], asks: Sequence[SegmentAsk]
) -> Iterator[r.LockedSegment]:
    """Segments that a transaction has locked, and which of these touches wait for them."""
    state = turn.state
    if not numbers:
        return
    row, txn = state.locked[stream][txn_id], state.open[txn_id]
    held_ms = max(0, turn.wall_ms - row.locked_ms)
    may_end = txn.row.state == "OPEN" and txn.pending is None
    left_ms = max(0, hold_ms(state.streams[stream].settings) - held_ms) if may_end else -1
    for number in numbers:
        turn.charge(work.LOOK + work.of_items(len(asks)))
        spans = state.spans(stream, row.reference_epoch, (number,))
        waiting = [ask.txn_id for ask in asks if ask.txn_id != txn_id and meets(spans, ask.spans)]
        seen = tuple([_seen(turn, one) for one in waiting[:_LISTED]])
        yield r.LockedSegment(stream, number, txn_id, txn.row.owner, held_ms, left_ms, seen)


def asked_by(turn: Turn, txn_id: bytes, *, full: bool) -> tuple[r.LockedSegment, ...]:
    """The locked segments for which a transaction waits, some of them if there are many."""
    if turn.segment_asks.by_stream.is_empty:
        return ()
    found = (
        each
        for stream in sorted(turn.state.open[txn_id].participants)
        for ask in _open_asks(turn, stream)
        if ask.txn_id == txn_id
        for other, its in holders_of(turn, stream, ask.spans).items()
        if other != txn_id
        for each in _listed(turn, stream, other, _numbers(turn, stream, other, its), (ask,))
    )
    return tuple(islice(found, _LISTED if full else _FEW))


def _numbers(turn: Turn, stream: str, txn_id: bytes, spans: Spans) -> list[int]:
    """The numbers of the segments that a transaction has locked and that have these keys."""
    row, wanted = turn.state.locked[stream][txn_id], set(spans)
    turn.charge(work.of_items(len(row.locked)))
    its = turn.state.spans(stream, row.reference_epoch, row.locked)
    return [number for number, span in zip(row.locked, its, strict=True) if span in wanted]


def _open_asks(turn: Turn, stream: str) -> list[SegmentAsk]:
    asks = turn.segment_asks.by_stream.get(stream, ())
    return [ask for ask in asks if ask.txn_id in turn.state.open]


def _seen(turn: Turn, txn_id: bytes) -> bytes:
    """The id of a waiting transaction; zeros if the lane may not see it."""
    return txn_id if sees(turn.state, turn.lane, turn.open(txn_id).row) else NO_TXN
