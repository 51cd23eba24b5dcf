"""The parts of a processor's program: inputs, outputs, handlers, stores and timers, as workers see them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anabranch.errors import InvalidArgument
from anabranch.processing.batch import current_context
from anabranch.processing.plain import Cluster
from anabranch.processing.stores import Keyed
from anabranch.processing.tables import SharedReplica, SharedTable
from anabranch.protocol import defaults
from anabranch.protocol.legal_names import is_plain, split_stream
from anabranch.protocol.limits import copied_time
from anabranch.reading.history import Start
from anabranch.types import Event, Headers
from anabranch.values import RAW, Codec, Decode, Stream, event_decoder

if TYPE_CHECKING:
    import pyarrow as pa

    from anabranch.client.client import Client
    from anabranch.core.derived_rows import Function

Handler = Callable[..., Any]
TimerHandler = Callable[[bytes, int], Any]


@dataclass(frozen=True, slots=True)
class Input:
    """A stream that the processor reads."""

    stream: str
    key: Codec
    codec: Codec

    @property
    def decode(self) -> Callable[[Event], Event[Any, Any]] | None:
        """Decodes an event; None if key and value are bytes."""
        return event_decoder(self.key, self.codec)

    @property
    def decoders(self) -> tuple[Decode, Decode]:
        """Decode a key and a value, without naming the event in errors; None if they are bytes."""
        key, value = (None if one is RAW else one.decode for one in (self.key, self.codec))
        return key, value


class Output:
    """A stream that the processor writes, in the commit of what it consumed."""

    def __init__(self, stream: Stream[Any, Any], *, text_keys: bool) -> None:
        """``text_keys``: without a codec of keys, these may be texts, too."""
        self.stream = stream.name
        self._encode, self._encode_value = stream.encode, stream.value.encode
        self._text_keys, self._raw_keys = text_keys, stream.key is RAW

    def write(
        self,
        value: Any,
        key: Any = None,
        headers: Headers | None = None,
        timestamp: int | None = None,
    ) -> None:
        """Write an event. Without a codec of keys, ``key`` is bytes, or a text as UTF-8.

        ``timestamp``: Unix milliseconds, by default those of the event that is handled.

        Raises: IllegalState (not called by a handler), InvalidArgument.
        """
        at = current_context()
        if self._raw_keys and key.__class__ is bytes and value is not None:
            try:  # the fast path of what follows
                value = self._encode_value(value)
            except Exception:  # noqa: BLE001 - `encode` names the codec
                _, value = self._encode(key, value)
        else:
            if self._text_keys and isinstance(key, str):
                key = key.encode()
            key, value = self._encode(key, value)
        time = copied_time(at.timestamp) if timestamp is None else timestamp
        at.write(self.stream, (value, key, headers, time))

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Write the rows of an Arrow batch, as `Transaction.write_batch`; values are bytes or strings."""
        current_context().write_batch(self.stream, batch)


@dataclass(slots=True)
class Registered:
    """A handler. ``is_async``: whether its result is awaited. ``batch``: whether it takes Arrow batches.

    ``passes_on``: whether it only writes the events under another key. ``also``: parts of the program that it uses,
    which its code does not name.
    """

    call: Handler
    is_async: bool
    batch: bool
    passes_on: bool = False
    also: Sequence[Any] = ()


class NotAHandler(InvalidArgument):
    """A function that can't be a handler: a call returns a generator or awaitable, and runs none of its code."""


class Awaited(NotAHandler):
    """A function whose result has to be awaited, in a place where nothing awaits it."""


def is_async(call: Handler) -> bool:
    """Whether a call surely returns a coroutine. For a decorated function only `check_result` finds out."""
    call_of_object = getattr(type(call), "__call__", None)  # noqa: B004 - it is inspected, not called
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(call_of_object)


def check_function(what: str, call: Handler) -> None:
    """Raise `NotAHandler` for a function with a ``yield``."""
    if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        raise NotAHandler(f"{what} {_name(call)} has a yield, so that a call runs none of its code")


def check_plain(what: str, call: Handler) -> None:
    """Raise `NotAHandler` unless a call of the function does all of its work."""
    if not callable(call):
        raise NotAHandler(f"{what} {call!r:.100} is no function")
    check_function(what, call)
    if is_async(call):
        raise NotAHandler(
            f"{what} {_name(call)} is an async function, which is not awaited here: make it a def"
        )


def check_result(call: Handler, found: object) -> None:
    """Raise `NotAHandler` for a generator, `Awaited` for an awaitable; other results are ignored."""
    if found is None:
        return
    if inspect.isgenerator(found) or inspect.isasyncgen(found):
        raise NotAHandler(f"{_name(call)} returned a generator, and none of its code has run")
    if inspect.isawaitable(found):
        if inspect.iscoroutine(found):
            found.close()  # else Python also warns that it was never awaited
        raise Awaited(
            f"{_name(call)} returned an awaitable, which is not awaited here: make it a def"
        )


def _name(call: Handler) -> str:
    return str(getattr(call, "__qualname__", None) or repr(call))


class Program:
    """A processor's program, as workers see it; `anabranch.Processor` explains its parts."""

    name: str
    tasks: int
    commit_interval: float
    cut_bytes: int
    # A batch has these bytes at first, and after each batch that was not full.
    first_bytes: int = defaults.CUT_BYTES
    whole: bool
    dead_letter: str | None
    retries: int
    concurrency: int
    threads: int = 1
    start: Start
    on_lost: str
    idle: float | None
    ahead: float | None
    derivation: Function | None = None  # of a `DerivedTable`

    def __init__(self, name: str) -> None:
        """Raises: InvalidArgument."""
        self.scope, _ = split_stream(name)
        self.name = name
        self.inputs: dict[str, Input] = {}
        self.handlers: dict[str, list[Registered]] = {}
        self.stores: dict[str, Keyed] = {}
        self.timers = set[str]()  # names of what follows the event time: timers, windows, a clock …
        self.inner = set[str]()  # inputs that the program itself writes, for a join by key
        self.outputs: dict[str, Stream[Any, Any]] = {}
        self.tables: dict[str, SharedTable] = {}
        self.replicas: list[SharedReplica] = []
        self.cluster: Cluster | None = None  # of plain topics

    def prepare(self, client: Client) -> None:
        """Make what the processor needs, before it is created. Raises: as `Client.derive`."""

    def check_created(self, client: Client) -> None:
        """Check that the processor, which was created or is there, may begin. Raises: FixCallError."""

    def first_events(
        self, client: Client, tasks: Collection[int]
    ) -> Iterator[tuple[list[Event], list[int]]]:
        """Events that come before those of the inputs, in parts, with the task of each.

        ``tasks``: the tasks that have consumed nothing yet. If a worker ends in the middle, the same events come
        again.
        """
        return iter(())

    def drawn(self, stream: str) -> Sequence[Registered]:
        """The functions that a topology shows for an input: its handlers."""
        return self.handlers[stream]

    def part_of(self, thing: Any) -> Keyed | str | None:
        """The store, or the name of the stream to write, that an object of another library is in a topology."""
        return None

    def moves_time(self, stream: str) -> bool:
        """Whether events of an input move the event time: not if the program writes them again, under another key.

        Events that a join by key sends from task to task don't either: a task's worker may be ahead of others.
        """
        return stream not in self.inner and not all(one.passes_on for one in self.handlers[stream])

    def check(self) -> Sequence[str]:
        """Check that the program can run, and return the names of its inputs. Raises: InvalidArgument."""
        idle = sorted(set(self.inputs) - set(self.handlers))
        if not self.inputs or idle:
            raise InvalidArgument(
                f"processor {self.name} has no handler for {', '.join(idle)}: decorate one with @app.on(…)"
                if idle
                else f"processor {self.name} has no input"
            )
        if self.cluster is not None:
            for store in self.stores.values():
                store.local = True
        first, *others = (one.key for name, one in self.inputs.items() if name not in self.inner)
        if all(other.spec == first.spec for other in others):
            for name in self.timers & self.stores.keys():
                self.stores[name].keys = first
        else:
            codecs = {name: one.key for name, one in self.inputs.items()}
            for name in self.timers & self.stores.keys():
                self.stores[name].key_codecs = codecs
        if both := sorted(set(self.outputs) & set(self.tables)):
            raise InvalidArgument(
                f"{', '.join(both)} is an output and a table: write its rows as those of the table"
            )
        if len({is_plain(name) for name in self.inputs}) > 1:
            raise InvalidArgument(
                f"processor {self.name} reads streams, or plain topics: bridge a topic into a stream first"
            )
        return list(self.inputs)
