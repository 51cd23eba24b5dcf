"""What operators see on a real cluster: groups and their lag, open transactions, ranges of events, histories."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import closing
from xml.etree import ElementTree as ET

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

import anabranch
from anabranch import Client
from anabranch.errors import (
    IllegalState,
    InvalidArgument,
    TransactionAborted,
    WritersUnfinished,
)
from anabranch.presentation.history import draw, read_history
from anabranch.protocol.schemas.records import CommitRecord
from anabranch.protocol.tokens import peek
from anabranch.reading.group_lag import HISTORY
from tests.behaviour.steps import alter_topics, commit
from tests.behaviour.test_cli import Shell
from tests.cluster import Cluster
from tests.waiting import wait_until

pytestmark = pytest.mark.broker
_MANY = 6000  # events of a big merge


@pytest.mark.soak
def test_groups_of_all_kinds_and_their_true_lag(
    cluster: Cluster, client: Client, unique: str
) -> None:
    scope = f"s-{unique}"
    stream, topic = f"{scope}/seen", f"{scope}.seen"
    client.create_stream(stream, segments=2)
    values = [str(n).encode() for n in range(10)]
    first = commit(client, stream, *values).commit_timestamp
    ordered, whole, plain = (f"{scope}-{kind}" for kind in ("ordered", "whole", "plain"))
    with closing(client.read(stream, group=ordered, timeout=5)) as reader:
        for _, _event in zip(range(10), reader, strict=False):
            pass
        reader.commit()
        assert client.group(ordered).state != "empty"
        with pytest.raises(IllegalState, match="members are in the group"):
            client.reset_group(ordered, stream, "begin")
    with closing(client.read_transactions(stream, group=whole, timeout=1)) as transactions:
        assert len(list(transactions)) == 1
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": plain})
    consumer.commit(offsets=[TopicPartition(topic, 0, 1)], asynchronous=False)
    consumer.close()
    after = time.time()
    second = commit(client, stream, *values, b"more").commit_timestamp
    commit(client, stream, *values)

    found = {group.name: group for group in client.groups(stream)}
    assert set(found) == {ordered, whole, plain}
    counts = {name: group.most.events for name, group in found.items()}
    # The plain one has read the first event of partition 0.
    assert counts[whole] == 21
    assert counts[plain] == 30
    assert 21 <= counts[ordered] <= 22  # an event counts as processed when the next is asked for
    assert all(group.most.exact and group.state == "empty" for group in found.values())
    assert found[whole].streams[0].offsets.keys() == {HISTORY}
    assert 0 < found[whole].most.age_s(time.time()) <= time.time() - after + 1

    for start, left in (("end", 0), (second, 10), (first, 21), ("begin", 31)):
        for name in found:
            moved = client.reset_group(name, stream, start)
            assert (name, start, moved.most.events) == (name, start, left)
    with closing(client.read(stream, group=ordered, timeout=2)) as reader:
        assert sum(1 for _ in reader) == 31
    with pytest.raises(InvalidArgument, match="there is no group"):
        client.group("nobody-reads")


@pytest.mark.long
def test_open_transactions_from_a_shell(cluster: Cluster, client: Client, unique: str) -> None:
    shell, scope = Shell(cluster), f"s-{unique}"
    stream = f"{scope}/seen"
    client.create_stream(stream)
    with client.begin(scope, keepalive=60) as txn:
        token = txn.token()
        writer = client.join(token, label="loader 7")
        writer.write(stream, b"x" * 10_000)
        writer.flush()
        text = peek(token).txn_id.hex()
        (shown,) = shell.json("txn", "list", scope)["transactions"]
        assert shown["txn_id"] == text
        assert shown["uncommitted_bytes"] >= 0
        assert shown["writer_count"] == 1
        assert 50 < shown["keepalive_left_s"] <= 60
        assert shown["streams"] == [stream]
        table = shell.run("txn", "list", scope).stdout
        assert "keepalive left" in table
        assert "committed" not in table
        for digits in (text, text[-8:], text[:20]):
            described = shell.json("txn", "describe", digits)
            assert [(w["label"], w["events"]) for w in described["writers"]] == [("loader 7", 1)]
        with pytest.raises(WritersUnfinished, match=r"\(loader 7\)"):
            txn.commit()
        refused = shell.run("txn", "describe", "beefbeefbeef", code=2).stderr
        assert "0 transactions of the newest 10,000 begin or end with" in refused
        writer.finish()
        txn.commit()
    assert shell.json("txn", "describe", text, "--watch")["state"] == "COMMITTED"
    assert shell.json("txn", "list", scope)["transactions"] == []
    with client.begin(scope) as txn, pytest.raises(InvalidArgument, match="64 are allowed"):
        client.join(txn.token(), label="x" * 65)
    with client.begin(scope, name="stuck") as txn:
        txn.write(stream, b"value", key=b"key")
        txn.flush()
        text = (txn.txn_id or b"").hex()
        (shown,) = shell.json("txn", "list", scope)["transactions"]
        assert (shown["txn_id"], shown["state"], shown["name"]) == (text, "OPEN", "stuck")
        aborted = shell.json("txn", "abort", text)
        assert (aborted["state"], aborted["reason"]) == ("ABORTED", "aborted by an operator")
        with pytest.raises(TransactionAborted):
            txn.commit()


@pytest.mark.soak
@pytest.mark.parametrize("own_cluster", [("--chunk-bytes", "4096")], indirect=True)
def test_a_merge_is_watched(
    own_cluster: Cluster, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By chunks of 4 KB: 6 MB take a while."""
    monkeypatch.setattr("anabranch.cli.txn._WATCH_S", 0.02)
    prefix, stream = own_cluster.prefix, f"v{unique}/big"
    with anabranch.connect(own_cluster.bootstrap, prefix=prefix) as client:
        client.create_stream(stream, segments=2)
        with client.begin(f"v{unique}", keepalive=60) as txn:
            token = txn.token()
            txn.write_many(stream, [(os.urandom(1000), b"%d" % n) for n in range(_MANY)])
            txn.flush()
            looking = threading.Timer(1.0, txn.commit, kwargs={"timeout": 60})
            looking.start()
            text = peek(token).txn_id.hex()
            watch = ("txn", "describe", text, "--watch", "--cluster-prefix", prefix, "--json")
            said = Shell(own_cluster).run(*watch).stdout
            looking.join()
            assert client.state(peek(token).txn_id).counts.committed == _MANY
    shown, decoder = [], json.JSONDecoder()
    while said := said.lstrip():
        one, end = decoder.raw_decode(said)
        shown.append(one)
        said = said[end:]
    assert shown[-1]["state"] == "COMMITTED"
    merges = [one["merge"] for one in shown if one.get("merge")]
    done = [sum(part["events_done"] for part in merge) for merge in merges]
    assert done == sorted(done)
    assert any(0 < count < _MANY for count in done), done


@pytest.mark.long
def test_a_line_an_event_and_ranges_of_them(cluster: Cluster, client: Client, unique: str) -> None:
    shell, stream = Shell(cluster), f"s-{unique}/seen"
    client.create_stream(stream, segments=2)
    times = []
    for lines in ("a=1\nb=2\n", "a=3\n\n", "c=4"):
        separator = () if "\n\n" in lines else ("--key-separator", "=")
        done = shell.json("write", stream, *separator, given=lines)
        assert done["events"] == len(lines.splitlines())
        times.append(str(done["commit_timestamp"]))
    bad = shell.run("write", stream, "--key-separator", "=", given="a=1\nb\n", code=2).stderr
    assert "line 2 has no '=' between key and value; nothing is committed" in bad

    def values(*options: str) -> list[str]:
        return sorted(each["value"] for each in shell.lines(stream, *options))

    assert values("--to", "end") == ["", "1", "2", "4", "a=3"]
    assert values("--from", times[0], "--to", times[1]) == ["", "a=3"]
    assert values("--from", times[1], "--timeout", "1") == ["4"]
    parts = [values("--to", "end", "--segment", f"{number}@0") for number in (0, 1)]
    assert sorted(parts[0] + parts[1]) == ["", "1", "2", "4", "a=3"]
    assert all(parts)
    for wrong in (("--from", "soon"), ("--to", "end", "--at", "now"), ("--to", "end", "-t")):
        shell.run("read", stream, *wrong, code=2)


def test_the_doctor(cluster: Cluster, client: Client, unique: str) -> None:
    shell = Shell(cluster)
    stream = f"s-{unique}/seen"
    client.create_stream(stream)
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
    tagged: list[tuple[str, str | bytes | None]] = [("ab.variant", b"x")]
    for headers in (tagged, tagged, []):
        producer.produce(f"s-{unique}.seen.journal", b"v", headers=headers, partition=0)
    assert producer.flush(20) == 0
    wait_until(lambda: bool(client.describe(stream).rejected))
    other = f"s-{unique}/other"
    client.create_stream(other)
    alter_topics(cluster.bootstrap, [f"s-{unique}.other"], "retention.ms", "5000")
    wait_until(lambda: client.effective_settings(other)["retention.ms"] == "5000")
    rows = {row["what"]: row for row in shell.json("doctor")["rows"]}
    row = rows.pop(f"stream {other}")
    assert row["found"] == "its topic has retention.ms=5000, but -1 was requested"
    assert (row["state"], bool(row["to_do"])) == ("warn", True)
    row = rows.pop(f"stream {stream}")
    assert row["state"] == "warn"
    assert row["found"] == "rejected records in its journal: 2 bad_header"
    assert row["to_do"]
    kinds = {what.partition(" ")[0] for what in rows}
    assert kinds >= {"brokers", "broker", "disk", "topic", "controllers", "streams", "clocks"}
    assert rows["controllers"]["state"] == rows["clocks"]["state"] == "ok"
    assert all(row["to_do"] for row in rows.values() if row["state"] != "ok")
    alone = shell.json("doctor", "--cluster-prefix", "nothing-here", code=1)["rows"]
    assert {row["state"] for row in alone if "nothing-here" in row["what"]} == {"bad"}


def test_a_broker_that_does_not_answer_is_named_soon(cluster: Cluster) -> None:
    shell = Shell(cluster)
    for command in (("doctor",), ("txn", "list"), ("read", "s/x"), ("group", "list")):
        begun = time.monotonic()
        done = shell.run(
            *command, "-b", "localhost:1,no.such.host:9", code=1 if command == ("doctor",) else 3
        )
        assert time.monotonic() - begun < 15  # the timeout is twice that
        assert "no broker answers at localhost:1: Connection refused" in " ".join(
            (done.stdout + done.stderr).split()
        )


def test_a_transaction_rolled_in_is_listed_and_drawn(client: anabranch.Client, unique: str) -> None:
    stream = f"{unique}/flights"
    client.create_stream(stream, segments=1)
    old = client.begin(unique)
    old.write(stream, b"old", b"k")
    old.flush()  # it is in the journal, by the layout of now
    client.scale(stream, segments=2)
    with client.begin(unique) as young:
        young.write(stream, b"young", b"k")
        young.commit()
    old.commit()
    past = read_history(client.reader_ports(), stream, last=200)
    assert [(e.stream_epoch, e.reference_epoch, len(e.segments)) for e in past.epochs] == [
        (0, 0, 1),
        (1, 1, 2),
        (2, 0, 1),
        (3, 1, 2),
    ]
    assert [c.stream_epoch for c in past.commits] == [1, 2]
    assert all(isinstance(c, CommitRecord) for c in past.commits)
    recent = read_history(client.reader_ports(), stream, last=2)
    assert (recent.epochs, recent.commits) == (past.epochs[2:], past.commits[1:])
    picture = ET.fromstring(draw(past.epochs, past.commits, stream))
    assert [e.get("class") for e in picture.iter()].count("rolled-in") == 1
