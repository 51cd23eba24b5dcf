"""The metrics of a control partition's leader.

`NUMBERS` lists them all. docs/operations.md has the same table, and a test compares the two.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

from anabranch.controller.monitor import Number, Numbers, Table
from anabranch.core.decisions.quotas import quotas_of, usages
from anabranch.core.memory import STUCK, wait_of
from anabranch.core.rows import HISTORY
from anabranch.protocol.hybrid_time import to_us
from anabranch.protocol.legal_names import OPEN_LANE
from anabranch.protocol.schemas.records import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from anabranch.controller.intake import Intake
    from anabranch.core.decisions.turn import Settings
    from anabranch.core.history_records import Tail
    from anabranch.core.memory import LeaderMemory
    from anabranch.core.round import Message, Round
    from anabranch.core.state import State

log = logging.getLogger("anabranch.controller")

LOOK_S = 1.0
AHEAD_S = 1.0
MOST_OVERDUE = 1_000

NUMBERS = {
    "leading": Number("gauge", "1 while this process leads the control partition"),
    "term": Number("gauge", "Term of its leadership"),
    "leadership_failures": Number(
        "counter", "Times that a leadership failed or ended, by error", ("error",)
    ),
    "rounds": Number("counter", "Rounds written"),
    "commands": Number("counter", "Commands decided"),
    "refusals": Number("counter", "Answers that were refusals, by code", ("code",)),
    "messages": Number(
        "counter", "Messages sent to other controllers, repeated ones included", ("message",)
    ),
    "messages_ignored": Number(
        "counter",
        "Messages of other controllers that were not acted on: forged, unknown, misdirected, impossible or off",
        ("reason",),
    ),
    "refused_rounds": Number("counter", "Rounds that a broker refused; the rest is written again"),
    "native_aborts": Number("counter", "Native transactions aborted as offsets were guessed wrong"),
    "commands_lag": Number("gauge", "Records of a lane's commands not decided yet", ("lane",)),
    "commands_quarantined": Number(
        "gauge", "Records or batches of commands that were passed over", ("lane",)
    ),
    "lane_work": Number("gauge", "Units of work that a lane was charged in this term", ("lane",)),
    "lane_debt": Number(
        "gauge", "Units of work that a lane owes: it waits debt ÷ quota seconds", ("lane",)
    ),
    "lane_journal_work": Number(
        "gauge",
        "Units of work that the journals of a lane's streams cost in this term",
        ("lane",),
    ),
    "journal_work": Number(
        "gauge", "Units of work that a stream's journals were charged in this term", ("stream",)
    ),
    "journal_debt": Number(
        "gauge", "Units of work that they owe: they wait while others do", ("stream",)
    ),
    "lane_usage": Number("gauge", "How much a lane has of each quota", ("lane", "quota")),
    "lane_quota": Number("gauge", "How much it may have, where it has a quota", ("lane", "quota")),
    "open_transactions": Number("gauge", "Transactions that are not finished"),
    "expired_unread": Number(
        "counter", "Silent transactions aborted while a lane of their heartbeats could not be read"
    ),
    "prepared_transactions": Number("gauge", "Transactions that wait for their coordinator's word"),
    "committing_transactions": Number("gauge", "Transactions whose commit is decided, not done"),
    "held_streams": Number(
        "gauge", "Streams whose commits wait for a transaction over several control partitions"
    ),
    "row_turns": Number("gauge", "Transactions that have or want a turn at a hot row", ("lane",)),
    "uncommitted_bytes": Number("gauge", "Bytes of open transactions in journals"),
    "streams": Number("gauge", "Streams by state", ("state",)),
    "topic_trouble": Number(
        "gauge",
        "1 for what waits as topics fail: a stream, a topic of a lane, or work on topics",
        ("kind", "name"),
    ),
    "stuck_merges": Number(
        "gauge", "Decided commits that make no progress: torn (`txn force`), or waiting", ("why",)
    ),
    "foreign_records": Number(
        "gauge", "Foreign records found in a stream's topic in this term", ("stream",)
    ),
    "plain_writes_refused": Number("gauge", "Plain writes passed over as brokers refused them"),
    "history_offsets": Number(
        "gauge", "Length of the histories, in offsets, as far as this leader knows them"
    ),
    "table_bytes": Number("gauge", "Size on disk of the table"),
    "outcomes": Number("gauge", "Outcomes kept"),
    "rejected_records": Number("gauge", "Journal records rejected in this term", ("reason",)),
    "broker_lacks": Number(
        "gauge",
        "1 for a call that a broker does not offer; docs/how-to/brokers.md says what is lost",
        ("call",),
    ),
    "seconds_ahead": Number(
        "gauge", "How far timestamps are ahead of this machine's clock: another one is, or was"
    ),
    "outcomes_overdue": Number("gauge", "Outcomes past their retention, not purged; 1,000 at most"),
}


TABLE = Table(NUMBERS, "control_partition", ("round_seconds", "Time to make a round durable"))


class Metrics(Numbers):
    """The metrics of one leader."""

    def __init__(self) -> None:
        super().__init__(TABLE)
        self.passed_at = 0.0  # when the last pass ended, with or without a round; monotonic seconds
        self._looked_at = 0.0

    def lacks(self, calls: Iterable[str]) -> None:
        """Set the calls that brokers do not offer."""
        self.values["broker_lacks"] = dict.fromkeys(((call,) for call in calls), 1)

    def begin(self) -> float:
        """The time at which a measured step begins."""
        return time.monotonic()

    def wrote(self, round_: Round, commands: int, begun: float) -> None:
        """Count a round that is durable now. ``begun``: what `begin` returned."""
        self.took(time.monotonic() - begun)
        self.add("rounds")
        self.add("commands", by=commands)
        self.add("expired_unread", by=len(round_.unread))
        for _, result in round_.replies:
            if isinstance(result, Refusal):
                self.add("refusals", result.code)
        self.sent(round_.messages)

    def sent(self, messages: Iterable[Message]) -> None:
        """Count messages to other leaders."""
        for message in messages:
            self.add("messages", type(message.record).__name__)

    def _ahead(self, by_s: float) -> None:
        """Set how far the hybrid time is ahead of the clock. Warn once it exceeds `AHEAD_S`."""
        was, now = self.total("seconds_ahead"), max(0.0, by_s)
        self.set("seconds_ahead", now)
        if was <= AHEAD_S < now:
            log.warning(
                "timestamps are %.1f s ahead of this clock: it is slow, or another controller's is, or was, fast",
                now,
            )

    def passed(self) -> bool:
        """Note the end of a pass. Returns whether to call `update` now."""
        self.passed_at = time.monotonic()
        due = self.passed_at - self._looked_at >= LOOK_S
        if due:
            self._looked_at = self.passed_at
        return due

    def update(
        self,
        state: State,
        intake: Intake,
        memory: LeaderMemory,
        tails: Mapping[str, Tail],
        *,
        native_aborts: int,
        quarantined: Counter[str],
        settings: Settings,
        wall_ms: int,
    ) -> None:
        """Set all numbers that are read from the controller's state. ``quarantined``: commands by lane."""
        self._ahead((to_us(state.round.hybrid_time) / 1000 - wall_ms) / 1000)
        ended_ms = wall_ms - settings.retention_ms
        index, lanes = intake.index, intake.lanes.on.items()
        self.values["commands_lag"] = {(n,): max(0, lane.end - lane.after(0)) for n, lane in lanes}
        self.values["lane_work"] = {(name,): lane.meter.used for name, lane in lanes}
        self.values["lane_journal_work"] = {(name,): lane.meter.drawn for name, lane in lanes}
        self.values["lane_debt"] = {(name,): lane.meter.debt for name, lane in lanes}
        meters = intake.journals.meters.items()
        self.values["journal_work"] = {(stream,): meter.used for stream, meter in meters}
        self.values["journal_debt"] = {(s,): m.debt for s, m in meters if m.debt}
        named = {OPEN_LANE, *state.lanes}
        used = usages(state, index.uncommitted, named)
        self.values["lane_usage"] = {(n, q): x for n, of in used.items() for q, x in of.items()}
        self.values["lane_quota"] = {
            (name, q): most for name in named for q, most in quotas_of(state, name).items()
        }
        self.values["row_turns"] = {
            (name,): count for name, count in memory.row_turns.lanes.as_dict().items()
        }
        passed_over = quarantined + intake.unreadable
        self.values["commands_quarantined"] = {
            (name,): count for name, count in passed_over.items()
        }
        for name, value in {
            "native_aborts": native_aborts,
            "open_transactions": len(state.open),
            "committing_transactions": len(state.committing),
            "prepared_transactions": len(state.prepared),
            "held_streams": memory.holds.streams,
            "uncommitted_bytes": index.uncommitted.total,
            "outcomes": state.outcomes,
            "plain_writes_refused": sum(state.plain_refused.values()),
            "history_offsets": sum(
                max(0, tail.last + 1 - state.low_water.get((stream, HISTORY), 0))
                for stream, tail in tails.items()
            ),
            "outcomes_overdue": len(state.finished_before(ended_ms, MOST_OVERDUE)),
        }.items():
            self.set(name, value)
        states = Counter(row.state for row in state.streams.values())
        self.values["streams"] = {(name,): count for name, count in states.items()}
        reasons = intake.lanes.trouble.reasons
        self.values["topic_trouble"] = {
            (kind, name): 1 for kind in reasons for name in reasons[kind]
        }
        self.values["foreign_records"] = {(s,): n for s, n in memory.foreign.items()}
        waits = (wait_of(state, memory, txn_id) for txn_id in state.committing)
        whys = (wait.why for wait in waits if wait is not None and wait.why in STUCK)
        stuck = Counter("torn" if why == "torn" else "waiting" for why in whys)
        self.values["stuck_merges"] = {(why,): stuck[why] for why in ("torn", "waiting")}
        rejected = sum(index.rejected.values(), Counter[str]())
        self.values["rejected_records"] = {(reason,): n for reason, n in rejected.items()}
