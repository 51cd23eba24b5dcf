"""`Driver`: a processor's program on events in memory, without brokers, RocksDB and waiting.

The driver runs a worker's own `WorkBatch`, `Handlers` and timers. In place of the rest are: a queue of input
transactions, rows and tables in dicts, lists of outputs, and a clock that only `Driver.advance` moves.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self

import numpy as np

from anabranch.client.arrow import columns_of
from anabranch.client.receipts import RECORD_OVERHEAD
from anabranch.errors import IllegalState, InvalidArgument
from anabranch.processing.batch import BatchTables, Limits, WorkBatch, Written
from anabranch.processing.commits import runs_of
from anabranch.processing.handlers import Handlers
from anabranch.processing.program import Program
from anabranch.processing.stores import after
from anabranch.protocol.hybrid_time import from_us, to_ms
from anabranch.protocol.legal_names import PLAIN, is_plain, state_stream
from anabranch.protocol.limits import Room, check_event, check_headers
from anabranch.protocol.partitioner import task_of
from anabranch.reading.slices import EVENT_BYTES, Piece, count_within
from anabranch.testing.rows import MemoryTables, SortedRows
from anabranch.types import Event, Headers
from anabranch.values import RAW, event_decoder

START_MS = 1_750_000_000_000  # where a driver's clock begins by default: in June 2025
_MESSAGE_BYTES = 1_048_588  # `max.message.bytes` of a topic with a broker's defaults
_ENDLESS = 100_000  # commits after one call


class InputEvent(NamedTuple):
    """An event of an input. Its codecs encode ``key`` and ``value``; bytes and None stay as they are.

    ``timestamp``: Unix milliseconds; None: the driver's clock. ``partition``: of a plain topic.
    """

    stream: str
    value: Any
    key: Any = None
    timestamp: int | None = None
    headers: Headers = ()
    partition: int = 0


class MemoryRows:
    """A worker's rows in memory: `anabranch.processing.batch.TaskRows`."""

    def __init__(self, tasks: int) -> None:
        self.due: dict[tuple[int, bytes], int] = {}
        self.known: dict[bytes, int] = {}
        self.by_task = [SortedRows() for _ in range(tasks)]

    def get(self, task: int, row: bytes, *, keep: bool = True) -> bytes | None:
        return self.by_task[task].get(row)

    def scan(self, task: int, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        return self.by_task[task].scan(low, high)


class StoreView(Mapping[Any, Any]):
    """The committed rows of a store as of one moment. A key may be given as text."""

    def __init__(self, rows: Mapping[Any, Any]) -> None:
        self._rows = rows

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, tuple):
            return self._rows[(_raw(key[0]), *key[1:])]
        return self._rows[_raw(key)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return repr(self._rows)


class Driver:
    """Runs a processor's program in memory: each input transaction at once, in a commit of its own.

        driver = anabranch.testing.Driver(app)
        driver.send("nyc/flights", {"delay": 5}, key="N14228")
        assert driver.outputs("nyc/hours")[0].value == {"n": 1}
        assert driver.store("totals")["N14228"] == 1

    Keys belong to the processor's tasks as in a worker, and one driver has all tasks. Outputs that are also inputs
    come back as input. After an error nothing of the failed commit is there, and the next call tries it again, as
    a worker that is started again does. Use it as a context manager if handlers are ``async``.
    """

    def __init__(self, app: Program, *, now: int = START_MS) -> None:
        """``now``: where the clock begins, Unix milliseconds. Raises: InvalidArgument (`Program.check`)."""
        app.check()
        self._app = app
        self._now_us = now * 1000
        self._now_hybrid = from_us(self._now_us)
        self._timestamp = 0  # the last commit timestamp
        self._rows = MemoryRows(app.tasks)
        replicated = (name for one in app.replicas for name in one.tables)
        self._tables = MemoryTables([*app.tables, *replicated], frozenset(app.inputs))
        for one in app.replicas:
            one.opened = self._tables
        self._limits = Limits(state_stream(app.name), _default_rooms)
        self._limits.learn({*app.outputs, *app.tables, self._limits.state})
        self._written: dict[str, list[Event]] = {stream: [] for stream in app.outputs}
        self._offsets = Counter[tuple[str, int]]()  # of the next event of an input
        self._queue: deque[list[Piece]] = deque()  # input transactions, or what is left of one
        self._uncommitted: list[
            Piece
        ] = []  # input that was read, and that `Handlers` may have in part
        self._handlers = self._new_handlers()

    def send(
        self, stream: str, value: Any, key: bytes | str | None = None, timestamp: int | None = None,
        headers: Headers = (), *, partition: int = 0,
    ) -> None:  # fmt: skip
        """Handle an input transaction of one event. Arguments as of `InputEvent`. Raises: as `transaction`."""
        self.transaction([InputEvent(stream, value, key, timestamp, headers, partition)])

    def transaction(self, events: Iterable[InputEvent | tuple[Any, ...]]) -> None:
        """Handle an input transaction. Its events are `InputEvent` records, or tuples of the same fields.

        Events come to handlers by input, and in each input in the given order; those of a plain topic are no
        transaction. Raises: InvalidArgument, HandlerFailed, and other errors that stop a worker.
        """
        timestamp = self._next_timestamp()
        self._queue.append(self._pieces([self._event(one, timestamp) for one in events]))
        self._run()

    def advance(self, seconds: float) -> None:
        """Move the clock, fire timers of the wall clock, and advance idle tasks. Raises: as `transaction`."""
        self._now_us += round(seconds * 1e6)
        self._now_hybrid = from_us(self._now_us)
        self._run()

    @property
    def now(self) -> int:
        """The clock, in Unix milliseconds."""
        return self._now_us // 1000

    def outputs(self, stream: str) -> list[Any]:
        """All events written to a stream: `Event`, decoded by the codecs of `Processor.output`."""
        output = self._app.outputs.get(stream)
        if output is None:
            raise InvalidArgument(f"{stream} is no output: {', '.join(self._app.outputs)}")
        decode = event_decoder(output.key, output.value)
        return [event if decode is None else decode(event) for event in self._written[stream]]

    def dead_letters(self) -> list[Event]:
        """The events of the dead-letter stream, undecoded; the headers ``error`` and ``from`` say why."""
        return list(self._written[self._app.dead_letter]) if self._app.dead_letter else []

    def store(self, name: str, task: int | None = None) -> StoreView:
        """The committed rows of a store. A timer's values are its times; the keys of windows are (key, start).

        ``task``: only its rows; needed for a local store, if the processor has several tasks.
        """
        store = self._app.stores.get(name)
        if store is None:
            raise InvalidArgument(f"{name} is no store: {', '.join(self._app.stores)}")
        if store.local and task is None and self._app.tasks > 1:
            raise InvalidArgument(
                f"{name} is local: each task has rows of its own, so name the task"
            )
        size, end = len(store.prefix), after(store.prefix)
        tasks = range(self._app.tasks) if task is None else (task,)
        return StoreView(
            dict(
                store.entry(row[size:], data)
                for each in tasks
                for row, data in self._rows.scan(each, store.prefix, end)
            )
        )

    def put(self, table: str, key: bytes | str, value: Any) -> None:
        """Write a row of a table, as others do, in a commit of its own. None deletes it. Raises: InvalidArgument.

        ``value``: encoded by the codec of `Processor.table`; bytes stay as they are.
        """
        if value is not None and not isinstance(value, bytes):
            if table not in self._app.tables:
                raise InvalidArgument(f"{table} is a replica's: give its rows as bytes")
            value = self._app.tables[table].stream.encode(None, value)[1]
        self._tables.write(table, {_raw(key): value}, self._next_timestamp())

    def table(self, name: str) -> StoreView:
        """The committed rows of a table of the program, by keys as bytes or text, decoded."""
        table = self._app.tables.get(name)
        if table is None:
            raise InvalidArgument(f"{name} is no table: {', '.join(self._app.tables)}")
        rows = self._tables.snapshot().scan(name)
        return StoreView({key: table.stream.decode_value(key, data) for key, data in rows})

    def close(self) -> None:
        """Cancel the asyncio tasks that handlers left, and free their loop."""
        self._handlers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- input ----------------------------------------------------------------------------------------

    def _event(self, given: InputEvent | tuple[Any, ...], timestamp: int) -> tuple[Event, int]:
        """An event of an input, and its task."""
        if type(given) is not InputEvent:
            given = InputEvent(*given)
        stream, value, key, time, headers, partition = given
        name = stream if stream in self._app.inputs else PLAIN + stream
        if name not in self._app.inputs:
            raise InvalidArgument(f"{stream} is no input: {', '.join(self._app.inputs)}")
        app_input = self._app.inputs[name]
        if value is not None and not isinstance(value, bytes):
            value = app_input.codec.encode(value)
        if key is not None and not isinstance(key, bytes):
            key = key.encode() if app_input.key is RAW else app_input.key.encode(key)
        check_event(key, value, time)
        time = self.now if time is None else time
        offset, task = self._place(name, partition, key)
        event = _event(name, (value, key, headers, time), timestamp, (partition, offset))
        if is_plain(name):  # a position is an offset, and there are no transactions
            event = event._replace(txn_id=None, commit_timestamp=offset)
        return event, task

    def _written_back(self, event: Event) -> tuple[Event, int]:
        """An event of an output that is an input, and its task."""
        offset, task = self._place(event.stream, event.partition, event.key)
        return event._replace(offset=offset), task

    def _place(self, stream: str, partition: int, key: bytes | None) -> tuple[int, int]:
        """The offset of an input's next event, and its task as readers find it."""
        tasks, plain = self._app.tasks, is_plain(stream)
        if plain and not 0 <= partition < tasks:
            raise InvalidArgument(f"partition {partition} of {stream}: there are {tasks} tasks")
        offset = self._offsets[stream, partition]
        self._offsets[stream, partition] = offset + 1
        if plain:
            return offset, partition
        # Events without a key are spread over the tasks of their segment; a stream here has one segment.
        return offset, offset % tasks if key is None else task_of(key, tasks)

    def _pieces(self, given: Iterable[tuple[Event, int]]) -> list[Piece]:
        """The pieces of one input transaction, or of records of plain topics, as a worker's reader makes them."""
        found: dict[tuple[str, int], Piece] = {}
        for event, task in given:
            stream, commit = event.stream, event.commit_timestamp
            if is_plain(stream) and not self._app.timers:
                commit = event.partition  # all of a partition in one piece
            known = found.get((stream, commit))
            if known is None:
                found[stream, commit] = Piece(stream, event.commit_timestamp, [event], [task])
            else:
                known.events.append(event)  # type: ignore[union-attr]
                known.tasks.append(task)
        if len(found) == 1:
            return list(found.values())
        order = list(self._app.inputs)
        pieces = sorted(found.values(), key=lambda piece: order.index(piece.stream))
        return _by_time(pieces) if is_plain(pieces[0].stream) and self._app.timers else pieces

    def _read(self) -> list[Piece]:
        """The next input transaction, or a part that is about as big as a commit may be."""
        if not self._queue:
            return []
        taken, rest = _cut(self._queue.popleft(), self._app.cut_bytes)
        if rest:
            self._queue.appendleft(rest)
        self._uncommitted = taken
        return taken

    # -- commits --------------------------------------------------------------------------------------

    def _new_handlers(self) -> Handlers:
        handlers = Handlers(self._app, tuple(self._app.stores), pauses=False, part_s=math.inf)
        handlers.resume(self._rows, range(self._app.tasks))
        return handlers

    def _run(self) -> None:
        """Handle and commit until nothing is left."""
        tasks = range(self._app.tasks)
        for _ in range(_ENDLESS):
            batch = WorkBatch(self._rows, self._app.tasks, self._limits)
            if self._app.tables:
                batch.tables = BatchTables(self._tables, 0)
            try:
                self._handlers.step(batch, tasks, self._wall, self._read)
            except BaseException:
                self._handlers.close()
                self._handlers = self._new_handlers()
                if self._uncommitted:  # the next call begins with it
                    self._queue.appendleft(self._uncommitted)
                    self._uncommitted = []
                raise
            if not self._handlers.close_batch(batch):
                return
            self._commit(batch)
            if not (self._app.timers or self._queue or self._uncommitted):
                return
        raise IllegalState(
            f"{_ENDLESS:,} commits, and still more to do: a timer sets itself for a time that is past, or "
            "events go round between an output and an input"
        )

    def _wall(self) -> float:
        return self._now_us / 1e6

    def _next_timestamp(self) -> int:
        self._timestamp = max(self._timestamp + 1, self._now_hybrid)
        return self._timestamp

    def _commit(self, batch: WorkBatch) -> None:
        self._uncommitted = batch.left
        for task, rows in batch.rows.items():
            self._rows.by_task[task].change(rows)
        timestamp = self._next_timestamp()
        if batch.tables is not None:
            for table, changed in batch.tables.rows.items():
                self._tables.write(table, changed, timestamp)
        back: list[tuple[Event, int]] = []
        for stream, some in batch.outputs.items():
            written = self._written[stream]
            first = len(written)
            for one in _events_of(batch, stream, some):
                place = 0, len(written)
                written.append(_event(stream, one, timestamp, place))
                if stream in self._tables and one[1] is not None:  # a replica of an output
                    self._tables.write(stream, {one[1]: one[0]}, timestamp)
            if stream in self._app.inputs:
                back += map(self._written_back, written[first:])
        if back:
            self._queue.append(self._pieces(back))


def _event(stream: str, written: Written, commit_timestamp: int, place: tuple[int, int]) -> Event:
    """An event as a reader sees it. ``place``: its partition and offset."""
    value, key, headers, time = written
    ms = to_ms(commit_timestamp) if time is None else time
    txn_id = commit_timestamp.to_bytes(16, "big")
    pairs = check_headers(headers) or []
    return Event(stream, key, value, list(pairs), ms, txn_id, commit_timestamp, 0, *place)


def _events_of(batch: WorkBatch, stream: str, written: list[Any]) -> Iterator[Written]:
    for run in runs_of(batch, stream, written):
        if isinstance(run, list):
            yield from run
        else:
            for columns in columns_of(run):
                yield from columns.events()


def _by_time(pieces: list[Piece]) -> list[Piece]:
    """Records of plain topics, each task's lowest timestamp first, and each topic's in their order."""
    queues: dict[tuple[str, int], deque[Piece]] = {}
    for piece in pieces:
        queues.setdefault((piece.stream, piece.tasks[0]), deque()).append(piece)
    found: list[Piece] = []
    while queues:
        place = min(queues, key=lambda one: queues[one][0].events[0].timestamp)  # type: ignore[index]
        found.append(queues[place].popleft())
        if not queues[place]:
            del queues[place]
    return found


def _cut(commit: list[Piece], room: int) -> tuple[list[Piece], list[Piece]]:
    """About ``room`` bytes of an input transaction, and the rest. An event is never cut."""
    if len(commit) == 1 and len(commit[0].events) == 1:
        return commit, []
    sizes = [list(map(_size, piece.events)) for piece in commit]
    if sum(map(sum, sizes)) <= room:
        return commit, []
    taken: list[Piece] = []
    for at, piece in enumerate(commit):
        if room < 0:
            return taken, commit[at:]
        ends = np.cumsum(sizes[at])
        count = count_within(ends, room)
        room -= int(ends[count - 1])
        if count < len(ends):
            first, rest = piece.split(count)
            return [*taken, first], [rest, *commit[at + 1 :]]
        taken.append(piece)
    return taken, []


def _size(event: Event) -> int:
    return len(event.key or b"") + len(event.value or b"") + EVENT_BYTES


def _default_rooms(streams: Iterable[str]) -> dict[str, Room]:
    """The limits of streams whose settings are a broker's defaults."""
    return {stream: Room(stream, _MESSAGE_BYTES - RECORD_OVERHEAD) for stream in streams}


def _raw(key: Any) -> Any:
    return key.encode() if isinstance(key, str) else key
