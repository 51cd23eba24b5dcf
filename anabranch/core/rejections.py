"""Journal records that were rejected after the broker had acknowledged them: how many ever, and the newest.

The index keeps them in the status table, by batch, as it keeps those of open transactions by run.
From time to time, and before the journal's low water rises, they are added to the stream's `RejectedRow`, which has
the offset up to which each partition's are counted. So a leader without a status table counts the rest again.
"""

from __future__ import annotations

import struct
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from anabranch.core import rows as k
from anabranch.core import work
from anabranch.core.decisions.turn import Turn
from anabranch.core.journal_runs import rejected_key, rejected_place, rejected_prefix
from anabranch.core.state import State
from anabranch.protocol import limits
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode_as, encode

LEVEL = 4  # the feature level that has these rows
_KEPT_MS = limits.REJECTED_MS.value
_MOST_BATCHES = 500  # of which one round adds the rejected records to the rows of their streams
_NONE = r.RejectedRow({}, {}, ())
# Before the value of a batch: when it was read, and the bytes of its first part, which has the counts. So the
# records of a batch, up to 100 KB, are decoded only if they are among the newest.
_HEAD = struct.Struct(">qI")


def are_kept(state: State) -> bool:
    """Whether the cluster's feature level has rows of rejected records."""
    return state.feature_level >= LEVEL


def counted_until(state: State, stream: str, partition: int) -> int:
    """The journal offset below which the stream's row counts all rejected records of a partition."""
    row = state.rejected.get(stream)
    return 0 if row is None else row.until.get(str(partition), 0)


class RejectedRun(NamedTuple):
    """Consecutive journal records that were rejected. ``first``: the offset of the first one."""

    reason: str
    first: int
    records: int


def kept(
    stream: str, partition: int, runs: Sequence[RejectedRun], found: Iterable[r.RejectedRecord]
) -> tuple[bytes, bytes]:
    """Table key and value of the rejected runs of a batch. ``found``: their records."""
    counts = Counter[str]()
    for run in runs:
        counts[run.reason] += run.records
    newest = tuple(deque(found, limits.REJECTED.value))
    until = {str(partition): max(run.first for run in runs) + 1}
    first = min(run.first for run in runs)
    head = encode(r.RejectedRow(dict(counts), until, ()))
    value = _HEAD.pack(newest[-1].at_ms, len(head)) + head + encode(r.RejectedRow({}, {}, newest))
    return rejected_key(NO_TXN, stream, partition, first), value


def cut_key(key: bytes | None) -> bytes | None:
    """As much of a key as is kept."""
    return None if key is None else key[: limits.REJECTED_KEY]


def log_new(turn: Turn) -> bool:
    """Add what was rejected to the rows of its streams. Returns False if more is left: then call it again soon."""
    if not are_kept(turn.state):
        return True
    found = list(islice(turn.index.rows.scan(k.REJECTED + NO_TXN), _MOST_BATCHES + 1))
    by_stream: dict[str, list[tuple[bytes, bytes]]] = {}
    for key, value in found[:_MOST_BATCHES]:
        by_stream.setdefault(rejected_place(key)[0], []).append((key, value))
    for stream, runs in by_stream.items():
        turn.charge(work.LOOK * len(runs))
        for key, _ in runs:
            turn.state.keep(key, None)
        if stream in turn.state.streams:
            turn.put(k.rejected_row_key(stream), _with(turn, stream, runs))
    for stream, row in list(turn.state.rejected.items()):
        if row.records and row.records[0].at_ms < turn.wall_ms - 2 * _KEPT_MS:
            turn.put(k.rejected_row_key(stream), _with(turn, stream, ()))
    return len(found) <= _MOST_BATCHES


def of_stream(turn: Turn, stream: str) -> r.RejectedRow:
    """All that was rejected of a stream, as far as its journal is indexed."""
    kept_there = turn.index.rows.scan(rejected_prefix(NO_TXN, stream))
    runs = list(islice(kept_there, _MOST_BATCHES))
    turn.charge(work.LOOK * len(runs) + work.of_items(limits.REJECTED.value))
    return _with(turn, stream, runs)


def _with(turn: Turn, stream: str, runs: Iterable[tuple[bytes, bytes]]) -> r.RejectedRow:
    """The stream's row, with more runs, and without records that are too old."""
    row = turn.state.rejected.get(stream, _NONE)
    counts, until = Counter(row.counts), dict(row.until)
    batches: list[tuple[int, bytes, bytes]] = []
    for key, value in runs:
        _, place, first = rejected_place(key)
        if first < row.until.get(str(place), 0):
            continue  # a status table that was not in use meanwhile has records that another leader counted
        at_ms, size = _HEAD.unpack_from(value)
        more = decode_as(r.RejectedRow, value[_HEAD.size : _HEAD.size + size])
        counts.update(more.counts)
        for partition, end in more.until.items():
            until[partition] = max(end, until.get(partition, 0))
        batches.append((at_ms, key, value[_HEAD.size + size :]))
    records: list[r.RejectedRecord] = []
    for _, _, newest in sorted(batches, reverse=True):
        if len(records) >= limits.REJECTED.value:
            break
        records += decode_as(r.RejectedRow, newest).records
    records = sorted(
        [*row.records, *records], key=lambda one: (one.at_ms, one.partition, one.offset)
    )
    oldest = turn.wall_ms - _KEPT_MS
    kept = [record for record in records[-limits.REJECTED.value :] if record.at_ms >= oldest]
    return r.RejectedRow(dict(counts), until, tuple(kept))
