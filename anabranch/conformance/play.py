"""The things that scenarios play with: clients under test, streams, and the events that are to be committed."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import anabranch
from anabranch.conformance.checks import (
    Written,
    check_journals,
    check_wire,
    committed_events,
    difference,
)
from anabranch.conformance.child import START_S, Child, ChildError, NoAnswer, to_bytes, to_text
from anabranch.conformance.rules import Report
from anabranch.conformance.wire import Wire
from anabranch.errors import AnabranchError
from anabranch.kafka.log import KafkaLog
from anabranch.protocol.tokens import peek

TIMEOUT_S = 20.0  # of a client's calls, unless a scenario shortens it
_SLACK_S = 10.0  # for a client to say that its time is over
VISIBLE_S = 10.0  # a reply may precede its events, and a plain write waits for its commit


@dataclass(frozen=True)
class Controllers:
    """Calls that disturb a cluster which the kit started.

    ``kill_leader``: kill the leader of control partition 0; another controller takes over. ``pause_broker``: stop
    the broker until ``resume_broker``.
    """

    kill_leader: Callable[[], None]
    pause_broker: Callable[[], None]
    resume_broker: Callable[[], None]


@dataclass(frozen=True)
class Target:
    """The cluster, and the client's command. ``controllers``: None for a cluster that the kit did not start."""

    bootstrap: str
    prefix: str
    lane: str
    command: Sequence[str]
    folder: Path
    controllers: Controllers | None = None


@dataclass(frozen=True)
class Result:
    """An outcome as the client reports it."""

    txn_id: bytes
    state: str
    commit_timestamp: int
    committed: int
    rejected: int
    left_out: int

    def __str__(self) -> str:
        return (
            f"{self.state} {self.txn_id.hex()} at {self.commit_timestamp}: {self.committed} committed, "
            f"{self.rejected} rejected, {self.left_out} left out"
        )

    @classmethod
    def of(cls, answer: Any) -> Result:
        """Raises `NoAnswer` for an answer that is no outcome."""
        try:
            found = answer["outcome"]
            numbers = ("commit_timestamp", "committed", "rejected", "left_out")
            txn_id = to_bytes(found["txn_id"]) or b""
            return cls(txn_id, str(found["state"]), *(int(found[name]) for name in numbers))
        except (LookupError, TypeError, ValueError) as error:
            raise NoAnswer(f"an answer without an outcome: {answer!r:.200} ({error!r})") from None


class Read(NamedTuple):
    """An event that the client read. ``commit_timestamp``: None if the client reads without the history."""

    event: Written
    commit_timestamp: int | None

    @classmethod
    def of(cls, stream: str, found: Any) -> Read:
        """An event of an answer. Raises: LookupError, TypeError, ValueError."""
        headers = tuple((str(name), to_bytes(value)) for name, value in found["headers"])
        key, value = to_bytes(found["key"]), to_bytes(found["value"])
        event = Written(stream, key, value, headers, int(found["timestamp"]))
        time_of = found["commit_timestamp"]
        return cls(event, None if time_of is None else int(time_of))


class Tested:
    """A client under test: one connection of a child process, with a wire of its own."""

    def __init__(self, child: Child, wire: Wire, timeout: float) -> None:
        self.child = child
        self.wire = wire
        self.joined: list[bytes] = []  # tokens
        self._seconds = timeout + _SLACK_S
        self._flying = 0
        self._lock = threading.Lock()

    def start(self, op: str, **arguments: Any) -> Future[Any]:
        """Send a request without waiting."""
        with self._lock:
            if not self._flying:
                self.wire.mark()
            self._flying += 1
        future = self.child.start(op, **arguments)
        future.add_done_callback(self._landed)
        return future

    def _landed(self, _: Future[Any]) -> None:
        with self._lock:
            self._flying -= 1

    def ask(self, op: str, **arguments: Any) -> Any:
        """The answer to a request. Raises: `ChildError`, `NoAnswer`, `NotOffered`."""
        try:
            return self.start(op, **arguments).result(self._seconds)
        except TimeoutError:
            raise NoAnswer(f"{op} was not answered in {self._seconds:.0f} s") from None

    def begin(self, scope: str, name: str | None = None, keepalive_ms: int = 60_000) -> Begun:
        """Begin a transaction. Raises `NoAnswer` if the answer is an outcome."""
        answer = self.ask("begin", scope=scope, name=name, keepalive_ms=keepalive_ms)
        try:
            return Begun(self, str(answer["txn"]), to_bytes(answer["token"]) or b"")
        except (LookupError, TypeError, ValueError):
            raise NoAnswer(f"begin was answered {answer!r:.200}") from None

    def join(self, token: bytes) -> Begun:
        """Join a transaction."""
        self.joined.append(token)
        return Begun(self, str(self.ask("join", token=to_text(token))["txn"]), token)

    def one_shot(self, scope: str, events: Sequence[Written], name: str | None = None) -> Result:
        """Commit events as a one-shot."""
        return Result.of(self.ask("one_shot", scope=scope, name=name, events=lines_of(events)))

    def session(self, events: Sequence[Written]) -> list[int]:
        """Write rows by a session; the numbers of those that failed, from 0."""
        answer = self.ask("session", events=lines_of(events))
        try:
            return [int(number) for number in answer["failed"]]
        except (LookupError, TypeError, ValueError) as error:
            raise NoAnswer(f"session was answered {answer!r:.200} ({error!r})") from None

    def plain(self, stream: str, events: Sequence[Written]) -> None:
        """Write plain records."""
        self.ask("plain", stream=stream, events=lines_of(events))

    def decide(self, txn_id: bytes, secret: bytes, *, commit: bool) -> Result:
        """Commit or abort a prepared transaction, as its coordinator."""
        names = {"txn_id": to_text(txn_id), "secret": to_text(secret)}
        return Result.of(self.ask("decide", **names, commit=commit))

    def read(self, stream: str) -> list[Read]:
        """All committed events of a stream. Raises `NoAnswer` if the answer has another form."""
        answer = self.ask("read", stream=stream)
        try:
            return [Read.of(stream, event) for event in answer["events"]]
        except (LookupError, TypeError, ValueError) as error:
            raise NoAnswer(f"read was answered {answer!r:.200} ({error!r})") from None

    def resolve(self, token: bytes) -> Result:
        """The state of a transaction, which is aborted if it is not known."""
        return Result.of(self.ask("resolve", token=to_text(token)))


@dataclass
class Begun:
    """A transaction, or a joined writer, of a client under test."""

    client: Tested
    name: str
    token: bytes

    @property
    def txn_id(self) -> bytes:
        """The transaction's id."""
        return peek(self.token).txn_id

    def write(self, events: Sequence[Written]) -> None:
        """Write events, until all are acknowledged."""
        self.client.ask("write", txn=self.name, events=lines_of(events))

    def receipt(self, *, finished: bool = True) -> bytes:
        """Register the receipt of a joined writer, and return it, framed."""
        return (
            to_bytes(self.client.ask("receipt", txn=self.name, finished=finished)["receipt"]) or b""
        )

    def commit(
        self,
        receipts: Sequence[bytes] | None = None,
        name: str | None = None,
        number: int | None = None,
    ) -> Result:
        """Commit. Raises `ChildError` by the name of the refusal."""
        given = None if receipts is None else [to_text(receipt) for receipt in receipts]
        arguments = {"txn": self.name, "receipts": given, "name": name, "number": number}
        return Result.of(self.client.ask("commit", **arguments))

    def commit_decided(self) -> Result:
        """Commit, and return at the decision."""
        return Result.of(self.client.ask("commit_decided", txn=self.name))

    def prepare(self, secret: bytes, attempt: bytes) -> Result:
        """Prepare; the holder of the secret decides later. Raises `ChildError` by the name of the refusal."""
        given = {"secret": to_text(secret), "attempt": to_text(attempt)}
        return Result.of(self.client.ask("prepare", txn=self.name, **given))

    def abort(self) -> None:
        """Abort."""
        self.client.ask("abort", txn=self.name)


def lines_of(events: Sequence[Written]) -> list[dict[str, Any]]:
    """Events as they are in requests."""
    return [
        {
            "stream": one.stream,
            "key": to_text(one.key),
            "value": to_text(one.value),
            "headers": [[name, to_text(value)] for name, value in one.headers],
            "timestamp": one.timestamp,
        }
        for one in events
    ]


@dataclass
class Play:
    """One scenario under way. Each has a scope of its own, with the streams `one` and `two`."""

    target: Target
    report: Report
    pool: Children
    log: KafkaLog
    kit: anabranch.Client
    scope: str = field(default_factory=lambda: f"conf{os.urandom(4).hex()}")
    streams: list[str] = field(default_factory=list)
    expected: list[Written] = field(default_factory=list)
    maybe: list[list[Written]] = field(
        default_factory=list
    )  # each is committed whole, or not at all
    tested: list[Tested] = field(default_factory=list)
    extra: list[Wire] = field(default_factory=list)
    others: list[anabranch.Client] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def one(self) -> str:
        """A stream of two segments."""
        return self.stream("one", 2)

    @property
    def two(self) -> str:
        """A stream of three segments."""
        return self.stream("two", 3)

    def stream(self, name: str, segments: int) -> str:
        """A stream of the scenario's scope, made by the first call."""
        full = f"{self.scope}/{name}"
        if full not in self.streams:
            self.kit.create_stream(full, segments=segments)
            self.streams.append(full)
        return full

    def client(self, *, timeout: float = TIMEOUT_S, lane: str | None = None) -> Tested:
        """A new client. ``lane``: the controllers' lane by which it asks."""
        child = self.pool.take()
        wire = Wire(self._log(), self.target.prefix, lane or self.target.lane)
        tested = Tested(child, wire, timeout)
        self.tested.append(tested)
        about = {"bootstrap": self.target.bootstrap, "prefix": wire.prefix}
        child.ask("connect", START_S, **about, timeout_ms=round(timeout * 1000))
        return tested

    def python(self) -> anabranch.Client:
        """A Python client whose commands pass through a wire, so that the checks know its writers."""
        wire = Wire(self._log(), self.target.prefix, self.target.lane)
        self.extra.append(wire)
        made = anabranch.connect(self.target.bootstrap, prefix=wire.prefix)
        self.others.append(made)
        return made

    def _log(self) -> KafkaLog:
        return KafkaLog(self.target.bootstrap)

    def events(self, stream: str, count: int = 3, key: str | None = None) -> list[Written]:
        """New events, with different keys unless one is given. They are not expected yet."""
        made = []
        for _ in range(count):
            n = next(self._numbers)
            made.append(Written(stream, (key or f"key-{n}").encode(), b"value-%d" % n))
        return made

    def expect(self, events: Iterable[Written]) -> None:
        """The events will be committed, exactly once."""
        self.expected += events

    def check(self, rule: str, kept: bool, seen: str) -> bool:
        """As `Report.check`."""
        return self.report.check(rule, kept, seen)

    def refused(self, rule: str, names: Sequence[str], call: Callable[[], object]) -> str:
        """Check that a call fails by one of these names. Returns the name, empty if it did not fail."""
        wanted = " or ".join(names)
        try:
            answer = call()
        except ChildError as error:
            self.check(rule, error.name in names, f"{error} instead of {wanted}")
            return error.name
        self.check(rule, False, f"{answer!r:.150} instead of {wanted}")
        return ""

    def committed(self, rule: str, result: Result, txn_id: bytes | None, count: int) -> None:
        """Check a reported outcome. ``txn_id``: None for a one-shot's."""
        right = result.state == "COMMITTED" and result.committed == count
        self.check(rule, right and txn_id in (None, result.txn_id), f"reported {result}")
        with suppress(AnabranchError):
            known = self.kit.state(result.txn_id)
            same = known.commit_timestamp == result.commit_timestamp
            self.check(rule, same, f"{result.commit_timestamp} is not the commit timestamp")

    def finish(self) -> None:
        """Check all that was sent, written and committed."""
        for tested in self.tested:
            tested.wire.mark()
        self._check_committed()
        self.check_sent()

    def check_sent(self) -> None:
        """Check all commands, and all records in journals."""
        for tested in self.tested:
            check_wire(self.report, tested.wire, tested.joined)
        wires = [*(tested.wire for tested in self.tested), *self.extra]
        check_journals(self.report, self.log, self.streams, wires)

    def _check_committed(self) -> None:
        until = time.monotonic() + VISIBLE_S
        while True:
            found = [one for stream in self.streams for one in committed_events(self.log, stream)]
            wanted = list(self.expected)
            for some in self.maybe:
                if any(
                    one._replace(timestamp=None) in [f._replace(timestamp=None) for f in found]
                    for one in some
                ):
                    wanted += some
            differs = difference(wanted, found)
            if not differs or time.monotonic() > until:
                break
            time.sleep(0.2)
        self.check("R8.2", not differs, differs)
        if not differs:
            orders = [_by_key(wanted), _by_key(found)]
            self.check("R8.2", orders[0] == orders[1], "events of a key are not in their order")

    def close(self, *, reuse: bool) -> None:
        """Remove the topics of the wires, and the streams. ``reuse``: later scenarios may have the processes."""
        for client in self.others:
            client.close()
        for tested in self.tested:
            if reuse:
                self.pool.give(tested.child)
            else:
                tested.child.close()
        for wire in [*(tested.wire for tested in self.tested), *self.extra]:
            wire.close()
        if self.target.controllers is None:
            with suppress(AnabranchError):  # a transaction may be open: the streams stay
                for stream in self.streams:
                    self.kit.delete_stream(stream)


def _by_key(events: Iterable[Written]) -> dict[tuple[str, bytes], list[bytes | None]]:
    found: dict[tuple[str, bytes], list[bytes | None]] = {}
    for one in events:
        if one.key is not None:
            found.setdefault((one.stream, one.key), []).append(one.value)
    return found


class Children:
    """Processes of the client under test, used again by later scenarios."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._command = command
        self._log = folder / "client.log"
        self._free: list[Child] = []
        self._all: list[Child] = []
        self._lock = threading.Lock()

    def take(self) -> Child:
        """A process that no scenario uses. Raises: `OSError`, `NoAnswer`."""
        with self._lock:
            while self._free:
                child = self._free.pop()
                if child.running:
                    return child
        child = Child(self._command, self._log)
        with self._lock:
            self._all.append(child)
        return child

    def give(self, child: Child) -> None:
        """Take a process back."""
        with self._lock:
            self._free.append(child)

    def close(self) -> None:
        """End all processes."""
        for child in self._all:
            child.close()


@contextmanager
def playing(target: Target) -> Iterator[tuple[Children, KafkaLog, anabranch.Client]]:
    """The processes, and the kit's own connections."""
    with ExitStack() as stack:
        pool = Children(target.command, target.folder)
        stack.callback(pool.close)
        log = KafkaLog(target.bootstrap)
        stack.callback(log.close)
        client = anabranch.connect(target.bootstrap, prefix=target.prefix, lane=target.lane)
        yield pool, log, stack.enter_context(client)
