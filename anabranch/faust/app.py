"""`anabranch.faust.App`: Faust's worker, web, timers and agents, with topics, tables and commits of anabranch."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from inspect import unwrap
from pathlib import Path
from typing import Any, NamedTuple

import faust
import mode
from faust.agents import current_agent
from faust.app import BootStrategy
from faust.types import TP, AgentT, RecordMetadata
from faust.types.settings import Settings

from anabranch.client.client import Client
from anabranch.client.connect import connect
from anabranch.controller.monitor import Numbers
from anabranch.errors import IllegalState, InvalidArgument, StreamExists
from anabranch.faust.agents import Agent, AgentHandlers, Stream
from anabranch.faust.tables import Table, Windowed
from anabranch.faust.words import (
    REFUSED,
    check_function,
    check_sensor,
    refuse,
    refuse_options,
    refusing,
)
from anabranch.processing.app import Processor
from anabranch.processing.batch import Written, current_context, outside
from anabranch.processing.program import Registered
from anabranch.processing.worker import Worker
from anabranch.protocol.legal_names import PLAIN, check_input, is_plain, split_stream
from anabranch.protocol.limits import copied_time
from anabranch.values import stream_of

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")
_HANDOVER_S = 10.0  # how long a commit under way may take at the end
_OURS = (
    "tasks", "commit_interval", "cut_bytes", "whole", "dead_letter", "retries", "start", "on_lost",
)  # fmt: skip
# Names that Faust had for settings before.
_FORMER = {
    "client_id": "broker_client_id",
    "commit_interval": "broker_commit_interval",
    "create_reply_topic": "reply_create_topic",
    "num_standby_replicas": "table_standby_replicas",
    "default_partitions": "topic_partitions",
    "replication_factor": "topic_replication_factor",
}


class Sent:
    """The answer of `Topic.send`. Its offset is -1, because an event has no offset before the commit."""

    __slots__ = ("stream", "timestamp")

    def __init__(self, stream: str, timestamp: float) -> None:
        self.stream, self.timestamp = stream, timestamp

    def __await__(self) -> Generator[Any, None, RecordMetadata]:
        yield from ()
        return self.metadata

    @property
    def metadata(self) -> RecordMetadata:
        return RecordMetadata(self.stream, -1, TP(self.stream, -1), -1, self.timestamp, 0)


class Event(faust.Event):
    """An event as agents get it."""

    def ack(self, *_: object) -> bool:
        """Raises: InvalidArgument."""
        refuse("event.ack", REFUSED["event"]["ack"])

    async def __aexit__(self, *_: object) -> None:
        """Do nothing: the event is done when its agent asks for the next one."""


@refusing("topic", faust.Topic)
class Topic(faust.Topic):
    """A stream, or several streams to read, or plain topics of Kafka to read: names without a scope.

    `anabranch stream create` makes streams.
    """

    app: Any

    def __init__(self, app: Any, **options: Any) -> None:
        """Raises: InvalidArgument."""
        super().__init__(app, **options)
        for name in self.inputs:
            check_input(name)

    @property
    def inputs(self) -> Sequence[str]:
        """The names as those of a processor's inputs."""
        return [name if "/" in name else PLAIN + name for name in self.topics]

    @property
    def is_plain(self) -> bool:
        """Whether it is of plain topics, which agents can't write."""
        return any(map(is_plain, self.inputs))

    async def send(
        self,
        *,
        key: Any = None,
        value: Any = None,
        timestamp: float | None = None,
        headers: Any = None,
        schema: Any = None,
        key_serializer: Any = None,
        value_serializer: Any = None,
        partition: int | None = None,
        callback: Any = None,
        force: bool = False,
    ) -> Awaitable[RecordMetadata]:
        """Write an event: in an agent, with the commit of what it consumed; elsewhere, in a transaction of its own.

        ``timestamp``: Unix seconds, by default those of the event that is handled. Raises: CrossScope, IllegalState
        (an asyncio task outlived its event), InvalidArgument; elsewhere as `Client.begin` and `Transaction.commit`.
        """
        for option, given in (("partition", partition), ("callback", callback)):
            if given is not None:
                refuse_options("topic.send", [option])
        self.app.check_written(self, "topic.send")
        is_alone = outside() and current_agent() is None
        at = None if is_alone else current_context()
        raw, made = self.prepare_key(key, key_serializer, schema, self.prepare_headers(headers))
        data, made = self.prepare_value(value, value_serializer, schema, made)
        for what, found in (("key", raw), ("value", data)):
            if not (found is None or isinstance(found, bytes)):
                raise InvalidArgument(
                    f"a {what} is bytes, not {type(found).__name__}: name a serializer"
                )
        stream = super().get_topic_name()
        pairs = list(made.items() if isinstance(made, Mapping) else made or ())
        sensors = self.app.sensors
        state = sensors.on_send_initiated(None, stream, None, len(raw or b""), len(data or b""))
        ms = None if timestamp is None else int(timestamp * 1000)
        if at is None:
            event = (data, raw, pairs, ms)
            write = self.app.write_alone
            await asyncio.get_running_loop().run_in_executor(None, write, stream, event)
        else:
            if stream not in self.app.program.outputs:
                await asyncio.get_running_loop().run_in_executor(None, self.app.add_output, stream)
                at = current_context()  # the event may have ended meanwhile
            time_ms = copied_time(at.timestamp) if ms is None else ms
            at.write(stream, (data, raw, pairs or None, time_ms))
        sent = Sent(stream, timestamp or time.time())
        sensors.on_send_completed(None, state, sent.metadata)
        return sent

    def get_topic_name(self) -> str:
        """The topic's name, or the first one of several: Faust raises an error there, which ends `faust agents`."""
        first, *others = self.topics or ("",)
        return f"{first} and {len(others)} more" if others else super().get_topic_name()


class _Passed(NamedTuple):
    """A stream to which an agent passes its events, by `group_by` or `through`."""

    stream: str


class Program(Processor):
    """The processor of an app: its agents are its handlers."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, **options)
        self._agents: dict[str, list[Registered]] = {}  # by input

    def add_table(self, table: Any) -> Any:
        return self._add(table.name, table)

    def read(self, name: str, agent: Any) -> None:
        """Add an input of an agent."""
        if is_plain(name):
            self.topic(name.removeprefix(PLAIN))
        else:
            self.input(name)
        self.handlers.setdefault(name, [])
        _, *derived = agent.readers
        also = [*agent.sinks, *(_Passed(each) for reader in derived for each in reader.inputs)]
        one = Registered(unwrap(agent.fun), is_async=True, batch=False, also=also)
        self._agents.setdefault(name, []).append(one)

    def drawn(self, stream: str) -> Sequence[Registered]:
        """As of `Program`: the agents."""
        return self._agents[stream]

    def part_of(self, thing: Any) -> Any:
        """As of `Program`: of a table with windows its table, of a topic its stream."""
        kind = type(thing)  # a proxy of Faust's would be made by `isinstance`
        if issubclass(kind, Windowed):
            return thing.table
        if issubclass(kind, Agent):
            thing, kind = thing.channel, type(thing.channel)
        if issubclass(kind, Topic) and len(thing.topics) == 1 and not thing.is_plain:
            return thing.topics[0]
        return thing.stream if kind is _Passed else None

    def check(self) -> Sequence[str]:
        """As of `Program`. Raises: InvalidArgument."""
        if not self.inputs:
            raise InvalidArgument(
                f"app {self.name} has no agent: decorate one with @app.agent(topic)"
            )
        for store in self.stores.values():
            if isinstance(store, Table):
                store.check()
        return super().check()


class NoProducer:
    """In place of Faust's producer."""

    async def stop(self) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        refuse("app.producer", REFUSED["app"]["producer"])


class Boot(BootStrategy):
    """Starts Faust's services without Kafka's. Our worker begins last and ends first."""

    app: Any
    enable_kafka = False

    def server(self) -> Iterable[Any]:
        """The services of `faust worker`."""
        return self._chain(self.sensors(), self.web_server(), self.agents(), [self.app.engine])


class Engine(mode.Service):
    """Runs a worker in a thread of its own, while the app runs."""

    def __init__(self, app: App, **options: Any) -> None:
        super().__init__(**options)
        self._app = app
        self._worker: Worker | None = None
        self._handlers: AgentHandlers | None = None
        self._stopping = False
        self._error: BaseException | None = None
        self._over = asyncio.Event()

    @property
    def tasks(self) -> Iterable[int]:
        """The tasks that this process owns."""
        return () if self._worker is None else self._worker.tasks

    @property
    def has_begun(self) -> bool:
        """Whether the inputs of agents are known."""
        return self._worker is not None

    def call(self, call: Callable[..., Any], *args: Any) -> None:
        """Call a function, plain or ``async``, on Faust's loop, in the context of the worker's thread."""

        async def called() -> None:
            found = call(*args)
            if isinstance(found, Awaitable):
                await found

        asyncio.run_coroutine_threadsafe(called(), self._on).result()

    async def on_start(self) -> None:
        loop = self._on = asyncio.get_running_loop()
        threading.Thread(target=self._work, args=(loop,), name="anabranch", daemon=True).start()

    async def on_stop(self) -> None:
        """Wait for the commit under way, and release the tasks."""
        self._stopping = True
        if self._worker is not None:
            self._worker.stop.set()
        try:
            await asyncio.wait_for(self._over.wait(), _HANDOVER_S)
        except TimeoutError:
            if self._handlers is not None:
                self._handlers.end()
                await self._over.wait()

    @mode.Service.task
    async def _watch(self) -> None:
        await self._over.wait()
        if self._error is not None and not self._stopping:
            await self.crash(self._error)

    async def _ready(self) -> None:
        """Wait until agents have asked for their first events, so that their inputs are known."""
        agents: list[Any] = list(self._app.agents.values())
        for agent in agents:
            await agent.until_ready()
        for agent in agents:
            for reader in agent.readers:
                for name in reader.inputs:
                    self._app.program.read(name, agent)

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        app = self._app

        def handlers(
            program: Any, stores: Sequence[str], metrics: Numbers, stop: threading.Event
        ) -> AgentHandlers:
            agents: list[Any] = list(app.agents.values())
            self._handlers = AgentHandlers(
                program, stores, metrics, stop, loop=loop, agents=agents, strays=app.strays
            )
            return self._handlers

        try:
            asyncio.run_coroutine_threadsafe(self._ready(), loop).result()
            app.make_own_streams()
            folder = app.folder or app.conf.tabledir / "stores"
            worker = Worker(app.program, app.client, folder, standby=app.standby, handlers=handlers)
            self._worker = worker
            try:
                if self._stopping:
                    worker.stop.set()
                worker.run()
            finally:
                worker.close()
        except BaseException as error:  # noqa: BLE001  # `_watch` crashes the service with it
            self._error = error
        finally:
            loop.call_soon_threadsafe(self._over.set)


@refusing("app", faust.App)
class App(faust.App):
    """A Faust app whose agents read and write anabranch streams, exactly once.

    ``name``, ``tasks``, ``commit_interval``, ``cut_bytes``, ``whole``, ``dead_letter``, ``retries``, ``start`` and
    ``on_lost`` are as for `anabranch.Processor`; ``bootstrap`` and ``connect`` as for `anabranch.connect`.
    ``folder``: keeps the tables of this one worker; by default it is in Faust's ``datadir``. ``standby``: keep warm
    copies of other workers' tasks. ``options``: as for `faust.App`. Raises: InvalidArgument.
    """

    BootStrategy = Boot

    def __init__(
        self, name: str, *, bootstrap: str | None = None, folder: str | Path | None = None,
        standby: bool = False, connect: Mapping[str, Any] | None = None, autodiscover: Any = False,
        monitor: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        scope, short = split_stream(name)
        self.program = Program(name, **{o: options.pop(o) for o in _OURS if o in options})
        for option in options:
            if option not in _FORMER and option not in Settings.SETTINGS and option not in _OF_APP:
                raise TypeError(f"App() has no option {option!r}")
        _check_settings(options)
        self._own_streams: dict[str, int | None] = {}  # name -> segments
        self.folder = None if folder is None else Path(folder)
        self.standby = standby
        self.strays: list[IllegalState] = []
        self._entrance = bootstrap, dict(connect or {})
        self._client: Client | None = None
        self._client_lock = threading.Lock()
        if bootstrap is not None:  # only shown to people; Faust never connects to it
            options["broker"] = [f"kafka://{host.strip()}" for host in bootstrap.split(",")]
        super().__init__(
            f"{scope}-{short}", monitor=monitor, autodiscover=autodiscover,
            Agent=Agent, Event=Event, Stream=Stream, Topic=Topic,
            web_router_enabled=False, web_tables_enabled=False, **options,
        )  # fmt: skip
        self.engine = Engine(self)

    @property
    def client(self) -> Client:
        """The app's client, connected at its first use."""
        with self._client_lock:
            if self._client is None:
                bootstrap, options = self._entrance
                self._client = connect(bootstrap, **options)
            return self._client

    @property  # type: ignore[misc]
    def producer(self) -> Any:
        """Nothing. `faust send` stops it."""
        return NoProducer()

    @property
    def livecheck(self) -> Any:
        """`faust livecheck` asks for it. Raises: InvalidArgument."""
        refuse("faust livecheck", REFUSED["command"]["livecheck"])

    def close_client(self) -> None:
        """Close the app's client, if it was used."""
        with self._client_lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def add_output(self, stream: str) -> None:
        """Add a stream that agents write to. Raises: UnknownScope, UnknownStream."""
        self.client.check_outputs(self.program.name, (stream,))
        self.program.outputs[stream] = stream_of(stream, None, None, "raise")

    def write_alone(self, stream: str, event: Written) -> None:
        """Write an event in a transaction of its own. Raises: as `Client.begin` and `Transaction.commit`."""
        with self.client.begin(split_stream(stream)[0]) as txn:
            txn.write_many(stream, [event])
            txn.commit()

    def _new_consumer(self) -> Any:
        refuse("app.consumer", REFUSED["app"]["consumer"])

    def _load_settings(self, *, silent: bool = False) -> Any:
        """As Faust's, from all sources. Raises: InvalidArgument."""
        found: dict[str, Any] = {}
        if self._config_source:
            source = self._load_settings_from_source(self._config_source, silent=silent)
            found = {o: source[o] for o in (*Settings.SETTINGS, *_FORMER) if o in source}
        prefix = found.get("env_prefix") or self._default_options[1].get("env_prefix") or ""
        for name, setting in Settings.SETTINGS.items():
            if setting.env_name and (value := os.environ.get(prefix + setting.env_name)):
                found[name] = value
        _check_settings(found)
        return super()._load_settings(silent=silent)

    def topic(self, *topics: str, **options: Any) -> Any:
        """A stream, or several to read; or plain topics to read, see `Topic`. Raises: InvalidArgument."""
        for option in REFUSED["app.topic"].keys() & options.keys():
            if options[option] not in ((None, True) if option == "acks" else (None, False)):
                refuse_options("app.topic", [option])
        return super().topic(*topics, **options)

    def own_topic(self, agent: str, source: Any, name: str, partitions: int | None) -> Any:
        """The topic of a stream that the app makes for an agent at its start, if it does not exist."""
        if len(source.topics) != 1 or source.is_plain:
            raise InvalidArgument(
                f"group_by of {source} needs topic=, an existing stream"
                if not source.is_plain
                else f"group_by of {source}, a plain topic: bridge it into a stream, with `anabranch bridge`"
            )
        scope, short = split_stream(self.program.name)
        parts = (short, agent, source.topics[0].partition("/")[2], name, "repartition")
        stream = f"{scope}/{_NOT_IN_NAMES.sub('-', '-'.join(parts))}"
        self._own_streams[stream] = partitions
        return self.topic(stream, schema=source.schema)

    def make_own_streams(self) -> None:
        """Make the streams of `own_topic`. Raises: as `Client.create_stream`."""
        for name, segments in self._own_streams.items():
            with suppress(StreamExists):
                self.client.create_stream(name, segments or self.conf.topic_partitions)

    def check_input(self, topic: Any) -> None:
        """Check that a stream that an agent reads now is an input. Raises: IllegalState."""
        if self.engine.has_begun and not set(topic.inputs) <= self.program.inputs.keys():
            raise IllegalState(
                f"{topic} was no input when the app started: use the same streams each time"
            )

    def check_written(self, channel: Any, what: str) -> None:
        """Check that what agents write to is a stream. Raises: InvalidArgument."""
        if isinstance(channel, AgentT):
            channel = channel.channel
        if isinstance(channel, Topic) and channel.is_plain:
            refuse(f"{what}: {channel} is a plain topic, which", REFUSED["plain topic"]["send"])

    def key_type_of_inputs(self) -> tuple[Any, Any]:
        """Type and serializer of keys, if all topics of agents have the same; else they are bytes."""
        topics = [agent.channel for agent in self.agents.values()]
        found = {(one.schema.key_type, one.schema.key_serializer) for one in topics}
        return found.pop() if len(found) == 1 else (None, None)

    def Table(self, name: str, *, window: Any = None, **options: Any) -> Any:
        """Add a table, see `anabranch.faust.tables.Table`. Raises: InvalidArgument."""
        table = self.add_table(Table(self, name, **options))
        return table if window is None else table.using_window(window)

    def add_table(self, table: Any) -> Any:
        """Let the processor have a table as a store."""
        self.tables.data[table.name] = table
        return self.program.add_table(table)

    def check_words(self) -> None:
        """Check that functions, signals and sensors use no word that does nothing. Raises: InvalidArgument."""
        for agent in self.agents.values():
            check_function(unwrap(agent.fun), _kind, stream=True)
        for task in self._app_tasks:
            check_function(unwrap(task), _kind)
        for name, instead in REFUSED["signal"].items():
            signal = getattr(self, name)
            if any(signal.iter_receivers(self)):
                refuse(f"app.{name}", instead)
        for sensor in self.sensors:
            check_sensor(sensor)

    def is_leader(self) -> bool:
        """Whether this process has task 0. For ``on_leader=True`` it is a hint: two may believe it for a while."""
        return 0 in self.engine.tasks

    async def on_start(self) -> None:
        """Start as Faust does, without a consumer. Raises: as `check_words`."""
        self.finalize()
        self.check_words()

    async def on_shutdown(self) -> None:
        """Close the client after all services have ended."""
        self.close_client()

    async def _wait_for_table_recovery_completed(self) -> bool:
        return False


# Options of `faust.App` that are not settings.
_OF_APP = {"config_source", "loop", "beacon"}


def _check_settings(given: Mapping[str, Any]) -> None:
    """Raise `InvalidArgument` for a setting that does nothing."""
    for option in given:
        name = _FORMER.get(option, option)
        if name in REFUSED["setting"] and given[option] is not None:
            refuse(f"App({option}=)", REFUSED["setting"][name])


def _kind(found: object) -> str | None:
    """The kind of an object of Faust, in `REFUSED`."""
    kinds: tuple[tuple[str, Any], ...] = (
        ("app", App), ("agent", Agent), ("topic", Topic), ("table", Table | Windowed),
    )  # fmt: skip
    kind = next((kind for kind, of in kinds if isinstance(found, of)), None)
    return "plain topic" if isinstance(found, Topic) and found.is_plain else kind
