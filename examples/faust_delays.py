"""Delays by carrier: a Faust agent on anabranch streams, exactly once.

    anabranch stream create nyc/flights --segments 4; anabranch stream create nyc/delays --segments 2
    ANABRANCH_BOOTSTRAP=localhost:9092 faust -A examples.faust_delays worker

Kill it at any time: each flight is in the totals once. `curl localhost:6066/metrics` for Prometheus.
"""

from __future__ import annotations

import os
from typing import Any

import faust
from faust.sensors.prometheus import setup_prometheus_sensors

import anabranch.faust

SCOPE = os.environ.get("SCOPE", "nyc")


class Flight(faust.Record, serializer="json"):
    """A flight that landed. The key of its event is the carrier."""

    number: int
    delay: float  # minutes


class Delays(faust.Record, serializer="json"):
    """All flights of a carrier so far."""

    flights: int = 0
    minutes: float = 0.0


app = anabranch.faust.App(f"{SCOPE}/count-delays", bootstrap=os.environ["ANABRANCH_BOOTSTRAP"])
setup_prometheus_sensors(app)
flights = app.topic(f"{SCOPE}/flights", key_type=str, value_type=Flight)
delays = app.topic(f"{SCOPE}/delays", key_type=str, value_type=Delays)
totals = app.Table("totals", key_type=str, value_type=Delays, default=Delays)


@app.agent(flights)
async def count(stream: Any) -> None:
    """Count a flight. One commit has the flight's position, the carrier's new total, and the event with it."""
    async for carrier, flight in stream.items():
        total = totals[carrier]
        total = totals[carrier] = Delays(total.flights + 1, total.minutes + flight.delay)
        await delays.send(key=carrier, value=total)


@app.page("/here")
async def here(view: faust.web.View, request: faust.web.Request) -> faust.web.Response:
    """The tasks that this worker has."""
    return view.json({"tasks": sorted(app.engine.tasks)})
