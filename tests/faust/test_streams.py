"""Lists of events, streams by another key, and plain topics, on a real broker."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections import Counter
from datetime import UTC
from pathlib import Path
from typing import Any

import faust
import faust.web
import mode
import pytest
from confluent_kafka import Producer

from anabranch.infra.sockets import free_port
from anabranch.kafka.log import KafkaLog
from anabranch.ports import TopicSpec
from anabranch.processing.failures import HandlerFailed
from tests.cluster import Cluster
from tests.faust.conftest import Make, Place, Running

pytestmark = pytest.mark.broker


class Flight(faust.Record, serializer="json"):
    """An event of the inputs."""

    n: int


def test_lists_end_when_they_are_full_or_in_time(place: Place, make: Make) -> None:
    """Not with a commit. Filtered events are in no list; an agent without lists goes on meanwhile."""
    app = make(web_enabled=True)
    lists: list[tuple[float, list[int]]] = []
    events: list[Any] = []
    stamped: list[Any] = []
    totals = app.Table("totals", default=int)
    out = app.topic(f"{place.scope}/out")

    @app.agent(app.topic(f"{place.scope}/a", f"{place.scope}/b", value_type=Flight))
    async def take(stream: Any) -> None:
        async for flights in stream.filter(lambda flight: flight.n < 100).take(4, within=1.5):
            lists.append((time.monotonic(), [flight.n for flight in flights]))
            await out.send(value=[flight.n for flight in flights])

    @app.agent(app.topic(f"{place.scope}/a", f"{place.scope}/b"))
    async def take_events(stream: Any) -> None:
        async for some in stream.take_events(1, within=9):
            for event in some:
                totals[event.key] += 1
                events.append((event.key, event.value["n"], event.message.topic))

    @app.agent(app.topic(f"{place.scope}/a"))
    async def take_stamped(stream: Any) -> None:
        async for some in stream.take_with_timestamp(1, within=9, timestamp_field_name="at"):
            stamped.extend(some)

    served = threading.Event()

    @app.web_server
    class Served(mode.Service):
        async def on_start(self) -> None:
            served.set()

    running = Running(app)
    place.wait(lambda: bool(app.engine.tasks) and served.is_set())
    place.write(3)
    time.sleep(0.7)
    assert lists == []
    place.write(7)
    place.wait(lambda: sum(len(some) for _, some in lists) == 10)
    assert [len(some) for _, some in lists] == [4, 4, 2]
    assert lists[2][0] - lists[1][0] >= 1.4
    place.wait(lambda: len(place.read("out")) == 3)
    assert running.end() is None
    assert sorted(n for _, some in lists for n in some) == list(range(10))
    written = [json.loads(event.value or b"") for event in place.read("out")]
    assert sorted(written) == sorted(some for _, some in lists)
    assert {(key, n) for key, n, _ in events} == {
        (key, n) for key, some in place.written.items() for n in some
    }
    assert all(set(value) == {"n", "at"} and value["at"] > 1e9 for value in stamped)


@pytest.mark.long
def test_a_list_that_fails_is_done_again_event_by_event(place: Place, make: Make) -> None:
    app = make(retries=1, dead_letter=f"{place.scope}/dead")
    seen = app.Table("seen", default=int)
    out = app.topic(f"{place.scope}/out")

    @app.agent(app.topic(f"{place.scope}/a", f"{place.scope}/b"))
    async def take(stream: Any) -> None:
        async for some in stream.take_events(8, within=0.3):
            for event in some:
                seen[event.key] += 1
                n = event.value["n"]
                await out.send(key=event.key, value={"n": n, "seen": seen[event.key]})
                if n == 11:
                    raise ValueError("no")

    place.write(30)
    running = Running(app)
    place.wait(lambda: len(place.read("out")) >= 29)
    assert running.end() is None
    found = Counter(json.loads(event.value or b"")["n"] for event in place.read("out"))
    assert found == Counter(n for n in range(30) if n != 11)
    assert [json.loads(e.value or b"")["n"] for e in place.read("dead")] == [11]


@pytest.mark.long
def test_events_come_again_under_another_key(place: Place, make: Make) -> None:
    """By a field, a function; through a stream of the app's own, or a given one; an event that fails comes once."""
    app = make(retries=3)
    sums = app.Table("sums", default=lambda: [0, 0])
    out, failed = app.topic(f"{place.scope}/out"), set[int]()
    flights = app.topic(f"{place.scope}/a", value_type=Flight)

    @app.agent(flights, name="count")
    async def count(stream: Any) -> None:
        grouped = stream.filter(lambda flight: flight.n != 4).group_by(
            lambda flight: f"key-{flight.n % 3}", name="thirds", partitions=2
        )
        assert stream.get_active_stream() is grouped
        async for key, flight in grouped.items():
            seen, total = sums[key]
            sums[key] = seen + 1, total + flight.n
            await out.send(
                key=key, value={"seen": seen + 1, "total": total + flight.n, "n": flight.n}
            )
            if flight.n == 12 and not failed:
                failed.add(12)
                raise ValueError("once")

    @app.agent(app.topic(f"{place.scope}/b", value_type=Flight))
    async def pass_on(stream: Any) -> None:
        async for event in stream.through(
            app.topic(f"{place.scope}/even", value_type=Flight)
        ).events():
            await app.send(f"{place.scope}/dead", key=event.key, value=event.message.topic)

    keys = list[tuple[Any, int]]()

    @app.agent(app.topic(f"{place.scope}/b", value_type=Flight))
    async def by_field(stream: Any) -> None:
        topic = app.topic(
            f"{place.scope}/ticks", key_type=int, key_serializer="json", value_type=Flight
        )
        async for key, flight in stream.group_by(Flight.n, topic=topic).items():
            keys.append((key, flight.n))

    place.write(40)
    place.written = {
        b"key-%d" % third: [n for n in range(0, 40, 2) if n % 3 == third and n != 4]
        for third in range(3)
    }
    running = Running(app)
    place.wait()
    place.wait(lambda: len(place.read("dead")) == len({*keys}) == 20)
    assert running.end() is None
    place.check()
    assert failed == {12}
    assert all(key == n for key, n in keys)
    own = place.client.describe(f"{place.scope}/sums-count-a-thirds-repartition")
    assert len(own.segments) == 2
    assert len(place.read("sums-count-a-thirds-repartition")) == 19
    assert {event.value for event in place.read("dead")} == {b'"%s/even"' % place.scope.encode()}


def test_a_plain_topic_is_an_input(
    place: Place, make: Make, cluster: Cluster, log: KafkaLog, tmp_path: Path
) -> None:
    """Its keys are in the tasks of their partitions; tables and outputs are in the commit."""
    name = f"plain-{place.scope}"
    log.create_topics([TopicSpec(name, 3)])
    producer = Producer({"bootstrap.servers": cluster.bootstrap})
    for n in range(30):
        producer.produce(name, json.dumps({"n": n}), key=f"key-{n % 5}", partition=n % 3)
    producer.flush()
    app = make()
    sums = app.Table("sums", key_type=str, default=int)
    out = app.topic(f"{place.scope}/out", key_type=str)
    topics = set[str]()

    @app.agent(app.topic(name, key_type=str, value_type=Flight))
    async def count(stream: Any) -> None:
        async for event in stream.events():
            topics.add(event.message.topic)
            sums[event.key] += 1
            await out.send(key=event.key, value={"n": event.value.n, "sum": sums[event.key]})

    running = Running(app)
    place.wait(lambda: len(place.read("out")) == 30)
    assert running.end() is None
    assert topics == {name}
    rows = [json.loads(event.value or b"") for event in place.read("out")]
    assert sorted(row["n"] for row in rows) == list(range(30))
    assert {row["sum"] for row in rows} == {1, 2}  # each key is in three partitions


def test_an_agent_that_is_refused_ends_the_app(place: Place, make: Make) -> None:
    """What only its first steps show, before it has read an event."""
    app = make(retries=0)
    place.write(4)

    @app.agent(app.topic(f"{place.scope}/a"), concurrency=2)
    async def bad(stream: Any) -> None:
        async for _ in stream.group_by(lambda value: value, name="x"):
            pass

    reason = Running(app).end(crashes=True)
    assert isinstance(reason, HandlerFailed)
    assert "concurrency above 1" in str(reason.error)


class Requests(faust.Sensor):
    """Paths that were asked for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.paths: list[str] = []

    def on_web_request_start(self, app: Any, request: Any, *, view: Any = None) -> dict[str, Any]:
        self.paths.append(request.path)
        return {}

    def on_web_request_end(
        self, app: Any, request: Any, response: Any, state: Any, *, view: Any = None
    ) -> None:
        self.paths.append(f"{request.path} {response.status}")


class Base(faust.web.View):
    """The base of a page."""

    word = "base"


def test_the_words_of_an_app(place: Place, make: Make) -> None:
    """Signals, tasks, timers, services, pages: what the app starts, starts, and ends with it."""
    port = free_port()
    app: Any = make(web_enabled=True, web_port=port, web_bind="127.0.0.1")
    app.config_from_object({"timezone": UTC})
    done = Counter[str]()
    requests = Requests()
    app.sensors.add(requests)

    def note(name: str) -> Any:
        async def noted(*_: Any, **__: Any) -> None:
            done[name] += 1

        return noted

    def note_now(name: str) -> Any:
        return lambda *_, **__: done.update([name])

    keep = [note_now(name) for name in ("before", "configured", "after", "init")]
    app.on_before_configured.connect(keep[0])
    app.on_configured.connect(keep[1])
    app.on_after_configured.connect(keep[2])
    app.on_worker_init.connect(keep[3])
    keep.append(note("shutdown"))
    app.on_before_shutdown.connect(keep[4])

    @app.service
    class Served(mode.Service):
        async def on_start(self) -> None:
            done["service"] += 1

    @app.task(on_leader=False, traced=False)  # type: ignore[untyped-decorator]
    async def once(of: Any) -> None:
        assert of is app
        with app.trace("span"):
            await app.send(f"{place.scope}/ticks", value="sent", key=b"k", timestamp=1e9)
        assert app.http_client is app.http_client
        await app.cache.set("a", b"1", timeout=5)
        done["task"] += await app.cache.get("a") == b"1"
        app.traced(note_now("traced"))()

    app.timer(0.05, name="timer", traced=False, max_drift_correction=0.2)(note("timer"))
    app.timer(0.05, on_leader=True)(note("leader"))
    app.crontab("* * * * * */1", timezone=UTC, on_leader=False, traced=False)(note("cron"))

    @app.page("/page", base=Base, name="named", cors_options=None)  # type: ignore[untyped-decorator]
    async def page(view: Any, request: Any) -> Any:
        return view.json({"word": view.word, "name": view.view_name})

    @app.actor(app.topic(f"{place.scope}/a"), name="named")  # type: ignore[untyped-decorator]
    async def actor(stream: Any) -> None:
        async for _ in stream:
            done["event"] += 1

    assert "named" in app.agents
    app.discover()
    app.worker_init_post_autodiscover()
    place.write(2)
    running = Running(app)
    wanted = {"service", "task", "traced", "timer", "leader", "cron", "event"}
    place.wait(lambda: wanted <= done.keys())
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/page", timeout=5) as answer:
        assert json.loads(answer.read()) == {"word": "base", "name": "named"}
    assert app.is_leader()
    assert app.conf.timezone is UTC
    assert running.end() is None
    assert done["shutdown"] == 1
    assert {"before", "configured", "after", "init"} <= done.keys()
    assert requests.paths == ["/page", "/page 200"]
    (event,) = place.read("ticks")
    assert (event.key, event.value, event.timestamp) == (b"k", b'"sent"', 10**12)
