"""Events that stay encoded: what a compiled walk finds and copies is what their events say, read one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.batches.builder import Row
from anabranch.batches.framing import kernels
from anabranch.batches.one_shots import EventCopies, EventPart, decode_lazily
from anabranch.batches.packer import Packer
from anabranch.batches.records import decode_records
from anabranch.core import rows as k
from anabranch.core.command_events import CommandEvents, SomeEvents
from anabranch.core.decisions.turn import Turn
from anabranch.core.state import State
from anabranch.errors import AnabranchError, MalformedRecord
from anabranch.protocol.ids import TXN_HEADER
from anabranch.protocol.limits import HEADERS
from anabranch.protocol.schemas import codec, fast
from anabranch.protocol.schemas import records as r
from tests.batches.strategies import mutated
from tests.core.harness import World, nyc
from tests.schemas.test_codec import patient, zigzag
from tests.schemas.test_fast import (
    TXN_ID,
    events,
    numbers,
    one_shots,
    plain_events,
    prepare_events,
    prepared_rows,
)

NOW = 1_795_000_000_000
with_events = one_shots | prepare_events | prepared_rows


def said(decode: Any, data: bytes) -> Any:
    """The record, or the kind of the refusal."""
    try:
        return decode(data)
    except AnabranchError as error:
        return type(error), str(error)


def assert_same(found: CommandEvents, wanted: CommandEvents) -> None:
    """What decisions see, and the bytes of each event."""
    assert found == wanted
    assert tuple(found.runs) == tuple(wanted.runs)
    assert (list(found.places), list(found.sizes)) == (wanted.places, wanted.sizes)
    for which in range(len(wanted)):
        assert list(SomeEvents(found, [which])) == [wanted[which]]
        assert SomeEvents(found, [which]).keys == [wanted[which].key]
    assert found.items == wanted.items


@patient(300)
@given(with_events)
def test_the_walk_finds_what_the_events_say(record: Any) -> None:
    found: Any = decode_lazily(codec._encode(record))
    assert found == record
    assert codec.encode(found) == codec._encode(record), "encoded events are written as they are"
    if record.events:
        assert isinstance(found.events, CommandEvents), "the usual form is not decoded"
        assert_same(found.events, CommandEvents.of(record.events))


@patient(300)
@given(with_events, st.data())
def test_of_mutated_bytes_the_walk_accepts_what_fastavro_accepts(
    record: Any, data: st.DataObject
) -> None:
    whole = codec._encode(record)
    other = whole[:2] + mutated(whole[2:], data, most=4)
    found = said(decode_lazily, other)
    assert found == said(codec.decode, other)
    its: Any = getattr(found, "events", ())
    if isinstance(its, CommandEvents):
        assert_same(its, CommandEvents.of(tuple(its)))


@patient(300)
@given(st.sampled_from([*fast.WITH_EVENTS]), st.binary(max_size=200))
def test_of_random_bytes_the_walk_accepts_what_fastavro_accepts(kind: bytes, body: bytes) -> None:
    data = kind + body
    assert said(decode_lazily, data) == said(codec.decode, data)


def test_every_truncation_is_refused() -> None:
    headers = (r.EventHeader("h", b"x"), r.EventHeader("naïve", None))
    its = (*plain_events(3), r.Event("nyc/b", 7, None, None, headers, NOW))
    data = codec._encode(r.OneShot(TXN_ID, "nyc", None, its))
    for size in range(2, len(data)):
        with pytest.raises(MalformedRecord):
            decode_lazily(data[:size])


def test_unusual_forms_are_left_to_fastavro() -> None:
    data = codec._encode(r.OneShot(TXN_ID, "nyc", None, plain_events(2)))
    at = 2 + 16 + 4 + 1  # the array of events
    body = data[at + 1 : -3]
    sized = data[:at] + zigzag(-2) + zigzag(len(body)) + body + zigzag(0) * 3
    apart = data[:at] + zigzag(1) + body[: len(body) // 2]
    apart += zigzag(1) + body[len(body) // 2 :] + zigzag(0) * 3
    for other in (sized, apart):
        found = decode_lazily(other)
        assert type(found.events) is tuple
        assert found == decode_lazily(data)


def test_a_number_of_events_that_the_bytes_cannot_have_takes_no_memory() -> None:
    empty = codec._encode(r.PreparedRow(r.Prepare(b"", b""), NOW))
    data = empty[:-1] + zigzag(1 << 40)
    assert said(decode_lazily, data) == said(codec.decode, data)


def test_long_numbers_of_few_bits_are_read_as_fastavro_reads_them() -> None:
    event = r.Event("nyc/a", 1, b"k", b"v", (), 1)
    data = codec._encode(r.OneShot(TXN_ID, "nyc", None, (event,)))
    at = data.index(b"\x02\x02\x02k\x02\x02v")  # the segment, then the key
    longer = data[:at] + b"\x82\x80\x00\x02\x82\x00k" + data[at + 4 :]
    found = decode_lazily(longer)
    assert found == decode_lazily(data)
    assert batches(found.events, found.events.payload) == batches(
        CommandEvents.of((event,)), found.events.payload
    )


@pytest.mark.parametrize("walk", ["scan", "copy"])
def test_a_walk_of_microseconds_does_not_let_other_threads_in(walk: str) -> None:
    """Else a leader waits for a busy thread after each command."""
    assert not getattr(kernels().events, walk).targetoptions["nogil"]


# -- copies --------------------------------------------------------------------------------------


def batches(own: CommandEvents, payload: bytes = b"") -> list[Any]:
    copies = EventCopies()
    part = copies.part(SomeEvents(own, range(len(own))), NOW, bytes(28))
    return made(Packer(), lambda packer: packer.events([(0, part)], copies))


def made(packer: Packer, add: Any) -> list[Any]:
    return [*add(packer), *packer.flush()]


@patient(200)
@given(
    st.lists(
        st.tuples(st.lists(events, min_size=1, max_size=6), st.randoms(use_true_random=False)),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([100, 300, 1000, 80_000, 1_000_000]),
    st.integers(0, NOW),
)
def test_copies_are_what_a_batch_of_rows_is(
    commands: list[tuple[list[r.Event], Any]], limit: int, now_ms: int
) -> None:
    """Byte for byte, with the bounds of the batches. Each commit's events go to two parts.

    Two commits may have the same events: then these are decoded once.
    """
    copies = EventCopies()
    parts: list[tuple[int, EventPart]] = []
    rows: list[list[Row]] = []
    shots = [
        (decode_lazily(codec._encode(r.OneShot(TXN_ID, "nyc", None, tuple(its)))), its, draw)
        for its, draw in commands
    ]
    for number, (shot, its, draw) in enumerate([*shots, shots[-1]]):
        txn = bytes([number]) * 28
        chosen = [n for n in range(len(its)) if draw.random() < 0.6]
        others = [n for n in range(len(its)) if n not in chosen]
        for which in (chosen, others):
            some = SomeEvents(shot.events, which)
            parts.append((len(parts), copies.part(some, now_ms + number, txn)))
            rows.append(
                [
                    (
                        one.key,
                        one.value,
                        (*one.headers, (TXN_HEADER, txn)),
                        one.timestamp if one.timestamp >= 0 else now_ms + number,
                    )
                    for one in some
                ]
            )
    found = made(Packer(limit), lambda packer: packer.events(parts, copies))

    def add_rows(packer: Packer) -> Any:
        for number, its in enumerate(rows):
            yield from packer.rows(number, its)

    assert found == made(Packer(limit), add_rows)
    assert sum(len(decode_records(one.data)) for one in found) == sum(map(len, rows))


# -- decisions -----------------------------------------------------------------------------------

STREAMS = ["nyc/a", "nyc/b", "nyc/none"]
names = st.sampled_from(["h", "ab.x", "ab.", "a", "naïve"])
placed_events = st.builds(
    r.Event,
    st.sampled_from(STREAMS[:2]) | st.sampled_from(STREAMS),
    st.sampled_from([-1, 0, 1, 9]) | numbers,
    st.none() | st.binary(max_size=3),
    st.none() | st.sampled_from([b"", b"v", b"v" * 900]),
    st.just(()) | st.lists(st.builds(r.EventHeader, names, st.none()), max_size=2).map(tuple),
    st.just(-1) | st.sampled_from([-2, 0, NOW, 1 << 60]),
)


def decided(decode: Any, its: list[r.Event]) -> tuple[str, Any]:
    """The answer, and where the events go."""
    world = nyc("nyc/a", "nyc/b")
    world.log_rows([_bounded(world)])
    data = codec.encode(r.OneShot(world.id("A"), "nyc", None, tuple(its)))
    turn = world.new_turn()
    world._decide(turn, decode(data), world.asker("x"))
    return _said_and_placed(turn)


def ended(decode: Any, its: list[r.Event]) -> tuple[str, Any]:
    """The same of a transaction that is prepared with all its events, and then commits."""
    world = nyc("nyc/a", "nyc/b")
    world.log_rows([_bounded(world)])
    world.state = State(world.table, trusts_open=True, decode=decode)
    txn_id = world.id("A")
    prepare = r.PrepareEvents(txn_id, "nyc", None, tuple(its), bytes(32), r.Prepare(b"", b"a"))
    commit = r.Commit(txn_id, (), None, None, 0)
    turn = world.new_turn()
    for command in (prepare, commit):
        world._decide(turn, decode(codec.encode(command)), world.asker("x"))
    return _said_and_placed(turn)


def _said_and_placed(turn: Turn) -> tuple[str, Any]:
    answers = [answer for _, answer in turn.round.replies]
    parts = [
        (commit.stream, part.segment_id, tuple(part.events))
        for commit in turn.round.commits
        for part in commit.parts
    ]
    return repr(answers), parts


def _bounded(world: World) -> tuple[bytes, Any]:
    """A row by which a stream takes small events."""
    row = world.state.streams["nyc/b"]
    small = replace(row, settings={**row.settings, "max.message.bytes": "500"})
    return k.stream_key("nyc/b"), small


@patient(200)
@given(st.lists(placed_events, max_size=7))
def test_decisions_are_those_on_decoded_events(its: list[r.Event]) -> None:
    """Placement, and the first refusal in the order of the events. Prepared events are refused when they come."""
    assert decided(decode_lazily, its) == decided(codec.decode, its)
    assert ended(decode_lazily, its) == ended(codec.decode, its)


@pytest.mark.parametrize("count", [HEADERS.value, HEADERS.value + 1])
def test_the_limit_of_headers_is_that_of_decoded_events(count: int) -> None:
    headers = tuple(r.EventHeader("h", None) for _ in range(count))
    its = [r.Event("nyc/a", -1, b"k", b"", headers, -1)]
    assert decided(decode_lazily, its) == decided(codec.decode, its)
