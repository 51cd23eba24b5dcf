"""Transactions through the client, on a real broker with a real controller."""

# ruff: noqa: PT012 (what a `with` of ours does at its end is what is tested)

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import anabranch
from anabranch import errors
from tests.behaviour.steps import values
from tests.cluster import Cluster
from tests.waiting import wait_until

pytestmark = pytest.mark.broker
OVER_ASYNCIO = pytest.mark.long


@pytest.fixture
def stream(client: anabranch.Client, scope: str) -> str:
    name = f"{scope}/events"
    client.create_stream(name, segments=3)
    return name


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in another process."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[2],
    )


# -- the shapes of transactions -------------------------------------------------------------------------


def test_small_and_in_one_command(client: anabranch.Client, scope: str, stream: str) -> None:
    with client.begin(scope) as txn:
        txn.write(stream, b"1", key=b"a", headers={"h": b"x"}, timestamp=1234)
        txn.write(stream, b"2")
        result = txn.commit()
    assert result.counts == anabranch.Counts(2, 0, 0)
    events = {event.value: event for event in client.snapshot(stream).read(stream)}
    one = events[b"1"]
    assert (one.key, one.headers, one.timestamp) == (b"a", [("h", b"x")], 1234)
    assert (one.txn_id, one.commit_timestamp) == (result.txn_id, result.commit_timestamp)
    assert abs(events[b"2"].timestamp - time.time() * 1000) < 60_000
    assert client.state(result.txn_id).state == "COMMITTED"


def test_big_and_through_the_journal(client: anabranch.Client, scope: str, stream: str) -> None:
    n = 20_000
    with client.begin(scope) as txn:
        for i in range(n):
            txn.write(stream, b"%d" % i, key=b"k%d" % (i % 100))
        assert values(client, stream) == {}
        result = txn.commit()
    assert result.counts == anabranch.Counts(n, 0, 0)
    events = list(client.snapshot(stream).read(stream))
    assert len(events) == n
    assert {event.txn_id for event in events} == {result.txn_id}
    by_key: dict[bytes | None, list[int]] = {}
    for event in events:
        by_key.setdefault(event.key, []).append(int(event.value or b""))
    assert all(numbers == sorted(numbers) for numbers in by_key.values())


def test_begun_here_written_there_committed_elsewhere(
    cluster: Cluster, client: anabranch.Client, scope: str, stream: str
) -> None:
    begin = """
import sys, anabranch
with anabranch.connect(sys.argv[1]) as client:
    txn = client.begin(sys.argv[2])
    txn.write(sys.argv[3], b"begin", key=b"k")
    token = txn.token("all")
    with client.join(token) as writer:
        writer.write(sys.argv[3], b"joined at once", key=b"k")
    print(token.hex())
"""
    begun = run(begin, cluster.bootstrap, scope, stream)
    assert begun.returncode == 0, begun.stderr
    token = begun.stdout.strip()
    write = """
import sys, anabranch
with anabranch.connect(sys.argv[1]) as client, client.join(bytes.fromhex(sys.argv[2])) as writer:
    for i in range(1000):
        writer.write(sys.argv[3], b"%s/%d" % (sys.argv[4].encode(), i), key=b"k%d" % i)
print(writer.finish().to_bytes().hex())
"""
    with ThreadPoolExecutor(3) as pool:
        done = list(
            pool.map(lambda who: run(write, cluster.bootstrap, token, stream, who), ("x", "y"))
        )
    receipts = []
    for process in done:
        assert process.returncode == 0, process.stderr
        receipts.append(bytes.fromhex(process.stdout.strip()))
    result = client.commit(bytes.fromhex(token), receipts=receipts)
    # What the beginning process wrote itself is not named; its writer registered, so it is left out.
    assert result.counts.committed == 2000
    assert result.counts.left_out in (1, 2)  # its own first write may not have left it
    assert len(values(client, stream)) == 2000


def test_nothing_of_an_aborted_transaction_is_seen(
    client: anabranch.Client, scope: str, stream: str
) -> None:
    with client.begin(scope) as left:
        token = left.token()
        left.write(stream, b"left", key=b"k")
    assert client.state(token).state == "ABORTED"
    with pytest.raises(ZeroDivisionError), client.begin(scope) as failed:
        failed.token()
        failed.write(stream, b"failed", key=b"k")
        raise ZeroDivisionError
    with client.begin(scope) as txn:
        txn.write(stream, b"committed", key=b"k")
        txn.commit()
    assert values(client, stream) == {b"committed": 1}


def test_threads_commit_concurrently_with_one_client(
    client: anabranch.Client, scope: str, stream: str
) -> None:
    def commit_some(who: int) -> None:
        for i in range(25):
            with client.begin(scope) as txn:
                txn.write(stream, b"%d/%d" % (who, i), key=b"%d" % who)
                txn.commit()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(commit_some, range(8)))
    found = values(client, stream)
    assert len(found) == 200
    assert set(found.values()) == {1}


@pytest.mark.soak
def test_one_handle_written_by_many_threads(
    client: anabranch.Client, scope: str, stream: str
) -> None:
    with client.begin(scope) as txn:

        def write_some(who: int) -> None:
            for i in range(3000):
                txn.write(stream, b"%d/%d" % (who, i) * 10, key=b"%d" % i)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write_some, range(4)))
        assert txn.commit().counts.committed == 12_000


def test_several_streams_appear_at_once(client: anabranch.Client, scope: str, stream: str) -> None:
    other = f"{scope}/other"
    client.create_stream(other, segments=1)
    with client.begin(scope) as txn:
        txn.write(stream, b"1", key=b"k")
        txn.token()
        txn.write(other, b"2", key=b"k")
        result = txn.commit()
    found = list(client.read([stream, other], timeout=1.0))
    assert {(e.stream, e.value) for e in found} == {(stream, b"1"), (other, b"2")}
    assert {e.commit_timestamp for e in found} == {result.commit_timestamp}


# -- refusals and limits --------------------------------------------------------------------------------


def test_events_up_to_the_topics_limit(client: anabranch.Client, scope: str, unique: str) -> None:
    small = f"{scope}/small"
    client.create_stream(small, settings={"max.message.bytes": 20_000})
    with client.begin(scope) as txn:
        txn.token()
        txn.write(small, b"x" * 19_000, key=b"k")
        with pytest.raises(errors.EventTooLarge):
            txn.write(small, b"x" * 20_000, key=b"k")
        for _ in range(50):
            txn.write(small, b"y" * 3_000, key=b"k")
        assert txn.commit().counts.committed == 51


# -- life and death -------------------------------------------------------------------------------------


def test_heartbeats_keep_it_alive_and_silence_does_not(
    cluster: Cluster, client: anabranch.Client, scope: str, stream: str
) -> None:
    silent = anabranch.connect(cluster.bootstrap)
    forgotten = silent.begin(scope, keepalive=1.5).token()
    silent.close()
    with client.begin(scope, keepalive=4) as txn:  # so that a stop of the machine is no silence
        token = txn.token()
        txn.write(stream, b"v", key=b"k")
        time.sleep(5.0)
        wait_until(lambda: "stale" in client.state(forgotten).reason)
        assert client.state(token).state == "OPEN"
        assert txn.commit().counts.committed == 1


def test_an_abort_elsewhere_is_noticed(client: anabranch.Client, scope: str, stream: str) -> None:
    with client.begin(scope, keepalive=6) as txn:
        client.abort(txn.token("abort"), "by the operator")
        until = time.monotonic() + 20
        with pytest.raises(errors.TransactionAborted, match="by the operator"):
            while time.monotonic() < until:
                txn.write(stream, b"v", key=b"k")
                time.sleep(0.05)


def test_open_and_finished_transactions_are_listed(
    client: anabranch.Client, scope: str, stream: str
) -> None:
    with client.begin(scope) as txn:
        token = txn.token()
        (info,) = client.transactions(scope)
        assert (info.txn_id, info.state, info.keepalive) == (txn.txn_id, "OPEN", 30.0)
        txn.abort()
    assert client.transactions(scope) == []
    assert [t.txn_id for t in client.transactions(scope, finished=True)] == [token[1:17]]
    (description,) = client.streams(scope)
    assert (description.stream, len(description.segments)) == (stream, 3)
    assert stream in [d.stream for d in client.streams()]
    assert client.describe(stream).stream_epoch == 0


# -- controllers that don't answer ----------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.unsecured
def test_no_controller_at_all_is_not_ready(cluster: Cluster, unique: str) -> None:
    with (
        anabranch.connect(cluster.bootstrap, prefix=f"none-{unique}", timeout=3) as client,
        pytest.raises(
            errors.NotReady, match=r"`anabranch controller`, or .* of prefix (\S+, )*anabranch\b"
        ),
    ):
        client.streams()


# -- forks ----------------------------------------------------------------------------------------------

FORK = """
import os, sys, anabranch
from anabranch import errors
client = anabranch.connect(sys.argv[1])
stream = sys.argv[2]
scope = stream.partition("/")[0]
txn = client.begin(scope)
txn.token()
txn.write(stream, b"parent", key=b"k")
reader = client.read(stream, group=sys.argv[3], timeout=5)
pid = os.fork()
if pid == 0:
    calls = [
        lambda: client.streams(), lambda: txn.write(stream, b"child"), lambda: txn.commit(),
        lambda: client.begin(scope), lambda: client.read(stream), lambda: client.changes(stream),
        lambda: client.close(),
    ]
    for call in calls:
        try:
            call()
        except errors.NotForkSafe:
            continue
        os._exit(1)
    with anabranch.connect(sys.argv[1]) as own, own.begin(scope) as mine:
        mine.write(stream, b"child", key=b"k")
        mine.commit()
    del txn, client, reader
    sys.exit(0)  # through all finalisers
_, status = os.waitpid(pid, 0)
assert status == 0, status
txn.commit()
assert {next(reader).value, next(reader).value} == {b"parent", b"child"}
client.close()
"""


def test_a_forked_child_gets_an_error_and_ends(cluster: Cluster, stream: str, unique: str) -> None:
    done = run(FORK, cluster.bootstrap, stream, f"g{unique}")
    assert done.returncode == 0, done.stderr


# A program that gevent has patched; it commits an event and prints how many were committed, or the error.
PATCHED = """
import sys
from gevent import monkey
monkey.patch_all(thread=sys.argv[1] == "threads")
import anabranch
from anabranch.errors import NotSupported
try:
    with anabranch.connect(sys.argv[2]) as client:
        client.create_stream(sys.argv[3])
        with client.begin(sys.argv[3].partition("/")[0]) as txn:
            txn.write(sys.argv[3], b"1", key=b"k")
            print(txn.commit().counts.committed)
except NotSupported as error:
    print("NotSupported", "patch_all(thread=False)" in str(error))
"""


@pytest.mark.unsecured
@pytest.mark.parametrize(
    ("what", "says"),
    [("threads", "NotSupported True"), pytest.param("io alone", "1", marks=pytest.mark.soak)],
)
def test_a_program_that_gevent_has_patched(what: str, says: str, cluster: Cluster) -> None:
    stream = f"gevent/{what.replace(' ', '-')}"
    command = [sys.executable, "-W", "ignore", "-c", PATCHED, what, cluster.bootstrap, stream]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr[-2000:]) == (says, "")
