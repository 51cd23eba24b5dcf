"""The jobs of `bench.processing` with Quix Streams and faust-streaming: ``python pythons.py quix|faust JOB``.

Each runs in a virtual environment of its own, which lacks anabranch. ``JOB``: a `Job` as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def quix(job: dict[str, Any]) -> None:
    """A StreamingDataFrame, exactly once; a store in RocksDB with a changelog topic."""
    from quixstreams import Application  # type: ignore[import-not-found]

    app = Application(
        broker_address=job["bootstrap"],
        consumer_group=job["name"],
        auto_offset_reset="earliest",
        commit_interval=job["commit_ms"] / 1000,
        state_dir=job["folder"],
        processing_guarantee="exactly-once",
        loglevel="WARNING",
    )

    def add(value: dict[str, Any]) -> dict[str, Any]:
        value["n"] += 1
        return value

    def count(value: dict[str, Any], state: Any) -> dict[str, Any]:
        value["n"] = state.get("count", 0) + 1
        state.set("count", value["n"])
        return value

    frame = app.dataframe(app.topic(job["source"], value_deserializer="json"))
    work, hour_ms = job["work"], 3_600_000
    if work in ("table", "join"):
        other = app.dataframe(app.topic(job["other"], value_deserializer="json"))
        how: Any = {"how": "inner", "on_merge": "keep-left", "grace_ms": hour_ms}
        if work == "table":
            frame = frame.join_asof(other, **how)
        else:
            frame = frame.join_interval(other, backward_ms=hour_ms, forward_ms=hour_ms, **how)
    elif work == "window":
        frame = frame.tumbling_window(24 * hour_ms).count().current()
    elif work == "session":
        frame = frame.session_window(hour_ms).count().current()
    else:
        frame = frame.apply(add) if work == "map" else frame.apply(count, stateful=True)
    frame.to_topic(app.topic(job["target"], value_serializer="json"))
    app.run()


def faust(job: dict[str, Any]) -> None:
    """An agent, at least once; a table in memory with a changelog topic."""
    import faust

    app = faust.App(
        job["name"],
        broker=f"kafka://{job['bootstrap']}",
        store="memory://",
        datadir=job["folder"],
        broker_commit_interval=job["commit_ms"] / 1000,
        topic_partitions=job["partitions"],
        topic_replication_factor=1,
        web_enabled=False,
        topic_disable_leader=True,
    )
    source = app.topic(job["source"], key_type=str, value_serializer="json")
    target = app.topic(job["target"], key_type=str, value_serializer="json")
    counts = app.Table("counts", default=int, key_type=str) if job["work"] == "count" else None

    @app.agent(source)
    async def work(events: Any) -> None:
        async for key, value in events.items():
            if counts is None:
                value["n"] += 1
            else:
                counts[key] += 1
                value["n"] = counts[key]
            await target.send(key=key, value=value)

    sys.argv[1:] = ["worker", "--loglevel", "warn", "--without-web"]
    app.main()


if __name__ == "__main__":
    {"quix": quix, "faust": faust}[sys.argv[1]](json.loads(sys.argv[2]))
