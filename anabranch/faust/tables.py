"""`app.Table`: state by key, or by key and window, changed in the commit of the events.

Windows are Faust's own: its wrapper of a table decides which windows an event belongs to. Here are the rows. A
table is a store of the app's processor; a row of a window has the event's key, then the window's start and end.
"""

from __future__ import annotations

import math
import time
from collections.abc import (
    Callable,
    ItemsView,
    Iterator,
    KeysView,
    MutableMapping,
    ValuesView,
)
from struct import Struct
from typing import Any

import faust
from faust.tables.base import Collection
from faust.tables.wrappers import WindowWrapper
from faust.utils.terminal.tables import dict_as_ansitable
from faust.windows import HoppingWindow, TumblingWindow

from anabranch.errors import InvalidArgument
from anabranch.faust.agents import Keys
from anabranch.faust.words import REFUSED, refuse, refuse_options, refusing
from anabranch.processing.batch import HandlerContext, current_context
from anabranch.processing.failures import Case
from anabranch.processing.stores import Store, after
from anabranch.processing.timers import Timer
from anabranch.values import Codec

_RANGE = Struct(">dd")  # a window: its start and its end, in Unix seconds


class Items(ItemsView[Any, Any]):
    """Keys and values of a table."""

    _mapping: Any  # set by the base class

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return ((key, value) for key, value, _ in self._mapping.rows())


class Values(ValuesView[Any]):
    """Values of a table."""

    _mapping: Any  # set by the base class

    def __iter__(self) -> Iterator[Any]:
        return (value for _, value, _ in self._mapping.rows())


@refusing("table", faust.Table)
class Table(Store):
    """State by key. Only agents, and ``on_window_close``, may use it, with the keys of their events.

    Without ``concurrency``, an agent may use other keys of the same task, too. Iterators return rows of all tasks
    of this worker, in the order of tasks and encoded keys.
    """

    # Faust's wrapper of windows calls these.
    _relative_event = Collection._relative_event  # noqa: SLF001
    _relative_field = Collection._relative_field  # noqa: SLF001
    _relative_timestamp = Collection._relative_timestamp  # noqa: SLF001
    _windowed_timestamp = Collection._windowed_timestamp  # noqa: SLF001
    _windowed_contains = Collection._windowed_contains  # noqa: SLF001
    _windowed_delta = Collection._windowed_delta  # noqa: SLF001
    _windowed_now = Collection._windowed_now  # noqa: SLF001
    _window_ranges = Collection._window_ranges  # noqa: SLF001
    _apply_window_op = Collection._apply_window_op  # noqa: SLF001
    _set_windowed = Collection._set_windowed  # noqa: SLF001
    _del_windowed = Collection._del_windowed  # noqa: SLF001

    def __init__(
        self, app: Any, name: str, *, default: Callable[[], Any] | None = None, key_type: Any = None,
        value_type: Any = None, key_serializer: Any = None, value_serializer: Any = None,
        help: str | None = None, schema: Any = None,  # noqa: A002  # as Faust calls it
        on_window_close: Callable[[Any, Any], Any] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """Raises: InvalidArgument."""
        refuse_options("app.Table", options)
        if schema is not None:
            key_type = key_type or schema.key_type
            value_type = value_type or schema.value_type
            key_serializer = key_serializer or schema.key_serializer
            value_serializer = value_serializer or schema.value_serializer

        def dumps(value: Any) -> bytes:
            data = app.serializers.dumps_value(value_type, value, serializer=value_serializer)
            if not isinstance(data, bytes):
                raise InvalidArgument(f"table {name}: name a serializer for {type(value).__name__}")
            return data

        def loads(data: bytes) -> Any:
            return app.serializers.loads_value(value_type, data, serializer=value_serializer)

        super().__init__(name, Codec(dumps, loads))
        del self.keys  # a store's codec of keys; here it is a method, as of a dict
        self.default = default
        self.help = help or ""
        self.window: Any = None
        self.app = app
        self.key_type, self.value_type = key_type, value_type
        self._key = key_type, key_serializer
        self._on_window_close = on_window_close
        self._expiry: Expiry | None = None

    @property
    def kind(self) -> str:
        return f"{super().kind}{', by window' if self.window else ''}"

    def check(self) -> None:
        """Raise `InvalidArgument` for an option that would do nothing."""
        if self._on_window_close is not None and self._expiry is None:
            raise InvalidArgument(
                f"table {self.name}: on_window_close needs windows with expires=, which end them"
            )

    # -- windows --------------------------------------------------------------------------------------

    def using_window(self, window: Any, *, key_index: bool = False) -> Windowed:
        """The table by window: tumbling or hopping ones. Raises: InvalidArgument."""
        if not isinstance(window, HoppingWindow):
            refuse(
                f"a {type(window).__name__}",
                "use tumbling or hopping windows, or sliding() and sessions() of anabranch.Processor",
            )
        if self.window is not None:
            raise InvalidArgument(f"table {self.name} has windows already")
        for what, seconds in (("size", window.size), ("step", window.step)):
            if seconds < 1 or seconds != int(seconds):
                raise InvalidArgument(f"a window's {what} of {seconds} s: whole seconds, from 1")
        self.window = window
        if window.expires:
            self._expiry = self.app.program.add_table(Expiry(self))
        return Windowed(self, key_index=key_index)

    def hopping(
        self, size: Any, step: Any, expires: Any = None, key_index: bool = False
    ) -> Windowed:
        """As Faust's. Raises: as `using_window`."""
        return self.using_window(HoppingWindow(size, step, expires), key_index=key_index)

    def tumbling(self, size: Any, expires: Any = None, key_index: bool = False) -> Windowed:
        """As Faust's. Raises: as `using_window`."""
        return self.using_window(TumblingWindow(size, expires), key_index=key_index)

    def _relative_now(self, event: Any = None) -> float:
        """The worker's clock, as Faust documents `relative_to_now` and `now`."""
        return time.time()

    def clone(self, *, name: str, value_type: Any, **_: Any) -> Table:
        """A table with the same keys: the index of a windowed table's keys."""
        key_type, serializer = self._key
        return Table(
            self.app, name, value_type=value_type, key_type=key_type, key_serializer=serializer
        )

    def close_window(self, row: bytes) -> None:
        """Delete a window, and call ``on_window_close``. ``row``: without the prefix."""
        at = current_context()
        data = at.batch.get(at.task, self.prefix + row)
        at.put(at.task, self.prefix + row, None)
        if data is not None and self._on_window_close is not None:
            at.key = row[: -_RANGE.size]
            at.name = self._loads_key(at.key)
            self.app.engine.call(
                self._on_window_close, self._decoded(row), self._codec.decode(data)
            )

    # -- rows -----------------------------------------------------------------------------------------

    def _place(self, at: HandlerContext, key: Any) -> tuple[int, bytes]:
        if self.window is None:
            return self._place_of(at, key)
        if not (isinstance(key, tuple) and len(key) == 2 and isinstance(key[1], tuple)):
            raise InvalidArgument(
                f"table {self.name} has windows: use what tumbling() or hopping() returned, or (key, (start, end))"
            )
        task, row = self._place_of(at, key[0])
        return task, row + _RANGE.pack(*key[1])

    def _place_of(self, at: HandlerContext, key: Any) -> tuple[int, bytes]:
        if isinstance(at.name, Keys):
            return self._place_in_list(at.name, key)
        if type(key) is type(at.name) and key == at.name and at.key is not None:
            key = at.key  # the event's own bytes; a serializer might encode the key differently
        return super()._place(at, self._dumps_key(key))

    def _place_in_list(self, keys: Keys, key: Any) -> tuple[int, bytes]:
        hashable = getattr(type(key), "__hash__", None) is not None
        found = keys.get(key) if hashable else None
        if found is None:
            found = keys.get(self._dumps_key(key))
        if found is None:
            raise InvalidArgument(
                f"key {key!r:.100} of table {self.name} is not in this list of events"
            )
        task, raw = found
        return task, self.prefix + raw

    def _dumps_key(self, key: Any) -> Any:
        if isinstance(key, bytes):
            return key
        if isinstance(key, str):
            return key.encode()
        typ, serializer = self._key
        return self.app.serializers.dumps_key(typ, key, serializer=serializer)

    def _loads_key(self, raw: bytes) -> Any:
        typ, serializer = self._key
        if typ is None and serializer is None:
            typ, serializer = self.app.key_type_of_inputs()
        return self.app.serializers.loads_key(typ, raw, serializer=serializer)

    def _decoded(self, row: bytes) -> Any:
        """The key of a row without the prefix."""
        if self.window is None:
            return self._loads_key(row)
        return self._loads_key(row[: -_RANGE.size]), _RANGE.unpack(row[-_RANGE.size :])

    def _get_key(self, key: Any) -> Any:
        return self[key]

    def _has_key(self, key: Any) -> bool:
        return key in self

    def _set_key(self, key: Any, value: Any) -> None:
        self[key] = value

    def _del_key(self, key: Any) -> None:
        del self[key]

    def __getitem__(self, key: Any) -> Any:
        """The value, or what ``default`` returns, which is not stored. Raises: KeyError (there is no default)."""
        self.app.sensors.on_table_get(self, key)
        try:
            return super().__getitem__(key)
        except KeyError:
            if self.default is None:
                raise
            return self.default()

    def __setitem__(self, key: Any, value: Any) -> None:
        self.app.sensors.on_table_set(self, key, value)
        super().__setitem__(key, value)
        if self._expiry is not None:
            at = current_context()
            task, row = self._place(at, key)
            self._expiry.keep(at, task, row[len(self.prefix) :], self._due_ms(key[1][1]))

    def __delitem__(self, key: Any) -> None:
        self.app.sensors.on_table_del(self, key)
        super().__delitem__(key)

    def _due_ms(self, end: float) -> int:
        """When a window is stale: ``expires`` seconds after the first window that begins after its end."""
        step = self.window.step
        return int((math.ceil(end / step) * step + self.window.expires) * 1000)

    def rows(self) -> Iterator[tuple[Any, Any, tuple[int, bytes]]]:
        """Key, value and place of each row of this worker's tasks. Raises: InvalidArgument (concurrent actors)."""
        at = current_context()
        if at.own_key:
            raise InvalidArgument(
                f"table {self.name}: its rows are changed by concurrent actors, and perhaps taken back: use "
                "concurrency=1"
            )
        size, batch = len(self.prefix), at.batch
        for task in sorted({*self.app.engine.tasks, at.task} - {-1}):
            for row, data in batch.scan(task, self.prefix, after(self.prefix)):
                yield self._decoded(row[size:]), self._codec.decode(data), (task, row)

    def items(self) -> Items:  # type: ignore[override]
        return Items(self)

    def keys(self) -> KeysView[Any]:  # type: ignore[override]
        return KeysView(self)

    def values(self) -> Values:
        return Values(self)

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _, _ in self.rows())

    def __len__(self) -> int:
        return sum(1 for _ in self.rows())

    def clear(self) -> None:
        """Delete all rows of this worker's tasks. Raises: InvalidArgument (``concurrency`` above 1)."""
        at = current_context()
        for key, _, place in self.rows():
            self.app.sensors.on_table_del(self, key)
            at.put(*place, None)

    def copy(self) -> dict[Any, Any]:
        """All rows of this worker's tasks. Raises: as `clear`."""
        return dict(self.items())

    def as_ansitable(self, title: str = "{table.name}", **options: Any) -> str:
        """As Faust's. Raises: as `clear`."""
        return dict_as_ansitable(self.copy(), title=title.format(table=self), **options)

    get = MutableMapping.get  # type: ignore[assignment]
    pop = MutableMapping.pop
    setdefault = MutableMapping.setdefault
    update = MutableMapping.update


class Windowed(WindowWrapper):
    """A table by window, as of Faust. ``key_index``: a table of all keys, so that there are iterators."""

    def __init__(
        self, table: Any, *, relative_to: Any = None, key_index: bool = False, key_index_table: Any = None,
    ) -> None:  # fmt: skip
        if key_index and key_index_table is None:
            key_index_table = table.app.add_table(
                table.clone(name=f"{table.name}-key_index", value_type=int)
            )
        super().__init__(
            table, relative_to=relative_to, key_index=key_index, key_index_table=key_index_table
        )

    def on_recover(self, _: Any) -> Any:
        """Raises: InvalidArgument."""
        refuse("table.on_recover", REFUSED["table"]["on_recover"])


class Expiry(Timer):
    """The windows of a table, each with the time at which it is deleted, by the worker's clock."""

    def __init__(self, table: Table) -> None:
        super().__init__(f"{table.name}-expiry", self._close, wall=True)
        self._table = table

    def keep(self, at: HandlerContext, task: int, row: bytes, due_ms: int) -> None:
        """Let a window be deleted at a time in Unix milliseconds, unless that is known already."""
        if at.batch.get(task, self.prefix + row) is None:
            place: Any = task, row
            self.set(place, due_ms)

    def _place(self, at: HandlerContext, key: Any) -> tuple[int, bytes]:
        task, row = key
        return task, self.prefix + row

    def _close(self, row: bytes, _: int) -> None:
        self._table.close_window(row)

    def case(self, place: str, row: bytes, due: int, _: bytes | None) -> Case:
        """As of `Timer`: the key of a window."""
        return Case(place, None, row[: -_RANGE.size], (), due)

    def drop(self, at: HandlerContext, place: bytes, due: int) -> None:
        """As of `Timed`, with the window."""
        super().drop(at, place, due)
        at.put(at.task, self._table.prefix + place[len(self.prefix) :], None)
