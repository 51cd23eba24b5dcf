"""Checks of the status log against the histories: the same transactions, times and counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from anabranch.audit.findings import Counts, Findings, Rule
from anabranch.audit.report import Prepared
from anabranch.audit.tables import COMMIT
from anabranch.core.rows import Entry
from anabranch.protocol.ids import MARK_MS, NO_TXN

# A transaction's id has its coordinator's control partition, and the Unix milliseconds when it was made.
_COORDINATOR = "cast(conv(hex(substring(txn_id, 1, 2)), 16, 10) as int)"
_MADE_MS = "cast(conv(hex(substring(txn_id, 3, 6)), 16, 10) as long)"


def commits_of(ranges: DataFrame) -> DataFrame:
    """Each transaction, from all histories together."""
    return (
        ranges.where(F.col("txn_id") != F.lit(NO_TXN))
        .groupBy("txn_id")
        .agg(
            F.min("timestamp").alias("committed_at"),
            F.max("timestamp").alias("committed_by"),
            F.sum("count").alias("told"),
            F.min("stream").alias("in_stream"),
            F.collect_set("stream").alias("streams"),
            F.max("gone").alias("gone"),
        )
    )


def counts_of(history: DataFrame) -> DataFrame:
    """How many events of each transaction streams have, by their histories: txn_id, there."""
    commits = history.where((F.col("kind") == COMMIT) & F.col("txn_id").isNotNull())
    parts = commits.select("txn_id", F.inline("segments"))
    return parts.groupBy("txn_id").agg(F.sum("count").alias("there"))


class Asked(NamedTuple):
    """The subject of an audit: scopes, and their streams. ``moment``: all commits up to it are in both logs.

    ``cuts``: stream -> the timestamp up to which its history may lack COMMIT records.
    """

    scopes: Sequence[str]
    streams: Sequence[str]
    moment: int
    cuts: Mapping[str, int]


def match(status: DataFrame, commits: DataFrame, elsewhere: DataFrame, asked: Asked) -> DataFrame:
    """Transactions as both logs have them, one row each: of the scopes, and of the streams.

    ``elsewhere``: as of `counts_of`, for all other streams of the control partition.
    """
    scopes, streams, moment, cuts = asked
    cut = status.sparkSession.createDataFrame(list(cuts.items()), "stream string, cut long")
    rows = status.where(F.col("entry") == Entry.TXN).select(
        "txn_id", "scope", "state", "timestamp", "committed"
    )
    # A coordinator's row has the events of all parts, and only its own part is in these streams.
    parts = status.where((F.col("entry") == Entry.PARTITION) & F.col("committed").isNotNull())
    parts = parts.groupBy("txn_id").agg(F.sum("committed").alias("in_parts"))
    own = F.col("committed") - F.coalesce("in_parts", F.lit(0))
    rows = rows.join(parts, "txn_id", "left").withColumn("committed", own).drop("in_parts")
    touched = (
        status.where(F.col("entry") == Entry.PARTICIPANT)
        .join(F.broadcast(cut), "stream", "left")
        .groupBy("txn_id")
        .agg(
            F.min("stream").alias("touches"),
            F.bool_or(F.col("stream").isin(*streams)).alias("touches_one"),
            F.coalesce(F.max("cut"), F.lit(-1)).alias("cut"),
        )
    )
    writers = status.where(F.col("entry") == Entry.WRITER)
    seen = writers.groupBy("txn_id").agg(F.max("timestamp").alias("seen"))
    return (
        rows.join(commits, "txn_id", "full")
        .join(seen, "txn_id", "left")
        .join(touched, "txn_id", "left")
        .join(elsewhere, "txn_id", "left")
        .where(F.col("told").isNotNull() | F.col("scope").isin(*scopes) | F.col("touches_one"))
        .withColumns(
            {
                "has_row": F.col("state").isNotNull(),
                "has_commit": F.col("told").isNotNull(),
                "told": F.coalesce("told", F.lit(0)) + F.coalesce("there", F.lit(0)),
                # One-shots have no rows of participants: they may have written to any stream.
                "may_be_cut": F.col("timestamp")
                <= F.coalesce(F.col("cut"), F.lit(max(cuts.values(), default=-1))),
                "decided": F.coalesce(F.col("committed_by"), F.col("timestamp")) <= F.lit(moment),
            }
        )
        .withColumn("fits", F.col("has_row") & (F.col("told") == F.col("committed")))
    )


def elsewhere(status: DataFrame, here: int) -> list[int]:
    """The control partitions that coordinate transactions of this status log, or take part in them."""
    coordinator = F.expr(_COORDINATOR)
    txns = status.where((F.col("entry") == Entry.TXN) & (coordinator != here))
    parts = status.where(F.col("entry") == Entry.PARTITION)
    found = txns.select(coordinator.alias("other")).union(parts.select("partition")).distinct()
    return sorted(row["other"] for row in found.collect())


# The fate of a transaction by a row: what it is, or is certain to become.
_FATE = """case when {0}state in ('COMMITTED', 'FINALIZE_IN_PROGRESS') then 'COMMITTED'
    when {0}state in ('ABORTED', 'ABORT_IN_PROGRESS') then 'ABORTED' else {0}state end"""
_ACROSS = (
    Rule(
        "across",
        "judged and their_state is null and not old",
        "a row on control partition {other}",
        "none, and it is not old enough to be forgotten",
    ),
    Rule(
        "across",
        "judged and their_state is not null and (their_fate != state or their_timestamp != timestamp)",
        "{their_fate} at {their_timestamp}, as on control partition {other}",
        "{state} at {timestamp}{why}",
    ),
    Rule(
        "across",
        "judged and state = 'COMMITTED' and their_state is not null and not named",
        "a row of this part at its coordinator, control partition {other}",
        "none: the outcome does not count its events",
    ),
)


def _reasons(status: DataFrame, name: str) -> DataFrame:
    """Rows that give a reason for the end of a part: txn_id, other, and the reason as ``name``.

    ``other``: the participant's control partition, if the row is the coordinator's; else the coordinator's.
    """
    says = F.col("entry").isin(Entry.PARTITION, Entry.COORDINATOR) & (F.col("reason") != "")
    other = F.coalesce("partition", F.expr(_COORDINATOR)).alias("other")
    found = status.where(says).select("txn_id", other, "reason")
    return found.groupBy("txn_id", "other").agg(F.max("reason").alias(name))


def _beside(pairs: DataFrame, here: int, number: int, rows: DataFrame) -> DataFrame:
    """The pairs with control partition ``number``, and what its rows say of them. ``pairs``: txn_id, other."""
    expired = rows.where(F.col("entry") == Entry.ROUND).agg(F.max("expired_ms")).collect()
    ends = rows.where(F.col("entry") == Entry.TXN).select(
        "txn_id",
        F.col("state").alias("their_state"),
        F.col("timestamp").alias("their_timestamp"),
    )
    parts = rows.where((F.col("entry") == Entry.PARTITION) & (F.col("partition") == here))
    reasons = _reasons(rows, "their_reason").where(F.col("other") == here).drop("other")
    return (
        pairs.where(F.col("other") == number)
        .withColumn("expired", F.lit(expired[0][0] or 0))
        .join(ends, "txn_id", "left")
        .join(parts.select("txn_id", F.lit(True).alias("their_part")), "txn_id", "left")
        .join(reasons, "txn_id", "left")
    )


def check_across(
    status: DataFrame, here: int, others: Mapping[int, DataFrame], findings: Findings
) -> None:
    """Compare the ends of transactions with those on other control partitions, whose status was read later.

    Participants are compared with their coordinator, and the other way round. A coordinator also has to have a row
    of each part that has committed. ``others``: the status rows of the other control partitions.
    """
    txns = status.where(F.col("entry") == Entry.TXN)
    coordinator = F.expr(_COORDINATOR)
    parts = status.where(F.col("entry") == Entry.PARTITION)
    pairs = parts.select("txn_id", F.col("partition").alias("other")).union(
        txns.where(coordinator != here).select("txn_id", coordinator.alias("other"))
    )
    pairs = pairs.join(_reasons(status, "our_reason"), ["txn_id", "other"], "left")
    compared = [_beside(pairs, here, number, rows) for number, rows in others.items()]
    if not compared:
        findings.add("across", 0)
        return
    theirs = reduce(DataFrame.unionByName, compared)
    both = txns.select("txn_id", "state", "timestamp").join(theirs, "txn_id")
    why = F.concat_ws("; ", "our_reason", "their_reason")
    rows = findings.keep(
        both.withColumns(
            {
                "judged": F.expr("state in ('COMMITTED', 'ABORTED')"),
                "their_fate": F.expr(_FATE.format("their_")),
                "old": F.expr(f"their_state is null and {_MADE_MS} <= expired"),
                # Only a coordinator has rows of parts, so at a participant none is missing.
                "named": F.col("their_part").isNotNull() | (coordinator == here),
                "why": F.when(why == "", "").otherwise(F.concat(F.lit(" ("), why, F.lit(")"))),
            }
        )
    )
    findings.count(rows, {"across": ("judged and not old", "judged and old")})
    findings.judge(rows, _ACROSS, stream="''", partition="other", offset="null")


_RULES = (
    Rule("status-history", "lacks and not cut", "COMMIT records of {committed} events", "none"),
    Rule(
        "status-missing",
        "has_commit and not has_row and not old",
        "a row in the status log",
        "none, and it is not old enough to be forgotten",
    ),
    Rule("status-state", "in_both and state != 'COMMITTED'", "COMMITTED", "{state}"),
    Rule(
        "status-time",
        "is_committed and (committed_at != timestamp or committed_by != timestamp)",
        "{timestamp}",
        "{committed_at} in the history",
    ),
    Rule(
        "status-seen",
        "is_committed and timestamp <= seen",
        "above {seen}, which a writer had seen",
        "{timestamp}",
    ),
    Rule(
        "status-count", "counted and told != committed and not cut", "{committed} events", "{told}"
    ),
)
_COUNTS: Counts = {
    "status-history": ("due and not (lacks and cut)", "lacks and cut"),
    "status-missing": ("has_commit and not old", "old"),
    "status-state": ("in_both", "old"),
    "status-time": ("is_committed", "old"),
    "status-seen": ("is_committed and seen is not null", "false"),
    "status-count": ("counted and not cut", "old or counted and cut"),
}


def check_status(matched: DataFrame, expired_ms: int, findings: Findings) -> None:
    """Check states, times and counts. ``expired_ms``: transactions begun before may have no row any more."""
    # A one-shot that moves positions has no row: the rows of its tasks are its outcome.
    forgotten = f"({_MADE_MS} >= {MARK_MS} or {_MADE_MS} <= {expired_ms})"
    judged = matched.withColumns(
        {
            "in_both": F.expr("has_row and has_commit"),
            "is_committed": F.expr("has_row and has_commit and state = 'COMMITTED'"),
            "old": F.expr(f"has_commit and not has_row and {forgotten}"),
            "due": F.expr("has_row and state = 'COMMITTED' and decided and committed > 0"),
            "cut": F.expr("may_be_cut and told < committed"),
        }
    ).withColumns({"lacks": F.expr("due and told = 0"), "counted": F.expr("due and told > 0")})
    findings.count(judged, _COUNTS)
    stream = "coalesce(in_stream, touches, '')"
    findings.judge(judged, _RULES, stream=stream, partition="null", offset="null")


def prepared_of(status: DataFrame) -> tuple[Prepared, ...]:
    """Count the PREPARED transactions by the secret that ends them."""
    rows = status.where(F.col("entry") == Entry.PREPARED).select("txn_id", "writer", "timestamp")
    waiting = status.where((F.col("entry") == Entry.TXN) & (F.col("state") == "PREPARED"))
    by = F.lower(F.hex("writer")).alias("by")
    found = rows.join(waiting.select("txn_id"), "txn_id").groupBy(by)
    counted = found.agg(F.count("*").alias("n"), F.min("timestamp").alias("since"))
    return tuple(Prepared(*row) for row in counted.orderBy("by").collect())


_LEDGER_RULES = (
    Rule(
        "ledger",
        "not waits and (outcome = 'commit') != (state = 'COMMITTED')",
        "{outcome}",
        "{state}",
    ),
)


def check_ledger(status: DataFrame, rows: DataFrame, expired_ms: int, findings: Findings) -> None:
    """Compare a ledger's rows (txn_id, outcome), which were read before the status log, with the status log.

    ``expired_ms``: as of `check_status`.
    """
    states = status.where(F.col("entry") == Entry.TXN).select("txn_id", "state")
    waits = (
        f"state = 'unknown' and {_MADE_MS} <= {expired_ms}"
        " or state in ('PREPARED', 'FINALIZE_IN_PROGRESS')"
    )
    both = (
        rows.join(states, "txn_id", "left")
        .withColumn("state", F.coalesce("state", F.lit("unknown")))
        .withColumn("waits", F.expr(waits))
    )
    findings.count(both, {"ledger": ("not waits", "waits")})
    findings.judge(both, _LEDGER_RULES, stream="''", partition="null", offset="null")
