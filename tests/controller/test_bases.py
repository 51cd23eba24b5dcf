"""A table begins at a base, and what it covers is deleted, whoever leads meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from anabranch.batches.records import Record, encode_batch
from anabranch.core.decisions import streams
from anabranch.core.rows import base_key
from anabranch.ports import TopicPartition, TopicSpec
from anabranch.protocol.hybrid_time import from_s, to_s
from anabranch.protocol.schemas.records import (
    Commit,
    CreateStream,
    DeleteStream,
    DescribeStreams,
    Outcome,
    Prepare,
    PublishBase,
    Scale,
    StreamList,
)
from anabranch.topics.names import history_topic, status_topic, stream_topic, topics_of
from tests.controller.losing import OTHER, Play, killed_at
from tests.controller.test_altering import TRUNCATION

TABLE, COMPANION = "nyc/rows", "nyc/rows-base"
IS_TABLE = {"table": "true"}


class Tabled(Play):
    """A control partition with a table of some commits."""

    def __init__(self, history_ms: int = 0, records: int = 0) -> None:
        super().__init__()
        settings = {"table": "true", "table.history.ms": str(history_ms)}
        if records:
            self.former(records)
        create = CreateStream(TABLE, 2, settings, adopt=bool(records))
        assert isinstance(self.ask(create, seconds=0.2), StreamList)
        assert self.one_shot(TABLE) == "COMMITTED"
        self.world.clock.sleep(2)
        made = self.ask(CreateStream(COMPANION, 2, {"table.base": TABLE}), seconds=0.2)
        assert isinstance(made, StreamList)

    def former(self, records: int) -> None:
        """So many records of others are in the topic."""
        log, name = self.world.cluster.log("others"), stream_topic(TABLE)
        config = log.describe_topics([stream_topic(OTHER)])[stream_topic(OTHER)].config
        log.create_topics([TopicSpec(name, 2, dict(config))])
        batch = encode_batch([Record(i, 0, b"k", b"old") for i in range(records)])
        log.send([(TopicPartition(name, 0), batch)], {})

    def base(
        self, *streams: str, number: int | None = None, series: str = COMPANION
    ) -> PublishBase:
        """The command for a base of now, which is committed."""
        number = to_s(self.info().oldest_snapshot) if number is None else number
        txn_id, token, receipt = self.begun(*streams or (COMPANION,))
        done = self.ask(Commit(token, (receipt,), None, series, 60_000, number), seconds=0.2)
        assert isinstance(done, Outcome), done
        self.last_base = PublishBase(TABLE, from_s(number), txn_id)
        return self.last_base

    def info(self) -> Any:
        return self.ask(DescribeStreams(None, TABLE)).streams[0]


def test_a_table_begins_at_a_base() -> None:
    play = Tabled()
    command = play.base()
    assert play.one_shot(TABLE) == "COMMITTED"
    base: Any = None
    for _ in range(2):
        base = play.ask(command, seconds=0.2).streams[0].base
        assert (base.timestamp, base.txn_id, base.rows) == (command.timestamp, command.txn_id, 8)
        assert base.last < base.timestamp < base.commit_timestamp
    assert play.events(TABLE) == 1, "the one above it"
    play.lead_anew(keeps_table=False)
    assert play.info().base == base
    play.world.clock.sleep(5)
    before = play.begins(TABLE)
    later = play.base()
    assert play.ask(later, seconds=0.2).streams[0].base.timestamp > base.timestamp
    assert (play.events(TABLE), play.begins(TABLE) > before) == (0, True)
    assert play.events(COMPANION) == 8, "the base before is deleted, too"
    assert play.ask(command).code == "IllegalState"
    assert isinstance(play.ask(DeleteStream(TABLE), seconds=0.2), StreamList)
    play.play(20, 4.0)
    left = play.world.cluster.topics.keys() & {*topics_of(TABLE), *topics_of(COMPANION)}
    assert (left, play.controller.state.bases) == (set(), {})


def test_a_table_is_not_deleted_while_a_prepared_one_has_a_part_in_its_companion() -> None:
    play = Tabled()
    _, token, receipt = play.begun(COMPANION)
    word = Commit(token, (receipt,), None, None, 60_000)
    assert play.ask(replace(word, prepare=Prepare(b"", b"1"))).state == "PREPARED"
    assert play.ask(DeleteStream(TABLE)).code == "IllegalState"
    assert (play.one_shot(TABLE), play.stream_state(COMPANION)) == ("COMMITTED", "ACTIVE")
    assert play.ask(word, seconds=0.2).state == "COMMITTED"
    assert isinstance(play.ask(DeleteStream(TABLE), seconds=0.2), StreamList)


@pytest.mark.parametrize("deleted", [2, 3])
def test_a_table_with_records_of_others_has_no_base_until_they_are_deleted(
    deleted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are its former records deleted, which no base has; if retention has deleted them, it has one."""
    monkeypatch.setattr(streams, "check_companion", lambda *_: None)
    play, place = Tabled(records=3), TopicPartition(stream_topic(TABLE), 0)
    play.world.cluster.log("retention").delete_records({place: deleted})
    events = play.events(TABLE)
    answer = play.ask(play.base(), seconds=0.2)
    if deleted == 3:
        assert (isinstance(answer, StreamList), play.events(TABLE)) == (True, 0)
    else:
        assert (answer.code, "was made of a topic" in answer.message) == ("IllegalState", True)
        assert (play.events(TABLE), play.controller.state.bases) == (events, {})


@pytest.mark.parametrize("phase", ["", ".after"])
@pytest.mark.parametrize("call", TRUNCATION)
def test_a_successor_publishes_the_base_wherever_a_leader_ends(call: str, phase: str) -> None:
    """A record is never deleted before the base is on the log; in the end both are done."""

    def start() -> tuple[Tabled, PublishBase]:
        play = Tabled()
        command = play.base()
        assert play.one_shot(TABLE) == "COMMITTED"
        return play, command

    def check_log(play: Tabled) -> None:
        if any(play.begins(TABLE)):
            rows = play.world.committed(TopicPartition(status_topic("anabranch"), 0))
            assert base_key(TABLE) in {row.key for row in rows}, "deleted, and no base is told"

    for play, asked in killed_at(call + phase, start, check_log):
        assert isinstance(play.world.reply(asked), StreamList)
        assert play.controller.state.bases[TABLE].txn_id == play.last_base.txn_id
        assert (play.controller.state.streams[TABLE].change, play.events(TABLE)) == (None, 1)
        assert play.one_shot(TABLE) == play.one_shot(OTHER) == "COMMITTED"


def test_the_history_stays_from_where_replicas_begin() -> None:
    """EPOCH records alone follow the base: the next cut would pass its position."""
    play = Tabled()
    base = play.ask(play.base(), seconds=0.2).streams[0].base
    for count in (4, 2, 4):
        assert isinstance(play.ask(Scale(TABLE, count, (), ()), seconds=0.5), StreamList)
    play.play(40, 4000.0)
    log = play.world.cluster.log("reader")
    place = TopicPartition(history_topic(TABLE), 0)
    assert log.start_offsets([place])[place] <= base.position
