"""Snapshots of the past while histories grow: 1,000, 100,000 and 1,000,000 commits (``--quick``: up to 100,000).

Each history is written at once, without a controller and without events: rounds of ten commits to four partitions,
one each ten milliseconds, the last one now. A look-up is `Client.snapshot` with ``mode="latest"``, which asks no
controller: as of a random time in the history, and as of now. In turn, in one run, medians; ratios to the first.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import anabranch
from anabranch.batches.records import Record, encode_batch
from anabranch.kafka.log import KafkaLog
from anabranch.ports import TopicPartition
from anabranch.protocol.hybrid_time import from_us, to_ms
from anabranch.protocol.partitioner import SPACE
from anabranch.protocol.schemas.codec import encode
from anabranch.protocol.schemas.records import (
    CommitRecord,
    EpochRecord,
    EpochSegment,
    Position,
    SegmentCommit,
)
from anabranch.topics.creation import create_stream_topics
from anabranch.topics.names import history_topic
from bench.setting import Place

COMMITS, QUICK_COMMITS = (1_000, 100_000, 1_000_000), (1_000, 10_000, 100_000)
PARTITIONS, ROUND, ROUND_US = 4, 10, 10_000
LOOKUPS, WARM_UPS = 200, 20
GOAL = 1.5


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """A row for each length of the history."""
    rows: list[dict[str, Any]] = []
    spans: dict[str, tuple[int, int]] = {}
    with anabranch.connect(place.bootstrap) as client, closing(KafkaLog(place.bootstrap)) as log:
        for commits in QUICK_COMMITS if quick else COMMITS:
            began = time.monotonic()
            stream = f"bench/l{commits}"
            spans[stream] = _write(log, stream, commits)
            rows.append({"commits": commits, "written_s": time.monotonic() - began})
        took: dict[tuple[str, str], list[float]] = defaultdict(list)
        for number in range(WARM_UPS + LOOKUPS):  # in turn
            for stream, (first, last) in spans.items():
                for name, at in (("then", random.randrange(first, last)), ("now", None)):
                    before = time.perf_counter()
                    client.snapshot(stream, at, mode="latest")
                    if number >= WARM_UPS:
                        took[stream, name].append(time.perf_counter() - before)
    for name in ("then", "now"):
        for row, stream in zip(rows, spans, strict=True):
            row[f"{name}_ms"] = statistics.median(took[stream, name]) * 1000
            row[f"{name}_ratio"] = row[f"{name}_ms"] / rows[0][f"{name}_ms"]
    return {"lookups": LOOKUPS, "goal_at_most": GOAL, "rows": rows}


def _write(log: KafkaLog, stream: str, commits: int) -> tuple[int, int]:
    """A stream with a history of so many commits; the first and the last timestamp."""
    create_stream_topics(log, stream, segments=PARTITIONS, settings={})
    place = TopicPartition(history_topic(stream), 0)
    first_us = time.time_ns() // 1000 - commits // ROUND * ROUND_US
    with closing(log.producer(f"bench-{stream}", timeout=60)) as producer:
        (at,) = producer.append([(place, _batch([_epoch(from_us(first_us))]))])
        for records in _rounds(commits, first_us):
            # Each record names the one before it; a marker stands behind each native transaction.
            linked = [
                record._replace(previous=-2 if number else at)
                for number, record in enumerate(records)
            ]
            (base,) = producer.append([(place, _batch(linked))])
            at = base + len(linked) - 1
        producer.commit()
    return from_us(first_us), from_us(first_us + (commits // ROUND - 1) * ROUND_US)


def _epoch(timestamp: int) -> EpochRecord:
    size = SPACE // PARTITIONS
    segments = tuple(EpochSegment(p, p * size, (p + 1) * size, p, 0) for p in range(PARTITIONS))
    ends = tuple(Position(p, 0) for p in range(PARTITIONS))
    return EpochRecord(0, 0, timestamp, segments, (), ends, -1)


def _rounds(commits: int, first_us: int) -> Iterator[list[CommitRecord]]:
    ends = [0] * PARTITIONS
    for number in range(commits // ROUND):
        timestamp = from_us(first_us + number * ROUND_US)
        records = []
        for one in range(ROUND):
            p = one % PARTITIONS
            part = SegmentCommit(p, p, ends[p], ends[p] + 1, 1)
            ends[p] += 1
            vector = tuple(Position(*end) for end in enumerate(ends))
            txn_id = (number * ROUND + one + 1).to_bytes(16, "big")
            records.append(CommitRecord(txn_id, 0, timestamp + one, (part,), vector, -1))
        yield records


def _batch(records: list[Any]) -> bytes:
    return encode_batch(
        [
            Record(i, to_ms(record.timestamp), b"", encode(record))
            for i, record in enumerate(records)
        ]
    )


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    head = ["commits", "written s", "then, ms", "of the first", "now, ms", "of the first", "goal"]
    rows = [
        [
            f"{row['commits']:,}",
            f"{row['written_s']:.1f}",
            f"{row['then_ms']:.1f}",
            f"{row['then_ratio']:.2f} ×",
            f"{row['now_ms']:.1f}",
            f"{row['now_ratio']:.2f} ×",
            f"≤ {GOAL} ×",
        ]
        for row in result["rows"]
    ]
    return head, rows
