"""Reads a processor's state stream into a worker's table, up to the last commit that the controller knows.

The controller's row of a task has the sequence of the last commit that changed the task's state. The last record of
that commit, its *head*, has the same sequence. When both agree, the worker has all rows. An offset or a watermark
would prove less, because a former leader of the partition may report it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from anabranch.batches.format import read_header
from anabranch.errors import IllegalState, NotReady
from anabranch.ports import RawBatch, TopicPartition
from anabranch.processing.table import NOT_WHOLE, Mark, Table
from anabranch.protocol.legal_names import state_stream
from anabranch.protocol.schemas.records import TaskInfo
from anabranch.reading.committed_log import CommittedLog
from anabranch.reading.decoded import Portion, Rows
from anabranch.reading.feed import Feed
from anabranch.reading.store_lookup import state_key
from anabranch.topics.names import stream_topic

log = logging.getLogger("anabranch.processor")

HEAD = 0  # number of the hidden store of heads
SURE_MS = (
    43_200_000  # the greatest age of a usable mark: half the time that the topic keeps tombstones
)
_SEQUENCE = 8  # bytes of a sequence
_NUMBERS = 2  # bytes of an incarnation, and of a store's number
_ASK_S = 30.0
_SLICE_S = 0.5
_SAY_S = 10.0
_MOST_STALE = 100_000  # keys of a task that are remembered; the next restore finds the others
_SWEPT_BYTES = 64 << 10  # of these keys, which one commit deletes


class StateReader:
    """Reads state into a table. For one thread. The caller closes the source afterwards."""

    def __init__(
        self, source: CommittedLog, table: Table, processor: str, incarnation: int
    ) -> None:
        self._source = source
        self._table = table
        self._processor = processor
        self._incarnation = incarnation
        self._prefix = incarnation.to_bytes(_NUMBERS, "big")
        self._head = state_key(incarnation, HEAD, b"")
        self.topic = stream_topic(state_stream(processor))
        self._topic_id = ""
        self._feed = Feed(source, check=_check_transactional)
        self._marks: dict[int, Mark] = {}  # of the tasks that are read
        # Keys of former incarnations that restores found.
        self._stale: dict[int, dict[bytes, None]] = {}

    def restore(
        self, tasks: Mapping[int, TaskInfo], silence_s: float, still_wanted: Callable[[], None]
    ) -> int:
        """Read these tasks' rows up to their last commit. Returns how many. Call it after the reply to `TakeTasks`.

        ``silence_s``: seconds without records after which it fails. ``still_wanted``: called at least twice a
        second; may raise.

        Raises: IllegalState (the topic lacks the last commit, or others wrote to it), NotReady.
        """
        clock = self._source.clock
        deadline = clock.monotonic() + silence_s
        self._topic_id = self._source.topic_ids([self.topic], deadline).get(self.topic, "")
        places = [TopicPartition(self.topic, task) for task in tasks]
        # Ends from before the reply to `TakeTasks` might lack the last commit.
        ends = self._source.end_offsets(places, deadline)
        begun = {
            task: mark.offset
            for task, info in tasks.items()
            if (mark := self._begin(task, info, ends[TopicPartition(self.topic, task)]))
        }
        missing = set(begun)
        self._feed.assign({TopicPartition(self.topic, task): at for task, at in begun.items()})
        read, say = 0, clock.monotonic() + _SAY_S
        while missing:
            still_wanted()
            for portion in self._feed.next(min(deadline, clock.monotonic() + _SLICE_S), ()):
                task = portion.place.partition
                read += self._apply(task, portion, logged=False)
                deadline = clock.monotonic() + silence_s
                found = self._marks[task].sequence
                if found == tasks[task].state_sequence:
                    missing.discard(task)
                elif found > tasks[task].state_sequence:
                    raise self._broken(task, f"it is at commit {found}, its row at an earlier one")
            now = clock.monotonic()
            if missing and now >= deadline:
                # The first ends may have come from a former leader of the partition, which lacks the last commit.
                ends = self._source.end_offsets(places, now + _ASK_S)
                for task, at in self._feed.positions(self.topic, missing).items():
                    if at >= ends[TopicPartition(self.topic, task)]:
                        raise self._broken(task, "it lacks the last commit that its row names")
                raise NotReady(f"{self.topic} of {self._processor} can't be read to its end now")
            if now >= say:
                say = now + _SAY_S
                log.info(
                    "%s: %d rows of state read, %d tasks to go", self._processor, read, len(missing)
                )
            if self._source.closed:
                raise NotReady("the worker is closed")
        self._table.flush()
        return read

    def follow(self, tasks: Iterable[int], until: float) -> None:
        """Update the copies of other workers' tasks, until a monotonic second."""
        self._follow_from(set(tasks))
        while self._source.clock.monotonic() < until:
            portions = self._feed.next(until, ())
            for portion in portions:
                self._apply(portion.place.partition, portion)
            if not portions:
                return

    def catch_up(self, tasks: Iterable[int], silence_s: float) -> None:
        """Update the copies of other workers' tasks up to their present ends.

        ``silence_s``: seconds without records after which it fails. Raises: NotReady.
        """
        others, clock = set(tasks), self._source.clock
        self._follow_from(others)
        deadline = clock.monotonic() + silence_s
        places = [TopicPartition(self.topic, task) for task in others]
        ends = self._source.end_offsets(places, deadline, committed=True)
        while any(
            at < ends[TopicPartition(self.topic, task)]
            for task, at in self._feed.positions(self.topic, others).items()
        ):
            now = clock.monotonic()
            if now >= deadline:
                raise NotReady(f"{self.topic} of {self._processor} can't be read to its end now")
            for portion in self._feed.next(min(deadline, now + _SLICE_S), ()):
                self._apply(portion.place.partition, portion)
                deadline = clock.monotonic() + silence_s

    def _follow_from(self, others: set[int]) -> None:
        """Let the feed read the state of other workers' tasks from their marks on."""
        deadline = self._source.clock.monotonic() + _ASK_S
        if not self._topic_id:
            self._topic_id = self._source.topic_ids([self.topic], deadline).get(self.topic, "")
        if new := others - self._marks.keys():
            places = [TopicPartition(self.topic, task) for task in new]
            ends = self._source.end_offsets(places, deadline)
            for place in places:
                task, mark = place.partition, self._table.mark(place.partition)
                self._marks[task] = self._usable(task, mark, ends[place])
        self._feed.assign(
            {TopicPartition(self.topic, task): self._marks[task].offset for task in others}
        )

    def forget(self, tasks: Iterable[int]) -> None:
        """Forget how far these tasks were read, because this worker begins or ends to write their rows."""
        for task in tasks:
            self._marks.pop(task, None)

    def _begin(self, task: int, info: TaskInfo, end: int) -> Mark | None:
        """The mark to resume reading from; None if all rows are in the table."""
        mark = self._table.mark(task)
        if mark is not None and mark.sequence == info.state_sequence and self._suits(mark):
            return None
        if mark is not None and mark.sequence > info.state_sequence:
            mark = None
        mark = self._usable(task, mark, end)
        if info.state_sequence == 0:
            return None
        self._marks[task] = mark = mark._replace(sequence=NOT_WHOLE)
        return mark

    def _usable(self, task: int, mark: Mark | None, end: int) -> Mark:
        """The mark, if reading may resume from it. Otherwise delete the rows, and return a new mark.

        After a mark that is too old, tombstones of deleted rows may be compacted away. If a mark is after the end
        of the topic, the topic was replaced, or has lost records, whose offsets new records may get.
        """
        now_ms = int(self._source.clock.wall() * 1000)
        if (
            mark is not None
            and self._suits(mark)
            and mark.offset <= end
            and now_ms - mark.written_ms <= SURE_MS
        ):
            return mark
        if mark is not None:
            log.warning(
                "task %d of %s: the folder's rows are of another state", task, self._processor
            )
        self._table.clear(task)
        return Mark(self._topic_id, self._incarnation, NOT_WHOLE, 0, 0)

    def _suits(self, mark: Mark) -> bool:
        return (mark.topic_id, mark.incarnation) == (self._topic_id, self._incarnation)

    def mark_after(self, task: int, sequence: int | None, end: int | None) -> Mark:
        """The mark of a task after a commit of this worker.

        ``sequence``: of the commit, if it changed the task's state. ``end``: the end of the task's partition before
        the commit, if it was looked up.
        """
        mark = self._table.mark(task) or Mark(self._topic_id, self._incarnation, 0, 0, 0)
        if sequence is not None:
            mark = mark._replace(sequence=sequence)
        if end is not None:
            mark = mark._replace(offset=end, written_ms=int(self._source.clock.wall() * 1000))
        return mark

    def records(
        self, task: int, rows: Mapping[bytes, bytes | None], sequence: int
    ) -> list[tuple[bytes, bytes | None]]:
        """Changed rows as records of a commit, with the head at the end.

        Each commit also deletes some rows of former incarnations.
        """
        prefix = self._prefix
        found = [(prefix + row, value) for row, value in rows.items()]
        stale, size = self._stale.get(task, {}), 0
        while stale and size < _SWEPT_BYTES:
            key, _ = stale.popitem()
            size += len(key)
            found.append((key, None))
        return [*found, (self._head, sequence.to_bytes(_SEQUENCE, "big"))]

    def _apply(self, task: int, portion: Portion, *, logged: bool = True) -> int:
        """Write records to the table. Returns their number."""
        mark, count = self._marks[task], 0
        head = self._head
        while portion.first() is not None:
            block, low = portion.next_of_block()
            high = len(block.offsets)
            rows = block.rows(low, high)
            sequence = NOT_WHOLE
            if rows.keys[-1] == head and rows.values[-1] is not None:
                sequence = int.from_bytes(rows.values[-1], "big")
            mine = self._prefix
            if self._incarnation and not logged:
                self._note_stale(task, rows)
            changes = [
                (key[_NUMBERS:], value)
                for key, value in zip(rows.keys, rows.values, strict=True)
                if key is not None and key.startswith(mine) and key != head
            ]
            mark = mark._replace(
                sequence=sequence, offset=block.offsets[-1] + 1, written_ms=rows.timestamps[-1]
            )
            self._table.write([(task, changes)], {task: mark}, logged=logged)
            portion.advance(high)
            count += high - low
        self._marks[task] = mark
        return count

    def _note_stale(self, task: int, rows: Rows) -> None:
        stale = self._stale.setdefault(task, {})
        for key, value in zip(rows.keys, rows.values, strict=True):
            if key is not None and key < self._prefix:
                if value is None:
                    stale.pop(key, None)
                elif len(stale) < _MOST_STALE:
                    stale[key] = None

    def _broken(self, task: int, why: str) -> IllegalState:
        return IllegalState(
            f"the state of task {task} of {self._processor} in {self.topic} can't be trusted: {why}. It was made "
            "again, or records are lost: `anabranch processor reset` begins from its inputs"
        )


def _check_transactional(place: TopicPartition, batches: Sequence[RawBatch]) -> None:
    """Raise `IllegalState` for records that no controller wrote."""
    if not all(read_header(batch.data).is_transactional for batch in batches):
        raise IllegalState(
            f"{place.topic}[{place.partition}] has records that somebody else wrote: `anabranch processor reset` "
            "begins from the inputs"
        )
