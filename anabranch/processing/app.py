"""`anabranch.Processor`: declares the inputs, outputs, stores, timers and handlers of a processor."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from anabranch.errors import InvalidArgument
from anabranch.processing.aggregates import Aggregate
from anabranch.processing.batch import current_context
from anabranch.processing.joins import Join, KeyJoin, Pair, Within
from anabranch.processing.plain import Cluster
from anabranch.processing.program import (
    Input,
    Output,
    Program,
    Registered,
    TimerHandler,
    check_function,
    check_plain,
    is_async,
)
from anabranch.processing.spans import Expiring, Latest, Sessions, Sliding, Versions
from anabranch.processing.stores import Store
from anabranch.processing.tables import SharedReplica, SharedTable
from anabranch.processing.timers import Clock, Periodic, Timed, Timer, Windows
from anabranch.protocol import defaults
from anabranch.protocol.legal_names import PLAIN, check_input, check_type, split_stream
from anabranch.protocol.limits import copied_name
from anabranch.reading.history import Start
from anabranch.topics.names import stream_topic
from anabranch.values import Codec, Stream, codec_of, stream_of

if TYPE_CHECKING:
    from anabranch.tables.indexes import Index

F = TypeVar("F", bound=Callable[..., Any])
_MOST = 1 << 30
_MOST_THREADS = 64


class Processor(Program):
    """A program that reads streams, keeps state and writes streams; one commit takes a step of all three.

        app = anabranch.Processor("nyc/delays")
        flights, totals = app.input("nyc/flights", value=json), app.store("totals", value=json)

        @app.on(flights)
        def count(event):
            totals[event.key] = totals.get(event.key, 0) + 1

    ``name``: ``scope/name``. ``tasks``: a power of two, the most workers that share the work; it never changes.
    ``commit_interval``: seconds between commits; 0: commit at once. ``cut_bytes``: about how many bytes of events
    one commit has. An input transaction that is bigger, or is handled for more than 5 seconds, is split, unless
    ``whole`` is set. ``dead_letter``: the stream for
    events, timers and windows whose handler still fails after all ``retries``; with None the worker stops.
    ``concurrency``: how many ``async`` handlers run concurrently. ``threads``: how many threads a worker may have;
    with more than one, a slow event delays its own task alone. ``start``: where a new processor begins, as in
    `Client.read`. ``on_lost``: what to do if retention has removed events that were not consumed: 'stop' raises
    `SnapshotExpired`; 'skip' counts the affected transactions and skips them whole, in all inputs. ``idle``: after
    this many seconds without events, a task takes the event time of its worker's other tasks. ``ahead``: an event
    whose timestamp is more than this many seconds after its commit (of a plain topic: after the worker's clock) is
    late for all windows, and does not advance event time.
    """

    def __init__(
        self,
        name: str,
        *,
        tasks: int = defaults.TASKS,
        commit_interval: float = defaults.COMMIT_INTERVAL_S,
        cut_bytes: int = defaults.CUT_BYTES,
        whole: bool = False,
        dead_letter: str | None = None,
        retries: int = defaults.HANDLER_RETRIES,
        concurrency: int = defaults.HANDLER_CONCURRENCY,
        threads: int = defaults.HANDLER_THREADS,
        start: Start = "begin",
        on_lost: Literal["stop", "skip"] = "stop",
        idle: float | None = None,
        ahead: float | None = None,
    ) -> None:
        """Raises: InvalidArgument."""
        super().__init__(name)
        for what, value, most in (
            ("tasks", tasks, 1 << 10),
            ("cut_bytes", cut_bytes, _MOST),
            ("concurrency", concurrency, _MOST),
            ("threads", threads, _MOST_THREADS),
        ):
            check_type(what, value, int)
            if not 1 <= value <= most:
                raise InvalidArgument(f"{what}={value}: 1 to {most:,}")
        if not 0 <= commit_interval <= 3600 or not 0 <= retries <= 1000:
            raise InvalidArgument("commit_interval is 0 to 3600 seconds, retries 0 to 1000")
        if on_lost not in ("stop", "skip"):
            raise InvalidArgument(f"on_lost={on_lost!r} is 'stop' or 'skip'")
        if idle is not None and not 0 < idle < 1e9:
            raise InvalidArgument(f"idle={idle} is seconds, above 0")
        if ahead is not None and not 0 <= ahead < 1e9:
            raise InvalidArgument(f"ahead={ahead} is seconds, from 0")
        self.on_lost, self.idle, self.ahead = on_lost, idle, ahead
        self.tasks = tasks
        self.commit_interval = commit_interval
        self.whole = whole
        self.cut_bytes = _MOST if whole else cut_bytes
        self.dead_letter = dead_letter
        self.retries = retries
        self.concurrency = concurrency
        self.threads = threads
        self.start: Start = start
        if dead_letter is not None:
            self._writes(dead_letter, None, None)

    def input(self, stream: str, *, key: Any = None, value: Any = None) -> Input:
        """Read a stream, of any scope. ``key``, ``value``: codecs, as of `Client.stream`.

        Raises: InvalidArgument (also if an earlier call named the stream with other codecs).
        """
        return self._input(stream, key, value, stream_topic(stream))

    def topic(
        self,
        topic: str,
        *,
        key: Any = None,
        value: Any = None,
        bootstrap: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Input:
        """Read a plain Kafka topic, of any cluster. Task n reads partition n, whatever keys it has.

        ``bootstrap``, ``config``: the cluster, the same for all topics; by default the processor's own. Native
        transactions are not kept whole. A processor reads plain topics or streams, not both. With plain topics, all
        of its stores are ``local``, as in `store`. Raises: InvalidArgument.
        """
        check_input(PLAIN + topic)
        cluster = Cluster(bootstrap, dict(config or {}))
        if self.cluster not in (None, cluster):
            raise InvalidArgument(f"{topic} is of another cluster than the topics before")
        self.cluster = cluster
        return self._input(PLAIN + topic, key, value, topic)

    def output(self, stream: str, *, key: Any = None, value: Any = None) -> Output:
        """Write a stream. Workers start only if its scope is in the control partition of the processor's scope.

        ``key``, ``value``: codecs, as of `Client.stream`. Raises: InvalidArgument.
        """
        return Output(self._writes(stream, key, value), text_keys=key is None)

    def store(
        self, name: str, *, value: Any = None, local: bool = False, ttl: float | None = None,
        into: Aggregate | None = None,
    ) -> Store:  # fmt: skip
        """Add state by key, kept in RocksDB and in the processor's state stream.

        A key belongs to the task of its hash, as events do. ``local``: each task has rows of its own, and its
        handlers may use any key. ``ttl``: a row is not found any more when the event time has advanced this many
        seconds since the row was last set. ``into``: what `Store.add` computes; values are then JSON by default.

        Raises: InvalidArgument.
        """
        codec = codec_of(_or_json(value, into), name)
        if ttl is None:
            store = Store(name, codec, local=local, into=into)
        else:
            store = Expiring(name, codec, local=local, into=into, ttl=ttl)
        self._add(name, store)
        return store

    def table(self, name: str, *, key: Any = None, value: Any = None) -> SharedTable:
        """Use a table that others write, too, in the control partition of the processor's scope.

        A batch reads the table with locks, at one snapshot, and the batch's commit writes rows of the table. If
        others have written what the batch read, the batch has no effect, and is handled again. Workers keep a
        replica of the table in their folders. ``key``, ``value``: codecs, as of `Client.stream`. Raises:
        InvalidArgument.
        """
        found = stream_of(name, key, value, "raise")
        if name in self.tables:
            raise InvalidArgument(f"{name} is a table of this processor already")
        table = self.tables[name] = SharedTable(found, text_keys=key is None)
        return table

    def replica(self, *tables: str, index: Mapping[str, Index] | None = None) -> SharedReplica:
        """Read tables without locks, as by `Client.replica`.

        The worker opens it in its folder, for all of its tasks, and closes it. Raises: InvalidArgument.
        """
        if not tables:
            raise InvalidArgument("a replica is of at least one table: name it")
        for name in tables:
            split_stream(name)
        found = SharedReplica(tables, index)
        self.replicas.append(found)
        return found

    def timer(self, name: str, *, wall: bool = False) -> Callable[[TimerHandler], Timer]:
        """Decorate a function of (key, due) that is called once, in a commit, when a time set for a key has come.

        Times are event times of the key's task, in Unix milliseconds. A task's event time is the highest timestamp
        of its events; it advances at the end of each input transaction, and by ``idle``. ``wall``: use the worker's
        clock instead.

        Raises: InvalidArgument.
        """

        def register(call: TimerHandler) -> Timer:
            check_plain(f"timer {name}:", call)
            timer: Timer = self._add(name, Timer(name, call, wall=wall))
            return timer

        return register

    def every(
        self, name: str, seconds: float, *, wall: bool = False
    ) -> Callable[[Callable[[int], Any]], Periodic]:
        """Decorate a function of a time (Unix milliseconds) that is called in each task, once for each period.

        The call comes when the task's event time passes a multiple of the period; if that passes several at once,
        for the last of them. ``wall``: by the worker's clock instead. The function may use all rows of its task.

        Raises: InvalidArgument.
        """

        def register(call: Callable[[int], Any]) -> Periodic:
            check_plain(f"every {name}:", call)
            found: Periodic = self._add(name, Periodic(name, call, seconds, wall=wall))
            return found

        return register

    def clock(self) -> Clock:
        """Let handlers ask for the event time of their task: ``clock.event_time``, Unix milliseconds."""
        self.timers.add("")  # no store has this name
        return Clock()

    def windows(
        self, name: str, size: float, *, every: float | None = None, grace: float = 0.0,
        value: Any = None, late: Output | None = None, into: Aggregate | None = None,
    ) -> Windows:  # fmt: skip
        """Add state by key and window of event time. Windows are ``size`` seconds long.

        A window begins each ``every`` seconds (default: ``size``), and closes ``grace`` seconds after its end.
        Events that come later are counted, and written to ``late`` with their key and value unchanged. ``into``:
        what `Windows.add` computes; values are then JSON by default.

        Raises: InvalidArgument.
        """
        codec = codec_of(_or_json(value, into), name)
        windows: Windows = self._add(
            name, Windows(name, codec, size, every, grace, late, into=into)
        )
        return windows

    def sessions(
        self, name: str, gap: float, *, grace: float = 0.0, value: Any = None,
        merge: Callable[[Any, Any], Any] | None = None, into: Aggregate | None = None,
        late: Output | None = None,
    ) -> Sessions:  # fmt: skip
        """Add state by key and session. Events of a key less than ``gap`` seconds apart are in one session.

        A session closes ``gap`` and ``grace`` seconds after its last event. A late event may join two sessions:
        ``merge`` gives the value of both, the earlier one first; with ``into`` it is known. An event that is late
        for all open sessions, and too late for one of its own, goes to ``late``.

        Raises: InvalidArgument.
        """
        codec = codec_of(_or_json(value, into), name)
        found: Sessions = self._add(
            name, Sessions(name, codec, gap, grace=grace, late=late, merge=merge, into=into)
        )
        return found

    def sliding(
        self, name: str, size: float, *, grace: float, into: Aggregate, value: Any = None,
        late: Output | None = None,
    ) -> Sliding:  # fmt: skip
        """Add windows by key that end at each event's time, and have the events of ``size`` seconds up to then.

        A window closes when the event time is later than its end by more than ``grace`` seconds. An event whose own
        window is closed goes to ``late``. ``into``: what the windows compute.

        Raises: InvalidArgument.
        """
        codec = codec_of(_or_json(value, into), name)
        found: Sliding = self._add(
            name, Sliding(name, codec, size, grace=grace, late=late, into=into)
        )
        return found

    @overload
    def latest(self, name: str, source: Input) -> Latest: ...

    @overload
    def latest(
        self, name: str, source: Input, *, keep: float, late: Output | None = None
    ) -> Versions: ...

    def latest(
        self, name: str, source: Input, *, keep: float | None = None, late: Output | None = None
    ) -> Latest | Versions:
        """Keep the last value of each key of an input, for joins: ``customers.get(event.key)``.

        An event without a value deletes its key. Values are ordered by their commits. ``keep``: keep
        the values of this many seconds of event time, and order them by event time:
        ``get(key, at=event.timestamp)`` is the value as of then. Later changes than ``keep`` go to ``late``.

        Handlers of the same input that are declared earlier see the value before. Raises: InvalidArgument.
        """
        if keep is None:
            if late is not None:
                raise InvalidArgument(f"latest {name}: without keep= nothing is late")
            found: Latest | Versions = Latest(name, source)
        else:
            found = Versions(name, source, keep, late)
        self._add(name, found)
        self.on(source)(found.note)
        return found

    def join(
        self, name: str, left: Input, right: Input, *, within: float | tuple[float, float],
        kind: Literal["inner", "left", "outer"] = "inner", grace: float = 0.0,
        late: Output | None = None,
    ) -> Callable[[Pair], Join]:  # fmt: skip
        """Decorate a function of a left and a right event with the same key, called for each pair near in time.

        ``within``: most seconds between both event times; a pair of numbers: how much earlier, and how much later,
        the right event may be. Each pair is found once, when the second one comes. ``kind`` 'left', 'outer': an
        event that has found no other is given with None, when it can find none any more, ``grace`` seconds after
        the time. Events that come later than that go to ``late``.

        Raises: InvalidArgument.
        """

        def register(call: Pair) -> Join:
            within_ms = Within.of(within, grace, kind)
            found: Join = self._add(name, Join(name, left, right, within_ms, late, call))
            self.on(left)(found.take_left)
            self.on(right)(found.take_right)
            return found

        return register

    def join_by_key(
        self, name: str, left: Input, right: Input, *, by: Callable[[Any], Any], via: str
    ) -> Callable[[Callable[[Any, Any, Any], Any]], KeyJoin]:
        """Decorate a function of (key, left row, right row), called when a row of either table has changed.

        The inputs are tables: events are changes of rows, and one without a value deletes a row. ``by``: the right
        key that a left row names, or None. The right row is None if it does not exist; both are None after the left
        row was deleted. ``via``: a stream for this join alone, which has to be created as other outputs.

        Raises: InvalidArgument.
        """

        def register(call: Callable[[Any, Any, Any], Any]) -> KeyJoin:
            if via in self.inputs or via in self.outputs:
                raise InvalidArgument(f"join {name}: {via} is a stream of this program already")
            ways = self.input(via), self.output(via)
            self.inner.add(via)
            found: KeyJoin = self._add(name, KeyJoin(name, left, right, ways, by, call))
            self.on(left)(found.take_left)
            self.on(right)(found.take_right)
            self.on(ways[0])(found.take_sent)
            return found

        return register

    def rekey(
        self, source: Input, stream: str, key: Callable[[Any], Any], *, codec: Any = None
    ) -> Input:
        """Write the events of an input to a stream under another key, and read them there: an input for handlers.

        ``key``: the new key of an event; None leaves the event out. ``stream``: has to be created as other outputs.
        ``codec``: of the new keys, as ``key=`` of `output`; without one they are bytes, or text. Value, headers and
        timestamp stay. If the input has no other handler, its events do not advance the event time, since they come
        again.

        Raises: InvalidArgument.
        """
        check_plain(f"the key of {stream}:", key)
        target = self.output(stream, key=codec)

        def pass_on(event: Any) -> None:
            new = key(event)
            if new is not None:
                at = current_context()
                headers = [(copied_name(name), value) for name, value in event.headers]
                target.write(at.value, key=new, headers=headers)

        again = self._input(stream, codec, None, stream_topic(stream), source.codec)
        self._register(source, pass_on, passes_on=True)
        return again

    def on(self, *inputs: Input, batch: bool = False) -> Callable[[F], F]:
        """Decorate a handler of these inputs' events: a function, plain or ``async``, of an `anabranch.Event`.

        The event's key and value are decoded. Events of a key come in order. If the handler raises, its changes are
        undone. ``batch``: the handler gets a pyarrow.RecordBatch with events of one input transaction, in the
        columns of the Spark source; values are bytes.

        Raises: InvalidArgument.
        """
        if not inputs:
            raise InvalidArgument("name the inputs that the handler is for: @app.on(flights)")

        def register(call: F) -> F:
            if batch:
                check_plain("the handler of batches", call)
            check_function("the handler", call)
            for one in inputs:
                self._register(one, call, batch=batch)
            return call

        return register

    def run(
        self,
        bootstrap: str | None = None,
        *,
        folder: str | Path | None = None,
        standby: bool = False,
        http: str | None = None,
        **options: Any,
    ) -> None:
        """Run a worker in this process until SIGTERM or Ctrl-C. ``options``: as for `anabranch.connect`.

        ``folder``: keeps the stores of this one worker; without it, each start reads all state from the log.
        ``standby``: keep warm copies of other workers' tasks. ``http``: HOST:PORT at which to serve `/metrics`,
        `/live` and `/ready`.
        """
        from anabranch.client.connect import connect
        from anabranch.processing.run import run_worker

        with connect(bootstrap, **options) as client:
            run_worker(self, client, folder=folder, standby=standby, http=http)

    def _register(
        self,
        source: Input,
        call: Callable[..., Any],
        *,
        batch: bool = False,
        passes_on: bool = False,
    ) -> None:
        some = self.handlers.setdefault(source.stream, [])
        some.append(Registered(call, is_async(call), batch, passes_on))
        if len({each.batch for each in some}) > 1:
            raise InvalidArgument(f"handlers of {source.stream} take events, or all batches")

    def _input(
        self, name: str, key: Any, value: Any, topic: str, codec: Codec | None = None
    ) -> Input:
        """An input. ``codec``: of its values, in place of ``value``."""
        made = Input(name, codec_of(key, topic, of_keys=True), codec or codec_of(value, topic))
        found = self.inputs.setdefault(name, made)
        if (found.key.spec, found.codec.spec) != (made.key.spec, made.codec.spec):
            raise InvalidArgument(
                f"{name} is an input already, with another codec: all handlers of an input get the same values"
            )
        return found

    def _writes(self, stream: str, key: Any, value: Any) -> Stream[Any, Any]:
        made = self.outputs[stream] = stream_of(stream, key, value, "raise")
        return made

    def _add(self, name: str, store: Any) -> Any:
        check_type("a store's name", name, str)
        if not name or name in self.stores:
            raise InvalidArgument(f"{name!r}: each store, timer and windows has a name of its own")
        if isinstance(store, Timed):
            if store.late is not None:
                self._check_late(name, store.late)
            self.timers.add(name)
        self.stores[name] = store
        return store

    def _check_late(self, name: str, late: object) -> None:
        if not isinstance(late, Output) or late.stream not in self.outputs:
            raise InvalidArgument(f"late= of {name} is {late!r:.100}: give an app.output(…)")


def _or_json(value: Any, into: Aggregate | None) -> Any:
    """The codec of values that ``into`` computes. Raises: InvalidArgument (it is no aggregate)."""
    if into is not None and not isinstance(into, Aggregate):
        raise InvalidArgument(f"into={into!r:.100}: an aggregate, such as agg.count()")
    return json if value is None and into is not None else value
