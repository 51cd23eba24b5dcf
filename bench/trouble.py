"""One-shots on healthy streams while others are in trouble, on three brokers (goal: p99 within twice that of none).

Four commits are in flight, to ten healthy streams in turn. Another process commits a little to five more
streams, so that the controller keeps meeting the trouble: 0, 1 or 5 of these are in trouble. Each row has three
embedded brokers and a controller of its own. The load begins, then the trouble; the grace after it is the *onset*,
whose longest commit is shown; then the measurement begins.

- *leaderless*: streams of one replica, whose broker is killed
- *min ISR*: streams of two replicas, one of which is killed
- *frozen*: streams of one replica, whose broker is stopped by a signal; it is fenced within the onset
- *refusing*: an admin lowers ``max.message.bytes`` of the journals so that markers fit, and participant ops do not
- *deleted*: the streams' topics are deleted by hand; ``--lost-after`` is long, so they wait and are not given up

A row is compared with one without streams in trouble, with the same broker fault: *killed*, *frozen*, or *nothing*.
That broker leads neither the commands nor the status topic, but it may coordinate the controllers' group or
transactions: onsets of one kind differ by that. A stream is in trouble if any of its three topics is. Each is asked
for its state in the end, and the row says so if one of them was ACTIVE all the time.
"""

from __future__ import annotations

import logging
import multiprocessing as mp
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.synchronize import Event as Signal
from pathlib import Path
from typing import Any

from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

import anabranch
from anabranch.core.stream_settings import MAX_MESSAGE
from anabranch.errors import AnabranchError
from anabranch.infra.cluster import EmbeddedCluster
from anabranch.topics import names
from bench.setting import controller, loaded, one_shots, percentile, write_events

BROKERS, HEALTHY, BESIDE, IN_FLIGHT = 3, 10, 5, 4
COUNTS, QUICK_COUNTS = (1, 5), (5,)
TIMES, QUICK_TIMES = (5.0, 25.0, 20.0), (3.0, 25.0, 5.0)  # seconds: before, grace, measured
TRICKLE_S = 0.25  # between two commits to a stream in the second process
SHOWS_S = 15.0  # how long a stream may seem healthy: it is tried again every ten seconds
TOPICS = (names.stream_topic, names.journal_topic, names.history_topic)
QUIET = logging.getLogger("anabranch.kafka")  # it logs each broker that is gone
LOST_AFTER = ("--lost-after", "3600")
TRIES = 40
REFUSES = "100"  # bytes: less than a participant op, more than a marker, so that ids can end
SOLO = {"replication.factor": "1", "min.insync.replicas": "1"}
PAIR = {"replication.factor": "2", "min.insync.replicas": "2"}
KINDS: dict[str, dict[str, dict[str, str]]] = {  # the broker's fault -> kind -> settings
    "killed": {"leaderless": SOLO, "min ISR": PAIR},
    "frozen": {"frozen": SOLO},
    "nothing": {"refusing": {}, "deleted": {}},
}
Pending = Mapping[str, tuple[bytes, list[bytes]]]  # stream -> token, receipts


def run(*, quick: bool = False) -> dict[str, Any]:
    """Rows, each after its row without trouble."""
    times = QUICK_TIMES if quick else TIMES
    QUIET.setLevel(logging.CRITICAL)
    rows = []
    for done, kinds in KINDS.items():
        base = _row(done, "none", 0, {}, times)
        rows.append(base)
        for kind, settings in kinds.items():
            for count in QUICK_COUNTS if quick else COUNTS:
                row = _row(done, kind, count, settings, times)
                rows.append(row | {"p99_of_none": row["p99_ms"] / base["p99_ms"]})
    return {
        "seconds_each": times[2],
        "grace_s": times[1],
        "rows": rows,
        "goal_p99_of_none_at_most": 2.0,
    }


def _row(
    done: str, kind: str, count: int, settings: Mapping[str, str], times: Sequence[float]
) -> dict[str, Any]:
    """Run one row with its own brokers and controller, and so many streams in trouble."""
    warm_s, grace_s, seconds = times
    with ExitStack() as stack:
        cluster = stack.enter_context(EmbeddedCluster(BROKERS))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="anabranch-bench-"))
        stack.enter_context(controller(cluster.bootstrap, Path(folder), LOST_AFTER))
        client = stack.enter_context(anabranch.connect(cluster.bootstrap, timeout=60))
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap, "log_level": 2})
        node = _spare(admin)
        healthy = [f"bench/healthy{i}" for i in range(HEALTHY + BESIDE - count)]
        for stream in healthy:
            client.create_stream(stream)
        bad = _on_node(client, admin, node if settings else 0, count, settings)
        pending: dict[str, tuple[bytes, list[bytes]]] = {}
        if kind == "refusing":
            for stream in bad:
                token, receipts = write_events(client, stream, 10, [b"v" * 100])
                pending[stream] = (token, [receipt.to_bytes() for receipt in receipts])
        load = stack.enter_context(loaded(cluster.bootstrap, healthy[:HEALTHY], IN_FLIGHT))
        stack.enter_context(_trickling(cluster.bootstrap, healthy[HEALTHY:] + bad, pending))
        time.sleep(warm_s)
        began = time.monotonic()
        if done == "killed":
            cluster.node(node).kill()
        elif done == "frozen":
            cluster.node(node).pause()
            stack.callback(cluster.node(node).resume)  # so that the controller hands over sooner
        elif kind != "none":
            _spoil(admin, kind, bad)
        time.sleep(grace_s)
        ended = (steady_from := time.monotonic()) + seconds
        time.sleep(seconds)
        states = {stream: _trouble(client, stream) for stream in bad}
    every = load.calls + load.failed  # all have ended, also a commit that hung
    onset = [took for start, took in every if start < steady_from and start + took > began]
    steady = sorted(took for start, took in every if start < ended and start + took > steady_from)
    return {
        "broker": done,
        "kind": kind,
        "in_trouble": count,
        "per_s": sum(steady_from < start + took <= ended for start, took in load.calls) / seconds,
        "p50_ms": percentile(steady, 0.5) * 1000,
        "p99_ms": percentile(steady, 0.99) * 1000,
        "max_ms": steady[-1] * 1000,
        "onset_longest_s": max(onset),
        "failed": len(load.failed),
        "troubles": states,
    }


# -- the trouble ---------------------------------------------------------------------------------------


def _spare(admin: AdminClient) -> int:
    """A node that leads neither the commands nor the status topic."""
    topics = admin.list_topics(timeout=30).topics
    leads = {
        topics[name()].partitions[0].leader for name in (names.commands_topic, names.status_topic)
    }
    return max(set(range(1, BROKERS + 1)) - leads)


def _on_node(
    client: anabranch.Client, admin: AdminClient, node: int, count: int, settings: Mapping[str, str]
) -> list[str]:
    """New streams, each with a replica of any of its topics on the node (0: wherever)."""
    found: list[str] = []
    for i in range(TRIES):
        if len(found) == count:
            break
        stream = f"bench/beside{i}"
        client.create_stream(stream, settings=settings)
        topics = admin.list_topics(timeout=30).topics
        mine = [name(stream) for name in TOPICS]
        nodes = {replica for name in mine for replica in topics[name].partitions[0].replicas}
        if not node or node in nodes:
            found.append(stream)
    if len(found) < count:
        raise RuntimeError(f"of {TRIES} streams only {len(found)} have a topic on node {node}")
    return found


def _spoil(admin: AdminClient, kind: str, streams: Sequence[str]) -> None:
    """Make an admin's mistake of this kind."""
    futures: list[Any] = []
    if kind == "deleted":
        futures += admin.delete_topics(list(map(names.stream_topic, streams))).values()
    else:
        lower = [ConfigEntry(MAX_MESSAGE, REFUSES, incremental_operation=AlterConfigOpType.SET)]
        topic, journals = ConfigResource.Type.TOPIC, map(names.journal_topic, streams)
        changes = [ConfigResource(topic, name, incremental_configs=lower) for name in journals]
        futures += admin.incremental_alter_configs(changes).values()
    for future in futures:
        future.result(30)


def _trouble(client: anabranch.Client, stream: str) -> str:
    """A stream's trouble, or an empty text. A stream that is tried again shows none for a moment."""
    until = time.monotonic() + SHOWS_S
    while time.monotonic() < until:
        try:
            found = client.describe(stream, timeout=SHOWS_S)
        except AnabranchError as error:
            return str(error)
        if found.state != "ACTIVE":
            return f"{found.state}: {found.trouble}"
        time.sleep(0.1)
    return ""


# -- the load ------------------------------------------------------------------------------------------


@contextmanager
def _trickling(bootstrap: str, streams: Sequence[str], pending: Pending) -> Iterator[None]:
    """Another process commits to these streams now and then, whether that fails or not."""
    ctx = mp.get_context("spawn")
    stop = ctx.Event()
    process = ctx.Process(target=_trickle, args=(bootstrap, streams, pending, stop), daemon=True)
    process.start()
    try:
        yield
    finally:
        stop.set()
        process.join(30)


def _trickle(bootstrap: str, streams: Sequence[str], pending: Pending, stop: Signal) -> None:
    QUIET.setLevel(logging.CRITICAL)
    spoilt = time.monotonic() + TIMES[0] + 3.0  # about: an earlier commit would meet no trouble
    with anabranch.connect(bootstrap, timeout=2) as client:

        def work(stream: str) -> None:
            commit = one_shots(client, [stream], timeout=1.0)
            while not stop.wait(TRICKLE_S):
                with suppress(AnabranchError):
                    commit()
                if stream in pending and time.monotonic() > spoilt:
                    token, receipts = pending[stream]
                    with suppress(AnabranchError):
                        client.commit(token, receipts=receipts, timeout=1.0)

        threads = [threading.Thread(target=work, args=(stream,)) for stream in streams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    head = ["broker", "kind", "in trouble", "commits/s", "p50 ms", "p99 ms", "max ms"]
    head += ["p99 of none", "onset s"]
    rows = [
        [
            row["broker"],
            row["kind"],
            f"{sum(map(bool, row['troubles'].values()))} of {row['in_trouble']}",
            f"{row['per_s']:,.0f}",
            *(f"{row[key]:.1f}" for key in ("p50_ms", "p99_ms", "max_ms")),
            f"{row['p99_of_none']:.2f} ×" if "p99_of_none" in row else "–",
            f"{row['onset_longest_s']:.2f}",
        ]
        for row in result["rows"]
    ]
    return head, rows
