"""`anabranch.faust.App`: Faust's worker, web, timers and agents, with topics, tables and commits of anabranch."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import (
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Mapping,
    MutableMapping,
    Sequence,
)
from pathlib import Path
from typing import Any

import faust
import mode
from faust.agents import current_agent
from faust.app import BootStrategy
from faust.types import TP, RecordMetadata

from anabranch.client.client import Client
from anabranch.client.connect import connect
from anabranch.controller.monitor import Numbers
from anabranch.errors import IllegalState, InvalidArgument
from anabranch.faust.agents import Agent, AgentHandlers, Stream
from anabranch.faust.refusals import APP, TABLE, refuse, refusing
from anabranch.processing.app import Processor
from anabranch.processing.batch import HandlerContext, Written, current_context, outside
from anabranch.processing.stores import Store
from anabranch.processing.worker import Worker
from anabranch.protocol.legal_names import split_stream
from anabranch.protocol.limits import copied_time
from anabranch.values import Codec, stream_of

_HANDOVER_S = 10.0  # how long a commit under way may take at the end
_OURS = (
    "tasks", "commit_interval", "cut_bytes", "whole", "dead_letter", "retries", "start", "on_lost",
)  # fmt: skip
_OPTIONS = (
    "processing_guarantee", "stream_publish_on_commit", "broker", "broker_consumer", "broker_producer",
    "store", "table_standby_replicas",
)  # fmt: skip


class Sent:
    """The answer of `Topic.send`. Its offset is -1, because an event has no offset before the commit."""

    __slots__ = ("stream", "timestamp")

    def __init__(self, stream: str, timestamp: float) -> None:
        self.stream, self.timestamp = stream, timestamp

    def __await__(self) -> Generator[Any, None, RecordMetadata]:
        yield from ()
        return RecordMetadata(self.stream, -1, TP(self.stream, -1), -1, self.timestamp, 0)


class Topic(faust.Topic):
    """A stream, or several streams to read. `anabranch stream create` makes them."""

    app: Any

    def __init__(self, app: Any, **options: Any) -> None:
        """Raises: InvalidArgument."""
        if options.get("pattern"):
            refuse("a topic by pattern", "name the streams")
        for name in options.get("topics") or ():
            split_stream(name)
        super().__init__(app, **options)

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
        if partition is not None or callback is not None:
            refuse(
                "send(partition=) or send(callback=)", "a stream places events by key, in a commit"
            )
        is_alone = outside() and current_agent() is None
        at = None if is_alone else current_context()
        raw, made = self.prepare_key(key, key_serializer, schema, self.prepare_headers(headers))
        data, made = self.prepare_value(value, value_serializer, schema, made)
        if not (data is None or isinstance(data, bytes)):
            raise InvalidArgument(f"a value is bytes, not {type(data).__name__}: name a serializer")
        stream = self.get_topic_name()
        pairs = list(made.items() if isinstance(made, Mapping) else made or ())
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
        return Sent(stream, timestamp or time.time())

    def send_soon(self, **_: Any) -> Any:
        """Raises: InvalidArgument."""
        refuse("topic.send_soon", "await topic.send(…)")

    async def publish_message(self, *_: Any, **__: Any) -> Any:
        """Raises: InvalidArgument."""
        refuse("topic.publish_message", "await topic.send(…)")

    async def declare(self) -> None:
        """Raises: InvalidArgument."""
        refuse("topic.declare", "make streams with `anabranch stream create`")


@refusing("table", TABLE)
class Table(Store):
    """State by key, changed in the commit of the events. Only agents may use it, with their event's key.

    Without ``concurrency``, an agent may use other keys of the same task, too. `items` returns rows of the event's
    task, in the order of their keys, which are bytes.
    """

    def __init__(
        self, app: Any, name: str, *, default: Callable[[], Any] | None = None, key_type: Any = None,
        value_type: Any = None, key_serializer: Any = None, value_serializer: Any = None,
        help: str | None = None,  # noqa: A002  # as Faust calls it
    ) -> None:  # fmt: skip
        def dumps(value: Any) -> bytes:
            data = app.serializers.dumps_value(value_type, value, serializer=value_serializer)
            if not isinstance(data, bytes):
                raise InvalidArgument(f"table {name}: name a serializer for {type(value).__name__}")
            return data

        def loads(data: bytes) -> Any:
            return app.serializers.loads_value(value_type, data, serializer=value_serializer)

        super().__init__(name, Codec(dumps, loads))
        self.default = default
        self.help = help or ""
        self._app = app
        self._key = key_type, key_serializer

    def _place(self, at: HandlerContext, key: Any) -> tuple[int, bytes]:
        if type(key) is type(at.name) and key == at.name and at.key is not None:
            key = at.key  # the event's own bytes; a serializer might encode the key differently
        elif not isinstance(key, bytes | str):
            typ, serializer = self._key
            key = self._app.serializers.dumps_key(typ, key, serializer=serializer)
        return super()._place(at, key)

    def __getitem__(self, key: Any) -> Any:
        """The value, or what ``default`` returns, which is not stored. Raises: KeyError (there is no default)."""
        try:
            return super().__getitem__(key)
        except KeyError:
            if self.default is None:
                raise
            return self.default()

    pop = MutableMapping.pop
    setdefault = MutableMapping.setdefault
    update = MutableMapping.update


class Program(Processor):
    """The processor of an app: its agents are its handlers."""

    def add_table(self, table: Table) -> Table:
        found: Table = self._add(table.name, table)
        return found

    def check(self) -> Sequence[str]:
        """Check that the program can run, and return the names of its inputs. Raises: InvalidArgument."""
        if not self.inputs:
            raise InvalidArgument(
                f"app {self.name} has no agent: decorate one with @app.agent(topic)"
            )
        return list(self.inputs)


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

    async def on_start(self) -> None:
        loop = asyncio.get_running_loop()
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

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        app = self._app

        def handlers(
            program: Any, stores: Sequence[str], metrics: Numbers, stop: threading.Event
        ) -> AgentHandlers:
            agents = list(app.agents.values())
            self._handlers = AgentHandlers(
                program, stores, metrics, stop, loop=loop, agents=agents, strays=app.strays
            )
            return self._handlers

        try:
            for agent in app.agents.values():
                for stream in agent.get_topic_names():
                    app.program.input(stream)
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


@refusing("app", APP)
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
        for option in _OPTIONS:
            if option in options:
                refuse(
                    f"App({option}=)", "commits, streams and stores are anabranch's: leave it out"
                )
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
            Agent=Agent, Stream=Stream, Topic=Topic, **options,
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

    def close_client(self) -> None:
        """Close the app's client, if it was used."""
        with self._client_lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def add_output(self, stream: str) -> None:
        """Add a stream that agents write to. Raises: CrossScope, UnknownScope, UnknownStream."""
        self.client.check_outputs(self.program.name, (stream,))
        self.program.outputs[stream] = stream_of(stream, None, None, "raise")

    def write_alone(self, stream: str, event: Written) -> None:
        """Write an event in a transaction of its own. Raises: as `Client.begin` and `Transaction.commit`."""
        with self.client.begin(split_stream(stream)[0]) as txn:
            txn.write_many(stream, [event])
            txn.commit()

    def Table(self, name: str, *, window: Any = None, **options: Any) -> Any:
        """Add a table, see `anabranch.faust.app.Table`. Raises: InvalidArgument."""
        if window is not None:
            refuse("app.Table(window=)", "use anabranch.Processor and its windows()")
        return self.program.add_table(Table(self, name, **options))

    def is_leader(self) -> bool:
        """Whether this process has task 0. For ``on_leader=True`` it is a hint: two may believe it for a while."""
        return 0 in self.engine.tasks

    async def on_start(self) -> None:
        """Start as Faust does, without a consumer."""
        self.finalize()

    async def on_shutdown(self) -> None:
        """Close the client after all services have ended."""
        self.close_client()

    async def _wait_for_table_recovery_completed(self) -> bool:
        return False
