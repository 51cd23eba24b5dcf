"""Deleted journals: a writer that waits for acknowledgements asks what became of the stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from anabranch import errors
from anabranch.librdkafka.admin import KafkaAdmin
from anabranch.librdkafka.journal_writer import Channel, KafkaJournal
from anabranch.ports import JournalMissing, TopicPartition
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import id_named
from tests.client.answers import STREAM, obliging, outcome, refusal, stream_info
from tests.client.bench import Bench, override
from tests.client.doubles import ListJournal, ManualClock

TOPIC = "nyc.flights.journal"


def described(state: r.ShownStreamState) -> r.StreamList:
    return r.StreamList((replace(stream_info(STREAM, 2), state=state),))


def missing_for(journal: ListJournal, bench: Bench, *times: float) -> None:
    """The journal is not found when it is flushed; each time that takes so many seconds."""
    flush, left = journal.flush, list(times)

    def flushed(written: Any, deadline: float) -> Any:
        if left:
            bench.clock.now += left.pop(0)
            raise JournalMissing(TOPIC)
        return flush(written, deadline)

    journal.flush = flushed  # type: ignore[method-assign]


def begun(answers: Sequence[Any]) -> tuple[Bench, Any]:
    bench = Bench(override(DescribeStreams=list(answers)), one_shot_bytes=0)
    txn = bench.client.begin("nyc")
    txn.write(STREAM, b"v", key=b"k")
    return bench, txn


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (described("LOST"), "LOST"),
        (described("FORGETTING"), "FORGETTING"),
        (refusal("UnknownStream"), "FORGOTTEN"),
    ],
)
@pytest.mark.parametrize("call", ["flush", "commit"])
def test_a_stream_that_is_lost_ends_the_handle_at_once(answer: Any, state: str, call: str) -> None:
    bench, txn = begun([answer])
    start = bench.clock.now
    missing_for(bench.journals.made[0], bench, 1.0)
    for _ in range(2):
        with pytest.raises(errors.StreamLost, match=f"{STREAM} is {state}"):
            getattr(txn, call)(timeout=600)
    assert bench.clock.now < start + 5
    with pytest.raises(errors.StreamLost):
        txn.write(STREAM, b"w")
    txn.abort()
    assert bench.bus.names()[-1] == "Abort"


@pytest.mark.parametrize("before", ["prepared", "in doubt"])
def test_a_commit_that_may_be_decided_asks_no_journal(before: str) -> None:
    """Its stream may be lost by now; the outcome counts, and says what is missing."""
    silent = before == "in doubt"

    def script(command: Any) -> Any:
        if silent and isinstance(command, r.Commit | r.Resolve):
            return None
        if isinstance(command, r.Commit) and command.prepare is not None:
            return outcome(id_named(command.token), "PREPARED", writers=command.own)
        return obliging(command)

    bench = Bench(script, one_shot_bytes=0)
    txn = bench.client.begin("nyc")
    txn.write(STREAM, b"v", key=b"k")
    if silent:
        with pytest.raises(errors.OutcomeUnknown):
            txn.commit(timeout=5)
    else:
        txn.prepare()
    silent = False
    missing_for(bench.journals.made[0], bench, *[1.0] * 9)
    assert txn.commit(timeout=300).counts.committed


def test_one_that_is_only_missing_is_waited_for_until_the_deadline() -> None:
    bench, txn = begun([described("WAITING")])
    start = bench.clock.now
    missing_for(bench.journals.made[0], bench, *[1.0] * 12)
    with pytest.raises(errors.NotReady, match=f"know no topic {TOPIC}") as refused:
        txn.flush(timeout=10)
    assert type(refused.value) is errors.NotReady
    assert start + 10 <= bench.clock.now < start + 12
    txn.flush(timeout=10)
    assert bench.bus.names()[-1] == "Register", "it continues when the topic is there again"
    assert txn.commit().counts.committed


def test_brokers_that_do_not_know_it_yet_do_not_end_anything() -> None:
    bench, txn = begun([described("ACTIVE")])
    missing_for(bench.journals.made[0], bench, 1.0, 1.0)
    txn.flush(timeout=10)
    assert bench.bus.names().count("DescribeStreams") == 2


# -- the journal itself ---------------------------------------------------------------------------------


class Queue:
    """A producer with records that no broker takes, unless ``taken`` says at what time."""

    def __init__(self, clock: ManualClock, taken: float = 1e9) -> None:
        self.clock = clock
        self.taken = clock.now + taken

    def __len__(self) -> int:
        return int(self.clock.now < self.taken)

    def flush(self, seconds: float) -> None:
        self.clock.now += seconds


class Waiting:
    """See `Channel`."""

    failure = forbidden = None

    def __init__(self, clock: ManualClock, taken: float) -> None:
        self.producer = Queue(clock, taken)

    def poll(self, seconds: float, *, flush: bool = False) -> None:
        if flush:
            self.producer.flush(seconds)

    def watch(self) -> None:
        pass


class Brokers:
    """See `KafkaAdmin`. ``known``: whether they know the topic, answer by answer, the last one for ever."""

    def __init__(self, clock: ManualClock, *known: bool | Exception) -> None:
        self.clock = clock
        self.known = list(known)
        self.asked: list[float] = []

    def partition_counts(self, topics: Sequence[str], deadline: float) -> dict[str, int]:
        self.asked.append(self.clock.now)
        answer = self.known.pop(0) if len(self.known) > 1 else self.known[0]
        if isinstance(answer, Exception):
            raise answer
        return dict.fromkeys(topics, 2) if answer else {}

    def end_offsets(self, places: Any, deadline: float) -> dict[Any, int]:
        if not self.known[-1]:
            self.clock.now = deadline
            raise errors.NotReady("the brokers can't be asked")
        return dict.fromkeys(places, 7)


def journal(clock: ManualClock, brokers: Brokers, taken: float = 1e9) -> KafkaJournal:
    made = KafkaJournal(cast("Any", None), cast("KafkaAdmin", brokers), clock, 30.0)
    channel = cast("Channel", Waiting(clock, taken))
    made._channels[1000] = made._by_topic[TOPIC] = channel
    return made


def test_the_topic_of_unacknowledged_records_is_asked_for_once_a_second() -> None:
    clock = ManualClock()
    brokers = Brokers(clock, errors.NotReady("nobody there"), True, True, False)
    with pytest.raises(JournalMissing, match=TOPIC):
        journal(clock, brokers).flush({}, clock.now + 60)
    assert len(brokers.asked) == 4
    assert brokers.asked[0] + 3 <= clock.now < brokers.asked[0] + 4


def test_at_the_deadline_it_is_missing_or_the_writer_has_failed() -> None:
    clock = ManualClock()
    made = journal(clock, Brokers(clock, False, True))
    with pytest.raises(JournalMissing):
        made.flush({}, clock.now + 1.5)
    with pytest.raises(JournalMissing):
        made.flush({}, clock.now)  # the deadline is over, and nothing else is known
    with pytest.raises(errors.WriteFailed, match="1 writes were not acknowledged"):
        made.flush({}, clock.now + 3.5)


def test_the_topic_of_acknowledged_records_is_asked_for_too() -> None:
    clock = ManualClock()
    with pytest.raises(JournalMissing):
        journal(clock, Brokers(clock, False), taken=0.0).flush(
            {TopicPartition(TOPIC, 0): 7}, clock.now + 60
        )
    assert clock.now < 1000.0 + 5
    clock = ManualClock()
    place = TopicPartition(TOPIC, 0)
    assert journal(clock, Brokers(clock, True), taken=0.0).flush({place: 7}, clock.now + 60) == {
        place: 7
    }
