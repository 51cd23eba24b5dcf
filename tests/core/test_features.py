"""The feature level: what raises it, and what is refused above it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.core import rows as k
from anabranch.core.state import State
from anabranch.errors import FeatureNotEnabled, UnsupportedVersion
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


def test_fields_of_higher_levels_come_last_and_have_defaults() -> None:
    highest = 1
    for schema in schemas():
        levels = [field.get("level", 1) for field in schema.get("fields", ())]
        assert levels == sorted(levels), schema["name"]
        highest = max([highest, *levels])
        for field, level in zip(schema.get("fields", ()), levels, strict=True):
            assert level == 1 or f"{schema['name']}.{field['name']}" in DEFAULTS
    assert highest == LEVEL
