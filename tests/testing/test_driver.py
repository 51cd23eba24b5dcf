"""`Driver`: what it shows, what it refuses, and what is left after an error."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from anabranch.errors import IllegalState, InvalidArgument
from anabranch.processing.app import Processor
from anabranch.processing.failures import HandlerFailed
from anabranch.testing import Driver, InputEvent
from anabranch.testing.driver import START_MS


def counting(**more: Any) -> Processor:
    """Counts events by key; refuses those of the value 0 while `Outage.on`."""
    app = Processor("nyc/p", tasks=4, **more)
    out, totals = app.output("nyc/out", value=json), app.store("totals", value=json)
    local = app.store("local", value=str, local=True)
    hours = app.windows("hours", 3600, value=json)

    @app.timer("quiet", wall=True)
    def quiet(key: bytes, due: int) -> None:
        out.write("quiet", key=key)

    @app.on(app.input("nyc/in", value=json))
    def count(event: Any) -> None:
        if Outage.on and event.value == 0:
            raise OSError("an outage")
        totals[event.key] = totals.get(event.key, 0) + event.value
        local["last"] = str(event.value)
        for window in hours.of(event):
            window.value = event.value
        quiet.set(event.key, event.timestamp + 1000)
        out.write(totals[event.key], key=event.key)

    return app


class Outage:
    on = True


@pytest.fixture
def driver() -> Driver:
    return Driver(counting(retries=0))


def test_outputs_stores_windows_and_timers_are_shown_decoded(driver: Driver) -> None:
    driver.send("nyc/in", 2, key="k0")
    driver.transaction([("nyc/in", 3, "k0"), InputEvent("nyc/in", 4, b"k1", START_MS + 5)])
    assert [(each.key, each.value) for each in driver.outputs("nyc/out")] == [
        (b"k0", 2), (b"k0", 5), (b"k1", 4),
    ]  # fmt: skip
    (first, second, third) = driver.outputs("nyc/out")
    assert first.commit_timestamp < second.commit_timestamp == third.commit_timestamp
    assert third.timestamp == START_MS + 5
    totals = driver.store("totals")
    assert totals["k0"] == totals[b"k0"] == 5
    assert totals == {b"k0": 5, b"k1": 4}
    assert "c" not in totals
    hour = START_MS - START_MS % 3_600_000
    assert driver.store("hours")["k0", hour] == 3
    assert driver.store("quiet") == {b"k0": START_MS + 1000, b"k1": START_MS + 1005}
    by_task = [driver.store("local", task) for task in range(4)]
    assert sorted(rows["last"] for rows in by_task if rows) == ["3", "4"]


def test_the_clock_moves_only_by_advance(driver: Driver) -> None:
    driver.send("nyc/in", 1, key="a")
    driver.advance(0.999)
    assert driver.now == START_MS + 999
    assert len(driver.outputs("nyc/out")) == 1
    driver.advance(0.001)
    assert [each.value for each in driver.outputs("nyc/out")] == [1, "quiet"]
    assert not driver.store("quiet")


def test_after_an_error_nothing_is_committed_and_the_next_call_tries_again(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [("nyc/in", 1, "a"), ("nyc/in", 0, "b")]
    for again in (events, [("nyc/in", 5, "c")]):
        with pytest.raises(HandlerFailed, match="an outage") as failed:
            driver.transaction(again)
        assert failed.value.event is not None
        assert failed.value.event.key == b"b"
        assert not driver.store("totals")
        assert driver.outputs("nyc/out") == []
    monkeypatch.setattr(Outage, "on", False)
    driver.advance(0)
    assert driver.store("totals") == {b"a": 1, b"b": 0, b"c": 5}


def test_pauses_between_tries_take_no_time() -> None:
    driver = Driver(counting(retries=1000, dead_letter="nyc/dead"))
    began = time.monotonic()
    driver.send("nyc/in", 0, key="a", headers={"h": b"1"})
    assert time.monotonic() - began < 60
    (letter,) = driver.dead_letters()
    assert (letter.key, letter.value, letter.headers[0]) == (b"a", b"0", ("h", b"1"))
    assert dict(letter.headers)["error"] == b"OSError: an outage"
    assert Driver(counting()).dead_letters() == []


def test_wrong_names_are_refused(driver: Driver) -> None:
    for call in (
        lambda: driver.send("nyc/other", 1),
        lambda: driver.outputs("nyc/in"),
        lambda: driver.store("nothing"),
        lambda: driver.store("local"),
    ):
        with pytest.raises(InvalidArgument):
            call()
    with pytest.raises(InvalidArgument):
        Driver(Processor("nyc/empty"))


def test_records_of_plain_topics_come_by_partition() -> None:
    app = Processor("nyc/p", tasks=2)
    seen = app.store("seen", value=json)
    orders = app.topic("orders", value=str)

    @app.on(orders)
    def put(event: Any) -> None:
        seen["all"] = [*seen.get("all", []), [event.value, event.offset]]

    driver = Driver(app)
    driver.transaction([("orders", "a"), ("orders", "b", "k", None, (), 1), ("orders", "c")])
    assert driver.store("seen", 0)["all"] == [["a", 0], ["c", 1]]
    assert driver.store("seen", 1)["all"] == [["b", 0]]
    with pytest.raises(InvalidArgument, match="partition 2"):
        driver.send("orders", "d", partition=2)


def test_input_that_a_commit_has_no_room_for_is_in_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even if that commit fails. Partitions of a plain topic are no transaction, so each may be a commit."""
    app = Processor("nyc/p", tasks=2, cut_bytes=200, retries=0)
    out, orders = app.output("nyc/out", value=str), app.topic("orders", value=str)

    @app.on(orders)
    def grow(event: Any) -> None:
        if Outage.on and event.value == "bad":
            raise OSError("an outage")
        out.write(event.value * 300)

    driver = Driver(app)

    def done() -> list[str]:
        return [each.value[0] for each in driver.outputs("nyc/out")]

    driver.transaction([("orders", "a")])
    driver.transaction([("orders", "b"), ("orders", "c", None, None, (), 1)])
    assert done() == ["a", "b", "c"]
    b, c = driver.outputs("nyc/out")[1:]
    assert b.commit_timestamp < c.commit_timestamp
    with pytest.raises(HandlerFailed):
        driver.transaction([("orders", "d"), ("orders", "bad", None, None, (), 1)])
    assert done() == ["a", "b", "c", "d"]
    monkeypatch.setattr(Outage, "on", False)
    driver.advance(0)
    assert done() == ["a", "b", "c", "d", "b"]


def test_work_without_an_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.testing.driver._ENDLESS", 20)
    app = Processor("nyc/p")
    steps = app.output("nyc/in")

    @app.on(app.input("nyc/in"))
    def forward(event: Any) -> None:
        steps.write(event.value, key=event.key)

    with pytest.raises(IllegalState, match="20 commits"):
        Driver(app).send("nyc/in", b"1", key=b"k")


def test_tables_are_read_and_written() -> None:
    app = Processor("nyc/p", tasks=1, dead_letter="nyc/dead", retries=0)
    accounts, rates = app.table("nyc/accounts", value=json), app.replica("nyc/rates", "nyc/out")
    out = app.output("nyc/out", value=json)

    @app.on(app.input("nyc/in", value=json))
    def add(event: Any) -> None:
        with rates.snapshot(at=event.commit_timestamp) as rows:
            rate = int(rows.get("nyc/rates", b"rate") or b"0")
            before = dict(rows.scan("nyc/out", limit=1))
        accounts[event.key] = accounts.get(event.key, 0) + rate * event.value
        past = accounts.get(event.key, 0, at=event.commit_timestamp)
        out.write([accounts[event.key], past, len(before)], key=event.key)
        if event.value == 9:
            del accounts["gone"]
            raise ValueError(sorted(accounts.items()))

    driver = Driver(app)
    driver.put("nyc/accounts", "gone", 1)
    driver.put("nyc/accounts", "never", 1)
    driver.put("nyc/accounts", "never", None)
    driver.put("nyc/rates", "rate", b"2")
    driver.send("nyc/in", 1, key="a")
    driver.transaction([("nyc/in", 2, "a"), ("nyc/in", 9, "a"), ("nyc/in", 3, "b")])
    driver.put("nyc/rates", "rate", b"3")
    driver.send("nyc/in", 1, key="a")
    assert dict(driver.table("nyc/accounts")) == {b"a": 9, b"b": 6, b"gone": 1}
    assert driver.table("nyc/accounts")["gone"] == 1
    assert [event.value for event in driver.outputs("nyc/out")] == [
        [2, 0, 0], [6, 2, 1], [6, 0, 1], [9, 6, 1],
    ]  # fmt: skip
    (letter,) = driver.dead_letters()
    assert dict(letter.headers)["error"] == b"ValueError: [(b'a', 24)]"
    for call in (
        lambda: driver.table("nyc/rates"),
        lambda: driver.put("nyc/none", "k", b"v"),
        lambda: driver.put("nyc/rates", "k", 1),
    ):
        with pytest.raises(InvalidArgument):
            call()
