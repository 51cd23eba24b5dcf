"""One row of a processor's store, read from the log: `Client.stored`."""

from __future__ import annotations

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


def stored(
    source: CommittedLog,
    info: ProcessorInfo,
    store: str,
    key: bytes,
    task: int | None,
    timeout: float,
) -> bytes | None:
    """As `Client.stored`. ``timeout``: seconds to wait without new records."""
    if store not in info.stores:
        known = ", ".join(info.stores) or "none"
        raise InvalidArgument(f"{info.processor} has no store {store!r}: it has {known}")
    if task is None:
        task = task_of(key, info.task_count)
    if not 0 <= task < info.task_count:
        raise InvalidArgument(f"{info.processor} has no task {task}: it has {info.task_count}")
    wanted = state_key(info.incarnation, FIRST_STORE + info.stores.index(store), key)
    place = TopicPartition(stream_topic(state_stream(info.processor)), task)
    clock = source.clock
    deadline = clock.monotonic() + timeout
    position = source.start_offsets([place], deadline)[place]
    end = source.end_offsets([place], deadline)[place]
    value = None
    while position < end:
        found = source.fetch(place, position, deadline, _FETCH_BYTES)
        if found is None:
            if clock.monotonic() >= deadline:
                raise NotReady(f"{place.topic} can't be read to its end, {end}: {source.trouble}")
            continue
        with client_errors():
            for batch in found.batches:
                for record in decode_records(batch.data):
                    if record.key == wanted:
                        value = record.value
        position, deadline = found.next_offset, clock.monotonic() + timeout
    return value
