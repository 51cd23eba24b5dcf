"""Retention took what a processor has not consumed: it stops, or skips to whole transactions and counts."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.errors import SnapshotExpired
from anabranch.kafka.log import KafkaLog
from anabranch.ports import TopicPartition
from anabranch.processing.app import Processor
from anabranch.processing.worker import AllTasks, Worker, make_processor
from anabranch.topics.names import history_topic, stream_topic
from tests.contract.helpers import wait_stable

pytestmark = pytest.mark.broker
TASKS, QUIET_S = 4, 0.6


class Place:
    """Transactions over inputs a and b, eight events in each; what was copied."""

    def __init__(self, client: anabranch.Client) -> None:
        self.client = client
        self.scope = f"l{uuid.uuid4().hex[:8]}"
        for name in ("a", "b", "out"):
            client.create_stream(f"{self.scope}/{name}")

    def app(self, on_lost: Any) -> Processor:
        app = Processor(f"{self.scope}/copy", tasks=TASKS, on_lost=on_lost, commit_interval=0)
        output = app.output(f"{self.scope}/out", value=json)

        @app.on(*(app.input(f"{self.scope}/{name}", value=json) for name in "ab"))
        def copy(event: Any) -> None:
            output.write([event.stream[-1], event.value], key=event.key)

        return app

    def write(self, *numbers: int) -> None:
        for number in numbers:
            with self.client.begin(self.scope) as txn:
                for name in "ab":
                    for key in range(8):
                        txn.write(f"{self.scope}/{name}", b"%d" % number, key=b"%d" % key)
                txn.commit()

    def copied(self) -> dict[int, str]:
        """Transaction -> the inputs of its events."""
        found: dict[int, str] = {}
        with self.client.read(f"{self.scope}/out", timeout=QUIET_S) as reader:
            for event in reader:
                name, number = json.loads(event.value or b"")
                found[number] = found.get(number, "") + name
        return {number: "".join(sorted(names)) for number, names in found.items()}

    def worker(self, folder: Path, on_lost: str = "skip") -> Worker:
        return Worker(self.app(on_lost), self.client, folder, tasks=AllTasks(range(TASKS)))

    def until_copied(self, worker: Worker, number: int) -> None:
        for _ in range(20):
            worker.step()
            if number in self.copied():
                break
        worker.close()


@pytest.mark.parametrize("cut", ["events", pytest.param("history", marks=pytest.mark.soak)])
def test_the_transactions_that_retention_left_whole_are_taken(
    client: anabranch.Client, log: KafkaLog, tmp_path: Path, cut: str
) -> None:
    """Transactions 0 and 1 are gone in a, 2 in part; all are there in b."""
    place = Place(client)
    make_processor(client, place.app("stop"))
    place.write(0, 1, 2)
    places = [TopicPartition(kind(f"{place.scope}/a"), 0) for kind in (stream_topic, history_topic)]
    wait_stable(log, set(places))
    ends = log.end_offsets(places, committed=True)
    client.scale(f"{place.scope}/a", segments=2)
    place.write(3, 4)
    log.delete_records({places[0]: ends[places[0]] - 3})
    if cut == "history":
        log.delete_records({places[1]: ends[places[1]]})
    worker = place.worker(tmp_path / "stop", "stop")
    with pytest.raises(SnapshotExpired, match="on_lost='skip'"):
        worker.run()
    worker.close()
    assert place.copied() == {}
    worker = place.worker(tmp_path / "skip")
    place.until_copied(worker, 4)
    whole = "a" * 8 + "b" * 8
    assert place.copied() == {3: whole, 4: whole}
    lost = worker.metrics.values["processor_lost"]
    assert lost[f"{place.scope}/a",] >= lost[f"{place.scope}/b",] == 3
    place.write(5)
    worker = place.worker(tmp_path / "again")
    place.until_copied(worker, 5)
    assert not worker.metrics.values["processor_lost"], "its positions are behind that"
    assert place.copied() == {3: whole, 4: whole, 5: whole}
