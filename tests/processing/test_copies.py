"""Copies and savepoints of processors in memory: exact, whatever call of a copier is its last one."""

from __future__ import annotations

import json
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from anabranch.client.client import Client
from anabranch.errors import (
    IllegalState,
    InvalidArgument,
    NotReady,
    SnapshotExpired,
    UnknownProcessor,
)
from anabranch.ports import TopicPartition
from anabranch.processing.app import Processor
from anabranch.processing.operations import copies
from anabranch.processing.operations.copies import copy_processor
from anabranch.topics.names import stream_topic
from tests.processing.test_worker import Place

TASKS = 2
KEYS = (b"a", b"b", b"c", b"d", b"e")
OLD, NEW, KEPT = "nyc/p", "nyc/q", "nyc/kept"
Rows = dict[bytes, list[Any]]


class Killed(BaseException):
    """The copier ends here, as by SIGKILL: it releases nothing."""


class Copied(Place):
    """A processor that has done some work; what is written to its input afterwards."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with self.connect(lane="admin") as operator:
            operator.feature_level(raise_to=3)
        for name in ("p", "q", "r", "kept"):
            self.client.create_stream(f"nyc/out-{name}")
        self.number = 0
        for _ in range(3):
            self.more()
        self.work(OLD)

    def more(self, timestamp: int = 500) -> None:
        """One transaction with an event for each key."""
        with self.client.begin("nyc") as txn:
            for key in KEYS:
                self.number += 1
                txn.write("nyc/in", b"%d" % self.number, key=key, timestamp=timestamp)
            txn.commit()

    def app(self, name: str) -> Processor:
        """Writes each event with its number by key, and counts of windows of a second."""
        app = Processor(name, tasks=TASKS, commit_interval=0)
        out = app.output(f"nyc/out-{name[4:]}", value=json)
        seen, windows = app.store("seen", value=json), app.windows("windows", 1, value=json)

        @app.on(app.input("nyc/in", value=json))
        def count(event: Any) -> None:
            seen[event.key] = seen.get(event.key, 0) + 1
            out.write([seen[event.key], event.value], key=event.key)
            for window in windows.of(event):
                window.value = (window.value or 0) + 1

        @windows.on_close
        def closed(window: Any) -> None:
            out.write(["window", window.value], key=window.key)

        return app

    def work(self, name: str, folder: str = "", steps: int = 8) -> None:
        folder = folder or f"of-{name[4:]}"
        with closing(self.worker(self.app(name), folder)) as worker:
            for _ in range(steps):
                worker.step()

    def out(self, name: str) -> Rows:
        found: Rows = {}
        for event in self.events(f"nyc/out-{name[4:]}"):
            found.setdefault(event.key or b"", []).append(json.loads(event.value or b""))
        return found

    def check(self, copied: int, *names: str) -> None:
        """Write more, let all work; each copy has written what the original wrote after ``copied`` events a key."""
        self.more()
        self.more(timestamp=1500)  # closes the first window
        for name in (OLD, *names):
            self.work(name)
        old = self.out(OLD)
        for key in KEYS:
            counts = [one[0] for one in old[key] if one[0] != "window"]
            assert counts == list(range(1, len(counts) + 1))
            # Which of two events of other keys comes first is chosen by the worker.
            later = [one for one in old[key] if one[0] == "window" or one[0] > copied]
            assert any(one[0] == "window" for one in later)
            for name in names:
                assert self.out(name)[key] == later, name


@pytest.fixture
def place(tmp_path: Path) -> Copied:
    return Copied(tmp_path)


def test_a_copy_goes_on_where_the_original_is(place: Copied) -> None:
    copy_processor(place.client, OLD, NEW)
    info = place.client.processor(NEW)
    assert (info.origin, info.phase) == (OLD, "")
    assert not any(task.holder for task in place.client.processor(OLD).tasks), "they are free"
    place.check(3, NEW)


def test_a_savepoint_is_copied_and_never_run(place: Copied) -> None:
    copy_processor(place.client, OLD, KEPT, savepoint=True)
    place.more()
    place.work(OLD)
    with pytest.raises(IllegalState, match="nyc/kept is a savepoint of nyc/p, which is never run"):
        place.worker(place.app(KEPT), "no")
    with pytest.raises(IllegalState, match="is a savepoint"):
        place.client.take_tasks(KEPT)
    with pytest.raises(IllegalState, match="is a savepoint"):
        place.client.reset_processor(KEPT, "begin")
    with pytest.raises(IllegalState, match="is a savepoint"):
        place.client.alter_processor(KEPT, drop=["nyc/in"])
    for name in (NEW, "nyc/r"):
        copy_processor(place.client, KEPT, name)
    place.check(3, NEW, "nyc/r")
    place.client.delete_processor(KEPT)
    with pytest.raises(UnknownProcessor):
        place.client.processor(KEPT)


@pytest.mark.parametrize("apart", [6, pytest.param(1, marks=pytest.mark.long)])
def test_a_copier_that_is_killed_anywhere_is_repeated(tmp_path: Path, apart: int) -> None:
    """After each sixth or each of its requests, until one copy gets through."""
    last = 0
    while True:
        place = Copied(tmp_path / str(last))
        count = 0

        def kill(_: str, last: int = last) -> BaseException | None:
            nonlocal count
            count += 1
            return Killed() if count > last else None

        place.fault = kill
        try:
            with patch.object(Client, "release_tasks", lambda *_, **__: None):
                copy_processor(place.client, OLD, NEW)
            place.fault = None
        except Killed:
            place.fault = None
        else:
            break
        place.client = place.new_client()
        place.more()
        place.work(OLD)
        with_copy = [one for one in place.client.processors("nyc") if one.processor == NEW]
        if with_copy and with_copy[0].phase:
            with pytest.raises(IllegalState, match="is being copied from nyc/p: repeat"):
                place.worker(place.app(NEW), "no")
        if not with_copy or with_copy[0].phase:
            copy_processor(place.client, OLD, NEW)
            place.check(4, NEW)
        else:
            place.check(3, NEW)  # its last command was carried out
        last += max(apart, last // 6)
    assert last > 20


def test_two_copiers_never_mix(place: Copied) -> None:
    """The second one begins again, while the first one fills the copy."""
    fill = copies._Filling.fill
    done = list[str]()

    def filled(self: Any, tasks: Any) -> None:
        if not done:
            done.append("first")
            place.more()
            place.work(OLD)
            copy_processor(place.new_client(), OLD, NEW)
        fill(self, tasks)

    with (
        patch.object(copies._Filling, "fill", filled),
        pytest.raises(Exception, match=r"another owner|is being copied|reset meanwhile|is no copy"),
    ):
        copy_processor(place.client, OLD, NEW)
    place.check(4, NEW)


def test_a_copy_that_was_begun_again_is_not_ended_by_the_first_copier(place: Copied) -> None:
    """The second one has committed nothing yet."""
    fill = copies._Filling.fill

    def filled(self: Any, tasks: Any) -> None:
        fill(self, tasks)
        place.new_client().mark_copy(NEW, OLD, "copying", origin_resets=0, resets=0)

    with (
        patch.object(copies._Filling, "fill", filled),
        pytest.raises(IllegalState, match="was reset meanwhile"),
    ):
        copy_processor(place.client, OLD, NEW)
    with pytest.raises(IllegalState, match="is being copied from nyc/p"):
        place.worker(place.app(NEW), "no")
    copy_processor(place.client, OLD, NEW)
    place.check(3, NEW)


def test_a_worker_that_takes_tasks_back_costs_another_try(place: Copied) -> None:
    """It commits between the copier's take and its last look: the state may be of two instants."""
    is_held, tries = copies._is_held, list[int]()

    def taken(client: Client, info: Any, ownership: Any) -> bool:
        tries.append(len(tries))
        if len(tries) < 3:
            place.more()
            place.work(OLD)
        return is_held(client, info, ownership)

    with patch.object(copies, "_is_held", taken):
        copy_processor(place.client, OLD, NEW)
    assert len(tries) == 3
    place.check(5, NEW)


def test_a_worker_that_always_takes_tasks_back(place: Copied) -> None:
    with (
        patch.object(copies, "_is_held", lambda *_: False),
        pytest.raises(NotReady, match="took its tasks back"),
    ):
        copy_processor(place.client, OLD, NEW)
    copy_processor(place.client, OLD, NEW)
    place.check(3, NEW)


def test_big_state_takes_several_commits(place: Copied) -> None:
    with patch.object(copies, "_PART_BYTES", 20), patch.object(copies, "_PART_TASKS", 1):
        copy_processor(place.client, OLD, NEW)
    assert max(task.sequence for task in place.client.processor(NEW).tasks) > 3
    place.check(3, NEW)


def test_a_reset_or_altered_original_is_copied_again(place: Copied) -> None:
    held = copies._at_one_instant

    def reset(*arguments: Any) -> Any:
        place.client.reset_processor(OLD, keep_state=True)
        return held(*arguments)

    with (
        patch.object(copies, "_at_one_instant", reset),
        pytest.raises(IllegalState, match="was reset or altered meanwhile"),
    ):
        copy_processor(place.client, OLD, NEW)
    copy_processor(place.client, OLD, NEW)
    place.check(3, NEW)


def test_a_store_that_the_original_gets_meanwhile(place: Copied) -> None:
    """The copy's row lacks it, so the next store of the copy's program would get its number, and its rows."""
    held = copies._at_one_instant

    def found_in(processor: str, store: str) -> list[Any]:
        """What a worker of a program with one store more finds there."""
        app, found = place.app(processor), list[Any]()
        more = app.store(store, value=json)

        @app.on(app.inputs["nyc/in"])
        def note(event: Any) -> None:
            found.append(more.get(event.key))
            more[event.key] = f"of {store}"

        with closing(place.worker(app, f"{processor[4:]}-{store}")) as worker:
            for _ in range(8):
                worker.step()
        return found

    def upgraded(*arguments: Any) -> Any:
        place.more()
        assert found_in(OLD, "added") == [None] * len(KEYS)
        return held(*arguments)

    with patch.object(copies, "_at_one_instant", upgraded), suppress(IllegalState):
        copy_processor(place.client, OLD, NEW)
    if place.client.processor(NEW).phase:
        copy_processor(place.client, OLD, NEW)
    place.more()
    assert found_in(NEW, "other") == [None] * len(KEYS)


def test_what_a_copy_refuses(place: Copied) -> None:
    client = place.client
    client.create_stream("lax/a")
    client.create_processor("nyc/other", ["nyc/in"], tasks=TASKS)
    copy_processor(client, OLD, NEW)
    for origin, name, error, text in (
        (OLD, NEW, IllegalState, "is a complete copy of nyc/p already"),
        (OLD, "nyc/other", IllegalState, "exists, and is no copy"),
        (OLD, OLD, IllegalState, "exists, and is no copy"),
        (OLD, "lax/q", InvalidArgument, "of another scope"),
        (OLD, "nyc/q.state", InvalidArgument, "state of a processor"),
        ("nyc/none", "nyc/x", UnknownProcessor, "nyc/none"),
    ):
        with pytest.raises(error, match=text):
            copy_processor(client, origin, name)


def test_deleted_events_are_named_before_anything_is_written(place: Copied) -> None:
    place.more()
    topic = stream_topic("nyc/in")
    log = place.cluster.log("kafka")
    for partition in range(place.cluster.topics[topic].partitions):
        at = TopicPartition(topic, partition)
        log.delete_records({at: log.end_offsets([at], committed=True)[at]})
    with pytest.raises(SnapshotExpired, match="nyc/in"):
        copy_processor(place.client, OLD, NEW)
    with pytest.raises(UnknownProcessor):
        place.client.processor(NEW)
