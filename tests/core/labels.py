"""Transactions and writers by labels ("A", "w1"), and how answers to them read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anabranch.core.decisions.turn import Settings
from anabranch.protocol.ids import make_txn_id
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import Token, TokenBytes, make

SECRET = bytes(range(32, 64))  # of every transaction that a test begins by hand
MINUTE = 60_000


@dataclass(frozen=True, slots=True)
class Begun(r.Begun):
    """A `Begun` with the token, of all rights, that a client makes of it."""

    token: bytes


def proved(answer: Any, scope: str = "nyc") -> Any:
    """What a client makes of an answer: a `Begun` has a token then, by the secret."""
    if isinstance(answer, r.Begun):
        token = Token(answer.txn_id, answer.keepalive_ms, answer.begun_ms, scope, "open")
        return Begun(answer.txn_id, answer.keepalive_ms, answer.begun_ms, make(SECRET, token))
    return answer


class Labels:
    """Which transactions and writers the labels stand for."""

    settings: Settings
    wall_us: int

    def __init__(self) -> None:
        self.ids: dict[str, bytes] = {}
        self.writers: dict[str, int] = {}

    @property
    def wall_ms(self) -> int:
        return self.wall_us // 1000

    def id(self, label: str) -> bytes:
        """A transaction's id; made at its first mention."""
        if label not in self.ids:
            self.new_id(label)
        return self.ids[label]

    def new_id(
        self, label: str, *, made_ms: int | None = None, partition: int | None = None
    ) -> str:
        partition = self.settings.control_partition if partition is None else partition
        made_ms = self.wall_ms if made_ms is None else made_ms
        self.ids[label] = make_txn_id(partition, made_ms, len(self.ids) + 1)
        return label

    def label(self, txn_id: bytes) -> str:
        return next((label for label, known in self.ids.items() if known == txn_id), txn_id.hex())

    def writer(self, label: str) -> int:
        """A writer's 64 bits; every second one is negative as a signed number."""
        if label not in self.writers:
            n = len(self.writers) + 1
            self.writers[label] = -n if n % 2 == 0 else n
        return self.writers[label]

    def token(self, label: str, scope: str = "nyc", **more: Any) -> TokenBytes:
        """A token of all rights, unless ``more`` says otherwise."""
        return make(SECRET, Token(self.id(label), MINUTE, self.wall_ms, scope, "open", **more))

    # -- answers ---------------------------------------------------------------------------------

    def text(self, result: Any) -> str:
        """How an answer reads."""
        if isinstance(result, r.Refusal):
            return result.code
        if isinstance(result, r.Begun):
            return f"begun {self.label(result.txn_id)}"
        if isinstance(result, r.Touched):
            partitions = ",".join(str(s.partition) for s in result.segments)
            return f"touched {result.stream} epoch {result.stream_epoch} on {partitions}"
        if isinstance(result, r.Registered):
            return f"registered {result.sequence}"
        if isinstance(result, r.Outcome):
            return self.outcome_text(result)
        if isinstance(result, r.Ended):
            return "not open: " + ", ".join(self.outcome_text(o) for o in result.not_open)
        if isinstance(result, r.TransactionList):
            return ", ".join(self.outcome_text(o) for o in result.transactions) or "none"
        if isinstance(result, r.OpenList):
            return ", ".join(self.outcome_text(o.outcome) for o in result.transactions) or "none"
        if isinstance(result, r.ScopeInfo):
            return f"{result.scope} at {result.control_partition}"
        if isinstance(result, r.StreamList):
            streams = (f"{s.stream} {s.state} {len(s.segments)}" for s in result.streams)
            return ", ".join(streams) or "none"
        if isinstance(result, r.SeriesList):
            found = (f"{s.series} {s.number} by {self.label(s.txn_id)}" for s in result.series)
            return ", ".join(found).replace(bytes(16).hex(), "0") or "none"
        if isinstance(result, r.GrantList):
            return ", ".join(f"{g.lane} {g.pattern} {g.rights}" for g in result.grants)
        if isinstance(result, r.AuditList):
            return ", ".join(f"{e.lane}: {e.command} {e.what}" for e in result.entries) or "none"
        if isinstance(result, r.CommandList):
            return f"at {result.position}"
        if isinstance(result, r.LaneList):
            return ", ".join(lane.lane for lane in result.lanes)
        if isinstance(result, r.ProcessorList):
            return ", ".join(map(self.processor_text, result.processors))
        if isinstance(result, r.SafeTimeReply):
            return f"safe at {result.timestamp}"
        if isinstance(result, r.RunList):
            return f"{len(result.runs)} runs, {len(result.more)} more"
        if isinstance(result, r.Revalidate):
            return "revalidate"
        if isinstance(result, r.TableLockList):
            return f"{len(result.locks)} locked"
        if isinstance(result, r.ReadsLocked):
            return "locked" if result.broken is None else "broken"
        if isinstance(result, r.LeaderInfo):
            return f"term {result.term}"
        if isinstance(result, r.FeatureLevel):
            return f"level {result.level} of {result.known}"
        raise AssertionError(f"no text for {result}")

    def processor_text(self, info: r.ProcessorInfo) -> str:
        """A processor, or its tasks: number, holder, sequence:records, and what is being merged."""
        found = []
        for task in info.tasks:
            at = ",".join(str(position.record) for position in task.positions) or "-"
            busy = "" if task.in_progress is None else f" !{self.label(task.in_progress)}"
            found.append(f"{task.task} {task.holder or 'nobody'} {task.sequence}:{at}{busy}")
        return " ".join(found) or f"{info.processor} {info.task_count} tasks"

    def outcome_text(self, o: r.Outcome) -> str:
        text = f"{self.label(o.txn_id)} {o.state}"
        if o.state == "COMMITTED" or (o.state == "PREPARED" and not o.commit_timestamp):
            text += f" {o.committed}"
        elif o.committed or o.commit_timestamp:
            text += f" (but {o.committed} committed at {o.commit_timestamp})"
        if o.left_out:
            text += f", {o.left_out} left out"
        if o.rejected:
            text += f", {o.rejected} rejected"
        return text + (f" ({o.reason})" if o.reason else "")
