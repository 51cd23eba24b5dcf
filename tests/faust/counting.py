"""An app that `faust -A tests.faust.counting worker` runs; its place comes from the environment."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import faust
from faust.cli import option
from faust.sensors.prometheus import setup_prometheus_sensors

import anabranch.faust

SCOPE = os.environ["SCOPE"]


class Flight(faust.Record, serializer="json"):
    """An event of the inputs."""

    n: int


class Sum(faust.Record, serializer="json"):
    """An event of the output, and a row of the table."""

    seen: int
    total: int
    n: int


app = anabranch.faust.App(
    f"{SCOPE}/sums",
    bootstrap=os.environ["BOOTSTRAP"],
    connect={"session_timeout_ms": 2000},
    tasks=4,
    commit_interval=0.02,
)
setup_prometheus_sensors(app)
inputs = app.topic(f"{SCOPE}/a", f"{SCOPE}/b", value_type=Flight)
output = app.topic(f"{SCOPE}/out", value_type=Sum)
even = app.topic(f"{SCOPE}/even", value_type=Flight)
middle = app.topic(f"{SCOPE}/middle", key_type=str, value_type=Flight)
ticks = app.topic(f"{SCOPE}/ticks")
sums = app.Table("sums", value_type=Sum, default=lambda: Sum(0, 0, 0), help="the sums of keys")


@app.agent(inputs)
async def count(stream: Any) -> None:
    """Count and sum by key."""
    async for key, flight in stream.items():
        before = sums[key]
        now = sums[key] = Sum(before.seen + 1, before.total + flight.n, flight.n)
        await output.send(key=key, value=now)


async def keep(flight: Flight) -> None:
    """A sink."""
    await even.send(key=str(flight.n), value=flight)


@app.agent(inputs, sink=[keep], concurrency=3)
async def only_even(stream: Any) -> AsyncIterator[Flight]:
    """Pass on even numbers."""
    async for event in stream.filter(lambda flight: flight.n % 2 == 0).events():
        yield event.value


thirds = app.Table("thirds", key_type=str, default=int).tumbling(1 << 30)


@app.agent(inputs)
async def grouped(stream: Any) -> None:
    """Count under another key, in a window that has all events."""
    by_third = stream.group_by(lambda flight: f"third-{flight.n % 3}", name="thirds", topic=middle)
    async for key, flight in by_third.items():
        thirds[key] += 1
        await app.send(f"{SCOPE}/thirds", key=key, value=[flight.n, thirds[key].value()])


@app.agent(inputs)
async def listed(stream: Any) -> None:
    """Pass on lists."""
    async for flights in stream.take(20, within=0.1):
        await app.send(f"{SCOPE}/lists", value=[flight.n for flight in flights])


@app.timer(0.2)  # type: ignore[untyped-decorator]
async def tick() -> None:
    """Write outside of a batch."""
    await ticks.send(value=1)


@app.crontab("* * * * *")
async def each_minute() -> None:
    """Write outside of a batch."""
    await ticks.send(value="minute")


@app.command()
async def say() -> None:
    """Write outside of a worker."""
    await ticks.send(value="said")


@app.command(option("--count", type=int))
async def add(self: Any, count: int) -> None:
    """Write a number, outside of a worker."""
    await ticks.send(value=count)


@app.page("/hello")
async def hello(view: faust.web.View, request: faust.web.Request) -> faust.web.Response:
    """Answer."""
    return view.json({"tasks": sorted(app.engine.tasks)})
