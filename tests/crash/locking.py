"""A scenario of tables: one-shots with locks, and what breaks them. The history checker judges its reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from anabranch.core.locks.table_writes import fingerprint
from anabranch.ports import Log
from anabranch.protocol.schemas import records as r
from tests.checker.tape import Tape
from tests.crash.oracle import read_stream
from tests.crash.raw import Raw
from tests.crash.scenario import KEYS, NARROW, WIDE, Scenario

FILE = "client"


class Held(NamedTuple):
    """What a transaction read at a snapshot, and its locks since then."""

    snapshot: int
    locks: tuple[r.TableLocks, ...]
    reads: tuple[tuple[str, bytes, bytes], ...]  # stream, low, high


@dataclass
class Locking(Scenario):
    """Rows are read, locked, and written by others or not; a commit from journals is one of the others.

    ``rows``: the newest version of each row, which this client alone writes: timestamp and id.
    """

    ends: ClassVar[dict[str, str]] = dict.fromkeys(
        ("rows", "holds", "journal", "beside", "last"), "COMMITTED"
    ) | {"broken": "ABORTED", "range": "ABORTED"}
    partitions: ClassVar[dict[str, int]] = {WIDE: 2, NARROW: 1}
    tape: Tape = field(default_factory=Tape)
    held: dict[str, Held] = field(default_factory=dict)
    rows: dict[tuple[str, bytes], tuple[int, str]] = field(default_factory=dict)
    looked: int = 0

    @property
    def steps(self) -> list[tuple[str, Callable[[], None]]]:
        wide, narrow = f"{self.scope}/{WIDE}", f"{self.scope}/{NARROW}"
        return [
            ("create tables", self.create),
            ("write rows", lambda: self.shot("rows", 4)),
            ("read a row, and a range", lambda: self.read("holds", (wide, 0, 1), (narrow, 2, 4))),
            ("commit what still holds", lambda: self.shot("holds", 2)),
            ("read a row", lambda: self.read("broken", (wide, 1, 2))),
            ("read a range", lambda: self.read("range", (narrow, 0, KEYS))),
            ("read what is not there", lambda: self.read("beside", (wide, KEYS, KEYS + 1))),
            ("a commit from journals", self.journal),
            ("commit what is broken", lambda: self.shot("broken", 2)),
            ("commit what is broken in a range", lambda: self.shot("range", 2)),
            ("commit what lies beside", lambda: self.shot("beside", 2)),
            ("read a row again", lambda: self.read("last", (wide, 0, 1))),
            ("a last one", lambda: self.shot("last", 2)),
            ("commit what held once more", lambda: self.again("holds", "beside", "broken")),
        ]

    # -- steps ----------------------------------------------------------------------------------------

    def create(self) -> None:
        self.client.ask(r.FindScope(self.scope, True))
        for stream, segments in self.streams.items():
            self.client.ask(r.CreateStream(stream, segments, {"table": "true"}))
        self.created = True

    def key(self, number: int) -> bytes:
        """A key of this case alone."""
        return f"{self.ids['rows'].hex()}-{number}".encode()

    def _events(self, which: str, stream: str, count: int) -> list[tuple[bytes, bytes]]:
        said = self.written.setdefault(which, {}).setdefault(stream, [])
        events = []
        for n in range(len(said), len(said) + count):
            said.append(f"{self.ids[which].hex()}/{stream}/{n:04}".encode())
            events.append((self.key(n % KEYS), said[-1]))
        return events

    def read(self, which: str, *ranges: tuple[str, int, int]) -> None:
        """All keys of [low, high) of these tables, as of now; a single one is a point."""
        now = self.client.ask(r.SafeTime(self.scope, None, tuple(self.streams)))
        last = {each.table: each.last for each in now.tables}
        reads = tuple((table, self.key(low), self.key(high)) for table, low, high in ranges)
        locks = tuple(
            r.TableLocks(
                table, now.timestamp, last[table],
                (fingerprint(low),) if end == first + 1 else (),
                () if end == first + 1 else (r.LockedRange(low, high),),
            )
            for (table, first, end), (_, low, high) in zip(ranges, reads, strict=True)
        )  # fmt: skip
        self.held[which] = Held(now.timestamp, tuple(sorted(locks, key=lambda x: x.table)), reads)
        begun = {"txn_id": None, "snapshot": now.timestamp}
        self.tape.do(FILE, "begin", begun, txn=which, scope=self.scope)
        for table, low, high in reads:
            told = {
                "low": low.decode(),
                "high": high.decode(),
                "rows": self._there(table, low, high),
            }
            self.tape.do(FILE, "read", told, table=table, txn=which)

    def _there(self, table: str, low: bytes, high: bytes) -> list[list[str]]:
        there = sorted((key, row) for (t, key), row in self.rows.items() if t == table)
        return [[key.decode(), name] for key, (_, name) in there if low <= key < high]

    def _is_broken(self, held: Held) -> bool:
        """As a replica knows it that has laid all down."""
        return any(
            at > held.snapshot and table == t and low <= key < high
            for table, low, high in held.reads
            for (t, key), (at, _) in self.rows.items()
        )

    def shot(self, which: str, count: int) -> None:
        """Sent until it is committed, or known to be broken: then it is resolved."""
        command = self._one_shot_command(which, count)
        held = self.held.get(which)
        self._ask_commit(which)
        if held is not None:
            command = command._replace(locks=held.locks)
        while True:
            answer = self.client.ask(command)
            if isinstance(answer, r.Outcome):
                break
            assert isinstance(answer, r.Revalidate), answer
            assert held is not None
            self.looked += 1
            if self._is_broken(held):
                answer = self.client.ask(r.Resolve(self.ids[which], self.scope))
                break
            last = {each.table: each.last for each in answer.tables}
            since = answer.timestamp
            locks = tuple(x._replace(since=since, last=last[x.table]) for x in held.locks)
            command = command._replace(locks=locks)
        self._end(which, answer)

    def journal(self) -> None:
        self.tape.do(FILE, "begin", {"txn_id": None}, txn="journal", scope=self.scope)
        super().journal()

    def again(self, *whichs: str) -> None:
        """No answer changes."""
        for which in whichs:
            outcome = self.client.ask(r.Resolve(self.ids[which], self.scope))
            self._note(outcome)
            assert outcome.state == self.ends[which], outcome

    def _ask_commit(self, which: str) -> None:
        if which not in self.held and which != "journal":
            self.tape.do(FILE, "begin", {"txn_id": None}, txn=which, scope=self.scope)
        for stream, values in self.written[which].items():
            events = [
                [self.key(n % KEYS).decode(), value.decode()] for n, value in enumerate(values)
            ]
            self.tape.do(FILE, "write", txn=which, writer="w", stream=stream, events=events)
        self._op = self.tape.ask(FILE, "commit", txn=which, writers=["w"])

    def _end(self, which: str, outcome: r.Outcome) -> None:
        if outcome.state == "COMMITTED":
            timestamp = outcome.commit_timestamp
            self.tape.told(
                FILE, self._op, txn_id=outcome.txn_id.hex(), timestamp=timestamp,
                committed=outcome.committed,
            )  # fmt: skip
            for stream, values in self.written[which].items():
                for n, value in enumerate(values):
                    self.rows[stream, self.key(n % KEYS)] = timestamp, value.decode()
        else:
            self.tape.told(FILE, self._op, "failed")
        super()._acknowledge(which, outcome)

    def _acknowledge(self, which: str, outcome: r.Outcome) -> None:
        """Of the commit from journals, whose writes are known by now."""
        self._ask_commit(which)
        self._end(which, outcome)

    # -- the checks -----------------------------------------------------------------------------------

    def check_end(self, log: Log, auditor: Raw) -> None:
        super().check_end(log, auditor)
        assert self.looked >= 2, "what is broken was not checked again"
        mine = set(self.ids.values())
        for name in self.streams:
            stream = read_stream(log, name)
            for partition in range(1 + max(e.partition for e in stream.events)):
                rows = [
                    [e.offset, (e.key or b"").decode(), e.value.decode(), e.txn_id.hex()]
                    for e in stream.events
                    if e.partition == partition and e.txn_id in mine and e.txn_id
                ]
                told = {"start": 0, "end": 1 << 40, "events": rows}
                where = {"stream": name, "partition": partition, "table": True}
                self.tape.do("log", "log", told, **where)
            records = [
                [
                    offset,
                    c.timestamp,
                    [c.txn_id.hex()],
                    [[s.partition, s.first, s.end] for s in c.segments],
                ]
                for offset, c in stream.history
                if isinstance(c, r.CommitRecord) and c.txn_id in mine
            ]
            self.tape.do("log", "commits", {"records": records}, stream=name)
        report = self.tape.judge()
        assert report.ok, report.anomalies
        assert report.counts["reads that hold at their commit"] == 4, report.counts
