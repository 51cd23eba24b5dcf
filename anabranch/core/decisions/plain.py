"""Plain writes: journal records without a transaction commit by themselves (`docs/inside/epochs.md`).

Plain writes are taken in journal order, so one offset for each journal partition shows which ones are committed.
The round with their data and COMMIT record logs this offset, and the next leader resumes exactly there. This module
chooses the layout; only the shell sees the keys, which choose the segments.
"""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.core import rows as k
from anabranch.core.decisions.commits import frozen, locks
from anabranch.core.decisions.turn import Turn
from anabranch.core.ids import NO_TXN
from anabranch.core.journal.runs import StoredRun, digest_key, stored_run_key
from anabranch.core.journal.table_writes import Write
from anabranch.core.round import Part, PlainWrites, Round, StreamCommit
from anabranch.errors import check
from anabranch.schemas.records import PlainRow


def commit_plain(turn: Turn) -> None:
    """Commit as many waiting plain writes as fit into the round, in one commit for each stream.

    Call it while the current layouts of this round are still the active ones.
    """
    if turn.plain_waits:
        return
    waiting = [place for place in turn.index.plain_waiting(turn.state) if turn.usable(place[0])]
    if not waiting:
        return
    if turn.merge_limit is not None:
        # The broker refused something: commit one run at a time to find it.
        _commit(turn, _taken(turn, waiting, 1, 1))
        turn.merge_limit = 0
        return
    budget = turn.round_bytes
    if turn.state.committing:
        budget //= 2
    _commit(turn, _taken(turn, waiting, budget, budget // len(waiting)))


def _taken(
    turn: Turn, waiting: Iterable[tuple[str, int]], budget: int, share: int
) -> dict[tuple[str, int], list[StoredRun]]:
    """The next runs of these journal partitions, without partitions that wait for frozen locks."""
    taken: dict[tuple[str, int], list[StoredRun]] = {}
    for place in waiting:
        if turn.plain_bytes >= budget:
            break
        if runs := _take(turn, place, share):
            taken[place] = runs
    return taken


def _take(turn: Turn, place: tuple[str, int], size: int) -> list[StoredRun]:
    """The next runs of a journal partition: at least one, about ``size`` bytes, up to one that breaks a frozen
    lock.
    """
    runs: list[StoredRun] = []
    taken = 0
    for run in turn.index.plain_runs(turn.state, *place):
        if place[0] in turn.state.tables and frozen.waits(
            turn,
            place,
            lambda run=run: _written(turn, place, run),  # type: ignore[misc]
        ):
            break
        runs.append(run)
        taken += run.batch_size
        if taken >= size:
            break
    else:
        check(bool(runs), "the index lost plain writes that are not committed")
    turn.plain_bytes += taken
    return runs


def _written(turn: Turn, place: tuple[str, int], run: StoredRun) -> dict[str, Write]:
    stream, partition = place
    step = StreamCommit(NO_TXN, stream, 0, 0, ())
    return {stream: locks.written(turn, step, [(partition, (run,))])}


def _commit(turn: Turn, taken: dict[tuple[str, int], list[StoredRun]]) -> None:
    by_stream: dict[str, list[PlainWrites]] = {}
    for (stream, partition), runs in taken.items():
        by_stream.setdefault(stream, []).append(PlainWrites(partition, tuple(runs)))
    for stream, writes in by_stream.items():
        row = turn.state.streams[stream]
        locks.merge(
            turn,
            StreamCommit(
                NO_TXN,
                stream,
                row.stream_epoch,
                turn.next_timestamp(),
                tuple(Part(s.segment_id, s.partition) for s in row.segments),
                tuple(sorted(writes)),
                row.segments,
            ),
        )
        for partition, its in writes:
            _done(turn, stream, partition, its)
            turn.served.append((stream, partition))


def give_up(turn: Turn, refused: Round) -> list[tuple[str, int, tuple[StoredRun, ...]]]:
    """Skip the plain writes of a round whose data the broker refuses, and log their count.

    Their writers wait for no answer, and later writes must not be blocked. Returns (stream, journal partition,
    runs).
    """
    passed = []
    for commit in refused.commits:
        for partition, runs in commit.plain:
            records = sum(run.records for run in runs)
            _done(turn, commit.stream, partition, runs, records)
            passed.append((commit.stream, partition, runs))
    return passed


def _done(
    turn: Turn, stream: str, partition: int, runs: tuple[StoredRun, ...], refused: int = 0
) -> None:
    """Log that these runs are committed or skipped, so that the index drops them."""
    refused += turn.state.plain_refused.get((stream, partition), 0)
    row = PlainRow(stream, partition, runs[-1].end, refused)
    turn.put(k.plain_key(stream, partition), row)
    for run in runs:
        key = stored_run_key(stream, partition, NO_TXN, run)
        turn.state.keep(key, None)
        if stream in turn.state.tables:
            turn.state.keep(digest_key(key), None)
