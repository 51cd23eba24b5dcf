"""Planted bugs in merges, scaling, rolling commits and staged merges; see `catalogue`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from anabranch.controller import carrier, controller
from anabranch.core import history_records
from anabranch.core import history_records as plan
from anabranch.core import rows as k
from anabranch.core import segments as seg
from anabranch.core.decisions import decide, transactions
from anabranch.core.decisions import merge as decide_merge
from anabranch.core.decisions import scale as decide_scale
from anabranch.core.decisions.turn import Turn
from anabranch.core.round import NewEpoch, Part, StreamCommit
from anabranch.core.state import State
from anabranch.protocol.ids import segment_number
from anabranch.protocol.schemas import codec, records
from anabranch.protocol.schemas.records import (
    SegmentRange,
    StagedMergeRow,
)
from anabranch.protocol.tokens import id_named
from tests.mutants.planting import Planted, instead_of, wrapping

EACH = 4  # transactions: so many are spared for one that is hit


def _is_hit(txn_id: bytes) -> bool:
    """The same ones, whoever leads."""
    return txn_id[-1] % EACH == 0


# -- merges -------------------------------------------------------------------------------------------


def _merging(change: Callable[[decide_merge.Plan], decide_merge.Plan]) -> Planted:
    """Merges of transactions that are hit follow a changed plan; the count that is checked stays."""
    real = decide_merge._merge

    def merge(turn: Turn, layouts: Any, given: decide_merge.Plan) -> bool:
        hit = _is_hit(given.txn_id) and not given.staged
        return real(turn, layouts, change(given) if hit else given)

    return patch.object(decide_merge, "_merge", merge)


def drop_a_merge() -> Planted:
    """A merge is left out, and its transaction is called committed."""
    return _merging(
        lambda given: replace(given, targets=tuple(t._replace(sources=()) for t in given.targets))
    )


def drop_a_part() -> Planted:
    """Of a transaction that wrote to several segments one is not merged."""

    def without_last(given: decide_merge.Plan) -> decide_merge.Plan:
        targets = list(given.targets)
        if sum(len(target.sources) for target in targets) < 2:
            return given
        at = max(i for i, target in enumerate(targets) if target.sources)
        targets[at] = targets[at]._replace(sources=targets[at].sources[:-1])
        return replace(given, targets=tuple(targets))

    return _merging(without_last)


@wrapping(decide_merge, "_merge")
def merge_twice(real: Any, turn: Turn, layouts: Any, given: decide_merge.Plan) -> Any:
    """A merge is done twice, in one round."""
    before = len(turn.round.history)
    done = real(turn, layouts, given)
    if _is_hit(given.txn_id) and not given.staged:
        for step in turn.round.history[before:]:
            if isinstance(step, StreamCommit):
                turn.round.history.append(step._replace(timestamp=turn.next_timestamp()))
    return done


def merge_out_of_order() -> Planted:
    """The runs of a merge are taken in the wrong order."""

    def backwards(given: decide_merge.Plan) -> decide_merge.Plan:
        targets = [
            t._replace(sources=tuple(s._replace(runs=s.runs[::-1]) for s in t.sources))
            for t in given.targets
        ]
        return replace(given, targets=tuple(targets))

    return _merging(backwards)


def show_an_aborted() -> Planted:
    """What an aborted transaction wrote is merged all the same."""
    real = transactions.abort

    def abort(turn: Turn, command: Any, to: Any) -> None:
        txn_id = id_named(command.token)
        txn = turn.state.open.get(txn_id)
        if txn is not None and txn.row.state == "OPEN":
            for stream, epoch in txn.participants.items():
                _show(turn, txn_id, stream, epoch)
        real(turn, command, to)

    return _decision("Abort", abort)


def _show(turn: Turn, txn_id: bytes, stream: str, epoch: int) -> None:
    row = turn.state.streams[stream]
    active = {segment_number(s.segment_id): s for s in row.segments}
    parts = []
    for segment in turn.state.layout(stream, epoch):
        runs = sorted(turn.index.runs(txn_id, stream, segment.partition), key=lambda r: r.first)
        into = active.get(segment_number(segment.segment_id))
        if runs and into is not None:
            source = segment.partition
            parts.append(Part(into.segment_id, into.partition, tuple(runs), source=source))
    if parts:
        step = StreamCommit(txn_id, stream, row.stream_epoch, turn.next_timestamp(), tuple(parts))
        turn.round.history.append(step)


@wrapping(plan, "_commit_record")
def cut_short(real: Any, *given: Any) -> Any:
    """A COMMIT record's vector ends one event early on a partition that the commit wrote to."""
    made = real(*given)
    if not made.segments:
        return made
    mine = made.segments[-1].partition
    vector = [
        at._replace(offset=at.offset - 1) if at.partition == mine else at for at in made.vector
    ]
    return made._replace(vector=tuple(vector))


@wrapping(plan, "_commit_record")
def cut_lacks_a_partition(real: Any, index: int, commit: Any, tail: Any, *rest: Any) -> Any:
    """The vector does not follow a commit to all of its partitions: the last one stays where it was."""
    before = dict(tail.vector)
    made = real(index, commit, tail, *rest)
    if len(made.segments) > 1:
        last = made.segments[-1].partition
        tail.vector[last] = before.get(last, 0)
        if made.vector:
            made = made._replace(vector=history_records.positions(tail.vector))
    return made


# -- epochs -------------------------------------------------------------------------------------------


@wrapping(plan, "_epoch_record")
def sealed_too_early(real: Any, step: NewEpoch, tail: Any, *rest: Any) -> Any:
    """A sealed segment ends before its last event."""
    made = real(step, tail, *rest)
    ends = tuple(replace(end, end_offset=max(0, end.end_offset - 1)) for end in made.sealed)
    return replace(made, sealed=ends)


@instead_of(decide_merge._Layouts, "close")
def no_way_back(self: decide_merge._Layouts) -> None:
    """The active layout is not duplicated at the end of a round."""
    for stream, current in self.rolled.items():
        row = self.turn.state.streams[stream]
        self.turn.put(k.stream_key(stream), replace(row, stream_epoch=current.stream_epoch))
    self.rolled.clear()


@contextmanager
def by_partition() -> Iterator[None]:
    """No duplicate epochs: a transaction goes to whatever lies on its partitions now."""

    def switches(turn: Turn, layouts: Any, given: decide_merge.Plan) -> list[Any] | None:
        return real(turn, layouts, given) if given.staged else []

    def part(
        txn: Any, given: decide_merge.Plan, current: Any, stream: str, source: decide_merge.Source
    ) -> Part:
        for into in current.segments:
            if (
                into.partition == source.partition
                and (stream, source.number) not in txn.staged_merges
            ):
                return Part(
                    into.segment_id, into.partition, runs=source.runs, source=source.partition
                )
        return real_part(txn, given, current, stream, source)

    real, real_part = decide_merge._switches, decide_merge._part
    with (
        patch.object(decide_merge, "_switches", switches),
        patch.object(decide_merge, "_part", part),
    ):
        yield


@wrapping(decide_merge, "_merge")
def one_of_many(real: Any, turn: Turn, layouts: Any, given: decide_merge.Plan) -> Any:
    """Of the transactions that share a duplicate epoch only the first one is merged."""
    shared = [
        target
        for target in given.targets
        if target.stream in layouts.rolled
        and layouts.rolled[target.stream].reference_epoch == target.reference_epoch
    ]
    if shared and not given.staged:
        targets = tuple(t._replace(sources=()) for t in given.targets)
        given = replace(given, targets=targets)
    return real(turn, layouts, given)


@wrapping(plan, "_epoch_record")
def behind_the_marker(real: Any, *given: Any) -> Any:
    """A sealed segment's end counts the marker behind its data."""
    made = real(*given)
    ends = tuple(replace(end, end_offset=end.end_offset + 1) for end in made.sealed)
    return replace(made, sealed=ends)


def nothing_reserved() -> Planted:
    """The partitions to which a merge is being carried count as idle."""
    return patch.object(State, "reserved", lambda *_: set())


def _cursor(change: Callable[[int], int]) -> Planted:
    """Carriers log another cursor than is true; so only a successor goes wrong."""

    def changed(row: StagedMergeRow, **changes: Any) -> StagedMergeRow:
        return replace(row, **changes | {"cursor": change(changes["cursor"])})

    return patch.object(carrier, "replace", changed)


def carry_again() -> Planted:
    """The logged cursor stays at the beginning: a successor carries what is there already."""
    return _cursor(lambda _: 0)


def skip_a_run() -> Planted:
    """The logged cursor is far ahead: a successor leaves out what lies between."""
    return _cursor(lambda cursor: cursor + 200)


def carry_row_late() -> Planted:
    """What a chunk logs is where its carrier stood before it: a successor carries that chunk again."""
    real_chunk = carrier.Carrier.chunk
    former: dict[carrier.Key, StagedMergeRow] = {}

    def chunk(self: carrier.Carrier, job: carrier.Job, wall_ms: int) -> StagedMergeRow:
        former[job.key] = job.row
        return real_chunk(self, job, wall_ms)

    def encode(row: StagedMergeRow) -> bytes:
        before = former.get((row.txn_id, row.stream, row.number), row)
        return codec.encode(row if row.done else before)

    @contextmanager
    def planted() -> Iterator[None]:
        with patch.object(carrier.Carrier, "chunk", chunk), patch.object(carrier, "encode", encode):
            yield

    return planted()


@contextmanager
def forget_layouts() -> Iterator[None]:
    """A former layout is forgotten though transactions are open in it."""

    def drop_epoch(turn: Turn, stream: str, epoch: int) -> None:
        if epoch != turn.state.streams[stream].reference_epoch:
            turn.put(k.epoch_key(stream, epoch), None)

    with ExitStack() as stack:
        for module in (transactions, decide_scale):
            stack.enter_context(patch.object(module, "drop_epoch", drop_epoch))
        yield


def keep_layouts() -> Planted:
    """Layouts are never forgotten when their last transaction ends."""
    return patch.object(transactions, "drop_epoch", lambda *_: None)


def answer_active() -> Planted:
    """A second touch is answered with the active layout, not with the one that is pinned."""
    real = transactions.touch

    def touch(turn: Turn, command: Any, to: Any) -> None:
        def active(_: State, stream: str, __: int) -> Sequence[SegmentRange]:
            return turn.state.streams[stream].segments

        with patch.object(State, "layout", active):
            real(turn, command, to)

    return _decision("Touch", touch)


def pin_the_epoch() -> Planted:
    """A transaction pins the active epoch, also where that is a duplicate."""
    real = transactions.touch

    def touch(turn: Turn, command: Any, to: Any) -> None:
        row = turn.state.streams.get(command.stream)
        if row is not None:
            turn.state.streams[command.stream] = replace(row, reference_epoch=row.stream_epoch)
        try:
            real(turn, command, to)
        finally:
            if row is not None:
                turn.state.streams[command.stream] = row

    return _decision("Touch", touch)


def _decision(command: str, decision: Callable[..., None]) -> Planted:
    return patch.dict(decide._DECISIONS, {getattr(records, command): decision})


def position_moves_on() -> Planted:
    """The table's position moves over rows of carriers that the leader has not heard of."""
    return patch.object(controller, "is_staging", lambda _: False)


@wrapping(seg, "scale")
def numbers_again(real: Any, segments: Any, seal: Any, ranges: Any, **more: Any) -> Any:
    """New segments take the lowest free numbers."""
    kept = {segment_number(s.segment_id) for s in segments} - set(seal)
    more["next_number"] = max(kept, default=-1) + 1
    return real(segments, seal, ranges, **more)


def begin_unread() -> Planted:
    """A new leader carries on before it has read the journals again."""
    real = carrier.Carriers.sync

    class _All:
        def __init__(self, index: Any) -> None:
            self._index = index

        def __getattr__(self, name: str) -> Any:
            return getattr(self._index, name)

        def covers(self, _: object) -> bool:
            return True

    def sync(self: Any, state: Any, index: Any, *more: Any) -> None:
        real(self, state, _All(index), *more)  # type: ignore[arg-type]

    return patch.object(carrier.Carriers, "sync", sync)


@wrapping(decide_merge, "_ready")
def beside_trouble(real: Any, turn: Turn, txn_id: bytes) -> Any:
    """What shares a stream with a decided transaction waits as long as that one does."""
    others = [txn for other, txn in turn.state.open.items() if other < txn_id]
    held = {
        stream
        for txn in others
        if txn.row.state == "COMMIT_IN_PROGRESS" and not all(map(turn.usable, txn.participants))
        for stream in txn.participants
    }
    if held & turn.open(txn_id).participants.keys():
        turn.merging.wait(txn_id, "stream", turn.now_ms, decide_merge.WAITING_MS)
        return None
    return real(turn, txn_id)
