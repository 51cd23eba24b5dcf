"""Ranges of a streaming query that retention removed before it read them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from anabranch.errors import NotReady, SnapshotExpired
from anabranch.schemas.records import CommitRecord
from anabranch.spark.source.admission import NotYet
from anabranch.spark.source.histories import Histories
from anabranch.spark.source.plan import EventRange
from anabranch.spark.source.positions import Position

log = logging.getLogger("anabranch.spark")


def still_there(
    histories: Histories,
    ranges: list[EventRange],
    befores: Mapping[str, Position],
    *,
    strict: bool,
) -> list[EventRange]:
    """The ranges, which begin at ``befores``, without removed events and removed history.

    Raises: SnapshotExpired (``strict``: events are gone), NotReady, DeadlineExceeded.
    """
    places = [(found.stream, found.partition) for found in ranges]
    firsts, begins = histories.starts(places) if places else ({}, {})
    left = []
    for found in ranges:
        if found.history is not None and found.history[0] < begins[found.stream]:
            found = replace(found, history=(begins[found.stream], found.history[1]))
        first = firsts[found.stream, found.partition]
        if found.first < first:
            # An added stream has no former position: its removed events are no loss to this query.
            before = befores.get(found.stream)
            event = first if before is None else _first_event(histories, found, before)
            if event < min(first, found.end):
                lost = (
                    f"{found.stream}, partition {found.partition}: retention removed offsets {event} to "
                    f"{min(first, found.end) - 1} before they were read"
                )
                if strict:
                    raise SnapshotExpired(
                        f"{lost}; set option failOnDataLoss=false to go on without them, and keep the stream "
                        "for longer"
                    )
                log.warning("%s", lost)
            found = replace(found, first=min(first, found.end))
        if found.first < found.end:
            left.append(found)
    return left


def _first_event(histories: Histories, found: EventRange, before: Position) -> int:
    """The offset of the range's first event: retention may remove markers before it, without a loss.

    If the history tells it no more: the range's begin.
    """
    if histories.is_cut(found.stream, before.after):
        return found.first
    tail = histories.tail(found.stream)
    committed, _ = histories.ends()[found.stream]
    tail.begin(before.after, committed, committed)
    try:
        while (record := tail.peek(histories.timeout)) is not None:
            if isinstance(record.record, CommitRecord):
                stands = [
                    max(part.first, found.first)
                    for part in record.record.segments
                    if part.partition == found.partition and part.end > found.first
                ]
                if stands:
                    return min(stands)
            tail.pop()
    except NotYet as error:
        raise NotReady(str(error)) from error
    return found.end
