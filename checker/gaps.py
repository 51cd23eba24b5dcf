"""Judges gaps: items that a reader or a group never got, although they are after its start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from checker.lines import Giving, Group, Item, Line
from checker.model import History, Record
from checker.reading import Operation
from checker.report import Report


@dataclass(slots=True)
class Gap:
    """Consecutive items of a line that a group never got. ``before``, ``after``: the items around them, if any."""

    first: Item
    before: Item | None
    after: Item | None = None

    def may_be_of(self, poll: Operation, group: Group) -> bool:
        """Whether a poll without a recorded result may have got these items, because it was between both sides.

        Or it was earlier, and also got the item before them: then only other members got that item, again, and the
        item after them, if any, went to a member that did not.
        """
        if self.before is not None and all(
            poll.ended_before(giving.poll) for giving in group.by_item[self.before]
        ):
            stale = {giving.reader.name for giving in group.by_item[self.before]}
            went_on = self.after is None or any(
                giving.reader.name not in stale for giving in group.by_item[self.after]
            )
            if poll.asked["reader"] in stale or not went_on:
                return False
        if self.after is not None:
            return not any(giving.poll.ended_before(poll) for giving in group.by_item[self.after])
        return not all(end.ended_before(poll) for end in group.ends)


def judge_gaps(history: History, report: Report, group: Group) -> None:
    """``poll-skip``, if the group got a later item; ``unseen-commit``, if it has caught up without the item."""
    has_caught_up = _has_caught_up(group)
    for line in _lines(history, group):
        used: set[Operation] = set()  # each poll may excuse one gap of a line
        for gap in _gaps(history, group, line, to_the_end=has_caught_up):
            polls = (poll for poll in group.unfinished if gap.may_be_of(poll, group))
            excuse = next((p for p in polls if p not in used or _went_on(group, gap, p)), None)
            if excuse is None:
                _add(report, group, gap, line)
            else:
                used.add(excuse)
                report.counts["gaps excused by unfinished polls"] += 1


def gap_before(group: Group, item: Item, giving: Giving) -> Gap:
    """An item, and the consecutive ones before it on its line, that the group had not got before that one."""
    items: Sequence[Item] = item.line.items if item.line is not None else ()
    rank = item.rank
    while rank > 0 and not group.gave_before(items[rank - 1], giving):
        rank -= 1
    return Gap(items[rank], items[rank - 1] if rank > 0 else None, giving.item)


def _went_on(group: Group, gap: Gap, poll: Operation) -> bool:
    """Whether a poll's member got the item after a gap, and only others got the item before it.

    Then the poll may have got this gap and an earlier one, and others got the items between them again.
    """
    before, after = (
        {giving.reader.name for giving in group.by_item[item]} if item is not None else set()
        for item in (gap.before, gap.after)
    )
    return poll.asked["reader"] in after - before


def _gaps(history: History, group: Group, line: Line, *, to_the_end: bool) -> list[Gap]:
    lowest, highest = group.lowest.get(line), group.highest.get(line, -1)
    found: list[Gap] = []
    before: Item | None = None
    gap: Gap | None = None
    items: Sequence[Item] = line.items
    for item in islice(items, None if to_the_end else highest + 1):
        if item in group.by_item:
            if gap is not None:
                gap.after = item
            gap, before = None, item
        elif gap is None and not _may_lack(history, item):
            is_due = (lowest is not None and item.rank >= lowest) or group.must_give(item)
            if is_due:
                gap = Gap(item, before)
                found.append(gap)
    return found


def _may_lack(history: History, item: Item) -> bool:
    """Whether readers need not get an item."""
    return _is_torn(history, item) if isinstance(item, Record) else item.is_adrift


def _is_torn(history: History, record: Record) -> bool:
    """Whether retention may have deleted some of a commit, or all: readers can't get it whole."""
    stream = record.line.stream
    return not record.events or any(
        history.was_deleted(stream, partition, first) for partition, first, _ in record.ranges
    )


def _add(report: Report, group: Group, gap: Gap, line: Line) -> None:
    name = group.members[0].name
    who = f"group {group.members[0].group}" if group.is_group else name
    if gap.after is not None:
        later = group.by_item[gap.after][0]
        text = f"{who} was never given {gap.first}, but {later.item} behind it"
        report.add("poll-skip", text, [later.poll.told_where, line.op.told_where])
    else:
        text = f"{who} has caught up, and was never given {gap.first}"
        evidence = [*(op.where for op in group.ends), line.op.told_where]
        report.add("unseen-commit", text, evidence)


def _lines(history: History, group: Group) -> Iterator[Line]:
    for stream in sorted({stream for reader in group.members for stream in reader.streams}):
        if group.members[0].mode == "transactions":
            if stream in history.chronicles:
                yield history.chronicles[stream]
            continue
        for (name, _), part in history.parts.items():
            if name == stream:
                yield part


def _has_caught_up(group: Group) -> bool:
    """Whether all members report that they have caught up, apart from those that polled no more."""
    if not group.ends:
        return False
    first = min(group.ends, key=lambda op: op.at)
    for reader in group.members:
        if any(op.ok for op in reader.caught_up):
            continue
        if any(not poll.ended_before(first) and poll.told_at is not None for poll in reader.polls):
            return False
    return True
