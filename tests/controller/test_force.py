"""A merge that can't go on, as a stream of it is lost, is ended by an operator, and leaves nothing that is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from anabranch.batches.journal_refetch import FETCH_BYTES
from anabranch.core.memory import wait_of
from anabranch.ports import LogRefused, OffsetOutOfRange, TopicPartition
from anabranch.protocol.schemas.codec import decode
from anabranch.protocol.schemas.records import (
    Abort,
    Commit,
    CommitRecord,
    EpochRecord,
    Force,
    ForgetStream,
    Outcome,
    Prepare,
    Scale,
    StreamList,
    Touch,
)
from anabranch.testing.memory.log import MemoryLog
from anabranch.testing.memory.trouble import Kind, Trouble
from anabranch.topics.names import history_topic, journal_topic, stream_topic
from tests.controller.losing import GONE, KEYS, LOST_S, OTHER, TOPICS, Play

CHUNK_BYTES = 1_000
SIZE = 300
each_topic = pytest.mark.parametrize("topic", [topic(GONE) for topic in TOPICS])


class Stuck(Play):
    """A merge of two streams, of which one is lost when chunks of it stand in the other."""

    def __init__(
        self, topic: str = stream_topic(GONE), *, lost: bool = True, scaled: bool = False
    ) -> None:
        """``scaled``: to one segment before, so that chunks stand where one of the former layout was."""
        super().__init__(chunk_bytes=CHUNK_BYTES)
        self.begun_before = self.begun(OTHER)  # it will commit in the layout of now
        if scaled:
            self.ask(Scale(OTHER, 1, (), ()), seconds=0.2)
        self.txn_id, self.token, receipt = self.begun(GONE, OTHER, size=SIZE)
        self.asked = self.send_commit(self.token, receipt)
        for _ in range(100):
            if any(c.count and c.stream == OTHER for c in self.staged_merges()):
                break
            self.play(1, 0.05)
        assert not all(c.done for c in self.staged_merges())
        if lost:
            self.world.cluster.delete_topic(topic)
            self.play(30, 2 * LOST_S)
            self.one_shot(GONE)
            self.play(30, 2 * LOST_S)
            assert self.state(self.txn_id)[0] == "FINALIZE_IN_PROGRESS"
            assert self.stream_state(GONE) == "LOST"
            self.controller.update_metrics()
            assert self.controller.metrics.values["stuck_merges"]["waiting",] == 1

    def staged_merges(self) -> list[Any]:
        txn = self.controller.state.open.get(self.txn_id)
        return list(txn.staged_merges.values()) if txn is not None else []

    def read_anew(self) -> None:
        """The carriers' earlier fetches of the journals are dropped."""
        assert self.controller._background is not None
        for carrier in self.controller._background.carriers._each:
            carrier._renew_readers()

    def force(self) -> Any:
        return self.ask(Force(self.token, "the operator said so"))

    def big(self) -> str:
        """The state of another big transaction in the other stream."""
        _, token, receipt = self.begun(OTHER, size=SIZE)
        outcome = self.ask(Commit(token, (receipt,), None, None, 60_000), seconds=0.2)
        return str(outcome.state if isinstance(outcome, Outcome) else outcome.code)

    def history(self) -> list[EpochRecord | CommitRecord]:
        place = TopicPartition(history_topic(OTHER), 0)
        return [decode(record.value or b"") for record in self.world.committed(place)]

    def check_strays(self, retired: set[int], since: int = 0) -> None:
        """What stands on these partitions is in no segment and no commit, of the history ``since`` there."""
        assert self.controller.state.retired(OTHER) == retired
        for record in self.history()[since:]:
            for segment in record.segments:
                assert segment.partition not in retired, record
        seen = 0
        for partition in retired:
            seen += len(self.world.committed(TopicPartition(stream_topic(OTHER), partition)))
        assert seen, "chunks stand there: else this shows nothing"


@each_topic
@pytest.mark.parametrize("keeps_table", [True, False])
def test_force_aborts_it_everywhere_and_retires_where_chunks_stand(
    topic: str, keeps_table: bool
) -> None:
    play = Stuck(topic)
    events = play.events(OTHER)
    retired, lost = (
        {c.partition for c in play.staged_merges() if c.stream == stream and c.count}
        for stream in (OTHER, GONE)
    )
    forced = play.force()
    assert forced.state == "ABORTED"
    assert forced.reason.startswith(f"the operator said so: its merge made no progress: {GONE}")
    assert play.force() == forced, "again is fine"
    assert play.controller.state.retired(GONE) == lost != set(), "it may be taken back"
    told = play.world.reply(play.asked)
    assert told.code == "TransactionAborted"
    play.check_strays(retired)
    play.lead_anew(keeps_table=keeps_table, chunk_bytes=CHUNK_BYTES)
    assert play.big() == "COMMITTED", "it does not hold up others"
    _, token, receipt = play.begun_before
    play.commit(token, receipt)
    for segments in (4, 6, 1):
        scaled = play.ask(Scale(OTHER, segments, (), ()), seconds=0.2)
        assert isinstance(scaled, StreamList)
        assert play.one_shot(OTHER) == "COMMITTED"
        assert play.big() == "COMMITTED"
    play.check_strays(retired)
    commits = [r for r in play.history() if isinstance(r, CommitRecord)]
    assert sum(part.count for r in commits for part in r.segments) == events + 3 + 5 * len(KEYS)
    assert play.txn_id not in {r.txn_id for r in commits}
    assert play.state(play.txn_id)[0] == "ABORTED"


def test_a_transaction_of_a_former_layout_rolls_round_retired_partitions() -> None:
    play = Stuck(scaled=True)
    play.force()
    before = len(play.history())
    assert play.controller.state.retired(OTHER) == {1}, "where the former layout has a segment"
    _, token, receipt = play.begun_before
    play.commit(token, receipt)
    play.check_strays({1}, before)
    assert len(play.history()) == before + 3, "two epochs and a commit"


def test_what_was_fetched_is_dropped_when_a_chunk_is_refused() -> None:
    play = Stuck(lost=False)
    assert play.controller._background is not None
    carriers = play.controller._background.carriers
    assert carriers is not None
    carrier = carriers._each[0]
    readers = carrier._readers
    play.world.cluster.delete_topic(stream_topic(GONE))
    job = next(job for job in carriers._waiting if job.row.stream == GONE)
    with pytest.raises(LogRefused):
        carrier.chunk(job, 0)
    assert carrier._readers is not readers


def test_then_the_lost_stream_can_be_forgotten() -> None:
    play = Stuck()
    refused = play.ask(ForgetStream(GONE), seconds=0.2)
    assert refused.code == "IllegalState"
    assert f"(`anabranch txn force {play.txn_id.hex()}`)" in refused.message
    play.force()
    assert play.ask(ForgetStream(GONE), seconds=0.2) == StreamList(())
    play.lead_anew(chunk_bytes=CHUNK_BYTES)
    play.check_strays(play.controller.state.retired(OTHER))
    assert play.big() == "COMMITTED"


def test_a_stream_that_is_forgotten_has_no_retired_partitions() -> None:
    play = Stuck()
    play.force()
    assert play.controller.state.retired(OTHER)
    play.world.cluster.delete_topic(history_topic(OTHER))
    play.one_shot(OTHER)
    play.play(20, 2 * LOST_S)
    assert play.ask(ForgetStream(OTHER), seconds=0.2) == StreamList(())
    play.lead_anew()
    assert play.controller.state.retired(OTHER) == set()


def test_force_is_only_for_merges_that_are_stuck() -> None:
    play = Stuck(lost=False)
    assert play.force().code == "IllegalState"
    assert "continues by itself" in play.force().message
    _, token, _ = play.begun_before
    assert play.ask(Force(token, "")).code == "IllegalState"
    assert play.ask(Force(b"forged", "")).code == "InvalidToken"
    play.play(20, 1.0)
    assert play.state(play.txn_id)[0] == "COMMITTED"
    assert play.force().code == "AlreadyCommitted"


@pytest.mark.parametrize("keeps_table", [True, False], ids=["table", "no table"])
def test_a_merge_whose_journal_records_are_deleted_can_be_forced(keeps_table: bool) -> None:
    """Its leader still has them in its index, or the next one misses them there."""
    play = Stuck(lost=False)
    log = play.world.cluster.log("somebody")
    journals = [TopicPartition(journal_topic(GONE), p) for p in (0, 1)]
    log.delete_records(log.end_offsets(journals, committed=False))
    play.read_anew()
    if not keeps_table:
        play.lead_anew(keeps_table=False, chunk_bytes=CHUNK_BYTES)
    play.play(40, 40.0)
    state, reason = play.state(play.txn_id)
    assert state == "FINALIZE_IN_PROGRESS"
    assert f"`anabranch txn force {play.txn_id.hex()}` ends it" in reason
    assert play.controller._background is not None
    refused = play.controller._background.carriers._not_before_ms
    assert bool(refused) == keeps_table
    assert play.force().state == "ABORTED"
    assert not refused
    assert play.big() == "COMMITTED"


def test_a_merge_survives_a_lagging_broker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play = Stuck(lost=False)
    fetch = MemoryLog.fetch

    def fetched(log: MemoryLog, positions: dict[TopicPartition, int], **how: Any) -> Any:
        for place, at in positions.items():
            if place.topic == journal_topic(GONE) and how["max_bytes"] == FETCH_BYTES:
                raise OffsetOutOfRange(place, at)
        return fetch(log, positions, **how)

    with monkeypatch.context() as patched:
        patched.setattr(MemoryLog, "fetch", fetched)
        play.read_anew()
        seen = set()
        for _ in range(100):
            play.play(1, 0.05)
            wait = wait_of(play.controller.state, play.controller._memory, play.txn_id)
            assert wait is None or wait.why != "torn"
            seen.add(play.state(play.txn_id)[1])
        assert any("has no offset" in trouble for trouble in seen)
    play.play(60, 60.0)
    assert play.state(play.txn_id)[0] == "COMMITTED"


@pytest.mark.parametrize("size", [SIZE, 1])
@pytest.mark.parametrize("keeps_table", [True, False])
def test_a_prepared_one_is_committed_without_its_lost_stream(size: int, keeps_table: bool) -> None:
    """Big ones are carried. A leader without its table never reads the journal of what is LOST."""
    play = Play(chunk_bytes=CHUNK_BYTES)
    _, token, receipt = play.begun(GONE, OTHER, size=size)
    word = Commit(token, (receipt,), None, None, 60_000)
    assert play.ask(replace(word, prepare=Prepare(b"", b"1"))).state == "PREPARED"
    play.world.cluster.delete_topic(stream_topic(GONE))
    play.play(30, 2 * LOST_S)
    play.one_shot(GONE)
    play.play(30, 2 * LOST_S)
    play.lead_anew(keeps_table=keeps_table, chunk_bytes=CHUNK_BYTES)
    outcome = play.ask(word, seconds=9.0)
    assert (outcome.state, outcome.committed, outcome.left_out) == ("COMMITTED", 8, 8)


@pytest.mark.parametrize("kind", [Kind.LEADERLESS, Kind.DENYING])
def test_a_stream_in_trouble_is_reason_enough(kind: Kind) -> None:
    """Its merge would go on by itself once that is mended, which may take hours."""
    play = Stuck(lost=False)
    retired = {c.partition for c in play.staged_merges() if c.stream == OTHER and c.count}
    troubled = next(c.partition for c in play.staged_merges() if c.stream == GONE)
    place = TopicPartition(stream_topic(GONE), troubled)
    play.world.cluster.troubles[place] = Trouble(kind)
    play.play(20, 20.0)
    forced = play.force()
    assert forced.state == "ABORTED"
    assert f"its merge made no progress: {place.topic}" in forced.reason.replace(f"{GONE}: ", "")
    assert play.big() == "COMMITTED", "it does not hold up others"
    play.world.cluster.troubles.clear()
    play.play(20, 20.0)
    play.check_strays(play.controller.state.retired(OTHER))
    assert play.controller.state.retired(OTHER) >= retired
    assert play.one_shot(GONE) == "COMMITTED"


def test_nothing_is_staged_into_a_stream_in_trouble() -> None:
    """Until chunks are carried an abort is enough to let go what it holds."""
    play = Stuck(lost=False)
    play.play(20, 1.0)
    txn_id, token, receipt = play.begun(GONE, OTHER, size=SIZE)
    play.play(20, 20.0)
    play.world.cluster.troubles[TopicPartition(stream_topic(GONE), 0)] = Trouble(Kind.LEADERLESS)
    play.send_commit(token, receipt)
    play.play(20, 20.0)
    state, reason = play.state(txn_id)
    assert state == "COMMIT_IN_PROGRESS"
    assert f"`anabranch txn abort {txn_id.hex()}` ends it" in reason
    assert play.ask(Abort(token, "enough")).state == "ABORTED"


def test_a_chunk_under_way_is_waited_for() -> None:
    play = Stuck()
    play.controller._background.carriers.staging.add(play.txn_id)  # type: ignore[union-attr]
    refused = play.world.send(Force(play.token, ""))
    play.controller._background.carriers.sync = lambda *_: None  # type: ignore[union-attr,method-assign]
    play.play(2)
    assert play.world.reply(refused).code == "NotReady"
    assert play.state(play.txn_id)[0] == "FINALIZE_IN_PROGRESS"


def test_what_carriers_are_at_is_known() -> None:
    play = Stuck(lost=False)
    assert play.controller._memory.staging == {play.txn_id}
    play.play(20, 1.0)
    assert play.state(play.txn_id)[0] == "COMMITTED"
    play.begun(OTHER)
    big = play.begun(OTHER, size=SIZE)
    play.world.send(Commit(big[1], (big[2],), None, None, 60_000))
    seen = set()
    for _ in range(20):
        play.play(1, 0.05)
        seen |= set(play.controller._memory.staging)
    assert seen == {big[0]}


@pytest.mark.parametrize("name", ["append", "append.after", "commit", "commit.after", "send.after"])
def test_a_leader_that_ends_during_a_force(name: str) -> None:
    play = Stuck()
    retired = {c.partition for c in play.staged_merges() if c.stream == OTHER and c.count}
    command = play.world.send(Force(play.token, "gone"))
    assert play.dies(name)
    play.lead_anew(keeps_table=False, chunk_bytes=CHUNK_BYTES)
    play.play(3)
    if name == "commit.after":  # its answer is lost
        play.world.send(Force(play.token, "gone"), again=command)
        play.play(1)
    assert play.world.reply(command).state == "ABORTED"
    assert play.big() == "COMMITTED"
    play.check_strays(retired)
    touched = play.ask(Touch(play.token, OTHER))
    assert touched.code == "TransactionAborted"
