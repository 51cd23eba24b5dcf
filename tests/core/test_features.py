"""The feature level: what raises it, and what is refused above it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.core import rows as k
from anabranch.core.state import State
from anabranch.errors import (
    AnabranchError,
    FeatureNotEnabled,
    MalformedRecord,
    UnsupportedVersion,
)
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import LEVEL, encode
from anabranch.protocol.schemas.making import DEFAULTS, schemas
from tests.core.harness import World
from tests.core.tables import Memory


def answer(world: World, level: int | None, lane: str = ADMIN_LANE) -> str:
    return world.ask("level", r.SetFeatureLevel(level), lane=lane)


# What is asked for, the answer, and the level afterwards.
ASKED: list[tuple[int | None, str, int]] = [
    (None, f"level 1 of {LEVEL}", 1),
    (1, f"level 1 of {LEVEL}", 1),
    (LEVEL, f"level {LEVEL} of {LEVEL}", LEVEL),
    (LEVEL + 1, "UnsupportedVersion", 1),
    (0, "InvalidArgument", 1),
]
TEXT = "Flights from JFK"
DESCRIBED = r.StreamRow(
    "nyc/a", "ACTIVE", 1, {}, 0, 0, (), 1, 1, 1, None, b"", 0, "", b"", (), "open", description=TEXT
)  # fmt: skip


@pytest.mark.parametrize(("level", "said", "then"), ASKED)
def test_set_feature_level(world: World, level: int | None, said: str, then: int) -> None:
    for _ in ("first", "again"):
        assert answer(world, level) == said
        assert world.state.feature_level == then


def test_the_level_is_never_lowered(world: World) -> None:
    world.state.apply(k.FEATURE_KEY, r.FeatureRow(LEVEL + 1, 1))
    assert answer(world, LEVEL) == "IllegalState"


def test_only_operators_raise_the_level(world: World) -> None:
    assert answer(world, LEVEL, lane="open") == "NotAuthorized"


def test_a_status_log_of_a_higher_level_is_refused_whatever_else_it_has() -> None:
    """Its other rows may be of types, of entry types and in forms that this release can't name."""
    state = State(Memory())
    for key, value in (
        (k.stream_key("nyc/a"), bytes((LEVEL + 1, 67))),
        (bytes(16) + b"\xfe", encode(r.FeatureRow(1, 1))),
        (k.FEATURE_KEY, encode(r.FeatureRow(LEVEL + 1, 1))),
    ):
        state.fold_row(key, value)
    with pytest.raises(UnsupportedVersion, match=f"status log has feature level {LEVEL + 1}"):
        state.rederive()


# Level rows that no controller writes; 2^31 is no Avro int. And the row of a stream with a description at level 1.
NONSENSE: dict[str, tuple[dict[bytes, bytes], type[AnabranchError], str]] = {
    "0": ({k.FEATURE_KEY: encode(r.FeatureRow(0, 1))}, MalformedRecord, "feature level 0"),
    "below 0": ({k.FEATURE_KEY: encode(r.FeatureRow(-3, 1))}, MalformedRecord, "feature level -3"),
    "2^31": (
        {k.FEATURE_KEY: b"\x01\x6e\x80\x80\x80\x80\x10\x02"}, MalformedRecord, "32 bits"
    ),
    "the highest": (
        {k.FEATURE_KEY: encode(r.FeatureRow((1 << 31) - 1, 1))},
        UnsupportedVersion,
        f"status log has feature level {(1 << 31) - 1}",
    ),
    "cut": ({k.FEATURE_KEY: b"\x01\x6e\x04"}, MalformedRecord, "FeatureRow"),
    "of a higher level itself": (
        {k.FEATURE_KEY: bytes((LEVEL + 1, 110))}, UnsupportedVersion, f"level {LEVEL + 1}, "
    ),
    "another row": (
        {k.FEATURE_KEY: encode(r.ScopeRow("nyc", 0, ""))}, MalformedRecord, "a ScopeRow where"
    ),
    "lowered": (
        {k.FEATURE_KEY: encode(r.FeatureRow(1, 1)), k.stream_key("nyc/a"): encode(DESCRIBED)},
        MalformedRecord,
        "it has feature level 2, and the log has 1",
    ),
    "taken away": (
        {k.stream_key("nyc/a"): encode(DESCRIBED)},
        MalformedRecord,
        "it has feature level 2, and the log has 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", NONSENSE)
def test_a_status_log_with_nonsense_is_refused_before_it_is_used(what: str) -> None:
    rows, kind, said = NONSENSE[what]
    state = State(Memory())
    for key, value in rows.items():
        state.fold_row(key, value)
    with pytest.raises(kind, match=said) as refused:
        state.rederive()
    if kind is MalformedRecord:
        assert "a record of this key with a null value takes" in str(refused.value)


@pytest.mark.parametrize("frame", [bytes((LEVEL + 1, 78)), bytes((1, 255)), b"\x01\x4e\xff"])
@pytest.mark.parametrize("entry", ["series", "transaction"])
def test_rows_that_are_read_at_once_wait_for_the_level(entry: str, frame: bytes) -> None:
    """A higher level of the log is the reason that is given; else, or if a later row replaces them, they are."""
    key = k.series_key("nyc", "s") if entry == "series" else k.txn_key(b"t" * 16)
    state = State(Memory())
    state.fold_row(key, frame)
    with pytest.raises((UnsupportedVersion, MalformedRecord), match=f"of key {key.hex()}"):
        state.rederive()
    state.fold_row(k.FEATURE_KEY, encode(r.FeatureRow(LEVEL + 1, 1)))
    with pytest.raises(UnsupportedVersion, match=f"status log has feature level {LEVEL + 1}"):
        state.rederive()
    state.fold_row(k.FEATURE_KEY, None)
    state.fold_row(key, None)
    state.rederive()


def test_rows_above_the_level_are_refused(world: World) -> None:
    world.create("nyc/a")
    key = k.stream_key("nyc/a")
    row = replace(world.state.streams["nyc/a"], description=TEXT)
    before = world.state.streams["nyc/a"]
    with pytest.raises(FeatureNotEnabled, match=r"a StreamRow .* cluster feature --raise 2"):
        world.state.apply(key, row)
    assert world.state.streams["nyc/a"] == before
    answer(world, 2)
    assert world.state.apply(key, row) == encode(row)


def describing(text: str = TEXT) -> r.CreateStream:
    return r.CreateStream("nyc/b", 2, {}, description=text)


def test_a_stream_keeps_its_description(world: World) -> None:
    answer(world, 2)
    world.ask("make", describing())
    world.created("nyc/b", 0, 0)
    assert world.state.streams["nyc/b"].description == TEXT
    world.describe(stream="nyc/b")
    assert world.result.streams[0].description == TEXT


@pytest.mark.parametrize(
    ("text", "said"),
    [(TEXT, ""), ("", ""), ("other", "StreamExists"), ("x" * 1025, "InvalidArgument")],
)
def test_a_stream_is_created_again(world: World, text: str, said: str) -> None:
    """A program that knows no description may repeat what it did before."""
    answer(world, 2)
    world.ask("make", describing())
    world.created("nyc/b", 0, 0)
    assert world.ask("repeat", describing(text)).startswith(said or "nyc/b")


# What is altered, the answer, and the description afterwards.
ALTERED: list[tuple[str | None, str, str]] = [
    ("other", "", "other"),
    ("", "", ""),
    (None, "", TEXT),
    (TEXT, "", TEXT),
    ("x" * 1025, "InvalidArgument", TEXT),
]


@pytest.mark.parametrize(("text", "said", "then"), ALTERED)
@pytest.mark.parametrize("settings", [{}, {"scale.cooldown.ms": "90000"}])
def test_a_description_is_altered(
    world: World, text: str | None, said: str, then: str, settings: dict[str, str]
) -> None:
    answer(world, 2)
    world.ask("make", describing())
    world.created("nyc/b", 0, 0)
    for _ in ("first", "again"):
        command = r.AlterStream("nyc/b", settings, (), text)
        assert world.ask("alter", command, lane=ADMIN_LANE).startswith(said or "nyc/b")
        row = world.state.streams["nyc/b"]
        assert row.description == then
        assert row.settings == ({} if said else settings)
        assert encode(row)[0] == (2 if then else 1)


def test_a_description_is_altered_by_operators_and_audited(world: World) -> None:
    answer(world, 2)
    world.ask("make", describing(""))
    world.created("nyc/b", 0, 0)
    command = r.AlterStream("nyc/b", {}, (), TEXT)
    assert world.ask("alter", command, lane="open") == "NotAuthorized"
    assert world.ask("operator", command, lane=ADMIN_LANE).startswith("nyc/b")
    rows = [row for _, row in world.state.rows_below(k.AUDIT_KEY, b"\xff" * 13)]
    assert ("AlterStream", f"nyc/b: description={TEXT}") in [
        (row.command, row.what) for row in rows
    ]


def test_fields_of_higher_levels_come_last_and_have_defaults() -> None:
    highest = 1
    for schema in schemas():
        levels = [field.get("level", 1) for field in schema.get("fields", ())]
        assert levels == sorted(levels), schema["name"]
        highest = max([highest, *levels])
        for field, level in zip(schema.get("fields", ()), levels, strict=True):
            assert level == 1 or f"{schema['name']}.{field['name']}" in DEFAULTS
    assert highest == LEVEL
