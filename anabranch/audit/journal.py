"""Checks of streams against receipts and journals: a stream has the events of the writers, in their order.

A commit takes a writer's first records in a journal partition, as many as its receipt covers. This receipt may be
older than the newest registered one; then the journal has to agree with both.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from anabranch.audit.events import big_endian
from anabranch.audit.findings import Findings, text
from anabranch.audit.log import PLAIN, WRITE
from anabranch.core.ids import NO_TXN
from anabranch.core.rows import Entry

KEY = ["stream", "txn_id", "writer", "source"]  # source: a journal partition
_NUMBER = (1 << 32) - 1


def check_writers(
    placed: DataFrame,
    journal: DataFrame,
    status: DataFrame,
    matched: DataFrame,
    layouts: DataFrame,
    lows: DataFrame,
    findings: Findings,
) -> None:
    """Check every writer of every transaction with enough evidence.

    ``matched``: the transactions (`status.match`). ``lows``: stream, source; low, the first remaining offset;
    since, the time up to which receipts are of a deleted stream of the same name.
    """
    whole = matched.where("has_commit and decided and not gone").select(
        "txn_id", "fits", "committed_by"
    )
    # There are few reference epochs, as only scalings make them.
    sources = layouts.where("epoch = reference").select(
        "stream",
        big_endian(F.col("epoch")).alias("placed_by"),
        F.col("id").bitwiseAND(F.lit(_NUMBER)).alias("number"),
        F.col("partition").alias("source"),
        F.col("low").alias("from_position"),
        F.col("high").alias("to_position"),
    )
    taken = findings.keep(_taken(placed, sources, whole))
    groups = findings.keep(_groups(taken, status, whole, lows))
    written = findings.keep(_written(journal, groups, sources, lows))
    judged = findings.keep(_compared(groups.join(_sums_of_journal(written), KEY, "left")))
    _judge(judged, findings)
    broken = judged.where("not content_holds or not order_holds")
    if not broken.isEmpty():
        prefix = written.where("rank <= n")
        _differences(taken, prefix, broken.where("not content_holds"), findings)
        _order(taken, prefix, broken.where("content_holds"), findings)


def _taken(placed: DataFrame, sources: DataFrame, whole: DataFrame) -> DataFrame:
    """The writers' events, each with its journal partition and its rank there."""
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


def _compared(judged: DataFrame) -> DataFrame:
    """Whether the journal's sums equal the stream's; groups without evidence count as equal."""
    told = (F.col("n") > 0) & F.col("covered")

    def same(*names: str) -> Column:
        equal = F.col("n") == F.coalesce("j_n", F.lit(0))
        for name in names:
            equal = equal & F.col(name).eqNullSafe(F.col(f"j_{name}"))
        return ~told | equal

    return judged.withColumn("content_holds", same("all_low", "all_high")).withColumn(
        "order_holds", same("order_low", "order_high")
    )


def _judge(judged: DataFrame, findings: Findings) -> None:
    n, due = F.col("n"), F.col("due")
    exact = (n == due) & (F.col("crc") == F.col("due_crc"))
    less = (n < due) & F.col("fits")
    borne_out = (F.coalesce("j_due", F.lit(0)) == due) & (
        F.coalesce("j_due_crc", F.lit(0)) == F.col("due_crc")
    )
    has = due.isNotNull()
    unchecked = ~has | (less & ~F.col("covered"))
    findings.count(
        judged,
        {
            "receipt": (~unchecked, unchecked),
            "journal-content": ((n > 0) & F.col("covered"), (n > 0) & ~F.col("covered")),
            "journal-order": ((n > 0) & F.col("covered"), (n > 0) & ~F.col("covered")),
        },
    )
    findings.judge(
        judged,
        [
            (
                "receipt",
                ~unchecked & ~exact & ~(less & borne_out),
                text(due, " events, checksums ", F.col("due_crc")),
                text(n, " events, checksums ", F.col("crc")),
            )
        ],
        partition="source",
        offset="from_offset",
    )


def _differences(
    taken: DataFrame, prefix: DataFrame, broken: DataFrame, findings: Findings
) -> None:
    """Find the differing events where the sums differ."""
    same = Window.partitionBy(*KEY, "digest").orderBy("offset")

    def numbered(rows: DataFrame) -> DataFrame:
        of_broken = rows.join(broken.select(*KEY), KEY, "left_semi")
        return of_broken.withColumn("again", F.row_number().over(same))

    events = numbered(taken).select(*KEY, "digest", "again", "partition", "offset")
    records = numbered(prefix).select(*KEY, "digest", "again", F.col("offset").alias("written_at"))
    both = events.join(records, [*KEY, "digest", "again"], "full").where(
        "offset is null or written_at is null"
    )
    writer = text("of writer ", F.lower(F.hex("writer")))
    findings.judge(
        both,
        [
            (
                "journal-content",
                F.col("written_at").isNull(),
                text("a record ", writer, " in journal partition ", F.col("source")),
                F.lit("an event that is not there as it is here, or not so often"),
            ),
            (
                "journal-content",
                F.col("offset").isNull(),
                text("an event ", writer, ", journal ", F.col("source"), "@", F.col("written_at")),
                F.lit("none"),
            ),
        ],
    )


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
    findings.judge(
        events.join(records, [*KEY, "key_hash", "of_key"]).where("digest != due"),
        [
            (
                "journal-order",
                F.lit(True),
                text("here the event of journal ", F.col("source"), "@", F.col("at")),
                F.lit("another one of the key"),
            )
        ],
    )


# -- plain writes ----------------------------------------------------------------------------------------


def check_plain(
    placed: DataFrame,
    journal: DataFrame,
    done: DataFrame,
    lows: DataFrame,
    whole_streams: DataFrame,
    findings: Findings,
) -> None:
    """Check that committed plain writes are in the stream as often as in the journal.

    ``done``: stream, source, and the offset up to which they are committed. ``whole_streams``: streams of
    which retention deleted nothing.
    """
    records = (
        journal.where((F.col("kind") == PLAIN) & ~F.col("native"))
        .withColumnRenamed("partition", "source")
        .join(F.broadcast(lows), ["stream", "source"])
        .join(F.broadcast(done.withColumnRenamed("offset", "done")), ["stream", "source"], "left")
        .withColumn(
            "is_due",
            (F.col("offset") >= F.col("low")) & (F.col("offset") < F.coalesce("done", F.lit(0))),
        )
        .join(F.broadcast(whole_streams.withColumn("is_whole", F.lit(True))), "stream", "left")
        .withColumn("is_whole", F.coalesce("is_whole", F.lit(False)))
        .where(F.col("offset") >= F.col("low"))
    )
    findings.count(
        records,
        {
            "plain-content": (
                F.col("is_due") & F.col("is_whole"),
                ~F.col("is_due") | ~F.col("is_whole"),
            )
        },
    )
    untouched = (
        lows.groupBy("stream").agg(F.max("low").alias("low")).where("low = 0").select("stream")
    )
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
        placed.where((F.col("kind") == PLAIN) & (F.col("r.txn_id") == F.lit(NO_TXN)))
        .groupBy("stream", "digest")
        .agg(F.count("*").alias("n"), F.max(F.struct("partition", "offset")).alias("stands"))
    )
    both = (
        written.join(present, ["stream", "digest"], "full")
        .join(F.broadcast(untouched.withColumn("all_here", F.lit(True))), "stream", "left")
        .withColumns({name: F.coalesce(name, F.lit(0)) for name in ("n", "due", "most")})
    )
    findings.judge(
        both,
        [
            (
                "plain-content",
                F.col("n") < F.col("due"),
                text(F.col("due"), " like journal ", F.col("at.source"), "@", F.col("at.offset")),
                F.col("n"),
            ),
            (
                "plain-content",
                F.col("all_here").isNotNull() & (F.col("n") > F.col("most")),
                text("at most ", F.col("most"), ", as in the journal"),
                F.col("n"),
            ),
        ],
        txn=None,
        partition="stands.partition",
        offset="stands.offset",
    )
