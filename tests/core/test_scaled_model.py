"""Random lives of streams that scale while transactions are open, against a naive account of what they wrote.

The account knows nothing of epochs: it notes under which segment number each batch was written. All of it must
be merged under that number, once; the histories must hold E1 to E7; and the log, compacted or not, must fold
to the same table. Where a stream is lost, its transactions are aborted; what was being carried is forced, and no
segment ever lies on the stray chunks.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from anabranch.protocol.ids import segment_number
from anabranch.protocol.schemas import records as r
from tests.conftest import some
from tests.core.harness import event as an_event
from tests.core.scaled_world import ScaledWorld, Taken
from tests.core.tables import Row, fold, rows_of, table_of, views_of
from tests.sim.check_epochs import check_epochs

STREAMS = ("nyc/a", "nyc/b")
LABELS = "ABCD"


class Account:
    """Plays moves, and notes what transactions wrote and which were to commit."""

    def __init__(self) -> None:
        self.world = ScaledWorld(
            STREAMS, chunk_bytes=600, round_bytes=1_500, collate_ms=100, max_open=100
        )
        self.layouts: dict[tuple[str, str], tuple[r.SegmentRange, ...]] = {}
        self.written: dict[str, Taken] = {}
        self.committing: set[str] = set()
        self.count = 0
        self.lives = dict.fromkeys(LABELS, 0)  # a label's next transaction begins where one ends
        self.lost: set[str] = set()
        self.forced = 0
        self.strays: list[
            tuple[str, int, int]
        ] = []  # stream, partition, length of its history then

    # -- moves -------------------------------------------------------------------------------------

    def touch(self, label: str, stream: str) -> None:
        """Begin, the first time; pin the stream's layout, and see that it stays."""
        if stream in self.lost:
            return
        world = self.world
        label = self.txn(label)
        if label not in self.written:
            world.begin(label, keepalive_ms=3_600_000)
            self.written[label] = {}
        world.touch(label, stream)
        (found,) = (result for _, result in world.said if isinstance(result, r.Touched))
        known = (label, stream) in self.layouts
        before = self.layouts.setdefault((label, stream), found.segments)
        assert before == found.segments, "the pinned layout stays"
        if not known:
            active = world.state.streams[stream].segments
            assert numbers_of(found.segments) == numbers_of(active), "the active layout is pinned"

    def write(self, label: str, stream: str, which: int, count: int, size: int) -> None:
        """A batch into some segment of the pinned layout; pinned by the first one, if by none before."""
        if stream in self.lost:
            return
        if (self.txn(label), stream) not in self.layouts:
            self.touch(label, stream)
        label = self.txn(label)
        layout = self.layouts[label, stream]
        world = self.world
        segment = layout[which % len(layout)]
        run = world.write(
            label, f"w-{label}", stream, count,
            partition=segment.partition,
            epoch=world.state.open[world.id(label)].participants[stream],
            keys=(segment.low, segment.high - 1),
            size=size,
        )  # fmt: skip
        key = stream, segment_number(segment.segment_id)
        self.written[label].setdefault(key, []).append((run.writer, run.first, run.end))

    def commit(self, *labels: str) -> None:
        """All in one round."""
        asked = []
        for label in labels:
            txn = self.txn(label)
            if txn in self.written:
                self.lives[label] += 1
                self.committing.add(txn)
                own = [self.world.receipt(txn, f"w-{txn}")]
                asked.append((f"commit {txn}", self.world.committing(txn, own=own)))
        self.world.turn(*asked)

    def abort(self, label: str) -> None:
        txn = self.txn(label)
        if txn in self.written:
            self.lives[label] += 1
            self.world.abort(txn)

    def txn(self, label: str) -> str:
        """The present transaction of a label."""
        return f"{label}{self.lives[label]}"

    def scale(self, stream: str, how: tuple[str, int], times: int) -> None:
        """Evenly, or a split or a merge by hand; the command may come again."""
        if stream in self.lost:
            return
        world = self.world
        segments = sorted(world.state.streams[stream].segments, key=lambda s: s.low)
        kind, number = how
        if kind == "even":
            command = r.Scale(stream, number + 1, (), ())
        elif kind == "split" or len(segments) == 1:
            s = segments[number % len(segments)]
            middle = (s.low + s.high) // 2
            halves = (r.KeyRange(s.low, middle), r.KeyRange(middle, s.high))
            command = r.Scale(stream, 0, (s.segment_id,), halves)
        else:
            low, high = list(pairwise(segments))[number % (len(segments) - 1)]
            whole = (r.KeyRange(low.low, high.high),)
            command = r.Scale(stream, 0, (low.segment_id, high.segment_id), whole)
        self.count += 1
        before = self.scalings(stream)
        for _ in range(times):
            world.ask(f"scale {self.count}", command)
        assert self.scalings(stream) - before <= 1, "a repeated command scales once"

    def scalings(self, stream: str) -> int:
        """How often the stream was scaled, as its history says."""
        epochs = [e for _, e in self.world.history[stream] if isinstance(e, r.EpochRecord)]
        return sum(epoch.reference_epoch == epoch.stream_epoch for epoch in epochs)

    def lose(self, stream: str) -> None:
        """While something of it is carried, a topic of the stream is deleted. What has a part there is aborted,
        but for what is carried."""
        open_ = self.world.state.open
        if stream in self.lost or not any(
            stream in open_[txn_id].participants
            and any(c.count for c in open_[txn_id].staged_merges.values())
            for txn_id in self.world.state.committing
        ):
            return
        self.world.lose(stream)
        self.lost.add(stream)
        self.forget_aborted()

    def force_lost(self) -> None:
        """An operator forces the end of what was being carried."""
        world = self.world
        for txn_id in sorted(world.state.committing):
            txn = world.state.open.get(txn_id)  # a turn before may have merged it
            if txn is None or not txn.staged_merges or not self.lost & txn.participants.keys():
                continue
            places = {(c.stream, c.partition) for c in txn.staged_merges.values() if c.count}
            self.count += 1
            world.ask(f"force {self.count}", r.Force(world.token(world.label(txn_id)), ""))
            self.forced += 1
            self.strays += [(s, p, len(world.history[s])) for s, p in places if s not in self.lost]
        self.forget_aborted()

    def forget_aborted(self) -> None:
        """These were to commit, and never will. A label whose open one is aborted begins anew."""
        for label in list(self.written):
            row = self.world.state.txn_row(self.world.id(label))
            if row is not None and row.state == "ABORTED":
                self.committing.discard(label)
                if self.txn(label[0]) == label:
                    self.lives[label[0]] += 1

    def one_shot(self, stream: str, key: int) -> None:
        if stream in self.lost:
            return
        self.count += 1
        label = f"o{self.count}"
        self.world.one_shot(label, an_event(stream, b"%d" % key))

    def take_over(self, keep_table: bool) -> None:
        self.world.lead(keep_table=keep_table)

    # -- what must hold ----------------------------------------------------------------------------

    def check(self) -> None:
        world = self.world
        self.force_lost()
        world.settle()
        for stream, partition, since in self.strays:
            assert partition in world.state.retired(stream)
            for _, record in world.history[stream][since:]:
                assert partition not in {s.partition for s in record.segments}, (
                    "a stray chunk there"
                )
        for label in self.committing:
            row = world.state.txn_row(world.id(label))
            assert row is not None
            assert row.state == "COMMITTED", f"{label}: {row}"
            written = {key: runs for key, runs in self.written[label].items() if runs}
            assert world.merged.get(label, {}) == written, label
        for label in self.written.keys() - self.committing:
            assert label not in world.merged, "only what was to commit is merged"
        check_epochs(world.picture())
        self.check_replay()

    def check_replay(self) -> None:
        """The log, whole and compacted, folds to the table, byte for byte."""
        world = self.world
        expected = rows_of(table_of(world.state))
        for log in (world.log, compacted(world.log)):
            state = fold(log)
            assert rows_of(table_of(state)) == expected
            assert views_of(state) == views_of(world.state)
            assert state.epochs == world.state.epochs
            assert {s: dict(c) for s, c in state.pins.items()} == {
                s: dict(c) for s, c in world.state.pins.items() if s in state.pins
            }


def numbers_of(segments: tuple[r.SegmentRange, ...]) -> set[int]:
    return {segment_number(s.segment_id) for s in segments}


def compacted(log: list[list[Row]]) -> list[list[Row]]:
    """Only the last row of each key."""
    last = {key: i for i, rows in enumerate(log) for key, _ in rows}
    return [[(key, value) for key, value in rows if last[key] == i] for i, rows in enumerate(log)]


labels = st.sampled_from(LABELS)
streams = st.sampled_from((*STREAMS[:1], *STREAMS))
small = st.integers(0, 4)
moves = st.one_of(
    st.tuples(st.just("touch"), labels, streams),
    st.tuples(
        st.just("write"), labels, streams, small, st.integers(1, 3), st.sampled_from((50, 200, 700))
    ),
    st.tuples(
        st.just("write"), labels, streams, small, st.integers(1, 3), st.sampled_from((50, 200, 700))
    ),
    st.tuples(
        st.just("write"), labels, streams, small, st.integers(1, 3), st.sampled_from((50, 200, 700))
    ),
    st.tuples(st.just("commit"), labels),
    st.just(("commit", *LABELS)),
    st.tuples(st.just("abort"), labels),
    st.tuples(
        st.just("scale"),
        streams,
        st.tuples(st.sampled_from(("even", "split", "merge")), small),
        st.sampled_from((1, 1, 2)),
    ),
    st.tuples(st.just("one_shot"), streams, small),
    st.tuples(st.just("grow")),
    st.tuples(st.just("carry")),
    st.tuples(st.just("wait"), st.sampled_from((0, 20, 110, 500))),
    st.tuples(st.just("take_over"), st.booleans()),
    st.tuples(st.just("lose"), st.just(STREAMS[1])),
    st.tuples(st.just("force_lost")),
)


@settings(
    max_examples=some(50),
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.lists(moves, min_size=30, max_size=80))
def test_what_was_written_under_a_number_is_merged_under_it(life: list[tuple[Any, ...]]) -> None:
    account = Account()
    for name, *given_ in life:
        own = getattr(account, name, None)
        (own or getattr(account.world, name))(*given_)
    account.check()
    epochs = [e for found in account.world.history.values() for _, e in found]
    copies = sum(
        isinstance(e, r.EpochRecord) and e.reference_epoch != e.stream_epoch for e in epochs
    )
    event(f"duplicate epochs: {min(copies, 8)}")
    event(f"carried: {min(len(account.world.carried), 3)}")
    event(f"forced: {min(account.forced, 2)}, strays: {min(len(account.strays), 3)}")
