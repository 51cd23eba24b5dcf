"""Two or three control partitions in memory, whose leaders' real decisions send each other messages.

Scope nyc is at control partition 0, ber at 1, tok at 2; each has a stream ``a``. Messages stay in ``bag`` until a
test delivers them, so it may lose, double, delay or reorder them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

from anabranch.core import rows as k
from anabranch.core.across.messages import mac_of, time_of
from anabranch.core.decisions.across import receiving
from anabranch.core.decisions.across.coordinating import DONE_MS
from anabranch.core.decisions.decide import decide_due
from anabranch.core.decisions.merge import runs_to_stage
from anabranch.core.decisions.scale import partitions_added
from anabranch.core.decisions.streams import give_up_stream
from anabranch.core.journal_index import extents_by_place
from anabranch.core.memory import NEVER_MS
from anabranch.core.round import Message
from anabranch.protocol.ids import control_partition_of
from anabranch.protocol.legal_names import split_stream
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import LEVEL, decode, encode
from tests.core.harness import World, event

SCOPES = ("nyc", "ber", "tok")
SHOT_SECRET = b"s" * 32


class Sent:
    """A message under way."""

    def __init__(self, sender: int, message: Message, seen: int) -> None:
        self.sender, self.receiver, self.seen = sender, message.receiver, seen
        self.record = message.record
        self.payload = encode(message.record)
        self.mac = None
        if message.secret is not None:
            self.mac = mac_of(message.secret, sender, message.receiver, self.payload)

    def __repr__(self) -> str:
        one = self.record
        what = type(one).__name__
        if isinstance(one, r.AskVote):
            what += f" {one.asks} {one.votes_round}"
        elif isinstance(one, r.Vote):
            what += f" {one.answer} {one.votes_round}" + (" at p" if one.timestamp else "")
        elif isinstance(one, r.Decide):
            what += f" {one.verdict}"
        elif isinstance(one, r.Enlisted) and one.refusal:
            what += f" {one.refusal.code}"
        return f"{self.sender}>{self.receiver} {what}"


class Leader(World):
    """A control partition of `Leaders`."""

    def __init__(self, number: int, count: int, **changes: Any) -> None:
        super().__init__(control_partition=number, control_partitions=count, across=True, **changes)
        self.log_rows([(k.FEATURE_KEY, r.FeatureRow(LEVEL, 1))])
        self.sent: list[Sent] = []
        self.answers: list[str] = []
        self.dies = False  # before its next round is written: a successor goes on
        self.former: Leader | None = None  # one that does not know yet that it leads no more
        self.is_former = False

    def close(self, turn: Any, expired_ms: int | None = None, asker: str | None = None) -> str:
        number, seen = self.settings.control_partition, time_of(turn.hybrid_time, turn.now_us)
        own = [*turn.round.questions]
        if self.is_former and turn.round.empty:
            self.state.take_changes()
            turn.done()
            text = "; ".join([self._said(to, result, None) for to, result in turn.round.facts])
        elif self.dies and not turn.round.empty:
            self.dies = False
            text = self.last_words(turn)
        else:
            text = super().close(turn, expired_ms, asker)
            own += turn.round.messages
        self.sent += [Sent(number, one, seen) for one in own]
        return text

    def last_words(self, turn: Any) -> str:
        """What a leader says at once in a round that is never written; then a successor leads."""
        said = [self._said(to, result, None) for to, result in turn.round.facts]
        self.lead(keep_table=False)
        return "; ".join(said)

    def freeze(self) -> None:
        """A successor leads; this leader goes on until a round of it can't be written."""
        shared = (self.ids, self.writers, self.asked, self.log, self.rounds)
        self.former = None
        former = deepcopy(self, {id(each): each for each in shared})
        former.log, former.rounds = [], []
        former.is_former = former.dies = True
        self.lead(keep_table=False)
        self.former = former

    def _receive_late(self, messages: Sequence[Sent]) -> str:
        """Let the former leader read the messages, too."""
        former = self.former
        if former is None:
            return ""
        former.wall_us, former.now_ms = self.wall_us, self.now_ms
        said = former.receive(*messages)
        self.sent += former.sent
        former.sent.clear()
        if not former.dies:  # a round could not be written
            self.former = None
        return said

    def receive(self, *messages: Sent) -> str:
        """One round that decides these messages, as a controller's pass does; what was answered."""
        self.read_journals()
        turn = self.new_turn()
        for one in messages:
            receiving.receive(turn, decode(one.payload), one.payload, one.mac, one.seen)
        decide_due(turn, judge_silence=self.judge_silence)
        text = "; ".join(filter(None, [self.close(turn), self._receive_late(messages)]))
        self.answers += [text] if text else []
        return text

    def carry(self) -> list[bytes]:
        """Do what the shell does for staged merges: add partitions, and copy all. Returns the transactions."""
        self.read_journals()
        turn = self.new_turn()
        for stream, row in [*self.state.changing.items()]:
            if row.wanted_partitions > row.partitions:
                partitions_added(turn, stream, row.wanted_partitions)
        self.close(turn)
        carried = []
        for txn_id in [*self.state.committing]:
            txn = self.state.open[txn_id]
            extents = extents_by_place(txn.pending.writers) if txn.pending is not None else {}
            for (stream, number), its in [*txn.staged_merges.items()]:
                count = sum([run.records for run in runs_to_stage(self.index, its, extents)])
                if not its.done:
                    done = replace(its, cursor=1 << 40, first=0, end=count, count=count, done=True)
                    self.log_rows([(k.staged_merge_key(txn_id, stream, number), done)])
                    self.memory.merging.waits.put(txn_id, None)
                    carried.append(txn_id)
        return carried


class Leaders:
    """Control partitions with clocks that move together."""

    def __init__(self, count: int = 2, **changes: Any) -> None:
        self.all = [Leader(number, count, **changes) for number in range(count)]
        self.bag: list[Sent] = []
        self.seen: list[str] = []  # all messages that were delivered, as texts
        self.lost: Callable[[Sent], bool] = lambda one: False
        first = self.all[0]
        for number, one in enumerate(self.all):
            one.ids, one.writers, one.asked = first.ids, first.writers, first.asked
            scope = SCOPES[number]
            for known, name in enumerate(SCOPES[:count]):
                if number in (0, known):
                    one.log_rows([(k.scope_key(name), r.ScopeRow(name, known, "open"))])
            one.create(f"{scope}/a")
            one.created(f"{scope}/a", 0, 0)
            one.rounds.clear()

    def __getitem__(self, number: int) -> Leader:
        return self.all[number]

    def collect(self) -> None:
        for one in self.all:
            self.bag += [sent for sent in one.sent if not self.lost(sent)]
            one.sent.clear()

    def deliver(self, *, times: int = 1, kinds: tuple[type, ...] = ()) -> str:
        """Deliver all messages, or those of some kinds, that are under way, once; what was answered."""
        self.collect()
        said: list[str] = []
        for one in self.all:
            number = one.settings.control_partition
            mine = [
                sent
                for sent in self.bag
                if sent.receiver == number and (not kinds or isinstance(sent.record, kinds))
            ]
            self.bag = [sent for sent in self.bag if sent not in mine]
            if mine:
                self.seen += map(repr, mine)
                said.append(one.receive(*mine * times))
        self.collect()
        return "; ".join(filter(None, said))

    def settle(self, *, times: int = 1) -> str:
        """Deliver until nothing is under way; what was answered."""
        said: list[str] = []
        for _ in range(50):
            self.collect()
            if not self.bag:  # what is done is logged a moment later
                said += [
                    one.wait(DONE_MS) for one in self.all if one.memory.across.done_ms < NEVER_MS
                ]
                return "; ".join(filter(None, said))
            said.append(self.deliver(times=times))
        raise AssertionError(f"endless: {self.bag}")

    def wait(self, ms: int) -> str:
        """Let time pass, and settle."""
        said = [one.wait(ms) for one in self.all]
        return "; ".join(filter(None, [*said, self.settle()]))

    def carry(self) -> None:
        """Stage what is to be staged. It is decided by its coordinator before a chunk of it is anywhere (C3)."""
        for one in self.all:
            for txn_id in one.carry():
                row = self[control_partition_of(txn_id)].state.txn_row(txn_id)
                state = None if row is None else row.state
                its = one.state.coordinator_row(txn_id)
                if its is not None and its.forced:
                    continue  # an operator has decided
                assert state in ("FINALIZE_IN_PROGRESS", "COMMITTED"), "staged before the decision"

    def lead(self, number: int) -> None:
        """A successor takes a control partition over: what is in memory alone is gone."""
        self[number].lead(keep_table=False)

    # -- a transaction -----------------------------------------------------------------------------------

    def begin(
        self, label: str = "A", *, writer: str = "w1", streams: tuple[str, ...] = ("nyc/a", "ber/a")
    ) -> None:
        """Begin at control partition 0, and write an event to each stream."""
        assert self[0].begin(label) == f"begun {label}"
        for stream in streams:
            assert self.touch(label, stream).startswith(f"touched {stream}"), stream
            self.write(label, writer, stream)

    def touch(self, label: str, stream: str, writer: int = 0) -> str:
        one = self[SCOPES.index(split_stream(stream)[0])]
        name = f"touch {label} {stream}"
        said = one.ask(name, r.Touch(self[0].token(label), stream, writer))
        text = said or self.join()
        return text.removeprefix(f"[{name}] ")

    def join(self) -> str:
        """Deliver the question of a command that joins, and its answer; what was answered then."""
        kinds = (r.Enlist, r.Enlisted)
        return "; ".join(filter(None, [self.deliver(kinds=kinds), self.deliver(kinds=kinds)]))

    def write(
        self, label: str, writer: str, stream: str, count: int = 1, size: int | None = None
    ) -> None:
        self[SCOPES.index(split_stream(stream)[0])].write(label, writer, stream, count, size=size)

    def receipt(self, label: str, writer: str = "w1") -> r.Receipt:
        """A true account of what a writer wrote everywhere."""
        found = [one.receipt(label, writer, sequence=1) for one in self.all]
        return replace(found[0], extents=tuple(e for each in found for e in each.extents))

    def commit(self, label: str = "A", *, exactly: bool = True, **given: Any) -> str:
        """Send the commit of writer w1; what the coordinator's round answered."""
        receipt = self.receipt(label)
        own, others = ((), (receipt,)) if exactly else ((receipt,), None)
        return self[0].commit(label, own=own, receipts=others, **given)

    def prepare(self, label: str = "A", **given: Any) -> str:
        """Prepare with the events of writer w1; a token suffices to end it."""
        command = self[0].committing(label, receipts=(self.receipt(label),))
        command = replace(command, prepare=r.Prepare(b"", b"a"), **given)
        return self[0].ask(f"prepare {label}", command)

    def commit_prepared(self, label: str = "A") -> str:
        """Commit a prepared transaction."""
        return self[0].commit(label, asker=f"end {label}")

    def lose(self, stream: str) -> None:
        """Give a stream up."""
        one = self[SCOPES.index(split_stream(stream)[0])]
        turn = one.new_turn()
        give_up_stream(turn, stream, "its topic is gone")
        one.close(turn)

    # -- a one-shot --------------------------------------------------------------------------------------

    def one_shot(
        self,
        label: str,
        *streams: str,
        own: Any = None,
        to: tuple[int, ...] = (),
        key: bytes = b"k",
        home: int = 0,
        **given: Any,
    ) -> str:
        """Send a one-shot with an event for each stream to all control partitions, the coordinator ``home`` first.

        ``own``: fields of each control partition's command, by its number. ``to``: send it to these alone.
        Returns what was answered at once.
        """
        said = []
        others = sorted({SCOPES.index(split_stream(s)[0]) for s in streams} - {home})
        for number in (home, *others):
            if not to or number in to:
                events = [event(s, key) for s in streams if split_stream(s)[0] == SCOPES[number]]
                fields: dict[str, Any] = {"places": tuple(others)} if number == home else {}
                fields |= {"secret": SHOT_SECRET} | given | (own or {}).get(number, {})
                if number != home:
                    fields.pop("name", None)
                command = r.OneShot(self[home].id(label), SCOPES[number], None, tuple(events))
                said.append(self[number].ask(f"{label}@{number}", command._replace(**fields)))
        return "; ".join(filter(None, said))

    def merges(self) -> dict[str, list[tuple[str, int]]]:
        """Stream -> the transactions merged into it, with their timestamps, in order."""
        found: dict[str, list[tuple[str, int]]] = {}
        for one in self.all:
            for round_ in one.rounds:
                for step in round_.commits:
                    found.setdefault(step.stream, []).append(
                        (one.label(step.txn_id), step.timestamp)
                    )
        return found

    def parts(self, label: str = "A") -> tuple[r.PartInfo, ...]:
        """The parts of a transaction on other control partitions, as its coordinator lists them."""
        self[0].ask("list", r.ListOpen(None, self[0].id(label), 1))
        found: r.OpenList = self[0].result
        return found.transactions[0].partitions

    def states(self, label: str = "A") -> list[str]:
        rows = [one.state.txn_row(one.id(label)) for one in self.all]
        return ["-" if row is None else row.state for row in rows]


@contextmanager
def losing(leaders: Leaders, *kinds: type) -> Iterator[None]:
    """Lose messages of these kinds."""
    leaders.lost = lambda one: isinstance(one.record, kinds)
    try:
        yield
    finally:
        leaders.lost = lambda one: False
