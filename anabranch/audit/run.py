"""The audit: a proof from the logs that streams have what was committed, once, in order, complete, and no more.

Spark's tasks read the records of status, histories, journals and streams, in parallel by offset ranges, and compare
them. The driver only asks for the ends of topics, and checks the EPOCH records.

Ends are asked for in an order that lets a running system be audited: first the status log's hybrid time, then the
ends of the streams, of their histories, of the journals, and of the status log. So each event that the audit reads
has its record in the history that it reads, and each commit up to that hybrid time is in all logs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from anabranch.audit import events as events_of
from anabranch.audit import history as history_of
from anabranch.audit import journal as journal_of
from anabranch.audit import status as status_of
from anabranch.audit.findings import ALL, Findings
from anabranch.audit.history import Extent
from anabranch.audit.log import Span, open_log, read_records
from anabranch.audit.report import AuditReport, Gone
from anabranch.audit.tables import COMMIT, FOREIGN, Scopes, find_scopes, read_history, read_status
from anabranch.core.rows import Entry
from anabranch.errors import DeadlineExceeded, InvalidArgument, NotReady, UnknownStream
from anabranch.kafka.log import KafkaLog
from anabranch.ledger.book import BEGUN, Row
from anabranch.ports import TopicPartition
from anabranch.protocol.hybrid_time import MAX
from anabranch.protocol.ids import control_partition_of
from anabranch.protocol.legal_names import is_state, split_stream
from anabranch.spark.options import Connection
from anabranch.topics.names import history_topic, journal_topic, status_topic, stream_topic

__all__ = ["audit"]

_POLL_S = 0.05
# counted like checks
EVENTS = "events"
COMMITS = "commits"
# No log says how far the journals' plain writes were committed at a past moment.
PLAIN_NOTE = "As of a moment that is given, plain writes are not compared with the journals."


def audit(
    spark: SparkSession,
    connection: Connection,
    names: Sequence[str],
    at: int | None = None,
    ledger: Sequence[Row] = (),
) -> AuditReport:
    """Audit streams; the name of a scope means all streams of the scope.

    ``at``: as of this hybrid time; None: up to now, with all events in the streams. ``ledger``: rows of
    `anabranch.ledger.Ledger.rows`, read before the call; those of other control partitions are left out.

    Raises:
        InvalidArgument: no stream, or scopes of several control partitions.
        UnknownScope, UnknownStream: the scope or stream does not exist.
        NotReady: a broker lags: it does not show all partitions of a stream.
        DeadlineExceeded: a partition returned nothing during the connection's timeout.
    """
    if not names:
        raise InvalidArgument("no stream to audit")
    log = open_log(connection)
    try:
        return _Audit(spark, connection, log, at).run(names, ledger)
    finally:
        log.close()


class _Ends(NamedTuple):
    """The end offsets up to which topics are read. ``status_before``: the status log's end before all others."""

    streams: Mapping[TopicPartition, int]
    histories: Mapping[TopicPartition, int]
    journals: Mapping[TopicPartition, int]
    status_before: int
    status: int


class _Known(NamedTuple):
    """Facts of the status log. ``low``: the journals' low waters. ``plain``: how far plain writes are committed."""

    expired_ms: int
    low: Mapping[tuple[str, int], int]
    plain: Mapping[tuple[str, int], int]


class _Audit:
    def __init__(
        self, spark: SparkSession, connection: Connection, log: KafkaLog, at: int | None
    ) -> None:
        self._spark = spark
        self._connection = connection
        self._log = log
        self._at = at
        self._findings = Findings()

    def run(self, names: Sequence[str], ledger: Sequence[Row]) -> AuditReport:
        findings = self._findings
        scopes = sorted({name.partition("/")[0] for name in names})
        there = find_scopes(self._spark, self._connection, self._log, scopes)
        streams = _chosen(names, there.streams)
        others = sorted(set(there.streams) - set(streams))
        ends = self._ends({s: there.partitions[s] for s in streams}, there.control_partition)
        histories = self._places(dict.fromkeys(others, 1), history_topic)
        ends_of_others = self._log.end_offsets(histories, committed=False)
        at = there.hybrid_time if self._at is None else min(self._at, there.hybrid_time)

        history = self._history(streams, ends.histories)
        # A transaction may have written to these streams, too: its count of events needs them.
        elsewhere = self._history(others, ends_of_others) if others else history.limit(0)
        extents = history_of.extents(history)
        begins = self._history_starts(streams)
        sound = history_of.check_records(history, begins, findings)
        layouts = history_of.layouts_of(sound)
        ranges = findings.keep(history_of.ranges_of(sound, layouts))
        history_of.check_ranges(sound, ranges, findings)
        history_of.check_epochs(sound, findings)

        status = findings.keep(self._status(there.control_partition, ends))
        places, placed = self._events(ends, extents, begins, ranges)
        ranges = _with_fate(ranges, places)
        cuts = _cuts(
            extents | history_of.extents(elsewhere), begins | self._history_starts(others), there
        )
        asked = status_of.Asked(scopes, streams, at, cuts)
        commits, counts = status_of.commits_of(ranges), status_of.counts_of(elsewhere)
        matched = findings.keep(status_of.match(status, commits, counts, asked))
        known = _known(status, streams)
        status_of.check_status(matched, known.expired_ms, findings)
        self._ledger(ledger, there.control_partition, status, known.expired_ms)
        self._across(there.control_partition, status)
        events_of.check_events(placed, matched, _named(sound), findings)
        events_of.check_counts(placed, ranges, findings)
        lives = {s: extents[s].since if s in extents else MAX for s in there.again}
        journal = self._journals(streams, ends)
        lows = self._lows(streams, ends, known, lives)
        evidence = journal_of.Evidence(placed, journal, status, matched, layouts, lows)
        journal_of.check_writers(evidence, findings)
        if self._at is None:
            self._plain(evidence, known, places)
        findings.count(placed, {EVENTS: ALL})
        findings.count(sound, {COMMITS: (f"kind = {COMMIT}", "false")})
        checks = findings.checks()
        return AuditReport(
            streams,
            at,
            findings.examined(COMMITS),
            findings.examined(EVENTS),
            checks,
            () if self._at is None else (PLAIN_NOTE,),
            _gone(ranges),
            status_of.prepared_of(status),
        )

    def _ledger(
        self, ledger: Sequence[Row], control_partition: int, status: DataFrame, expired_ms: int
    ) -> None:
        rows = [
            (row.txn_id, row.outcome)
            for row in ledger
            if control_partition_of(row.txn_id) == control_partition
            and row.outcome != BEGUN
            and not row.former
        ]
        if rows:
            decided = self._spark.createDataFrame(rows, "txn_id binary, outcome string")
            status_of.check_ledger(status, decided, expired_ms, self._findings)

    def _across(self, here: int, status: DataFrame) -> None:
        """Compare with other control partitions. Their status is read later: it has what was decided here."""
        topic = status_topic(self._connection.prefix)
        count, others = self._log.describe_topics([topic])[topic].partitions, {}
        for number in status_of.elsewhere(status, here):
            rows = status.limit(0)  # a record that names no control partition of this cluster
            if number < count:
                place = TopicPartition(topic, number)
                end = self._log.end_offsets([place], committed=False)[place]
                rows = read_status(self._spark, self._connection, number, end, 0)
            others[number] = self._findings.keep(rows)
        status_of.check_across(status, here, others, self._findings)

    # -- reading --------------------------------------------------------------------------------------

    def _ends(self, streams: Mapping[str, int], control_partition: int) -> _Ends:
        status = TopicPartition(status_topic(self._connection.prefix), control_partition)

        def ends(topic: Callable[[str], str]) -> Mapping[TopicPartition, int]:
            # Decided events may not be visible yet, so the tasks wait for them.
            least = dict.fromkeys(streams, 1) if topic is history_topic else streams
            return self._log.end_offsets(self._places(least, topic), committed=False)

        before = self._log.end_offsets([status], committed=True)[status]
        return _Ends(
            self._visible(self._places(streams, stream_topic)),
            ends(history_topic),
            ends(journal_topic),
            before,
            self._log.end_offsets([status], committed=False)[status],
        )

    def _status(self, control_partition: int, ends: _Ends) -> DataFrame:
        return read_status(
            self._spark, self._connection, control_partition, ends.status, ends.status_before
        )

    def _visible(self, places: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Wait until everything written so far is visible, and return the offsets up to which events are.

        A native transaction becomes visible partition by partition, and its status rows may be the first.
        """
        written = self._log.end_offsets(places, committed=False)
        until = time.monotonic() + self._connection.timeout
        while True:
            visible = self._log.end_offsets(places, committed=True)
            hidden = [tp for tp in places if visible[tp] < written[tp]]
            if not hidden:
                return visible
            if time.monotonic() > until:
                raise DeadlineExceeded(
                    f"{hidden[0].topic}[{hidden[0].partition}] shows nothing from {visible[hidden[0]]} on: a "
                    "native transaction is open there; does a controller lead? Then run it again"
                )
            time.sleep(_POLL_S)

    def _places(
        self, streams: Mapping[str, int], topic: Callable[[str], str]
    ) -> list[TopicPartition]:
        """All partitions of a topic of each stream. ``streams``: how many there are, at least."""
        found = self._log.describe_topics([topic(stream) for stream in streams])
        for stream, least in streams.items():
            name = topic(stream)
            if name not in found and not self._log.is_known(name):
                raise UnknownStream(f"the topic {name} of {stream} is gone")
            if name not in found or found[name].partitions < least:
                raise NotReady(
                    f"a broker does not show all partitions of {name} (yet): run it again"
                )
        return [TopicPartition(name, p) for name, i in found.items() for p in range(i.partitions)]

    def _history(self, streams: Sequence[str], ends: Mapping[TopicPartition, int]) -> DataFrame:
        spans = self._spans(streams, history_topic, ends, committed=True)
        history = self._findings.keep(read_history(self._spark, self._connection, spans))
        if self._at is not None:
            history = history.where((F.col("timestamp") <= self._at) | (F.col("kind") == FOREIGN))
        return history

    def _history_starts(self, streams: Sequence[str]) -> dict[str, int]:
        wanted = {stream: TopicPartition(history_topic(stream), 0) for stream in streams}
        starts = self._log.start_offsets(wanted.values())
        return {stream: starts[tp] for stream, tp in wanted.items()}

    def _spans(
        self,
        streams: Sequence[str],
        topic: Callable[[str], str],
        ends: Mapping[TopicPartition, int],
        *,
        committed: bool,
    ) -> list[Span]:
        starts = self._log.start_offsets(ends)
        of = {topic(stream): stream for stream in streams}
        return [
            Span(of[tp.topic], tp.topic, tp.partition, starts[tp], end, committed)
            for tp, end in ends.items()
            if starts[tp] < end
        ]

    def _events(
        self,
        ends: _Ends,
        extents: Mapping[str, Extent],
        begins: Mapping[str, int],
        ranges: DataFrame,
    ) -> tuple[DataFrame, DataFrame]:
        """(first offset and end of each partition's events, the events with their ranges)."""
        until = dict(ends.streams)
        of = {stream_topic(stream): stream for stream in begins}
        if self._at is not None:
            for tp in until:
                vector = extents[of[tp.topic]].vector if of[tp.topic] in extents else {}
                until[tp] = min(until[tp], vector.get(tp.partition, 0))
        events = self._records(list(begins), stream_topic, until, committed=True)
        # Asked after the reading: retention may have removed unread events meanwhile.
        starts = self._log.start_offsets(until)
        rows = []
        for tp, end in until.items():
            stream = of[tp.topic]
            floor = end if begins[stream] else 0  # `end`: all of its history was deleted
            if stream in extents:
                floor = extents[stream].floor.get(tp.partition, 0)
            rows.append((stream, tp.partition, max(starts[tp], floor), end))
        places = F.broadcast(
            self._spark.createDataFrame(
                rows, "stream string, partition int, floor long, until long"
            )
        )
        left = events.join(places, ["stream", "partition"]).where("offset >= floor")
        placed = events_of.place(left.drop("floor", "until"), ranges)
        return places, self._findings.keep(placed)

    def _records(
        self,
        streams: Sequence[str],
        topic: Callable[[str], str],
        ends: Mapping[TopicPartition, int],
        *,
        committed: bool,
    ) -> DataFrame:
        spans = self._spans(streams, topic, ends, committed=committed)
        return self._findings.keep(
            events_of.slim(read_records(self._spark, self._connection, spans))
        )

    def _journals(self, streams: Sequence[str], ends: _Ends) -> DataFrame:
        return self._records(streams, journal_topic, ends.journals, committed=False)

    def _lows(
        self, streams: Sequence[str], ends: _Ends, known: _Known, lives: Mapping[str, int]
    ) -> DataFrame:
        """`Evidence.lows`. Call it after the reading: controllers may have truncated journals meanwhile."""
        of = {journal_topic(stream): stream for stream in streams}
        rows = []
        for tp, start in self._log.start_offsets(ends.journals).items():
            stream = of[tp.topic]
            low = max(start, known.low.get((stream, tp.partition), 0))
            rows.append((stream, tp.partition, low, lives.get(stream, -1)))
        return self._spark.createDataFrame(rows, "stream string, source int, low long, since long")

    def _plain(self, evidence: journal_of.Evidence, known: _Known, places: DataFrame) -> None:
        done = self._spark.createDataFrame(
            [(*place, offset) for place, offset in known.plain.items()],
            "stream string, source int, done long",
        )
        whole = places.groupBy("stream").agg(F.max("floor").alias("floor")).where("floor = 0")
        journal_of.check_plain(evidence, done, whole.select("stream"), self._findings)


def _named(sound: DataFrame) -> DataFrame:
    """Stream and txn_id of all COMMIT records, with the timestamp of the stream's last record as ``until``."""
    until = F.max("timestamp").over(Window.partitionBy("stream")).alias("until")
    return sound.where("txn_id is not null").select("stream", "txn_id", until).distinct()


def _known(status: DataFrame, streams: Sequence[str]) -> _Known:
    """The facts in the few status rows that are not about a transaction."""
    rows = status.where(
        (F.col("entry") == Entry.ROUND)
        | F.col("entry").isin(Entry.LOW_WATER, Entry.PLAIN) & F.col("stream").isin(*streams)
    ).collect()

    def offsets(entry: Entry) -> dict[tuple[str, int], int]:
        of = [row for row in rows if row["entry"] == entry]
        return {(row["stream"], row["partition"]): row["offset"] for row in of}

    expired = [row["expired_ms"] for row in rows if row["entry"] == Entry.ROUND]
    return _Known(max(expired, default=0), offsets(Entry.LOW_WATER), offsets(Entry.PLAIN))


def _cuts(
    extents: Mapping[str, Extent], begins: Mapping[str, int], there: Scopes
) -> dict[str, int]:
    """Stream -> commit timestamp up to which its history may lack records: truncated, deleted or LOST ones."""
    cuts = {s: each.since for s, each in extents.items() if each.cut or s in there.again}
    unread = [s for s, at in begins.items() if (at or s in there.again) and s not in extents]
    return cuts | dict.fromkeys(unread, MAX) | there.gone


def _chosen(names: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    chosen = set[str]()
    for name in names:
        if "/" not in name:
            found = {s for s in known if s.startswith(f"{name}/") and not is_state(s)}
            if not found:
                raise UnknownStream(f"the scope {name} has no stream yet")
            chosen |= found
            continue
        split_stream(name)
        if name not in known:
            raise UnknownStream(f"there is no stream {name}: create it first")
        if is_state(name):
            raise InvalidArgument(
                f"{name} is a processor's state: compaction takes old rows out of it, so no audit reads it"
            )
        chosen.add(name)
    return tuple(sorted(chosen))


def _with_fate(ranges: DataFrame, places: DataFrame) -> DataFrame:
    """The ranges up to the ends. ``gone``: whether retention, or a truncation of the history, removed events."""
    return (
        ranges.join(places, ["stream", "partition"], "left")
        .where(F.col("until").isNull() | (F.col("end") <= F.col("until")))
        .withColumn("gone", F.coalesce(F.col("first") < F.col("floor"), F.lit(False)))
    )


def _gone(ranges: DataFrame) -> tuple[Gone, ...]:
    """The removed events of each partition."""
    places = ranges.where("gone").groupBy("stream", "partition")
    found = places.agg(F.max("floor").alias("low"), F.sum("count").alias("events"))
    rows = found.orderBy("stream", "partition").collect()
    return tuple(Gone(r["stream"], r["partition"], r["low"], r["events"]) for r in rows)
