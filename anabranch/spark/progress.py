"""A listener that reports each micro-batch: the lag of its sources, and what its sink committed."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

import anabranch
from anabranch.errors import AnabranchError, MalformedRecord
from anabranch.spark.source.positions import lag

log = logging.getLogger("anabranch.spark")

_OBSERVED = "anabranch"
_SPREAD = 0.01  # relative error of the count of transactions


def measured(events: DataFrame) -> DataFrame:
    """The given events, of which Spark also counts bytes and transactions, for `Progress`."""
    there = [name for name in ("key", "value") if name in events.columns]
    sizes = [F.coalesce(F.octet_length(name), F.lit(0)) for name in there]
    counted = [F.sum(sum(sizes, F.lit(0)).cast("long")).alias("bytes")] if sizes else []
    if "commit_timestamp" in events.columns:
        distinct = F.approx_count_distinct("commit_timestamp", _SPREAD)
        counted.append(distinct.alias("transactions"))
    return events.observe(_OBSERVED, *counted) if counted else events


@dataclass(frozen=True, slots=True)
class Progress:
    """A finished micro-batch of a query.

    ``rows``: how many were read. ``seconds``: the time of the whole micro-batch; ``writing``: the part of it spent
    on writing and committing. ``lag``: unread offsets by stream; None if unknown, or of another source.
    ``committed``: the sink's newest transaction; None for another sink, or before the first commit.
    ``transactions``: how many were read, within about 1 %; one that is split counts in each micro-batch.
    ``bytes``: of the keys and values read. The last two are None unless the events are `measured`.
    """

    query_id: str
    name: str | None
    batch: int
    rows: int
    seconds: float
    writing: float
    lag: Mapping[str, int] | None
    committed: anabranch.TransactionInfo | None
    transactions: int | None = None
    bytes: int | None = None

    def __str__(self) -> str:
        behind = "?" if self.lag is None else sum(self.lag.values())
        text = (
            f"batch {self.batch}: {self.rows} rows in {self.seconds:.1f} s, {behind} offsets behind"
        )
        if self.transactions is not None:
            text += f", {self.transactions} transactions"
        if self.bytes is not None:
            text += f", {self.bytes / 1e6:.1f} MB"
        if self.committed is not None:
            info = self.committed
            text += f", {info.counts.committed} events in {info} written in {self.writing:.1f} s"
        return text


class ProgressListener(StreamingQueryListener):
    """Calls a function with each `Progress`: ``spark.streams.addListener(ProgressListener(print))``."""

    def __init__(
        self,
        report: Callable[[Progress], None],
        client: anabranch.Client | None = None,
        scope: str | None = None,
        sink: str = "0",
    ) -> None:
        """``client``, ``scope``: look up transactions of sinks in this scope. ``sink``: as the sink's option."""
        self._report = report
        self._client = client if scope is not None else None
        self._scope = scope or ""
        self._sink = sink

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Nothing."""

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Nothing."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Nothing."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Report the micro-batch. Errors of look-ups are only logged."""
        found = event.progress
        behind: dict[str, int] | None = None
        for source in found.sources:
            try:
                behind = (lag(json.loads(source.json)) or {}) | (behind or {}) or None
            except (MalformedRecord, KeyError):  # of another format
                continue
        took = found.durationMs
        seen = found.observedMetrics.get(_OBSERVED)
        counted = {} if seen is None else seen.asDict()
        self._report(
            Progress(
                str(found.id),
                found.name,
                found.batchId,
                found.numInputRows,
                took.get("triggerExecution", 0) / 1000,
                took.get("addBatch", 0) / 1000,
                behind,
                self._committed(str(found.id)),
                counted.get("transactions"),
                (counted["bytes"] or 0) if "bytes" in counted else None,
            )
        )

    def _committed(self, query_id: str) -> anabranch.TransactionInfo | None:
        if self._client is None:
            return None
        try:
            series = self._client.series(self._scope, f"spark/{query_id}/{self._sink}")
            return self._client.state(series[0].txn_id) if series else None
        except AnabranchError as error:
            log.info("what the query committed is not known: %s", error)
            return None
