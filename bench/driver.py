"""How many events a second `anabranch.testing.Driver` handles on one core: a map, and a count with a store."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from anabranch.processing.app import Processor
from anabranch.testing import Driver

EVENTS = 200_000
KEYS = 1_000


def _map() -> Processor:
    app = Processor("bench/map")
    out = app.output("bench/out", value=json)

    @app.on(app.input("bench/in", value=json))
    def double(event: Any) -> None:
        out.write({"n": event.value["n"] * 2}, key=event.key)

    return app


def _count() -> Processor:
    app = Processor("bench/count")
    out, totals = app.output("bench/out", value=json), app.store("totals", value=json)

    @app.on(app.input("bench/in", value=json))
    def count(event: Any) -> None:
        totals[event.key] = n = totals.get(event.key, 0) + 1
        out.write({"n": n}, key=event.key)

    return app


def _in_one_transaction(driver: Driver, events: list[Any]) -> None:
    driver.transaction(events)


def _one_by_one(driver: Driver, events: list[Any]) -> None:
    for event in events:
        driver.send(*event)


def _rate(build: Callable[[], Processor], feed: Callable[..., None], count: int) -> int:
    """Events a second of CPU time."""
    events = [("bench/in", {"n": n}, b"k%d" % (n % KEYS)) for n in range(count)]
    driver = Driver(build())
    feed(driver, events[:1000])
    began = time.process_time()
    feed(driver, events)
    return round(count / (time.process_time() - began))


def run(*, quick: bool = False) -> dict[str, Any]:
    count = EVENTS // 10 if quick else EVENTS
    ways = {"transaction": _in_one_transaction, "send": _one_by_one}
    return {
        name: {way: _rate(build, feed, count) for way, feed in ways.items()}
        for name, build in (("map", _map), ("count", _count))
    }


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    head = ["handler", "events/s, in one transaction", "events/s, one by one"]
    rows = [[name, f"{of['transaction']:,}", f"{of['send']:,}"] for name, of in result.items()]
    return head, rows
