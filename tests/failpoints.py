"""Every port call of a controller is a failpoint, by construction.

`failing` puts a hook around a port. It is called before and after each call, with the name of the call; it records
the name, raises, stops or kills. `DecidingController` calls it once more, right after the round that logs a
commit's decision.

``python -m tests.failpoints`` is ``anabranch`` with controllers that ``ANABRANCH_FAILPOINT`` kills or freezes:
``name[#n]:before|after:kill|stop`` (the n-th such call of the process).
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from unittest.mock import patch

from anabranch.batches.records import decode_records
from anabranch.controller.controller import Controller
from anabranch.controller.leader import Leader
from anabranch.ports import Log, Steps, Table, TopicPartition
from anabranch.protocol.schemas.codec import decode

Hook = Callable[[str, str], None]  # (name of the call, "before" or "after")
T = TypeVar("T")
VARIABLE = "ANABRANCH_FAILPOINT"
AFTER_DECISION = "after-decision"


def _kind(topic: str) -> str:
    """commands, control, replies, status, journal, history or stream."""
    _, first, *rest = topic.split(".")
    # Topics of commands and replies end with their lane's name.
    last = rest[-1] if rest and first not in ("commands", "replies") else first
    kinds = ("commands", "control", "replies", "status", "journal", "history")
    return last if last in kinds else "stream"


def _kinds(partitions: Iterable[TopicPartition]) -> str:
    return "+".join(sorted({_kind(partition.topic) for partition in partitions}))


def _sent(batches: Iterable[tuple[TopicPartition, bytes]]) -> str:
    """The kinds of topics; for messages to other control partitions also what they are: control.Vote."""
    found = set()
    for place, data in batches:
        kind = _kind(place.topic)
        records = decode_records(bytes(data)) if kind == "control" else ()
        found |= {f"{kind}.{type(decode(one.value or b'')).__name__}" for one in records} or {kind}
    return "+".join(sorted(found))


# Names of calls that differ by what they are about; other calls have the method's name. "": it does nothing.
NAMES: Mapping[str, Callable[..., str]] = {
    "fetch": lambda positions, **_: f"fetch:{_kinds(positions)}",
    "producer": lambda transactional_id, **_: f"producer:{transactional_id.rpartition('.')[2]}",
    "send": lambda batches, _: f"send:{_sent(batches)}" if batches else "",
    "add_partitions": lambda topic, _: f"add_partitions:{_kind(topic)}",
    # of a producer
    "append": lambda batches: f"append:{_kinds(place for place, _ in batches)}",
    "appending": lambda batches: f"append:{_kinds(place for place, _ in batches)}",
    "append_stream": lambda _: "append:stream",
    "commit": lambda: "end:commit",
    "committing": lambda: "end:commit",
    "abort": lambda: "end:abort",
    # of a table
    "write": lambda changes: (
        f"table:{'rows' if any(k.startswith(b's') for k in changes) else 'index'}"
    ),
}
# Reads of tables change nothing, so nothing is cut by stopping there; and questions that only readers ask.
UNSEEN = {
    "close", "check", "get", "scan", "scan_back", "is_answered",
    "partition_counts", "topic_ids", "is_known", "is_agreed", "id_read",
}  # fmt: skip


class Failing:
    """A `Log`, `Producer` or `Table` whose calls pass the hook."""

    def __init__(self, port: Any, hook: Hook) -> None:
        self.port = port
        self._hook = hook

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.port, name)
        if name in UNSEEN:
            return call

        def hooked(*given: Any, **named: Any) -> Any:
            called = NAMES[name](*given, **named) if name in NAMES else name
            if not called:
                return call(*given, **named)
            if name in ("appending", "committing"):
                return self._in_steps(called, call(*given, **named))
            self._hook(called, "before")
            result = call(*given, **named)
            self._hook(called, "after")
            return Failing(result, self._hook) if name == "producer" else result

        return hooked

    def _in_steps(self, called: str, steps: Steps[T]) -> Steps[T]:
        """Pass the hook before the first step and after the last one, and as ``sent`` between the steps."""
        self._hook(called, "before")
        while True:
            try:
                next(steps)
            except StopIteration as end:
                self._hook(called, "after")
                result: T = end.value
                return result
            self._hook(called, "sent")
            yield


def failing(port: T, hook: Hook) -> T:
    """The port, each of whose calls passes the hook."""
    return cast("T", Failing(port, hook))


@dataclass(slots=True)
class DecidingController(Controller):
    """A `Controller` that calls ``hook`` when a commit's decision is logged."""

    hook: Hook = lambda name, phase: None

    def _finish(self, writing: Any) -> None:
        super(DecidingController, self)._finish(writing)
        if any(op.op == "BEGIN_COMMIT" for _, _, op in writing.turn.round.ops):
            self.hook(AFTER_DECISION, "after")


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
        return Controller(failing(log, hook), failing(table, hook), *given, **named)

    with patch.object(Leader, "controller", staticmethod(controller)):
        app()


if __name__ == "__main__":
    main()
