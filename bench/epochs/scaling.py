"""The call that scales, with 0, 100 and 10,000 open transactions; and the cost of collated rolling commits.

- *scale*: milliseconds from the call to its answer, on a stream in whose reference epoch so many transactions are
  registered. From two segments to three and back, on existing partitions; and to more than ever before, for which
  the topics of stream and journal grow first. Goal: flat.
- *collate*: k transactions of one old reference epoch, committed at once by k threads just after another one of
  that epoch, so that they wait together for the stream's next rolling commit. Goal: 2 duplicate epochs for all of
  them, not 2 k. Then the same without a commit before: the first of them rolls at once, the others together, so up
  to 4.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anabranch
from bench.epochs.rolling import PRAVEGA
from bench.setting import Place, begin_and_touch, noise_values, percentile, write_events

OPEN = (0, 100, 10_000)
QUICK_OPEN = (0, 100, 1_000)
AT_ONCE = 64
COLLATED = (1, 2, 8, 32)
COLLATED_EVENTS = 100
PAUSE_S = 0.5  # well above the controller's --collate


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Run both parts."""
    with anabranch.connect(place.bootstrap) as client:
        collated = [_collate(place, client, k) for k in COLLATED]
        scaled = _scale(place, client, QUICK_OPEN if quick else OPEN, 3 if quick else 8)
    return {
        "scale": scaled,
        "collate": collated,
        "collated_cost_two_epochs": all(row["epochs"] == 2 for row in collated),
        "elsewhere": {
            "what": "Pravega standalone, its scale call; two cores, not run here, ms",
            "ms": list(PRAVEGA["scale"]),
        },
    }


# -- the call that scales ------------------------------------------------------------------------------


def _scale(
    place: Place, client: anabranch.Client, counts: tuple[int, ...], rounds: int
) -> list[dict[str, Any]]:
    stream = place.new_stream(segments=2)
    for segments in (3, 2, 3, 2):  # the first one adds the third partition
        _timed(client, stream, segments)
    rows = []
    opened = 0
    for count in counts:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda _: begin_and_touch(client, stream), range(count - opened)))
        opened = count
        there = [_timed(client, stream, segments) for _ in range(rounds) for segments in (3, 2)]
        grown = []
        for _ in range(max(2, rounds // 2)):
            grown.append(_timed(client, stream, client.describe(stream).partitions + 1))
            _timed(client, stream, 2)
        rows.append(
            {
                "open": count,
                "listed": len(client.transactions(limit=10_000)),
                "ms": {"there": _spread(there), "grown": _spread(grown)},
            }
        )
    return rows


def _timed(client: anabranch.Client, stream: str, segments: int) -> float:
    start = time.perf_counter()
    client.scale(stream, segments)
    return (time.perf_counter() - start) * 1000


def _spread(some: list[float]) -> dict[str, Any]:
    return {"p50": statistics.median(some), "p90": percentile(sorted(some), 0.9), "all": some}


# -- collating -----------------------------------------------------------------------------------------


def _collate(place: Place, client: anabranch.Client, k: int) -> dict[str, Any]:
    stream = place.new_stream(segments=2)
    values = noise_values(100, 100)
    prepared = [write_events(client, stream, COLLATED_EVENTS, values) for _ in range(2 * k + 1)]
    client.scale(stream, 3)
    time.sleep(PAUSE_S)
    cold, warm, first = prepared[:k], prepared[k : 2 * k], prepared[-1]
    with ThreadPoolExecutor(k) as pool:
        list(pool.map(time.sleep, [0.01] * k))  # its threads are started
        from_rest, _ = _together(client, pool, stream, cold)
        time.sleep(PAUSE_S)
        client.commit(first[0], receipts=first[1])
        epochs, seconds = _together(client, pool, stream, warm)
    return {
        "transactions": k,
        "epochs": epochs,
        "epochs_without_a_commit_before": from_rest,
        "ms_of_all": seconds * 1000,
    }


def _together(
    client: anabranch.Client,
    pool: ThreadPoolExecutor,
    stream: str,
    prepared: list[tuple[bytes, list[anabranch.Receipt]]],
) -> tuple[int, float]:
    """Epochs opened for them, and seconds until all had their answers."""
    before = client.describe(stream).stream_epoch
    start = time.perf_counter()
    list(pool.map(lambda each: client.commit(each[0], receipts=each[1]), prepared))
    seconds = time.perf_counter() - start
    return client.describe(stream).stream_epoch - before, seconds


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    head = ["what", "time", "epochs"]
    rows = []
    for row in result["scale"]:
        for kind, said in (("there", "partitions there"), ("grown", "partitions added")):
            ms = row["ms"][kind]
            rows.append(
                [
                    f"scale, {row['open']:,} open, {said}",
                    f"p50 {ms['p50']:.1f} ms, p90 {ms['p90']:.1f} ms",
                    "–",
                ]
            )
    rows.append(["scale, Pravega, elsewhere", "{} to {} ms".format(*PRAVEGA["scale"]), "–"])
    for row in result["collate"]:
        rows.append(
            [
                f"{row['transactions']} rolling commits together",
                f"{row['ms_of_all']:.0f} ms for all",
                f"{row['epochs']} (goal 2); from rest {row['epochs_without_a_commit_before']}",
            ]
        )
    return head, rows
