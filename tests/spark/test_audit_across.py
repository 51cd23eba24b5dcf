"""The audit compares the ends of transactions over several control partitions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from pyspark.sql import DataFrame, SparkSession

import anabranch
from anabranch.audit import status as status_of
from anabranch.audit.findings import Findings
from anabranch.audit.run import audit
from anabranch.audit.tables import FORCED, STATUS
from anabranch.core import rows as k
from anabranch.core.rows import Entry
from anabranch.kafka.log import KafkaLog
from anabranch.protocol.ids import control_partition_of, make_txn_id
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.codec import LEVEL, decode, encode
from anabranch.spark.options import Connection
from anabranch.topics.names import status_topic
from tests.cluster import start_cluster
from tests.conftest import Broker
from tests.crash.oracle import read_status

# (id, rows of the other control partition, audited control partition) -> key and value of a record to append.
Plant = Callable[[bytes, Mapping[bytes, bytes], int], tuple[bytes, bytes | None]]
LONG_AGO_MS, NOW_MS = 1_700_000_000_000, 1_800_000_000_000
TOO_EARLY = "none, and it is not old enough to be forgotten"
NOT_COUNTED = "none: the outcome does not count its events"
# State and timestamp at the audited control partition; then at the other one; then the finding.
CASES: dict[str, tuple[tuple[str, int], tuple[str, int] | None, str]] = {
    "alike": (("COMMITTED", 7), ("COMMITTED", 7), ""),
    "merges still": (("COMMITTED", 7), ("FINALIZE_IN_PROGRESS", 7), ""),
    "both aborted": (("ABORTED", 0), ("ABORTED", 0), ""),
    "not decided": (("OPEN", 0), ("PREPARED", 0), ""),
    "torn": (("COMMITTED", 7), ("ABORTED", 0), "COMMITTED at 7"),
    "torn the other way": (("ABORTED", 0), ("COMMITTED", 7), "ABORTED at 0"),
    "two times": (("COMMITTED", 7), ("COMMITTED", 8), "COMMITTED at 7"),
    "forgotten too early": (("COMMITTED", 7), None, TOO_EARLY),
    "forced": (("ABORTED", 0), ("COMMITTED", 7), f"ABORTED at 0 ({FORCED})"),
    "not counted": (("COMMITTED", 7), ("COMMITTED", 7), NOT_COUNTED),
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
        if name != "not counted":
            part = {
                "entry": Entry.PARTITION,
                "txn_id": txn_id,
                "partition": 1 - home,
                "committed": 0,
            }
            (theirs if home else ours).append(part)
        if name == "forced":
            mark = {"entry": Entry.COORDINATOR, "txn_id": txn_id, "reason": FORCED}
            (ours if home else theirs).append(mark)
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


def changed(**fields: Any) -> Plant:
    """Other fields of the transaction's row."""

    def plant(txn_id: bytes, rows: Mapping[bytes, bytes], _: int) -> tuple[bytes, bytes | None]:
        key = k.txn_key(txn_id)
        return key, encode(decode(rows[key])._replace(**fields))

    return plant


# For a transaction in real streams: whether the audited control partition coordinates it; whether it commits; what
# changes in the other control partition's status log; the finding.
PLANTED: dict[str, tuple[bool, bool, Plant, str]] = {
    "nothing": (True, True, changed(), ""),
    "nothing, the other way": (False, True, changed(), ""),
    "its participant aborted": (True, True, changed(state="ABORTED", commit_timestamp=0), "COMMITTED at {at}"),
    "its participant committed": (True, False, changed(state="COMMITTED", commit_timestamp=9), "ABORTED at 0"),
    "another time": (False, True, changed(commit_timestamp=9), "COMMITTED at {at}"),
    "no coordinator": (False, True, lambda txn_id, *_: (k.txn_key(txn_id), None), TOO_EARLY),
    "not counted": (False, True, lambda txn_id, _, here: (k.partition_key(txn_id, here), None), NOT_COUNTED),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.unsecured
def test_what_is_planted_in_real_streams_is_found_and_nothing_else(
    spark: SparkSession, broker: Broker, log: KafkaLog, unique: str, tmp_path: Path
) -> None:
    """The coordinator's row has the events of all parts; a part may be the only one with events."""
    prefix, two = f"a{unique}", ("--control-partitions", "2")
    cluster = start_cluster(broker.bootstrap, tmp_path, prefix, two)
    streams = [f"{scope}{unique}/s" for scope in "xy"]
    ids, times = dict[str, bytes](), dict[str, int]()
    connection = Connection(broker.bootstrap, prefix, 60.0, ())
    try:
        with anabranch.connect(broker.bootstrap, prefix=prefix, lane=ADMIN_LANE) as operator:
            operator.feature_level(raise_to=LEVEL)
        with anabranch.connect(broker.bootstrap, prefix=prefix) as client:
            for stream in streams:
                client.create_stream(stream, 1)
            for name, (coordinates, commits, *_) in PLANTED.items():
                with client.begin(streams[not coordinates].partition("/")[0]) as txn:
                    txn.token()
                    ids[name] = txn.txn_id or b""
                    for stream in streams if coordinates else streams[:1]:
                        txn.write(stream, b"v", key=b"k")
                    txn.flush()
                    if commits:
                        times[name] = txn.commit().commit_timestamp
                    else:
                        txn.abort()
        for stream in streams:
            report = audit(spark, connection, [stream])
            assert report.breaches == 0, report.to_json()
            assert report.check("across").examined == len(PLANTED)
            assert report.check("status-count").examined >= 1
    finally:
        cluster.controller.kill()
    here = control_partition_of(ids["nothing"])
    rows = read_status(log, prefix, 1 - here).rows
    producer = Producer({"bootstrap.servers": broker.bootstrap, "acks": "all"})
    for name, (*_, plant, _) in PLANTED.items():
        key, value = plant(ids[name], rows, here)
        producer.produce(status_topic(prefix), value, key, 1 - here)
    assert producer.flush(30) == 0
    found = audit(spark, connection, streams[:1]).check("across").examples
    wrong = {name: text.format(at=times.get(name)) for name, (*_, text) in PLANTED.items() if text}
    assert {one.transaction: one.found for one in found} == {
        ids[name].hex(): text for name, text in wrong.items()
    }
