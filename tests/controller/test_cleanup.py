"""Journals are cut and moved over the in-memory log, by a leader with its table or without."""

from __future__ import annotations

from collections import Counter

import pytest

from anabranch.batches.records import Record
from anabranch.ports import LogUnavailable
from anabranch.protocol.ids import TXN_HEADER, pack_txn_header
from anabranch.protocol.schemas.records import (
    Begin,
    Begun,
    GetState,
    Refusal,
    Touch,
    Touched,
)
from tests.controller.cleanup_play import (
    BYTES,
    CHUNK,
    ENOUGH,
    JOURNAL,
    OLD,
    STREAM,
    Play,
    long_after,
    old_transaction,
)
from tests.core.labels import SECRET


def test_a_journal_gets_shorter_while_transactions_come_and_go() -> None:
    play = Play()
    for _ in range(5):
        play.come_and_go(4)
        play.steps(2)
        assert play.start >= play.end - 8, "nothing is open: nothing is kept"
    info = play.info()
    assert info.low_water == {"0": play.start}
    assert info.uncommitted_bytes == 0


def test_what_an_open_transaction_wrote_is_kept_and_nothing_before_it() -> None:
    play = Play()
    play.come_and_go(4)
    txn_id = play.begin()
    first = play.end
    play.write((txn_id, 1, b"kept"))
    play.come_and_go(4)
    play.steps(2)
    assert play.start == first
    assert play.commit(txn_id).committed == 1
    assert play.committed(txn_id) == {1: [b"kept"]}
    play.steps(2)
    assert play.start > first


@pytest.mark.parametrize("chunk", [CHUNK, 1 << 20], ids=["staged", "merged at once"])
@pytest.mark.parametrize("keeps_table", [True, False], ids=["checkpoint", "rebuilt"])
def test_an_old_transaction_is_moved_and_commits_whole_and_in_order(
    keeps_table: bool, chunk: int
) -> None:
    play = Play(keeps_table, settings={"chunk_bytes": chunk})
    old = old_transaction(play)
    uncommitted = play.info().uncommitted_bytes
    middle = long_after(play)
    assert play.start > middle, "it kept what came after it"
    assert play.controller.state.open[old].moved
    assert play.info().uncommitted_bytes == uncommitted, "as much as before, elsewhere"
    assert "native_transaction" not in play.info().rejected, "its copies are nobody's writes"
    play.deaths += 1
    play.lead()
    assert play.info().uncommitted_bytes == uncommitted, "a successor finds the same"
    play.write((old, 2, b"b-late"), (old, 3, b"c"))
    outcome = play.commit(old)
    assert outcome.committed == OLD + 2
    assert play.committed(old) == play.written[old]
    play.steps(3)
    assert play.start >= play.end - 5
    assert not any(play.controller.table.scan(b"i"))


@pytest.mark.parametrize("keeps_table", [True, False], ids=["checkpoint", "rebuilt"])
def test_moved_again_and_again(keeps_table: bool) -> None:
    play = Play(keeps_table)
    old = old_transaction(play)
    for number in range(3):
        middle = long_after(play)
        assert play.start > middle
        play.write((old, 2, b"b-%d" % number))
        play.deaths += 1
        play.lead()
    long_after(play)
    runs = [r for row in play.controller.state.open[old].moved.values() for r in row.runs]
    places = Counter((r.writer, r.first) for r in runs)
    assert set(places.values()) == {1}, "each run is at one place"
    assert play.commit(old).committed == OLD + 3
    assert play.committed(old) == play.written[old]


def test_many_small_old_transactions_are_moved_together() -> None:
    play = Play()
    olds = [play.begin() for _ in range(10)]
    for i, old in enumerate(olds):
        play.write((old, 1, b"x%d" % i), (old, 2, b"y%d" % i))
    middle = long_after(play)
    assert play.start > middle
    for old in olds:
        assert play.commit(old).committed == 2
        assert play.committed(old) == play.written[old]


def test_nothing_is_moved_where_most_is_needed() -> None:
    play = Play()
    old = play.begin()
    first = play.end
    for i in range(ENOUGH + 5):
        play.write((old, 1, bytes(BYTES)), (old, 2, b"%d" % i))
    play.come_and_go(ENOUGH)
    play.steps(10)
    assert play.start == first
    assert not play.controller.state.open[old].moved


def test_an_aborted_transaction_that_was_moved_leaves_nothing() -> None:
    play = Play()
    old = old_transaction(play)
    long_after(play)
    assert play.controller.state.open[old].moved
    play.world.clock.now += 40_000  # it was not heard of
    play.steps(5)
    outcome = play.ask(GetState(old))
    assert outcome.state == "ABORTED"
    assert play.committed(old) == {}
    play.steps(3)
    assert play.start >= play.end - 3
    assert not any(play.controller.table.scan(b"i"))
    keys = [key for key, _ in play.controller.table.scan(b"s" + old)]
    assert not [key for key in keys if key[17] == 21], "its moved rows are deleted"


def rejected_of_old(play: Play) -> bytes:
    old = old_transaction(play)
    wrong = ((TXN_HEADER, pack_txn_header(old, 7, 5)),)  # of another stream epoch
    for _ in range(3):
        play.world.cluster.produce(JOURNAL, [Record(0, 1, b"k", b"wrong", wrong)] * 2)
    return old


@pytest.mark.parametrize("gone", [True, False], ids=["deleted", "not deleted yet"])
@pytest.mark.parametrize("keeps_table", [True, False], ids=["checkpoint", "rebuilt"])
def test_rejected_records_count_once_though_they_are_gone(keeps_table: bool, gone: bool) -> None:
    def hook(name: str, phase: str) -> None:
        if name == "delete_records" and not gone:
            raise LogUnavailable("away")

    play = Play(keeps_table, hook)
    old = rejected_of_old(play)
    middle = long_after(play)
    assert play.controller.state.low_water[STREAM, 0] > middle
    assert (play.start > middle) is gone
    wrong = ((TXN_HEADER, pack_txn_header(old, 7, 5)),)
    play.world.cluster.produce(JOURNAL, [Record(0, 1, b"k", b"wrong", wrong)])
    play.deaths += 1
    play.lead()
    outcome = play.commit(old)
    assert (outcome.committed, outcome.rejected) == (OLD, 7)


# -- limits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps_table", [True, False], ids=["checkpoint", "rebuilt"])
def test_too_much_staged_is_refused_until_some_ends(keeps_table: bool) -> None:
    play = Play(keeps_table, settings={"max_uncommitted_bytes": 10_000})
    big, small = play.begin(), play.begin()
    untouched = play.world.txn_id()
    begun = play.ask(Begin(untouched, "nyc", None, 30_000_000, SECRET))
    play.write((big, 1, bytes(9_000)))
    play.write((small, 1, bytes(2_000)))
    play.steps(2)
    assert 11_000 < play.info().uncommitted_bytes < 12_000
    play.deaths += 1
    play.lead()
    fresh = play.world.txn_id()
    for command in (
        Begin(fresh, "nyc", None, 30_000_000, SECRET),
        Touch(begun.token, STREAM),
    ):
        refusal = play.ask(command)
        assert refusal.code == "TooManyUncommittedBytes"
    # Open transactions go on.
    assert isinstance(play.ask(Begin(big, "nyc", None, 30_000_000, SECRET)), Begun)
    assert isinstance(play.ask(Touch(play.tokens[big], STREAM)), Touched)
    assert play.commit(small).state == "COMMITTED"
    assert isinstance(play.ask(Touch(begun.token, STREAM)), Touched), "below the limit again"
    assert isinstance(play.ask(Begin(fresh, "nyc", None, 30_000_000, SECRET)), Begun)
    assert play.commit(big).state == "COMMITTED"
    assert play.info().uncommitted_bytes == 0


@pytest.mark.parametrize("keeps_table", [True, False], ids=["checkpoint", "rebuilt"])
def test_what_somebody_else_deleted_is_not_committed_and_holds_nobody(keeps_table: bool) -> None:
    play = Play(keeps_table, settings={"chunk_bytes": 1 << 20})
    old = old_transaction(play)
    play.steps(2)
    play.world.cluster.log("somebody").delete_records({JOURNAL: play.end})
    play.deaths += 1
    play.lead()  # the former leader may have fetched them
    refusal = play.commit(old)
    assert isinstance(refusal, Refusal)
    if keeps_table:
        assert refusal.code == "TransactionAborted"
        assert "its journal records are gone" in refusal.message
    else:
        assert refusal.code == "ReceiptMismatch", "the index knows nothing of them"
    play.come_and_go(3)
    assert play.committed(old) == {}
