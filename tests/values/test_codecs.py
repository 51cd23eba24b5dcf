"""Codecs and handles: what they take, and what they do with values that they don't take."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pydantic
import pytest

from anabranch.errors import InvalidArgument, NotReady, UndecodableValue
from anabranch.types import Event
from anabranch.values import Decoder, Held, codec_of, stream_of
from tests.values.kinds import KINDS, Line, Order, avro
from tests.values.registry import Registry

STREAM = "shop/orders"


def events(*values: bytes | None, key: bytes | None = b"ann") -> list[Event]:
    return [Event(STREAM, key, value, [], 1, None, 2, 0, 0, i) for i, value in enumerate(values)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_comes_back(kind: str, registry: Registry) -> None:
    stream = stream_of(STREAM, str, KINDS[kind].spec, "raise")
    key, value = stream.encode("ann", KINDS[kind].value)
    assert isinstance(key, bytes)
    assert isinstance(value, bytes)
    assert stream.decode_row(key, value) == ("ann", KINDS[kind].value)
    assert stream.encode(None, None) == (None, None), "None is never encoded"


@pytest.mark.parametrize("spec", [5, "json", (bytes,), (int, 5), object, ("a", "b")])
def test_what_is_no_codec_is_refused(spec: Any) -> None:
    with pytest.raises(InvalidArgument, match="is no codec"):
        codec_of(spec)


@pytest.mark.parametrize("undecodable", ["", "stop", "no stream/", STREAM, None])
def test_what_is_no_way_with_undecodable_values_is_refused(undecodable: Any) -> None:
    with pytest.raises(InvalidArgument):
        stream_of(STREAM, None, None, undecodable)


@pytest.mark.parametrize(
    ("spec", "value", "codec"),
    [
        (str, 5, "str"),
        (json, {1, 2}, "json"),
        (Order, Line("apple", 5), "Order"),
        (Line, {"item": "apple"}, "Line"),
        (pickle, lambda: None, "pickle"),
    ],
)
def test_an_error_names_the_codec(spec: Any, value: Any, codec: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{STREAM}: codec {codec} does not encode the value"):
        stream_of(STREAM, None, spec, "raise").encode(None, value)


def read(held: Held, decoder: Decoder) -> list[Any]:
    """Values, and errors where one was raised."""
    found: list[Any] = []
    while True:
        try:
            found.extend(event.value for event in decoder.decoded(held))
        except UndecodableValue as error:
            found.append(error)
        else:
            return found


def test_an_error_has_the_event_and_the_next_call_continues() -> None:
    given = events(b"1", b"x", None, b"4")
    decoder = Decoder(stream_of(STREAM, str, json, "raise"), lambda *_: None)
    one, error, *rest = read(Held(iter(given)), decoder)
    assert (one, rest) == (1, [None, 4])
    assert error.event is given[1]
    assert f"{STREAM}[0]@1, key b'ann': codec json does not decode the value" in str(error)
    assert pickle.loads(pickle.dumps(error)).event == given[1]


def test_an_undecodable_key_is_named() -> None:
    decoder = Decoder(stream_of(STREAM, str, json, "raise"), lambda *_: None)
    (error,) = read(Held(iter(events(b"1", key=b"\xff"))), decoder)
    assert "codec str does not decode the key" in str(error)


def test_skipped_events_are_counted() -> None:
    decoder = Decoder(stream_of(STREAM, str, json, "skip"), lambda *_: None)
    assert read(Held(iter(events(b"x", b"1", b"y"))), decoder) == [1]
    assert decoder.skipped == 2


def test_an_event_whose_dead_letter_fails_comes_again() -> None:
    buried: list[int] = []
    fails = [True, True, False]

    def bury(stream: str, event: Event, error: UndecodableValue) -> None:
        if fails.pop(0):
            raise NotReady("away")
        buried.append(event.offset)

    held, decoder = (
        Held(iter(events(b"1", b"x", b"3"))),
        Decoder(stream_of(STREAM, str, json, "shop/dead"), bury),
    )
    found: list[Any] = []
    for _ in range(2):
        with pytest.raises(NotReady):
            found.extend(event.value for event in decoder.decoded(held))
        assert held.kept is not None, "a reader's position stays at this event"
    assert [event.value for event in decoder.decoded(held)] == [3]
    assert (buried, decoder.skipped, held.kept) == ([1], 1, None)


def test_a_registry_that_is_away_makes_no_value_undecodable(registry: Registry) -> None:
    kind = KINDS["avro"]
    _, value = stream_of(STREAM, None, kind.spec, "raise").encode(None, kind.value)
    fresh = stream_of(STREAM, None, avro(1), "skip")  # its client has no schema yet
    held, decoder = Held(iter(events(value, b"\0junk"))), Decoder(fresh, lambda *_: None)
    registry.away = True
    try:
        with pytest.raises(NotReady, match="codec"):
            next(decoder.decoded(held))
    finally:
        registry.away = False
    assert [event.value for event in decoder.decoded(held)] == [kind.value]
    assert decoder.skipped == 1


def test_a_model_that_can_not_read_what_it_writes_is_refused() -> None:
    class Renamed(pydantic.BaseModel):
        user: int = pydantic.Field(serialization_alias="userId")

    class Both(pydantic.BaseModel):
        user: int = pydantic.Field(alias="userId")

    with pytest.raises(InvalidArgument, match=r"Renamed\.user is written under another name"):
        codec_of(Renamed)
    assert codec_of(Both).encode(Both(userId=1)) == b'{"userId":1}'
