"""A processor's state by key, as handlers use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from anabranch.errors import EventTooLarge, IllegalState, InvalidArgument
from anabranch.processing.batch import HandlerContext, current_context
from anabranch.values import RAW, Codec

if TYPE_CHECKING:
    from anabranch.processing.aggregates import Aggregate
    from anabranch.types import Event

TIME = 1  # the hidden store of timers and of event time


def prefix_of(number: int) -> bytes:
    """The first bytes of all rows of the store with this number."""
    return number.to_bytes(2, "big")


def after(prefix: bytes) -> bytes:
    """The least bytes that are greater than all with this prefix, which must not be all 0xff."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1])


class Keyed:
    """Rows by key (bytes, or text as UTF-8), each in the task of its key. Only handlers may use them."""

    def __init__(self, name: str, codec: Codec, *, local: bool = False) -> None:
        self.name = name
        self.local = local
        self._codec = codec
        self.keys = RAW  # of timers and windows: set by `Program.check`
        self.prefix = b""  # set by `number`
        # Codecs of keys by stream, if `keys` is not that of all inputs; set by `Program.check`.
        self.key_codecs: Mapping[str, Codec] = {}

    @property
    def kind(self) -> str:
        """The format of its rows, as text. A worker whose program has another kind under this name is refused."""
        raise NotImplementedError

    def number(self, number: int) -> None:
        """Set the store's number, which never changes."""
        self.prefix = prefix_of(number)

    def entry(self, row: bytes, data: bytes) -> tuple[Any, Any]:
        """Key and value of a stored row. ``row``: without the prefix."""
        return row, self._codec.decode(data)

    def is_of(self, row: bytes, key: bytes) -> bool:
        """As of `StoreFormat`."""
        return row == key

    def shown(self, rows: Mapping[bytes, bytes]) -> Any:
        """As of `StoreFormat`."""
        return next((self.entry(row, data)[1] for row, data in rows.items()), None)

    def _set(self, at: HandlerContext, task: int, row: bytes, value: bytes) -> None:
        """Set a row. Raises: as `HandlerContext.put`; the message has the key."""
        try:
            at.put(task, row, value)
        except EventTooLarge as error:
            key = row[len(self.prefix) :]
            raise EventTooLarge(f"key {key!r:.100} of {self.name}: {error}") from error

    def key_of(self, event: Event[Any, Any]) -> Any:
        """The key of an event. Raises: InvalidArgument (it has none)."""
        if event.key is None:
            raise InvalidArgument(f"{self.name} is by key, and the event has none")
        return event.key

    def raw_of(self, event: Event[Any, Any], own: bytes | None) -> bytes:
        """The key of an event as bytes. ``own``: as of `encoded`."""
        key = event.key
        if key.__class__ is bytes:
            return key
        codec = self.key_codecs.get(getattr(event, "stream", ""), self.keys)
        if self.keys is RAW and codec is not RAW:
            if own is not None and codec.decode(own) == key:
                return own
            raw: bytes = codec.encode(key)
            return raw
        return self.encoded(key, own)

    def encoded(self, key: Any, own: bytes | None) -> bytes:
        """A key as bytes. ``own``: of the event, which other writers may have encoded in another way."""
        if self.keys is RAW:
            return _bytes(key)
        raw: bytes = self.keys.encode(key)
        if own is not None and own != raw:
            # The event's key may have another codec, and a periodic call has none.
            with suppress(Exception):
                if self.keys.decode(own) == key:
                    return own
        return raw

    def _place(self, at: HandlerContext, key: bytes | str) -> tuple[int, bytes]:
        raw: Any = key if key.__class__ is bytes else self.encoded(key, at.key)
        is_here = at.placed and raw is at.key  # the reader has computed the key's task
        if is_here or (not (self.local or at.own_key) and at.batch.task_of(raw) == at.task):
            return at.task, self.prefix + raw  # the fast path of what follows
        self._check_task(at)
        if at.own_key and raw != at.key:
            raise InvalidArgument(
                f"key {raw!r:.100} of store {self.name} is not this event's, and others are handled concurrently: "
                "use concurrency=1, or write to a stream with that key and read it"
            )
        if not self.local:
            task = at.batch.task_of(raw)
            if task != at.task:
                raise InvalidArgument(
                    f"key {raw!r:.100} of store {self.name} belongs to task {task}, this event to task {at.task}: "
                    "write to a stream with that key and read it, or make the store local=True"
                )
        return at.task, self.prefix + raw

    def _check_task(self, at: HandlerContext) -> None:
        if at.task < 0:
            raise InvalidArgument(
                f"store {self.name}: a batch of a stream has events of several tasks, whose rows are separate: "
                "handle single events, without batch=True"
            )


class Store(Keyed):
    """A processor's state: a table of keys (bytes, or text as UTF-8) and values. Only handlers may use it."""

    def __init__(
        self, name: str, codec: Codec, *, local: bool = False, into: Aggregate | None = None
    ) -> None:
        super().__init__(name, codec, local=local)
        self._into = into
        # Makes the value that users get of an encoded one.
        self._result: Callable[[bytes], Any] = codec.decode
        if into is not None:
            self._result = lambda data: into.result(codec.decode(data))

    @property
    def kind(self) -> str:
        what = self._codec.name or "values"
        return f"a {'local ' if self.local else ''}store of {what}" + (
            f", {self._into.name}" if self._into else ""
        )

    def get(self, key: bytes | str, default: Any = None) -> Any:
        """The value of a key, or ``default``; with ``into`` the result. Raises: InvalidArgument (another task's
        key), IllegalState.
        """
        at = current_context()
        data = self._find(at, *self._place(at, key))
        return default if data is None else self._result(data)

    def __getitem__(self, key: bytes | str) -> Any:
        at = current_context()
        data = self._find(at, *self._place(at, key))
        if data is None:
            raise KeyError(key)
        return self._result(data)

    def __contains__(self, key: bytes | str) -> bool:
        at = current_context()
        return self._find(at, *self._place(at, key)) is not None

    def __setitem__(self, key: bytes | str, value: Any) -> None:
        """Set a key's value; with ``into`` its state. After a change of the value in place, set it again."""
        at = current_context()
        self._set(at, *self._place(at, key), self._stored(at, self._codec.encode(value)))

    def __delitem__(self, key: bytes | str) -> None:
        """Delete a key, if it is there."""
        at = current_context()
        at.put(*self._place(at, key), None)

    def add(self, event: Event) -> Any:
        """Add an event to the value of its key by ``into``. Returns the new value.

        Raises: InvalidArgument (no ``into``, or the event has no key).
        """
        return self._changed(event, "after")

    def remove(self, event: Event) -> Any:
        """Take back an event that was added, such as a row before its change. Returns the new value.

        Raises: as `add`; InvalidArgument (``reduce`` and ``top`` can't).
        """
        return self._changed(event, "without")

    def _changed(self, event: Event, how: str) -> Any:
        at, into = current_context(), self._into
        if into is None:
            raise InvalidArgument(f"store {self.name} has no into=")
        place = self._place(at, self.key_of(event))
        data = self._find(at, *place)
        before = None if data is None else self._codec.decode(data)
        state = getattr(into, how)(before, event)
        self._set(at, *place, self._stored(at, self._codec.encode(state)))
        return into.result(state)

    def items(
        self, low: bytes | str = b"", high: bytes | str | None = None, *, prefix: bytes | str = b""
    ) -> Iterator[tuple[bytes, Any]]:
        """Rows of this handler's task from ``low`` up to ``high`` (not included), in the order of keys."""
        at = current_context()
        self._check_task(at)
        if at.own_key:
            raise InvalidArgument(
                f"store {self.name}: its rows are changed by concurrent handlers, and perhaps taken back: use "
                "concurrency=1"
            )
        first = self.prefix + max(_bytes(low), _bytes(prefix))
        end = after(self.prefix + _bytes(prefix))
        if high is not None:
            end = min(end, self.prefix + _bytes(high))
        size, batch = len(self.prefix), at.batch
        for row, data in batch.scan(at.task, first, end):
            value = self._value(at, data)
            if value is None:
                continue
            yield row[size:], self._result(value)
            if current_context().batch is not batch:
                raise IllegalState(
                    f"rows of {self.name} are read while their event is handled: read them again"
                )

    def entry(self, row: bytes, data: bytes) -> tuple[bytes, Any]:
        return row, self._result(data)

    def _find(self, at: HandlerContext, task: int, row: bytes) -> bytes | None:
        """The encoded value of a row; None without a row."""
        return at.batch.get(task, row)

    def _value(self, at: HandlerContext, data: bytes) -> bytes | None:
        """The encoded value in a row; None if it has expired."""
        return data

    def _stored(self, at: HandlerContext, value: bytes) -> bytes:
        """A row with an encoded value."""
        return value


def _bytes(key: bytes | str) -> bytes:
    if isinstance(key, str):
        return key.encode()
    if not isinstance(key, bytes):
        raise InvalidArgument(f"a store's key is bytes or a text, not {type(key).__name__}")
    return key
