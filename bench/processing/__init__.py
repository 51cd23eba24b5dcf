"""Processing, exactly once: each peer is a process of its own, on one broker, one after the other.

*map*: parse the JSON ``{"n": …, "pad": …}`` of 100 bytes, add one to n, write it. *count*: the same, but n becomes
the count of the event's key, of 10,000, kept in a store with a changelog: an output for each event. Two partitions,
filled before. Outputs/s from the first quarter to the last commit but one, readable when read_committed, and
the worker's CPU for each. A JVM gets quicker for a million events: ``quick`` shows a cold one.

*latency*: map, 200 inputs/s, from an input's answer to its output readable. *restore*: rows of a key and a count,
from the changelog into an empty folder. *killed*: SIGKILL of one of two workers, to the first output of its task.

Not equal: faust-streaming is at least once, with its table in memory and a commit every 2.8 s, its default. Kafka
Streams runs in a JVM with Jackson, the others in Python with orjson; its session has six seconds.
"""

from __future__ import annotations

from typing import Any

from bench.processing import measures, peers
from bench.processing.peers import FAUST_STREAMING, KAFKA_STREAMS, QUIX_STREAMS
from bench.setting import Place

QUIX_DEFAULT_MS, FAUST_DEFAULT_MS = 5_000, 2_800
# Peer, threads, milliseconds between commits, and the share of the events: slow ones get fewer.
RATES: tuple[tuple[peers.Peer, int, int, float], ...] = (
    (KAFKA_STREAMS, 1, 100, 1.0),
    (KAFKA_STREAMS, 2, 100, 1.0),
    (QUIX_STREAMS, 1, 100, 1.0),
    (QUIX_STREAMS, 1, QUIX_DEFAULT_MS, 2.0),
    (FAUST_STREAMING, 1, FAUST_DEFAULT_MS, 0.07),
)


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Each figure once: rates of all peers; latency, restore and failover of Kafka Streams."""
    events, rows, inputs = (300_000, 200_000, 1_000) if quick else (1_000_000, 1_000_000, 6_000)
    rates: list[dict[str, Any]] = [
        {"peer": peer.name, "work": work, "threads": threads, "commit_ms": commit_ms}
        | measures.rate(
            peer, place, work, int(share * events), threads=threads, commit_ms=commit_ms
        )
        for work in ("map", "count")
        for peer, threads, commit_ms, share in RATES
    ]
    return {
        "peers": {peer.name: peer.about() for peer, *_ in RATES},
        "rates": rates,
        "latency": measures.latency(KAFKA_STREAMS, place, inputs),
        "restore": measures.restore(KAFKA_STREAMS, place, rows),
        "killed": [
            measures.killed(KAFKA_STREAMS, place, rows, standby=standby)
            for standby in (False, True)
        ],
    }


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows for people."""
    rows = [
        [
            f"{one['work']}, a commit each {one['commit_ms']} ms, threads: {one['threads']}",
            one["peer"],
            f"{one['per_s']:,}/s",
            f"CPU {one['cpu_us']} µs/event",
        ]
        for one in result["rates"]
    ]
    name = KAFKA_STREAMS.name
    latency, restore = result["latency"], result["restore"]
    rows.append(["latency, p50 / p99", name, f"{latency['p50_ms']} / {latency['p99_ms']} ms", ""])
    rows.append([f"restore of {restore['rows']:,} rows", name, f"{restore['per_s']:,}/s", ""])
    for one in result["killed"]:
        how = "with" if one["standby"] else "without"
        rows.append([f"killed, {one['rows']:,} rows, {how} standby", name, f"{one['s']} s", ""])
    for name, about in result["peers"].items():
        rows.append(["versions and settings", name, "; ".join(about.values()), ""])
    return ["what", "peer", "figure", "beside"], rows


__all__ = ["measures", "peers", "run", "table"]
