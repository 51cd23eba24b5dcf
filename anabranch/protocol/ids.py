"""Identifiers of transactions and segments, fencing tokens, and the headers of records.

A transaction id is 16 bytes, big endian: control partition (16 bits), Unix milliseconds when it was made
(48), random (64). The client makes it *before* it sends anything, so that a begin or a one-shot can be
repeated and resolved by id after any time-out (``docs/inside/decisions/0001-ids-by-clients.md``).
"""

from __future__ import annotations

import hashlib
import struct

from anabranch.errors import InvalidArgument, MalformedRecord

TXN_ID_SIZE = 16
NO_TXN = bytes(TXN_ID_SIZE)
SECRET_SIZE = 32  # bytes of the secret that begins a transaction
FENCING_TOKEN_SIZE = 16  # random bytes that prove task ownership
# The highest bit of an id's time, which no clock reaches, marks one-shots that move positions.
MARK_MS = 1 << 47
CORRELATION_ID_SIZE = 16
DIRECTORY = 0  # the control partition that knows where each scope is served
AS_NOW = -1  # in `SetFeatureLevel`: as many control partitions as are in use
MAX_CONTROL_PARTITION = (1 << 16) - 1
_MAX_MS = MARK_MS - 1

# The ab.txn header: transaction id, writer (signed 64), stream epoch (signed 32).
TXN_HEADER = "ab.txn"
OP_HEADER = "ab.op"
CORRELATION_HEADER = "ab.cid"
REPLY_HEADER = "ab.reply"
TIME_HEADER = "ab.ht"  # the highest hybrid time that the sender has seen: 8 bytes
VERSION_HEADER = "version"  # a header of the events of a base
WAIT_HEADER = "ab.wait"  # commit wait: answer only when every clock is past the commit
DECIDED_HEADER = "ab.decided"  # answer a commit when it is decided, before its events are merged
_TXN_HEADER_FORM = struct.Struct(">16sqi")
TXN_HEADER_SIZE = _TXN_HEADER_FORM.size  # 28


def make_txn_id(control_partition: int, unix_ms: int, random64: int) -> bytes:
    """A new transaction id from its three parts."""
    if not 0 <= control_partition <= MAX_CONTROL_PARTITION:
        raise InvalidArgument(f"control partition {control_partition} is not within 0..65535")
    if not 0 <= unix_ms <= _MAX_MS:
        raise InvalidArgument(f"time {unix_ms} ms does not fit a transaction id")
    return (
        control_partition.to_bytes(2, "big")
        + unix_ms.to_bytes(6, "big")
        + (random64 & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "big")
    )


def make_marked_id(control_partition: int, unix_ms: int, random64: int) -> bytes:
    """A new id of a one-shot that moves positions of tasks. The tasks' rows are its outcome: it has no row."""
    txn_id = make_txn_id(control_partition, unix_ms, random64)
    return txn_id[:2] + (unix_ms | MARK_MS).to_bytes(6, "big") + txn_id[8:]


def is_marked(txn_id: bytes) -> bool:
    """Whether the id belongs to a one-shot that moves positions of tasks."""
    return bool(txn_id[2] & 0x80)


def command_digest(payload: bytes) -> bytes:
    """The 8 bytes by which an answer names its command."""
    return hashlib.sha256(payload).digest()[:8]


def control_partition_of(txn_id: bytes) -> int:
    """The control partition that decides on this transaction."""
    return int.from_bytes(txn_id[:2], "big")


def made_ms_of(txn_id: bytes) -> int:
    """Unix milliseconds, by the client's clock, when the id was made."""
    return int.from_bytes(txn_id[2:8], "big") & _MAX_MS


def txn_text(txn_id: bytes) -> str:
    """A transaction id for people: 32 hexadecimal digits."""
    return txn_id.hex()


def parse_txn_text(text: str) -> bytes:
    """The transaction id of 32 hexadecimal digits; `InvalidArgument` for another text."""
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raw = b""
    if len(raw) != TXN_ID_SIZE:
        raise InvalidArgument(f"{text!r} is not a transaction id (32 hexadecimal digits)")
    return raw


def pack_txn_header(txn_id: bytes, writer: int, stream_epoch: int) -> bytes:
    """The value of the ``ab.txn`` header, 28 bytes."""
    return _TXN_HEADER_FORM.pack(txn_id, writer, stream_epoch)


def unpack_txn_header(value: bytes) -> tuple[bytes, int, int]:
    """(transaction id, writer, stream epoch) of an ``ab.txn`` header. `MalformedRecord` for another size."""
    if len(value) != TXN_HEADER_SIZE:
        raise MalformedRecord(
            f"an {TXN_HEADER} header has {TXN_HEADER_SIZE} bytes, not {len(value)}"
        )
    txn_id, writer, epoch = _TXN_HEADER_FORM.unpack(value)
    return txn_id, writer, epoch


def segment_id(epoch: int, number: int) -> int:
    """A segment's id: its stream epoch << 32 | its number (Pravega's secondary and primary id)."""
    return epoch << 32 | number


def segment_number(segment: int) -> int:
    """A segment's primary id."""
    return segment & 0xFFFFFFFF


def segment_epoch(segment: int) -> int:
    """A segment's secondary id: the stream epoch that made it."""
    return segment >> 32


def pack_version(timestamp: int, txn_id: bytes) -> bytes:
    """The value of a base event's ``version`` header, 24 bytes: the commit of its row."""
    return timestamp.to_bytes(8, "big") + txn_id


def unpack_version(value: bytes | None) -> tuple[int, bytes]:
    """(commit timestamp, transaction id) of a ``version`` header. `MalformedRecord` for another size."""
    if value is None or len(value) != 8 + TXN_ID_SIZE:
        raise MalformedRecord(
            f"a {VERSION_HEADER} header has {8 + TXN_ID_SIZE} bytes, not {value!r}"
        )
    return int.from_bytes(value[:8], "big"), value[8:]


HASH_SIZE = 16


def hash_of(processor: str, fencing_token: bytes) -> bytes:
    """The hash by which rows and `Begin` name a fencing token."""
    return hashlib.sha256(processor.encode() + b"\0" + fencing_token).digest()[:HASH_SIZE]
