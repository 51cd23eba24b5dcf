"""What a worker handles before the inputs of a processor: a program's first events, such as rows of a base."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from anabranch.client.client import Client
from anabranch.processing.batch import WorkBatch
from anabranch.processing.commits import Commits
from anabranch.processing.handlers import Handlers
from anabranch.processing.program import Program
from anabranch.protocol.schemas.records import Consumed, TaskPosition, TaskStep
from anabranch.reading.slices import Piece
from anabranch.types import TaskOwnership


@dataclass(frozen=True, slots=True)
class FirstEvents:
    """Handles the first events of tasks that have consumed nothing.

    The last commit gives the tasks their positions, so that it happens once; what comes before may be repeated.
    """

    app: Program
    client: Client
    commits: Commits
    handlers: Handlers

    def handle(self, ownership: TaskOwnership, still_wanted: Callable[[], None]) -> TaskOwnership:
        """Returns the ownership with the tasks as they are then.

        ``still_wanted``: called often; raises if the tasks are to be left. Raises: as the program's `first_events`,
        `Handlers.handle` and `Commits.wait`.
        """
        fresh = {task for task, info in ownership.tasks.items() if not info.positions}
        has_any = False
        for events, of_events in self.app.first_events(self.client, fresh):
            has_any, left = True, [Piece(events[0].stream, 0, events, of_events)]
            while left:
                still_wanted()
                batch = self.commits.new_batch(self.app.tasks)
                left = self.handlers.handle(batch, left)
                if batch.rows or batch.outputs:
                    of = batch.rows.keys() or set(of_events)
                    ownership = self._commit(ownership, batch, of, ())
        if not has_any:
            return ownership
        begin = [TaskPosition(n, at.record, at.timestamp) for n, at in enumerate(ownership.inputs)]
        batch = self.commits.new_batch(self.app.tasks)
        return self._commit(ownership, batch, fresh, tuple(begin))

    def _commit(
        self, ownership: TaskOwnership, batch: WorkBatch, of: Iterable[int],
        positions: tuple[TaskPosition, ...],
    ) -> TaskOwnership:  # fmt: skip
        """Commit a batch with these tasks' next sequences, and with positions, if there are any."""
        self.handlers.close_batch(batch)
        tasks, steps = dict(ownership.tasks), list[TaskStep]()
        for task in sorted(of):
            known = tasks[task]
            tasks[task] = replace(
                known, sequence=known.sequence + 1, positions=positions or known.positions
            )
            steps.append(TaskStep((task,), known.sequence + 1, positions))
        consumed = Consumed(self.app.name, ownership.fencing_token, tuple(steps))
        self.commits.send(ownership, batch, consumed)
        self.commits.wait()
        return replace(ownership, tasks=tasks)
