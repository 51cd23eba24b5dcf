"""Planted bugs with journals: plain writes, the index, what is deleted; see `catalogue`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from anabranch.controller import cleanup, intake
from anabranch.core import rows as k
from anabranch.core.decisions import cleanup as decide_cleanup
from anabranch.core.decisions import merge as decide_plain
from anabranch.core.decisions.turn import Turn
from anabranch.core.round import PlainWrites, StreamCommit
from anabranch.ports import TopicPartition
from anabranch.protocol.schemas.codec import encode
from anabranch.protocol.schemas.records import PlainRow
from anabranch.reading import history as history_search
from anabranch.topics.names import journal_topic
from tests.mutants.planting import Planted, instead_of, wrapping

EACH = 3  # runs of plain writes: so many are spared for one that is hit

# -- plain writes -------------------------------------------------------------------------------------


def _plainly(change: Callable[[StreamCommit], StreamCommit]) -> Planted:
    """Commits of plain writes are changed after they were decided."""
    real = decide_plain._commit

    def commit(turn: Turn, taken: Any, times: Any) -> None:
        before = len(turn.round.history)
        real(turn, taken, times)
        for at in range(before, len(turn.round.history)):
            step = turn.round.history[at]
            if isinstance(step, StreamCommit):
                turn.round.history[at] = change(step)

    return patch.object(decide_plain, "_commit", commit)


def _with_runs(change: Callable[[Any], tuple[Any, ...]]) -> Planted:
    def changed(step: StreamCommit) -> StreamCommit:
        plain = tuple(PlainWrites(writes.source, change(writes.runs)) for writes in step.plain)
        return step._replace(plain=plain)

    return _plainly(changed)


def plain_lost() -> Planted:
    """Some plain writes are passed over, as if they had been committed."""
    return _with_runs(lambda runs: tuple(run for run in runs if run.first % EACH))


def plain_twice() -> Planted:
    """Some plain writes are committed twice in one round."""
    return _with_runs(
        lambda runs: tuple(
            run for one in runs for run in ((one,) if one.first % EACH else (one,) * 2)
        )
    )


def plain_misplaced() -> Planted:
    """Plain writes go to the segment next to the one that holds their key."""
    return _plainly(lambda step: step._replace(parts=(*step.parts[1:], *step.parts[:1])))


def plain_backwards() -> Planted:
    """Plain writes of a journal partition are committed in the wrong order."""
    return _with_runs(lambda runs: tuple(reversed(runs)))


@wrapping(decide_plain, "_done")
def plain_position_late(real: Any, turn: Turn, stream: str, partition: int, runs: Any) -> None:
    """How far plain writes are committed is logged with the next round of theirs: a successor does them again."""
    before = turn.state.plain.get((stream, partition), 0)
    real(turn, stream, partition, runs)
    key = k.plain_key(stream, partition)
    if before:
        turn.round.rows[key] = encode(PlainRow(stream, partition, before, 0))
    else:
        turn.round.rows.pop(key)


# -- the index ----------------------------------------------------------------------------------------


@wrapping(intake, "index_fetched")
def zombie_index(real: Any, changes: Any, *given: Any, **more: Any) -> Any:
    """What is read of the journals is written at once, without proof that nobody else leads."""
    found = real(changes, *given, **more)
    changes.rows.write(changes.take())
    return found


# -- deleting -----------------------------------------------------------------------------------------


@instead_of(decide_cleanup, "low_water")
def low_water_too_high(turn: Turn, place: Any, use: object) -> int:
    """The low water that is logged passes over what open transactions and plain writes still need."""
    return turn.index.positions.get(place, 0)


@contextmanager
def cut_above() -> Iterator[None]:
    """Journals are deleted to their ends, above the low water that is logged."""

    def logged(self: cleanup.Truncator, low_waters: Any) -> None:
        places = [TopicPartition(journal_topic(s), p) for s, p in low_waters]
        self._due |= self._log.end_offsets(places, committed=False)

    with patch.object(cleanup.Truncator, "logged", logged):
        yield


@instead_of(cleanup, "_passed")
def history_cut_above(vector: object, firsts: object) -> bool:
    """A history begins with an EPOCH record before which the stream still has events."""
    return True


@wrapping(history_search, "completed")
def vector_not_completed(real: Any, record: Any, since: Any) -> Any:
    """Of a record without a vector, the ends that its own commit moved are taken for all that there are."""
    return real(record, list(since)[-1:])
