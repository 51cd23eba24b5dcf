"""Judges readers and groups of readers: do they get everything, once, and in order?

A group delivers at least once: any member may get items after the group's last position again. Readers get items
along *lines*: a partition's events, or, in mode ``transactions``, the commits of a stream's history.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from checker.gaps import gap_before, judge_gaps
from checker.lines import Giving, Group, Item, Line
from checker.model import Event, History, Part, Reader, Record
from checker.reading import Operation
from checker.report import Report
from checker.sweep import Told


def judge_readers(history: History, report: Report) -> None:
    """``duplicate``, ``int-poll-order``, ``ext-poll-order``, ``poll-skip``, ``unseen-commit`` and torn polls."""
    groups: dict[tuple[str, str], list[Reader]] = defaultdict(list)
    for reader in history.readers.values():
        name = f"group {reader.group}" if reader.group is not None else f"reader {reader.name}"
        groups[reader.mode, name].append(reader)
    chains: dict[str, dict[Event, Event]] = {}
    for (mode, _), members in groups.items():
        members.sort(key=lambda reader: reader.op.at)
        group = Group(members)
        for reader in members:
            _collect(history, report, group, reader)
        report.counts[f"readers, {mode}"] += len(members)
        _find_start(group)
        if group.is_group:
            _judge_again(report, group)
        else:
            _judge_back(report, group)
        _judge_before(report, group)
        if mode == "ordered":
            for stream in sorted({stream for reader in members for stream in reader.streams}):
                if stream not in chains:
                    chains[stream] = _chain(history, stream)
            _judge_keys(report, group, chains)
        judge_gaps(history, report, group)


def _collect(history: History, report: Report, group: Group, reader: Reader) -> None:
    """Add the items that a reader got to its group, in order."""
    order = 0
    for poll in reader.polls:
        if not poll.ok:
            continue
        items: Iterator[Item] = _events(history, poll)
        if reader.mode == "transactions":
            items = _units(history, report, poll, list(items))
        for item in items:
            order += 1
            giving = Giving(item, reader, poll, order)
            group.givings.append(giving)
            group.by_item.setdefault(item, []).append(giving)
            group.by_reader.setdefault(reader, []).append(giving)
            line = item.line
            if line is not None:
                group.lowest[line] = min(group.lowest.get(line, item.rank), item.rank)
                group.highest[line] = max(group.highest.get(line, item.rank), item.rank)


def _events(history: History, poll: Operation) -> Iterator[Event]:
    for row in poll.result["events"]:
        event = history.events.get(row[4])
        if event is not None and event.part is not None:
            yield event


def _units(history: History, report: Report, poll: Operation, items: list[Item]) -> Iterator[Item]:
    """The commits in a poll's events. Judge that each is whole, and its events are in order."""
    seen: dict[Record, list[Event]] = {}
    for event in items:
        if isinstance(event, Event) and event.record is not None:
            seen.setdefault(event.record, []).append(event)
    for record, events in seen.items():
        report.counts["whole transactions read"] += 1
        missing = set(record.events) - set(events)
        if missing and not any(
            history.was_deleted(record.line.stream, p, at) for p, at, _ in record.ranges
        ):
            text = f"{record} was read, but not {next(iter(missing))}"
            report.add("torn-transaction", text, [poll.told_where, record.line.op.told_where])
        if len(events) > len(set(events)):
            report.add("duplicate", f"{record} was read with an event twice", [poll.told_where])
        last: dict[Part, Event] = {}
        for event in events:
            if event.part is None:
                continue
            before = last.get(event.part)
            if before is not None and before.rank > event.rank:
                text = f"{event} was given after {before}"
                report.add("int-poll-order", text, [poll.told_where, event.part.op.told_where])
            last[event.part] = event
    if len({record.line for record in seen}) < len(seen):
        text = f"one poll gave {' and '.join(map(str, seen))}"
        report.add("unexplained", text, [poll.told_where])
    yield from seen


def _find_start(group: Group) -> None:
    """Find the first answered poll: events requested after it are after a start at the `end`."""
    if group.is_group:
        polls = [giving.poll for giving in group.givings]
    else:
        polls = [poll for poll in group.members[0].polls if poll.ok]
    group.first = min(polls, key=lambda poll: poll.told_at or 0, default=None)


def _judge_back(report: Report, group: Group) -> None:
    """Judge that a reader without a group never goes back, and gets nothing twice."""
    last: dict[Line, Giving] = {}
    for giving in group.givings:
        line = giving.item.line
        if line is None:
            continue
        first = group.by_item[giving.item][0]
        before = last.get(line)
        if first is not giving:
            text = f"{giving.reader.name} was given {giving.item} twice"
            report.add("duplicate", text, [first.poll.told_where, giving.poll.told_where])
        elif before is not None and before.item.rank > giving.item.rank:
            _out_of_order(report, before, giving)
        last[line] = giving


def _out_of_order(report: Report, one: Giving, other: Giving) -> None:
    kind = "int-poll-order" if one.poll is other.poll else "ext-poll-order"
    text = f"{other.reader.name} was given {one.item} before {other.item}"
    report.add(kind, text, [one.poll.told_where, other.poll.told_where])


Place = tuple[str, int | None]  # a stream's partition; None: its history, for mode ``transactions``


def _place(item: Item) -> Place | None:
    if isinstance(item, Record):
        return item.line.stream, None
    return None if item.part is None else (item.stream, item.part.partition)


def _judge_again(report: Report, group: Group) -> None:
    """Judge that no member of a group gets items before a committed position again."""
    covers: dict[Item, Operation] = {}  # item -> the first operation with a position after it
    cuts: dict[Place, list[tuple[Operation, int, Operation]]] = defaultdict(list)
    for reader in group.members:
        for position in reader.positions:
            if position.ok:
                report.counts["positions of groups"] += 1
                for stream, partition, offset in position.asked.get("positions") or ():
                    cuts[stream, partition].append((position, offset, position))
        _cover(report, group, reader, covers)
    asked: dict[Place, list[tuple[Operation, Giving]]] = defaultdict(list)
    for reader in group.members:
        for giving, since in _since(report, group, reader):
            item = giving.item
            place = _place(item)
            if item in covers and covers[item].ended_before(since):
                _given_again(report, group, giving, covers[item])
            elif place is not None:
                asked[place].append((since, giving))
    for place, of_place in cuts.items():
        for _, giving, offset, position in Told(of_place).before(asked.get(place, [])):
            report.counts["given in a group with positions"] += 1
            if giving.item.offset < offset:
                _given_again(report, group, giving, position)


def _since(report: Report, group: Group, reader: Reader) -> Iterator[tuple[Giving, Operation]]:
    """The items that a member got, each with an operation: positions that were committed before it count.

    This is the poll, unless the member records where it resumes (``resume``): then it is the last ``resume`` of the
    item's place, because for a while the member may not know that its group gave the place to another one, and
    continues there. Between two ``resume`` of a place it gets nothing twice.
    """
    at = 0
    taken: dict[Place, Operation] = {}
    last: dict[Place, tuple[Operation, Giving]] = {}
    for giving in group.by_reader.get(reader, []):
        while at < len(reader.resumes) and (reader.resumes[at].told_line or 0) < (
            giving.poll.told_line or 0
        ):
            for stream, partition in reader.resumes[at].asked["places"]:
                taken[stream, partition] = reader.resumes[at]
            at += 1
        place = _place(giving.item)
        if not reader.resumes or place is None:
            yield giving, giving.poll
            continue
        since = taken.get(place)
        if since is None:
            report.counts["given in a group, nowhere taken up"] += 1
            continue
        of_place = last.get(place)
        if of_place is not None and of_place[0] is since:
            before = of_place[1]
            if before.item is giving.item:
                _given_again(report, group, giving, since)
            elif before.item.rank > giving.item.rank:
                _out_of_order(report, before, giving)
        last[place] = since, giving
        yield giving, since


def _given_again(report: Report, group: Group, giving: Giving, position: Operation) -> None:
    below = "" if position.what == "resume" else ", below a position of its group"
    text = f"{giving.reader.name} was given {giving.item} again{below}"
    first = group.by_item[giving.item][0].poll
    evidence = [first.told_where, position.told_where, giving.poll.told_where]
    report.add("duplicate", text, evidence)


def _cover(report: Report, group: Group, reader: Reader, covers: dict[Item, Operation]) -> None:
    """Add the items before a member's positions without offsets, which count only if it was alone at that time."""
    bare = [op for op in reader.positions if op.ok and "positions" not in op.asked]
    company = _company(group, reader) if bare else []
    given = group.by_reader.get(reader, [])
    at = 0
    for position in bare:
        if not all(position.ended_before(other.op) for other in company):
            report.counts["positions of groups, passed over"] += 1
            continue
        while at < len(given) and given[at].poll.ended_before(position):
            item = given[at].item
            known = covers.get(item)
            if known is None or (known.told_at or 0) > (position.told_at or 0):
                covers[item] = position
            at += 1


def _company(group: Group, reader: Reader) -> list[Reader]:
    """Other members that may at some time have taken a partition from it without a position.

    A member that was never closed may have died: for a while its group still assigns partitions to it.
    """
    found = []
    for other in group.members:
        was_closed = other.closed is not None and other.closed.ended_before(reader.op)
        if other is not reader and not was_closed:
            found.append(other)
    return found


def _judge_before(report: Report, group: Group) -> None:
    """Judge that a group gets the items of a line in order."""
    if not group.is_group:
        return
    for giving in group.givings:
        line, rank = giving.item.line, giving.item.rank
        if line is None or rank == 0:
            continue
        before = line.items[rank - 1]
        if before not in group.by_item or group.gave_before(before, giving):
            continue  # an item that the group never gets is a gap
        if not _may_be_given(group, before, giving):
            _out_of_order(report, giving, group.by_item[before][0])


def _may_be_given(group: Group, item: Item, giving: Giving) -> bool:
    """Whether a member's poll without a result may have got an item before that one. A group may get it again."""
    if not group.is_group or not group.unfinished:
        return False
    gap = gap_before(group, item, giving)
    return any(gap.may_be_of(poll, group) for poll in group.unfinished)


def _chain(history: History, stream: str) -> dict[Event, Event]:
    """Event with a key -> the last event of the key committed before it, if that is on another partition."""
    keys: dict[str, list[Event]] = defaultdict(list)
    for (name, _), part in history.parts.items():
        if name == stream:
            for event in part.items:
                if event.key is not None and event.timestamp is not None:
                    keys[event.key].append(event)
    chain: dict[Event, Event] = {}
    for events in keys.values():
        events.sort(key=lambda event: event.timestamp or 0)
        for before, event in pairwise(events):
            if before.part is not event.part and before.timestamp != event.timestamp:
                chain[event] = before
    return chain


def _judge_keys(report: Report, group: Group, chains: dict[str, dict[Event, Event]]) -> None:
    """Judge that events of a key come in the order of their commits, also across partitions (mode ``ordered``)."""
    for giving in group.givings:
        if not isinstance(giving.item, Event):
            continue
        before = chains.get(giving.item.stream, {}).get(giving.item)
        if before is None:
            continue
        report.counts["keys followed across partitions"] += 1
        if group.gave_before(before, giving):
            continue
        if before in group.by_item:
            if not _may_be_given(group, before, giving):
                _out_of_order(report, giving, group.by_item[before][0])
            continue
        lowest = group.lowest.get(before.part) if before.part is not None else None
        is_due = group.must_give(before) or (lowest is not None and before.rank >= lowest)
        excused = any(not giving.poll.ended_before(poll) for poll in group.unfinished[:1])
        if is_due and not excused:
            text = f"{giving.reader.name} was given {giving.item}, and never {before} before it"
            report.add("poll-skip", text, [giving.poll.told_where, before.op.where])
