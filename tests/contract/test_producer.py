"""Promises of every make of the producer: native transactions, fencing, refusals."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TypeVar

import pytest

from anabranch.batches.format import (
    CONTROL,
    HEADER_SIZE,
    check_crc,
    frame,
    read_header,
)
from anabranch.batches.records import Record, decode_records, encode_batch
from anabranch.ports import (
    CorruptBatch,
    Log,
    LogError,
    LogFenced,
    LogRefused,
    LogUnavailable,
    LogUncertain,
    OffsetOutOfRange,
    Producer,
    Steps,
    TopicPartition,
    all_steps,
)
from anabranch.testing.memory.partition import encode_sparse, with_base_offset
from tests.contract.conftest import Maker
from tests.contract.helpers import (
    TIME_MS,
    append_and_commit,
    batch,
    committed_values,
    read_all,
    stable_values,
    values,
    wait_stable,
)

NOWHERE = TopicPartition("nowhere", 0)
ANSWER_S = 10.0  # for the answer to one request
T = TypeVar("T")


def test_a_commit_shows_all_at_once(maker: Maker, log: Log) -> None:
    one, two = maker.topic(2)
    producer = maker.producer()
    producer.append([(one, batch("a")), (two, batch("b"))])
    producer.append([(one, batch("c"))])
    assert committed_values(log, one) == committed_values(log, two) == []
    assert log.end_offsets([one], committed=True) == {one: 0}
    assert log.end_offsets([one], committed=False) == {one: 2}
    assert values(read_all(log, one, committed=False)[0]) == ["a", "c"]
    producer.commit()
    assert stable_values(log, one) == ["a", "c"]
    assert stable_values(log, two) == ["b"]


def test_an_abort_shows_nothing_to_readers_of_committed_data(maker: Maker, log: Log) -> None:
    (tp,) = maker.topic()
    producer = maker.producer()
    producer.append([(tp, batch("a", "b"))])
    producer.abort()
    append_and_commit(producer, [(tp, batch("c"))])
    producer.append([(tp, batch("d"))])
    producer.abort()
    assert stable_values(log, tp) == ["c"]
    found, position = read_all(log, tp, committed=True)
    assert position == log.end_offsets([tp], committed=True)[tp]
    assert [b.base_offset for b in found] == [3]
    assert values(read_all(log, tp, committed=False)[0]) == ["a", "b", "c", "d"]


def test_interleaved_transactions_are_separate(maker: Maker, log: Log) -> None:
    (tp,) = maker.topic()
    keeps, drops = (maker.producer() for _ in range(2))
    for round_ in range(4):
        keeps.append([(tp, batch(f"keep{round_}"))])
        drops.append([(tp, batch(f"drop{round_}"))])
        keeps.commit()
        if round_ % 2:
            drops.abort()
    drops.abort()
    assert stable_values(log, tp) == [f"keep{i}" for i in range(4)]
    # A reader that starts in the middle of an aborted transaction must not see its rest.
    found, _ = read_all(log, tp, committed=True, start=3)
    assert all("drop" not in value for value in values(found))


def test_batches_of_a_partition_stay_in_order(maker: Maker, log: Log) -> None:
    one, two = maker.topic(2)
    producer = maker.producer()
    offsets = producer.append(
        [
            (one, batch("a", "b")),
            (two, batch("x")),
            (one, batch("c", compression="lz4")),
            (one, batch("d", "e", compression="zstd")),
            (two, batch("y", "z", compression="gzip")),
        ]
    )
    assert offsets == [0, 0, 2, 3, 1]
    producer.commit()
    assert stable_values(log, one) == ["a", "b", "c", "d", "e"]
    assert stable_values(log, two) == ["x", "y", "z"]


def test_a_long_stream_of_batches(maker: Maker, log: Log) -> None:
    one, two = maker.topic(2)
    producer = maker.producer()
    texts = [f"value {i}" for i in range(60)]
    batches = ((one if i % 3 else two, batch(text)) for i, text in enumerate(texts))
    offsets = producer.append_stream(batches)
    assert [o for i, o in enumerate(offsets) if i % 3] == list(range(40))
    assert [o for i, o in enumerate(offsets) if not i % 3] == list(range(20))
    producer.commit()
    assert stable_values(log, one) == [t for i, t in enumerate(texts) if i % 3]
    assert stable_values(log, two) == [t for i, t in enumerate(texts) if not i % 3]


def test_the_log_has_the_records_that_were_given(maker: Maker, log: Log) -> None:
    (tp,) = maker.topic()
    producer = maker.producer()
    given = [
        batch("a", "b", compression=codec) for codec in (None, "gzip", "lz4", "zstd", "snappy")
    ]
    append_and_commit(producer, [(tp, data) for data in given])
    wait_stable(log, {tp})
    found, _ = read_all(log, tp, committed=True)
    for raw, data in zip(found, given, strict=True):
        header = read_header(raw.data)
        check_crc(raw.data)
        assert bytes(raw.data[HEADER_SIZE:]) == data[HEADER_SIZE:]
        assert header.is_transactional
        assert not header.is_control
        assert header.base_offset == raw.base_offset
        assert header.next_offset == raw.next_offset
        assert [r._replace(offset=0) for r in decode_records(raw.data)] == [
            r._replace(offset=0) for r in decode_records(data)
        ]


def test_marks_of_a_former_log_are_cleared(maker: Maker, log: Log) -> None:
    (tp,) = maker.topic()
    records = [Record(0, TIME_MS, b"k", b"a")]
    plain = encode_batch(records)
    # Another producer's batch, with a delete horizon, from the middle of its log.
    marked = frame(
        plain[HEADER_SIZE:],
        compression=0,
        last_offset_delta=0,
        count=1,
        base_timestamp=TIME_MS,
        max_timestamp=TIME_MS,
        base_offset=999,
        attributes=0x40 | 0x08,
        producer_id=123456,
        producer_epoch=7,
        base_sequence=55,
    )
    producer = maker.producer()
    assert append_and_commit(producer, [(tp, marked)]) == [0]
    wait_stable(log, {tp})
    (raw,) = read_all(log, tp, committed=True)[0]
    header = read_header(raw.data)
    assert header.attributes == 0x10
    assert header.producer_id not in (-1, 123456)
    assert header.base_sequence == 0
    assert decode_records(raw.data) == records


@pytest.mark.parametrize("ids", [1, 2])
def test_transactions_back_to_back_on_one_id_or_in_turn(maker: Maker, log: Log, ids: int) -> None:
    (tp,) = maker.topic()
    producers = [maker.producer() for _ in range(ids)]
    offsets = []
    for number in range(20):
        producer = producers[number % ids]
        offsets += producer.append([(tp, batch(f"{number}"))])
        producer.commit()
    assert stable_values(log, tp) == [f"{number}" for number in range(20)]
    assert offsets == sorted(offsets)


def test_an_end_without_data_is_nothing(maker: Maker, log: Log) -> None:
    (tp,) = maker.topic()
    producer = maker.producer()
    assert append_and_commit(producer, []) == []
    producer.abort()
    append_and_commit(producer, [(tp, batch("a"))])
    producer.commit()
    wait_stable(log, {tp})
    assert log.end_offsets([tp], committed=True) == {tp: 2}


def test_a_second_init_fences_the_first(maker: Maker, log: Log) -> None:
    (tp,) = maker.topic()
    name = maker.new_id()
    first = maker.producer(name)
    first.append([(tp, batch("zombie"))])
    # The call aborts the first one's open transaction before it returns.
    second = maker.producer(name)
    assert stable_values(log, tp) == []
    with pytest.raises(LogFenced):
        first.append([(tp, batch("zombie"))])
    with pytest.raises(LogFenced):
        first.commit()
    with pytest.raises(LogFenced):
        first.abort()
    append_and_commit(second, [(tp, batch("new"))])
    assert stable_values(log, tp) == ["new"]


def test_appended_then_fenced_does_not_commit(maker: Maker, log: Log) -> None:
    (tp,) = maker.topic()
    name = maker.new_id()
    first = maker.producer(name)
    first.append([(tp, batch("zombie"))])
    maker.producer(name)
    with pytest.raises(LogFenced):
        first.commit()
    with pytest.raises(LogFenced):
        first.append([(tp, batch("more"))])
    assert stable_values(log, tp) == []


def test_a_closed_producer_refuses_use(maker: Maker, log: Log) -> None:
    (tp,) = maker.topic()
    producer = maker.producer()
    producer.close()
    with pytest.raises(LogFenced):
        producer.append([(tp, batch("a"))])


def _corrupt(data: bytes) -> bytes:
    return data[:-1] + bytes((data[-1] ^ 1,))


def _broken_body() -> bytes:
    """A right CRC over records that make no sense."""
    return frame(
        b"\x7f" * 40,
        compression=0,
        last_offset_delta=1,
        count=2,
        base_timestamp=TIME_MS,
        max_timestamp=TIME_MS,
    )


def _control() -> bytes:
    plain = encode_batch([Record(0, TIME_MS, b"\x00\x00\x00\x01", b"\x00\x00\x00\x00\x00\x00")])
    return frame(
        plain[HEADER_SIZE:],
        compression=0,
        last_offset_delta=0,
        count=1,
        base_timestamp=TIME_MS,
        max_timestamp=TIME_MS,
        attributes=CONTROL,
    )


def _sparse() -> bytes:
    records = [Record(offset, TIME_MS, b"k", b"v") for offset in (0, 2)]
    return with_base_offset(encode_sparse(records, base_offset=0, next_offset=4), 0)


REFUSED = {
    "corrupt": (_corrupt(batch("a" * 50)), (2,)),
    "broken body": (_broken_body(), (2, 87)),
    "control": (_control(), (87,)),
    "sparse": (_sparse(), (87,)),
    "too large": (batch("x" * 1_200_000), (10,)),
    "far future": (batch("x", timestamps=(TIME_MS * 2,)), (32,)),
    "not a batch": (b"\x00" * 100, (2, 87)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_ends_the_transaction_not_the_producer(maker: Maker, log: Log, case: str) -> None:
    one, two = maker.topic(2, message_timestamp_after_max_ms="3600000")
    data, codes = REFUSED[case]
    producer = maker.producer()
    producer.append([(one, batch("before"))])
    with pytest.raises(LogRefused) as caught:
        producer.append([(two, batch("beside")), (one, data), (one, batch("behind"))])
    assert caught.value.error in codes
    with pytest.raises(LogRefused):
        producer.append([(one, batch("more"))])
    with pytest.raises(LogRefused):
        producer.commit()
    producer.abort()
    for number in range(3):
        append_and_commit(
            producer, [(one, batch(f"after{number}")), (two, batch(f"after{number}"))]
        )
    assert stable_values(log, one) == [f"after{i}" for i in range(3)]
    assert stable_values(log, two) == [f"after{i}" for i in range(3)]


@pytest.mark.parametrize("case", ["sparse", "corrupt", "too large"])
def test_after_a_refusal_nothing_new_is_taken_for_old(maker: Maker, log: Log, case: str) -> None:
    """Without a new epoch sequences go on, also behind records that were stored but never asked about."""
    one, two = maker.topic(2)
    producer = maker.producer()
    for number in range(3):
        with pytest.raises(LogRefused):
            producer.append_stream(
                [
                    (one, batch("lost")),
                    (two, batch("lost")),
                    *((tp, batch("lost")) for _ in range(3) for tp in (one, two)),
                    (one, REFUSED[case][0]),
                    (two, batch("behind")),
                ]
            )
        producer.abort()
        for text in ("x", "y"):
            producer.append([(one, batch(f"{text}{number}")), (two, batch(f"{text}{number}"))])
        producer.commit()
    wait_stable(log, {one, two})
    wanted = [f"{text}{number}" for number in range(3) for text in ("x", "y")]
    assert committed_values(log, one) == wanted
    assert committed_values(log, two) == wanted


def test_a_compacted_topic_asks_for_keys(maker: Maker, log: Log) -> None:
    (tp,) = maker.topic(cleanup_policy="compact")
    producer = maker.producer()
    with pytest.raises(LogRefused) as caught:
        producer.append([(tp, encode_batch([Record(0, TIME_MS, None, b"v")]))])
    assert caught.value.error == 87
    producer.abort()


def test_an_unknown_partition_is_refused(maker: Maker, log: Log) -> None:
    (tp,) = maker.topic()
    producer = maker.producer()
    with pytest.raises(LogRefused) as caught:
        producer.append([(TopicPartition(tp.topic, 9), batch("a"))])
    assert caught.value.error == 3
    producer.abort()
    append_and_commit(producer, [(tp, batch("a"))])


@pytest.mark.parametrize("behind", [0, 2])
@pytest.mark.parametrize(
    "error",
    [KeyError("its own"), LogUnavailable("?"), CorruptBatch("?"), OffsetOutOfRange(NOWHERE, 0)],
    ids=lambda error: type(error).__name__,
)
def test_a_failing_generator_leaves_nothing(
    maker: Maker, log: Log, error: Exception, behind: int
) -> None:
    """It may read another log, whose trouble is none of the producer's."""
    (tp,) = maker.topic()
    producer = maker.producer()

    def broken() -> Iterator[tuple[TopicPartition, bytes]]:
        yield from ((tp, batch("ab"[i])) for i in range(behind))
        raise error

    with pytest.raises(type(error)):
        producer.append_stream(broken())
    if behind:
        with pytest.raises(LogRefused):
            producer.commit()
    producer.abort()
    append_and_commit(producer, [(tp, batch("c"))])
    assert stable_values(log, tp) == ["c"]


def test_a_transaction_beyond_its_timeout_is_aborted(maker: Maker, log: Log) -> None:
    if maker.name.startswith("kafka"):
        pytest.skip("the broker looks for these every ten seconds only")
    (tp,) = maker.topic()
    producer = maker.producer(timeout=1)
    producer.append([(tp, batch("a"))])
    log.fetch({tp: 1}, max_wait=2, max_bytes=1, committed=True)
    wait_stable(log, {tp})
    with pytest.raises(LogFenced):
        producer.commit()
    assert committed_values(log, tp) == []


# -- appends and commits in steps ---------------------------------------------------------------------


def taken(producer: Producer, steps: Steps[T], pause_s: float = 0.0) -> T:
    """The result of all steps. ``pause_s``: between two of them, besides the wait for brokers' answers."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        deadline = time.monotonic() + ANSWER_S
        while not producer.is_answered():
            assert time.monotonic() < deadline, "the answer does not come"
            time.sleep(0.001)
        time.sleep(pause_s)


@pytest.mark.parametrize("pause_s", [0.0, 1.0])
def test_steps_do_the_same_as_one_call(maker: Maker, log: Log, pause_s: float) -> None:
    if maker.name.startswith("memory"):
        pause_s = 0.0  # its brokers have another clock
    one, two = maker.topic(2)
    producer = maker.producer()
    for number in range(2):
        given = [(one, batch("a", "b")), (two, batch("x")), (one, batch("c"))]
        offsets = taken(producer, producer.appending(given), pause_s)
        first = log.end_offsets([one, two], committed=False)
        assert offsets == [first[one] - 3, first[two] - 1, first[one] - 1]
        again = taken(producer, producer.appending([(one, batch("d"))]), pause_s)
        assert again == [first[one]]
        assert committed_values(log, one) == ["a", "b", "c", "d"] * number
        taken(producer, producer.committing(), pause_s)
        assert stable_values(log, one) == ["a", "b", "c", "d"] * (number + 1)
        assert stable_values(log, two) == ["x"] * (number + 1)


def test_steps_without_data_are_nothing(maker: Maker, log: Log) -> None:
    (tp,) = maker.topic()
    producer = maker.producer()
    assert taken(producer, producer.appending([])) == []
    taken(producer, producer.committing())
    assert log.end_offsets([tp], committed=False) == {tp: 0}
    assert producer.is_answered(), "nothing was asked"


@pytest.mark.parametrize("case", ["corrupt", "too large"])
def test_steps_are_refused_as_one_call_is(maker: Maker, log: Log, case: str) -> None:
    (tp,) = maker.topic()
    data, codes = REFUSED[case]
    producer = maker.producer()
    with pytest.raises(LogRefused) as caught:
        taken(producer, producer.appending([(tp, data)]))
    assert caught.value.error in codes
    with pytest.raises(LogRefused):
        taken(producer, producer.committing())
    producer.abort()
    append_and_commit(producer, [(tp, batch("after"))])
    assert stable_values(log, tp) == ["after"]


def test_a_producer_that_is_fenced_between_two_steps_of_an_append(maker: Maker, log: Log) -> None:
    (tp,) = maker.topic()
    name = maker.new_id()
    first = maker.producer(name)
    steps = first.appending([(tp, batch("zombie"))])
    next(steps)
    second = maker.producer(name)

    def rest() -> None:
        all_steps(steps)  # its answer may have been sent before
        all_steps(first.committing())

    with pytest.raises(LogFenced):
        rest()
    append_and_commit(second, [(tp, batch("new"))])
    assert stable_values(log, tp) == ["new"]


def test_a_producer_that_is_fenced_between_two_steps_of_a_commit(maker: Maker, log: Log) -> None:
    """All that was appended is committed, or nothing is; if the last step ends well, it is committed."""
    one, two = maker.topic(2)
    name = maker.new_id()
    first = maker.producer(name)
    first.append([(one, batch("a")), (two, batch("a"))])
    steps = first.committing()
    next(steps)
    second = maker.producer(name)
    known = True
    try:
        all_steps(steps)
    except (LogFenced, LogUncertain):
        known = False
    append_and_commit(second, [(one, batch("new")), (two, batch("new"))])
    found = stable_values(log, one)
    assert found == stable_values(log, two)
    assert found == ["a", "new"] or (not known and found == ["new"])


@pytest.mark.parametrize("call", ["appending", "committing"])
def test_steps_that_are_dropped(maker: Maker, log: Log, call: str) -> None:
    """The producer says by a named error that it can't be used, or can be used again after an abort."""
    one, two = maker.topic(2)
    name = maker.new_id()
    producer = maker.producer(name)
    given = [(one, batch("a")), (two, batch("a"))]
    if call == "committing":
        producer.append(given)
    steps: Steps[object] = (
        producer.committing() if call == "committing" else producer.appending(given)
    )
    next(steps)
    steps.close()
    try:
        producer.abort()
        append_and_commit(producer, [(one, batch("b")), (two, batch("b"))])
    except LogError as error:
        assert isinstance(error, LogFenced | LogUncertain)  # noqa: PT017
        producer = maker.producer(name)
    append_and_commit(producer, [(one, batch("c")), (two, batch("c"))])
    found = stable_values(log, one)
    assert found == stable_values(log, two), "all of a transaction, or nothing"
    assert found[-1] == "c"
    assert found.count("a") <= (call == "committing")


def test_a_commit_is_under_way_while_another_producer_appends(maker: Maker, log: Log) -> None:
    one, two = maker.topic(2)
    producers = [maker.producer() for _ in range(2)]
    producers[0].append([(one, batch("0")), (two, batch("0"))])
    for number in range(1, 8):
        former, producer = producers[(number - 1) % 2], producers[number % 2]
        ends = former.committing()
        next(ends)
        appends = producer.appending([(one, batch(str(number))), (two, batch(str(number)))])
        next(appends)
        all_steps(ends)
        offsets = all_steps(appends)
        assert len(offsets) == 2
    producers[7 % 2].commit()
    assert stable_values(log, one) == [str(number) for number in range(8)]
    assert stable_values(log, two) == stable_values(log, one)
