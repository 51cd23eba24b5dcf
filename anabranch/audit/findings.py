"""The findings of checks: rows of one form, which Spark counts, and of which it takes examples."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import NamedTuple

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from anabranch.audit.report import CHECKS, MOST_EXAMPLES, Check, Example

_COLUMNS = ("check", "stream", "transaction", "partition", "offset", "expected", "found")


class Rule(NamedTuple):
    """A way to break a check of `CHECKS`. ``wrong``: SQL that is true of a wrong row; null: the row is right.

    ``expected`` and ``found`` are texts, in which ``{SQL}`` is a value of the row.
    """

    check: str
    wrong: str
    expected: str
    found: str


# For each check: SQL that is true of rows that it examined, and of rows that it could not check.
Counts = Mapping[str, tuple[str, str]]
ALL = "true", "false"


def text(template: str) -> Column:
    """A template with the values of a row; a null is shown as `nothing`."""
    parts = re.split(r"\{(.+?)\}", template)
    return F.concat(
        *(
            F.coalesce(F.expr(part).cast("string"), F.lit("nothing")) if number % 2 else F.lit(part)
            for number, part in enumerate(parts)
        )
    )


def shown(txn_id: Column) -> Column:
    """A transaction id as text; empty for plain writes."""
    digits = F.lower(F.hex(txn_id))
    return F.when(digits.isNull() | (digits == "0" * 32), "").otherwise(digits)


def hex_of(data: bytes) -> str:
    return f"X'{data.hex()}'"


class Findings:
    def __init__(self) -> None:
        self._breaches: list[DataFrame] = []
        self._counts: list[DataFrame] = []
        self._more: list[tuple[str, Example]] = []
        self._examined: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))

    def keep(self, rows: DataFrame) -> DataFrame:
        """Compute these rows now, and once for all checks that use them.

        A second computation could see a longer log. So if executors with the rows are lost, the audit fails, unless
        the session has a checkpoint directory. Plans also stay small.
        """
        if rows.sparkSession.sparkContext.getCheckpointDir() is not None:
            return rows.checkpoint()
        return rows.localCheckpoint(storageLevel=StorageLevel.MEMORY_AND_DISK)

    def judge(
        self,
        rows: DataFrame,
        rules: Sequence[Rule],
        *,
        stream: str = "stream",
        txn: str = "txn_id",
        partition: str = "partition",
        offset: str = "offset",
    ) -> None:
        """Check all rules against each row in one pass. The other arguments are SQL for the place of a breach."""
        broken = [
            F.when(
                F.expr(rule.wrong),
                F.struct(
                    F.lit(rule.check).alias("check"),
                    text(rule.expected).alias("expected"),
                    text(rule.found).alias("found"),
                ),
            )
            for rule in rules
        ]
        each = F.explode(F.filter(F.array(*broken), lambda one: one.isNotNull()))
        self._breaches.append(
            rows.select(
                F.expr(stream).alias("stream"),
                shown(F.expr(txn).cast("binary")).alias("transaction"),
                F.expr(partition).cast("int").alias("partition"),
                F.expr(offset).cast("long").alias("offset"),
                each.alias("broken"),
            ).select(
                "broken.check", "stream", "transaction", "partition", "offset",
                "broken.expected", "broken.found",
            )
        )  # fmt: skip

    def found(self, name: str, example: Example) -> None:
        """Add a breach that the driver found."""
        self._more.append((name, example))

    def count(self, rows: DataFrame, of: Counts) -> None:
        """Count in one pass the rows that each check examined, and the rows that it could not check."""
        counts = rows.agg(
            F.array(
                *(
                    F.struct(
                        F.lit(name).alias("check"),
                        F.count_if(F.expr(examined)).alias("examined"),
                        F.count_if(F.expr(unchecked)).alias("unchecked"),
                    )
                    for name, (examined, unchecked) in of.items()
                )
            ).alias("counts")
        )
        self._counts.append(counts.select(F.inline("counts")))

    def examined(self, name: str) -> int:
        """How many rows a check examined. Call it after `checks`."""
        return self._examined[name][0]

    def add(self, name: str, examined: int, unchecked: int = 0) -> None:
        """Add to a check's numbers of examined rows, and of rows that it could not check."""
        before = self._examined[name]
        self._examined[name] = before[0] + examined, before[1] + unchecked

    def checks(self) -> tuple[Check, ...]:
        """The results of all checks. This call runs Spark's jobs."""
        for row in reduce(DataFrame.unionByName, self._counts).collect():
            self.add(row["check"], row["examined"], row["unchecked"])
        rows = self.keep(reduce(DataFrame.unionByName, self._breaches))
        by_check = rows.groupBy("check").agg(F.count("*").alias("n"))
        counts = {row["check"]: row["n"] for row in by_check.collect()}
        examples: dict[str, list[Example]] = {}
        if counts:
            order = Window.partitionBy("check", "stream").orderBy("partition", "offset")
            sample = rows.withColumn("n", F.row_number().over(order)).where(
                F.col("n") <= MOST_EXAMPLES
            )
            for row in sample.orderBy("check", "stream", "n").collect():
                cells = (row[name] for name in _COLUMNS[1:])
                examples.setdefault(row["check"], []).append(Example(*cells))
        for name, example in self._more:
            counts[name] = counts.get(name, 0) + 1
            known = examples.setdefault(name, [])
            if sum(one.stream == example.stream for one in known) < MOST_EXAMPLES:
                known.append(example)
        return tuple(
            Check(
                name,
                kind.what,
                kind.severity,
                kind.to_do,
                *self._examined[name],
                counts.get(name, 0),
                tuple(examples.get(name, ())),
            )
            for name, kind in CHECKS.items()
        )
