"""The audit compares the ends of transactions over several control partitions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

import anabranch
from anabranch.audit import status as status_of
from anabranch.audit.findings import Findings
from anabranch.audit.run import audit
from anabranch.audit.tables import STATUS
from anabranch.core.rows import Entry
from anabranch.protocol.ids import make_txn_id
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.codec import LEVEL
from anabranch.spark.options import Connection
from tests.cluster import start_cluster
from tests.conftest import Broker

LONG_AGO_MS, NOW_MS = 1_700_000_000_000, 1_800_000_000_000
TOO_EARLY = "none, and it is not old enough to be forgotten"
# What the audited control partition has: state, timestamp; then what the other one has; then the finding.
CASES: dict[str, tuple[tuple[str, int], tuple[str, int] | None, str]] = {
    "alike": (("COMMITTED", 7), ("COMMITTED", 7), ""),
    "merges still": (("COMMITTED", 7), ("FINALIZE_IN_PROGRESS", 7), ""),
    "both aborted": (("ABORTED", 0), ("ABORTED", 0), ""),
    "not decided": (("OPEN", 0), ("PREPARED", 0), ""),
    "torn": (("COMMITTED", 7), ("ABORTED", 0), "COMMITTED at 7"),
    "torn the other way": (("ABORTED", 0), ("COMMITTED", 7), "ABORTED at 0"),
    "two times": (("COMMITTED", 7), ("COMMITTED", 8), "COMMITTED at 7"),
    "forgotten too early": (("COMMITTED", 7), None, TOO_EARLY),
}


def frame(spark: SparkSession, *rows: dict[str, Any]) -> DataFrame:
    return spark.createDataFrame(pa.Table.from_pylist(list(rows), STATUS))


@pytest.mark.long
def test_parts_that_ended_otherwise_are_found(spark: SparkSession) -> None:
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = [{"entry": Entry.ROUND, "expired_ms": LONG_AGO_MS}]
    ids = {}
    for number, (name, (own, other, _)) in enumerate(CASES.items()):
        # The audited control partition coordinates every second one, and takes part in the others.
        home = number % 2
        txn_id = ids[name] = make_txn_id(home, NOW_MS, number)
        txn = {"entry": Entry.TXN, "txn_id": txn_id, "scope": "a", "committed": 0}
        ours.append(txn | {"state": own[0], "timestamp": own[1]})
        if home == 0:
            part = {"entry": Entry.PARTITION, "txn_id": txn_id, "partition": 1, "committed": 0}
            ours.append(part)
        if other is not None:
            theirs.append(txn | {"state": other[0], "timestamp": other[1]})
    old = {"entry": Entry.TXN, "txn_id": make_txn_id(1, LONG_AGO_MS - 1, 99), "scope": "a"}
    ours.append(old | {"state": "COMMITTED", "timestamp": 3, "committed": 0})
    status, findings = frame(spark, *ours), Findings()
    assert status_of.elsewhere(status, 0) == [1]
    status_of.check_across(status, 0, {1: frame(spark, *theirs)}, findings)
    found = next(one for one in findings.checks() if one.name == "across")
    wrong = {name: text for name, (*_, text) in CASES.items() if text}
    assert {one.transaction: one.found for one in found.examples} == {
        ids[name].hex(): text for name, text in wrong.items()
    }
    assert (found.examined, found.unchecked) == (len(CASES) - 1, 1)


@pytest.mark.long
@pytest.mark.unsecured
def test_nothing_is_found_in_real_streams_of_two_control_partitions(
    spark: SparkSession, broker: Broker, unique: str, tmp_path: Path
) -> None:
    """The coordinator's row has the events of all parts; a part may be the only one with events."""
    prefix, two = f"a{unique}", ("--control-partitions", "2")
    cluster = start_cluster(broker.bootstrap, tmp_path, prefix, two)
    streams = [f"{scope}{unique}/s" for scope in "xy"]
    try:
        with anabranch.connect(broker.bootstrap, prefix=prefix, lane=ADMIN_LANE) as operator:
            operator.feature_level(raise_to=LEVEL)
        with anabranch.connect(broker.bootstrap, prefix=prefix) as client:
            for stream in streams:
                client.create_stream(stream, 1)
            for home, to, commits in ((0, (0, 1), True), (1, (0,), True), (0, (0, 1), False)):
                with client.begin(streams[home].partition("/")[0]) as txn:
                    txn.token()
                    for number in to:
                        txn.write(streams[number], b"v", key=b"k")
                    txn.flush()
                    if commits:
                        txn.commit()
                    else:
                        txn.abort()
        for stream in streams:
            report = audit(spark, Connection(broker.bootstrap, prefix, 60.0, ()), [stream])
            assert report.breaches == 0, report.to_json()
            assert report.check("across").examined == 3
            assert report.check("status-count").examined >= 1
    finally:
        cluster.controller.kill()
