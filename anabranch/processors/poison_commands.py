"""Finding the command that rounds fail for: it gets three tries, and is then set aside. All others are served.

- *Its decision raises.* The turn is thrown away; the commands before it go on, then it is tried alone.
- *The broker refuses the round.* Commands, merges and plain writes get rounds of their own, of half as many
  commands each time, until the one is alone.
- *Its leader dies.* A leader whose predecessor wrote no round at all takes the waiting commands in pieces. Before
  each it logs a `SuspectRow`, in a round of its own. If it dies before the piece's round, the next leader finds
  the row at the offset of the next command, and takes that piece's commands one by one, with a row before each.
  A row that counts three tries of one command alone sets it aside.
- *A round's outcome is unknown.* Mostly the brokers cause that, so the command gets more tries: isolated in
  the same way, it is set aside after ten such rounds in a row, each with its row logged before. A failure without
  commands takes one of them back.

Controllers' messages to each other have a topic of their own. They go before commands, in rounds of their own, and
no row is logged of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from anabranch.core import limits
from anabranch.core.decisions.set_aside import set_aside, suspect
from anabranch.core.decisions.turn import Turn, refuse
from anabranch.core.state import State
from anabranch.errors import SetAside
from anabranch.ports import LogError, LogFenced, LogUnavailable, LogUncertain
from anabranch.processors.intake import Command, name_of
from anabranch.topics.names import commands_topic, control_topic

log = logging.getLogger("anabranch.controller")

MAX_COMMANDS = 2_000  # a round; the rest waits for the next pass
PIECE = 45  # commands that waited for a leader: 45 rounds of 45
COMMANDS, MERGES, PLAIN = range(3)  # the contents of a careful round
DIED = "each leader that tried it ended before its round"
_UNSURE = "its round can't be written, and others can"

Write = Callable[[Turn, Sequence[Command]], object]


class Culprit:
    """How many commands go into the next round, and which are suspect. Offsets are the commands'.

    ``careful``: a round holds one of `COMMANDS`, `MERGES`, `PLAIN`, as one before it failed, or may have.
    ``count``: commands that this process set aside.
    """

    def __init__(self, skip: Iterable[int] = ()) -> None:
        """``skip``: offsets that an operator wants to skip."""
        self._skip = {offset: ["an operator skipped it"] * limits.TRIES.value for offset in skip}
        self.careful = False
        self.count = 0
        self._kind = PLAIN
        self._size = MAX_COMMANDS  # commands a round
        self._until = 0  # … below this offset
        # Commands below this offset waited for this leader; None: not read yet.
        self._waited: int | None = None
        self._alone = 0  # commands below go one by one, as their piece failed
        self._tries = 0  # … so many times
        # Messages of controllers go one by one, as a round with some failed.
        self._said_alone = False
        self._doubt = False  # a round with commands failed, and it is not known why
        self._forgiven = 0  # failures since then that this process survived
        self._unsure = (0, 0)  # a command alone in rounds of unknown outcome; how many
        self._raised: dict[int, list[str]] = {}  # by command: errors that its decision raised
        self._due = 0  # rounds left with one merge, or one run of plain writes

    @property
    def one_each(self) -> bool:
        """Whether a round holds one merge, or one run of plain writes."""
        return self._due > 0

    @property
    def plain_waits(self) -> bool:
        """Whether this round holds no plain writes."""
        return self.one_each and self._kind == MERGES

    def begin(self, state: State) -> None:
        """A leader begins. Failures logged for the next command count; all others are forgotten."""
        row, self._tries, self._alone = state.suspect, 0, 0
        if row is not None and row.offset == state.round.commands_offset:
            self._tries, self._alone = max(0, row.tries - self._forgiven), row.end
        idle = state.term is not None and state.round.term < state.term.term - 1
        doubt = self._doubt or idle or self._alone > 0
        self._waited = None if doubt else 0
        self._size, self._until = PIECE, self._alone
        self._doubt, self._forgiven, self._due, self._kind = False, 0, 0, PLAIN
        self._raised = dict(self._skip)

    def take(self, queue: list[Command], end: int) -> list[Command]:
        """The commands of the next round. ``end``: end offset of the commands, as read last."""
        self.careful = bool(queue and queue[0].control)
        if self.careful:
            said = list(takewhile(lambda command: command.control, queue))
            return self._up_to_raised(said[:1] if self._said_alone else said)
        if queue and self._waited is None:
            self._waited = min(end, queue[0].offset + MAX_COMMANDS)
            self._until = max(self._until, self._waited)
            self._kind = PLAIN
        self.careful = self.one_each or bool(queue and queue[0].offset < self._until)
        if not self.careful:
            self._size = MAX_COMMANDS
            return self._up_to_raised(queue[:MAX_COMMANDS])
        kinds = (COMMANDS, MERGES, PLAIN) if self.one_each else (COMMANDS, PLAIN)
        self._kind = (
            kinds[(kinds.index(self._kind) + 1) % len(kinds)] if self._kind in kinds else PLAIN
        )
        if self._kind != COMMANDS or not queue:
            return []
        return self._up_to_raised(queue[: 1 if queue[0].offset < self._alone else self._size])

    def _up_to_raised(self, batch: list[Command]) -> list[Command]:
        if not self._raised:
            return batch
        raised = [i for i, command in enumerate(batch) if command.key in self._raised]
        return batch[: max(1, raised[0])] if raised else batch

    def may_try(self, batch: Sequence[Command], begin: Callable[[], Turn], write: Write) -> bool:
        """Log the rows that come before these commands. False: the only one is set aside instead."""
        if not batch:
            return True
        first = batch[0]
        alone = not first.control and first.offset < self._alone
        tries = self._tries if alone else 0
        said = self._raised.get(first.key, ())
        unsure = self._unsure[0] == first.key and self._unsure[1] >= limits.UNSURE.value
        if len(batch) == 1 and (max(tries, len(said)) >= limits.TRIES.value or unsure):
            reason = said[-1] if said else _UNSURE if unsure else DIED
            self._set_aside(first, reason, begin, write)
            return False
        if not first.control and first.offset < max(self._alone, self._waited or 0):
            turn = begin()
            suspect(turn, first.lane, first.offset, batch[-1].offset + 1, tries + int(alone))
            write(turn, ())
        return True

    def _set_aside(
        self, command: Command, reason: str, begin: Callable[[], Turn], write: Write
    ) -> None:
        turn = begin()
        if not command.control:
            set_aside(turn, command.lane, command.offset, name_of(command.payload), reason)
        write(turn, (command,))
        self.count += 1
        log.error(
            "%s[%d]: the command at offset %d (%s) is set aside: %s",
            (control_topic if command.control else commands_topic)(turn.settings.prefix),
            turn.settings.control_partition, command.offset, name_of(command.payload), limits.cut(reason),
        )  # fmt: skip
        answer = begin()  # by itself: brokers may have trouble with its partition
        answer.reply(command.to, refuse(SetAside(f"it had no effect: {limits.cut(reason)}")))
        write(answer, (command,))

    def done(self, batch: Sequence[Command]) -> None:
        """A pass with these ended well: more may go at once."""
        if batch and batch[0].control:
            for command in batch:
                self._raised.pop(command.key, None)
            return
        self._due = max(0, self._due - 1)
        if batch:
            after = batch[-1].offset + 1
            if after >= self._alone:
                most = PIECE if after < (self._waited or 0) else MAX_COMMANDS
                self._size = min(2 * self._size, most)
            for offset in [offset for offset in self._raised if offset < after]:
                del self._raised[offset]

    def raised(self, key: int | None, error: Exception) -> None:
        """The decision of a command, or the making of a round, raised an error that is a defect."""
        if key is None:
            raise LogUncertain(f"a round of commands can't be written: {error!r}") from error
        log.error(
            "the %s at offset %d can't be decided",
            *(("command", key) if key >= 0 else ("message of a controller", -1 - key)),
            exc_info=error,
        )
        self._raised.setdefault(key, []).append(repr(error))

    def failed(self, error: LogError, batch: Sequence[Command]) -> None:
        """Leading ends. A round with commands may be one's doing; without any it is the brokers', or a rival's."""
        self._forgiven += 1
        offset, times = self._unsure
        if not batch or isinstance(error, LogUnavailable | LogFenced):
            self._unsure = offset, max(0, times - 1)
            return
        self._doubt = True
        self._said_alone = self._said_alone or batch[0].control
        if len(batch) == 1 and self.careful:
            self._unsure = batch[0].key, times + 1 if offset == batch[0].key else 1

    def refused(self, batch: Sequence[Command], due: int) -> bool:
        """The broker refused a round. Whether to try again with less in it; else its content is to blame.

        ``due``: how many merges, or runs of plain writes, may have been in it.
        """
        if len(batch) > 1 and batch[0].control:
            self._said_alone = True
            return True
        if batch and (len(batch) > 1 or not self.careful):
            self._size = max(1, len(batch) // 2)
            self._until = max(self._until, batch[-1].offset + 1)
        elif batch or self.one_each:
            return False
        if not (self.careful and batch):
            self._due = 3 * (due + 1)
        self._kind = PLAIN
        return True
