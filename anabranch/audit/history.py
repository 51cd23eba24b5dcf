"""Checks of the history alone: records, chain, timestamps, epochs, ranges, vectors."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from anabranch.audit.findings import ALL, Findings, Rule
from anabranch.audit.report import Example
from anabranch.audit.tables import COMMIT, EPOCH, FOREIGN
from anabranch.core.history_records import DIRECTLY_BEFORE, NO_PREVIOUS, OWN
from anabranch.protocol.ids import NO_TXN

POSITIONS = 1 << 32
_NUMBER = (1 << 32) - 1


class Extent(NamedTuple):
    """The part of a stream's history that still exists.

    ``floor``: partition -> offset below which this part names no events; empty if the part has the stream's first
    record. ``vector``: of the last record. ``since``: the first record's timestamp. ``cut``: whether earlier
    records were deleted.
    """

    vector: Mapping[int, int]
    floor: Mapping[int, int]
    since: int
    cut: bool


def extents(history: DataFrame) -> dict[str, Extent]:
    records = history.where(F.col("kind") != FOREIGN)
    whole = F.when(F.col("vector_at") == OWN, F.col("offset"))
    rows = records.groupBy("stream").agg(
        F.min_by(F.struct("previous", "timestamp"), "offset").alias("first"),
        F.min_by(F.struct("vector", "segments"), whole).alias("told"),
    )
    # Ends never fall, so the highest end is the end in the last record.
    ends = (
        records.select("stream", F.inline("vector").alias("partition", "position"))
        .groupBy("stream", "partition")
        .agg(F.max("position").alias("end"))
        .groupBy("stream")
        .agg(F.map_from_entries(F.collect_list(F.struct("partition", "end"))).alias("ends"))
    )
    found = {}
    for row in rows.join(ends, "stream").collect():
        first, told = row["first"], row["told"]
        floor: dict[int, int] = {}
        cut = first["previous"] != NO_PREVIOUS
        if cut and told is None:
            floor = row["ends"]
        elif cut:
            floor = {p["partition"]: p["offset"] for p in told["vector"]}
            floor |= {s["partition"]: s["end"] for s in told["segments"] or ()}
        found[row["stream"]] = Extent(row["ends"], floor, first["timestamp"], cut)
    return found


_RECORD_RULES = (
    Rule(
        "history-record",
        "problem is not null",
        "an EPOCH or COMMIT record under its key",
        "{problem}",
    ),
)
_CHAIN_RULES = (
    Rule(
        "history-chain",
        f"not cut_before and says != coalesce(before, {NO_PREVIOUS})",
        f"previous {{coalesce(before, {NO_PREVIOUS})}}",
        "{says}",
    ),
    Rule("history-time", "timestamp <= time_before", "after {time_before}", "{timestamp}"),
    Rule(
        "vectors",
        f"vector_at = {OWN} and size(vector) < size_before",
        "at least {size_before} partitions",
        "{size(vector)}",
    ),
    Rule(
        "vectors",
        "says_whole != whole_before",
        "the last vector is at {whole_before}",
        "at {says_whole}",
    ),
)
_ONCE_RULES = (Rule("commit-once", "n > 1", "1 COMMIT record", "{n}"),)


def check_records(history: DataFrame, starts: Mapping[str, int], findings: Findings) -> DataFrame:
    """Check each record against the record before. Returns the valid records, each with its active epoch.

    ``starts``: where the history topics begin.
    """
    findings.count(history, {"history-record": ALL})
    findings.judge(history, _RECORD_RULES, partition="0")
    sound = findings.keep(_chained(history, starts))
    findings.count(
        sound,
        {
            "history-chain": ("not cut_before", "cut_before"),
            "history-time": ("before is not null", "cut_before"),
        },
    )
    findings.judge(sound, _CHAIN_RULES, partition="0")
    once = (
        sound.where((F.col("kind") == COMMIT) & (F.col("txn_id") != F.lit(NO_TXN)))
        .groupBy("stream", "txn_id")
        .agg(F.count("*").alias("n"), F.max("offset").alias("offset"))
    )
    findings.count(once, {"commit-once": ALL})
    findings.judge(once, _ONCE_RULES, partition="0")
    return sound


def _chained(history: DataFrame, starts: Mapping[str, int]) -> DataFrame:
    """The valid records, each with the facts that it states about earlier records, and the true facts."""
    order = Window.partitionBy("stream").orderBy("offset")
    earlier = order.rowsBetween(Window.unboundedPreceding, -1)
    is_whole = F.col("vector_at") == OWN
    start = F.create_map(*(F.lit(cell) for pair in starts.items() for cell in pair))
    return (
        history.where(F.col("kind") != FOREIGN)
        .withColumns(
            {
                "before": F.lag("offset").over(order),
                "time_before": F.lag("timestamp").over(order),
                "size_before": F.last(F.when(is_whole, F.size("vector")), True).over(earlier),
                "whole_before": F.last(F.when(is_whole, F.col("offset")), True).over(order),
                "says_whole": F.expr(f"if(vector_at < 0, offset + vector_at - {OWN}, vector_at)"),
                "active": F.last(F.when(F.col("kind") == EPOCH, F.col("epoch")), True).over(order),
                "says": F.expr(f"if(previous = {DIRECTLY_BEFORE}, offset - 1, previous)"),
                "start": start[F.col("stream")],
            }
        )
        .withColumn("cut_before", F.expr("before is null and says >= 0 and says < start"))
        .withColumn("cut", F.max("cut_before").over(Window.partitionBy("stream")))
        .drop("start")
    )


def layouts_of(sound: DataFrame) -> DataFrame:
    """The segments of each epoch, without repetition: stream, epoch, reference, id, low, high, partition, start."""
    said = sound.where(F.col("kind") == EPOCH).select(
        "stream", "epoch", "reference", F.inline("layout")
    )
    return said.dropDuplicates(["stream", "epoch", "id"])


def ranges_of(sound: DataFrame, layouts: DataFrame) -> DataFrame:
    """The offset ranges that COMMIT records give for their events, one row for each.

    To each range is joined its segment (key range, partition, first offset), from the layout of the record's stream
    epoch; these columns are null if the layout lacks the segment. ``sound``: history records that could be decoded.
    """
    ranges = sound.where(F.col("kind") == COMMIT).select(
        "stream",
        F.col("offset").alias("record"),
        "txn_id",
        "timestamp",
        "epoch",
        "active",
        "cut",
        F.inline("segments"),
    )
    segments = layouts.select(
        "stream", "epoch", "id", "low", "high", "reference",
        F.col("partition").alias("its_partition"), "start",
    )  # fmt: skip
    return ranges.join(segments, ["stream", "epoch", "id"], "left")


_PLACE = "{partition}@{first}..{end}"
_RANGE_RULES = (
    Rule(
        "commit-place",
        "not untold and epoch != coalesce(active, -1)",
        "epoch {active}",
        "epoch {epoch}",
    ),
    Rule(
        "commit-place",
        "not untold and (start is null or its_partition != partition or first < start)",
        "segment {id} from {its_partition}@{start}",
        _PLACE,
    ),
    Rule(
        "commit-ranges",
        "first < coalesce(before, 0) or count < 1 or end - first < count",
        "{count} events from {coalesce(before, 0)} on",
        _PLACE,
    ),
)
_VECTOR_RULES = (
    Rule(
        "vectors",
        "position is null or position != due",
        "{due} in the record at {record}",
        "{position}",
    ),
)


def check_ranges(sound: DataFrame, ranges: DataFrame, findings: Findings) -> None:
    """Check the commits' ranges, and the vectors against them."""
    order = Window.partitionBy("stream", "partition").orderBy("record", "first")
    following = ranges.withColumns(
        {
            "before": F.lag("end").over(order),
            # The range is before the first EPOCH record of a truncated history.
            "untold": F.expr("cut and active is null"),
        }
    )
    counts = {"commit-place": ("not untold", "untold"), "commit-ranges": ALL}
    findings.count(following, counts)
    findings.judge(following, _RANGE_RULES, offset="first")
    entries = sound.select(
        "stream",
        F.col("offset").alias("record"),
        "txn_id",
        F.inline("vector").alias("partition", "position"),
    )
    ends = ranges.groupBy("stream", "record", "partition").agg(
        F.max("end").alias("end"), F.first("txn_id").alias("its")
    )
    order = Window.partitionBy("stream", "partition").orderBy("record")
    both = (
        entries.join(ends, ["stream", "record", "partition"], "full")
        .withColumn("before", F.lag("position").over(order))
        .withColumn("due", F.coalesce("end", "before"))
    )
    findings.count(both, {"vectors": ALL})
    findings.judge(both, _VECTOR_RULES, txn="coalesce(txn_id, its)", offset="position")


# -- epochs ----------------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    id: int
    low: int
    high: int
    partition: int
    start: int


def check_epochs(sound: DataFrame, findings: Findings) -> None:
    """Check the EPOCH records one at a time: they are few."""
    rows = (
        sound.where(F.col("kind") == EPOCH)
        .select("stream", "offset", "epoch", "reference", "layout", "sealed", "vector", "previous")
        .orderBy("stream", "offset")
        .toLocalIterator()
    )
    for stream, records in itertools.groupby(rows, key=lambda row: row["stream"]):
        walk = _Epochs(stream, findings)
        for record in records:
            walk.take(record)
        findings.add("epochs", walk.seen, walk.unchecked)


class _Epochs:
    """Checks a stream's EPOCH records: rules E1, E3 and E7 of docs/inside/epochs.md, and the segments' ends."""

    def __init__(self, stream: str, findings: Findings) -> None:
        self._stream = stream
        self._findings = findings
        self._layouts: dict[int, tuple[_Layout, ...]] = {}
        self._open: dict[int, _Layout] = {}
        self._numbers: set[int] = set()
        self._last: int | None = None
        self._whole = True
        self.seen = 0
        self.unchecked = 0

    def take(self, record: Any) -> None:
        self.seen += 1
        segments = {s["id"]: _Layout(*s) for s in record["layout"]}
        epoch, reference = record["epoch"], record["reference"]
        ends = {p["partition"]: p["offset"] for p in record["vector"]}
        self._offset = record["offset"]
        first = self._last is None
        if epoch == self._last:
            same = segments == self._open and self._layouts[epoch] == tuple(segments.values())
            self._expect(same and not record["sealed"], f"epoch {epoch} as it was", "another one")
            return
        self._tiles(segments.values())
        if first:
            self._whole = record["previous"] == NO_PREVIOUS
            self.unchecked += not self._whole
        else:
            self._expect(
                epoch == (self._last or 0) + 1, f"epoch {(self._last or 0) + 1}", f"epoch {epoch}"
            )
            sealed = {s["id"]: s["end"] for s in record["sealed"]}
            gone = self._open.keys() - segments.keys()
            self._expect(
                sealed.keys() == gone, f"sealed: {sorted(gone)}", f"sealed: {sorted(sealed)}"
            )
            for id_ in gone & sealed.keys():
                was = self._open[id_]
                end = max(ends.get(was.partition, 0), was.start)
                self._expect(
                    sealed[id_] == end, f"segment {id_} ends at {end}", f"at {sealed[id_]}"
                )
        self._opened(segments, epoch, reference, ends)
        self._like_reference(segments.values(), epoch, reference)
        self._layouts[epoch] = tuple(segments.values())
        self._open, self._last = segments, epoch

    def _tiles(self, segments: Collection[_Layout]) -> None:
        ranges = sorted((s.low, s.high) for s in segments)
        bounds = [0, *(high for _, high in ranges)]
        self._expect(
            [low for low, _ in ranges] == bounds[:-1] and bounds[-1] == POSITIONS,
            f"ranges that tile 0..{POSITIONS}",
            str(ranges),
        )
        places = [s.partition for s in segments]
        self._expect(
            len(set(places)) == len(places), "a partition for each segment", str(sorted(places))
        )

    def _opened(
        self, segments: Mapping[int, _Layout], epoch: int, reference: int, ends: Mapping[int, int]
    ) -> None:
        for id_, segment in segments.items():
            number = id_ & _NUMBER
            was = self._open.get(id_)
            if was is not None:
                self._expect(segment == was, f"{was}", f"{segment}")
            elif self._last is not None or self._whole:
                self._expect(
                    id_ >> 32 == epoch, f"new segments are of epoch {epoch}", f"segment {id_}"
                )
                if reference == epoch:
                    self._expect(
                        number not in self._numbers, "new numbers", f"number {number} again"
                    )
                at = ends.get(segment.partition, 0)
                self._expect(segment.start >= at, f"begins at {at} or later", f"at {segment.start}")
            self._numbers.add(number)

    def _like_reference(self, segments: Iterable[_Layout], epoch: int, reference: int) -> None:
        if reference == epoch:
            return
        if reference not in self._layouts:
            if self._whole:
                self._expect(False, "a reference epoch that there is", f"epoch {reference}")
            else:
                self.unchecked += 1
            return
        want = {(s.id & _NUMBER, s.low, s.high) for s in self._layouts[reference]}
        have = {(s.id & _NUMBER, s.low, s.high) for s in segments}
        self._expect(have == want, f"the segments of epoch {reference}", str(sorted(have)))

    def _expect(self, holds: bool, expected: str, found: str) -> None:
        if not holds:
            example = Example(self._stream, "", 0, self._offset, expected, found)
            self._findings.found("epochs", example)
