"""A processor reads more inputs, or fewer: state, timers and other positions stay; old workers are refused."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from anabranch.errors import IllegalState, InvalidArgument, OwnershipLost, UnknownStream
from anabranch.processing.app import Processor
from tests.processing.test_worker import Place

TASKS = 2
KEYS = (b"a", b"b", b"c", b"d")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    found = Place(tmp_path)
    with found.connect(lane="admin") as operator:
        operator.feature_level(raise_to=3)
    found.client.create_stream("nyc/more")
    return found


def counting(*inputs: str) -> Processor:
    """Writes how many events each key has had, and when its timer has come."""
    app = Processor("nyc/p", tasks=TASKS, commit_interval=0)
    out, seen = app.output("nyc/out", value=json), app.store("seen", value=json)

    @app.timer("due")
    def due(key: bytes, at: int) -> None:
        out.write(["due", at], key=key)

    @app.on(*(app.input(name) for name in inputs))
    def count(event: Any) -> None:
        seen[event.key] = seen.get(event.key, 0) + 1
        out.write([event.stream, seen[event.key]], key=event.key)
        if event.value == b"timer":
            due.set(event.key, at=5000)

    return app


def work(place: Place, *inputs: str, folder: str = "w") -> None:
    with closing(place.worker(counting(*inputs), folder)) as worker:
        for _ in range(6):
            worker.step()


def write(place: Place, stream: str, *keys: bytes, value: bytes = b"1", timestamp: int = 1) -> None:
    with place.client.begin("nyc") as txn:
        for key in keys:
            txn.write(stream, value, key=key, timestamp=timestamp)
        txn.commit()


def found(place: Place) -> Counter[tuple[bytes, str, int]]:
    """What was written: key, and stream with count, or 'due' with its time."""
    events = place.events("nyc/out")
    return Counter((event.key or b"", *json.loads(event.value or b"")) for event in events)


def test_an_input_more_keeps_positions_state_and_timers(place: Place) -> None:
    write(place, "nyc/in", *KEYS, value=b"timer")
    write(place, "nyc/more", *KEYS)
    work(place, "nyc/in")
    info = place.client.alter_processor("nyc/p", add=["nyc/more"], start="begin")
    assert [one.stream for one in info.inputs] == ["nyc/in", "nyc/more"]
    write(place, "nyc/in", *KEYS)
    work(place, "nyc/more", "nyc/in")
    write(place, "nyc/more", *KEYS, timestamp=6000)
    work(place, "nyc/more", "nyc/in")
    wanted = Counter({(key, "due", 5000): 1 for key in KEYS})
    by_key: dict[bytes, list[str]] = {}
    for key, stream, number in found(place):
        if stream != "due":
            by_key.setdefault(key, []).append(stream)
            wanted[key, stream, number] += 1
    assert found(place) == wanted
    for key in KEYS:
        assert Counter(by_key[key]) == {"nyc/in": 2, "nyc/more": 2}
        assert {number for k, s, number in found(place) if k == key and s != "due"} == {1, 2, 3, 4}


def test_the_other_inputs_keep_their_positions_when_one_is_dropped(place: Place) -> None:
    """The one that stays gets another number."""
    for stream in ("nyc/in", "nyc/more"):
        write(place, stream, *KEYS)
    work(place, "nyc/in", "nyc/more")
    write(place, "nyc/in", *KEYS)
    place.client.alter_processor("nyc/p", drop=["nyc/in"])
    info = place.client.alter_processor("nyc/p", drop=["nyc/in"])
    assert (info.resets, [one.stream for one in info.inputs]) == (1, ["nyc/more"]), "once"
    assert {p.input for task in info.tasks for p in task.positions} == {0}
    write(place, "nyc/more", *KEYS)
    work(place, "nyc/more")
    streams = Counter(stream for _, stream, _ in found(place).elements())
    assert streams == {"nyc/in": 4, "nyc/more": 8}
    place.client.alter_processor("nyc/p", add=["nyc/in"], start="end")
    write(place, "nyc/in", *KEYS)
    work(place, "nyc/more", "nyc/in")
    streams = Counter(stream for _, stream, _ in found(place).elements())
    assert streams == {"nyc/in": 8, "nyc/more": 8}, "what came while it was no input is not read"


def test_a_worker_with_other_inputs_stops(place: Place) -> None:
    write(place, "nyc/in", *KEYS)
    with closing(place.worker(counting("nyc/in"))) as old:
        for _ in range(3):
            old.step()
        place.client.alter_processor("nyc/p", add=["nyc/more"], start="begin")
        before = [task.term for task in place.client.processor("nyc/p").tasks]
        write(place, "nyc/in", *KEYS)
        with pytest.raises(IllegalState, match="has the input nyc/more, which this program lacks"):  # noqa: PT012
            for _ in range(20):
                try:
                    old.step()
                except OwnershipLost:
                    old._drop()  # as `run`
        after = [task.term for task in place.client.processor("nyc/p").tasks]
        assert after == before, "it has taken nothing"
    with pytest.raises(IllegalState, match=r"nyc/more, too: .*anabranch processor alter"):
        place.worker(counting("nyc/in"), "again")
    work(place, "nyc/in", "nyc/more", folder="new")
    assert Counter(s for _, s, _ in found(place).elements()) == {"nyc/in": 8}


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"add": ["nyc/more"]}, InvalidArgument, "a start belongs to"),
        ({"drop": ["nyc/in"], "start": "end"}, InvalidArgument, "a start belongs to"),
        (
            {"add": ["nyc/in"], "drop": ["nyc/in"], "start": "end"},
            InvalidArgument,
            "added and dropped",
        ),
        ({"add": ["topic:t"], "start": "end"}, InvalidArgument, "only streams can be added"),
        ({"add": ["nyc/none"], "start": "end"}, UnknownStream, "nyc/none"),
        ({"drop": ["nyc/in"]}, InvalidArgument, "needs inputs"),
    ],
)
def test_what_alter_refuses(
    place: Place, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    place.client.create_processor("nyc/p", ["nyc/in"], tasks=TASKS)
    with pytest.raises(error, match=text):
        place.client.alter_processor("nyc/p", **arguments)
    assert place.client.processor("nyc/p").resets == 0


def test_a_stream_that_was_created_again_is_dropped_first(place: Place) -> None:
    place.client.create_processor("nyc/p", ["nyc/in", "nyc/more"], tasks=TASKS)
    with place.connect(lane="admin") as operator:
        operator.delete_stream("nyc/more", despite=["nyc/p"])
    place.client.create_stream("nyc/more")
    with pytest.raises(IllegalState, match="was created again since: drop it, then add it"):
        place.client.alter_processor("nyc/p", add=["nyc/more"], start="begin")
    place.client.alter_processor("nyc/p", drop=["nyc/more"])
    assert place.client.alter_processor("nyc/p", add=["nyc/more"], start="begin").resets == 2
