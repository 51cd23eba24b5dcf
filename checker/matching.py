"""Matches the log, the streams' histories and the answers: the place of each event, the id of each transaction.

Contradictions between the three are reported here; the judges report what follows from the result.
"""

from __future__ import annotations

from itertools import pairwise

from checker.model import PLAIN, Answer, Chronicle, Event, History, Part, Record, Txn
from checker.reading import Operation
from checker.report import Report
from checker.writes import Choice, choices


def match(history: History, report: Report) -> None:
    """Fill in everything that the log shows."""
    _bind_answers(history, report)
    _bind_rows(history)
    for op in history.logs:
        _place(history, report, history.parts[op.asked["stream"], op.asked["partition"]])
    _bind_replays(history, report)
    for op in history.histories:
        _chronicle(history, report, op)
    for part in history.parts.values():
        gone = (part.stream, "history") in history.deleted
        if gone and part.stream not in history.chronicles:  # else `_match` finds this
            for event in part.items:
                event.is_adrift = _is_adrift(history, event)
    for txn in history.all_txns:
        _outcome(history, txn)
    for event in history.events.values():
        if event.record is not None:
            event.timestamp = event.record.timestamp
        elif event.txn is not None and event.txn.is_committed:
            event.timestamp = event.txn.timestamp


def bind(history: History, txn: Txn, txn_id: str) -> bool:
    """Set the transaction's id. Returns False if it has another one, or another transaction has the id."""
    other = history.by_id.get(txn_id)
    if other is txn:
        return True
    if other is not None and other.handle:
        return False
    if txn.txn_id is not None:
        return False
    if other is not None:
        txn.answers += other.answers
        txn.records += other.records
    txn.txn_id = txn_id
    history.by_id[txn_id] = txn
    return True


def by_id(history: History, txn_id: str) -> Txn:
    """The transaction of an id; one without a handle, if no recorded client began it."""
    txn = history.by_id.get(txn_id)
    if txn is None:
        txn = history.by_id[txn_id] = Txn("", txn_id=txn_id)
    return txn


def _bind_answers(history: History, report: Report) -> None:
    """Match answers with transactions, by the ids in them."""
    for txn in history.txns.values():
        begin = txn.begin
        if begin is None or not begin.ok or begin.result["txn_id"] is None:
            continue
        if begin.result.get("replayed"):
            txn.gave_way.append(begin)
        elif not bind(history, txn, begin.result["txn_id"]):
            _two_of_an_id(history, report, txn, begin)
    for txn in history.txns.values():
        for op in txn.commits:
            if not op.ok:
                if op.told and "txn_id" in op.told:
                    bind(history, txn, op.told["txn_id"])
                continue
            if op.result.get("replayed") and op.result["txn_id"] != txn.txn_id:
                txn.gave_way.append(op)
            elif not bind(history, txn, op.result["txn_id"]):
                _two_of_an_id(history, report, txn, op)
            else:
                _answer(txn, op)
        for op in txn.aborts:
            if op.ok:
                txn.answers.append(Answer(op, "aborted"))
    for op in history.states:
        if op.ok:
            answer = Answer(op, op.result["state"], op.result["timestamp"])
            by_id(history, op.asked["txn_id"]).answers.append(answer)


def _answer(txn: Txn, op: Operation) -> None:
    told = op.result
    txn.answers.append(
        Answer(op, "committed", told["timestamp"], told["committed"], told.get("left_out"))
    )


def _two_of_an_id(history: History, report: Report, txn: Txn, op: Operation) -> None:
    told = op.result["txn_id"]
    other = history.by_id.get(told)
    first = other.begin.told_where if other and other.begin else op.where
    report.add(
        "changed-answer",
        f"{txn}, which is {txn.txn_id or 'another one'}, was told to be {told}",
        [op.told_where, first],
    )


def _bind_rows(history: History) -> None:
    """Match ids of transactions by the rows of tables, so that their deletions are found, too."""
    for op in history.logs if history.tables else ():
        for _, _, name, txn_id in op.result["events"] if op.asked.get("table") else ():
            event = history.events.get(name)
            if event is not None and event.txn is not None and txn_id is not None:
                bind(history, event.txn, txn_id)


def _deletion(history: History, part: Part, key: str | None, txn_id: str | None) -> Event | None:
    """The deletion of a row by the transaction of this id, or else by the only one that may have the id."""
    left = [
        event
        for event in history.deletions.get((part.stream, key or ""), ())
        if event.part is None and event.txn is not None
    ]
    mine = [event for event in left if event.txn is not None and event.txn.txn_id == txn_id]
    txn = history.by_id.get(txn_id or "")
    if len(mine) > 1 and mine[0].txn is not None:
        _forget_writers(mine, choices(mine[0].txn))
    if mine or txn_id is None or (txn is not None and txn.handle):
        return mine[0] if mine else None
    unknown = {e.txn for e in left if e.txn and e.txn.txn_id is None and e.txn.candidates}
    if len(unknown) == 1:
        bind(history, unknown.pop(), txn_id)
        return _deletion(history, part, key, txn_id)
    return None


def _forget_writers(deletions: list[Event], takes: list[Choice]) -> None:
    """Sort a transaction's deletions of a row, surely committed ones first; the log does not say whose each is."""
    deletions.sort(
        key=lambda e: [-sum(e in c.must for c in takes), -sum(e in c.may for c in takes)]
    )
    taken = [e for e in deletions if any(e in c.must | c.may for c in takes)]
    if len({event.writer for event in taken}) > 1:
        for event in taken:
            event.writer = None


def _may_delete(history: History, part: Part, key: str | None, txn_id: str | None) -> bool:
    """Whether transactions whose ids are in no answer may have deleted a row."""
    txn = history.by_id.get(txn_id or "")
    return (txn is None or not txn.handle) and any(
        event.txn is not None and event.txn.txn_id is None and event.txn.candidates
        for event in history.deletions.get((part.stream, key or ""), ())
    )


def _bind_replays(history: History, report: Report) -> None:
    """Match an answer to a repeated number with this transaction, or with an earlier one."""
    for txn in history.txns.values():
        for op in list(txn.gave_way):
            told = op.result["txn_id"]
            if told == txn.txn_id:  # the log has shown the id since
                txn.gave_way.remove(op)
                if op.what == "commit":
                    _answer(txn, op)
            elif op.what == "commit":
                _answer(by_id(history, told), op)
            else:
                by_id(history, told).answers.append(Answer(op, "committed"))


def _place(history: History, report: Report, part: Part) -> None:
    """Match the events of one partition."""
    last = -1
    for row in part.op.result["events"]:
        offset, key, name, txn_id = row
        where = f"{part} at {offset}"
        event = history.events.get(name)
        if name is None and part.stream in history.tables:
            event = _deletion(history, part, key, txn_id)
            if event is None and _may_delete(history, part, key, txn_id):
                part.passed_over.add(offset)
                report.counts["deletions by transactions whose ids nobody was told"] += 1
                continue
        evidence = [part.op.told_where, *([event.op.where] if event else [])]
        if not part.start <= offset < part.end or offset <= last:
            report.add("unexplained", f"{where}: no rising offset of the log", evidence)
        last = max(last, offset)
        if event is None:
            report.add("unexplained", f"{where}: nobody wrote {name}", evidence)
            continue
        if event.part is not None:
            evidence.append(event.part.op.told_where)
            there = f"{event.part} at {event.offset}"
            report.add("duplicate", f"{event} is in the log twice: {there} and {where}", evidence)
            continue
        check_written(report, event, part.stream, key, where, evidence)
        event.part, event.rank, event.offset = part, len(part.items), offset
        part.items.append(event)
        _check_id(history, report, event, txn_id, where, evidence)
    report.counts["events in the log"] += len(part.items)


def check_written(
    report: Report, event: Event, stream: str, key: str | None, where: str, evidence: list[str]
) -> None:
    """Check that an event was seen in the stream and with the key with which it was written."""
    if (event.stream, event.key) != (stream, key):
        written = f"{event.key!r} to {event.stream}"
        seen = f"{key!r} in {stream}"
        report.add("unexplained", f"{where}: {event.id}: written as {written}, {seen}", evidence)


def _check_id(
    history: History,
    report: Report,
    event: Event,
    txn_id: str | None,
    where: str,
    evidence: list[str],
) -> None:
    txn = event.txn
    if txn is None:
        right = txn_id is None or txn_id == PLAIN
    elif txn_id is None:
        right = False
    else:
        right = bind(history, txn, txn_id)
    if not right:
        whose = "a plain write" if txn is None else f"of {txn} ({txn.txn_id})"
        report.add("unexplained", f"{where}: {event.id}, {whose}, is marked {txn_id}", evidence)


def _chronicle(history: History, report: Report, op: Operation) -> None:
    """Match a stream's history with its log: each event gets its record."""
    stream = op.asked["stream"]
    is_cut = bool(op.result.get("start", 0)) or (stream, "history") in history.deleted
    line = Chronicle(stream, op, is_cut=is_cut)
    history.chronicles[stream] = line
    spans: dict[int, list[tuple[int, int, Record]]] = {}
    last: Record | None = None
    for row in op.result["records"]:
        try:
            offset, timestamp, ids, ranges = row
            named = tuple(one for one in ids if one != PLAIN)
            record = Record(
                line, len(line.items), offset, timestamp, named, [(p, a, b) for p, a, b in ranges]
            )
        except (TypeError, ValueError):
            raise op.broken(f"record {len(line.items)} is not as it should be") from None
        line.items.append(record)
        if last is not None and offset <= last.offset:
            report.add("unexplained", f"{record}: offset {offset} after {last.offset}", [op.where])
        if last is not None and timestamp <= last.timestamp:
            text = f"the history of {stream}: {timestamp} at {offset} after {last.timestamp}"
            report.add("non-monotone-timestamps", text, [op.told_where])
        last = record
        for txn_id in named:
            by_id(history, txn_id).records.append(record)
        for partition, start, end in record.ranges:
            if start < end:
                spans.setdefault(partition, []).append((start, end, record))
    report.counts["records of histories"] += len(line.items)
    for partition, of_partition in spans.items():
        part = history.parts.get((stream, partition))
        _match(history, report, line, part, of_partition)
    for (name, partition), part in history.parts.items():
        if name == stream and partition not in spans:
            _match(history, report, line, part, [])


def _match(
    history: History,
    report: Report,
    line: Chronicle,
    part: Part | None,
    spans: list[tuple[int, int, Record]],
) -> None:
    """Match a partition's events with the ranges in the history, both in the order of offsets."""
    evidence = [line.op.told_where, *([part.op.told_where] if part else [])]
    for (_, end, one), (start, _, other) in pairwise(spans):
        if start < end:
            text = f"{other} begins at {start}, before {one} has ended at {end}"
            report.add("unexplained", text, evidence)
    if part is None:
        if (
            spans
            and history.is_whole(line.stream)
            and (line.stream, "stream") not in history.deleted
        ):
            text = f"the history of {line.stream} names a partition that has no log"
            report.add("lost-write", text, evidence)
        return
    at = 0
    spans.sort(key=lambda span: span[:2])
    edges: dict[int, Record] = {}
    for start, end, record in spans:
        for offset in (start, end - 1):
            is_gone = history.was_deleted(line.stream, part.partition, offset)
            if not is_gone and offset not in part.passed_over:
                edges[offset] = record
    for event in part.items:
        edges.pop(event.offset, None)
        while at < len(spans) and spans[at][1] <= event.offset:
            at += 1
        found = spans[at][2] if at < len(spans) and spans[at][0] <= event.offset else None
        if found is None:
            event.is_adrift = _is_adrift(history, event)
            if not line.is_cut and not event.is_adrift:
                text = f"{event} at {part}, {event.offset}: no record of the history names it"
                report.add("unexplained", text, evidence)
            continue
        own = event.txn.txn_id if event.txn is not None else None
        if (own not in found.ids) if found.ids else (own is not None):
            event.is_adrift = _is_adrift(history, event)
            if event.is_adrift:
                continue  # the record is of an earlier topic of this name
            text = f"{event} at {part}, {event.offset}: {found} is of {', '.join(found.ids)}"
            report.add("unexplained", text, [*evidence, event.op.where])
            continue
        event.record = found
        found.events.append(event)
    for offset, record in edges.items():
        text = f"{record} names {part} at {offset}, and no event is there"
        report.add("lost-write", text, evidence)


def _is_adrift(history: History, event: Event) -> bool:
    """Whether it may be in the log without a commit, because a topic of its transaction was deleted."""
    txn = event.txn
    if history.may_be_left_out(event):
        return True
    if txn is None or txn.answered("committed", "aborted") or not txn.answered("committing"):
        return False
    return any(history.is_spoiled(one.stream) for one in txn.events)


def _outcome(history: History, txn: Txn) -> None:
    """Find whether and when it was committed: by the answers, the history, and the log, in this order."""
    told = txn.answered("committed")
    times = [answer.timestamp for answer in told if answer.timestamp is not None]
    times += [record.timestamp for record in txn.records]
    txn.timestamp = times[0] if times else None
    if told:
        txn.is_committed = True
    elif txn.answered("aborted") or txn.gave_way or (txn.handle and not txn.candidates):
        txn.is_committed = False
    elif txn.records or any(e.part is not None and not e.is_adrift for e in txn.events):
        txn.is_committed = True
