"""Checks of the status log against the histories: the same transactions, times and counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from anabranch.audit.findings import Findings, text
from anabranch.audit.report import Prepared
from anabranch.audit.tables import COMMIT
from anabranch.core.ids import MARK_MS, NO_TXN
from anabranch.core.rows import Entry


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
    """How many events streams have of each transaction, by their histories: txn_id, there."""
    commits = history.where((F.col("kind") == COMMIT) & F.col("txn_id").isNotNull())
    parts = commits.select("txn_id", F.inline("segments"))
    return parts.groupBy("txn_id").agg(F.sum("count").alias("there"))


def match(
    status: DataFrame,
    commits: DataFrame,
    elsewhere: DataFrame,
    scopes: Sequence[str],
    streams: Sequence[str],
    moment: int,
    *,
    cuts: Mapping[str, int],
) -> DataFrame:
    """Transactions as both logs know them, one row each: those of the scopes, and those in the streams.

    ``elsewhere``: as of `counts_of`, for all other streams of the control partition. ``moment``: all commits up to
    it are in both. ``cuts``: streams whose histories may lack COMMIT records up to these timestamps.
    """
    cut = status.sparkSession.createDataFrame(list(cuts.items()), "stream string, cut long")
    rows = status.where(F.col("entry") == Entry.TXN).select(
        "txn_id", "scope", "state", "timestamp", "committed"
    )
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
                # One-shots have no participants: any stream may have been theirs.
                "may_be_cut": F.col("timestamp")
                <= F.coalesce(F.col("cut"), F.lit(max(cuts.values(), default=-1))),
                "decided": F.coalesce(F.col("committed_by"), F.col("timestamp")) <= F.lit(moment),
            }
        )
        .withColumn("fits", F.col("has_row") & (F.col("told") == F.col("committed")))
    )


def check_status(matched: DataFrame, expired_ms: int, findings: Findings) -> None:
    """Check states, times and counts. ``expired_ms``: older transactions (by id) may be forgotten."""
    made_ms = F.conv(F.hex(F.substring("txn_id", 3, 6)), 16, 10).cast("long")
    in_both = F.col("has_row") & F.col("has_commit")
    committed = F.col("state") == "COMMITTED"
    # One-shots that move positions leave no row: those of their tasks are their outcome.
    marked = made_ms >= F.lit(MARK_MS)
    old = F.col("has_commit") & ~F.col("has_row") & (marked | (made_ms <= expired_ms))
    due = F.col("has_row") & committed & F.col("decided") & (F.col("committed") > 0)
    lacks = due & (F.col("told") == 0)
    counted = due & (F.col("told") > 0)
    cut = F.col("may_be_cut") & (F.col("told") < F.col("committed"))
    findings.count(
        matched,
        {
            "status-history": (due & ~(lacks & cut), lacks & cut),
            "status-missing": (F.col("has_commit") & ~old, old),
            "status-state": (in_both, old),
            "status-time": (in_both & committed, old),
            "status-seen": (in_both & committed & F.col("seen").isNotNull(), F.lit(False)),
            "status-count": (counted & ~cut, old | counted & cut),
        },
    )
    findings.judge(
        matched,
        [
            (
                "status-history",
                lacks & ~cut,
                text("COMMIT records of ", F.col("committed"), " events"),
                F.lit("none"),
            ),
            (
                "status-missing",
                F.col("has_commit") & ~F.col("has_row") & ~old,
                F.lit("a row in the status log"),
                F.lit("none, and it is not old enough to be forgotten"),
            ),
            ("status-state", in_both & ~committed, F.lit("COMMITTED"), F.col("state")),
            (
                "status-time",
                in_both
                & committed
                & (
                    (F.col("committed_at") != F.col("timestamp"))
                    | (F.col("committed_by") != F.col("timestamp"))
                ),
                F.col("timestamp"),
                text(F.col("committed_at"), " in the history"),
            ),
            (
                "status-seen",
                in_both & committed & (F.col("timestamp") <= F.col("seen")),
                text("above ", F.col("seen"), ", which a writer had seen"),
                F.col("timestamp"),
            ),
            (
                "status-count",
                counted & (F.col("told") != F.col("committed")) & ~cut,
                text(F.col("committed"), " events"),
                F.col("told"),
            ),
        ],
        stream=F.coalesce("in_stream", "touches", F.lit("")),
        partition=None,
        offset=None,
    )


def prepared_of(status: DataFrame) -> tuple[Prepared, ...]:
    """Count the PREPARED transactions by the secret that ends them."""
    rows = status.where(F.col("entry") == Entry.PREPARED).select("txn_id", "writer", "timestamp")
    waiting = status.where((F.col("entry") == Entry.TXN) & (F.col("state") == "PREPARED"))
    by = F.lower(F.hex("writer")).alias("by")
    found = rows.join(waiting.select("txn_id"), "txn_id").groupBy(by)
    counted = found.agg(F.count("*").alias("n"), F.min("timestamp").alias("since"))
    return tuple(Prepared(*row) for row in counted.orderBy("by").collect())


def check_ledger(status: DataFrame, rows: DataFrame, expired_ms: int, findings: Findings) -> None:
    """Compare a ledger's rows, read before the status log: txn_id, outcome. Older ones may be forgotten."""
    made_ms = F.conv(F.hex(F.substring("txn_id", 3, 6)), 16, 10).cast("long")
    states = status.where(F.col("entry") == Entry.TXN).select("txn_id", "state")
    both = rows.join(states, "txn_id", "left").withColumn(
        "state", F.coalesce("state", F.lit("unknown"))
    )
    commit = F.col("outcome") == "commit"
    unknown = (F.col("state") == "unknown") & (made_ms <= expired_ms)
    waits = unknown | F.col("state").isin("PREPARED", "FINALIZE_IN_PROGRESS")
    findings.count(both, {"ledger": (~waits, waits)})
    wrong = F.when(commit, F.col("state") != "COMMITTED").otherwise(F.col("state") == "COMMITTED")
    findings.judge(
        both,
        [("ledger", wrong & ~waits, F.col("outcome"), F.col("state"))],
        stream=F.lit(""), partition=None, offset=None,
    )  # fmt: skip
