"""Rolling against regular commits of the same data, in one run (goal: rolling at most 1.2 times regular).

A *rolling* commit is one of a transaction that began before a scaling: two duplicate epochs are opened and sealed
for it. Ours: half of the transactions are written, then one of the two segments is replaced by one of the same
range, then the other half is written. So both halves go to two segments; they are committed in turn. All writes are
flushed before; times run from the commit call to its answer. A pause before each rolling commit is longer than
``--collate``, in which a stream rolls once.

Sizes: 10,000 events, 100,000 (below the limit above which a merge is staged) and 300,000 (above it: both
kinds are carried and both roll, so this measures carrying, not rolling).

Beside them stand figures of Pravega standalone for 10,000 events of 100 bytes, measured elsewhere, also on two
cores. They were not run here: no ratio is made of them.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import anabranch
from bench.setting import Place, noise_values, percentile, write_events

VALUE_BYTES = 100
GOAL = 1.2
PAUSE_S = 0.25  # above the controller's --collate
SIZES = ((10_000, 20), (100_000, 5), (300_000, 3))  # events, commits of each kind
QUICK = ((10_000, 8), (300_000, 1))
# Milliseconds: the lowest and the highest seen. Not measured by this program.
PRAVEGA = {"rolling": (88, 188), "regular": (38, 106), "scale": (1000, 1100)}


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Milliseconds of each kind and their ratio, for each size."""
    values = noise_values(VALUE_BYTES)
    rows = []
    with anabranch.connect(place.bootstrap) as client:
        _measure(place, client, 1_000, 3, values)  # first-time work of a process
        for events, pairs in QUICK if quick else SIZES:
            rows.append(_measure(place, client, events, pairs, values))
    return {
        "value_bytes": VALUE_BYTES,
        "rows": rows,
        "goal_ratio_at_most": GOAL,
        "elsewhere": {
            "what": "Pravega standalone, 10,000 events of 100 B, two cores; not run here, ms",
            **{name: list(span) for name, span in PRAVEGA.items()},
        },
    }


def _measure(
    place: Place, client: anabranch.Client, events: int, pairs: int, values: list[bytes]
) -> dict[str, Any]:
    stream = place.new_stream(segments=2)
    old = [write_events(client, stream, events, values) for _ in range(pairs)]
    first = client.describe(stream).segments[0]
    client.scale(stream, seal=[first.segment_id], ranges=[(first.low, first.high)])
    new = [write_events(client, stream, events, values) for _ in range(pairs)]
    before = client.describe(stream).stream_epoch
    took: dict[str, list[float]] = {"rolling": [], "regular": []}
    for number, pair in enumerate(zip(old, new, strict=True)):
        kinds = list(zip(took, pair, strict=True))
        for kind, (token, receipts) in kinds if number % 2 else kinds[::-1]:
            time.sleep(PAUSE_S)
            start = time.perf_counter()
            client.commit(token, receipts=receipts, timeout=120)
            took[kind].append((time.perf_counter() - start) * 1000)
    return {
        "events": events,
        "commits_of_each": pairs,
        "epochs_opened": client.describe(stream).stream_epoch - before,
        "ms": {
            kind: {
                "p50": statistics.median(some),
                "p90": percentile(sorted(some), 0.9),
                "all": some,
            }
            for kind, some in took.items()
        },
        "ratio": statistics.median(took["rolling"]) / statistics.median(took["regular"]),
    }


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    head = ["events", "rolling p50 / p90 ms", "regular p50 / p90 ms", "ratio", "goal", "epochs"]
    rows = []
    for row in result["rows"]:
        carried = row["epochs_opened"] > 2 * row["commits_of_each"]
        spans = {kind: f"{ms['p50']:.1f} / {ms['p90']:.1f}" for kind, ms in row["ms"].items()}
        rows.append(
            [
                f"{row['events']:,}" + (" (both staged)" if carried else ""),
                spans["rolling"],
                spans["regular"],
                f"{row['ratio']:.2f} ×",
                "–" if carried else f"≤ {GOAL}",
                str(row["epochs_opened"]),
            ]
        )
    rolling, regular = ("{} to {}".format(*PRAVEGA[kind]) for kind in ("rolling", "regular"))
    rows.append(["10,000, Pravega, elsewhere", rolling, regular, "–", "–", "–"])
    return head, rows
