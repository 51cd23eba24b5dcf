"""Kinds and sizes of messages: which commands set something or may be big, and the bytes of receipts and answers.

`limits` does not import this, so limits can be used without loading the classes of all records.
"""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.protocol.schemas import records as r

# The commands that set something. `FindScope` is not among them, because a scope is never changed, nor is
# `SetFeatureLevel`: a level is never lowered, so a late copy changes nothing.
SETS = frozenset(
    (
        r.CreateStream,
        r.ForgetStream,
        r.DeleteStream,
        r.RecoverStream,
        r.AlterStream,
        r.TruncateStream,
        r.PublishBase,
        r.Scale,
        r.SetLane,
        r.SetGrant,
        r.CreateProcessor,
        r.AlterProcessor,
        r.CopyProcessor,
        r.ResetProcessor,
        r.DeleteProcessor,
        r.SetSeries,
    )
)

# Commands with events or receipts. Their limit, unpacked, is max.message.bytes of their topic, not `COMMAND`.
BIG = (r.OneShot, r.PrepareEvents, r.Commit, r.Register)


def size_of(receipts: Iterable[r.Receipt]) -> int:
    """An upper bound of the bytes of receipts."""
    return sum(48 + sum(len(e.stream) + 40 for e in receipt.extents) for receipt in receipts)


def _weight_of(segments: Iterable[r.LockedSegment]) -> int:
    return sum(96 + len(one.stream) + 17 * len(one.waiting) for one in segments)


def weight(answer: object) -> int:
    """The bytes of an answer, about."""
    match answer:
        case r.Outcome():
            size = 256 + 4 * (len(answer.name or "") + len(answer.reason))
            if answer.writers:
                size += size_of(answer.writers)
            return size + sum(map(len, answer.streams))
        case r.Ended():
            return sum(map(weight, answer.not_open))
        case r.TransactionList():
            return sum(map(weight, answer.transactions))
        case r.OpenList():
            return sum(map(weight, answer.transactions))
        case r.RunList():
            return 64 * len(answer.runs) + 32 * len(answer.more)
        case r.OpenInfo():
            writers = sum(128 + 4 * len(one.label) for one in answer.writers)
            segments = _weight_of((*answer.locked_segments, *answer.asks))
            parts = sum(64 + 4 * sum(map(len, one.scopes)) for one in answer.partitions)
            merges = 160 * len(answer.staged_merges)
            return 96 + weight(answer.outcome) + writers + merges + segments + parts
        case r.SeriesList():
            return sum(256 + 4 * len(one.series) + 8 * len(one.runs) for one in answer.series)
        case r.AuditList():
            return sum(256 + 4 * len(row.what) for row in answer.entries)
        case r.GrantList():
            return 512 * len(answer.grants)
        case r.ProcessorList():
            return sum(map(weight, answer.processors))
        case r.ProcessorInfo():
            tasks = sum(160 + len(task.holder) + 40 * len(task.positions) for task in answer.tasks)
            texts = 4 * sum(map(len, (*answer.stores, answer.topology)))
            return 256 + 160 * len(answer.inputs) + texts + tasks
        case r.ReadsLocked():
            spans = [span for each in answer.locks for span in each.ranges]
            points = sum(len(each.points) for each in answer.locks)
            bounds = sum(8 + len(span.low) + len(span.high or b"") for span in spans)
            return 256 + 64 * len(answer.tables) + 10 * points + bounds
        case r.StreamList():
            return sum(map(weight, answer.streams))
        case r.StreamInfo() | r.Touched():
            size = 1024 + 32 * len(answer.segments)
            if isinstance(answer, r.StreamInfo):
                size += 24 * (len(answer.journal) + len(answer.low_water))
                size += 4 * len(answer.description) + _weight_of(answer.locked_segments)
            return size
        case _:
            return 1024
