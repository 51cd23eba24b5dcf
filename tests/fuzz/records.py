"""Fuzzed: framed records, tokens, receipts, ids, status keys."""

from __future__ import annotations

from functools import partial

from anabranch.batches.one_shots import decode_lazily
from anabranch.batches.records import Record
from anabranch.client.reservation import Reservation
from anabranch.core.locks.table_writes import Keys
from anabranch.core.rows import epoch_key, name_key, split_key, txn_key, writer_key
from anabranch.errors import InvalidArgument, InvalidToken, MalformedRecord, UnsupportedVersion
from anabranch.protocol.ids import (
    make_txn_id,
    pack_txn_header,
    parse_txn_text,
    txn_text,
    unpack_txn_header,
)
from anabranch.protocol.schemas import codec, fast
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import Token, is_genuine, make, narrow, peek
from anabranch.reading.history import history_record
from anabranch.types import Receipt
from tests.fuzz.samples import records_of_all_types, sample
from tests.fuzz.target import Run, Target, always

_NO_RECORD = (MalformedRecord, UnsupportedVersion)
_SECRET = bytes(range(32))
_TXN_ID = make_txn_id(3, 1_700_000_000_000, 77)


def _decode(data: bytes) -> None:
    record = codec.decode(data)
    written = codec.encode(record)  # what is read can be written, and reads the same
    assert codec.decode(written) == record
    assert _refused(codec.decode, data + b"\x00"), "bytes too many"
    assert decode_lazily(data) == record
    if type(record) in fast.READERS:
        assert not _refused(partial(codec._decode, type(record)), data), "only fastavro refuses"
        assert codec._decode(type(record), data) == record


def _refused(decode: Run, data: bytes) -> bool:
    try:
        decode(data)
    except _NO_RECORD:
        return True
    return False


def _history(data: bytes) -> None:
    history_record("a.b.history", Record(0, 0, None, data))


def _given_bytes(cls: type[Receipt] | type[Reservation], data: bytes) -> None:
    found = cls.from_bytes(data)
    assert cls.from_bytes(found.to_bytes()) == found
    str(found)


def _tokens() -> Run:
    good = _token_seeds()

    def run(data: bytes) -> None:
        said = peek(data)
        if not is_genuine(said, _SECRET):
            raise InvalidToken("not genuine")
        assert data in good, "forged"

    return run


def _token_seeds() -> list[bytes]:
    return [
        bytes(narrow(make(_SECRET, Token(_TXN_ID, 1, ms, scope, "open")), rights=rights))
        for ms in (1, 60_000)
        for scope in ("a", "x" * 100)
        for rights in (1, 31)
    ]


def _digests(data: bytes) -> None:
    assert Keys.parse(data).to_bytes() == data


def _digest_seeds() -> list[bytes]:
    return [Keys.of(b"k%d" % n for n in range(count)).to_bytes() for count in (0, 1, 5, 200)]


def _ids(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    assert txn_text(parse_txn_text(text)) == "".join(text.split()).lower()


def _status_keys() -> list[bytes]:
    return [name_key("s", "n"), epoch_key("s/x", 3), txn_key(_TXN_ID), writer_key(_TXN_ID, -5)]


def _seeds(*classes: type) -> list[bytes]:
    return [codec.encode(sample(cls, i)) for cls in classes for i in range(4)]


TARGETS = (
    Target("records", records_of_all_types, always(_decode), _NO_RECORD),
    Target(
        "history-records",
        lambda: _seeds(r.CommitRecord, r.EpochRecord),
        always(_history),
        _NO_RECORD,
    ),
    Target(
        "receipts",
        lambda: _seeds(r.Receipt),
        always(partial(_given_bytes, Receipt)),
        (InvalidArgument, UnsupportedVersion),
    ),
    Target(
        "reservations",
        lambda: _seeds(r.Begin),
        always(partial(_given_bytes, Reservation)),
        _NO_RECORD,
    ),
    Target("tokens", _token_seeds, _tokens, (InvalidToken,)),
    Target(
        "txn-headers",
        lambda: [pack_txn_header(_TXN_ID, -1, 2)],
        always(unpack_txn_header),
        (MalformedRecord,),
    ),
    Target("txn-ids", lambda: [txn_text(_TXN_ID).encode()], always(_ids), (InvalidArgument,)),
    Target("digests", _digest_seeds, always(_digests), (MalformedRecord,)),
    Target("status-keys", _status_keys, always(split_key), (MalformedRecord,)),
)
