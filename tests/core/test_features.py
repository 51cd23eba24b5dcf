"""The feature level: what raises it, and what is refused above it."""

from __future__ import annotations

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


def test_records_above_the_level_are_refused(world: World) -> None:
    record = bytes((LEVEL + 1, 67))
    with pytest.raises(FeatureNotEnabled, match=f"cluster feature --raise {LEVEL + 1}"):
        world.state.check_level(record, "a StreamRow")
    world.state.apply(k.FEATURE_KEY, r.FeatureRow(LEVEL + 1, 1))
    world.state.check_level(record, "a StreamRow")


def test_fields_of_higher_levels_come_last_and_have_defaults() -> None:
    highest = 1
    for schema in schemas():
        levels = [field.get("level", 1) for field in schema.get("fields", ())]
        assert levels == sorted(levels), schema["name"]
        highest = max([highest, *levels])
        for field, level in zip(schema.get("fields", ()), levels, strict=True):
            assert level == 1 or f"{schema['name']}.{field['name']}" in DEFAULTS
    assert highest == LEVEL
