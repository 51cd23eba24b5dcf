"""EndTxn by hand against kio's generated messages."""

from __future__ import annotations

import io
from datetime import timedelta
from importlib import import_module

import pytest
from kio.schema.errors import ErrorCode
from kio.schema.types import ProducerId
from kio.serial import entity_writer
from kio.static.primitive import i16

from anabranch.kafka import calls
from anabranch.kafka.calls import END_TXN, MalformedAnswer
from anabranch.kafka.data import BUMPS_FROM, Ended, end_answer, end_request

VERSIONS = range(END_TXN.lowest, END_TXN.highest + 1)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("name", ["anabranch-control-3-a", "ü" * 200])
def test_requests_are_kios(version: int, commit: bool, name: str) -> None:
    wanted = calls.request(
        END_TXN,
        version,
        transactional_id=name,
        producer_id=(1 << 40) + 7,
        producer_epoch=32_000,
        committed=commit,
    )
    assert end_request(version, name, (1 << 40) + 7, 32_000, commit=commit) == wanted


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("error", [ErrorCode.none, ErrorCode.concurrent_transactions])
def test_answers_of_kio_are_read(version: int, error: ErrorCode) -> None:
    kind = import_module(f"kio.schema.end_txn.v{version}.response").EndTxnResponse
    fields = {"throttle_time": timedelta(milliseconds=11), "error_code": error}
    if version >= BUMPS_FROM:
        fields |= {"producer_id": ProducerId(1 << 33), "producer_epoch": i16(41)}
    out = io.BytesIO()
    entity_writer(kind)(out, kind(**fields))
    bumped = (1 << 33, 41) if version >= BUMPS_FROM else (-1, -1)
    assert end_answer(version, memoryview(out.getvalue())) == Ended(int(error), *bumped)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_short_answer_is_malformed(version: int) -> None:
    size = 16 if version >= BUMPS_FROM else 6
    end_answer(version, bytes(size))
    with pytest.raises(MalformedAnswer):
        end_answer(version, bytes(size - 1))
