"""The wheel of the former release reads what this one writes, or refuses it by its feature level."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import TYPES, encode, level_of
from tests import older_build
from tests.schemas.protocol_page import EXAMPLES
from tests.schemas.test_levels import PAIRS


def reread(frames: list[bytes]) -> list[dict[str, Any]]:
    """What the former release says of each."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.schemas.rereading"],
        input="".join(f"{frame.hex()}\n" for frame in frames),
        env=os.environ | older_build.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    began, *said = map(json.loads, done.stdout.splitlines())
    assert Path(began["file"]).is_relative_to(older_build.tree())
    assert began["level"] == 1
    assert len(said) == len(frames)
    return said


@pytest.mark.slow(25)
def test_the_former_release_reads_level_1_and_refuses_level_2_by_name() -> None:
    records = [*EXAMPLES.values(), *(record for pair in PAIRS for record in pair)]
    commands = {type(record) for record in EXAMPLES.values()}
    assert commands <= set(TYPES.values())
    for record, said in zip(records, reread([*map(encode, records)]), strict=True):
        if isinstance(
            record, r.DescribeLeader
        ):  # a type that is newer: its answer is for those that ask
            assert said["error"][0] == said["lazily"] == "UnsupportedVersion"
        elif isinstance(record, r.Reply) and isinstance(record.result, r.LeaderInfo):
            assert "error" in said
        elif level_of(record) == 1:
            assert said == {"same": True}, record
        else:
            kind, text = said["error"]
            assert (kind, said["lazily"]) == ("UnsupportedVersion", "UnsupportedVersion")
            assert "a record has feature level 2, and this release knows levels 1 to 1" in text


def test_the_former_release_refuses_whatever_claims_a_level_it_does_not_know() -> None:
    frames = [
        bytes((level, number)) + body
        for level in (0, 2, 3, 255)
        for number in (2, 8, 32, 37, 67, 110, 255)
        for body in (b"", b"\xff" * 50)
    ]
    for frame, said in zip(frames, reread(frames), strict=True):
        assert said["error"][0] == said["lazily"] == "UnsupportedVersion", frame
        assert f"feature level {frame[0]}" in said["error"][1]
