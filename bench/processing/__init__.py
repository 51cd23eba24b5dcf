"""Processing, exactly once: each peer is a process of its own, on one broker, one after the other.

*map*: parse the JSON ``{"n": …, "pad": …}`` of 100 bytes, add one to n, write it. *count*: the same, but n becomes
the count of the event's key, of 10,000, kept in a store with a changelog: an output for each event. Two partitions,
filled before. Outputs/s from the first quarter to the last commit but one, readable when read_committed, and
the worker's CPU for each. A JVM gets quicker for a million events: ``quick`` shows a cold one, and
of each peer one setting.

*window*: the count of a key's day, for each event. *session*: that of a key's session; none closes. *table*: each
event with the row of its key in a second input, merged. *join*: pairs of two inputs within an hour, one for each
key, of which one side is read before: two inputs for each output. These four are not measured for faust-streaming:
it has windows alone, in memory.

*latency*: map, 200 inputs/s, from an input's answer to its output readable. *restore*: rows of a key and a count,
from the changelog into an empty folder. *killed*: SIGKILL of one of two workers, to the first output of its task.

*many*: 64 of our processors, 16 in a process, against one. *scaling*: the longest pause between two outputs while
our input is scaled. *batch*: map with Arrow batches, the JSON cut by a regular expression and put together again.

Not equal: our input is committed in transactions of 10,000, each of *latency* by itself, and another process, the
controller, decides our commits. faust-streaming is at least once, with its table in memory and a commit every
2.8 s, its default. Kafka Streams runs in a JVM with Jackson, the peers in Python with orjson, ours with msgspec;
the sessions have six seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from bench.processing import measures, peers
from bench.processing.peers import FAUST_STREAMING, KAFKA_STREAMS, OURS, QUIX_STREAMS
from bench.setting import Place

QUIX_DEFAULT_MS, FAUST_DEFAULT_MS = 5_000, 2_800
# Peer, threads, milliseconds between commits, and the share of the events: slow ones get fewer.
_Setting = tuple[peers.Peer, int, int, float]
RATES: tuple[_Setting, ...] = (
    (OURS, 1, 100, 1.0),
    (KAFKA_STREAMS, 1, 100, 1.0),
    (KAFKA_STREAMS, 2, 100, 1.0),
    (QUIX_STREAMS, 1, 100, 1.0),
    (QUIX_STREAMS, 1, QUIX_DEFAULT_MS, 2.0),
    (FAUST_STREAMING, 1, FAUST_DEFAULT_MS, 0.07),
)
WORKS = ("map", "count", "window", "session", "table", "join", "batch")
PEERS: tuple[peers.Peer, ...] = (OURS, KAFKA_STREAMS, QUIX_STREAMS, FAUST_STREAMING)


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Each figure once: rates of all; latency, restore and failover of ours and of Kafka Streams."""
    events, rows, inputs = (300_000, 200_000, 1_000) if quick else (1_000_000, 1_000_000, 6_000)
    first = {one[0].name: one for one in reversed(RATES)}
    settings = tuple(first[peer.name] for peer in PEERS) if quick else RATES
    rates: list[dict[str, Any]] = [
        {"peer": peer.name, "work": work, "threads": threads, "commit_ms": commit_ms}
        | measures.rate(
            peer, place, work, int(share * events), threads=threads, commit_ms=commit_ms
        )
        for work in WORKS
        for peer, threads, commit_ms, share in _able(settings, work)
    ]
    keepers = (OURS, KAFKA_STREAMS)
    return {
        "peers": {peer.name: peer.about() for peer in PEERS},
        "rates": rates,
        "latency": [
            {"peer": peer.name, "commit_ms": commit_ms}
            | measures.latency(peer, place, inputs, commit_ms=commit_ms)
            for peer, commit_ms in ((OURS, 0), *((keeper, 100) for keeper in keepers))
        ],
        "restore": [
            {"peer": peer.name, "folder": again} | measures.restore(peer, place, rows, again=again)
            for peer, again in ((OURS, False), (OURS, True), (KAFKA_STREAMS, False))
        ],
        "killed": [
            {"peer": peer.name} | measures.killed(peer, place, rows, standby=standby)
            for peer in keepers
            for standby in ((False,) if quick else (False, True))
        ],
        "many": [measures.many(OURS, place, count, 5.0 if quick else 20.0) for count in (1, 64)],
        "scaling": measures.scaling(OURS, place),
    }


def _able(settings: Sequence[_Setting], work: str) -> Sequence[_Setting]:
    """The settings of the peers that have such a work."""
    if work == "batch":
        return settings[:1]
    words = work not in ("map", "count")
    return [one for one in settings if not words or one[0] is not FAUST_STREAMING]


def run_many(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """*many* alone, in turn: commits of one processor and of 64."""
    turns, seconds = (1, 5.0) if quick else (5, 20.0)
    each = [[measures.many(OURS, place, n, seconds) for n in (1, 64)] for _ in range(turns)]
    middle = [
        {name: statistics.median(one[name] for one in found) for name in found[0]}
        for found in zip(*each, strict=True)
    ]
    return {"turns": each, "many": middle}


def table_of_many(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows for people."""
    return ["what", "peer", "figure", "beside"], list(_rows_of_many(result["many"]))


def _rows_of_many(many: list[dict[str, float]]) -> Iterator[list[str]]:
    for one in many:
        what = f"processors: {one['processors']}, a commit each 100 ms"
        times = f"p50 / p99 {one['p50_ms']} / {one['p99_ms']} ms"
        cpu = "CPU of a commit: workers, controller, broker"
        used = ", ".join(
            f"{one[part]:.0f}" for part in ("workers_us", "controller_us", "broker_us")
        )
        yield [what, OURS.name, f"{one['per_s']} commits/s", f"{times}; {cpu} {used} µs"]


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
    for one in result["latency"]:
        what = f"latency, a commit each {one['commit_ms']} ms, p50 / p99"
        rows.append([what, one["peer"], f"{one['p50_ms']} / {one['p99_ms']} ms", ""])
    for one in result["restore"]:
        what = f"restore of {one['rows']:,} rows, {'its folder' if one['folder'] else 'the log'}"
        rows.append([what, one["peer"], f"{one['per_s']:,}/s", f"{one['s']} s"])
    for one in result["killed"]:
        how = "with" if one["standby"] else "without"
        what = f"killed, {one['rows']:,} rows, {how} standby"
        rows.append([what, one["peer"], f"{one['s']} s", ""])
    rows += _rows_of_many(result["many"])
    scaling = result["scaling"]
    pause = f"{scaling['scaling_ms']} ms"
    rows.append(["longest pause, scaling", OURS.name, pause, f"at rest {scaling['rest_ms']} ms"])
    rows += [["ratio: " + what, "ours / peer", figure, ""] for what, figure in ratios(result)]
    for name, about in result["peers"].items():
        rows.append(["versions and settings", name, "; ".join(about.values()), ""])
    return ["what", "peer", "figure", "beside"], rows


def ratios(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Ours to one thread of Kafka Streams with the same commits; map for batches, which it has not."""
    of = {(one["work"], one["peer"]): one for one in reversed(result["rates"])}
    for work in WORKS:
        ours = of[work, OURS.name]
        theirs = next(
            one
            for one in result["rates"]
            if (one["peer"], one["work"]) == (KAFKA_STREAMS.name, work.replace("batch", "map"))
        )
        for what in ("per_s", "cpu_us"):
            yield f"{work}, {what}", f"{ours[what] / theirs[what]:.2f} ×"
    for what, figure in (("latency", "p50_ms"), ("latency", "p99_ms"), ("restore", "per_s")):
        found = result[what][1 if what == "latency" else 0], result[what][-1]
        yield f"{what}, {figure}", f"{found[0][figure] / found[1][figure]:.2f} ×"
    half = len(result["killed"]) // 2
    for ours, theirs in zip(result["killed"][:half], result["killed"][half:], strict=True):
        how = "with" if ours["standby"] else "without"
        yield f"killed, {how} standby", f"{ours['s'] / theirs['s']:.2f} ×"


__all__ = ["measures", "peers", "run", "run_many", "table", "table_of_many"]
