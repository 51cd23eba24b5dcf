"""The events of some tasks of a processor, where most events are of others."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.reading import history
from anabranch.reading.committed_log import ReaderPorts
from anabranch.reading.reader_factory import Readers
from anabranch.schemas.records import CreateProcessor, ProcessorInput
from tests.client.world import World

FETCH_S, TIMEOUT_S = 0.3, 1.0


def test_a_long_history_of_other_tasks_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader with few tasks came to no event of theirs within its time-out, and took that for the end."""
    monkeypatch.setattr(history, "_MANY_BYTES", 1)
    world = World()
    client, clock = world.client, world.clock
    client.create_stream("nyc/a", 1)
    for number in range(20):
        with client.begin("nyc") as txn:
            txn.write("nyc/a", b"%d" % number, key=b"mine" if number == 19 else b"another's")
            txn.commit()
    make = CreateProcessor("nyc/p", 2, (ProcessorInput("nyc/a", "", 0, 0),))
    client._ask_processor("nyc/p", make, clock.monotonic() + 10)
    log = world.cluster.log("reader")
    fetch = log.fetch

    def slow(*asked: Any, **how: Any) -> Any:
        clock.sleep(FETCH_S)
        return fetch(*asked, **how)

    monkeypatch.setattr(log, "fetch", slow)
    ports: Any = ReaderPorts(lambda _: log, None, clock)  # type: ignore[arg-type]
    given = {}
    for task in (0, 1):
        tenure = client.take("nyc/p", [task])
        with Readers(ports, 30.0).read_tasks(
            "nyc/a", tenure, TIMEOUT_S, client._session.together
        ) as reader:
            given[task] = [event.value for event in reader]
    assert sorted(map(len, given.values())) == [1, 19], given
