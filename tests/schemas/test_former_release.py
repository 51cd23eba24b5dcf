"""The wheel of the former release reads what this one writes, or refuses it by its feature level."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anabranch.protocol.schemas import codec
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import TYPES, encode, least_level, level_of
from tests import older_build
from tests.schemas.protocol_page import EXAMPLES
from tests.schemas.test_levels import PAIRS


def reread(frames: list[bytes]) -> list[dict[str, Any]]:
    """What the former release says of itself, and of each."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.schemas.rereading"],
        input="".join(f"{frame.hex()}\n" for frame in frames),
        env=os.environ | older_build.environment(compiled=False),
        capture_output=True,
        text=True,
        check=True,
    )
    began, *said = map(json.loads, done.stdout.splitlines())
    assert Path(began["file"]).is_relative_to(older_build.tree())
    assert began["level"] == 1
    assert len(said) == len(frames)
    return [began, *said]


@pytest.mark.slow(25)
def test_the_former_release_reads_level_1_and_refuses_level_2_by_name() -> None:
    records = [*EXAMPLES.values(), *(record for pair in PAIRS for record in pair)]
    commands = {type(record) for record in EXAMPLES.values()}
    assert commands <= set(TYPES.values())
    began, *answers = reread([*map(encode, records)])
    for number, cls in TYPES.items():
        assert number in began["types"] or least_level(cls) > began["level"], cls.__name__
    for record, said in zip(records, answers, strict=True):
        if level_of(record) == 1:
            assert said == {"same": True}, record
        else:
            kind, text = said["error"]
            assert (kind, said["lazily"]) == ("UnsupportedVersion", "UnsupportedVersion")
            level = level_of(record)
            assert (
                f"a record has feature level {level}, and this release knows levels 1 to 1" in text
            )


def _level(avro: Any) -> int:
    """The level of a field, or of the record that a branch of a union names."""
    if isinstance(avro, str):
        cls = getattr(r, avro.partition(".")[2], None)
        return 1 if cls is None else least_level(cls)
    return int(avro.get("level", 1))


def form(avro: Any) -> Any:
    """A schema without texts for people, and without fields above the former release's level, 1."""
    if isinstance(avro, list):
        return [form(one) for one in avro if _level(one) == 1]
    if isinstance(avro, dict):
        return {name: form(value) for name, value in avro.items() if name not in ("doc", "level")}
    return avro


def test_no_record_of_the_former_release_has_changed_at_its_level() -> None:
    """A branch more in a union, or another symbol, would be malformed there rather than of a higher level."""
    former = older_build.tree() / older_build.WHEEL / "anabranch" / "protocol" / "schemas"
    files = sorted(former.glob("*.avsc"))
    assert len(files) > 100
    for file in files:
        now = Path(codec.__file__).with_name(file.name).read_text("utf-8")
        assert form(json.loads(now)) == form(json.loads(file.read_text("utf-8"))), file.name


def test_the_former_release_refuses_whatever_claims_a_level_it_does_not_know() -> None:
    frames = [
        bytes((level, number)) + body
        for level in (0, 2, 3, 255)
        for number in (2, 8, 32, 37, 67, 110, 255)
        for body in (b"", b"\xff" * 50)
    ]
    for frame, said in zip(frames, reread(frames)[1:], strict=True):
        assert said["error"][0] == said["lazily"] == "UnsupportedVersion", frame
        assert f"feature level {frame[0]}" in said["error"][1]
