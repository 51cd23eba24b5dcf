"""The findings of checks: uniform rows, which Spark counts and samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import reduce

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from anabranch.audit.report import CHECKS, MOST_EXAMPLES, Check, Example

# The name of a check, whether it failed, what was expected, what was found.
Rule = tuple[str, Column, Column, Column]
Place = Column | str | None
_COLUMNS = ("check", "stream", "transaction", "partition", "offset", "expected", "found")


def text(*parts: Column | str) -> Column:
    """Values as one text; a null is shown as null."""
    return F.concat(
        *(
            F.lit(part)
            if isinstance(part, str)
            else F.coalesce(part.cast("string"), F.lit("nothing"))
            for part in parts
        )
    )


def shown(txn_id: Column) -> Column:
    """A transaction id as text; empty for plain writes."""
    digits = F.lower(F.hex(txn_id))
    return F.when(digits.isNull() | (digits == "0" * 32), "").otherwise(digits)


def _column(place: Place) -> Column:
    return F.col(place) if isinstance(place, str) else F.lit(place)


class Findings:
    """Gathers the findings of all checks."""

    def __init__(self) -> None:
        self._breaches: list[DataFrame] = []
        self._counts: list[DataFrame] = []
        self._more: list[tuple[str, Example]] = []
        self._examined: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))

    def keep(self, rows: DataFrame) -> DataFrame:
        """Compute these rows now, and only once, since several checks use them.

        A second computation could see a log that has grown. So if executors with the rows are lost, the audit
        fails, unless the session has a checkpoint directory. Plans also stay small.
        """
        if rows.sparkSession.sparkContext.getCheckpointDir() is not None:
            return rows.checkpoint()
        return rows.localCheckpoint(storageLevel=StorageLevel.MEMORY_AND_DISK)

    def judge(
        self,
        rows: DataFrame,
        rules: Sequence[Rule],
        *,
        stream: Place = "stream",
        txn: Place = "txn_id",
        partition: Place = "partition",
        offset: Place = "offset",
    ) -> None:
        """Check all rules against each row in one pass. The columns, or None, describe where a breach is."""
        broken = [
            F.when(
                wrong,
                F.struct(
                    F.lit(name).alias("check"),
                    expected.cast("string").alias("expected"),
                    found.cast("string").alias("found"),
                ),
            )
            for name, wrong, expected, found in rules
        ]
        each = F.explode(F.filter(F.array(*broken), lambda one: one.isNotNull()))
        self._breaches.append(
            rows.select(
                _column(stream).alias("stream"),
                shown(_column(txn).cast("binary")).alias("transaction"),
                _column(partition).cast("int").alias("partition"),
                _column(offset).cast("long").alias("offset"),
                each.alias("broken"),
            ).select(
                "broken.check", "stream", "transaction", "partition", "offset",
                "broken.expected", "broken.found",
            )
        )  # fmt: skip

    def found(self, name: str, example: Example) -> None:
        """Add a breach that the driver found."""
        self._more.append((name, example))

    def count(self, rows: DataFrame, of: Mapping[str, tuple[Column, Column | None]]) -> None:
        """Count in one pass the rows that each check examined, and the rows that it could not check."""
        never = F.lit(False)
        counts = rows.agg(
            F.array(
                *(
                    F.struct(
                        F.lit(name).alias("check"),
                        F.count_if(examined).alias("examined"),
                        F.count_if(never if unchecked is None else unchecked).alias("unchecked"),
                    )
                    for name, (examined, unchecked) in of.items()
                )
            ).alias("counts")
        )
        self._counts.append(counts.select(F.inline("counts")))

    def examined(self, name: str) -> int:
        """How many things a check examined. Call it after `checks`."""
        return self._examined[name][0]

    def add(self, name: str, examined: int, unchecked: int = 0) -> None:
        """Add to the number of examined things."""
        before = self._examined[name]
        self._examined[name] = before[0] + examined, before[1] + unchecked

    def checks(self) -> tuple[Check, ...]:
        """All checks. This call runs Spark's jobs."""
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
                what,
                *self._examined[name],
                counts.get(name, 0),
                tuple(examples.get(name, ())),
            )
            for name, (what, _) in CHECKS.items()
        )
