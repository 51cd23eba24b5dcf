"""Every port call of a controller is a failpoint, by construction.

`FailingLog` and `FailingTable` stand before the real ports and call a hook before and after each call, with the
name of the call. The hook records the names, raises, stops or kills. `DecidingController` calls it once more, right
after the round that logs a commit's decision.

``python -m tests.failpoints`` is ``anabranch`` with controllers that ``ANABRANCH_FAILPOINT`` kills or freezes:
``name[#n]:before|after:kill|stop`` (the n-th such call of the process).
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest.mock import patch

from anabranch.controller.controller import Controller
from anabranch.controller.leader import Leader
from anabranch.core.decisions.turn import Turn
from anabranch.ports import (
    Fetched,
    Log,
    LogError,
    Producer,
    Table,
    TopicInfo,
    TopicPartition,
    TopicSpec,
)

Hook = Callable[[str, str], None]  # (name of the call, "before" or "after")
T = TypeVar("T")
VARIABLE = "ANABRANCH_FAILPOINT"
AFTER_DECISION = "after-decision"


def _around(hook: Hook, name: str, call: Callable[[], T]) -> T:
    hook(name, "before")
    result = call()
    hook(name, "after")
    return result


class FailingProducer:
    """A `Producer` whose calls pass the hook."""

    def __init__(self, producer: Producer, hook: Hook) -> None:
        self._producer = producer
        self._hook = hook

    def append(self, batches: Sequence[tuple[TopicPartition, bytes | memoryview]]) -> list[int]:
        name = f"append:{_kinds(tp for tp, _ in batches)}"
        return _around(self._hook, name, lambda: self._producer.append(batches))

    def append_stream(
        self, batches: Iterable[tuple[TopicPartition, bytes | memoryview]]
    ) -> list[int]:
        return _around(self._hook, "append:stream", lambda: self._producer.append_stream(batches))

    def commit(self) -> None:
        _around(self._hook, "end:commit", self._producer.commit)

    def abort(self) -> None:
        _around(self._hook, "end:abort", self._producer.abort)

    def check(self, partitions: Iterable[TopicPartition]) -> None:
        self._producer.check(partitions)

    def close(self) -> None:
        self._producer.close()


def _kind(topic: str) -> str:
    """commands, control, replies, status, journal, history or stream."""
    _, first, *rest = topic.split(".")
    # Topics of commands and replies end with their lane's name.
    last = rest[-1] if rest and first not in ("commands", "replies") else first
    kinds = ("commands", "control", "replies", "status", "journal", "history")
    return last if last in kinds else "stream"


def _kinds(partitions: Iterable[TopicPartition]) -> str:
    return "+".join(sorted({_kind(partition.topic) for partition in partitions}))


class FailingLog:
    """A `Log` whose calls pass the hook."""

    def __init__(self, log: Log, hook: Hook) -> None:
        self._log = log
        self._hook = hook

    def fetch(
        self, positions: Mapping[TopicPartition, int], **how: Any
    ) -> dict[TopicPartition, Fetched]:
        name = f"fetch:{_kinds(positions)}"
        return _around(self._hook, name, lambda: self._log.fetch(positions, **how))

    def end_offsets(
        self, partitions: Iterable[TopicPartition], **how: Any
    ) -> dict[TopicPartition, int]:
        return _around(self._hook, "end_offsets", lambda: self._log.end_offsets(partitions, **how))

    def start_offsets(
        self, partitions: Iterable[TopicPartition], **how: Any
    ) -> dict[TopicPartition, int]:
        return _around(
            self._hook, "start_offsets", lambda: self._log.start_offsets(partitions, **how)
        )

    def offsets_for_time(
        self, partitions: Iterable[TopicPartition], timestamp_ms: int
    ) -> dict[TopicPartition, int | None]:
        return _around(
            self._hook,
            "offsets_for_time",
            lambda: self._log.offsets_for_time(partitions, timestamp_ms),
        )

    def producer(self, transactional_id: str, *, timeout: float) -> Producer:
        which = transactional_id.rpartition(".")[2]
        producer = _around(
            self._hook,
            f"producer:{which}",
            lambda: self._log.producer(transactional_id, timeout=timeout),
        )
        return FailingProducer(producer, self._hook)

    def send(
        self,
        batches: Sequence[tuple[TopicPartition, bytes]],
        failed: MutableMapping[TopicPartition, LogError],
    ) -> bool:
        if not batches:
            return self._log.send(batches, failed)
        name = f"send:{_kinds(tp for tp, _ in batches)}"
        return _around(self._hook, name, lambda: self._log.send(batches, failed))

    def delete_records(self, before: Mapping[TopicPartition, int]) -> None:
        _around(self._hook, "delete_records", lambda: self._log.delete_records(before))

    def create_topics(self, specs: Sequence[TopicSpec]) -> dict[str, str]:
        return _around(self._hook, "create_topics", lambda: self._log.create_topics(specs))

    def delete_topics(self, topics: Sequence[TopicInfo]) -> None:
        _around(self._hook, "delete_topics", lambda: self._log.delete_topics(topics))

    def add_partitions(self, topic: str, partitions: int) -> None:
        _around(
            self._hook,
            f"add_partitions:{_kind(topic)}",
            lambda: self._log.add_partitions(topic, partitions),
        )

    def alter_topics(self, changes: Mapping[str, Mapping[str, str | None]]) -> None:
        _around(self._hook, "alter_topics", lambda: self._log.alter_topics(changes))

    def replicas_of_new(self, topic: str, factor: int = -1) -> int | None:
        return _around(
            self._hook, "replicas_of_new", lambda: self._log.replicas_of_new(topic, factor)
        )

    def describe_topics(self, names: Sequence[str]) -> dict[str, TopicInfo]:
        return _around(self._hook, "describe_topics", lambda: self._log.describe_topics(names))

    def partition_counts(self, names: Sequence[str]) -> dict[str, int]:
        return self._log.partition_counts(names)  # readers' own

    def topic_ids(self, names: Sequence[str]) -> dict[str, str]:
        return self._log.topic_ids(names)  # readers' own

    def is_known(self, topic: str) -> bool:
        return self._log.is_known(topic)

    def is_agreed(self, topic: str, topic_id: str) -> bool:
        return self._log.is_agreed(topic, topic_id)

    def id_read(self, topic: str) -> str:
        return self._log.id_read(topic)

    def is_gone(self, topic: str, partitions: int, topic_id: str) -> bool:
        return _around(
            self._hook, "is_gone", lambda: self._log.is_gone(topic, partitions, topic_id)
        )

    def close(self) -> None:
        self._log.close()


class FailingTable:
    """A `Table` whose writes pass the hook (reads change nothing, so nothing is cut by stopping there)."""

    def __init__(self, table: Table, hook: Hook) -> None:
        self._table = table
        self._hook = hook

    def get(self, key: bytes) -> bytes | None:
        return self._table.get(key)

    def scan(self, prefix: bytes, first: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        return self._table.scan(prefix, first)

    def scan_back(self, before: bytes) -> Iterator[tuple[bytes, bytes]]:
        return self._table.scan_back(before)

    def write(self, changes: Mapping[bytes, bytes | None]) -> None:
        rows = any(key.startswith(b"s") for key in changes)
        name = "table:rows" if rows else "table:index"
        _around(self._hook, name, lambda: self._table.write(changes))

    def close(self) -> None:
        self._table.close()


@dataclass(slots=True)
class DecidingController(Controller):
    """A `Controller` that calls ``hook`` when a commit's decision is logged."""

    hook: Hook = lambda name, phase: None

    def _write(self, turn: Turn, *given: Any, **named: Any) -> bool:
        wrote = super(DecidingController, self)._write(turn, *given, **named)
        if wrote and any(op.op == "BEGIN_COMMIT" for _, _, op in turn.round.ops):
            self.hook(AFTER_DECISION, "after")
        return wrote


def parse(spec: str) -> Hook:
    """A hook that kills (SIGKILL) or freezes (SIGSTOP) this process at a point."""
    target, phase, do = spec.rsplit(":", 2)
    action = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[do]
    name, _, number = target.partition("#")
    wanted = int(number or 1)
    seen: Counter[str] = Counter()

    def hook(call: str, when: str) -> None:
        if call == name and when == phase:
            seen[call] += 1
            if seen[call] == wanted:
                # This very thread stops at once; a signal to the process may reach another first.
                signal.pthread_kill(threading.get_ident(), action)

    return hook


def main() -> None:
    """The command line, with a failpoint."""
    from anabranch.cli import app

    hook = parse(os.environ[VARIABLE])

    def controller(log: Log, table: Table, *given: Any, **named: Any) -> Controller:
        return Controller(FailingLog(log, hook), FailingTable(table, hook), *given, **named)

    with patch.object(Leader, "controller", staticmethod(controller)):
        app()


if __name__ == "__main__":
    main()
