"""The table of limits on the page is the one in the code (``python -m tests.core.test_limits`` writes it anew), and
what is beyond is refused before anything is logged.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anabranch.batches.packer import BATCH_BYTES
from anabranch.controller.durability import HISTORY_BYTES
from anabranch.protocol import limits
from anabranch.protocol.partitioner import SPACE
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import encode
from tests.controller.world import World
from tests.core.labels import SECRET

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
_PART = re.compile(r"(<!-- limits -->\n).*?(<!-- end -->)", re.DOTALL)
STREAM = "nyc/a"


def page() -> str:
    rows = [f"| {limit.bounds} | {limit.value:,} {limit.unit} |" for limit in limits.TABLE]
    table = "\n".join(["| of what | at most |", "|---|---|", *rows, ""])
    return _PART.sub(lambda found: found[1] + table + found[2], PAGE.read_text("utf-8"))


def test_the_page_is_as_the_code_says() -> None:
    assert page() == PAGE.read_text("utf-8")


class Place:
    """A stream, and a transaction that has touched it."""

    def __init__(self, **settings: Any) -> None:
        self.world = World()
        self.leader = self.world.controller(max_streams=4, max_partitions=18, **settings)
        self.leader.lead()
        self.world.stream(self.leader, STREAM, 1)
        small = r.CreateStream("nyc/small", 1, {"max.message.bytes": "20000"})
        self.world.ask(self.leader, small)
        self.txn_id = self.world.txn_id()
        self.token = self.world.ask(
            self.leader, r.Begin(self.txn_id, "nyc", None, 60_000, SECRET)
        ).token
        self.world.ask(self.leader, r.Touch(self.token, STREAM))

    def shot(
        self, stream: str = STREAM, size: int = 1, headers: int = 0, at: int = -1
    ) -> r.OneShot:
        few = (r.EventHeader("h", b""),) * headers
        event = r.Event(stream, -1, b"k", bytes(size), few, at)
        return r.OneShot(self.world.txn_id(), "nyc", None, (event,))

    def receipt(self, extents: int, stream: str = STREAM) -> r.Receipt:
        some = tuple(r.Extent(stream, 0, 0, 0, 0, i) for i in range(extents))
        return r.Receipt(self.txn_id, 1, 1, True, some)


# Longer lists than the codec reads; what `core` refuses is in `test_refusals`.
UNREADABLE: dict[str, Callable[[Place], object]] = {
    "extents": lambda p: r.Register(p.token, p.receipt(20_001)),
    "events": lambda p: p.shot()._replace(events=p.shot().events * 5_001),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_longer_list_than_is_read_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COMMAND", limits.COMMAND._replace(value=8 << 20))
    place = Place()
    answer = place.world.ask(place.leader, UNREADABLE[what](place))
    assert (answer.code, len(answer.message) <= limits.TEXT.value) == ("MalformedRecord", True)


@pytest.mark.parametrize(("takes", "most"), [(16, 3 << 20), (8, 3 << 20), (4, 3 << 19)])
def test_receipts_fit_what_the_topics_take(takes: int, most: int) -> None:
    """A commit's row has them all, beside a command; so does an answer that names them, at the end of a list."""
    place = Place(record_bytes=takes << 20)
    settings = place.leader.settings
    assert settings.receipt_bytes == most
    rest = limits.COMMAND.value + BATCH_BYTES
    assert most + rest < settings.record_bytes
    assert most + settings.listed_bytes + BATCH_BYTES < settings.record_bytes


def test_smaller_messages_are_named_where_they_limit() -> None:
    place = Place(record_bytes=8 << 10)
    answer = place.world.ask(place.leader, r.Register(place.token, place.receipt(100)))
    assert answer.message == (
        "what a transaction's writers have registered, about, has 4,548 bytes; 3,072 are allowed (the topics of "
        "status and replies take small messages only: `--max-message-bytes`)"
    )


def test_the_widest_step_of_a_history_fits_any_that_is_taken() -> None:
    count, far = limits.SEGMENTS.value, 1 << 45
    ends = tuple(r.Position(p, far) for p in range(limits.STREAM_PARTITIONS.value))
    top = (1 << 31) - 1
    last = top - count << 32  # an epoch, and a number within it
    rows = range(count)
    epoch = r.EpochRecord(
        top,
        top,
        1 << 62,
        tuple(r.EpochSegment(last + n, SPACE - 2, SPACE - 1, count + n, far) for n in rows),
        tuple(r.SegmentEnd(last + n, far) for n in rows),
        ends,
        far,
    )
    parts = tuple(r.SegmentCommit(last + n, count + n, far, far, far) for n in rows)
    for record in (epoch, r.CommitRecord(b"t" * 16, top, 1 << 62, parts, ends, far)):
        assert len(encode(record)) < HISTORY_BYTES
    assert limits.LEAST_RECORD.value > 2 * HISTORY_BYTES


def test_a_reason_is_cut_and_nothing_is_refused_for_it() -> None:
    place = Place()
    outcome = place.world.ask(place.leader, r.Abort(place.token, "x" * 500_000))
    assert (outcome.state, len(outcome.reason)) == ("ABORTED", limits.TEXT.value)


def test_a_commit_past_the_limit_of_waiters_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAITERS", limits.WAITERS._replace(value=2))
    place = Place()
    never = replace(place.receipt(1), extents=(r.Extent(STREAM, 0, 0, 99, 99, 0),))
    asked = [place.world.send(r.Commit(place.token, (never,), (), None, 60_000)) for _ in range(3)]
    place.leader.step(0)
    answers = [place.world.reply(each) for each in asked]
    assert [getattr(answer, "code", None) for answer in answers] == [None, None, "NotReady"]


@pytest.mark.parametrize("kind", ["streams", "open", "finished"])
def test_lists_come_in_parts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small an answer has to be, all are listed, each once, in order."""
    monkeypatch.setattr(limits, "ANSWER", limits.ANSWER._replace(value=600))
    place, found, parts = Place(), [], 0
    for _ in range(3):
        place.world.ask(place.leader, r.Begin(place.world.txn_id(), "nyc", None, 60_000, SECRET))
    after: Any = None
    while parts == 0 or after is not None:
        if kind == "streams":
            answer = place.world.ask(place.leader, r.DescribeStreams("nyc", None, after))
            found += [info.stream for info in answer.streams]
        else:
            listing = r.ListTransactions(None, kind == "finished", 100, after)
            answer = place.world.ask(place.leader, listing)
            found += [outcome.txn_id for outcome in answer.transactions]
        parts, after = parts + 1, answer.more
    assert found == sorted(set(found), reverse=kind == "finished")
    assert (len(found), parts > 1) == (2 if kind == "streams" else 4, True)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
