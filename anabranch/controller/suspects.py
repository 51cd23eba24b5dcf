"""Suspect commands: a command that makes rounds fail is found, gets three tries, and is then quarantined.

All other commands are served.

- *Its decision raises.* The turn is dropped, the commands before it are decided, and then it is tried alone.
- *The broker refuses the round.* Commands, merges and plain writes get rounds of their own, with half as many
  commands each time, until the cause is alone.
- *Its leader dies.* A leader whose predecessor wrote no round at all takes the waiting commands in pieces. Before
  each it logs a `SuspectRow`, in a round of its own. If it dies before the piece's round, the next leader finds
  the row at the offset of the next command, and takes that piece's commands one by one, with a row before each.
  After three tries alone, by this row's count, a command is quarantined.
- *A round's outcome is unknown.* In most cases the brokers cause that, so the command gets more tries. The command
  is isolated in the same way, and quarantined after ten such rounds in a row, each with its row logged before. A
  failure of a round without commands takes one of the ten back.

As long as all is well, a round has commands of several lanes. Suspect commands of a lane go in rounds of their own,
in turn with the other lanes' commands. While the commands of a piece are taken one by one, all other lanes wait.

Controllers' messages to each other have a topic of their own. They are decided before the commands of the same
round, and no row is logged for them. The round merges the commits that messages set free. While commands are
suspect, or after a round with messages has failed, messages and commands have rounds of their own, in turn.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from anabranch.controller.lanes import Command, Key, Lane, Lanes, messages_in
from anabranch.core.decisions.lanes import position_of, quarantine, suspect
from anabranch.core.decisions.turn import Turn, refuse
from anabranch.core.state import State
from anabranch.errors import Quarantined
from anabranch.ports import LogError, LogFenced, LogUnavailable, LogUncertain
from anabranch.protocol import limits
from anabranch.protocol.schemas.codec import name_of
from anabranch.topics.names import commands_topic, control_topic

log = logging.getLogger("anabranch.controller")

MAX_COMMANDS = 2_000  # a round; the rest waits for the next pass
# Commands in a piece of those that waited for a leader: at most 45 rounds of 45, then 45 rounds of one.
PIECE = 45
DIED = "each leader that tried it ended before its round"
_UNSURE = "its round can't be written, and others can"

Write = Callable[[Turn, Sequence[Command]], object]


class Content(Enum):
    """The content of a careful round: commands, merges, or plain writes, and nothing else."""

    COMMANDS = auto()
    MERGES = auto()
    PLAIN = auto()


class _FailedPiece(NamedTuple):
    """A lane's commands below offset ``end``, which are tried one by one.

    ``tries``: how many tries of the first command failed.
    """

    lane: str = ""
    end: int = 0
    tries: int = 0


@dataclass(slots=True)
class _Watch:
    """A lane's commands below offset ``until``, which are suspect. A round has ``size`` of these commands.

    ``waited``: commands below this offset waited for this leader.
    """

    until: int = 0
    waited: int = 0
    size: int = PIECE


class SuspectCommands:
    """Decides how many commands go into the next round, and which of them are suspect.

    ``careful``: whether the next round has one kind of `Content`. This is so if the round decides suspect commands,
    or if an earlier round of its kind (commands, or messages of controllers) was refused. ``count``: lane -> the
    number of its commands that this process quarantined.
    """

    def __init__(self, skip: Iterable[Key] = ()) -> None:
        """``skip``: lanes and offsets that an operator wants to skip."""
        why = ["an operator skipped it"] * limits.TRIES.value
        self._skip = dict.fromkeys(skip, why)
        self.careful = False
        self.count = Counter[str]()
        self._kind = Content.PLAIN
        self._watched: dict[str, _Watch] = {}
        self._turn = 0  # which group of lanes is next: each watched lane, or the rest
        # Lanes whose commands that waited are watched already; None: commands that waited are not suspect.
        self._checked_lanes: set[str] | None = None
        self._piece = _FailedPiece()
        # How many messages of controllers go into a round: one after a failed round, then twice as many each time.
        self._control_limit = MAX_COMMANDS
        self._had_messages = False  # whether the last round had messages
        self._doubt = False  # a round with commands failed, and it is not known why
        self._forgiven = 0  # failures since then that this process survived
        # The command that was alone in the last rounds of unknown outcome, and the number of these rounds.
        self._unsure: Key = "", 0
        self._unsure_rounds = 0
        self._raised: dict[Key, list[str]] = {}  # by command: errors that its decision raised
        self._due = 0  # rounds left with one merge, or one run of plain writes

    @property
    def one_each(self) -> bool:
        """Whether a round has no more than one merge, or one run of plain writes."""
        return self._due > 0

    @property
    def plain_waits(self) -> bool:
        """Whether this round holds no plain writes."""
        return self.one_each and self._kind == Content.MERGES

    def begin(self, state: State) -> None:
        """Begin a leadership. Failures that are logged for the next command count; other failures are forgotten."""
        row = state.suspect
        self._piece = _FailedPiece()
        self._watched.clear()
        if row is not None and row.offset == position_of(state, row.lane):
            self._piece = _FailedPiece(row.lane, row.end, max(0, row.tries - self._forgiven))
            self._watched[row.lane] = _Watch(row.end)
        idle = state.term is not None and state.round.term < state.term.term - 1
        doubt = self._doubt or idle or self._piece.end > 0
        self._checked_lanes = set() if doubt else None
        self._doubt = False
        self._forgiven = 0
        self._due = 0
        self._kind = Content.PLAIN
        self._raised = dict(self._skip)

    def take(self, lanes: Lanes) -> list[Command]:
        """The commands of the next round."""
        self.careful = bool(lanes.control) and self._control_limit < MAX_COMMANDS
        active = lanes.active
        is_apart = self.careful or self._has_doubts(active)
        # Apart they take turns: there may be messages in each pass.
        is_turn_of_commands = is_apart and self._had_messages and bool(active)
        self._had_messages = bool(lanes.control) and not is_turn_of_commands
        if self._had_messages:
            messages = self._up_to_raised(lanes.control[: self._control_limit])
            more = [] if is_apart else lanes.next(MAX_COMMANDS - len(messages), active)
            return messages + more
        for lane in active if self._checked_lanes is not None else ():
            self._meet(lane)
        watched = [lane for lane in active if self._is_watched(lane)] if self._watched else []
        self.careful = self.one_each or bool(watched)
        if not self.careful:
            return self._up_to_raised(lanes.next(MAX_COMMANDS, active))
        kinds = [kind for kind in Content if self.one_each or kind != Content.MERGES]
        if self._kind in kinds:
            self._kind = kinds[(kinds.index(self._kind) + 1) % len(kinds)]
        else:
            self._kind = Content.PLAIN
        if self._kind != Content.COMMANDS or not active:
            return []
        alone = [lane for lane in watched if self._is_alone(lane.queue[0])]
        rest = [lane for lane in active if lane not in watched]
        groups = [alone] if alone else [*([lane] for lane in watched), *([rest] if rest else [])]
        self._turn = (self._turn + 1) % len(groups)
        group = groups[self._turn]
        most = MAX_COMMANDS if group is rest else self._watched[group[0].name].size
        return self._up_to_raised(lanes.next(1 if alone else most, group))

    def take_more(self, lanes: Lanes) -> list[Command]:
        """The commands of the round after the round under way; empty while any command is suspect."""
        active = lanes.active
        if lanes.control or self._has_doubts(active):
            return []
        return lanes.next(MAX_COMMANDS, active)

    def _has_doubts(self, active: Iterable[Lane]) -> bool:
        """Whether commands of these lanes are suspect, or become so when they are taken."""
        met = self._checked_lanes
        new = met is not None and any(lane.name not in met for lane in active)
        return new or bool(self._watched or self._raised) or self.one_each

    def _meet(self, lane: Lane) -> None:
        """Suspect the commands of a lane that waited for this leader."""
        if self._checked_lanes is not None and lane.name not in self._checked_lanes:
            self._checked_lanes.add(lane.name)
            watch = self._watched.setdefault(lane.name, _Watch())
            watch.waited = min(lane.end, lane.queue[0].offset + MAX_COMMANDS)
            watch.until = max(watch.until, watch.waited)
            self._kind = Content.PLAIN

    def _is_watched(self, lane: Lane) -> bool:
        watch = self._watched.get(lane.name)
        return watch is not None and lane.queue[0].offset < watch.until

    def _is_alone(self, command: Command) -> bool:
        piece = self._piece
        return command.lane == piece.lane and command.offset < piece.end and not command.control

    def _up_to_raised(self, batch: list[Command]) -> list[Command]:
        if not self._raised:
            return batch
        raised = [i for i, command in enumerate(batch) if command.key in self._raised]
        return batch[: max(1, raised[0])] if raised else batch

    def may_try(self, batch: Sequence[Command], begin: Callable[[], Turn], write: Write) -> bool:
        """Log the rows that have to be there before these commands are tried.

        False if the only command was quarantined instead.
        """
        if not batch:
            return True
        first = batch[0]
        alone = self._is_alone(first)
        tries = self._piece.tries if alone else 0
        errors = self._raised.get(first.key, ())
        unsure = self._unsure == first.key and self._unsure_rounds >= limits.UNSURE.value
        if len(batch) == 1 and (max(tries, len(errors)) >= limits.TRIES.value or unsure):
            reason = errors[-1] if errors else _UNSURE if unsure else DIED
            self._quarantine(first, reason, begin, write)
            return False
        watch = self._watched.get(first.lane) if not first.control else None
        if alone or (watch is not None and first.offset < watch.waited):
            turn = begin()
            suspect(turn, first.lane, first.offset, batch[-1].offset + 1, tries + int(alone))
            write(turn, ())
        return True

    def _quarantine(
        self, command: Command, reason: str, begin: Callable[[], Turn], write: Write
    ) -> None:
        turn = begin()
        prefix = turn.settings.prefix
        if not command.control:
            quarantine(turn, command.lane, command.offset, name_of(command.payload), reason)
        write(turn, (command,))
        self.count[command.lane] += 1
        log.error(
            "%s[%d]: the command at offset %d (%s) is quarantined: %s",
            control_topic(prefix) if command.control else commands_topic(prefix, command.lane),
            turn.settings.control_partition, command.offset, name_of(command.payload), limits.cut(reason),
            extra={"lane": command.lane},
        )  # fmt: skip
        answer = begin()  # a turn by itself: brokers may have trouble with the reply's partition
        answer.reply(command.to, refuse(Quarantined(f"it had no effect: {limits.cut(reason)}")))
        write(answer, (command,))

    def done(self, batch: Sequence[Command], lanes: Lanes) -> None:
        """Note that a pass with these commands succeeded: they leave their queues, and rounds may grow again."""
        lanes.passed(batch)
        if batch and batch[0].control:
            self._control_limit = min(2 * self._control_limit, MAX_COMMANDS)
            for command in batch:
                self._raised.pop(command.key, None)
            return
        self._due = max(0, self._due - 1)
        if not (batch and (self._watched or self._raised)):
            return
        for lane, after in _ends(batch).items():
            watch = self._watched.get(lane)
            if watch is not None and (self._piece.lane != lane or after >= self._piece.end):
                most = PIECE if after < watch.waited else MAX_COMMANDS
                watch.size = min(2 * watch.size, most)
                if after >= watch.until:
                    del self._watched[lane]
            for key in [key for key in self._raised if key[0] == lane and 0 <= key[1] < after]:
                del self._raised[key]

    def raised(self, key: Key | None, error: Exception) -> None:
        """Note that a defect raised this error in the decision of a command, or (no ``key``) in making a round."""
        if key is None:
            raise LogUncertain(f"a round of commands can't be written: {error!r}") from error
        lane, offset = key
        of_lane = offset >= 0
        log.error(
            "the %s at offset %d can't be decided",
            f"command of lane {lane}" if of_lane else "message of a controller",
            offset if of_lane else -1 - offset,
            exc_info=error,
            extra={"lane": lane},
        )
        self._raised.setdefault(key, []).append(repr(error))

    def failed(self, error: LogError, batch: Sequence[Command]) -> None:
        """Note that a failure ended the leadership.

        If its round had commands, one of them may be the cause. Otherwise brokers or a rival are the cause.
        """
        self._forgiven += 1
        unreached = isinstance(error, LogUnavailable) and not isinstance(
            error.__cause__, LogUncertain
        )
        if not batch or unreached or isinstance(error, LogFenced):
            self._unsure_rounds = max(0, self._unsure_rounds - 1)
            return
        self._doubt = True
        if batch[0].control:
            self._control_limit = 1
        if len(batch) == 1 and self.careful:
            same = self._unsure == batch[0].key
            self._unsure = batch[0].key
            self._unsure_rounds = self._unsure_rounds + 1 if same else 1

    def refused(self, batch: Sequence[Command], due: int) -> bool:
        """Note that the broker refused a round. Returns whether to try again with less content.

        False: the round had a single content, which is the cause. ``due``: how many merges, or runs of plain
        writes, the round may have had.
        """
        commands = batch[messages_in(batch) :]
        if batch and not commands and (len(batch) > 1 or not self.careful):
            self._control_limit = 1
            return True
        if batch and (len(batch) > 1 or not self.careful):
            counts = Counter(command.lane for command in commands)
            for lane, end in _ends(commands).items():
                watch = self._watched.setdefault(lane, _Watch())
                watch.size = max(1, counts[lane] // 2)
                watch.until = max(watch.until, end)
        elif batch or self.one_each:
            return False
        if not (self.careful and batch):
            self._due = 3 * (due + 1)
        self._kind = Content.PLAIN
        return True


def _ends(batch: Sequence[Command]) -> dict[str, int]:
    """Each lane's offset after its last command in a batch."""
    return {command.lane: command.offset + 1 for command in batch}
