"""Builds a history from operations: the transactions, events and readers that they name."""

from __future__ import annotations

from collections.abc import Callable

from checker.model import Derivation, Event, History, Part, Reader, Snapshot, Txn
from checker.reading import ASYNCHRONOUS, DERIVED_TYPES, FAILED, MODES, STATES, TOPICS, Operation


def build(operations: list[Operation]) -> History:
    """A history, not yet judged.

    Raises:
        BrokenHistory: an id is used twice, or an operation names something that was never opened.
    """
    history = History(operations)
    logs = [op for op in operations if op.what == "log" and op.asked.get("table")]
    history.tables = {op.asked["stream"] for op in logs}
    # Files are read one after the other: an operation in a later file may begin what an earlier one uses.
    for first in (True, False):
        for op in operations:
            if (op.what in _FIRST) == first:
                _TAKE[op.what](history, op)
    return history


def txn_of(history: History, op: Operation) -> Txn:
    txn = history.txns.get(op.asked["txn"])
    if txn is None:
        raise op.broken(f"nobody began {op.asked['txn']!r}")
    return txn


def _begin(history: History, op: Operation) -> None:
    handle = op.asked["txn"]
    if handle in history.txns:
        raise op.broken(f"{handle!r} was begun before, {history.txns[handle].begin}")
    history.txns[handle] = Txn(handle, op.asked["scope"], begin=op)


def _write(history: History, op: Operation) -> None:
    txn = txn_of(history, op)
    _events(history, op, txn, op.asked["writer"], txn.events)


def _plain(history: History, op: Operation) -> None:
    _events(history, op, None, op.asked.get("producer"), [])


def _events(
    history: History, op: Operation, txn: Txn | None, writer: str | None, into: list[Event]
) -> None:
    stream = op.asked["stream"]
    for index, row in enumerate(op.asked["events"]):
        if not (
            isinstance(row, list)
            and len(row) == 2
            and isinstance(row[0], str | None)
            and isinstance(row[1], str | None)
        ):
            raise op.broken(f"event {index} is not [key or null, id]")
        key, name = row
        is_deletion = name is None
        if name is None:
            if key is None or txn is None or stream not in history.tables:
                raise op.broken(f"event {index}: a transaction deletes rows of a table, no other")
            name = f"the deletion of {key!r} ({op.where}, {index})"
        other = history.events.get(name)
        if other is not None:
            raise op.broken(f"event {name!r} was written before, {other.op.where}")
        event = Event(name, stream, key, op, index, txn, writer, is_deletion=is_deletion)
        if is_deletion:
            history.deletions.setdefault((stream, key), []).append(event)
        history.events[name] = event
        into.append(event)


def _finish(history: History, op: Operation) -> None:
    if op.outcome != FAILED:
        txn_of(history, op).finishes.setdefault(op.asked["writer"], op)


def _commit(history: History, op: Operation) -> None:
    if (op.asked.get("series") is None) != (op.asked.get("number") is None):
        raise op.broken("series and number go together")
    moves = [op.asked.get(name) is None for name in ("processor", "ownership", "tasks", "consumes")]
    if len(set(moves)) > 1:
        raise op.broken("processor, ownership, tasks and consumes go together")
    txn = txn_of(history, op)
    txn.scope = op.asked.get("scope", txn.scope)
    txn.commits.append(op)


def _take(history: History, op: Operation) -> None:
    if any(op.asked["ownership"] == other.asked["ownership"] for other in history.takes):
        raise op.broken(f"ownership {op.asked['ownership']!r} was taken before")
    history.takes.append(op)


def _near(history: History, op: Operation) -> None:
    first = min(op.asked["scopes"])
    history.near.update(dict.fromkeys(op.asked["scopes"], first))


def _drained(history: History, op: Operation) -> None:
    if op.ok:
        history.drained.append(op)


def _outcomes(history: History, op: Operation) -> None:
    history.outcomes.append(op)


def _total(history: History, op: Operation) -> None:
    history.totals.append(op)


def _derivation(history: History, op: Operation) -> None:
    table, kind, fields = op.asked["table"], op.asked["type"], op.asked["fields"]
    numbers = [*fields, op.asked.get("number", 0)]
    if kind not in DERIVED_TYPES or not all(isinstance(number, int) for number in numbers):
        raise op.broken(f"type {kind!r} with fields {numbers}")
    if table in history.derivations:
        raise op.broken(f"{table!r} was declared before, {history.derivations[table].op.where}")
    history.derivations[table] = Derivation(
        table,
        op.asked["source"],
        op.asked["name"],
        op.asked["version"],
        kind,
        tuple(fields),
        numbers[-1],
        op,
    )


def _end_derivation(history: History, op: Operation) -> None:
    """Only the first answer counts: it ended there, if it has not before."""
    derivation = history.derivations.get(op.asked["table"])
    if derivation is None:
        raise op.broken(f"{op.asked['table']!r} is no derived table")
    before = derivation.ended
    if op.ok and (before is None or (op.told_at or 0) < (before.told_at or 0)):
        derivation.ended = op


def _abort(history: History, op: Operation) -> None:
    txn_of(history, op).aborts.append(op)


def _state(history: History, op: Operation) -> None:
    if op.ok and op.result["state"] not in STATES:
        raise op.broken(f"unknown state {op.result['state']!r}")
    history.states.append(op)


def _delete(history: History, op: Operation) -> None:
    stream, topic = op.asked["stream"], op.asked["topic"]
    if topic not in TOPICS:
        raise op.broken(f"unknown topic {topic!r}")
    if (stream, topic) in history.deleted:
        raise op.broken("it was deleted before")
    if op.outcome != FAILED:
        history.deleted[stream, topic] = op


def _truncate(history: History, op: Operation) -> None:
    if op.outcome != FAILED:
        history.truncations.setdefault(op.asked["stream"], []).append(op)


def _open(history: History, op: Operation) -> None:
    name, mode, starts = op.asked["reader"], op.asked["mode"], op.asked["starts"]
    if name in history.readers:
        raise op.broken(f"reader {name!r} was opened before, {history.readers[name].op.where}")
    if mode not in MODES:
        raise op.broken(f"unknown mode {mode!r}")
    if isinstance(starts, str) and starts not in ("start", "end", "position"):
        raise op.broken(f"unknown start {starts!r}")
    history.readers[name] = Reader(
        name, mode, tuple(op.asked["streams"]), op.asked["group"], starts, op
    )


def _of_reader(history: History, op: Operation) -> None:
    reader = history.readers.get(op.asked["reader"])
    if reader is None:
        raise op.broken(f"nobody opened {op.asked['reader']!r}")
    if op.file != reader.op.file:
        raise op.broken(f"reader {reader.name!r} is another process's")
    if op.what == "poll":
        if op.ok:
            check_rows(op, 7)
        reader.polls.append(op)
    elif op.what == "position":
        reader.positions.append(op)
    elif op.what == "resume":
        if op.ok:
            reader.resumes.append(op)
    elif op.what == "caught_up":
        reader.caught_up.append(op)
    else:
        reader.closed = op


def _snapshot(history: History, op: Operation) -> None:
    label = op.asked["snapshot"]
    if label in history.snapshots:
        raise op.broken(f"snapshot {label!r} was taken before")
    history.snapshots[label] = Snapshot(label, tuple(op.asked["streams"]), op)


def _snapshot_read(history: History, op: Operation) -> None:
    snapshot = history.snapshots.get(op.asked["snapshot"])
    if snapshot is None:
        raise op.broken(f"nobody took {op.asked['snapshot']!r}")
    if op.ok:
        check_rows(op, 7)
        snapshot.reads.append(op)


def _read(history: History, op: Operation) -> None:
    if ("txn" in op.asked) == ("snapshot" in op.asked):
        raise op.broken("it is of a transaction, or of a snapshot")
    if ("derivation" in op.asked) != ("value" in op.asked):
        raise op.broken("derivation and value go together")
    if "txn" in op.asked:
        txn_of(history, op)
    elif op.asked["snapshot"] not in history.snapshots:
        raise op.broken(f"nobody took {op.asked['snapshot']!r}")
    history.reads.append(op)


def _look_up_total(history: History, op: Operation) -> None:
    txn_of(history, op)
    history.totals_read.append(op)


def _changes(history: History, op: Operation) -> None:
    history.changes.append(op)


def _log(history: History, op: Operation) -> None:
    stream, partition = op.asked["stream"], op.asked["partition"]
    derivation = history.derivations.get(stream)
    if derivation is not None:
        derivation.is_read = derivation.is_read and op.ok and not op.result["start"]
        if op.ok:
            check_rows(op, 5 if derivation.type == ASYNCHRONOUS else 4)
            derivation.parts[partition] = op
        return
    if not op.ok:
        history.unread.add((stream, partition))
        return
    if (stream, partition) in history.parts:
        raise op.broken(f"{stream}[{partition}] was read before")
    check_rows(op, 4)
    history.parts[stream, partition] = Part(
        stream, partition, op, op.result["start"], op.result["end"]
    )
    history.logs.append(op)


def _commits(history: History, op: Operation) -> None:
    derivation = history.derivations.get(op.asked["stream"])
    if derivation is not None:
        derivation.records = op
    elif op.ok:
        if any(other.asked["stream"] == op.asked["stream"] for other in history.histories):
            raise op.broken("it was read before")
        history.histories.append(op)


def check_rows(op: Operation, fields: int) -> None:
    """Check the number of fields in each event of a poll, a snapshot or a log."""
    for index, row in enumerate(op.result["events"]):
        if not isinstance(row, list) or len(row) != fields:
            raise op.broken(f"event {index} has not {fields} fields")


def _nothing(history: History, op: Operation) -> None:
    pass


_FIRST = ("begin", "open", "snapshot", "derivation")
_TAKE: dict[str, Callable[[History, Operation], None]] = {
    "begin": _begin,
    "write": _write,
    "plain": _plain,
    "finish": _finish,
    "commit": _commit,
    "abort": _abort,
    "take": _take,
    "near": _near,
    "drained": _drained,
    "outcomes": _outcomes,
    "total": _total,
    "derivation": _derivation,
    "end_derivation": _end_derivation,
    "look_up_total": _look_up_total,
    "state": _state,
    "scale": _nothing,
    "delete": _delete,
    "truncate": _truncate,
    "open": _open,
    "poll": _of_reader,
    "position": _of_reader,
    "resume": _of_reader,
    "caught_up": _of_reader,
    "close": _of_reader,
    "snapshot": _snapshot,
    "snapshot_read": _snapshot_read,
    "read": _read,
    "changes": _changes,
    "log": _log,
    "commits": _commits,
}
