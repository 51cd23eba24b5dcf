"""A processor whose input, output and table are on other control partitions than its state, in memory."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

from anabranch.client.client import Client
from anabranch.processing.app import Processor
from anabranch.processing.worker import AllTasks, Worker
from anabranch.testing import MemoryCluster

SCOPES = (
    "ams",
    "ber",
    "cdg",
)  # of the state, the input and the output: on control partitions 0, 1 and 2


def counting() -> Processor:
    app = Processor("ams/p", tasks=2, commit_interval=0)
    counts, out = app.store("counts", value=json), app.output("cdg/out")
    rows = app.table("cdg/rows", value=json)

    def count(event: Any) -> None:
        counts[event.key] = counts.get(event.key, 0) + 1
        rows["all"] = rows.get("all", 0) + 1
        out.write(b"%d" % counts[event.key], key=event.key)

    app.on(app.input("ber/in"))(count)
    return app


def results(client: Client) -> list[tuple[bytes | None, bytes | None]]:
    return sorted((e.key, e.value) for e in client.snapshot("cdg/out").read("cdg/out"))


def test_positions_state_and_output_are_one_commit(tmp_path: Path) -> None:
    """Whichever controller dies, each event counts once."""
    cluster = MemoryCluster(control_partitions=3, controllers=3)
    client = cluster.connect(timeout=60)
    streams = "ams/s", "ber/in", "cdg/out"
    for stream in streams:
        client.create_stream(stream)
    client.create_table("cdg/rows")
    assert [*client.control_partitions(streams).values()] == [0, 1, 2]
    for step in range(4):
        with client.begin("ber") as txn:
            for key in (b"a", b"b", b"c"):
                txn.write("ber/in", b"v", key=key)
            txn.commit()
        if step:
            cluster.stop_controller(step % 3)
            cluster.start_controller(step % 3)
        own = AllTasks(range(2))
        with closing(
            Worker(counting(), client, tmp_path / "w", tasks=own, threads=False)
        ) as worker:
            for _ in range(8):
                worker.step()
        due = [(key, b"%d" % (n + 1)) for key in (b"a", b"b", b"c") for n in range(step + 1)]
        assert results(client) == due, step
    with client.replica("cdg/rows") as replica, replica.snapshot() as view:
        assert view.get("cdg/rows", b"all") == b"%d" % len(results(client))
    assert client.open_transactions() == []
