"""Merges of decided commits (regular, rolling or staged) and plain writes (`docs/inside/epochs.md`, PDP-24).

A *staged* merge is too big for one round, that is, one native transaction: `controller.carrier` copies its events
in chunks first, and then one history record publishes them.

A round merges transactions in the order of the timestamps that it gives them. At the beginning of a round the
*current* layout of a stream is its active layout. For a transaction of another reference epoch, a duplicate of that
epoch becomes current. At the end of the round, a duplicate of the active layout becomes current. Transactions of
one reference epoch are merged one after the other, so that they share a duplicate.

Plain writes commit in journal order: one offset for each journal partition says which are committed. The round with
their data and COMMIT record logs this offset, and the next leader resumes exactly there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from anabranch.core import rows as k
from anabranch.core import segments as seg
from anabranch.core import work
from anabranch.core.command_events import CommandEvents
from anabranch.core.decisions import one_shot, positions
from anabranch.core.decisions.across import holding
from anabranch.core.decisions.prepared import leave_out_lost, shot_of
from anabranch.core.decisions.scale import duplicate_active, idle_partitions, want_partitions
from anabranch.core.decisions.transactions import (
    abort_txn,
    answer_decided,
    answer_pending,
    drop_locks,
    end_pending,
    finish,
    journal_op,
)
from anabranch.core.decisions.turn import Turn, refuse
from anabranch.core.journal_index import JournalIndex, extents_by_place, taken_runs
from anabranch.core.journal_runs import StoredRun, digest_key, stored_run_key
from anabranch.core.locks import conflicts, frozen
from anabranch.core.locks.table_writes import Write
from anabranch.core.memory import STUCK, Why, unusable
from anabranch.core.round import Landed, NewEpoch, Part, PlainWrites, Round, StreamCommit
from anabranch.core.segments import TxnSegment
from anabranch.core.state import OpenTxn
from anabranch.errors import NotReady, ReservedByPrepared, StreamLost, check
from anabranch.protocol.ids import NO_TXN, segment_number
from anabranch.protocol.legal_names import is_state
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.records import (
    Extent,
    JournalOp,
    PlainRow,
    SegmentRange,
    StagedMergeRow,
)

# Pauses before a waiting commit is checked again.
RECHECK_MS = 50
TORN_MS = 10_000  # … which lost records
WAITING_MS = 1_000  # … of which a stream is in trouble
_KEEPS: frozenset[Why] = STUCK | {"timestamp"}  # waits of a staged merge that may last


class Source(NamedTuple):
    """A transaction's records for one segment: runs of a journal partition, in order."""

    number: int
    partition: int
    runs: tuple[StoredRun, ...]


class Target(NamedTuple):
    """A transaction's records for one stream."""

    stream: str
    reference_epoch: int
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The records that a decided transaction merges. ``size``: bytes of their batches."""

    txn_id: bytes
    targets: tuple[Target, ...]
    records: int
    size: int
    staged: bool
    state: int  # bytes of them in states of processors, which are never staged or rolled
    kept: r.PreparedRow | None = None  # the row with the events of a one-shot: it has no targets

    @property
    def runs(self) -> int:
        return sum([len(source.runs) for target in self.targets for source in target.sources])

    @property
    def travels(self) -> tuple[Target, ...]:
        """The targets that may be staged or rolled."""
        return tuple(target for target in self.targets if not is_state(target.stream))


@dataclass(slots=True)
class _Current:
    """The layout of one stream into which this round merges."""

    stream_epoch: int
    reference_epoch: int
    segments: tuple[SegmentRange, ...]


@dataclass(slots=True)
class _Layouts:
    """The current layouts of streams; ``rolled`` has the current layouts that are not the active ones."""

    turn: Turn
    rolled: dict[str, _Current] = field(default_factory=dict)

    def of(self, stream: str) -> _Current:
        found = self.rolled.get(stream)
        if found is not None:
            return found
        row = self.turn.state.streams[stream]
        return _Current(row.stream_epoch, row.reference_epoch, row.segments)

    def switch(
        self, stream: str, reference_epoch: int, segments: tuple[SegmentRange, ...],
        starts: dict[int, int], at: int,
    ) -> None:  # fmt: skip
        """Seal the current segments and open these instead.

        ``starts``: partition -> first offset. ``at``: the timestamp of the EPOCH record.
        """
        before = self.of(stream)
        epoch = before.stream_epoch + 1
        self.turn.round.history.append(
            NewEpoch(stream, epoch, reference_epoch, at, segments, before.segments, starts)
        )
        self.rolled[stream] = _Current(epoch, reference_epoch, segments)

    def close(self, streams: Collection[str] | None = None) -> None:
        """Make duplicates of the active layouts current again, of these ``streams`` (None: of all)."""
        turn = self.turn
        for stream, current in list(self.rolled.items()):
            if streams is not None and stream not in streams:
                continue
            row = turn.state.streams[stream]
            segments = duplicate_active(row, current.stream_epoch + 1)
            at = holding.epoch_time(turn, stream, turn.next_timestamp())
            self.switch(stream, row.reference_epoch, segments, {}, at)
            epoch = self.rolled[stream].stream_epoch
            turn.put(k.stream_key(stream), replace(row, stream_epoch=epoch, segments=segments))
            turn.merging.may_roll_ms.put(stream, turn.now_ms + turn.settings.collate_ms)
            turn.rolled.add(stream)
            del self.rolled[stream]


def merge_decided(turn: Turn, txn_ids: Iterable[bytes]) -> None:
    """Merge as many of these decided transactions as fit into this round, and begin staged merges of big ones."""
    layouts = _Layouts(turn)
    merged = 0
    limit = turn.merge_limit
    plans = [plan for txn_id in txn_ids if (plan := _ready(turn, txn_id)) is not None]
    # Regular commits come first, so rolling commits have a share of their own: otherwise they could starve.
    share = turn.round_bytes
    if any(_rolled(turn, plan) for plan in plans):
        share //= 2
    # Half of the round is for merges, however many plain writes there are.
    sizes = {False: min(turn.plain_bytes, share // 2), True: 0}  # by whether they roll
    # With a limit, the oldest commits come first: newer commits must not delay them again and again.
    order = _order if limit is None else _oldest_first
    ordered = sorted(plans, key=lambda plan: order(turn, plan))
    if turn.holds.in_use:
        ordered.sort(key=lambda plan: holding.place_of(turn, plan.txn_id))
    for plan in ordered:
        if limit is not None and merged >= limit:
            break
        rolls = bool(_rolled(turn, plan))
        txn, since = turn.state.open.get(plan.txn_id), turn.work
        if not conflicts.ready_to_merge(turn, plan.txn_id):
            _wait(turn, plan.txn_id, RECHECK_MS, "validation")
        elif _waits_for_locks(turn, plan.txn_id, _breaks_frozen(turn, plan)):
            pass
        elif turn.holds.in_use and (on := holding.blocks(turn, plan.txn_id)) is not None:
            _wait(turn, plan.txn_id, RECHECK_MS, "hold", on)
        elif sizes[rolls] < share and _merge(turn, layouts, plan):
            merged += 1
            sizes[rolls] += plan.state if plan.staged else plan.size
            turn.charge(work.of_items(plan.runs))
        if txn is not None:  # None: an earlier merge of this round broke its locks
            turn.owe(txn.row.owner, since)
    if limit is not None:
        turn.merge_limit = limit - merged
    layouts.close()


def _breaks_frozen(turn: Turn, plan: Plan) -> frozen.Refused | None:
    return None if plan.staged else frozen.waits(turn, plan.txn_id, lambda: _written(turn, plan))


def _waits_for_locks(turn: Turn, txn_id: bytes, refused: frozen.Refused | None) -> bool:
    """Whether frozen locks keep a commit from being merged now. ``refused``: why, or None.

    If it has waited for a prepared transaction for too long, the commit is aborted.
    """
    may_abort = turn.open(txn_id).row.state == "COMMIT_IN_PROGRESS"
    if isinstance(refused, ReservedByPrepared) and may_abort:
        answer_pending(turn, txn_id, refuse(refused))
        abort_txn(turn, txn_id, str(refused))
    elif refused is not None:
        _wait(turn, txn_id, RECHECK_MS, "locks")
    return refused is not None


def _written(turn: Turn, plan: Plan) -> Mapping[str, Write]:
    """The writes of a transaction, by table."""
    if plan.kept is not None:
        return frozen.writes_kept(turn, plan.kept)
    return {
        target.stream: conflicts.written(
            turn,
            StreamCommit(plan.txn_id, target.stream, 0, 0, ()),
            [(source.partition, source.runs) for source in target.sources],
        )
        for target in plan.targets
        if target.stream in turn.state.tables and target.sources
    }


def plan_of(
    turn: Turn, txn_id: bytes, txn: OpenTxn, streams: Collection[str] | None = None
) -> Plan:
    """The plan of a transaction: the runs in the index that its receipts take, of these ``streams`` alone."""
    extents = extents_by_place(txn.pending.writers if txn.pending is not None else ())
    targets = []
    records = size = state = 0
    for stream, epoch in sorted(txn.participants.items()):
        if streams is not None and stream not in streams:
            continue
        sources = []
        for segment in turn.state.layout(stream, epoch):
            here = extents.get((stream, segment.partition))
            if not here:
                continue
            runs = taken_runs(turn.index.runs(txn_id, stream, segment.partition), here)
            if runs:
                number = segment_number(segment.segment_id)
                sources.append(Source(number, segment.partition, tuple(runs)))
                records += sum(run.records for run in runs)
                size += sum(run.batch_size for run in runs)
                state += sum(run.batch_size for run in runs) if is_state(stream) else 0
        targets.append(Target(stream, epoch, tuple(sources)))
    return Plan(txn_id, tuple(targets), records, size, bool(txn.staged_merges), state)


def _ready(turn: Turn, txn_id: bytes) -> Plan | None:
    """The plan of a transaction that can be merged in this round; None if it waits, with its reason noted."""
    wait = turn.merging.waits.get(txn_id, None)
    # A held commit may be free since an earlier step of this turn.
    if (
        wait is not None
        and wait.until_ms > turn.now_ms
        and (wait.why != "hold" or holding.waits_still(turn, txn_id))
    ):
        return None
    txn = turn.open(txn_id)
    stream = unusable(turn.state, turn.memory.waiting, txn)
    if stream:
        _wait(turn, txn_id, WAITING_MS, "stream", stream)
        return None
    left_out = leave_out_lost(turn, txn_id, txn)
    if not (left_out and all(staged.done for staged in txn.staged_merges.values())):
        _wait(turn, txn_id, RECHECK_MS, "staging")
        return None
    # Checked before planning, which takes time for a big transaction.
    if wait is not None and wait.why == "others" and not _has_room(turn, txn_id, _places(txn)):
        return None
    if _waits_for_locks(turn, txn_id, frozen.still_waits(turn, txn_id)):
        return None
    # Only a transaction over several control partitions has a row with events that is merged here.
    elsewhere = txn.promised is not None or txn.votes_row is not None
    kept = shot_of(turn.state, txn_id) if elsewhere else None
    if kept is not None:
        size = len(CommandEvents.of(kept.events).payload)
        return Plan(txn_id, (), len(kept.events), size, False, 0, kept)
    plan = plan_of(turn, txn_id, txn)
    if plan.records != txn.row.committed:
        # Never merge less or more than was decided: abort the transaction while that is legal, or let an operator
        # force its end.
        if txn.row.state == "FINALIZE_IN_PROGRESS":
            _wait(turn, txn_id, TORN_MS, "torn")
            return None
        reason = f"its journals show {plan.records:,} of the {txn.row.committed:,} records decided"
        abort_txn(turn, txn_id, reason)
        return None
    if plan.staged and not _is_whole(txn, plan):
        _wait(turn, txn_id, TORN_MS, "torn")
        return None
    if plan.size > turn.settings.chunk_bytes and plan.state < plan.size and not plan.staged:
        _begin_staged_merge(turn, plan)
        return None
    if txn.lacks_time:
        _wait(turn, txn_id, WAITING_MS, "timestamp")
        turn.ready.append(txn_id)
        return None
    rolls = [(turn.merging.may_roll_ms.get(s, 0), s) for s, _ in _rolled(turn, plan)]
    until, stream = max(rolls, default=(0, ""))
    # One limit for all its streams: otherwise one of the streams could always have rolled a moment ago.
    since = wait.since_ms if wait is not None and wait.why == "rolls" else turn.now_ms
    until = min(until, since + turn.settings.collate_ms)
    # A commit that has a timestamp holds its streams, so it does not wait for others to roll with. But in one round
    # a stream rolls once: each time takes an epoch more.
    rolls_again = not turn.rolled.isdisjoint([s for _, s in rolls])
    if rolls_again or (until > turn.now_ms and not txn.row.commit_timestamp):
        ms = 1 if txn.row.commit_timestamp else until - turn.now_ms
        _wait(turn, txn_id, max(1, ms), "rolls", stream)
        return None
    return plan


def _is_whole(txn: OpenTxn, plan: Plan) -> bool:
    """Whether each segment has as many staged events as the index shows now."""
    due = {
        (target.stream, source.number): sum(run.records for run in source.runs)
        for target in plan.travels
        for source in target.sources
    }
    return due == {place: staged.count for place, staged in txn.staged_merges.items()}


def _wait(turn: Turn, txn_id: bytes, ms: int, why: Why, on: str = "") -> None:
    turn.merging.wait(txn_id, why, turn.now_ms, ms, on)


def _rolled(turn: Turn, plan: Plan) -> tuple[tuple[str, int], ...]:
    """(stream, reference epoch) of every stream in which this is a rolling commit."""
    return tuple(
        (target.stream, target.reference_epoch)
        for target in plan.travels
        if target.sources
        and (
            plan.staged
            or target.reference_epoch != turn.state.streams[target.stream].reference_epoch
        )
    )


def _order(turn: Turn, plan: Plan) -> tuple[object, ...]:
    """The sort key: regular commits, then rolling ones by the duplicate that they can share, staged ones first."""
    return _rolled(turn, plan), not plan.staged, plan.txn_id


def _oldest_first(_: Turn, plan: Plan) -> tuple[object, ...]:
    return (plan.txn_id,)


def _merge(turn: Turn, layouts: _Layouts, plan: Plan) -> bool:
    """Merge one transaction; False if there are too few partitions for its duplicate epoch."""
    if plan.kept is not None:
        return _merge_kept(turn, layouts, plan.txn_id, plan.kept)
    switches = _switches(turn, layouts, plan)
    if switches is None:
        return False
    txn = turn.open(plan.txn_id)
    at = txn.row.commit_timestamp
    if (
        not at and turn.holds.in_use
    ):  # the very timestamp with which `holding.blocks` has checked the merge
        at = holding.taken(turn, plan.txn_id) or turn.next_timestamp()
    for target, places, starts in switches:
        epoch = layouts.of(target.stream).stream_epoch + 1
        origin = turn.state.layout(target.stream, target.reference_epoch)
        duplicate = seg.duplicate(origin, epoch, places)
        opened = at or turn.next_timestamp()
        layouts.switch(target.stream, target.reference_epoch, duplicate, starts, opened)
    timestamp = at or turn.next_timestamp()
    for target in plan.targets:
        current = layouts.of(target.stream)
        parts = tuple(_part(txn, plan, current, target.stream, source) for source in target.sources)
        if parts:
            conflicts.merge(
                turn,
                StreamCommit(plan.txn_id, target.stream, current.stream_epoch, timestamp, parts),
                [(source.partition, source.runs) for source in target.sources],
            )
        op = JournalOp("FINALIZE_COMMIT", plan.txn_id, target.reference_epoch, timestamp)
        journal_op(turn, target.stream, op)
    _merged(turn, txn, turn.move(txn.row, "begin_finalize", commit_timestamp=timestamp))
    return True


def _merge_kept(turn: Turn, layouts: _Layouts, txn_id: bytes, kept: r.PreparedRow) -> bool:
    """Merge the events of a one-shot over several control partitions; False if it has to wait for a stream.

    They are placed by key, so their segments are those of the active layouts.
    """
    txn = turn.open(txn_id)
    layouts.close(txn.participants)
    try:
        row = one_shot.merge_kept(turn, txn, kept)
    except (NotReady, StreamLost):
        _wait(turn, txn_id, WAITING_MS, "stream", min(txn.participants))
        return False
    _merged(turn, txn, row)
    return True


def _merged(turn: Turn, txn: OpenTxn, row: r.TxnRow) -> None:
    """Log that a transaction is merged here, and answer. ``row``: with its commit timestamp."""
    if txn.votes_row is not None:
        _own_merged(turn, txn, row, txn.votes_row)
        return
    row = turn.move(row, "finalize_commit", finished_ms=turn.wall_ms, rejected=turn.rejected(row))
    positions.merged(turn, txn, row)
    waiting = end_pending(turn, row.txn_id, None)
    finish(turn, row)
    if waiting:
        outcome = turn.outcome(row)
        for to in waiting:
            turn.reply(to, outcome)


def _own_merged(turn: Turn, txn: OpenTxn, row: r.TxnRow, votes: r.VotesRow) -> None:
    """Log that the coordinator's own part is merged. COMMITTED is logged when all participants are done (O2)."""
    turn.put(k.txn_key(row.txn_id), row)
    turn.put(k.votes_key(row.txn_id), votes._replace(own_merged=True))
    drop_locks(turn, row.txn_id)
    positions.merged(turn, txn, row)
    turn.merging.waits.put(row.txn_id, None)
    holding.put_entry(turn, row.txn_id)


def _switches(
    turn: Turn, layouts: _Layouts, plan: Plan
) -> list[tuple[Target, dict[int, int], dict[int, int]]] | None:
    """(target, segment number -> partition, partition -> first offset) of each duplicate epoch to open.

    None if a stream has too few partitions.
    """
    txn = turn.open(plan.txn_id)
    found = []
    for target in plan.travels:
        if not target.sources:
            continue
        if layouts.of(target.stream).reference_epoch == target.reference_epoch and not plan.staged:
            continue
        mine = {n: c for (stream, n), c in txn.staged_merges.items() if stream == target.stream}
        fixed = {number: staged.partition for number, staged in mine.items()}
        others = turn.state.reserved(target.stream) - set(fixed.values())
        others |= turn.state.retired(target.stream)
        origin = turn.state.layout(target.stream, target.reference_epoch)
        partitions = turn.state.streams[target.stream].partitions
        places = seg.place(origin, fixed, others, partitions)
        if places is None:
            want_partitions(turn, target.stream, len(origin) + len(others) + len(fixed))
            _wait(turn, plan.txn_id, RECHECK_MS, "partitions", target.stream)
            return None
        starts = {staged.partition: staged.first for staged in mine.values()}
        found.append((target, places, starts))
    return found


def _part(txn: OpenTxn, plan: Plan, current: _Current, stream: str, source: Source) -> Part:
    written = TxnSegment(
        source.number,
        sealed=txn.pending is not None and txn.pending.decided,
        whole=plan.records == txn.row.committed,
    )
    into = seg.merge(current.segments, written)
    staged = txn.staged_merges.get((stream, source.number))
    if staged is None:
        return Part(into.segment_id, into.partition, runs=source.runs, source=source.partition)
    check(
        staged.partition == into.partition,
        "a staged segment is not on the partition that its epoch names",
    )
    landed = Landed(staged.first, staged.end, staged.count)
    return Part(into.segment_id, into.partition, source=source.partition, staged=landed)


# -- staged merges -------------------------------------------------------------------------------------


def _begin_staged_merge(turn: Turn, plan: Plan) -> None:
    """Log the partitions that a staged merge reserves, if there are enough and its locks may be frozen.

    From then on no abort is possible.
    """
    rows = []
    if not _has_room(turn, plan.txn_id, {t.stream: len(t.sources) for t in plan.travels}):
        return
    for target in plan.travels:
        idle = idle_partitions(turn, turn.state.streams[target.stream])
        rows += [
            StagedMergeRow(
                plan.txn_id, target.stream, source.number, source.partition, place,
                cursor=0, first=-1, end=-1, count=0, done=False,
            )
            for source, place in zip(target.sources, idle, strict=False)
        ]  # fmt: skip
    if not conflicts.ready_to_merge(turn, plan.txn_id):
        _wait(turn, plan.txn_id, RECHECK_MS, "locks")
        return
    refused = frozen.may_stage(turn, plan.txn_id, lambda: _written(turn, plan))
    if _waits_for_locks(turn, plan.txn_id, refused):
        return
    row = turn.move(turn.open(plan.txn_id).row, "begin_finalize")
    turn.put(k.txn_key(plan.txn_id), row)
    answer_decided(turn, row)
    for each in rows:
        turn.put(k.staged_merge_key(plan.txn_id, each.stream, each.number), each)
    turn.round.reserved += [target.stream for target in plan.travels]
    _wait(turn, plan.txn_id, 0, "staging")


def _places(txn: OpenTxn) -> Counter[str]:
    """For each stream the number of journal partitions to which the commit wrote, at least those of its plan."""
    return Counter(stream for _, stream, _ in txn.due if not is_state(stream))


def _has_room(turn: Turn, txn_id: bytes, places: Mapping[str, int]) -> bool:
    """Whether there are enough idle partitions to stage a transaction. If not, it waits for partitions that
    other staged merges release soon.

    A stuck merge may keep its partitions for hours, so then new ones are added. The oldest waiting transaction
    comes first. A part whose end was forced has its timestamp already, and waits for no partitions: the merges that
    have them may be later, and wait for it.
    """
    waits = not turn.open(txn_id).row.commit_timestamp
    for stream, count in places.items():
        row = turn.state.streams[stream]
        lacking = count - len(idle_partitions(turn, row))
        before = any(
            other < txn_id and (its.why, its.on) == ("others", stream)
            for other, its in turn.merging.waits.as_dict().items()
        )
        if waits and (before or (lacking > 0 and _lets_go(turn, stream))):
            _wait(turn, txn_id, RECHECK_MS, "others", stream)
            return False
        if lacking > 0:
            want_partitions(turn, stream, row.partitions + lacking)
            refused_ms = turn.merging.may_grow_ms.get(stream, 0) - turn.now_ms
            _wait(turn, txn_id, max(RECHECK_MS, refused_ms), "partitions", stream)
            return False
    return True


def _lets_go(turn: Turn, stream: str) -> bool:
    """Whether a staged merge in a stream makes progress, so that its partitions will soon be idle again.

    One that waits for other control partitions does not: there, its part may wait for this transaction's merge.
    """
    for txn_id in turn.state.committing:
        if any(name == stream for name, _ in turn.open(txn_id).staged_merges):
            wait = turn.wait_of(txn_id)
            if wait is None or wait.why not in _KEEPS:
                return True
    return False


def runs_to_stage(
    index: JournalIndex,
    staged: StagedMergeRow,
    extents: Mapping[tuple[str, int], Mapping[int, Extent]],
) -> list[StoredRun]:
    """The runs of a staged segment that are not copied yet, in the order of copying.

    ``extents``: of the transaction's commit, as `extents_by_place`.
    """
    here = extents.get((staged.stream, staged.source), {})
    runs = taken_runs(index.runs(staged.txn_id, staged.stream, staged.source), here)
    return [run for run in runs if run.first >= staged.cursor]


# -- plain writes ----------------------------------------------------------------------------------


def commit_plain(turn: Turn) -> None:
    """Commit as many waiting plain writes as fit into the round, in one commit for each stream.

    Call it before `merge_decided`, or after it has ended: then the current layouts are the active ones.
    """
    if turn.plain_waits:
        return
    waiting = [
        place
        for place in turn.index.plain_waiting(turn.state)
        if turn.usable(place[0]) and place[0] not in turn.state.locked
    ]
    times: Mapping[str, int] = {}
    if waiting and turn.holds.in_use:
        times = holding.plain_times(turn, [stream for stream, _ in waiting])
        waiting = [place for place in waiting if place[0] in times]
    if not waiting:
        return
    if turn.merge_limit is not None:
        # The broker refused something: commit one run at a time to find it.
        _commit(turn, _taken(turn, waiting, 1, 1), times)
        turn.merge_limit = 0
        return
    budget = turn.round_bytes
    if turn.state.committing:
        budget //= 2
    _commit(turn, _taken(turn, waiting, budget, budget // len(waiting)), times)


def _taken(
    turn: Turn, waiting: Iterable[tuple[str, int]], budget: int, share: int
) -> dict[tuple[str, int], list[StoredRun]]:
    """The next runs of these journal partitions. ``budget``: bytes in all; ``share``: for each partition."""
    taken: dict[tuple[str, int], list[StoredRun]] = {}
    for place in waiting:
        if turn.plain_bytes >= budget:
            break
        if runs := _take(turn, place, share):
            taken[place] = runs
    return taken


def _take(turn: Turn, place: tuple[str, int], size: int) -> list[StoredRun]:
    """The next runs of a journal partition, about ``size`` bytes, but at least one.

    They end before a run that breaks a frozen lock; if that is the first run, the result is empty.
    """
    runs: list[StoredRun] = []
    taken = 0
    for run in turn.index.plain_runs(turn.state, *place):
        if place[0] in turn.state.tables and frozen.waits(
            turn,
            place,
            lambda run=run: _written_plainly(turn, place, run),  # type: ignore[misc]
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


def _written_plainly(turn: Turn, place: tuple[str, int], run: StoredRun) -> dict[str, Write]:
    stream, partition = place
    step = StreamCommit(NO_TXN, stream, 0, 0, ())
    return {stream: conflicts.written(turn, step, [(partition, (run,))])}


def _commit(
    turn: Turn, taken: dict[tuple[str, int], list[StoredRun]], times: Mapping[str, int]
) -> None:
    """Put these runs into the round. ``times``: by stream, the timestamps that differ from a new one."""
    by_stream: dict[str, list[PlainWrites]] = {}
    for (stream, partition), runs in taken.items():
        by_stream.setdefault(stream, []).append(PlainWrites(partition, tuple(runs)))
    for stream, writes in by_stream.items():
        row = turn.state.streams[stream]
        conflicts.merge(
            turn,
            StreamCommit(
                NO_TXN,
                stream,
                row.stream_epoch,
                times.get(stream) or turn.next_timestamp(),
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

    Nothing waits for them, and later writes must not be blocked. Returns (stream, journal partition, runs).
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
    """Log that these runs are committed or skipped, and drop them from the index. ``refused``: skipped records."""
    refused += turn.state.plain_refused.get((stream, partition), 0)
    row = PlainRow(stream, partition, runs[-1].end, refused)
    turn.put(k.plain_key(stream, partition), row)
    for run in runs:
        key = stored_run_key(stream, partition, NO_TXN, run)
        turn.state.keep(key, None)
        if stream in turn.state.tables:
            turn.state.keep(digest_key(key), None)
