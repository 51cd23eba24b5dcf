"""A control partition in memory, played turn by turn; answers come back as short texts.

`World` does what a controller's loop does, without a log: commands and due deadlines become one
round, the round's rows go on ``log``, then the changes are written to the table. Transactions and
writers are named by labels ("A", "w1"). Whatever a test plays, the world checks that a refused
command changed nothing, byte for byte, and that everything said fits the wire.

How answers read: ``begun A`` · ``A COMMITTED 3`` · ``A ABORTED (why)`` · ``NotReady`` (refused).
An answer to an earlier command has that command in front: ``[commit A] A COMMITTED 3``. Nothing
said is an empty text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

from anabranch.core import rows as k
from anabranch.core.decisions.across.holding import holds_of
from anabranch.core.decisions.commit import next_due_ms
from anabranch.core.decisions.decide import decide, decide_due
from anabranch.core.decisions.streams import stream_created, stream_refused
from anabranch.core.decisions.turn import Settings, Turn, close_round
from anabranch.core.journal_index import JournalIndex
from anabranch.core.locks.recent_writes import RecentWrites
from anabranch.core.memory import DraftMap, Keepalives, LeaderMemory, across_of
from anabranch.core.round import ReplyTo, Round
from anabranch.core.state import State
from anabranch.errors import AnabranchError
from anabranch.protocol.legal_names import ADMIN_LANE, OPEN_LANE
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode, encode
from tests.core.journals import Journals
from tests.core.labels import MINUTE, SECRET
from tests.core.tables import Memory, Row, fold, table_of, views_of

START_MS = 1_700_000_000_000
DAY = 86_400_000


def settings(**changes: Any) -> Settings:
    """Settings of a lone control partition, unless said otherwise."""
    given: dict[str, Any] = {
        "control_partition": 0,
        "control_partitions": 1,
        "prefix": "anabranch",
        "trusts_open": True,
        "max_partitions": 100_000,
    }
    return Settings(**(given | changes))


class World(Journals):
    """A control partition with its table, log, journals and clocks."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.settings = settings(**changes)
        self.table = Memory()
        self.log: list[list[Row]] = []
        self.wall_us = START_MS * 1000
        self.now_ms = 5_000
        self.judge_silence = True
        self.lane = OPEN_LANE  # of the commands to come
        self.seen: int | None = None  # the highest time that senders know; None: unstated
        self.waits = False  # whether they want commit wait
        self.at_decision = False  # whether the decision of a commit is enough for them
        self.busy = False  # whether more commands may wait
        self.lanes: dict[type, str] = {r.Force: "admin"}  # … but of these
        self.asked: dict[bytes, str] = {}
        self.offset = 0
        self.rounds: list[Round] = []
        self.said: list[tuple[ReplyTo, Any]] = []
        self.lead()

    # -- leading ---------------------------------------------------------------------------------

    def lead(self, *, keep_table: bool = True) -> None:
        """Take over: all that is not in the log or the table is forgotten, a TERM row is logged."""
        if not keep_table:
            self.table = Memory()
            fold(self.log, table=self.table)
        self.state = State(self.table, trusts_open=self.settings.trusts_open)
        self.index = JournalIndex(self.table)
        self.index.load()
        recent = RecentWrites(self.state.round.hybrid_time)
        self.memory = LeaderMemory(
            Keepalives(self.now_ms),
            holds=holds_of(self.state),
            across=across_of(self.state, on=self.settings.across),
            recent_writes=recent,
        )
        term = self.state.term.term + 1 if self.state.term else 1
        self.log_rows([(k.TERM_KEY, r.TermRow(term, "me", self.wall_us // 1000, False))])

    def log_rows(self, rows: Sequence[tuple[bytes, Any]]) -> None:
        """Log rows as one round, as the shell does with TERM."""
        self.log.append([(key, self.state.apply(key, row)) for key, row in rows])
        self.table.write(self.state.take_changes())

    # -- time ------------------------------------------------------------------------------------

    def wait(self, ms: int) -> str:
        """Let time pass, then have a turn."""
        self.wall_us += ms * 1000
        self.now_ms += ms
        return self.turn()

    def heard(self) -> dict[bytes, int]:
        """When each transaction was last heard of, by this leader."""
        return self.memory.keepalives.heard.as_dict()

    # -- turns -----------------------------------------------------------------------------------

    def next_due_ms(self) -> int | None:
        """When the next commit is to be looked at."""
        merging = self.memory.merging
        return next_due_ms(self.state, self.index, merging, self.wall_ms, self.now_ms)

    def new_turn(self) -> Turn:
        turn = Turn(self.state, self.index, self.settings, self.memory, self.wall_us, self.now_ms)
        turn.lane, turn.busy = self.lane, self.busy
        return turn

    def turn(self, *asked: tuple[str, Any]) -> str:
        """One round: these commands, each with the name of who asks, then what is due."""
        self.read_journals()
        turn = self.new_turn()
        kept = self._kept()
        for name, command in asked:
            self.offset += 1
            turn.lane, turn.seen = self.lane, self.seen
            self._decide(turn, decode(encode(command)), self.asker(name))
        expired_ms = decide_due(turn, judge_silence=self.judge_silence)
        assert self._kept() == kept, "memory was changed before the round happened"
        return self.close(turn, expired_ms, asked[-1][0] if len(asked) == 1 else None)

    def _kept(self) -> Any:
        """All that is in memory alone, but what of the journals was read."""
        memory = self.memory
        parts = [memory.keepalives, memory.merging, memory.cleaning, memory.histories]
        parts += [memory.row_turns, memory.segment_asks]
        fields = [getattr(part, name) for part in parts for name in part.__slots__]
        rows = [each.as_dict() if isinstance(each, DraftMap) else each for each in fields]
        return [
            *rows,
            list(memory.holds.on()),
            dict(memory.holds.shots),
            memory.recent_writes.size,
            list(self.index.plain_ends.items()),
            dict(self.index.uncommitted.stays),
        ]

    def asker(self, name: str) -> ReplyTo:
        correlation_id = name.encode()
        self.asked[correlation_id] = name
        return ReplyTo(
            correlation_id, len(name), b"digest!!", self.lane, self.waits, self.at_decision
        )

    def _decide(self, turn: Turn, command: Any, to: ReplyTo) -> None:
        table, views, said = self._everything(turn)
        if self.lane == OPEN_LANE:
            turn.lane = self.lanes.get(type(command), OPEN_LANE)
        was_aborted = self._is_aborted(command)
        decide(turn, command, to)
        replies = turn.round.replies
        new = replies[len(said) :]
        # What gives way to an earlier commit, and would have moved positions, is logged as aborted.
        gives_way = (
            bool(new)
            and getattr(new[-1][1], "code", "") == "AlreadyCommitted"
            and getattr(command, "consumed", None) is not None
            and self._is_aborted(command)
            and not was_aborted
        )
        if new and new[-1][0] == to and isinstance(new[-1][1], r.Refusal) and not gives_way:
            refused = self._everything(turn)
            assert refused[0] == table, "a refused command changed the table"
            assert refused[1] == views, "a refused command changed the decoded views"
            assert refused[2] == [*said, replies[-1]], (
                "a refused command said more than its refusal"
            )

    def _is_aborted(self, command: Any) -> bool:
        """Whether the transaction of a one-shot, or of a prepare in one command, is aborted."""
        row = self.state.txn_row(getattr(command, "txn_id", None) or b"")
        return row is not None and row.state == "ABORTED"

    def _everything(self, turn: Turn) -> tuple[dict[bytes, bytes], Any, list[Any]]:
        """The table, all that a round says but its replies, and its replies."""
        said = {
            field.name: copy(getattr(turn.round, field.name))
            for field in dataclasses.fields(turn.round)
            if field.name != "replies"
        }
        return (
            table_of(self.state),
            (views_of(self.state), list(self.state.committing), turn.hybrid_time, turn.puts, said),
            list(turn.round.replies),
        )

    def close(self, turn: Turn, expired_ms: int | None = None, asker: str | None = None) -> str:
        """End a turn as the shell does; what was said, as a text."""
        round_ = close_round(turn, self.offset, 0, expired_ms=expired_ms)
        for to, result in (*round_.facts, *round_.replies):
            reply = r.Reply(to.correlation_id, to.command, turn.hybrid_time, result)
            assert decode(encode(reply)) == reply
        changes = self.state.take_changes()
        assert bool(round_.rows) == (not round_.empty)
        if not round_.rows:
            assert [round_.ops, round_.commits, round_.epochs] == [[], [], []]
        self.rounds.append(round_)
        if round_.rows:
            self.log.append(list(round_.rows.items()))
        self.table.write(changes)
        turn.done()
        self.said = [*round_.facts, *round_.replies]
        return "; ".join(self._said(to, result, asker) for to, result in self.said)

    @property
    def round(self) -> Round:
        """The last round."""
        return self.rounds[-1]

    @property
    def message(self) -> str:
        """What the last refusal said."""
        return next(x.message for _, x in reversed(self.said) if isinstance(x, r.Refusal))

    @property
    def result(self) -> Any:
        """The one answer of the last turn."""
        ((_, result),) = self.said
        return result

    def _said(self, to: ReplyTo, result: Any, asker: str | None) -> str:
        who = self.asked[to.correlation_id]
        assert to.partition == len(who), "answered on another partition of replies"
        text = self.text(result)
        return text if who == asker else f"[{who}] {text}"

    # -- commands --------------------------------------------------------------------------------

    def ask(self, name: str, command: Any, *, lane: str | None = None) -> str:
        """One command in a turn of its own. ``lane``: of this command only."""
        with self.by(lane or self.lane):
            return self.turn((name, command))

    @contextmanager
    def by(self, lane: str) -> Iterator[None]:
        """Commands come by this lane."""
        before, self.lane = self.lane, lane
        try:
            yield
        finally:
            self.lane = before

    def grant(self, lane: str, pattern: str, rights: int) -> str:
        """Grant a lane these rights on a pattern, as lane admin does; the lane is made."""
        if lane not in (*self.state.lanes, OPEN_LANE, ADMIN_LANE):
            self.log_rows([(k.lane_key(lane), r.LaneRow(lane, False, ("1", "2"), {}))])
        return self.ask("grant", r.SetGrant(lane, pattern, int(rights)), lane=ADMIN_LANE)

    def begin(
        self,
        label: str,
        *,
        name: str | None = None,
        scope: str = "nyc",
        keepalive_ms: int = MINUTE,
    ) -> str:
        command = self.beginning(label, name=name, scope=scope, keepalive_ms=keepalive_ms)
        return self.ask(f"begin {label}", command)

    def beginning(
        self,
        label: str,
        *,
        name: str | None = None,
        scope: str = "nyc",
        keepalive_ms: int = MINUTE,
    ) -> r.Begin:
        return r.Begin(self.id(label), scope, name, keepalive_ms, SECRET)

    def touch(self, label: str, stream: str = "nyc/a") -> str:
        return self.ask(f"touch {label}", r.Touch(self.token(label), stream))

    def register(self, label: str, receipt: r.Receipt) -> str:
        return self.ask(f"register {label}", r.Register(self.token(label), receipt))

    def finish(self, label: str, writer: str) -> str:
        """Register a true and final receipt."""
        return self.register(label, self.receipt(label, writer))

    def committing(
        self,
        label: str,
        *,
        own: Sequence[r.Receipt] = (),
        receipts: Sequence[r.Receipt] | None = None,
        name: str | None = None,
        number: int | None = None,
        wait_ms: int = 10_000,
    ) -> r.Commit:
        others = None if receipts is None else tuple(receipts)
        return r.Commit(self.token(label), tuple(own), others, name, wait_ms, number)

    def commit(self, label: str, *, asker: str | None = None, **given: Any) -> str:
        return self.ask(asker or f"commit {label}", self.committing(label, **given))

    def abort(self, label: str, reason: str = "") -> str:
        return self.ask(f"abort {label}", r.Abort(self.token(label), reason))

    def heartbeat(self, *labels: str) -> str:
        tokens = tuple(self.token(label) for label in labels)
        return self.ask("heartbeat", r.Heartbeat(tokens))

    def resolve(self, label: str) -> str:
        return self.ask(f"resolve {label}", r.Resolve(self.id(label), "nyc"))

    def get(self, label: str) -> str:
        return self.ask(f"get {label}", r.GetState(self.id(label)))

    def list(
        self,
        *,
        scope: str | None = None,
        finished: bool = True,
        limit: int = 100,
        before: bytes | None = None,
    ) -> str:
        return self.ask("list", r.ListTransactions(scope, finished, limit, before))

    def one_shot(
        self, label: str, *events: r.Event, name: str | None = None, scope: str = "nyc"
    ) -> str:
        return self.ask(f"one-shot {label}", r.OneShot(self.id(label), scope, name, events))

    def find_scope(
        self, scope: str = "nyc", *, create: bool = True, near: str | None = None
    ) -> str:
        return self.ask("find", r.FindScope(scope, create, near))

    def adopt(self, scope: str) -> str:
        return self.ask("adopt", r.AdoptScope(scope, "open"))

    def create(self, stream: str, segments: int = 2, *, asker: str = "create", **given: str) -> str:
        settings = {name.replace("_", "."): value for name, value in given.items()}
        return self.ask(asker, r.CreateStream(stream, segments, settings))

    def created(self, stream: str, *starts: int) -> str:
        """The shell made the topics."""
        turn = self.new_turn()
        stream_created(turn, stream, dict(enumerate(starts)))
        return self.close(turn)

    def refused(self, stream: str, error: AnabranchError) -> str:
        """The shell could not make the topics."""
        turn = self.new_turn()
        stream_refused(turn, stream, error)
        return self.close(turn)

    def describe(self, *, scope: str | None = None, stream: str | None = None) -> str:
        return self.ask("describe", r.DescribeStreams(scope, stream))

    # -- what became of it -----------------------------------------------------------------------

    def plan(self) -> str:
        """The merges of the last round: ``A nyc/a 0: w1[0-3) w2[3-4)`` or ``1: 2 events``."""
        return "; ".join(
            f"{self.label(c.txn_id)} {c.stream} "
            + ", ".join(f"{p.partition}: {self._part(p)}" for p in c.parts)
            for c in self.round.commits
            if not c.plain
        )

    def plain(self) -> str:
        """The plain writes of the last round: ``nyc/a 0[0-3) 1[2-4) 1[4-5)``."""
        return "; ".join(
            f"{c.stream} "
            + " ".join(f"{w.source}[{run.first}-{run.end})" for w in c.plain for run in w.runs)
            for c in self.round.commits
            if c.plain
        )

    def _part(self, part: Any) -> str:
        if part.events:
            return " ".join((e.value or b"").decode() for e in part.events)
        names = {number: label for label, number in self.writers.items()}
        return " ".join(f"{names[run.writer]}[{run.first}-{run.end})" for run in part.runs)

    def ops(self) -> str:
        """The participant ops of the last round: ``BEGIN_TXN A nyc/a:0``."""
        return "; ".join(
            f"{op.op} {self.label(op.txn_id)} {stream}:{partition}"
            for stream, partition, op in self.round.ops
        )

    def row(self, label: str) -> r.TxnRow:
        """A transaction's row, as it stands in the table."""
        row = decode(self.table.rows[k.STATUS + k.txn_key(self.id(label))])
        assert isinstance(row, r.TxnRow)
        return row

    def holder(self, name: str, scope: str = "nyc") -> str:
        """Who holds a name, or nobody."""
        held = self.state.holder(scope, name)
        return "nobody" if held is None else self.label(held)

    def series(self, name: str, scope: str = "nyc") -> str:
        """Where a series stands: ``17 by A``, or nowhere."""
        row = self.state.series(scope, name)
        return "nowhere" if row is None else f"{row.number} by {self.label(row.txn_id)}"


def nyc(*streams: str, **changes: Any) -> World:
    """A world with scope nyc and streams of two segments; nyc/a unless others are named."""
    world = World(**changes)
    assert world.find_scope("nyc") == "nyc at 0"
    for stream in streams or ("nyc/a",):
        world.create(stream)
        world.created(stream, 0, 0)
    world.rounds.clear()
    return world


def event(
    stream: str = "nyc/a",
    key: bytes | None = b"k",
    value: bytes | None = b"v",
    *,
    segment_id: int = -1,
    headers: Mapping[str, bytes | None] | None = None,
    timestamp: int = -1,
) -> r.Event:
    """An event of a one-shot."""
    carried = tuple(r.EventHeader(name, v) for name, v in (headers or {}).items())
    return r.Event(stream, segment_id, key, value, carried, timestamp)


def states(world: World, label: str = "A") -> tuple[str, bool | None]:
    """The transaction's state, and whether its commit is decided (None: there is none)."""
    pending = (
        world.state.open[world.id(label)].pending if world.id(label) in world.state.open else None
    )
    return world.row(label).state, None if pending is None else pending.decided


def index_rows(world: World) -> dict[bytes, bytes]:
    """What the table has of the journals."""
    return {key: v for key, v in world.table.rows.items() if key[:1] in (k.INDEX, k.REJECTED)}
