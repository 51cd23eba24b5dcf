"""A scaled stream's history on a real cluster: listed and drawn by the command line."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

import anabranch
from anabranch.presentation.history import read_history
from anabranch.protocol.schemas.records import CommitRecord

pytestmark = pytest.mark.broker


def test_a_transaction_rolled_in_is_listed_and_drawn(client: anabranch.Client, unique: str) -> None:
    from anabranch.presentation.history import draw

    stream = f"{unique}/flights"
    client.create_stream(stream, segments=1)
    old = client.begin(unique)
    old.write(stream, b"old", b"k")
    old.flush()  # it is in the journal, by the layout of now
    client.scale(stream, segments=2)
    with client.begin(unique) as young:
        young.write(stream, b"young", b"k")
        young.commit()
    old.commit()
    past = read_history(client.reader_ports(), stream, last=200)
    assert [(e.stream_epoch, e.reference_epoch, len(e.segments)) for e in past.epochs] == [
        (0, 0, 1),
        (1, 1, 2),
        (2, 0, 1),
        (3, 1, 2),
    ]
    assert [c.stream_epoch for c in past.commits] == [1, 2]
    assert all(isinstance(c, CommitRecord) for c in past.commits)
    recent = read_history(client.reader_ports(), stream, last=2)
    assert (recent.epochs, recent.commits) == (past.epochs[2:], past.commits[1:])
    picture = ET.fromstring(draw(past.epochs, past.commits, stream))
    assert [e.get("class") for e in picture.iter()].count("rolled-in") == 1
