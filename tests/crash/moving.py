"""A scenario of commits that move positions of tasks, and of who lost them, by a client that never gives up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from anabranch.ports import Log
from anabranch.protocol.ids import hash_of
from anabranch.protocol.schemas import records as r
from tests.core.labels import SECRET, Begun
from tests.crash.raw import Raw, Refused
from tests.crash.scenario import LONG_MS, WAIT_MS, WIDE, Scenario

FORMER, LATTER = b"f" * 16, b"l" * 16  # fencing tokens
SHOTS = {"first": (0, 1), "of former": (0, 3), "last": (1, 3)}  # task and sequence that show it


@dataclass
class Moving(Scenario):
    """A processor of two tasks; one of them is taken over while a commit that moves both is merged."""

    ends: ClassVar[dict[str, str]] = dict.fromkeys(
        ("first", "journal", "of former", "last"), "COMMITTED"
    ) | {"lost": "ABORTED"}
    partitions: ClassVar[dict[str, int]] = {WIDE: 2}
    made: bool = field(default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for which in SHOTS:
            made = self.ids[which]
            self.ids[which] = made[:2] + bytes((made[2] | 0x80,)) + made[3:]

    @property
    def processor(self) -> str:
        return f"{self.scope}/{self.ids['journal'].hex()}"

    @property
    def steps(self) -> list[tuple[str, Callable[[], None]]]:
        return [
            ("create the stream", self.create),
            ("create the processor", self.create_processor),
            ("take both tasks", lambda: self.take(FORMER, (0, 1), (0, 0))),
            ("a one-shot that moves both", lambda: self.shot("first", FORMER, (0, 1), 1)),
            ("a commit that moves both", self.journal),
            ("take one of them", lambda: self.take(LATTER, (1,), (1,))),
            ("commit what is lost", self.lose),
            ("continue with the other", lambda: self.shot("of former", FORMER, (0,), 3)),
            ("continue with this one", lambda: self.shot("last", LATTER, (1,), 3)),
        ]

    # -- steps ----------------------------------------------------------------------------------------

    def create_processor(self) -> None:
        inputs = (r.ProcessorInput(f"{self.scope}/{WIDE}", "", 0, 0),)
        self.client.ask(r.CreateProcessor(self.processor, 2, inputs))
        self.made = True

    def take(self, fencing_token: bytes, tasks: Sequence[int], terms: Sequence[int]) -> None:
        command = r.TakeTasks(self.processor, fencing_token, "me", tuple(tasks), tuple(terms))
        info = self.client.ask(command).processors[0]
        while any(task.in_progress for task in info.tasks):
            self.client.poll()
            info = self.client.ask(command).processors[0]

    def consumed(self, fencing_token: bytes, tasks: Sequence[int], sequence: int) -> r.Consumed:
        position = r.TaskPosition(0, sequence, 0)
        return r.Consumed(
            self.processor, fencing_token, (r.TaskStep(tuple(tasks), sequence, (position,)),)
        )

    def shot(self, which: str, fencing_token: bytes, tasks: Sequence[int], sequence: int) -> None:
        command = self._one_shot_command(which, 3)
        moving = command._replace(consumed=self.consumed(fencing_token, tasks, sequence))
        self._acknowledge(which, self.client.ask(moving))

    def journal(self) -> None:
        self._commit("journal", 2)

    def lose(self) -> None:
        """Its owner has one of the two tasks only; a repetition finds it aborted."""
        with pytest.raises(Refused) as refused:
            self._commit("lost", 3)
        assert refused.value.code in ("OwnershipLost", "TransactionAborted"), refused.value
        self._acknowledge("lost", self.client.ask(r.GetState(self.ids["lost"])))

    def _commit(self, which: str, sequence: int) -> None:
        named = hash_of(self.processor, FORMER)
        begin = r.Begin(self.ids[which], self.scope, None, LONG_MS, SECRET, named)
        begun = self.client.ask(begin)
        assert isinstance(begun, Begun), begun
        pen = self._pen(which)
        self._write(pen, which, self._touch(begun.token, WIDE), 4)
        consumed = self.consumed(FORMER, (0, 1), sequence)
        commit = r.Commit(begun.token, (pen.receipt(),), None, None, WAIT_MS, None, consumed)
        self._acknowledge(which, self.client.ask(commit))

    # -- the checks -----------------------------------------------------------------------------------

    def states(self, client: Raw) -> dict[str, str]:
        """The tasks' rows show the state of one-shots that move positions."""
        tasks = self.tasks(client)
        found = super().states(client)
        for which, (task, sequence) in SHOTS.items():
            there = bool(tasks) and tasks[task].sequence >= sequence
            found[which] = "COMMITTED" if there else ""
        return found

    def tasks(self, client: Raw) -> tuple[r.TaskInfo, ...]:
        if not self.made:
            return ()
        found = client.ask(r.DescribeProcessors(self.scope, self.processor)).processors[0].tasks
        for task in found:  # positions are as far as commits are
            assert [p.record for p in task.positions] == [task.sequence] * bool(task.sequence)
        return found  # type: ignore[no-any-return]

    def check_end(self, log: Log, auditor: Raw) -> None:
        super().check_end(log, auditor)
        tasks = self.tasks(auditor)
        assert [(task.sequence, task.term, task.in_progress) for task in tasks] == [
            (3, 1, None),
            (3, 2, None),
        ]
        assert [task.txn_id for task in tasks] == [self.ids["of former"], self.ids["last"]]
