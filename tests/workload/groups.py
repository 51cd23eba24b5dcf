"""What groups of readers have committed, and where their members begin to read.

A `Watcher`, which is no member and knows nothing of the product, asks brokers for the first; each member notes the
second itself. With both the checker knows what may be given again (`docs/inside/checker.md`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaException, TopicPartition

import anabranch
from anabranch.reading.ordered_reader import Reader
from anabranch.reading.transaction_reader import TransactionReader
from anabranch.topics.names import history_topic, stream_topic
from checker.recorder import Recorder

_EVERY_S = 0.25
_ASK_S = 5.0
_PARTITIONS = 8  # no stream of these tests has more

Group = tuple[str, str]  # name, mode


class Watcher:
    """Notes the committed positions of groups until it is closed."""

    def __init__(
        self, recorder: Recorder, bootstrap: str, groups: Mapping[Group, list[str]]
    ) -> None:
        """``groups``: name and mode -> the streams that are read."""
        self._recorder = recorder
        self._bootstrap = bootstrap
        self._groups = groups
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(4 * _ASK_S)

    def _watch(self) -> None:
        places: dict[str, list[Any]] = {}  # topic -> how the history calls it
        for (name, mode), streams in self._groups.items():
            for stream in streams:
                places[stream_topic(stream)] = [stream]
                places[history_topic(stream)] = [stream, None]
            self._recorder.note(
                "open",
                reader=f"watcher of {name}",
                mode=mode,
                streams=streams,
                group=name,
                starts="position",
            )
        # Consumers that never join. `AdminClient.list_consumer_group_offsets` would do, but librdkafka 2.16 aborts
        # the process there when a coordinator goes away (`rd_kafka_enq_once_del_source_return`).
        consumers = {group: self._consumer(group[0]) for group in self._groups}
        known: dict[Group, list[list[Any]]] = {}
        while not self._over.wait(_EVERY_S):
            for group, consumer in consumers.items():
                wanted = [
                    TopicPartition(topic, partition)
                    for topic, place in places.items()
                    if place[0] in self._groups[group]
                    for partition in (range(_PARTITIONS) if len(place) == 1 else (0,))
                ]
                try:
                    found = consumer.committed(wanted, timeout=_ASK_S)
                except KafkaException:
                    continue  # the coordinator is away
                positions = [
                    [*place, p.offset] if len(place) == 2 else [*place, p.partition, p.offset]
                    for p in found
                    if p.error is None and p.offset >= 0 and (place := places[p.topic])
                ]
                if positions and known.get(group) != positions:
                    known[group] = positions
                    reader = f"watcher of {group[0]}"
                    self._recorder.note("position", reader=reader, positions=positions)
        for consumer in consumers.values():
            consumer.close()

    def _consumer(self, group: str) -> Consumer:
        return Consumer(
            {
                "bootstrap.servers": self._bootstrap,
                "group.id": group,
                "enable.auto.commit": False,
                "log_level": 0,
            }
        )


def note_resumes(recorder: Recorder, name: str, reader: Reader) -> None:
    """Note each time when a member in stream order begins with the partitions assigned to it."""
    begin = reader._begin_with_gains

    def noted(now: float) -> None:
        if not _waits(reader) or now < reader._ask_at:
            return
        places = [
            [reader._names[topic], partition]
            for topic, partitions in (reader._gains or {}).items()
            for partition in sorted(partitions)
        ]
        op = recorder.ask("resume", reader=name, places=places)
        begin(now)
        recorder.told(op, "failed" if _waits(reader) else "ok")

    reader._begin_with_gains = noted  # type: ignore[method-assign]


def _waits(reader: Reader) -> bool:
    """Whether it was assigned partitions that it has not begun with."""
    return reader._gains is not None


def note_resumes_of_history(recorder: Recorder, name: str, reader: TransactionReader) -> None:
    """The same for a member that reads whole transactions."""
    begin = reader._begin

    def noted() -> None:
        op = recorder.ask("resume", reader=name, places=[[reader._stream, None]])
        try:
            begin()
        except anabranch.errors.AnabranchError:
            recorder.told(op, "failed")
            raise
        recorder.told(op, "ok")

    reader._begin = noted  # type: ignore[method-assign]
