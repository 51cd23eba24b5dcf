"""Identifiers: parts come back, ids sort by age, and bad names are refused by name."""

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from anabranch.errors import InvalidArgument, MalformedRecord
from anabranch.protocol import ids, legal_names
from anabranch.topics import names

partitions = st.integers(0, (1 << 16) - 1)
times = st.integers(0, (1 << 47) - 1)
u64 = st.integers(0, (1 << 64) - 1)
i64 = st.integers(-(1 << 63), (1 << 63) - 1)
i32 = st.integers(-(1 << 31), (1 << 31) - 1)
txn_ids = st.binary(min_size=16, max_size=16)
good_names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", fullmatch=True)

BAD_NAMES = [
    "",
    "_front",
    "-front",
    "a.b",
    "a b",
    "a/b",
    "\u00e4",
    "\u0661",  # a digit, but not an ASCII one
    "a\n",
    "\na",
    "a\0",
    "x" * 101,
]


@given(partitions, times, u64)
def test_the_parts_of_a_transaction_id_come_back(partition: int, ms: int, random: int) -> None:
    txn_id = ids.make_txn_id(partition, ms, random)
    assert txn_id == struct.pack(">HIIQ", partition, ms >> 16, (ms & 0xFFFF) << 16, 0)[:8] + (
        struct.pack(">Q", random)
    )
    assert len(txn_id) == ids.TXN_ID_SIZE
    assert ids.control_partition_of(txn_id) == partition
    assert ids.made_ms_of(txn_id) == ms
    moving = ids.make_marked_id(partition, ms, random)
    assert (ids.is_marked(txn_id), ids.is_marked(moving)) == (False, True)
    assert (ids.control_partition_of(moving), ids.made_ms_of(moving)) == (partition, ms)
    assert ids.parse_txn_text(ids.txn_text(txn_id)) == txn_id


@given(partitions, times, times, u64, u64)
def test_ids_of_a_control_partition_sort_by_age(
    partition: int, ms1: int, ms2: int, random1: int, random2: int
) -> None:
    one, two = ids.make_txn_id(partition, ms1, random1), ids.make_txn_id(partition, ms2, random2)
    if ms1 != ms2:
        assert (one < two) == (ms1 < ms2)


@given(st.integers())
def test_any_random_number_is_cut_to_64_bits(random: int) -> None:
    assert ids.make_txn_id(1, 2, random)[8:] == struct.pack(">Q", random % (1 << 64))


@pytest.mark.parametrize(("partition", "ms"), [(-1, 0), (1 << 16, 0), (0, -1), (0, 1 << 47)])
def test_parts_out_of_range_are_refused(partition: int, ms: int) -> None:
    with pytest.raises(InvalidArgument):
        ids.make_txn_id(partition, ms, 0)


@pytest.mark.parametrize(
    "text", ["", "ab", "g" * 32, "0" * 31, "0" * 33, "0" * 34, "0x" + "0" * 30]
)
def test_other_texts_are_no_transaction_ids(text: str) -> None:
    with pytest.raises(InvalidArgument, match="not a transaction id"):
        ids.parse_txn_text(text)


@given(txn_ids, i64, i32)
def test_the_txn_header_comes_back(txn_id: bytes, writer: int, epoch: int) -> None:
    value = ids.pack_txn_header(txn_id, writer, epoch)
    assert value == txn_id + struct.pack(">q", writer) + struct.pack(">i", epoch)
    assert ids.unpack_txn_header(value) == (txn_id, writer, epoch)


@given(st.binary(max_size=60).filter(lambda b: len(b) != ids.TXN_HEADER_SIZE))
def test_a_txn_header_of_another_size_is_malformed(value: bytes) -> None:
    with pytest.raises(MalformedRecord, match="28 bytes"):
        ids.unpack_txn_header(value)


@given(st.integers(0, (1 << 31) - 1), st.integers(0, (1 << 32) - 1))
@example((1 << 31) - 1, (1 << 32) - 1)
def test_a_segment_id_is_epoch_and_number(epoch: int, number: int) -> None:
    segment = ids.segment_id(epoch, number)
    assert 0 <= segment < 1 << 63  # an Avro long
    assert (ids.segment_epoch(segment), ids.segment_number(segment)) == (epoch, number)


@given(good_names, good_names)
def test_good_names_pass(scope: str, name: str) -> None:
    assert legal_names.check_scope(scope) == scope
    assert legal_names.split_stream(f"{scope}/{name}") == (scope, name)


@pytest.mark.parametrize("bad", BAD_NAMES)
def test_bad_names_are_refused(bad: str) -> None:
    with pytest.raises(InvalidArgument, match="not a scope"):
        legal_names.check_scope(bad)
    for stream in (f"nyc/{bad}", f"{bad}/flights", f"nyc/flights/{bad}", bad.replace("/", "")):
        with pytest.raises(InvalidArgument, match="not a stream"):
            legal_names.split_stream(stream)


@given(st.text(max_size=30))
def test_any_text_is_a_stream_or_refused(text: str) -> None:
    try:
        scope, name = legal_names.split_stream(text)
    except InvalidArgument:
        return
    assert f"{scope}/{name}" == text
    assert names.stream_topic(text).split(".") == [scope, name]


@given(good_names, good_names, good_names, good_names)
def test_topics_of_unlike_streams_never_meet(s1: str, n1: str, s2: str, n2: str) -> None:
    def topics(stream: str) -> set[str]:
        return {
            names.stream_topic(stream),
            names.journal_topic(stream),
            names.history_topic(stream),
        }

    one, two = f"{s1}/{n1}", f"{s2}/{n2}"
    assert len(topics(one)) == 3
    if one != two:
        assert not topics(one) & topics(two)
