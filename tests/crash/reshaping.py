"""A scenario of scalings, rolling commits and a commit that is staged, by a client that never gives up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from anabranch.core import rows as k
from anabranch.core.rows import Entry
from anabranch.ports import Log
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode
from anabranch.protocol.schemas.records import StreamRow
from anabranch.topics.names import journal_topic
from tests.crash.oracle import read_status
from tests.crash.raw import Pen, Raw
from tests.crash.scenario import LONG_MS, WAIT_MS, Scenario

ELASTIC = "elastic"
CHUNK_BYTES = 3_000
BATCHES, BATCH = 3, 60  # of the big one: in each partition a batch is more than a chunk
GROW, SHRINK, WIDEN = "grow", "shrink", "widen"
ROLL, STAGED_MERGE, ROLL_TWICE = "commit the old one", "commit the big one", "commit two old ones"


@dataclass
class Reshaping(Scenario):
    """One stream, reshaped under transactions that began before."""

    ends: ClassVar[dict[str, str]] = dict.fromkeys(
        ("old", "big", "between", "second", "third", "last"), "COMMITTED"
    ) | {"dropped": "ABORTED"}
    partitions: ClassVar[dict[str, int]] = {ELASTIC: 2}

    @property
    def stream(self) -> str:
        return f"{self.scope}/{ELASTIC}"

    @property
    def steps(self) -> list[tuple[str, Callable[[], None]]]:
        return [
            ("create the stream", self.create),
            ("begin old ones", self.begin_old),
            (GROW, lambda: self.scale(3)),
            ("a one-shot between", lambda: self._one_shot("between", 6)),
            (ROLL, lambda: self.commit("old")),
            ("begin a second one", lambda: self.write("second", 2, 8)),
            (STAGED_MERGE, lambda: self.commit("big")),
            (SHRINK, lambda: self.scale(1)),
            ("abort an old one", self.abort),
            (ROLL_TWICE, self.commit_two),
            (WIDEN, lambda: self.scale(4)),
            ("a last one-shot", self.last),
        ]

    # -- steps ----------------------------------------------------------------------------------------

    def begin_old(self) -> None:
        """The segments of the first epoch."""
        self.write("old", 1, 12)
        self.write("big", BATCHES, BATCH)
        self.write("third", 1, 8)
        self.write("dropped", 1, 8)

    def write(self, which: str, batches: int, count: int) -> None:
        """Begin it, write, and register the receipt."""
        token = self._begin(which, None, LONG_MS)
        touched = self._touch(token, ELASTIC)
        pen = Pen(self.client, self.ids[which], touched.stream_epoch)
        for _ in range(batches):
            self._write(pen, which, touched, count)
        self.client.ask(r.Register(token, pen.receipt()))

    def scale(self, segments: int) -> None:
        """Scale the stream to that many segments."""
        answer = self.client.ask(r.Scale(self.stream, segments, (), ()))
        assert [len(s.segments) for s in answer.streams] == [segments]
        # The client's producer, too, has to know the new partitions.
        self.client.producer.list_topics(journal_topic(self.stream), timeout=10)

    def commit_two(self) -> None:
        """At once, of two reference epochs; none of them is the active one."""
        both = ("second", "third")
        commits = [r.Commit(self.tokens[which], (), None, None, WAIT_MS) for which in both]
        for which, outcome in zip(both, self.client.ask_all(commits), strict=True):
            assert isinstance(outcome, r.Outcome), outcome
            self._acknowledge(which, outcome)

    def abort(self) -> None:
        outcome = self.client.ask(r.Abort(self.tokens["dropped"], "changed my mind"))
        self._acknowledge("dropped", outcome)

    # -- the checks -----------------------------------------------------------------------------------

    def check_end(self, log: Log, auditor: Raw) -> None:
        """As the others; and no carrying, rolling or scaling is left unfinished."""
        super().check_end(log, auditor)
        listed = auditor.ask(r.ListTransactions(self.scope, False, 100)).transactions
        assert not listed, f"still open: {listed}"
        check_nothing_left(log, auditor.prefix, self.stream)


def check_nothing_left(log: Log, prefix: str, stream: str) -> StreamRow:
    """The status log has no trace of merges and scalings that are over. Returns the stream's row."""
    rows = read_status(log, prefix).rows
    row: StreamRow = decode(rows[k.stream_key(stream)])
    assert row.scaling is None, row
    assert row.wanted_partitions == row.partitions, row
    epochs = []
    for key, value in rows.items():
        entry = k.split_key(key)[1]
        assert entry not in (Entry.STAGED_MERGE, Entry.PENDING_COMMIT, Entry.MOVED), decode(value)
        if entry is Entry.EPOCH:
            left = decode(value)
            epochs += [left.stream_epoch] if left.stream == stream else []
    assert epochs == [row.reference_epoch], f"layouts of {epochs}, {row.reference_epoch} is active"
    return row
