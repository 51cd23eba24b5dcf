"""Checks of events against the history: each event is in a range of its commit, and each range has its events.

Spark's functions compute checksums, hashes and key positions from the topics' bytes, independently of the library's
code.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from anabranch.audit.findings import ALL, Counts, Findings, Rule, hex_of
from anabranch.audit.log import PLAIN, WRITE
from anabranch.protocol.ids import NO_TXN

# Events and ranges are joined in blocks of this many offsets, in parallel tasks.
_BLOCK_BITS = 16
_HALF = (1 << 32) - 1


def crc_of(key: Column, value: Column) -> Column:
    """A record's checksum (docs/protocol.md, section 9)."""
    empty = F.lit(b"")
    return F.crc32(F.concat(F.coalesce(key, empty), F.coalesce(value, empty)))


def position_of(key: Column) -> Column:
    """The position of a key (docs/protocol.md, section 7); null without a key."""
    h = F.crc32(key)
    h = h.bitwiseXOR(F.shiftright(h, 16))
    h = _times(h, 0x85EBCA6B)
    h = h.bitwiseXOR(F.shiftright(h, 13))
    h = _times(h, 0xC2B2AE35)
    return h.bitwiseXOR(F.shiftright(h, 16))


def _times(h: Column, factor: int) -> Column:
    """The product modulo 2^32 of two unsigned numbers, without overflow of signed 64 bits."""
    high = F.shiftleft((F.shiftright(h, 16) * F.lit(factor)).bitwiseAND(F.lit(0xFFFF)), 16)
    return (h.bitwiseAND(F.lit(0xFFFF)) * F.lit(factor) + high).bitwiseAND(F.lit(_HALF))


def digest_of() -> Column:
    """A 64-bit hash of all that has to arrive unchanged: key, value, headers, timestamp."""
    return F.xxhash64(
        F.col("key").isNull(), "key", F.col("value").isNull(), "value", "headers", "timestamp"
    )


def slim(records: DataFrame) -> DataFrame:
    """Events or journal records without their bytes: only the columns that later checks compare."""
    txn = F.col("txn")
    return records.select(
        "stream",
        "partition",
        "offset",
        "batch",
        "native",
        "kind",
        F.when(F.col("kind") == WRITE, F.substring(txn, 1, 16)).alias("txn_id"),
        F.when(F.col("kind") == WRITE, F.substring(txn, 17, 8)).alias("writer"),
        F.when(F.col("kind") == WRITE, F.substring(txn, 25, 4)).alias("placed_by"),
        crc_of(F.col("key"), F.col("value")).alias("crc"),
        F.when(F.col("key").isNotNull(), position_of(F.col("key"))).alias("position"),
        F.when(F.col("key").isNotNull(), F.xxhash64("key")).alias("key_hash"),
        digest_of().alias("digest"),
    )


def big_endian(number: Column) -> Column:
    """A number as the 4 bytes in headers."""
    return F.unhex(F.lpad(F.hex(number), 8, "0"))


def place(events: DataFrame, ranges: DataFrame) -> DataFrame:
    """Each event with the range that the event is in, as a struct ``r``; null if the event is in no range."""
    block = F.shiftright(F.col("offset"), _BLOCK_BITS)
    first = F.shiftright(F.col("first"), _BLOCK_BITS)
    last = F.shiftright(F.col("end") - 1, _BLOCK_BITS)
    r = F.struct(
        F.col("record"),
        F.col("txn_id"),
        F.col("timestamp"),
        F.col("epoch"),
        F.col("reference"),
        F.col("id"),
        F.col("low"),
        F.col("high"),
        F.col("first"),
        F.col("end"),
    )
    marks = (
        ranges.where(F.col("end") > F.col("first"))
        .withColumn("block", F.explode(F.sequence(first, last)))
        .select(
            "stream",
            "partition",
            "block",
            F.greatest("first", F.shiftleft(F.col("block"), _BLOCK_BITS)).alias("offset"),
            r.alias("r"),
        )
    )
    both = events.withColumn("block", block).unionByName(
        marks.withColumn("is_mark", F.lit(True)), allowMissingColumns=True
    )
    order = Window.partitionBy("stream", "partition", "block").orderBy(
        "offset", F.desc_nulls_last("is_mark")
    )
    nearest = F.last("r", ignorenulls=True).over(order)
    return (
        both.withColumn("nearest", nearest)
        .where(F.col("is_mark").isNull())
        .withColumn("r", F.when(F.col("offset") < F.col("nearest.end"), F.col("nearest")))
        .drop("nearest", "block", "is_mark")
    )


_MINE = f"(kind = {PLAIN} and r.txn_id = {hex_of(NO_TXN)} or kind = {WRITE} and txn_id = r.txn_id)"
_COUNTS: Counts = {
    "event-header": ALL,
    "event-transaction": ("inside", "false"),
    "event-key": ("keyed", "inside and position is not null and r.low is null"),
    "event-epoch": ("written", "false"),
    "event-plain": (f"kind = {PLAIN}", "false"),
    "event-aborted": (f"kind = {WRITE}", "false"),
    "event-unknown": (f"kind = {WRITE}", "false"),
    "event-outside": (f"kind = {WRITE}", "false"),
}
_RULES = (
    Rule(
        "event-header",
        f"kind not in ({WRITE}, {PLAIN})",
        "one ab.txn header, or none of ab.",
        "another one, or a batch that can't be read",
    ),
    Rule(
        "event-transaction",
        f"inside and kind in ({WRITE}, {PLAIN}) and not coalesce({_MINE}, false)",
        "{coalesce(nullif(lower(hex(r.txn_id)), repeat('0', 32)), 'a plain write')}",
        f"{{if(kind = {PLAIN}, 'a plain write', lower(hex(txn_id)))}}",
    ),
    Rule(
        "event-key",
        "keyed and (position < r.low or position >= r.high)",
        "a position from {r.low} below {r.high}",
        "{position}",
    ),
    Rule(
        "event-epoch",
        "written and placed_by != unhex(lpad(hex(r.reference), 8, '0'))",
        "placed by epoch {r.reference}",
        "placed by epoch {conv(hex(placed_by), 16, 10)}",
    ),
    Rule("event-plain", f"not inside and kind = {PLAIN}", "a plain commit that names it", "none"),
)
_UNNAMED_RULES = (
    Rule("event-outside", "is_named", "inside a range of its COMMIT record", "outside of all"),
    Rule(
        "event-aborted",
        "not is_named and is_aborted",
        "nothing of it",
        "its transaction is {state}",
    ),
    Rule(
        "event-unknown",
        "not is_named and not is_aborted and not under_way",
        "a COMMIT record",
        "its transaction is {state}",
    ),
)


def check_events(
    placed: DataFrame, states: DataFrame, named: DataFrame, findings: Findings
) -> None:
    """Check each event alone.

    ``states``: transactions of the status log (txn_id, state, timestamp). ``named``: stream and txn_id of all
    COMMIT records, with the timestamp of the stream's last record as ``until``.
    """
    judged = placed.withColumns(
        {
            "inside": F.expr("r is not null"),
            "keyed": F.expr("r is not null and position is not null and r.low is not null"),
            "written": F.expr(
                f"r is not null and {_MINE} and writer != X'0000000000000000'"
                " and r.reference is not null"
            ),
        }
    )
    findings.count(judged, _COUNTS)
    findings.judge(judged, _RULES)
    _check_unnamed(placed, states, named, findings)


def _check_unnamed(
    placed: DataFrame, states: DataFrame, named: DataFrame, findings: Findings
) -> None:
    """Check events outside of all ranges by the state of their transactions."""
    last = F.broadcast(named.groupBy("stream").agg(F.max("until").alias("last")))
    # The event is of a staged merge that has not ended, or was committed after the history was read.
    under_way = (
        "not is_named and (state = 'FINALIZE_IN_PROGRESS'"
        " or state = 'COMMITTED' and timestamp > coalesce(last, 0))"
    )
    unnamed = (
        placed.where(F.col("r").isNull() & (F.col("kind") == WRITE))
        .join(named.withColumn("is_named", F.lit(True)), ["stream", "txn_id"], "left")
        .join(states.select("txn_id", "state", "timestamp"), "txn_id", "left")
        .join(last, "stream", "left")
        .withColumns(
            {
                "is_named": F.coalesce("is_named", F.lit(False)),
                "state": F.coalesce("state", F.lit("not known")),
            }
        )
        .withColumns(
            {
                "under_way": F.expr(under_way),
                "is_aborted": F.col("state").isin("ABORTED", "ABORT_IN_PROGRESS"),
            }
        )
    )
    findings.count(unnamed, {"event-unknown": ("false", "under_way")})
    findings.judge(unnamed, _UNNAMED_RULES)


_COUNT_RULES = (Rule("event-count", "not gone and n != count", "{count} events", "{n}"),)


def check_counts(placed: DataFrame, ranges: DataFrame, findings: Findings) -> None:
    """Check that each range has as many events as its record says. ``gone``: retention deleted some of them."""
    inside = (
        placed.where(F.col("r").isNotNull())
        .groupBy("stream", F.col("r.record").alias("record"), F.col("r.id").alias("id"))
        .agg(F.count("*").alias("n"))
    )
    both = ranges.join(inside, ["stream", "record", "id"], "left").withColumn(
        "n", F.coalesce("n", F.lit(0))
    )
    findings.count(both, {"event-count": ("not gone", "gone")})
    findings.judge(both, _COUNT_RULES, offset="first")
