"""Checks of streams against receipts and journals: a stream has the events of the writers, in their order.

From a journal partition, a commit takes the first records of a writer, as many as the receipt covers. This receipt
may be older than the newest registered receipt; then the journal has to agree with both receipts.
"""

from __future__ import annotations

from typing import NamedTuple

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from anabranch.audit.events import big_endian
from anabranch.audit.findings import Counts, Findings, Rule
from anabranch.audit.log import PLAIN, WRITE
from anabranch.core.rows import Entry
from anabranch.protocol.ids import NO_TXN

KEY = ["stream", "txn_id", "writer", "source"]  # source: a journal partition
_NUMBER = (1 << 32) - 1


class Evidence(NamedTuple):
    """The tables to compare. ``matched``: as of `status.match`. ``layouts``: as of `history.layouts_of`.

    ``lows``: stream, source; low, the first remaining offset; since, the time up to which receipts are of a deleted
    stream of the same name.
    """

    placed: DataFrame
    journal: DataFrame
    status: DataFrame
    matched: DataFrame
    layouts: DataFrame
    lows: DataFrame


def check_writers(evidence: Evidence, findings: Findings) -> None:
    """Check every writer of every transaction with enough evidence."""
    whole = evidence.matched.where("has_commit and decided and not gone").select(
        "txn_id", "fits", "committed_by"
    )
    # There are few reference epochs, as only scalings make them.
    sources = evidence.layouts.where("epoch = reference").select(
        "stream",
        big_endian(F.col("epoch")).alias("placed_by"),
        F.col("id").bitwiseAND(F.lit(_NUMBER)).alias("number"),
        F.col("partition").alias("source"),
        F.col("low").alias("from_position"),
        F.col("high").alias("to_position"),
    )
    lows = evidence.lows
    taken = findings.keep(_taken(evidence.placed, sources, whole))
    groups = findings.keep(_groups(taken, evidence.status, whole, lows))
    written = findings.keep(_written(evidence.journal, groups, sources, lows))
    judged = findings.keep(_compared(groups.join(_sums_of_journal(written), KEY, "left")))
    findings.count(judged, _WRITER_COUNTS)
    findings.judge(judged, _RECEIPT_RULES, partition="source", offset="from_offset")
    broken = judged.where("not content_holds or not order_holds")
    if not broken.isEmpty():
        prefix = written.where("rank <= n")
        _differences(taken, prefix, broken.where("not content_holds"), findings)
        _order(taken, prefix, broken.where("content_holds"), findings)


def _taken(placed: DataFrame, sources: DataFrame, whole: DataFrame) -> DataFrame:
    """The writers' events, each with its journal partition and its rank among the writer's events from there."""
    order = Window.partitionBy(*KEY).orderBy("partition", "offset")
    return (
        placed.where(
            (F.col("kind") == WRITE)
            & (F.col("txn_id") == F.col("r.txn_id"))
            & F.expr("writer != X'0000000000000000'")
        )
        .withColumn("number", F.col("r.id").bitwiseAND(F.lit(_NUMBER)))
        .join(whole.select("txn_id"), "txn_id", "left_semi")
        .join(
            F.broadcast(sources.select("stream", "placed_by", "number", "source")),
            ["stream", "placed_by", "number"],
        )
        .withColumn("rank", F.row_number().over(order))
        .select(*KEY, "partition", "offset", "placed_by", "crc", "key_hash", "digest", "rank")
    )


def _sums(digest: Column, prefix: str) -> list[Column]:
    """Two sums over 64-bit values, without overflow, which differ if order or repetition differs."""
    return [
        F.sum(digest.bitwiseAND(F.lit(_NUMBER))).alias(f"{prefix}_low"),
        F.sum(F.shiftrightunsigned(digest, 32)).alias(f"{prefix}_high"),
    ]


def _groups(taken: DataFrame, status: DataFrame, whole: DataFrame, lows: DataFrame) -> DataFrame:
    """A row for each writer and journal partition with events in a stream or in a receipt."""
    in_stream = taken.groupBy(*KEY).agg(
        F.count("*").alias("n"),
        F.sum("crc").alias("crc"),
        F.first("placed_by").alias("placed_by"),
        *_sums(F.col("digest"), "all"),
        *_sums(F.xxhash64("digest", "rank"), "order"),
    )
    receipts = status.where((F.col("entry") == Entry.WRITER) & (F.col("count") > 0)).select(
        "stream",
        "txn_id",
        "writer",
        F.col("partition").alias("source"),
        F.col("first").alias("from_offset"),
        F.col("end").alias("to_offset"),
        F.col("count").alias("due"),
        F.col("crc").alias("due_crc"),
    )
    here = F.broadcast(lows.select("stream", "since").distinct())
    receipts = receipts.join(here, "stream").join(whole.select("txn_id", "committed_by"), "txn_id")
    receipts = receipts.where("committed_by > since").drop("committed_by", "since")
    writers = taken.select("txn_id", "writer").distinct()
    return (
        in_stream.join(receipts, KEY, "full")
        .join(whole.drop("committed_by"), "txn_id")
        .join(writers, ["txn_id", "writer"])
        .join(F.broadcast(lows), ["stream", "source"], "left")
        .withColumns(
            {
                "n": F.coalesce("n", F.lit(0)),
                "crc": F.coalesce("crc", F.lit(0)),
                # Whether the journal still has all of the writer's records there.
                "covered": F.coalesce(
                    F.col("low") <= F.coalesce(F.col("from_offset"), F.lit(0)), F.lit(False)
                ),
            }
        )
    )


def _written(
    journal: DataFrame, groups: DataFrame, sources: DataFrame, lows: DataFrame
) -> DataFrame:
    """The writers' journal records that a controller would have taken, with their rank.

    A run (records of one writer in one batch) with a misplaced record is rejected as a whole. Copies by the
    controller, and all other records of native transactions, do not count.
    """
    records = (
        journal.where((F.col("kind") == WRITE) & ~F.col("native"))
        .withColumnRenamed("partition", "source")
        .join(F.broadcast(lows), ["stream", "source"])
        .where(F.col("offset") >= F.col("low"))
        .drop("low", "since", "kind", "native")
        .join(
            groups.where("covered").select(
                *KEY, "n", "from_offset", "to_offset", F.col("placed_by").alias("right_epoch")
            ),
            KEY,
        )
        .join(F.broadcast(sources.drop("number")), ["stream", "placed_by", "source"], "left")
        .withColumn(
            "rejected",
            (F.col("placed_by") != F.coalesce("right_epoch", "placed_by"))
            | F.col("from_position").isNull()
            | F.coalesce(
                (F.col("position") < F.col("from_position"))
                | (F.col("position") >= F.col("to_position")),
                F.lit(False),
            ),
        )
    )
    run = [*KEY, "batch"]
    rejected = records.where("rejected").select(*run).distinct()
    order = Window.partitionBy(*KEY).orderBy("offset")
    return (
        records.join(rejected, run, "left_anti")
        .withColumn("rank", F.row_number().over(order))
        .withColumn(
            "in_receipt",
            F.coalesce(
                F.col("offset").between(F.col("from_offset"), F.col("to_offset") - 1), F.lit(False)
            ),
        )
        .select(*KEY, "offset", "crc", "key_hash", "digest", "rank", "n", "in_receipt")
    )


def _sums_of_journal(written: DataFrame) -> DataFrame:
    first = F.col("rank") <= F.col("n")
    return written.groupBy(*KEY).agg(
        F.count_if(first).alias("j_n"),
        *_sums(F.when(first, F.col("digest")), "j_all"),
        *_sums(F.when(first, F.xxhash64("digest", "rank")), "j_order"),
        F.count_if("in_receipt").alias("j_due"),
        F.sum(F.when(F.col("in_receipt"), F.col("crc"))).alias("j_due_crc"),
    )


def _compared(groups: DataFrame) -> DataFrame:
    """Each group, with the rules that hold for it. Without evidence in the journal, content and order hold."""
    same = "not (has_evidence and not (n = coalesce(j_n, 0) and {0}_low <=> j_{0}_low and {0}_high <=> j_{0}_high))"
    return (
        groups.withColumn("has_evidence", F.expr("n > 0 and covered"))
        .withColumns(
            {
                "content_holds": F.expr(same.format("all")),
                "order_holds": F.expr(same.format("order")),
                "exact": F.expr("n = due and crc = due_crc"),
                "less": F.expr("n < due and fits"),
                # The journal has the records that the receipt covers.
                "borne_out": F.expr(
                    "coalesce(j_due, 0) = due and coalesce(j_due_crc, 0) = due_crc"
                ),
            }
        )
        .withColumn("unjudged", F.expr("due is null or less and not covered"))
    )


_WRITER_COUNTS: Counts = {
    "receipt": ("not unjudged", "unjudged"),
    "journal-content": ("n > 0 and covered", "n > 0 and not covered"),
    "journal-order": ("n > 0 and covered", "n > 0 and not covered"),
}
_RECEIPT_RULES = (
    Rule(
        "receipt",
        "not unjudged and not exact and not (less and borne_out)",
        "{due} events, checksums {due_crc}",
        "{n} events, checksums {crc}",
    ),
)
_DIFFERENCE_RULES = (
    Rule(
        "journal-content",
        "written_at is null",
        "a record of writer {lower(hex(writer))} in journal partition {source}",
        "an event that the journal lacks, or has fewer times",
    ),
    Rule(
        "journal-content",
        "offset is null",
        "an event of writer {lower(hex(writer))}, journal {source}@{written_at}",
        "none",
    ),
)
_ORDER_RULES = (
    Rule(
        "journal-order",
        "true",
        "here the event of journal {source}@{at}",
        "another event of the key",
    ),
)
_PLAIN_RULES = (
    Rule("plain-content", "n < due", "{due} like journal {at.source}@{at.offset}", "{n}"),
    Rule(
        "plain-content",
        "all_here is not null and n > most",
        "at most {most}, as in the journal",
        "{n}",
    ),
)


def _differences(
    taken: DataFrame, prefix: DataFrame, broken: DataFrame, findings: Findings
) -> None:
    """Find the differing events of groups whose sums differ."""
    same = Window.partitionBy(*KEY, "digest").orderBy("offset")

    def numbered(rows: DataFrame) -> DataFrame:
        of_broken = rows.join(broken.select(*KEY), KEY, "left_semi")
        return of_broken.withColumn("again", F.row_number().over(same))

    events = numbered(taken).select(*KEY, "digest", "again", "partition", "offset")
    records = numbered(prefix).select(*KEY, "digest", "again", F.col("offset").alias("written_at"))
    both = events.join(records, [*KEY, "digest", "again"], "full").where(
        "offset is null or written_at is null"
    )
    findings.judge(both, _DIFFERENCE_RULES)


def _order(taken: DataFrame, prefix: DataFrame, broken: DataFrame, findings: Findings) -> None:
    """Find keys whose events are in another order. Events without a key have no order."""

    def ranked(rows: DataFrame, *order: str) -> DataFrame:
        of_key = Window.partitionBy(*KEY, "key_hash").orderBy(*order)
        return (
            rows.where("key_hash is not null")
            .join(broken.select(*KEY), KEY, "left_semi")
            .withColumn("of_key", F.row_number().over(of_key))
        )

    events = ranked(taken, "partition", "offset").select(
        *KEY, "key_hash", "of_key", "digest", "partition", "offset"
    )
    records = ranked(prefix, "offset").select(
        *KEY, "key_hash", "of_key", F.col("digest").alias("due"), F.col("offset").alias("at")
    )
    both = events.join(records, [*KEY, "key_hash", "of_key"])
    findings.judge(both.where("digest != due"), _ORDER_RULES)


# -- plain writes ----------------------------------------------------------------------------------------


def check_plain(
    evidence: Evidence, done: DataFrame, whole_streams: DataFrame, findings: Findings
) -> None:
    """Check that committed plain writes are in the stream as often as in the journal.

    ``done``: stream, source, and the offset up to which they are committed. ``whole_streams``: streams of
    which retention deleted nothing.
    """
    records = _plain_records(evidence, done, whole_streams)
    findings.count(
        records, {"plain-content": ("is_due and is_whole", "not is_due or not is_whole")}
    )
    untouched = evidence.lows.groupBy("stream").agg(F.max("low").alias("low")).where("low = 0")
    written = (
        records.where("is_whole")
        .groupBy("stream", "digest")
        .agg(
            F.count_if("is_due").alias("due"),
            F.count("*").alias("most"),
            F.min(F.when(F.col("is_due"), F.struct("source", "offset"))).alias("at"),
        )
    )
    present = (
        evidence.placed.where((F.col("kind") == PLAIN) & (F.col("r.txn_id") == F.lit(NO_TXN)))
        .groupBy("stream", "digest")
        .agg(F.count("*").alias("n"), F.max(F.struct("partition", "offset")).alias("place"))
    )
    all_here = untouched.select("stream").withColumn("all_here", F.lit(True))
    both = (
        written.join(present, ["stream", "digest"], "full")
        .join(F.broadcast(all_here), "stream", "left")
        .withColumns({name: F.coalesce(name, F.lit(0)) for name in ("n", "due", "most")})
    )
    findings.judge(
        both, _PLAIN_RULES, txn="null", partition="place.partition", offset="place.offset"
    )


def _plain_records(evidence: Evidence, done: DataFrame, whole_streams: DataFrame) -> DataFrame:
    """The remaining plain writes of the journals, and whether each has to be in the stream."""
    return (
        evidence.journal.where((F.col("kind") == PLAIN) & ~F.col("native"))
        .withColumnRenamed("partition", "source")
        .join(F.broadcast(evidence.lows), ["stream", "source"])
        .join(F.broadcast(done.withColumnRenamed("offset", "done")), ["stream", "source"], "left")
        .join(F.broadcast(whole_streams.withColumn("is_whole", F.lit(True))), "stream", "left")
        .where("offset >= low")
        .withColumns(
            {
                "is_due": F.expr("offset < coalesce(done, 0)"),
                "is_whole": F.coalesce("is_whole", F.lit(False)),
            }
        )
    )
