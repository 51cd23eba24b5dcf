"""Planted bugs in scaling, rolling commits and merges carried aside; see `mutants`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

from anabranch.core import decide, decide_merge, decide_scale, decide_txn, plan
from anabranch.core import rows as k
from anabranch.core import segments as seg
from anabranch.core.ids import segment_number
from anabranch.core.state import State
from anabranch.core.turn import Turn
from anabranch.ports import Producer
from anabranch.processors import carrier, controller, leadership
from anabranch.schemas import records
from anabranch.schemas.records import CarryRow, EpochRecord, SegmentRange

Bug = tuple[str, Callable[[], AbstractContextManager[object]], bool]


def _no_way_back() -> AbstractContextManager[object]:
    """The active layout is not duplicated at the end of a round."""

    def close(self: decide_merge._Layouts) -> None:
        for stream, current in self.rolled.items():
            row = self.turn.state.streams[stream]
            self.turn.put(k.stream_key(stream), replace(row, stream_epoch=current.stream_epoch))
        self.rolled.clear()

    return patch.object(decide_merge._Layouts, "close", close)


@contextmanager
def _by_partition() -> Iterator[None]:
    """No duplicate epochs: a transaction goes to whatever lies on its partitions now."""

    def switches(turn: Turn, layouts: Any, given: decide_merge.Plan) -> list[Any] | None:
        return real(turn, layouts, given) if given.carried else []

    def part(
        txn: Any, given: decide_merge.Plan, current: Any, stream: str, source: decide_merge.Source
    ) -> plan.Part:
        for into in current.segments:
            if into.partition == source.partition and (stream, source.number) not in txn.carries:
                return plan.Part(
                    into.segment_id, into.partition, runs=source.runs, source=source.partition
                )
        return real_part(txn, given, current, stream, source)

    real, real_part = decide_merge._switches, decide_merge._part
    with (
        patch.object(decide_merge, "_switches", switches),
        patch.object(decide_merge, "_part", part),
    ):
        yield


def _one_of_many() -> AbstractContextManager[object]:
    """Of the transactions that share a duplicate epoch only the first one is merged."""
    real = decide_merge._merge

    def merge(turn: Turn, layouts: Any, given: decide_merge.Plan) -> bool:
        shared = [
            target
            for target in given.targets
            if target.stream in layouts.rolled
            and layouts.rolled[target.stream].reference_epoch == target.reference_epoch
        ]
        if shared and not given.carried:
            targets = tuple(t._replace(sources=()) for t in given.targets)
            given = replace(given, targets=targets)
        return real(turn, layouts, given)

    return patch.object(decide_merge, "_merge", merge)


def _behind_the_marker() -> AbstractContextManager[object]:
    """A sealed segment's end counts the marker behind its data."""
    real = plan._epoch_record

    def epoch_record(*given: Any) -> EpochRecord:
        made = real(*given)
        ends = tuple(replace(end, end_offset=end.end_offset + 1) for end in made.sealed)
        return replace(made, sealed=ends)

    return patch.object(plan, "_epoch_record", epoch_record)


def _nothing_reserved() -> AbstractContextManager[object]:
    """The partitions to which a merge is being carried count as idle."""
    return patch.object(State, "reserved", lambda *_: set())


def _cursor(change: Callable[[int], int]) -> AbstractContextManager[object]:
    """Carriers log another cursor than is true; so only a successor goes wrong."""

    def changed(row: CarryRow, **changes: Any) -> CarryRow:
        return replace(row, **changes | {"cursor": change(changes["cursor"])})

    return patch.object(carrier, "replace", changed)


def _carry_again() -> AbstractContextManager[object]:
    """The logged cursor stays at the beginning: a successor carries what is there already."""
    return _cursor(lambda _: 0)


def _skip_a_run() -> AbstractContextManager[object]:
    """The logged cursor is some records ahead: a successor leaves them out."""
    return _cursor(lambda cursor: cursor + 3)


class _Late:
    """A producer that is initialised when it is first used."""

    def __init__(self, make: Callable[[], Producer]) -> None:
        self._make = make
        self._made: Producer | None = None

    def __getattr__(self, name: str) -> Any:
        if self._made is None:
            self._made = self._make()
        return getattr(self._made, name)

    def close(self) -> None:
        if self._made is not None:
            self._made.close()


@contextmanager
def _late_carriers() -> Iterator[None]:
    """The carriers' transactional ids are initialised when they are first needed."""
    real = leadership.take_lead

    class _Log:
        def __init__(self, log: Any) -> None:
            self._log = log

        def __getattr__(self, name: str) -> Any:
            return getattr(self._log, name)

        def producer(self, id_: str, *, timeout: float) -> Any:
            make = partial(self._log.producer, id_, timeout=timeout)
            return _Late(make) if ".carrier." in id_ else make()

    def take_lead(log: Any, *given: Any, **more: Any) -> leadership.Lease:
        return real(_Log(log), *given, **more)

    with patch.object(controller, "take_lead", take_lead):
        yield


@contextmanager
def _forget_layouts() -> Iterator[None]:
    """A former layout is forgotten though transactions are open in it."""

    def drop_epoch(turn: Turn, stream: str, epoch: int) -> None:
        if epoch != turn.state.streams[stream].reference_epoch:
            turn.put(k.epoch_key(stream, epoch), None)

    with ExitStack() as stack:
        for module in (decide_txn, decide_scale):
            stack.enter_context(patch.object(module, "drop_epoch", drop_epoch))
        yield


def _keep_layouts() -> AbstractContextManager[object]:
    """Layouts are never forgotten when their last transaction ends."""
    return patch.object(decide_txn, "drop_epoch", lambda *_: None)


def _answer_active() -> AbstractContextManager[object]:
    """A second touch is answered with the active layout, not with the one that is pinned."""
    real = decide_txn.touch

    def touch(turn: Turn, command: Any, to: Any) -> None:
        def active(_: State, stream: str, __: int) -> Sequence[SegmentRange]:
            return turn.state.streams[stream].segments

        with patch.object(State, "layout", active):
            real(turn, command, to)

    return _decision("Touch", touch)


def _pin_the_epoch() -> AbstractContextManager[object]:
    """A transaction pins the active epoch, also where that is a duplicate."""
    real = decide_txn.touch

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


def _decision(command: str, decision: Callable[..., None]) -> AbstractContextManager[object]:
    return patch.dict(decide._DECISIONS, {getattr(records, command): decision})


def _position_moves_on() -> AbstractContextManager[object]:
    """The table's position moves over rows of carriers that the leader has not heard of."""
    return patch.object(controller.Controller, "_is_carrying", lambda _: False)


def _numbers_again() -> AbstractContextManager[object]:
    """New segments take the lowest free numbers."""
    real = seg.scale

    def scale(segments: Any, seal: Any, ranges: Any, **more: Any) -> Any:
        kept = {segment_number(s.segment_id) for s in segments} - set(seal)
        more["next_number"] = max(kept, default=-1) + 1
        return real(segments, seal, ranges, **more)

    return patch.object(seg, "scale", scale)


def _begin_unread() -> AbstractContextManager[object]:
    """A new leader carries on before it has read the journals again."""
    real = carrier.Carriers.sync

    class _All:
        def __init__(self, index: Any) -> None:
            self._index = index

        def __getattr__(self, name: str) -> Any:
            return getattr(self._index, name)

        def covers(self, _: object) -> bool:
            return True

    def sync(self: Any, state: Any, index: Any, wall_ms: int) -> None:
        real(self, state, _All(index), wall_ms)  # type: ignore[arg-type]

    return patch.object(carrier.Carriers, "sync", sync)


EPOCH_BUGS: tuple[Bug, ...] = (
    ("the active epoch is not duplicated", _no_way_back, True),
    ("merged by partition, not by number", _by_partition, True),
    ("one of many collated transactions is merged", _one_of_many, True),
    ("a sealed end counts the marker", _behind_the_marker, True),
    ("carried partitions are not reserved", _nothing_reserved, False),
    ("a chunk is carried again", _carry_again, False),
    ("a run is left out of what is carried", _skip_a_run, False),
    ("carriers are fenced late", _late_carriers, False),
    ("a former layout is forgotten too early", _forget_layouts, True),
    ("former layouts are kept", _keep_layouts, True),
    ("a touch is answered with the active layout", _answer_active, True),
    ("a duplicate is pinned as reference epoch", _pin_the_epoch, True),
    ("the table's position moves on while carrying", _position_moves_on, False),
    ("segment numbers are used again", _numbers_again, True),
    ("carried on before the journals are read", _begin_unread, False),
)
