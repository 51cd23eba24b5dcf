"""`app.Table`: a store of ours that looks like a table of Faust's."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from anabranch.errors import InvalidArgument
from anabranch.faust.refusals import TABLE, refusing
from anabranch.processing.codecs import Codec
from anabranch.processing.cut import Doing
from anabranch.processing.stores import Store


@refusing("table", TABLE)
class Table(Store):
    """Keyed state, changed in the commit of the events; agents alone may use it, and with their event's key.

    Other keys of the same task are fine, too, unless the agent has ``concurrency``. `items` has rows of the event's
    task, in the order of their keys, which come as bytes.
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

    def _place(self, at: Doing, key: Any) -> tuple[int, bytes]:
        if type(key) is type(at.name) and key == at.name and at.key is not None:
            key = at.key  # the event's own bytes, which a serializer might encode otherwise
        elif not isinstance(key, bytes | str):
            typ, serializer = self._key
            key = self._app.serializers.dumps_key(typ, key, serializer=serializer)
        return super()._place(at, key)

    def __getitem__(self, key: Any) -> Any:
        """The value, or what ``default`` gives, which is not stored. Raises: KeyError, if there is no default."""
        try:
            return super().__getitem__(key)
        except KeyError:
            if self.default is None:
                raise
            return self.default()

    pop = MutableMapping.pop
    setdefault = MutableMapping.setdefault
    update = MutableMapping.update
