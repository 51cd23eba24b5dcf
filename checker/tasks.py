"""Judges processors: is each event consumed once, in order, and none by a worker that has lost its tasks?"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import NamedTuple

from checker.model import History, Txn
from checker.reading import Operation
from checker.report import Report
from checker.sweep import Told


class Move(NamedTuple):
    """A committed transaction that moved positions of tasks. ``commit``: its first request that may have won."""

    txn: Txn
    commit: Operation
    processor: str
    ownership: str
    tasks: tuple[int, ...]
    consumes: tuple[str, ...]


def judge_tasks(history: History, report: Report) -> None:
    """``consumed-twice``, ``consume-order``, ``unconsumed`` and ``fenced-commit``; ``aborted-read`` of an input."""
    moves: dict[str, list[Move]] = defaultdict(list)
    for txn in history.txns.values():
        move = _move(txn)
        if move is not None:
            moves[move.processor].append(move)
    takes: dict[str, list[Operation]] = defaultdict(list)
    for op in history.takes:
        takes[op.asked["processor"]].append(op)
    report.counts["tasks taken"] = len(history.takes)
    for processor, found in moves.items():
        report.counts["commits that consumed"] += len(found)
        found.sort(key=lambda move: (move.txn.timestamp or 0, move.commit.at))
        _judge_once(history, report, found)
        _judge_order(history, report, found)
        _judge_fences(report, found, takes[processor])
    for op in history.drained:
        _judge_rest(history, report, op, moves[op.asked["processor"]])


def _move(txn: Txn) -> Move | None:
    """The move of a transaction; None if it has none, or its requests name different events (any may have won)."""
    if not txn.is_committed or txn.first_asked is None:
        return None
    found = {
        Move(
            txn,
            txn.first_asked,
            op.asked["processor"],
            op.asked["ownership"],
            tuple(op.asked["tasks"]),
            tuple(op.asked["consumes"]),
        )
        for op in txn.candidates
        if op.asked.get("processor") is not None
    }
    return found.pop() if len(found) == 1 else None


def _judge_once(history: History, report: Report, moves: list[Move]) -> None:
    """Judge that each event was consumed by one transaction, once, and only if it is committed."""
    by: dict[str, Move] = {}
    for move in moves:
        for name in move.consumes:
            report.counts["events consumed"] += 1
            first = by.setdefault(name, move)
            if first is not move or move.consumes.count(name) > 1:
                text = f"{move.processor} consumed {name} in {first.txn} and in {move.txn}"
                report.add("consumed-twice", text, [first.commit.where, move.commit.where])
            event = history.events.get(name)
            if event is None:
                text = f"{move.txn} consumed {name}, which nobody wrote"
                report.add("unexplained", text, [move.commit.where])
            elif event.txn is not None and event.txn.is_committed is False:
                text = f"{move.txn} consumed {name} of {event.txn}, which was aborted"
                report.add("aborted-read", text, [move.commit.where, event.op.where])


def _judge_order(history: History, report: Report, moves: list[Move]) -> None:
    """Judge that events of a key, written by transactions, were consumed in the order of their commits."""
    last: dict[tuple[str, str], tuple[tuple[int, int], str, Move]] = {}
    for move in moves:
        if move.txn.timestamp is None:
            continue
        for name in move.consumes:
            event = history.events.get(name)
            if event is None or event.key is None or event.txn is None or event.timestamp is None:
                continue
            # In a commit, a key is on one partition.
            at = event.timestamp, event.offset
            before = last.get((event.stream, event.key))
            if before is not None and at < before[0] and event.part is not None:
                text = f"{move.processor} consumed {before[1]} before {name} of the same key"
                report.add("consume-order", text, [before[2].commit.where, move.commit.where])
            last[event.stream, event.key] = at, name, move


def _judge_fences(report: Report, moves: list[Move], takes: list[Operation]) -> None:
    """Judge that no commit of a former ownership was requested after the next one was taken, and that an ownership
    of a task does not commit again after another one.
    """
    by_ownership = {op.asked["ownership"]: op for op in takes}
    of_task: dict[int, list[Move]] = defaultdict(list)
    for move in moves:
        for task in move.tasks:
            of_task[task].append(move)
    for task, found in of_task.items():
        taken = [(op, op.at, op) for op in takes if op.ok and task in op.asked["tasks"]]
        questions = [(move.commit, move) for move in found]
        for _, move, _, later in Told(taken).before(questions):
            mine = by_ownership.get(move.ownership)
            if mine is not None and later is not mine and mine.ended_before(later):
                text = f"{move.txn} was asked after task {task} of {move.processor} was taken, and is committed"
                report.add("fenced-commit", text, [later.told_where, move.commit.where])
        ended: dict[str, Move] = {}
        for one, other in pairwise(move for move in found if move.txn.timestamp is not None):
            if one.ownership == other.ownership:
                continue
            ended[one.ownership] = one
            if other.ownership in ended:
                text = f"{other.txn} moved task {task} of {other.processor} after another ownership had"
                report.add("fenced-commit", text, [one.commit.where, other.commit.where])


def _judge_rest(history: History, report: Report, op: Operation, moves: list[Move]) -> None:
    """Judge that all events of the inputs that are in the log were consumed."""
    consumed = {name for move in moves for name in move.consumes}
    streams = set(op.asked["streams"])
    for event in history.events.values():
        is_there = event.part is not None and not event.is_adrift
        if is_there and event.stream in streams and event.id not in consumed:
            text = f"{op.asked['processor']} never consumed {event}"
            report.add("unconsumed", text, [op.where, event.op.where])
