"""Decisions on turns at rows: if locks broke at a row, transactions take turns there, one after the other.

A turn is a hint, and locks nothing: the locks of its holder are judged like all others, and a commit without a
turn is never refused. Its id may be of any control partition. So turns are in memory only, and a successor begins
without any. A turn ends with the round that commits its transaction. The same round gives the row to the next
transaction, which then reads what was committed. A turn lasts `limits.TURN_MS` at most, so that a client that died
costs no more.
"""

from __future__ import annotations

from anabranch.core import work
from anabranch.core.decisions.transactions import check_id_partition
from anabranch.core.decisions.turn import Turn, is_finished
from anabranch.core.locks import conflicts
from anabranch.core.locks.table_writes import fingerprint
from anabranch.core.memory import Row, RowQueue, RowTurns, TurnAsker
from anabranch.core.round import ReplyTo, StreamCommit
from anabranch.errors import InvalidArgument, NotReady
from anabranch.protocol import limits
from anabranch.protocol.schemas import records as r

_EMPTY = RowQueue(None, (), "")


def take(turn: Turn, command: r.TakeTurn, to: ReplyTo | None) -> None:
    """Put a transaction into a row's queue, or let it give up its turn. `advance` answers when its turn begins."""
    if not turn.settings.across:
        check_id_partition(turn, command.txn_id)
    limits.TURN_TABLES.check(len(command.tables), "a turn")
    for table in {command.table, *command.tables}:
        conflicts.check_table(turn, table)
    if not 0 <= command.wait_ms <= limits.TURN_WAIT_MS:
        raise InvalidArgument(f"wait_ms {command.wait_ms}: 0 to {limits.TURN_WAIT_MS:,}")
    row = command.table, command.point
    queue = turn.row_turns.queues.get(row, _EMPTY)
    turn.charge(work.of_items(1 + len(queue.waiting) + len(command.tables)))
    done = turn.state.txn_row(command.txn_id)
    until_ms = turn.now_ms + command.wait_ms
    asker = TurnAsker(command.txn_id, turn.lane, until_ms, command.tables, to)
    if not command.wait_ms or (done is not None and is_finished(done)):
        _put(turn, row, queue, _without(queue, asker))
        _answer(turn, asker, others=bool(queue.waiting))
        return
    _put(turn, row, queue, _joined(turn, queue, asker, command.former or command.txn_id))


def _joined(turn: Turn, queue: RowQueue, asker: TurnAsker, former: bytes) -> RowQueue:
    """The queue with one more transaction: in the place of ``former``, if its lane has that, else at the end."""
    holder = queue.holder
    if holder is not None and holder[:2] == (former, asker.lane):
        held = asker._replace(until_ms=holder.until_ms, waited=holder.waited)
        _answer(turn, held, others=bool(queue.waiting))
        return queue._replace(holder=held)
    for number, each in enumerate(queue.waiting):
        if each[:2] == (former, asker.lane):
            again = asker._replace(waited=True)
            waiting = (*queue.waiting[:number], again, *queue.waiting[number + 1 :])
            return queue._replace(waiting=waiting)
    own = sum(each.lane == asker.lane for each in queue.waiting)
    lanes = turn.row_turns.lanes
    for found, most in (
        (own, limits.ROW_TURNS.value // 2),
        (len(queue.waiting), limits.ROW_TURNS.value),
        (lanes.get(asker.lane, 0), limits.TURNS.value // 2),
        (sum(lanes.as_dict().values()), limits.TURNS.value),
    ):
        if found >= most:
            raise NotReady(f"{found:,} transactions wait for a turn already: ask again")
    return queue._replace(waiting=(*queue.waiting, asker._replace(waited=holder is not None)))


def _without(queue: RowQueue, gone: TurnAsker) -> RowQueue:
    """The queue after a transaction has left it."""
    if queue.holder is not None and queue.holder[:2] == gone[:2]:
        return queue._replace(holder=None)
    return queue._replace(waiting=tuple(each for each in queue.waiting if each[:2] != gone[:2]))


def advance(turn: Turn) -> None:
    """End the turns of transactions that this round commits, and turns that took too long. Begin the next ones."""
    if turn.row_turns.queues.is_empty:
        return
    queues = turn.row_turns.queues.as_dict()
    merged = {step.txn_id for step in turn.round.history if isinstance(step, StreamCommit)}
    for row, queue in queues.items():
        since = turn.work
        turn.charge(work.LOOK)
        now = queue
        if queue.holder is not None and _is_over(turn, queue.holder, merged):
            now = queue._replace(holder=None)
        if now.holder is None:
            now = _next(turn, now)
        if now != queue:
            _put(turn, row, queue, now)
            if now.lane:
                turn.owe(now.lane, since)


def _is_over(turn: Turn, holder: TurnAsker, merged: set[bytes]) -> bool:
    if holder.txn_id in merged or turn.now_ms >= holder.until_ms:
        return True
    row = turn.state.txn_row(holder.txn_id)
    return row is not None and is_finished(row)


def _next(turn: Turn, queue: RowQueue) -> RowQueue:
    """Give the turn to the next transaction that still waits. Lanes alternate, so that no lane has all turns."""
    waiting = tuple(each for each in queue.waiting if turn.now_ms < each.until_ms)
    if not waiting:
        return _EMPTY
    later = [each for each in waiting if each.lane > queue.lane]
    asker = min(later or waiting, key=lambda each: each.lane)
    others = tuple(each for each in waiting if each is not asker)
    _answer(turn, asker, others=bool(others))
    holder = asker._replace(until_ms=turn.now_ms + limits.TURN_MS.value)
    return RowQueue(holder, others, asker.lane)


def advice(turn: Turn, command: r.OneShot) -> r.Revalidate | None:
    """The answer that advises a one-shot to take a turn, as it would break the locks of a turn's holder; else None.

    Call this when the one-shot could be carried out. A one-shot is advised once in a turn, and its next copy is
    carried out. So a client that does not know turns is only delayed.
    """
    for row, queue in _queues_of(turn, command):
        holder = queue.holder
        if holder is None or command.txn_id in (holder.txn_id, *queue.warned):
            continue
        keys = [event.key for event in command.events if event.stream == row[0]]
        keys += [change.key for change in command.changes if change.table == row[0]]
        turn.charge(work.of_items(len(command.events) + len(command.changes)))
        if row[1] in (fingerprint(key) for key in keys if key is not None):
            warned = (*queue.warned, command.txn_id)[-limits.ROW_TURNS.value :]
            turn.row_turns.queues.put(row, queue._replace(warned=warned))
            tables = conflicts.named(command.locks)
            times = conflicts.table_times(turn, tables)
            return r.Revalidate(turn.hybrid_time, times, (row[1], tables.index(row[0])))
    return None


def pass_on(turn: Turn, command: r.OneShot, heir: bytes) -> None:
    """Pass the turn of a one-shot that commits to another transaction. The turn's end stays as it is."""
    for row, queue in _queues_of(turn, command):
        holder = queue.holder
        if holder is not None and holder[:2] == (command.txn_id, turn.lane):
            _put(turn, row, queue, queue._replace(holder=holder._replace(txn_id=heir)))


def _queues_of(turn: Turn, command: r.OneShot) -> list[tuple[Row, RowQueue]]:
    """The queues for rows that a one-shot has locked or follows."""
    if not (command.locks or command.follows) or turn.row_turns.queues.is_empty:
        return []
    queues = turn.row_turns.queues.as_dict()
    read = {(its.table, point) for its in command.locks for point in its.points}
    read |= {(its.table, point) for its in command.follows for point in its.points}
    return [(row, queues[row]) for row in sorted(read & queues.keys())]


def _answer(turn: Turn, asker: TurnAsker, *, others: bool) -> None:
    """Answer a transaction. ``others``: whether others want the row, too."""
    times = conflicts.table_times(turn, asker.tables)
    turn.reply(asker.to, r.Revalidate(turn.hybrid_time, times, (), others or asker.waited))


def _put(turn: Turn, row: Row, before: RowQueue, after: RowQueue) -> None:
    turns = turn.row_turns
    for queue, by in ((before, -1), (after, 1)):
        for each in _all(queue):
            turns.lanes.put(each.lane, turns.lanes.get(each.lane, 0) + by or None)
    turns.queues.put(row, after if _all(after) else None)


def _all(queue: RowQueue) -> tuple[TurnAsker, ...]:
    return queue.waiting if queue.holder is None else (queue.holder, *queue.waiting)


def next_due_ms(turns: RowTurns, now_ms: int) -> int | None:
    """Milliseconds until the next turn is over; None if there is no turn."""
    held = (queue.holder for queue in turns.queues.as_dict().values())
    return min((max(0, each.until_ms - now_ms) for each in held if each is not None), default=None)
