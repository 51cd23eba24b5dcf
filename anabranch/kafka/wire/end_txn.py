"""EndTxn by hand: every round waits for it. Fields and order are those of Kafka's ``EndTxnRequest.json``."""

from __future__ import annotations

import struct
from typing import NamedTuple

from anabranch.batches.format import Buffer
from anabranch.kafka.wire.calls import END_TXN
from anabranch.kafka.wire.data import MalformedAnswer, uvarint

BUMPS_FROM = 5  # the answer names the producer id and epoch to go on with (KIP-890)

_END = struct.Struct(">qh?")
_ENDED = struct.Struct(">ih")
_BUMPED = struct.Struct(">qh")


def end_request(
    version: int, transactional_id: str, producer_id: int, producer_epoch: int, *, commit: bool
) -> bytes:
    """The request's body."""
    name = transactional_id.encode()
    fields = _END.pack(producer_id, producer_epoch, commit)
    if version >= END_TXN.flexible_from:
        return uvarint(len(name) + 1) + name + fields + b"\x00"
    return len(name).to_bytes(2, "big") + name + fields


class Ended(NamedTuple):
    """An EndTxn answer; below version `BUMPS_FROM` it names no producer (-1)."""

    error: int
    producer_id: int
    producer_epoch: int


def end_answer(version: int, body: Buffer) -> Ended:
    """The content of the answer. Raises `MalformedAnswer`."""
    try:
        _, error = _ENDED.unpack_from(body)
        if version < BUMPS_FROM:
            return Ended(error, -1, -1)
        return Ended(error, *_BUMPED.unpack_from(body, _ENDED.size))
    except struct.error:
        raise MalformedAnswer("an answer to EndTxn that is too short") from None
