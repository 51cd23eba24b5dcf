"""Feature levels in the codec: a record has the lowest that it needs; a reader of lower ones refuses it by name."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fastavro import schemaless_reader
from hypothesis import given

from anabranch.batches.one_shots import decode_lazily
from anabranch.core import work
from anabranch.errors import MalformedRecord, UnsupportedVersion
from anabranch.protocol.schemas import codec, fast
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode, encode, level_of, schema_of
from tests.core.labels import SECRET
from tests.schemas.test_codec import patient, record_strategy

TEXT = "Flights from JFK"
CREATE = r.CreateStream("nyc/a", 2, {"retention.ms": "-1"})
ALTER = r.AlterStream("nyc/a", {}, ("retention.ms",))
ROW = r.StreamRow(
    "nyc/a", "ACTIVE", 1, {}, 0, 0, (), 1, 1, 1, None, b"", 0, "", b"", (), "open"
)  # fmt: skip
INFO = r.StreamInfo("nyc/a", "ACTIVE", 0, 0, (), {}, {}, {}, 1, {}, 0, "")
EVENT = r.Event("nyc/a", -1, b"k", b"v", (r.EventHeader("h", b"x"),), -1)
ONE_SHOT = r.OneShot(bytes(16), "nyc", None, (EVENT,) * 40)


def reply(*infos: r.StreamInfo) -> r.Reply:
    return r.Reply(bytes(16), bytes(8), 7, r.StreamList(infos))


# Each with a field of level 2, and without.
PAIRS: list[tuple[Any, Any]] = [
    (replace(CREATE, description=TEXT), CREATE),
    (replace(ALTER, description=TEXT), ALTER),
    (replace(ROW, description=TEXT), ROW),
    (
        replace(ROW, change=r.StreamChange({}, 0, None, TEXT)),
        replace(ROW, change=r.StreamChange({}, 0)),
    ),
    (reply(INFO, replace(INFO, description=TEXT), INFO), reply(INFO, INFO, INFO)),
]
NAMES = ["create", "alter", "row", "nested in a row", "nested in a reply"]


@pytest.mark.parametrize(("higher", "lower"), PAIRS, ids=NAMES)
def test_a_record_has_the_lowest_level_that_it_needs(higher: Any, lower: Any) -> None:
    assert (level_of(higher), level_of(lower)) == (2, 1)
    for record in (higher, lower):
        data = encode(record)
        assert data[0] == level_of(record)
        assert decode(data) == record
    short, long = encode(lower), encode(higher)
    assert long.count(TEXT.encode()) == 1
    assert TEXT.encode() not in short


@pytest.fixture
def list_commands_of_level_2(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if a release had added that command."""
    load = codec._Packaged.load

    def loaded(self: codec._Packaged, name: str) -> Any:
        level = {"level": 2} if name == "anabranch.ListCommands" else {}
        return load(self, name) | level

    caches = codec.schema_of, codec._levels, codec._form
    with monkeypatch.context() as patched:
        patched.setattr(codec._Packaged, "load", loaded)
        for cache in caches:
            cache.cache_clear()
        yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("list_commands_of_level_2")
def test_a_record_type_of_level_2_has_no_frame_of_level_1() -> None:
    data = encode(r.ListCommands())
    assert (level_of(r.ListCommands()), data[0], decode(data)) == (2, 2, r.ListCommands())
    with pytest.raises(MalformedRecord, match="a ListCommands has feature level 2 at least"):
        decode(b"\x01" + data[1:])
    assert encode(CREATE)[0] == 1


def test_an_empty_description_that_is_given_needs_level_2() -> None:
    """It takes the description away; none given leaves it."""
    data = encode(replace(ALTER, description=""))
    assert (data[0], decode(data).description) == (2, "")
    assert decode(encode(ALTER)).description is None


def test_a_field_of_level_2_is_one_more_at_the_end() -> None:
    data = encode(replace(CREATE, description=TEXT))
    assert data == b"\x02" + encode(CREATE)[1:] + bytes((2 * len(TEXT),)) + TEXT.encode()


@patient(60)
@given(record_strategy("StreamRow"))
def test_the_form_of_level_1_is_that_of_its_schema_alone(row: r.StreamRow) -> None:
    change = row.change and replace(row.change, description="")
    data = encode(replace(row, description="", change=change))
    assert data[0] == 1
    schema = schema_of(r.StreamRow, 1)
    assert "description" not in [field["name"] for field in schema["fields"]]
    body = io.BytesIO(data[2:])
    schemaless_reader(body, schema, None)
    assert body.tell() == len(data) - 2


@pytest.mark.parametrize(("higher", "lower"), PAIRS, ids=NAMES)
def test_a_reader_of_level_1_refuses_level_2_by_name(
    higher: Any, lower: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = encode(higher), encode(lower)
    monkeypatch.setattr(codec, "LEVEL", 1)
    for read in (decode, decode_lazily):
        with pytest.raises(UnsupportedVersion, match=r"feature level 2, .* levels 1 to 1"):
            read(frames[0])
        assert read(frames[1]) == lower


@pytest.mark.parametrize("level", [0, codec.LEVEL + 1, 255])
@pytest.mark.parametrize("number", [2, 8, 37, 32, 67, 255])
def test_unknown_levels_are_refused_before_types_and_bodies(level: int, number: int) -> None:
    for body in (b"", b"\xff" * 100, encode(ONE_SHOT)[2:]):
        for read in (decode, decode_lazily):
            with pytest.raises(UnsupportedVersion, match=f"feature level {level}, "):
                read(bytes((level, number)) + body)


@pytest.mark.parametrize(("field", "size"), [("short", -1), ("long", 1)])
def test_a_body_of_the_other_level_is_malformed(field: str, size: int) -> None:
    """The level says which fields come: a frame can't have those of another one."""
    lower, higher = encode(CREATE), encode(replace(CREATE, description=TEXT))
    wrong = b"\x02" + lower[1:] if size < 0 else b"\x01" + higher[1:]
    with pytest.raises(MalformedRecord):
        decode(wrong)


# What fast codecs have, in a frame of level 2: their schemas have no field of it, so the body is that of level 1.
HANDWRITTEN: list[Any] = [
    ONE_SHOT,
    r.PrepareEvents(bytes(16), "nyc", None, (EVENT,) * 40, SECRET, r.Prepare(bytes(32), b"1")),
    r.Commit(b"token", (), None, None, 30_000),
    r.ParticipantRow("nyc/a", 3),
]


@pytest.mark.parametrize("record", HANDWRITTEN, ids=lambda record: type(record).__name__)
def test_frames_of_level_2_pass_by_the_handwritten_codecs(
    record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read the same, or are refused with the same words, and are charged as much."""
    frame = b"\x02" + encode(record)[1:]
    assert frame[:2] not in fast.WITH_EVENTS
    monkeypatch.setattr(fast, "READERS", {})
    assert decode(frame) == decode_lazily(frame) == record
    assert work.of_parts(decode_lazily(frame)) == work.of_parts(decode_lazily(encode(record)))
    for cut in (frame[:-1], frame + b"\0"):
        for data in (cut, b"\x01" + cut[1:]):
            with pytest.raises(MalformedRecord):
                decode_lazily(data)
    assert encode(decode(frame))[0] == 1, "it is written again at the level that it needs"


def test_a_reply_is_handwritten_only_at_level_1() -> None:
    data = encode(reply(replace(INFO, description=TEXT)))
    assert data[:2] == b"\x02\x20"
    assert decode(data).result.streams[0].description == TEXT
