"""Journals are cut and moved over the in-memory log, by leaders that may die at every call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from anabranch.batches.records import Record
from anabranch.controller.controller import Controller
from anabranch.core.decisions.turn import Settings
from anabranch.ports import LogRefused, LogUnavailable, TopicPartition
from anabranch.protocol.ids import TXN_HEADER, pack_txn_header, unpack_txn_header
from anabranch.protocol.partitioner import record_checksum
from anabranch.protocol.schemas.records import (
    Begin,
    Commit,
    DescribeStreams,
    Extent,
    GetState,
    Outcome,
    Receipt,
    Refusal,
    StreamInfo,
    Touch,
    Touched,
)
from anabranch.testing.memory.table import MemoryStore
from anabranch.topics.names import journal_topic, stream_topic
from tests.controller.losing import Killed
from tests.controller.world import World
from tests.core.labels import SECRET, Begun
from tests.failpoints import failing

STREAM = "nyc/flights"
JOURNAL = TopicPartition(journal_topic(STREAM), 0)
BYTES = 20_000  # what a young transaction writes, about
MOVE_BYTES = 200_000
CHUNK = 25_000  # a young one is not staged, an old one is, and is moved in two steps
ENOUGH = 3 * MOVE_BYTES // BYTES // 2


@dataclass
class Play:
    """A world with one stream of one segment, and a leader that is followed by another when it dies.

    ``hook`` may raise `Killed` at any call of the leader. ``keeps_table``: its successor has its table.
    """

    keeps_table: bool = True
    hook: Callable[[str, str], None] = lambda name, phase: None
    settings: dict[str, Any] = field(default_factory=dict)
    world: World = field(default_factory=World)
    deaths: int = 0
    tokens: dict[bytes, bytes] = field(default_factory=dict)
    written: dict[bytes, dict[int, list[bytes]]] = field(default_factory=dict)
    extents: dict[bytes, dict[int, Extent]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store = MemoryStore()
        self.lead()
        self.world.stream(self.controller, STREAM, 1)

    def lead(self) -> None:
        """A new leader."""
        if self.keeps_table:
            self.store.release()
        else:
            self.store = MemoryStore()
        name = f"c{self.deaths}"
        given = {
            "clean_ms": 1, "clean_records": 1, "move_bytes": MOVE_BYTES, "chunk_bytes": CHUNK,
        } | self.settings  # fmt: skip
        self.controller = Controller(
            failing(self.world.cluster.log(name), lambda c, p: self.hook(c, p)),
            failing(self.store.open(name), lambda c, p: self.hook(c, p)),
            self.world.clock,
            Settings(0, 1, "anabranch", reply_partitions=8, trusts_open=True, **given),
            leader=name,
        )
        self.controller.lead()

    def step(self) -> None:
        """One pass, and some time; if the leader dies of it, there is another one."""
        try:
            self.controller.step(0)
        except Killed:
            self._succeed()
        self.world.clock.now += 0.3

    def _succeed(self) -> None:
        while True:
            self.deaths += 1
            try:
                self.lead()
            except Killed:
                continue
            return

    def ask(self, command: Any) -> Any:
        """The answer to a command, which is sent again: an answer is lost with its leader."""
        correlation_id = self.world.send(command)
        for number in range(20):
            if number == 10:
                self.world.send(command, again=correlation_id)
            self.step()
            answer = self.world.reply(correlation_id)
            if answer is not None:
                return answer
        raise AssertionError(f"no answer to {command}")

    def begin(self, keepalive_ms: int = 30_000_000) -> bytes:
        """An open transaction that has touched the stream."""
        txn_id = self.world.txn_id()
        begun = self.ask(Begin(txn_id, "nyc", None, keepalive_ms, SECRET))
        assert isinstance(begun, Begun)
        self.tokens[txn_id] = begun.token
        assert isinstance(self.ask(Touch(begun.token, STREAM)), Touched)
        return txn_id

    def write(self, *records: tuple[bytes, int, bytes]) -> None:
        """One journal batch of (transaction, writer, value)."""
        made = [
            Record(0, 1, b"k", value, ((TXN_HEADER, pack_txn_header(txn_id, writer, 0)),))
            for txn_id, writer, value in records
        ]
        base = self.world.cluster.produce(JOURNAL, made)
        for offset, (txn_id, writer, value) in enumerate(records, start=base):
            self.written.setdefault(txn_id, {}).setdefault(writer, []).append(value)
            crc = record_checksum(b"k", value)
            before = self.extents.setdefault(txn_id, {}).get(writer)
            self.extents[txn_id][writer] = (
                Extent(STREAM, 0, offset, offset + 1, 1, crc)
                if before is None
                else Extent(
                    STREAM, 0, before.first, offset + 1, before.count + 1,
                    (before.crc_sum + crc) % (1 << 63),
                )
            )  # fmt: skip

    def commit(self, txn_id: bytes) -> Any:
        receipts = tuple(
            Receipt(txn_id, writer, 1, True, (extent,))
            for writer, extent in self.extents.get(txn_id, {}).items()
        )
        return self.ask(Commit(self.tokens[txn_id], receipts, (), None, 60_000))

    def come_and_go(self, count: int) -> None:
        """So many transactions that write about `BYTES` and commit."""
        for _ in range(count):
            txn_id = self.begin()
            self.write((txn_id, 1, bytes(BYTES)))
            outcome = self.commit(txn_id)
            assert isinstance(outcome, Outcome), outcome
            assert outcome.state == "COMMITTED"

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @property
    def start(self) -> int:
        """The journal's first offset."""
        log = self.world.cluster.log("ask")
        return log.start_offsets([JOURNAL])[JOURNAL]

    @property
    def end(self) -> int:
        log = self.world.cluster.log("ask")
        return log.end_offsets([JOURNAL], committed=False)[JOURNAL]

    def info(self) -> StreamInfo:
        (info,) = self.ask(DescribeStreams(None, STREAM)).streams
        assert isinstance(info, StreamInfo)
        return info

    def committed(self, txn_id: bytes) -> dict[int, list[bytes]]:
        """A transaction's events in the stream, by writer, in order."""
        found: dict[int, list[bytes]] = {}
        topic = stream_topic(STREAM)
        for partition in range(self.world.cluster.topics[topic].partitions):
            for record in self.world.committed(TopicPartition(topic, partition)):
                owner, writer, _ = unpack_txn_header(dict(record.headers)[TXN_HEADER] or b"")
                if owner == txn_id:
                    found.setdefault(writer, []).append(record.value or b"")
        return found


OLD = 459


def old_transaction(play: Play) -> bytes:
    """One whose data lies in front: in a batch of others', in small ones of two writers, in one to be spliced."""
    other, old = play.begin(), play.begin()
    play.write((other, 9, b"o1"), (old, 1, b"a0"), (old, 2, b"b0"), (other, 9, b"o2"))
    for i in range(1, 4):
        play.write((old, 1, b"a%d" % i))
        play.write((old, 2, b"b%d" % i))
    for big in range(3):
        play.write(*[(old, 1, b"%d-%90d" % (big, i)) for i in range(150)])
    play.write((old, 2, b"b-last"))
    assert play.commit(other).committed == 2
    return old


def long_after(play: Play) -> int:
    """More comes and goes than an old transaction may keep; where the journal was meanwhile."""
    middle = play.end
    play.come_and_go(ENOUGH)
    play.steps(10)
    return middle


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
def test_a_transaction_that_is_moved_often_is_at_one_place(keeps_table: bool) -> None:
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


@pytest.mark.parametrize("keeps_table", [True, False], ids=["checkpoint", "rebuilt"])
def test_records_that_others_deleted_are_not_committed(keeps_table: bool) -> None:
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


# -- leaders that die ----------------------------------------------------------------------------------


@dataclass
class At:
    """Kills at the n-th call of a name, once, as soon as ``armed``."""

    name: str
    number: int
    phase: str
    armed: bool = False
    seen: int = 0
    struck: bool = False

    def __call__(self, name: str, phase: str) -> None:
        if self.armed and not self.struck and (name, phase) == (self.name, self.phase):
            self.seen += 1
            if self.seen == self.number:
                self.struck = True
                raise Killed(name)


def calls_of_a_move() -> list[tuple[str, int]]:
    """The calls of a leader from the first copy until the cut behind the last one, numbered by name."""
    calls: list[str] = []
    play = Play(hook=lambda name, phase: calls.append(name) if phase == "before" else None)
    old_transaction(play)
    calls.clear()
    long_after(play)
    first = calls.index("append:stream")
    last = len(calls) - 1 - calls[::-1].index("append:stream")
    until = calls.index("delete_records", last) + 1
    seen: Counter[str] = Counter()
    found = []
    for i, name in enumerate(calls[:until]):
        seen[name] += 1
        if i >= first and not name.startswith("fetch"):
            found.append((name, seen[name]))
    return found


MOVE = calls_of_a_move()


def test_the_steps_of_a_move() -> None:
    names = {name for name, _ in MOVE}
    assert {"append:stream", "append:status", "end:commit", "table:rows", "delete_records"} <= names
    assert len(MOVE) < 80


# Each call before and after, one of them with the table kept and the other one without.
STEPS = [
    (name, number, phase, (at + (phase == "after")) % 2 == 0)
    for at, (name, number) in enumerate(MOVE)
    for phase in ("before", "after")
]


@pytest.mark.parametrize(
    ("name", "number", "phase", "keeps_table"),
    [
        step if n % 8 in (0, 5) else pytest.param(*step, marks=pytest.mark.soak)
        for n, step in enumerate(STEPS)
    ],
)
def test_killed_at_a_step_of_a_move(name: str, number: int, phase: str, keeps_table: bool) -> None:
    hook = At(name, number, phase)
    play = Play(keeps_table, hook)
    old = old_transaction(play)
    hook.armed = True
    middle = long_after(play)
    assert hook.struck, "the call was made"
    assert play.deaths
    play.come_and_go(ENOUGH)
    play.steps(10)
    assert play.start > middle, "a successor goes on with it"
    play.write((old, 1, b"a-late"))
    assert play.commit(old).committed == OLD + 1
    assert play.committed(old) == play.written[old], "whole, once, and in order"
    play.steps(3)
    assert not any(play.controller.table.scan(b"i"))


def test_no_records_are_deleted_before_their_low_water_is_logged() -> None:
    """Nor before: not while the round of the row is open, and not if it comes to nothing."""
    logged: list[int] = []
    play = Play()

    def hook(name: str, phase: str) -> None:
        if phase == "after" and name == "end:commit":
            logged.append(play.controller.state.low_water.get((STREAM, 0), 0))
        if phase == "after":
            assert play.start <= max(logged, default=0), name

    play.hook = hook
    old = old_transaction(play)
    long_after(play)
    assert play.commit(old).state == "COMMITTED"
    play.steps(5)
    assert play.start == logged[-1] > 0


# -- trouble -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [LogUnavailable("away"), LogRefused("no such offset", 1)])
def test_that_records_cannot_be_deleted_ends_nothing(error: Exception) -> None:
    play = Play()
    broken = True

    def hook(name: str, phase: str) -> None:
        if broken and name == "delete_records" and phase == "before":
            raise error

    play.hook = hook
    play.come_and_go(10)
    play.steps(3)
    assert play.start == 0
    assert play.controller.state.low_water[STREAM, 0] > 0
    broken = False
    play.world.clock.now += 31
    play.come_and_go(1)
    play.steps(3)
    assert play.start == play.controller.state.low_water[STREAM, 0]


def step_on(controller: Controller, world: World) -> None:
    for _ in range(20):
        controller.step(0)
        world.clock.now += 0.3


def test_a_successor_deletes_what_was_logged() -> None:
    play = Play()

    def hook(name: str, phase: str) -> None:
        if name == "delete_records" and phase == "before":
            raise Killed

    play.come_and_go(3)
    txn_id = play.begin()
    play.write((txn_id, 1, b"v"))
    play.hook = hook
    correlation_id = play.world.send(Commit(play.tokens[txn_id], (), (), None, 1000))
    with pytest.raises(Killed):
        step_on(play.controller, play.world)
    low = play.controller.state.low_water[STREAM, 0]
    assert play.start < low
    play.hook = lambda name, phase: None
    play.deaths += 1
    play.lead()
    play.step()
    assert play.start >= low
    assert play.world.reply(correlation_id) is not None


def test_a_move_that_the_broker_refuses_is_left_for_later() -> None:
    play = Play()
    old = old_transaction(play)
    refusing = True

    def hook(name: str, phase: str) -> None:
        if refusing and name == "append:stream" and phase == "before":
            raise LogRefused("too large", 10)

    play.hook = hook
    long_after(play)
    assert not play.controller.state.open[old].moved
    refusing = False
    play.come_and_go(1)
    play.steps(10)
    assert play.controller.state.open[old].moved, "after a while it is tried again"
    assert play.commit(old).committed == OLD
    assert play.committed(old) == play.written[old]
