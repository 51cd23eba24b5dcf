"""Exclusive streams: one transaction at a time writes a segment; who waits, and who dies."""

from __future__ import annotations

import random
from itertools import combinations
from typing import Any

import pytest

from anabranch.core.locks import locked_segments, segment_locks
from anabranch.core.locks.wait_die import Fate, Held, Spans, meet, meets
from anabranch.protocol import limits
from anabranch.protocol.ids import control_partition_of, make_txn_id
from anabranch.protocol.partitioner import SPACE
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import LEVEL
from tests.core.harness import World, event

X, Y, PLAIN = "nyc/x", "nyc/y", "nyc/plain"
LOW, HIGH = 0, SPACE - 1  # positions in the first and in the last segment


class Desk(World):
    """Two exclusive streams of two segments each, and one that is not; labels are in the order of age."""

    def __init__(self, **settings: str) -> None:
        super().__init__()
        self.find_scope()
        self.ask("level", r.SetFeatureLevel(LEVEL), lane="admin")
        for stream in (X, Y):
            self.create(stream, 2, exclusive="true", **settings)
            self.created(stream, 0, 0)
        self.create(PLAIN)
        self.created(PLAIN, 0, 0)

    def start(self, *labels: str) -> None:
        for label in labels:
            self.wall_us += 1000
            self.begin(label)

    def lock(self, label: str, stream: str = X, *positions: int, wait_ms: int = 10_000) -> str:
        """Touch; what was said, with what is locked: ``A 0`` · ``A waits`` · ``A dies, B 0``."""
        touch = r.Touch(
            self.token(label), stream, self.writer(f"w{label}"), (), positions or (LOW,), wait_ms
        )
        self.turn((label, touch))
        return self.told(label)

    def told(self, *waiting: str) -> str:
        found = []
        for to, result in self.said:
            who = to.correlation_id.decode()
            if isinstance(result, r.Touched):
                assert result.exclusive
                found.append(f"{who} {','.join(map(str, result.locked))}")
            elif isinstance(result, r.Refusal):
                found.append(f"{who} {result.code}".replace("TransactionAborted", "dies"))
        silent = [f"{who} waits" for who in waiting if not any(f.split()[0] == who for f in found)]
        return ", ".join([*silent, *found])

    def end(self, label: str, *, commit: bool = True) -> str:
        """Commit or abort; what those are told who waited."""
        if commit:
            self.commit(label, receipts=())
            self.turn()  # it is merged
        else:
            self.abort(label)
        return self.told()

    def holders(self, stream: str = X) -> str:
        rows = self.state.locked.get(stream, {})
        return ", ".join(f"{self.label(txn)} {row.locked}" for txn, row in sorted(rows.items()))


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    desk.start(*"ABCDE")
    return desk


def test_the_older_one_waits_and_the_younger_one_dies(desk: Desk) -> None:
    assert desk.lock("C") == "C 0"
    assert desk.lock("D") == "D dies"
    assert "which has locked segment 0 of nyc/x for" in desk.row("D").reason
    assert desk.lock("B") == "B waits"
    assert desk.lock("A") == "A waits"
    assert desk.lock("E") == "E dies", "it is younger than those that wait, too"
    assert desk.end("C") == "B 0", "in the order in which they came: A waits for a younger one"
    assert desk.end("B") == "A 0"
    assert desk.end("A") == ""
    assert not desk.state.locked
    assert desk.memory.segment_asks.by_stream.is_empty


def test_none_that_came_later_gets_in_before_an_older_one(desk: Desk) -> None:
    desk.lock("D", X, LOW)
    assert desk.lock("B", X, LOW, HIGH) == "B waits"
    assert desk.lock("C", X, HIGH) == "C dies", "the last segment is free, but B waits for it"
    assert desk.end("D") == "B 0,1"


def test_segments_are_locked_one_by_one_and_kept_to_the_end(desk: Desk) -> None:
    assert desk.lock("A", X, LOW) == "A 0"
    assert desk.lock("A", X, LOW) == "A 0", "again"
    assert desk.lock("B", X, HIGH) == "B 1"
    assert desk.lock("A", X, HIGH) == "A waits"
    assert desk.end("B", commit=False) == "A 0,1"
    assert desk.lock("A", Y, HIGH) == "A 1"
    desk.lead()
    assert desk.holders() == f"A {(0, 1)}", "a successor knows it"
    assert desk.lock("C", Y, HIGH) == "C dies"


def test_one_that_died_is_told_so_again(desk: Desk) -> None:
    desk.lock("A")
    desk.lock("B", Y)
    desk.lock("C", Y, HIGH)
    assert desk.lock("B", X) == "B dies"
    assert desk.holders(Y) == f"C {(1,)}", "what it had locked is free"
    assert desk.lock("B", Y) == "B dies"
    assert "which has locked segment 0 of nyc/x" in desk.message


def test_a_death_in_one_stream_ends_a_wait_in_another(desk: Desk) -> None:
    desk.lock("B", Y)
    desk.lock("C", X)
    assert desk.lock("A", X) == "A waits"
    assert desk.lock("C", Y) == "C dies, A 0"


def test_a_wait_has_an_end_and_a_place_outlasts_it(desk: Desk) -> None:
    desk.lock("C")
    assert desk.lock("B", wait_ms=1_000) == "B waits"
    assert segment_locks.next_due_ms(desk.memory.segment_asks, desk.now_ms) == 1_000
    desk.wait(600)
    assert desk.lock("B", wait_ms=1_000) == "B waits", "a copy of the request"
    desk.wait(400)
    assert desk.told() == "B Locked", "the copy does not make the wait longer"
    assert "which has locked segment 0 of nyc/x for 1,000 ms" in desk.message
    assert desk.lock("A") == "A waits"
    assert desk.lock("B") == "B waits", "in its old place, before A"
    assert desk.end("C") == "B 0"
    desk.lock("A", wait_ms=0)
    desk.wait(limits.ASK_KEPT_MS)
    assert desk.memory.segment_asks.by_stream.is_empty, "its client asks no more"


def test_two_writers_of_a_transaction_that_wait_are_both_answered(desk: Desk) -> None:
    desk.lock("C")
    for who in ("first", "second"):
        touch = r.Touch(desk.token("B"), X, desk.writer(who), (), (LOW,), 5_000)
        desk.turn((who, touch))
    assert desk.lock("A") == "A waits"
    assert desk.end("C") == "first 0, second 0"
    assert desk.end("B") == "A 0"


def test_a_full_queue_keeps_places_and_refuses_nobody_for_whom_others_wait(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SEGMENT_ASKS", limits.Limit(4, "touches", "…"))
    desk.lock("E")
    assert [desk.lock("D"), desk.lock("C", wait_ms=1)] == ["D waits", "C waits"]
    assert desk.lock("B") == "B Locked", "half of the places are the lane's"
    assert desk.lock("E", X, HIGH) == "E 0,1", "the others wait for it"
    desk.wait(10)
    assert desk.told() == "C Locked"
    assert desk.lock("C") == "C waits", "it has its place"


def test_an_open_transaction_is_aborted_after_the_hold_limit() -> None:
    desk = Desk(exclusive_hold_ms="2000")
    desk.start(*"ABC")
    desk.lock("C")
    desk.lock("A", Y)
    desk.lock("B")
    desk.lock("A", Y, HIGH)
    desk.wait(1_900)
    assert desk.row("C").state == "OPEN"
    desk.wait(300)
    assert "it held segment 0 of nyc/x for more than 2,000 ms" in desk.row("C").reason
    assert desk.row("A").state == "ABORTED", (
        "each stream has its own limit, counted from its first segment"
    )
    assert desk.holders() == f"B {(0,)}"


def test_single_commands_are_refused_and_plain_writes_wait(desk: Desk) -> None:
    desk.lock("C", X, LOW)
    low, high = b"key-0", b"key-1"  # by their hash
    spot = desk.state.layouts[X].find
    assert (spot(low), spot(high)) == (0, 1)
    assert desk.one_shot("s1", event(X, low)) == "Locked"
    assert "which has locked segment 0 of nyc/x" in desk.message
    assert desk.one_shot("s2", event(X, high)) == "s2 COMMITTED 1"
    desk.write_plainly(X)
    desk.turn()
    assert desk.plain() == ""
    desk.lock("B", X, LOW)
    assert desk.end("C") == "", "plain writes come before the next one"
    assert segment_locks.next_due_ms(desk.memory.segment_asks, desk.now_ms) == 0
    desk.turn()
    assert (desk.plain(), desk.told()) == ("nyc/x 0[0-1)", "B 0")


def test_plain_writes_go_first_after_the_hold_limit() -> None:
    desk = Desk(exclusive_hold_ms="2000")
    desk.start("A")
    desk.lock("A", X, LOW)
    desk.write_plainly(X)
    holder, others = "A", [f"Z{number}" for number in range(20)]
    for number, label in enumerate(others):  # some segment is always locked
        desk.wait(500)
        desk.start(label)
        if desk.lock(label, X, (HIGH, LOW)[number % 2]) == f"{label} dies":
            break
        desk.end(holder)
        holder = label
    assert number == 4
    assert "met plain writes of nyc/x, which have waited for 2," in desk.row(label).reason
    desk.end(holder)
    desk.turn()
    assert desk.plain() == "nyc/x 0[0-1)"


def test_a_prepared_one_keeps_what_it_locked(desk: Desk) -> None:
    shot = r.PrepareEvents(
        desk.id("P"), "nyc", None, (event(X, b"key-0"),), bytes(32), r.Prepare(b"", b"1")
    )
    desk.lock("C", X, HIGH)
    desk.lock("B", X, LOW, HIGH)
    assert desk.ask("P", shot) == "Locked", "B waits for the segment"
    desk.end("B", commit=False)
    assert desk.ask("P", shot) == "P PREPARED 1"
    assert desk.holders() == f"C {(1,)}, P {(0,)}"
    assert desk.lock("A", X, LOW) == "A waits"
    desk.wait(700_000)
    assert desk.row("P").state == "PREPARED", "no hold limit ends it"


def test_records_in_segments_that_are_not_locked_are_rejected(desk: Desk) -> None:
    desk.lock("A", X, LOW)
    desk.write("A", "wA", X, 3, partition=0)
    desk.write("A", "wA", X, 2, partition=1)
    desk.turn()
    assert dict(desk.index.rejected[X]) == {"not_locked": 2}


def test_a_lock_holds_for_its_keys_when_the_stream_is_scaled(desk: Desk) -> None:
    desk.lock("B", X, LOW)
    desk.ask("scale", r.Scale(X, 1, (), ()), lane="admin")
    desk.turn()
    assert [each.low for each in desk.state.streams[X].segments] == [0]
    assert desk.lock("A", X, HIGH) == "A waits", "its one segment has B's keys"
    assert desk.end("B") == "A 2"


def test_what_is_held_and_who_waits_is_listed(desk: Desk) -> None:
    desk.lock("C", X, LOW)
    desk.lock("B", X, LOW)
    desk.ask("x", r.DescribeStreams(None, X), lane="admin")
    (held,) = desk.result.streams[0].locked_segments
    assert (held.segment, held.txn_id, held.waiting) == (0, desk.id("C"), (desk.id("B"),))
    assert 0 < held.left_ms <= 600_000
    desk.ask("open", r.ListOpen(None, desk.id("B"), 10))
    (info,) = desk.result.transactions
    assert [each.txn_id for each in info.asks] == [desk.id("C")]
    assert not info.locked_segments


def test_lists_of_many_that_wait_are_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked_segments, "_LISTED", 2)
    for label in "EDCB":
        desk.lock(label, X, LOW)
    desk.ask("x", r.DescribeStreams(None, X), lane="admin")
    (held,) = desk.result.streams[0].locked_segments
    assert held.waiting == (desk.id("D"), desk.id("C"))
    desk.ask("open", r.ListOpen(None, desk.id("B"), 10))
    (info,) = desk.result.transactions
    assert [each.waiting for each in info.asks] == [(desk.id("B"),)], "also the last of them"
    desk.ask("open", r.ListOpen(None, None, 10))
    found = {each.outcome.txn_id: each for each in desk.result.transactions}
    assert [each.segment for each in found[desk.id("B")].asks] == [0]
    assert [each.waiting for each in found[desk.id("E")].locked_segments] == [()]


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"exclusive": "no"}, "InvalidArgument"),
        ({"exclusive": "true", "table": "true"}, "UnsupportedSetting"),
        ({"exclusive_hold_ms": "5000"}, "UnsupportedSetting"),
        ({"exclusive": "true", "exclusive_hold_ms": "1"}, "InvalidArgument"),
    ],
)
def test_settings_that_are_refused(desk: Desk, settings: dict[str, str], code: str) -> None:
    assert desk.create("nyc/z", 2, **settings) == code


@pytest.mark.parametrize(
    ("positions", "wait_ms", "code"),
    [
        ((SPACE,), 0, "InvalidArgument"),
        ((-1,), 0, "InvalidArgument"),
        ((0,), -1, "InvalidArgument"),
    ],
)
def test_touches_that_are_refused(
    desk: Desk, positions: tuple[int, ...], wait_ms: int, code: str
) -> None:
    assert desk.lock("A", X, *positions, wait_ms=wait_ms) == f"A {code}"


def test_below_level_4_no_stream_is_exclusive() -> None:
    world = World()
    world.find_scope()
    assert world.create(X, exclusive="true") == "FeatureNotEnabled"


def test_the_keys_that_are_locked_are_found_as_by_looking_at_each() -> None:
    rng, held, all_spans = random.Random(1), Held(), dict[bytes, Spans]()
    for _ in range(500):
        txn_id, low = bytes([rng.randrange(6)]), rng.randrange(30)
        span = (low, low + rng.randrange(1, 5))
        found = {one: s for one, its in all_spans.items() if (s := _met(its, span))}
        assert {one: tuple(sorted(its)) for one, its in held.of((span,)).items()} == found
        if not found:
            held.lock(txn_id, (span,))
            all_spans[txn_id] = tuple(sorted((*all_spans.get(txn_id, ()), span)))
        elif rng.random() < 0.2:
            held.free(txn_id)
            all_spans.pop(txn_id, None)


def _met(its: Spans, span: tuple[int, int]) -> Spans:
    return tuple(one for one in its if meets((one,), (span,)))


# -- random schedules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_whoever_waits_waits_for_younger_ones_alone(seed: int) -> None:
    """The rule alone, at several control partitions, which know nothing of each other: there is no cycle."""
    rng = random.Random(seed)
    ids = [make_txn_id(rng.randrange(2), rng.randrange(3), n) for n in range(8)]
    # By place: what is locked, and those that wait.
    places: list[tuple[dict[bytes, Spans], list[tuple[bytes, Spans]]]]
    places = [({}, []) for _ in range(3)]
    waits_for: dict[bytes, set[bytes]] = {txn_id: set() for txn_id in ids}
    dead: set[bytes] = set()
    for _ in range(60):
        holders, line = rng.choice(places)
        txn_id = rng.choice(ids)
        low = rng.randrange(4)
        spans: Spans = ((low, low + rng.randrange(1, 3)),)
        if txn_id in dead:
            continue
        met = meet(txn_id, spans, holders, line)
        if met.fate is Fate.LOCK:
            holders[txn_id] = (*holders.get(txn_id, ()), *spans)
        elif met.fate is Fate.WAIT:
            blocking = [one for one, its in (*holders.items(), *line) if meets(spans, its)]
            waits_for[txn_id].update(one for one in blocking if one != txn_id)
            line.append((txn_id, spans))
        else:
            dead.add(txn_id)
            for held, asks in places:
                held.pop(txn_id, None)
                asks[:] = [ask for ask in asks if ask[0] != txn_id]
        oldest = min(ids, key=lambda one: (one[2:8], one[8:], control_partition_of(one)))
        assert oldest not in dead
        reached: set[bytes] = set()
        new = {txn_id} - dead
        while new:
            new = {two for one in new for two in waits_for[one] - dead} - reached
            reached |= new
        assert txn_id not in reached, "it waits for itself"


@pytest.mark.parametrize("seed", range(6))
def test_every_schedule_comes_to_its_end(seed: int) -> None:
    """Never two holders of a key, never a deadlock; the oldest of all is never aborted; leaders come and go."""
    rng, desk = random.Random(seed), Desk()
    wants: dict[str, list[tuple[str, int]]] = {}
    asked: dict[str, Any] = {}
    begun = finished = 0
    for _ in range(2_000):
        if begun < 24 and len(wants) < 6:
            label = f"T{begun}"
            desk.start(label)
            places = [(stream, at) for stream in (X, Y) for at in (LOW, HIGH)]
            wants[label] = rng.sample(places, rng.randrange(1, 4))
            begun += 1
        label = rng.choice(sorted(wants))
        if label in asked and rng.random() < 0.9:
            desk.wait(50)
        elif wants[label]:
            stream, at = asked[label] = wants[label][0]
            touch = r.Touch(desk.token(label), stream, 0, (), (at,), 500)
            desk.turn((label, touch))
        else:
            desk.end(label, commit=rng.random() < 0.7)
            del wants[label]
            finished += 1
        oldest = min(wants, key=lambda one: int(one[1:]), default="")
        for to, result in desk.said:
            who = to.correlation_id.decode()
            if isinstance(result, r.Touched) and who in asked:
                wants[who].remove(asked.pop(who))
            elif isinstance(result, r.Refusal) and result.code == "TransactionAborted":
                assert who != oldest, "the oldest of all was aborted"
                asked.pop(who, None)
                if wants.pop(who, None) is not None:
                    finished += 1
            elif isinstance(result, r.Refusal) and who in asked:
                assert result.code == "Locked"
                del asked[who]
        for stream in (X, Y):
            rows = desk.state.locked.get(stream, {}).values()
            for one, other in combinations(rows, 2):
                assert not {*one.locked} & {*other.locked}, "two hold a segment"
        if rng.random() < 0.02:
            desk.lead()
            asked.clear()
        if finished == 24:
            return
    raise AssertionError(f"{finished} of 24 transactions have ended; {wants} are left")
