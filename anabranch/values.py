"""Typed keys and values: the codecs, and the handles of streams that have them (docs/values.md)."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from json.encoder import c_make_encoder, encode_basestring  # type: ignore[attr-defined]
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from anabranch.errors import AnabranchError, InvalidArgument, NotReady, UndecodableValue
from anabranch.protocol.legal_names import split_stream
from anabranch.protocol.limits import HEADERS, copied_name, copied_time
from anabranch.topics.names import stream_topic
from anabranch.types import Event, Events, K, V

T_co = TypeVar("T_co", covariant=True)
_ERROR_BYTES = 1024  # of an error's text in a dead letter
# HTTP statuses of a schema registry that say nothing about the value: no right, too many requests.
_NOT_ABOUT_A_VALUE = (401, 403, 407, 408, 429)


# -- codecs -----------------------------------------------------------------------------------------------


class Codec(NamedTuple):
    """How a value becomes bytes, and bytes a value; neither is called for None.

    ``name``: for texts of errors, and part of a store's `Keyed.kind`. ``spec``: what `codec_of` was called with.
    """

    encode: Callable[[Any], Any]
    decode: Callable[[bytes], Any]
    name: str = ""
    spec: Any = None
    # Encodes a value whose class is ``spec``, without a check.
    exact: Callable[[Any], Any] | None = None


class DumpsLoads(Protocol[T_co]):
    """A codec as a module or object with two functions, such as `json` or `pickle`."""

    def dumps(self, value: Any, /) -> bytes | str: ...

    def loads(self, data: bytes, /) -> T_co: ...


Spec: TypeAlias = "DumpsLoads[V] | type[V] | tuple[Callable[[Any], Any], Callable[[bytes], V]]"


def _same(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise InvalidArgument(
            f"a value is bytes, not {type(value).__name__}: name a codec, as in value=json"
        )
    return value


_compact = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
_read = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
# `JSONEncoder.encode` makes this C encoder for each call, which costs as much as the encoding itself.
_encoder = c_make_encoder and c_make_encoder(
    None, _compact.default, encode_basestring, None, ":", ",", False, False, True
)


def _to_json(value: Any) -> bytes:
    text = _compact.encode(value) if _encoder is None else "".join(_encoder(value, 0))
    return text.encode()


def _of_json(data: bytes) -> Any:
    text = data.decode()
    try:
        value, end = _read(text, 0)
        if end == len(text):
            return value
    except StopIteration:
        pass
    return json.loads(text)  # white space around it, or not JSON


RAW = Codec(_same, bytes, "bytes", bytes)
_KNOWN: dict[Any, Codec] = {
    None: RAW,
    bytes: RAW,
    str: Codec(str.encode, bytes.decode, "str", str),
    json: Codec(_to_json, _of_json, "json", json),
}


def codec_of(spec: Any, topic: str = "", *, of_keys: bool = False) -> Codec:
    """The codec that ``key=`` or ``value=`` names.

    - None or bytes (unchanged), str (UTF-8), json, or another object with ``dumps`` and ``loads``.
    - A model class of pydantic or msgspec, as JSON.
    - A pair: a function that encodes and one that decodes. Serializers of confluent-kafka are called with a
      `SerializationContext`, which has the ``topic`` and whether it is for keys.

    Raises: InvalidArgument.
    """
    if spec is None or spec in (bytes, str, json):
        return _KNOWN[spec]
    if isinstance(spec, type):
        if hasattr(spec, "model_validate_json") and hasattr(spec, "model_dump_json"):
            return _pydantic(spec)
        if hasattr(spec, "__struct_fields__"):
            return _msgspec(spec)
    if isinstance(spec, tuple):
        if len(spec) == 2 and all(map(callable, spec)):
            encode, decode = (_with_context(call, topic, of_keys) for call in spec)
            name = f"({', '.join(map(_name_of, spec))})"
            return Codec(encode, decode, name, spec)
    elif callable(getattr(spec, "dumps", None)) and callable(getattr(spec, "loads", None)):
        return _dumps_loads(spec)
    raise InvalidArgument(
        f"{spec!r:.100} is no codec: bytes, str, json, a model class of pydantic or msgspec, a pair of functions "
        "(encode, decode), or an object with dumps and loads"
    )


def _dumps_loads(spec: Any) -> Codec:
    def encode(given: Any) -> bytes:
        found = spec.dumps(given)
        return found.encode() if isinstance(found, str) else _same(found)

    return Codec(encode, spec.loads, _name_of(spec), spec)


def _pydantic(model: Any) -> Codec:
    by_name = any(model.model_config.get(way) for way in ("populate_by_name", "validate_by_name"))
    for name, of in model.model_fields.items():
        written, read = of.serialization_alias or name, of.validation_alias or name
        if isinstance(read, str) and written != read and not (by_name and written == name):
            raise InvalidArgument(
                f"{model.__qualname__}.{name} is written under another name than it is read by: use alias="
            )

    def encode(given: Any) -> bytes:
        _check_model(model, given)
        text: str = given.model_dump_json(by_alias=True)
        return text.encode()

    return Codec(encode, model.model_validate_json, model.__qualname__, model)


def _msgspec(model: Any) -> Codec:
    from msgspec.json import Decoder, Encoder

    written: Callable[[Any], bytes] = Encoder().encode

    def encode(given: Any) -> bytes:
        if given.__class__ is not model:
            _check_model(model, given)
        return written(given)

    return Codec(encode, Decoder(model).decode, model.__qualname__, model, written)


def _check_model(model: Any, given: Any) -> None:
    if not isinstance(given, model):
        raise TypeError(f"not {model.__qualname__}, but {type(given).__name__}")


def _name_of(spec: Any) -> str:
    for attribute in ("__qualname__", "__name__"):  # of a function, of a module
        if hasattr(spec, attribute):
            return str(getattr(spec, attribute))
    return type(spec).__qualname__


def _with_context(call: Any, topic: str, of_keys: bool) -> Callable[[Any], Any]:
    # A program that has a serializer has loaded its module.
    module = sys.modules.get("confluent_kafka.serialization")
    if module is None or not isinstance(call, module.Serializer | module.Deserializer):
        return call  # type: ignore[no-any-return]
    field = module.MessageField.KEY if of_keys else module.MessageField.VALUE
    context = module.SerializationContext(topic, field)
    return lambda value: call(value, context)


# -- words and texts --------------------------------------------------------------------------------------

WORDS = {"bytes": bytes, "str": str, "json": json}


def spec_of(word: str) -> Any:
    """The codec that a word names, for `codec_of`: one of `WORDS`, or ``module:name``, which is imported.

    Raises: InvalidArgument.
    """
    if word in WORDS:
        return WORDS[word]
    module, _, name = word.partition(":")
    if not module or not name:
        raise InvalidArgument(f"codec {word!r}: {', '.join(WORDS)}, or MODULE:NAME")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        raise InvalidArgument(f"codec {word!r} can't be imported: {text_of(error)}") from error


def from_text(codec: Codec, text: bytes) -> Any:
    """The value that a text means for a codec: with bytes and str the text itself, with others its JSON.

    Raises: ValueError, and what a model raises.
    """
    return codec.decode(text) if isinstance(codec.spec, type) else json.loads(text)


# -- handles ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stream(Generic[K, V]):
    """A stream or table with the codecs of its keys and values, made by `Client.stream`.

    Calls take it where they take a stream's name. ``undecodable``: 'raise', 'skip', or the stream of dead letters.
    """

    name: str
    key: Codec
    value: Codec
    undecodable: str = "raise"

    def __str__(self) -> str:
        return self.name

    def encode(self, key: K | None, value: V | None) -> tuple[bytes | None, bytes | None]:
        """Key and value as bytes; None stays None. Raises: InvalidArgument, NotReady (a registry is away)."""
        codec, part, coded = self.key, "key", None
        try:
            if key is not None:
                coded = codec.encode(key)
            codec, part = self.value, "value"
            return coded, None if value is None else codec.encode(value)
        except Exception as error:
            what = f"{self.name}: codec {codec.name} does not encode the {part}"
            _check_outside(what, error)
            raise InvalidArgument(f"{what} ({text_of(error)})") from error

    def encode_key(self, key: K) -> bytes:
        """As `encode`, of a key alone."""
        coded, _ = self.encode(key, None)
        return coded  # type: ignore[return-value]

    def decode_row(self, key: bytes, value: bytes) -> tuple[K, V]:
        """Key and value of a table's row. Raises: UndecodableValue, NotReady (a registry is away)."""
        return self.decode_key(key), self._row_part(key, value, self.value, "row")

    def decode_key(self, key: bytes) -> K:
        """As `decode_row`, of the key alone."""
        found: K = self._row_part(key, key, self.key, "key")
        return found

    def decode_value(self, key: bytes, value: bytes | None) -> V | None:
        """As `decode_row`, of the value alone; None stays None."""
        return None if value is None else self._row_part(key, value, self.value, "row")

    def _row_part(self, key: bytes, data: bytes, codec: Codec, part: str) -> Any:
        try:
            return codec.decode(data)
        except Exception as error:
            what = f"{self.name}, key {key!r:.100}: codec {codec.name} does not decode the {part}"
            _check_outside(what, error)
            raise UndecodableValue(f"{what} ({text_of(error)})") from error


def stream_of(name: str, key: Any, value: Any, undecodable: str) -> Stream[Any, Any]:
    """A handle, checked. Arguments and errors: as of `Client.stream`."""
    split_stream(name)
    if undecodable not in ("raise", "skip"):
        if undecodable.__class__ is not str or "/" not in undecodable:
            raise InvalidArgument(
                f"undecodable={undecodable!r:.100}: 'raise', 'skip', or the stream of dead letters"
            )
        split_stream(undecodable)
        if undecodable == name:
            raise InvalidArgument(f"dead letters of {name} go to another stream")
    topic = stream_topic(name)
    return Stream(name, codec_of(key, topic, of_keys=True), codec_of(value, topic), undecodable)


def name_of(stream: Any) -> Any:
    """The name of a stream, given its name or handle."""
    return stream.name if isinstance(stream, Stream) else stream


def names_of(streams: Any) -> Any:
    """The name of a stream, or a list of names, given names or handles."""
    if isinstance(streams, str | Stream):
        return name_of(streams)
    return [name_of(stream) for stream in streams]


def encoded(stream: Any, value: Any, key: Any) -> tuple[Any, Any, Any]:
    """The name, and value and key as bytes, if the stream is a handle; else all as they are."""
    if isinstance(stream, Stream):
        key, value = stream.encode(key, value)
        return stream.name, value, key
    return stream, value, key


def encoded_events(stream: Any, events: Iterable[Any]) -> tuple[Any, Iterable[Any]]:
    """As `encoded`, of the events of `write_many`. An event of another form stays as it is, to be refused."""
    if not isinstance(stream, Stream):
        return stream, events
    encode_key, encode_value = stream.key.encode, stream.value.encode
    kind, encode_exact = stream.value.spec, stream.value.exact or encode_value

    def each() -> Iterator[Any]:
        for event in events:
            if event.__class__ is not tuple or len(event) != 2:
                yield _encoded_event(stream, event)
                continue
            value, key = event
            try:
                if key is not None:
                    key = encode_key(key)
                if value.__class__ is kind:
                    value = encode_exact(value)
                elif value is not None:
                    value = encode_value(value)
            except Exception:  # noqa: BLE001 - `encode` names the codec
                key, value = stream.encode(event[1], event[0])
            yield value, key

    return stream.name, each()


def _encoded_event(stream: Stream[Any, Any], event: Any) -> Any:
    if not isinstance(event, tuple | list) or not event:
        return event
    key, value = stream.encode(event[1] if len(event) > 1 else None, event[0])
    return (value, key, *event[2:])


# -- reading ----------------------------------------------------------------------------------------------


Decode: TypeAlias = "Callable[[bytes], Any] | None"


class Held:
    """Events to be decoded on demand. ``kept``: taken from ``rest``, and neither returned nor passed over yet."""

    __slots__ = ("_rest", "kept")

    def __init__(self, rest: Iterator[Event] | None) -> None:
        self._rest = rest
        self.kept: Event | None = None

    @property
    def rest(self) -> Iterator[Event]:
        """The events that are not taken yet."""
        return iter(()) if self._rest is None else self._rest

    def decoded(self, key: Decode, value: Decode) -> Iterator[Event[Any, Any]] | None:
        """The events, decoded as they are made; None if they are made already. None for ``key``: they stay bytes.

        After an error of a codec, `rest` begins with its event.
        """
        return None


Bury: TypeAlias = "Callable[[str, Event, UndecodableValue], None]"
_make = tuple.__new__


class Decoder:
    """Decodes the events of one stream, and does with undecodable ones what the stream's handle says.

    ``skipped``: how many events were passed over.
    """

    def __init__(self, stream: Stream[Any, Any], bury: Bury) -> None:
        """``bury``: writes an event to a stream of dead letters, and returns once it is committed."""
        self.stream = stream
        self._bury = bury
        self.skipped = 0

    def decoded(self, held: Held) -> Iterator[Event[Any, Any]]:
        """The decoded events. After an error, call it again for the rest.

        Raises: UndecodableValue; NotReady (a registry, or the stream of dead letters; the event comes again).
        """
        kept, held.kept = held.kept, None
        key_codec, value_codec = self.stream.key, self.stream.value
        decode_key, decode_value = key_codec.decode, value_codec.decode
        if kept is None:
            made = held.decoded(
                None if key_codec is RAW else decode_key,
                None if value_codec is RAW else decode_value,
            )
            if made is not None:
                # After an error, or a codec's StopIteration, the loop begins with the event, and has its error.
                with suppress(Exception):
                    yield from made
        for event in held.rest if kept is None else chain((kept,), held.rest):
            # Faster than `_replace`, or a slice of the other fields.
            stream, key, value, headers, at, txn, committed, segment, partition, offset = event
            try:
                if key is not None:
                    key = decode_key(key)
                if value is not None:
                    value = decode_value(value)
            except Exception as error:  # noqa: BLE001 - a codec may raise anything
                held.kept = event
                self.refuse(held, event, error)
                held.kept = None
                continue
            fields = (stream, key, value, headers, at, txn, committed, segment, partition, offset)
            yield _make(Event, fields)

    def refuse(self, held: Held, event: Event, error: Exception) -> None:
        """Do with an event what the handle says. Raises: as `decoded`."""
        trouble = undecodable(self.stream.key, self.stream.value, event, error)
        if self.stream.undecodable == "raise":
            held.kept = None
            raise trouble from error
        if self.stream.undecodable != "skip":
            self._bury(self.stream.undecodable, event, trouble)
        self.skipped += 1


def event_decoder(key: Codec, value: Codec) -> Callable[[Event], Event[Any, Any]] | None:
    """A function that decodes an event, or raises `UndecodableValue` or `NotReady`; None if all is bytes."""
    if key is RAW and value is RAW:
        return None
    decode_key, decode_value = key.decode, value.decode

    def decoded(event: Event) -> Event[Any, Any]:
        stream, name, data, headers, at, txn, committed, segment, partition, offset = event
        try:
            if name is not None and key is not RAW:
                name = decode_key(name)
            if data is not None:
                data = decode_value(data)
        except Exception as error:
            raise undecodable(key, value, event, error) from error
        fields = (stream, name, data, headers, at, txn, committed, segment, partition, offset)
        return _make(Event, fields)

    return decoded


def undecodable(key: Codec, value: Codec, event: Event, error: Exception) -> UndecodableValue:
    """The error of an event that could not be decoded. Raises: NotReady, if that says nothing about the event."""
    codec, part = value, "value"
    if event.key is not None:
        try:
            key.decode(event.key)
        except Exception:  # noqa: BLE001 - as in `decoded`
            codec, part = key, "key"
    what = (
        f"{place_of(event)}, key {event.key!r:.100}: codec {codec.name} does not decode the {part}"
    )
    _check_outside(what, error)
    return UndecodableValue(f"{what} ({text_of(error)})", event=event)


def place_of(event: Event) -> str:
    """The place of an event, as text."""
    return f"{event.stream}[{event.partition}]@{event.offset}"


class DecodedEvents(Generic[K, V]):
    """The events of a transaction, decoded each time that they are iterated over; ``len`` counts all of them."""

    def __init__(self, events: Events, decoder: Decoder) -> None:
        self._events, self._decoder = events, decoder
        self._once = False  # undecodable events were counted, or written as dead letters

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event[K, V]]:
        decoder = self._decoder
        if self._once:
            decoder = Decoder(decoder.stream, lambda *_: None)
        yield from decoder.decoded(Held(iter(self._events)))
        self._once = True


def dead_letters(
    event: tuple[bytes | None, bytes | None, Sequence[tuple[str, bytes | None]], int | None],
    place: str,
    error: BaseException,
) -> Iterator[tuple[Any, ...]]:
    """Forms of a dead letter, as fields of `write`, each smaller than the one before: write the first that fits.

    ``event``: value, key, headers and timestamp. ``place``: where it came from.
    """
    value, key, headers, timestamp = event
    own = [
        ("error", text_of(error).encode("utf-8", "replace")[:_ERROR_BYTES]),
        ("from", place.encode()),
    ]
    copied = ((copied_name(name), data) for name, data in headers)
    kept = [*islice(copied, HEADERS.value - len(own)), *own]
    yield value, key, kept, copied_time(timestamp)
    yield value, key, kept, None  # in case the stream refuses only the time
    # In case it is too big; the header `from` says where the rest is.
    yield None, key, [*own, ("left_out", b"value, headers")], None
    yield None, None, [*own, ("left_out", b"key, value, headers")], None


def text_of(error: BaseException) -> str:
    """The class and the message of an error."""
    return f"{type(error).__name__}: {error}"


def _check_outside(what: str, error: BaseException) -> None:
    """Raise `NotReady` if an error of a codec says nothing about the value: its schema registry is away."""
    if isinstance(error, AnabranchError) and not isinstance(error, InvalidArgument):
        raise error
    found: BaseException | None = error
    while found is not None:
        status = getattr(found, "http_status_code", None)
        about_a_value = status is None or (400 <= status < 500 and status not in _NOT_ABOUT_A_VALUE)
        is_transport = type(found).__module__.partition(".")[0] in (
            "httpx",
            "httpx2",
            "httpcore",
            "httpcore2",
        )
        if isinstance(found, OSError) or not about_a_value or is_transport:
            raise NotReady(f"{what} now: {text_of(error)}") from error
        found = found.__cause__ or found.__context__
