"""The picture of a stream: whole, well-formed, and as big as it says."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest

from anabranch.presentation.history import History, draw
from anabranch.protocol.schemas.records import CommitRecord, EpochRecord
from tests.cli.histories import random_history, rolled_history

SVG = "{http://www.w3.org/2000/svg}"


def history() -> History:
    found = History()
    for record in rolled_history():
        found.add(record, 99)
    return found


def marked(picture: ET.Element, name: str) -> list[ET.Element]:
    return [each for each in picture.iter() if each.get("class") == name]


def drawn(epochs: list[EpochRecord], commits: list[CommitRecord]) -> ET.Element:
    return ET.fromstring(draw(epochs, commits, "Stream a/b"))


def words(picture: ET.Element) -> list[str]:
    return [each.text or "" for each in picture.iter(f"{SVG}text")]


def test_a_transaction_that_is_rolled_in() -> None:
    past = history()
    picture = drawn(past.epochs, past.commits)
    arms = marked(picture, "arm")
    assert len(arms) == 6
    colors = [arm.get("fill") for arm in arms]
    # The copy of the old layout, and only that, stands out.
    assert [color == "#d69e2e" for color in colors] == [False, False, False, True, False, False]
    assert len(marked(picture, "flow")) == 6
    assert len(marked(picture, "scaling")) == 1
    assert len(marked(picture, "rolled-in")) == 1
    assert len(marked(picture, "commit")) == 4
    told = words(picture)
    for part in (
        "Stream a/b", "0@0  p0", "2@1  p1", "0@2  p0", "epoch 2", "copy of 0", "back to 1", "scaled to 2",
        "txn 020202", "4,000 events", "4.5 s",
    ):  # fmt: skip
        assert part in told, part


def test_an_arm_continues_through_epochs_that_don_t_touch_it() -> None:
    epochs, commits = random_history(40, 1)
    picture = drawn(epochs, commits)
    by_id = {int(arm.get("data-segment") or -1): arm for arm in marked(picture, "arm")}
    first = min(s.segment_id for e in epochs[:2] for s in e.segments)
    wide = [float(arm.get("width") or 0) for arm in by_id.values()]
    assert by_id[first] is not None
    assert max(wide) > 3 * min(wide)


@pytest.mark.parametrize("count", [1, 2, 7, 40, 200])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_segment_is_drawn_inside_the_picture(count: int, seed: int) -> None:
    epochs, commits = random_history(count, seed)
    picture = drawn(epochs, commits)
    width, height = float(picture.get("width") or 0), float(picture.get("height") or 0)
    assert 1000 <= width <= 3300
    assert 400 <= height <= 1400
    wanted = {s.segment_id for epoch in epochs for s in epoch.segments}
    arms = marked(picture, "arm")
    assert sorted(int(arm.get("data-segment") or -1) for arm in arms) == sorted(wanted)
    for arm in arms:
        x, y, w, h = (float(arm.get(name) or 0) for name in ("x", "y", "width", "height"))
        assert 0 <= x < x + w <= width
        assert 0 <= y <= y + h <= height
    for text in picture.iter(f"{SVG}text"):
        assert 0 <= float(text.get("x") or 0) <= width
    rolled = {e.stream_epoch for e in epochs if e.reference_epoch != e.stream_epoch}
    assert len(marked(picture, "rolled-in")) <= sum(c.stream_epoch in rolled for c in commits)
    if count >= 40:
        assert marked(picture, "rolled-in")


def test_no_text_covers_another() -> None:
    epochs, commits = random_history(60, 3)
    picture = drawn(epochs, commits)
    rows: dict[str, list[tuple[float, float]]] = {}
    for text in picture.iter(f"{SVG}text"):
        if text.get("text-anchor") == "middle" and text.get("x"):
            half = len(text.text or "") * 5.6 / 2
            x = float(text.get("x") or 0)
            rows.setdefault(text.get("y") or "", []).append((x - half, x + half))
    assert len(rows) >= 4
    for spans in rows.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_the_title_is_escaped() -> None:
    past = history()
    picture = ET.fromstring(draw(past.epochs, past.commits, "<a & \x00 'b'>"))
    assert "<a &   'b'>" in words(picture)


def test_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="at least one epoch"):
        draw([], [], "x")


def test_only_the_last_epochs_are_kept() -> None:
    found = History()
    for record in rolled_history():
        found.add(record, 2)
    assert [e.stream_epoch for e in found.epochs] == [2, 3]
    assert [c.stream_epoch for c in found.commits] == [2]
    assert found.of_epoch(2) == found.commits
    assert found.of_epoch(3) == []
