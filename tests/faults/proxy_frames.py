"""What the faulty network knows of Kafka's protocol: lengths, headers, and whose transaction it is."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import NamedTuple

PRODUCE, FETCH, LIST_OFFSETS, METADATA = 0, 1, 2, 3
OFFSET_COMMIT, OFFSET_FETCH, FIND_COORDINATOR = 8, 9, 10
JOIN_GROUP, HEARTBEAT, SYNC_GROUP, API_VERSIONS, CREATE_TOPICS = 11, 12, 14, 18, 19
INIT_PRODUCER_ID, ADD_PARTITIONS_TO_TXN, ADD_OFFSETS_TO_TXN, END_TXN = 22, 24, 25, 26
TXN_OFFSET_COMMIT = 28

NAMES = {
    PRODUCE: "Produce",
    FETCH: "Fetch",
    LIST_OFFSETS: "ListOffsets",
    METADATA: "Metadata",
    OFFSET_COMMIT: "OffsetCommit",
    OFFSET_FETCH: "OffsetFetch",
    FIND_COORDINATOR: "FindCoordinator",
    JOIN_GROUP: "JoinGroup",
    HEARTBEAT: "Heartbeat",
    SYNC_GROUP: "SyncGroup",
    API_VERSIONS: "ApiVersions",
    CREATE_TOPICS: "CreateTopics",
    INIT_PRODUCER_ID: "InitProducerId",
    ADD_PARTITIONS_TO_TXN: "AddPartitionsToTxn",
    ADD_OFFSETS_TO_TXN: "AddOffsetsToTxn",
    END_TXN: "EndTxn",
    TXN_OFFSET_COMMIT: "TxnOffsetCommit",
}

# api -> (the first version whose body begins with the transactional id, the first one with compact fields)
_BEGINS_WITH_ID = {
    PRODUCE: (3, 9),
    INIT_PRODUCER_ID: (0, 2),
    ADD_PARTITIONS_TO_TXN: (0, 3),
    ADD_OFFSETS_TO_TXN: (0, 3),
    END_TXN: (0, 3),
    TXN_OFFSET_COMMIT: (0, 3),
}
# From this version on only brokers send it, for many ids at once.
_ADD_PARTITIONS_BATCHED = 4
_HEADER = struct.Struct(">ihhih")
_END = struct.Struct(">qh?")


class End(NamedTuple):
    """The request of an EndTxn."""

    producer_id: int
    epoch: int
    commit: bool


@dataclass(frozen=True)
class Request:
    """A request on its way. ``connection``: number of the client's connection; ``number``: of the request on it.

    ``transactional_id``: of calls that belong to a native transaction. ``end``: of EndTxn.
    """

    connection: int
    number: int
    api: int
    version: int
    correlation: int
    client_id: str
    transactional_id: str | None = None
    end: End | None = None
    size: int = 0

    def __str__(self) -> str:
        name = NAMES.get(self.api, f"api {self.api}")
        whose = f" of {self.transactional_id}" if self.transactional_id else ""
        what = ""
        if self.end is not None:
            what = f" {'commit' if self.end.commit else 'abort'} epoch {self.end.epoch}"
        return f"{name} v{self.version}{whose}{what} (connection {self.connection})"


def parse_request(frame: bytes, connection: int, number: int) -> Request:
    """The header of a frame (with its length), and what its body says of a native transaction."""
    _, api, version, correlation, length = _HEADER.unpack_from(frame)
    at = _HEADER.size
    client_id = frame[at : at + max(length, 0)].decode()
    at += max(length, 0)
    transactional_id, end = None, None
    first, compact = _BEGINS_WITH_ID.get(api, (1 << 15, 0))
    if version >= first and not (
        api == ADD_PARTITIONS_TO_TXN and version >= _ADD_PARTITIONS_BATCHED
    ):
        flexible = version >= compact
        if flexible:
            if frame[at]:
                raise ValueError(f"tags in the header of api {api}: not known to any client here")
            at += 1
        transactional_id, at = _string(frame, at, compact=flexible)
        if api == END_TXN:
            end = End(*_END.unpack_from(frame, at))
    return Request(
        connection,
        number,
        api,
        version,
        correlation,
        client_id,
        transactional_id,
        end,
        len(frame),
    )


def end_error(request: Request, answer: bytes) -> int:
    """The error code of an answer to EndTxn (a frame with its length)."""
    flexible = request.version >= _BEGINS_WITH_ID[END_TXN][1]
    # length, correlation id, tags of the header, throttle time
    at = 4 + 4 + (1 if flexible else 0) + 4
    return int.from_bytes(answer[at : at + 2], "big", signed=True)


def read_frame(source: socket.socket) -> bytes:
    """A frame with its length. `OSError` where the connection ends."""
    head = _exactly(source, 4)
    return head + _exactly(source, int.from_bytes(head, "big"))


def correlation_of(answer: bytes) -> int:
    """The correlation id of an answer (a frame with its length)."""
    return int.from_bytes(answer[4:8], "big")


def _string(frame: bytes, at: int, *, compact: bool) -> tuple[str | None, int]:
    if not compact:
        length = int.from_bytes(frame[at : at + 2], "big", signed=True)
        at += 2
    else:
        value = shift = 0
        while True:
            byte = frame[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        length = value - 1
    if length < 0:
        return None, at
    return frame[at : at + length].decode(), at + length


def _exactly(source: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = source.recv(min(size - len(data), 1 << 20))
        if not more:
            raise ConnectionResetError("the connection ended")
        data += more
    return bytes(data)
