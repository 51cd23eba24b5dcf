"""One key of a processor's store, read from the log: `Client.stored`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from anabranch.batches.records import decode_records
from anabranch.errors import InvalidArgument, NotReady
from anabranch.ports import TopicPartition
from anabranch.protocol.legal_names import state_stream
from anabranch.protocol.partitioner import task_of
from anabranch.protocol.schemas.records import ProcessorInfo
from anabranch.reading.committed_log import CommittedLog, client_errors
from anabranch.topics.names import stream_topic

FIRST_STORE = 2  # the lower numbers belong to the head and the hidden store
_FETCH_BYTES = 1 << 20


def state_key(incarnation: int, store: int, key: bytes) -> bytes:
    """The key of a state record."""
    return incarnation.to_bytes(2, "big") + store.to_bytes(2, "big") + key


class StoreFormat(Protocol):
    """A program's store, which knows the format of its rows. The number of the store is not part of them."""

    name: str

    def is_of(self, row: bytes, key: bytes) -> bool:
        """Whether a row belongs to a key."""
        ...

    def shown(self, rows: Mapping[bytes, bytes]) -> Any:
        """The value that users see of the rows of a key; None without a row."""
        ...


class RawRows:
    """The format of a store without its program: each key has one row, whose value is shown as it is stored."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_of(self, row: bytes, key: bytes) -> bool:
        return row == key

    def shown(self, rows: Mapping[bytes, bytes]) -> Any:
        return next(iter(rows.values()), None)


def stored(
    source: CommittedLog,
    info: ProcessorInfo,
    store: StoreFormat,
    key: bytes,
    task: int | None,
    timeout: float,
) -> Any:
    """As `Client.stored`. ``timeout``: seconds to wait without new records."""
    if store.name not in info.stores:
        known = ", ".join(info.stores) or "none"
        raise InvalidArgument(f"{info.processor} has no store {store.name!r}: it has {known}")
    if task is None:
        task = task_of(key, info.task_count)
    if not 0 <= task < info.task_count:
        raise InvalidArgument(f"{info.processor} has no task {task}: it has {info.task_count}")
    prefix = state_key(info.incarnation, FIRST_STORE + info.stores.index(store.name), b"")
    place = TopicPartition(stream_topic(state_stream(info.processor)), task)
    clock = source.clock
    deadline = clock.monotonic() + timeout
    position = source.start_offsets([place], deadline)[place]
    end = source.end_offsets([place], deadline)[place]
    rows = dict[bytes, bytes]()
    while position < end:
        found = source.fetch(place, position, deadline, _FETCH_BYTES)
        if found is None:
            if clock.monotonic() >= deadline:
                raise NotReady(f"{place.topic} can't be read to its end, {end}: {source.trouble}")
            continue
        with client_errors():
            for batch in found.batches:
                for record in decode_records(batch.data):
                    if record.key is None or not record.key.startswith(prefix):
                        continue
                    row = record.key[len(prefix) :]
                    if store.is_of(row, key):
                        rows.pop(row, None)
                        if record.value is not None:
                            rows[row] = record.value
        position, deadline = found.next_offset, clock.monotonic() + timeout
    return store.shown(rows)
