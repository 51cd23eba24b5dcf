"""The standard scenario: everything that a controller does, once, by a client that never gives up.

Each step is a command under ids that the client made before, so it can be repeated across any crash. What
the client was answered is kept, and `check` compares it with the log.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from anabranch.ports import Log
from anabranch.protocol.schemas import records as r
from tests.core.labels import SECRET, Begun
from tests.crash.oracle import StreamLog, check_stream, read_stream
from tests.crash.raw import Pen, Raw, Refused, make_txn_id

WIDE, NARROW = "wide", "narrow"
PARTITIONS = {WIDE: 2, NARROW: 1}
KEYS = 5
BULK = 120  # records of one batch: enough for it to be spliced
LONG_MS = 600_000
SHORT_MS = 1_000
WAIT_MS = 10_000
# At the speed of the controllers' clocks a short keepalive is over in 100 ms, a long one in a minute.
SPEED = 10.0

# Every kind of end, and the events that have to be visible of each transaction then.
ENDS = {
    "journal": "COMMITTED",
    "one-shot": "COMMITTED",
    "aborted": "ABORTED",
    "resolved": "ABORTED",
    "stale": "ABORTED",
    "kept": "COMMITTED",
    "last": "COMMITTED",
}


@dataclass
class Scenario:
    """One run of the scenario in a scope of its own.

    ``written``: payloads by transaction and stream. ``acknowledged``: what its clients were answered.
    ``finals``: every final answer that anybody got.
    """

    ends: ClassVar[dict[str, str]] = ENDS
    partitions: ClassVar[dict[str, int]] = PARTITIONS

    client: Raw
    scope: str
    ids: dict[str, bytes] = field(init=False)
    tokens: dict[str, bytes] = field(default_factory=dict)
    written: dict[str, dict[str, list[bytes]]] = field(default_factory=dict)
    acknowledged: dict[str, r.Outcome] = field(default_factory=dict)
    finals: dict[bytes, r.Outcome] = field(default_factory=dict)
    transcript: list[str] = field(default_factory=list)
    created: bool = False
    _kept: list[r.Receipt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids = {name: make_txn_id() for name in self.ends}

    @property
    def name(self) -> str:
        """The name that its first transaction claims."""
        return f"nightly-{self.ids['journal'].hex()}"

    @property
    def streams(self) -> dict[str, int]:
        """Its streams and how many segments each has at first."""
        return {f"{self.scope}/{name}": n for name, n in self.partitions.items()}

    @property
    def steps(self) -> list[tuple[str, Callable[[], None]]]:
        """All steps in order."""
        return [
            ("create streams", self.create),
            ("commit from two writers", self.journal),
            ("one-shot", self.one_shot),
            ("abort", self.abort),
            ("resolve what never was", self.resolve),
            ("write and keep open", self.keep),
            ("go stale", self.stale),
            ("describe", self.describe),
            ("commit what was kept", self.commit_kept),
            ("the same name again", self.same_name),
            ("a last one-shot", self.last),
        ]

    def run(self) -> None:
        """All steps."""
        for name, step in self.steps:
            self.transcript.append(name)
            step()

    # -- steps ----------------------------------------------------------------------------------------

    def create(self) -> None:
        info = self.client.ask(r.FindScope(self.scope, True))
        assert info.control_partition == 0
        for stream, segments in self.streams.items():
            created = self.client.ask(r.CreateStream(stream, segments, {}))
            assert [s.stream for s in created.streams] == [stream]
        self.created = True

    def journal(self) -> None:
        token = self._begin("journal", self.name, LONG_MS)
        wide, narrow = self._touch(token, WIDE), self._touch(token, NARROW)
        one, two = self._pen("journal"), self._pen("journal")
        self._write(one, "journal", wide, 6)
        self._write(two, "journal", narrow, BULK)
        self._write(two, "journal", wide, 2)
        self.client.ask(r.Register(token, two.receipt()))
        commit = r.Commit(token, (one.receipt(),), None, None, WAIT_MS)
        self._acknowledge("journal", self.client.ask(commit))

    def one_shot(self) -> None:
        self._one_shot("one-shot", 4)

    def abort(self) -> None:
        token = self._begin("aborted", None, LONG_MS)
        pen = self._pen("aborted")
        self._write(pen, "aborted", self._touch(token, WIDE), 3)
        self.client.ask(r.Register(token, pen.receipt()))
        self._acknowledge("aborted", self.client.ask(r.Abort(token, "changed my mind")))

    def resolve(self) -> None:
        txn_id = self.ids["resolved"]
        self._acknowledge("resolved", self.client.ask(r.Resolve(txn_id, "nyc")))
        self._refused("TransactionAborted", self._one_shot_command("resolved", 1))

    def keep(self) -> None:
        token = self._begin("kept", None, LONG_MS)
        pen = self._pen("kept")
        for stream in (WIDE, NARROW):
            self._write(pen, "kept", self._touch(token, stream), 5)
        self._kept = [pen.receipt()]
        self.client.ask(r.Register(token, self._kept[0]))

    def stale(self) -> None:
        try:
            # A slow step, or the second leader's answer, may be too late: then it is aborted before its writes.
            token = self._begin("stale", None, SHORT_MS)
            self._write(self._pen("stale"), "stale", self._touch(token, WIDE), 3)
        except Refused as refused:
            if refused.code != "TransactionAborted":
                raise
        outcome = self.client.ask(r.GetState(self.ids["stale"]))
        while outcome.state == "OPEN":
            self.client.poll()
            outcome = self.client.ask(r.GetState(self.ids["stale"]))
        assert outcome.reason.startswith("stale"), outcome
        self._acknowledge("stale", outcome)

    def describe(self) -> None:
        found = self.client.ask(r.DescribeStreams(self.scope, None)).streams
        assert {s.stream: len(s.segments) for s in found} == self.streams
        open_now = self.client.ask(r.ListTransactions(self.scope, False, 100)).transactions
        assert [o.txn_id for o in open_now] == [self.ids["kept"]]
        answer = self.client.ask(r.Heartbeat((self.tokens["kept"], self.tokens["aborted"])))
        assert [o.txn_id for o in answer.not_open] == [self.ids["aborted"]]

    def commit_kept(self) -> None:
        commit = r.Commit(self.tokens["kept"], (), tuple(self._kept), None, WAIT_MS)
        self._acknowledge("kept", self.client.ask(commit))

    def same_name(self) -> None:
        outcome = self.client.ask(r.Begin(make_txn_id(), self.scope, self.name, LONG_MS, SECRET))
        assert isinstance(outcome, r.Outcome), outcome
        assert outcome.txn_id == self.ids["journal"]

    def last(self) -> None:
        self._one_shot("last", 3)

    # -- how ------------------------------------------------------------------------------------------

    def _begin(self, which: str, name: str | None, keepalive_ms: int) -> bytes:
        begun = self.client.ask(r.Begin(self.ids[which], self.scope, name, keepalive_ms, SECRET))
        assert isinstance(begun, Begun), begun
        self.tokens[which] = begun.token
        return begun.token

    def _touch(self, token: bytes, name: str) -> r.Touched:
        touched = self.client.ask(r.Touch(token, f"{self.scope}/{name}"))
        assert isinstance(touched, r.Touched), touched
        return touched

    def _pen(self, which: str) -> Pen:
        return Pen(self.client, self.ids[which])

    def _events(self, which: str, stream: str, count: int) -> list[tuple[bytes, bytes]]:
        """Payloads that nothing else has."""
        said = self.written.setdefault(which, {}).setdefault(stream, [])
        events = []
        for _ in range(count):
            n = len(said)
            value = f"{self.ids[which].hex()} {stream} {n:04}".encode()
            said.append(value)
            events.append((f"key-{n % KEYS}".encode(), value))
        return events

    def _write(self, pen: Pen, which: str, touched: r.Touched, count: int) -> None:
        pen.write(touched.stream, touched.segments, self._events(which, touched.stream, count))

    def _one_shot_command(self, which: str, count: int) -> r.OneShot:
        events = tuple(
            r.Event(stream, -1, key, value, (), -1)
            for stream in self.streams
            for key, value in self._events(which, stream, count)
        )
        return r.OneShot(self.ids[which], self.scope, None, events)

    def _one_shot(self, which: str, count: int) -> None:
        self._acknowledge(which, self.client.ask(self._one_shot_command(which, count)))

    def commit(self, which: str) -> None:
        """With the receipts that are registered."""
        commit = r.Commit(self.tokens[which], (), None, None, WAIT_MS)
        self._acknowledge(which, self.client.ask(commit))

    def _refused(self, code: str, command: Any, by: Raw | None = None) -> None:
        with pytest.raises(Refused) as refused:
            (by or self.client).ask(command)
        assert refused.value.code == code

    def _acknowledge(self, which: str, outcome: r.Outcome) -> None:
        assert outcome.txn_id == self.ids[which], outcome
        assert outcome.state == self.ends[which], f"{which}: {outcome}"
        self.acknowledged[which] = outcome
        self._note(outcome)

    # -- the checks -----------------------------------------------------------------------------------

    def _note(self, outcome: r.Outcome) -> None:
        """A final outcome never changes (a list of streams and writers may be left away)."""
        if outcome.state not in ("COMMITTED", "ABORTED"):
            return
        former = self.finals.setdefault(outcome.txn_id, outcome)
        assert _core(former) == _core(outcome), f"told {former}, then {outcome}"

    def states(self, client: Raw) -> dict[str, str]:
        """The state of each transaction; empty for one that is not known (yet)."""
        answers = client.ask_all([r.GetState(txn_id) for txn_id in self.ids.values()])
        found = {}
        for which, answer in zip(self.ids, answers, strict=True):
            if isinstance(answer, r.Refusal):
                assert answer.code == "UnknownTransaction", answer
                found[which] = ""
            else:
                self._note(answer)
                found[which] = answer.state
        return found

    def check(self, log: Log, auditor: Raw) -> dict[str, StreamLog]:
        """All answers are true; each transaction is there whole or not at all.

        A command may be under way: what changes while this looks is left for the next time.
        """
        if not self.created:
            return {}
        before = self.states(auditor)
        streams = {name: read_stream(log, name, auditor.idle) for name in self.streams}
        after = self.states(auditor)
        under_way = {
            txn_id
            for which, txn_id in self.ids.items()
            if before[which] != "COMMITTED" and after[which] not in ("", "OPEN", "ABORTED")
        }
        for stream in streams.values():
            check_stream(stream, under_way)
        for which, txn_id in self.ids.items():
            visible = {name: s.values(txn_id) for name, s in streams.items()}
            visible = {name: values for name, values in visible.items() if values}
            if before[which] == "COMMITTED":
                assert visible == _sorted(self.written[which]), f"{which}: not whole: {visible}"
            elif after[which] in ("", "OPEN", "ABORTED"):
                assert not visible, f"{which} is {after[which] or 'unknown'}, and is visible"
            if which in self.acknowledged:
                assert before[which] == self.ends[which], (
                    f"{which}: {before[which]} after its answer"
                )
        return streams

    def check_end(self, log: Log, auditor: Raw) -> None:
        """As `check`, and every transaction has come to its end."""
        streams = self.check(log, auditor)
        assert self.acknowledged.keys() == self.ends.keys()
        for stream in streams.values():
            for partition in {event.partition for event in stream.events}:
                self._check_order(stream, partition)

    def _check_order(self, stream: StreamLog, partition: int) -> None:
        """Events of one writer and key are in the order in which they were written."""
        last: dict[tuple[bytes | None, bytes | None], bytes] = {}
        for event in stream.events:
            if event.partition == partition:
                here = (event.txn_id, event.key)
                assert last.get(here, b"") < event.value, f"{stream.name}: out of order: {event}"
                last[here] = event.value


def _core(outcome: r.Outcome) -> tuple[Any, ...]:
    return (
        outcome.txn_id,
        outcome.state,
        outcome.scope,
        outcome.name,
        outcome.commit_timestamp,
        outcome.committed,
        outcome.rejected,
        outcome.left_out,
        outcome.reason,
        outcome.begun_ms,
        outcome.finished_ms,
    )


def _sorted(written: dict[str, list[bytes]]) -> dict[str, list[bytes]]:
    return {stream: sorted(values) for stream, values in written.items()}
