"""Decisions on exclusive streams: one transaction at a time writes a segment, from its first touch to its end.

The locks are in the rows of participants, so a successor knows them. They end with the transaction: no command and
no row unlocks a segment. Touches that wait are in memory only, and clients repeat them. `wait_die` has the order.

A lock is judged by the keys of its segments. So it holds through scalings, for whatever segments have these keys.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from anabranch.core import rows as k
from anabranch.core import work
from anabranch.core.decisions.across import participating
from anabranch.core.decisions.across.joining import has_joined, touch
from anabranch.core.decisions.transactions import abort_txn, touched
from anabranch.core.decisions.turn import Turn, refuse
from anabranch.core.locks.locked_segments import (
    holders_of,
    locked_of,
    met_text,
    plain_first,
    segments_text,
)
from anabranch.core.locks.wait_die import Fate, Spans, meet, meets
from anabranch.core.memory import SegmentAsk, SegmentAsks
from anabranch.core.round import ReplyTo
from anabranch.core.stream_settings import hold_ms
from anabranch.core.transaction_states import TRANSACTIONS
from anabranch.errors import AnabranchError, InvalidArgument, Locked, TransactionAborted
from anabranch.protocol import limits
from anabranch.protocol.ids import control_partition_of, made_ms_of, segment_number
from anabranch.protocol.partitioner import SPACE
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import id_named


def touch_locked(turn: Turn, command: r.Touch, to: ReplyTo | None) -> None:
    """Touch a stream; in an exclusive one, also lock the segments of these positions. `advance` answers that."""
    txn_id, stream = id_named(command.token), command.stream
    is_exclusive = command.positions and stream in turn.state.exclusive
    if not is_exclusive or txn_id not in turn.state.open or not has_joined(turn, txn_id, stream):
        touch(turn, command, to)
        return
    limits.LOCKED_POSITIONS.check(len(command.positions), "a touch")
    if not all(0 <= position < SPACE for position in command.positions):
        raise InvalidArgument("positions of keys are from 0 to 2^32 - 1")
    if not 0 <= command.wait_ms <= limits.TURN_WAIT_MS:
        raise InvalidArgument(f"wait_ms {command.wait_ms}: 0 to {limits.TURN_WAIT_MS:,}")
    asks = turn.segment_asks.by_stream.get(stream, ())
    touch(turn, command, None)
    epoch = turn.open(txn_id).participants[stream]
    known = set(locked_of(turn.state, txn_id, stream))
    positions = sorted(command.positions)
    layout = turn.state.layout(stream, epoch)
    turn.charge(work.of_items(len(layout)))
    wanted = [
        each
        for each in layout
        if bisect_left(positions, each.low) < bisect_left(positions, each.high)
    ]
    missing = [each for each in wanted if segment_number(each.segment_id) not in known]
    if not missing:
        turn.reply(to, touched(turn, txn_id, stream))
        return
    numbers = tuple(sorted(segment_number(each.segment_id) for each in missing))
    spans = tuple([(each.low, each.high) for each in missing])
    until_ms = turn.now_ms + command.wait_ms
    ask = SegmentAsk(txn_id, turn.lane, numbers, spans, until_ms, to)
    same = [number for number, each in enumerate(asks) if each[:4] == ask[:4]]
    turn.charge(work.of_items(len(asks)))
    for number in same:
        if asks[number].to in (None, to):  # asked again: it keeps its place
            if asks[number].to is not None:  # a copy: its client does not wait longer than before
                until_ms = min(until_ms, asks[number].until_ms)
            again = asks[number]._replace(until_ms=until_ms, to=to)
            _put(turn, stream, (*asks[:number], again, *asks[number + 1 :]))
            return
    # Another writer of the transaction has the place of the first one, and an answer of its own.
    at = same[-1] + 1 if same else len(asks)
    _put(turn, stream, (*asks[:at], ask, *asks[at:]))


def _check_room(turn: Turn, line: _Line, ask: SegmentAsk) -> None:
    """`Locked` if too many touches of the control partition, the lane, or the transaction wait already.

    A touch that finds its segments free is never refused, so a transaction for which others wait can continue.
    """
    streams = turn.segment_asks.by_stream.as_dict().items()
    every = [each for stream, its in streams if stream != line.stream for each in its if each.waits]
    every += line.asks
    turn.charge(work.of_items(len(every)))
    for found, most in (
        (sum([each.txn_id == ask.txn_id for each in every]), limits.ASKS_OF_TXN.value),
        (sum([each.lane == ask.lane for each in every]), limits.SEGMENT_ASKS.value // 2),
        (len(every), limits.SEGMENT_ASKS.value),
    ):
        if found >= most:
            raise Locked(
                f"{found:,} touches wait for segments already; the transaction is still open: call again"
            )


# -- in each turn -----------------------------------------------------------------------------------------


def advance(turn: Turn) -> None:
    """Lock free segments for touches that wait, and abort transactions that meet an older one.

    Call it after plain writes and merges: plain writes come first when a segment becomes free.
    """
    _note_plain(turn)
    if turn.segment_asks.by_stream.is_empty:
        return
    ended = -1
    while ended != len(
        turn.ended
    ):  # a transaction that dies may have locked segments of other streams
        ended = len(turn.ended)
        for stream, asks in sorted(turn.segment_asks.by_stream.as_dict().items()):
            since = turn.work
            line = _Line(stream)
            for ask in asks:
                _judge(turn, line, ask)
            after = tuple(line.asks)
            if after != asks:
                _put(turn, stream, after)
            turn.owe(asks[0].lane, since)


def _note_plain(turn: Turn) -> None:
    """Note since when plain writes have waited for locked segments."""
    known, locked = turn.segment_asks.plain_since, turn.state.locked
    if not locked and known.is_empty:
        return
    waiting = {stream for stream, _ in turn.index.plain_waiting(turn.state) if stream in locked}
    for stream in sorted(waiting ^ known.as_dict().keys()):
        known.put(stream, turn.wall_ms if stream in waiting else None)


@dataclass(slots=True)
class _Line:
    """The touches that still wait for segments of a stream, in their order."""

    stream: str
    asks: list[SegmentAsk] = field(default_factory=list)
    waiting: dict[bytes, Spans] = field(default_factory=dict)

    def blocks(self, turn: Turn, by: bytes, spans: Spans) -> bool:
        """Whether a transaction has locked keys of these spans, or waits for them."""
        if meets(spans, self.waiting.get(by, ())):
            return True
        return by in turn.state.locked.get(self.stream, ()) and by in holders_of(
            turn, self.stream, spans
        )


def _judge(turn: Turn, line: _Line, ask: SegmentAsk) -> None:
    """Answer an ask, or put it into the line."""
    turn.charge(work.LOOK)
    stream, row = line.stream, turn.state.txn_row(ask.txn_id)
    try:
        if row is None:
            raise TransactionAborted("the transaction has ended: begin a new one")
        TRANSACTIONS.judge(row.state, "touch", row.reason)
    except AnabranchError as error:
        turn.reply(ask.to, refuse(error))
        return
    if not line.blocks(turn, ask.by, ask.spans):
        ahead = [(each.txn_id, each.spans) for each in line.asks]
        turn.charge(work.of_items(len(ahead)))
        met = meet(ask.txn_id, ask.spans, holders_of(turn, stream, ask.spans), ahead)
        if met.fate is Fate.DIE:
            text = met_text(turn, stream, ask.segments, met.by)
            _die(turn, ask, f"{text}, and is older")
            return
        if text := plain_first(turn, stream, made_ms_of(ask.txn_id)):
            _die(turn, ask, text)
            return
        if met.fate is Fate.LOCK:
            if ask.let_plain or not _plain_waits(turn, stream):
                _lock(turn, line, ask)
                return
            ask = ask._replace(let_plain=True)
        elif not ask.waits:
            try:
                _check_room(turn, line, ask)
            except Locked as error:
                turn.reply(ask.to, refuse(error))
                return
        ask = ask._replace(by=met.by)
    if turn.now_ms >= ask.until_ms + limits.ASK_KEPT_MS:
        return  # its client does not ask any more
    if turn.now_ms >= ask.until_ms and ask.to is not None:
        text = met_text(turn, stream, ask.segments, ask.by)
        turn.reply(ask.to, refuse(Locked(f"the transaction {text}; it is still open: call again")))
        ask = ask._replace(to=None)
    line.asks.append(ask)
    line.waiting[ask.txn_id] = (*line.waiting.get(ask.txn_id, ()), *ask.spans)


def _die(turn: Turn, ask: SegmentAsk, text: str) -> None:
    # A transaction of another control partition is aborted there: its client gets the error, and ends it.
    if control_partition_of(ask.txn_id) == turn.settings.control_partition:
        abort_txn(turn, ask.txn_id, f"wait-die: it {text}")
    error = f"the transaction is aborted (wait-die: it {text}): begin again after a pause"
    turn.reply(ask.to, refuse(TransactionAborted(error)))


def _plain_waits(turn: Turn, stream: str) -> bool:
    """Whether plain writes of a stream wait, and none of them were committed in this turn."""
    waits = any(place[0] == stream for place in turn.index.plain_waiting(turn.state))
    return waits and all(place[0] != stream for place in turn.served)


def _lock(turn: Turn, line: _Line, ask: SegmentAsk) -> None:
    stream, txn_id = line.stream, ask.txn_id
    epoch = turn.open(txn_id).participants[stream]
    known = turn.state.locked.get(stream, {}).get(txn_id)
    row = known or r.ParticipantRow(stream, epoch, (), turn.wall_ms)
    numbers = tuple(sorted({*row.locked, *ask.segments}))
    turn.put(
        k.participant_key(txn_id, stream), r.ParticipantRow(stream, epoch, numbers, row.locked_ms)
    )
    turn.reply(ask.to, touched(turn, txn_id, stream))


def _put(turn: Turn, stream: str, asks: tuple[SegmentAsk, ...]) -> None:
    turn.segment_asks.by_stream.put(stream, asks or None)


def next_due_ms(asks: SegmentAsks, now_ms: int) -> int | None:
    """Milliseconds until the next wait is over, 0 if a segment may be locked now; None if nothing waits."""
    waiting = [ask for its in asks.by_stream.as_dict().values() for ask in its]
    if any(ask.let_plain for ask in waiting):
        return 0
    kept = [ask.until_ms + (limits.ASK_KEPT_MS if ask.to is None else 0) for ask in waiting]
    return min((max(0, until_ms - now_ms) for until_ms in kept), default=None)


def abort_long(turn: Turn) -> None:
    """Abort open transactions that have held segments for longer than the hold limit of their stream.

    If a transaction is of another control partition, each call asks its coordinator to abort it, until it has.
    """
    for stream, rows in sorted(turn.state.locked.items()):
        most_ms = hold_ms(turn.state.streams[stream].settings)
        for txn_id, row in sorted(rows.items()):
            txn = turn.state.open.get(txn_id)
            if txn is None or txn.row.state != "OPEN" or txn.pending is not None:
                continue
            if turn.wall_ms - row.locked_ms > most_ms:
                why = f"it held {segments_text(stream, row.locked)} for more than {most_ms:,} ms"
                if control_partition_of(txn_id) == turn.settings.control_partition:
                    abort_txn(turn, txn_id, why)
                else:
                    participating.refuse_for_good(turn, txn_id, why)
