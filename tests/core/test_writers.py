"""Touch and register: which streams a transaction writes to, and its writers' receipts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from anabranch.core import rows as k
from anabranch.core.journal_runs import covers
from anabranch.protocol import limits
from anabranch.protocol.schemas import records as r
from tests.core.harness import World


def receipt(world: World, *extents: r.Extent, sequence: int = 1, txn: str = "A") -> r.Receipt:
    return r.Receipt(world.id(txn), world.writer("w1"), sequence, False, extents)


def extent(stream: str = "nyc/a", partition: int = 0, first: int = 0, end: int = 1) -> r.Extent:
    return r.Extent(stream, partition, first, end, end - first, 7)


# -- touch -------------------------------------------------------------------------------------


def test_the_first_touch_wins(world: World) -> None:
    world.begin("A")
    assert world.touch("A", "nyc/a") == "touched nyc/a epoch 0 on 0,1"
    assert world.ops() == "BEGIN_TXN A nyc/a:0"
    assert world.result.segments == world.state.streams["nyc/a"].segments
    before = dict(world.table.rows)
    assert world.touch("A", "nyc/a") == "touched nyc/a epoch 0 on 0,1"
    assert world.ops() == "", "already applied"
    assert {key for key, v in world.table.rows.items() if before.get(key) != v} == {
        k.STATUS + k.ROUND_KEY
    }


def test_two_first_touches_in_one_round(world: World) -> None:
    world.begin("A")
    touch = r.Touch(world.token("A"), "nyc/a")
    assert world.turn(("1", touch), ("2", touch)) == (
        "[1] touched nyc/a epoch 0 on 0,1; [2] touched nyc/a epoch 0 on 0,1"
    )
    assert world.ops() == "BEGIN_TXN A nyc/a:0"


def test_the_touched_epoch_is_the_streams_reference_epoch(world: World) -> None:
    row = world.state.streams["nyc/a"]
    world.log_rows(
        [
            (k.stream_key("nyc/a"), replace(row, stream_epoch=5, reference_epoch=3)),
            (k.epoch_key("nyc/a", 3), r.EpochRow("nyc/a", 3, row.segments)),
        ]
    )
    world.begin("A")
    assert world.touch("A") == "touched nyc/a epoch 3 on 0,1"
    assert world.state.participants(world.id("A")) == {"nyc/a": 3}
    world.log_rows([(k.stream_key("nyc/a"), replace(row, stream_epoch=9, reference_epoch=9))])
    assert world.touch("A") == "touched nyc/a epoch 3 on 0,1", "for all writers the same"


@pytest.mark.parametrize("command", ["touch", "register"])
def test_writers_are_added_only_while_the_transaction_is_open(opened: World, command: str) -> None:
    def again() -> str:
        if command == "touch":
            return opened.touch("A")
        return opened.register("A", receipt(opened, extent()))

    opened.held = True
    opened.write("A", "w1")
    true = opened.receipt("A", "w1")
    assert opened.commit("A", own=[true]) == ""
    assert "touched" in again() or "registered" in again(), "it waits, undecided: still open"
    opened.held = False
    assert opened.turn() == ""
    assert opened.row("A").state == "COMMIT_IN_PROGRESS"
    assert again() == "OutcomeUnknown; [commit A] A COMMITTED 1"
    assert again() == "AlreadyCommitted"
    opened.begin("B")
    opened.abort("B")
    assert opened.touch("B") == "TransactionAborted"
    assert opened.register("B", receipt(opened, txn="B")) == "TransactionAborted"


# -- register ----------------------------------------------------------------------------------


def test_the_highest_sequence_wins(opened: World) -> None:
    def known() -> r.Receipt | None:
        return opened.state.receipt(opened.id("A"), opened.writer("w1"))

    second = receipt(opened, extent(end=2), sequence=2)
    assert opened.register("A", second) == "registered 2"
    assert opened.register("A", receipt(opened, extent(end=1), sequence=1)) == "registered 2"
    assert known() == second
    assert opened.register("A", receipt(opened, extent(end=9), sequence=2)) == "ReceiptMismatch"
    assert known() == second
    third = receipt(opened, extent(end=3), sequence=3)
    assert opened.register("A", third) == "registered 3"
    assert known() == third


@pytest.mark.parametrize(
    "later",
    [
        (),
        (extent(partition=1, end=9),),
        (extent(end=4),),
        (extent(first=1, end=9),),
        (replace(extent(end=9), count=4),),
    ],
    ids=["nothing", "elsewhere", "shorter", "begins later", "fewer"],
)
def test_a_later_receipt_covers_the_earlier_one(opened: World, later: tuple[r.Extent, ...]) -> None:
    """Else a mistake of a client would drop, without a word, what a writer was told is registered."""
    first = receipt(opened, extent(end=5), sequence=1)
    bad = receipt(opened, *later, sequence=2)
    assert opened.register("A", first) == "registered 1"
    assert opened.register("A", bad) == "ReceiptMismatch"
    assert opened.commit("A", own=[bad]) == "ReceiptMismatch"
    assert opened.commit("A", own=[bad], receipts=[first]) == "ReceiptMismatch"
    assert opened.state.receipt(opened.id("A"), opened.writer("w1")) == first


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        ({}, True),
        ({"sequence": 1}, True),
        ({"sequence": 3}, True),
        ({"end": 4}, True),
        ({"end": 9}, True),
        ({"first": 0}, True),
        ({"end": 9, "count": 4, "crc_sum": 8}, True),
        ({"end": 4, "count": 4, "crc_sum": 8}, False),
        ({"crc_sum": 8}, False),
        ({"count": 2}, False),
        ({"first": 2}, False),
        ({"partition": 1}, False),
        ({"stream": "nyc/b"}, False),
        (None, False),
    ],
)
def test_a_receipt_covers_one_whose_events_it_has(
    one: dict[str, Any] | None, expected: bool
) -> None:
    """The order of the sequences does not matter, nor do the ends, if the events are the same."""
    other = r.Receipt(b"", 1, 2, False, (r.Extent("nyc/a", 0, 1, 5, 3, 7),))
    given = None
    if one is not None:
        sequence, extent = one.get("sequence", 2), dict(one)
        extent.pop("sequence", None)
        given = r.Receipt(b"", 1, sequence, True, (replace(other.extents[0], **extent),))
    assert covers(given, other) == expected
    assert covers(given, replace(other, extents=()))


def test_writers_differ_by_64_bits(opened: World) -> None:
    numbers = [2, 1, -1, (1 << 63) - 1, -(1 << 63)]
    for number in numbers:
        given = replace(receipt(opened), writer=number)
        assert opened.register("A", given) == "registered 1"
    assert {x.writer for x in opened.state.writers_after(opened.id("A"))} == set(numbers)
    opened.lead(keep_table=False)
    assert {x.writer for x in opened.state.writers_after(opened.id("A"))} == set(numbers)
    opened.abort("A")
    assert {x.writer for x in opened.state.writers_after(opened.id("A"))} == set(numbers)


def test_who_asks_sees_the_writers_in_one_order(opened: World) -> None:
    """Whatever the order of registration, before the end and after it."""
    for number in (5, -3, 9):
        opened.register("A", replace(receipt(opened), writer=number))
    seen = []
    for play in (lambda: None, opened.lead, lambda: opened.abort("A")):
        play()
        opened.get("A")
        seen.append([w.writer for w in opened.result.writers])
    assert seen == [[-3, 5, 9]] * 3


# -- how many ------------------------------------------------------------------------------------


WAYS = ("touch", "register", "commit")


def adds(world: World, how: str, number: int) -> str:
    """Add a writer in one of the ways that there are."""
    given = replace(receipt(world), writer=number, finished=True)
    if how == "touch":
        return world.ask("touch", r.Touch(world.token("A"), "nyc/b", number))
    if how == "register":
        return world.register("A", given)
    return world.commit("A", own=[given])


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("limit", ["WRITERS", "RECEIPTS"])
def test_too_many_writers_are_refused_where_they_are_added(
    opened: World, how: str, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no transaction gets into a state in which no commit is taken."""
    unit = 1 if limit == "WRITERS" else 48
    opened.create("nyc/b", 1)
    opened.created("nyc/b", 0)
    monkeypatch.setattr(limits, limit, getattr(limits, limit)._replace(value=3 * unit))
    for number in (1, 2, 3):
        assert "refused" not in adds(opened, "register", number)
    assert adds(opened, how, 4) == "InvalidArgument"
    assert f"{4 * unit:,}" in opened.message
    assert set(opened.state.open[opened.id("A")].writers) == {1, 2, 3}
    assert "nyc/b" not in opened.state.participants(opened.id("A")), "nothing of it is done"
    assert adds(opened, "register", 3) == "registered 1", "it is there"
    assert opened.commit("A").startswith("A COMMITTED") or opened.turn().endswith("A COMMITTED 0")


@pytest.mark.parametrize("ended", [False, True])
def test_writers_are_listed_in_parts(
    opened: World, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WRITERS_LISTED", limits.WRITERS_LISTED._replace(value=3))
    numbers = {5, -3, 9, 7, 0x7F, -1, 1}
    for number in numbers:
        adds(opened, "register", number)
    if ended:
        opened.abort("A")
    after, found = None, list[int]()
    for expected in (3, 3, 1):
        opened.ask("get", r.GetState(opened.id("A"), None, after))
        part = [one.writer for one in opened.result.writers]
        assert len(part) == expected
        found, after = found + part, part[-1]
    assert (set(found), len(found)) == (numbers, len(numbers))
    more, shown = None, list[int]()
    for _ in range(1 if ended else 3):
        opened.ask("one", r.ListOpen(None, opened.id("A"), 1, more))
        shown += [one.writer for one in opened.result.transactions[0].writers]
        more = opened.result.more
    assert (more, shown) == (None, [] if ended else found)
