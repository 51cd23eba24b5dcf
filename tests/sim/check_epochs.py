"""What must hold of the epochs in each stream's history (E1 to E7 of `docs/inside/epochs.md`), by the log alone.

The checks know nothing of the product's rules: they walk the records and keep what is open, where it began and
where its data ends.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields
from itertools import groupby, pairwise

from anabranch.protocol.ids import NO_TXN, segment_epoch, segment_number
from anabranch.protocol.legal_names import is_state
from anabranch.protocol.partitioner import SPACE, position_of
from anabranch.protocol.schemas import records as r
from anabranch.topics.names import journal_topic, stream_topic
from tests.sim.check_log import hold
from tests.sim.picture import Picture, Placed, Seen
from tests.sim.world import Violation


@dataclass
class Walk:
    """A stream's history up to some record. ``ends``: partition -> end of what is told of it."""

    stream: str
    open: dict[int, r.EpochSegment] = field(default_factory=dict)
    data_ends: dict[int, int] = field(default_factory=dict)  # segment id -> end of its data so far
    ends: dict[int, int] = field(default_factory=dict)
    references: dict[int, r.EpochRecord] = field(default_factory=dict)  # made by scalings
    epoch: r.EpochRecord | None = None
    scaled: int = -1  # the newest epoch that a scaling made
    next_number: int = 0
    ahead: dict[int, int] = field(
        default_factory=dict
    )  # segment id -> start, where data was carried


@dataclass(frozen=True, slots=True)
class Epochs:
    """How often a run took the paths that this file looks at."""

    scalings: int = 0
    duplicates: int = 0
    rolling: int = 0  # commits into copies of former layouts, one for each stream
    collated: int = 0  # of these, those that came into the epoch of another
    carried: int = 0  # transactions
    chunks: int = 0
    grown: int = 0  # partitions
    cut: int = 0  # low waters
    moved: int = 0  # times that an old transaction was moved in a journal

    def __add__(self, other: Epochs) -> Epochs:
        return Epochs(
            *(getattr(self, each.name) + getattr(other, each.name) for each in fields(self))
        )

    def __str__(self) -> str:
        return ", ".join(f"{getattr(self, each.name)} {each.name}" for each in fields(self))


def epochs_of(picture: Picture) -> Epochs:
    """Count them."""
    said = {
        (stream, record.stream_epoch): record
        for stream, found in picture.history.items()
        for _, record in found
        if isinstance(record, r.EpochRecord)
    }
    epochs = list(said.values())
    copies = [e.stream_epoch for e in epochs if e.reference_epoch != e.stream_epoch]
    rolling = [count for found in picture.history.values() for count in _rolling(found)]
    return Epochs(
        scalings=len(epochs) - len(copies) - len(picture.history),
        duplicates=len(copies),
        rolling=sum(rolling),
        collated=sum(rolling) - len(rolling),
        carried=len(picture.carried),
        chunks=picture.chunks,
        cut=picture.cut,
        moved=picture.moved,
        grown=sum(row.partitions - row.segment_count for row in picture.streams.values()),
    )


def _rolling(found: list[tuple[Seen, object]]) -> list[int]:
    """How many commits came into each copy of a former layout."""
    counts: Counter[int] = Counter()
    scaled = reference = 0
    for _, record in found:
        if isinstance(record, r.EpochRecord):
            reference = record.reference_epoch
            scaled = max(scaled, reference)
        elif isinstance(record, r.CommitRecord) and reference != scaled:
            counts[record.stream_epoch] += 1
    return list(counts.values())


def check_epochs(picture: Picture) -> None:
    """Every stream's history, then what is left in the status table."""
    for stream, found in picture.history.items():
        check_stream(picture, stream, found)
    hold(not picture.left_over, f"rows of finished transactions: {picture.left_over}")


def check_stream(picture: Picture, stream: str, found: list[tuple[Seen, object]]) -> None:
    """One history, round by round (each round's records are one batch)."""
    walk = Walk(stream)
    for base, group in groupby(found, key=lambda pair: pair[0].base_offset):
        records = []
        for _, record in group:
            where = f"history of {stream}, round at {base}"
            if isinstance(record, r.EpochRecord) and _is_again(where, walk, record):
                continue
            records.append(record)
            if isinstance(record, r.EpochRecord):
                _check_epoch(f"{where}, EPOCH {record.stream_epoch}", picture, walk, record)
            elif isinstance(record, r.CommitRecord):
                _check_commit(f"{where}, {record.txn_id.hex()}", picture, walk, record)
        hold(not walk.ahead, f"history of {stream}, {base}: carried, and no COMMIT: {walk.ahead}")
        current = walk.epoch
        hold(
            current is not None and current.reference_epoch == walk.scaled,
            f"history of {stream}, {base}: the round leaves the active layout",
        )
        _check_price(f"history of {stream}, round at {base}", picture, walk, records)
    _check_row(picture, walk)


def _is_again(where: str, walk: Walk, record: r.EpochRecord) -> bool:
    """Whether the current epoch is said again; nothing of it is another one then."""
    before = walk.epoch
    if before is None or record.stream_epoch != before.stream_epoch:
        return False
    same = (record.segments, record.reference_epoch) == (before.segments, before.reference_epoch)
    hold(same and not record.sealed, f"{where}: EPOCH {record.stream_epoch} is another one now")
    return True


def _check_epoch(where: str, picture: Picture, walk: Walk, record: r.EpochRecord) -> None:
    before = walk.epoch
    hold(record.stream_epoch == (before.stream_epoch + 1 if before else 0), f"{where}: its number")
    by_low = sorted(record.segments, key=lambda s: s.low)
    ranges = [(s.low, s.high) for s in by_low]
    tiling = ranges[0][0] == 0 and ranges[-1][1] == SPACE
    tiling = tiling and all(a[1] == b[0] for a, b in pairwise(ranges))
    hold(tiling and all(low < high for low, high in ranges), f"{where}: E1, ranges {ranges}")
    partitions = [s.partition for s in record.segments]
    hold(len(set(partitions)) == len(partitions), f"{where}: E1, partitions {partitions}")
    numbers = [segment_number(s.segment_id) for s in record.segments]
    hold(len(set(numbers)) == len(numbers), f"{where}: E7, numbers {numbers}")
    _check_sealed(where, walk, record)
    if record.reference_epoch == record.stream_epoch:
        _check_scaling(where, walk, record)
    else:
        _check_duplicate(where, walk, record)
    for segment in record.segments:
        if segment.segment_id in walk.open:
            hold(segment == walk.open[segment.segment_id], f"{where}: {segment} is not as it was")
            continue
        hold(
            segment_epoch(segment.segment_id) == record.stream_epoch,
            f"{where}: {segment} is new, and has the id of another epoch",
        )
        known = walk.ends.get(segment.partition, 0)
        hold(segment.start_offset >= known, f"{where}: E3, {segment} begins below {known}")
        if segment.start_offset > known:
            if before is None or picture.deleted.get(walk.stream) == "stream":
                walk.ends[segment.partition] = segment.start_offset
            else:
                walk.ahead[segment.segment_id] = segment.start_offset
        walk.data_ends[segment.segment_id] = segment.start_offset
    walk.open = {s.segment_id: s for s in record.segments}
    walk.epoch = record


def _check_sealed(where: str, walk: Walk, record: r.EpochRecord) -> None:
    """What is gone is sealed, with the end of its data, and nothing else is."""
    sealed = {end.segment_id: end.end_offset for end in record.sealed}
    hold(len(sealed) == len(record.sealed), f"{where}: a segment is sealed twice")
    kept = {s.segment_id for s in record.segments}
    gone = walk.open.keys() - kept
    hold(sealed.keys() == gone, f"{where}: E2, {sealed.keys()} are sealed, {gone} are gone")
    for segment_id, end in sealed.items():
        true = walk.data_ends[segment_id]
        hold(end == true, f"{where}: {segment_id:x} is sealed at {end}, its data ends at {true}")


def _check_scaling(where: str, walk: Walk, record: r.EpochRecord) -> None:
    fresh = [segment_number(s.segment_id) for s in record.segments if s.segment_id not in walk.open]
    first = walk.next_number
    hold(
        sorted(fresh) == list(range(first, first + len(fresh))),
        f"{where}: E7, new numbers {fresh}, the next one is {first}",
    )
    hold(fresh, f"{where}: a scaling that opens nothing")
    hold(not walk.ahead, f"{where}: a scaling where something is carried")
    before = walk.epoch
    active = before is None or before.reference_epoch == walk.scaled
    hold(active, f"{where}: a scaling of a layout that is not the active one")
    walk.next_number += len(fresh)
    walk.references[record.stream_epoch] = record
    walk.scaled = record.stream_epoch


def _check_duplicate(where: str, walk: Walk, record: r.EpochRecord) -> None:
    origin = walk.references.get(record.reference_epoch)
    if origin is None:
        raise Violation(f"{where}: E7, {record.reference_epoch} is no reference epoch")
    shape = _shape(record)
    hold(shape == _shape(origin), f"{where}: E7, {shape} is not {_shape(origin)}")
    again = [s for s in record.segments if s.segment_id in walk.open]
    hold(not again, f"{where}: E7, {again} have old ids")


def _shape(record: r.EpochRecord) -> list[tuple[int, int, int]]:
    """(low, high, number) of its segments."""
    return sorted((s.low, s.high, segment_number(s.segment_id)) for s in record.segments)


def _check_commit(where: str, picture: Picture, walk: Walk, record: r.CommitRecord) -> None:
    current = walk.epoch
    if current is None:
        raise Violation(f"{where}: before any EPOCH")
    hold(record.stream_epoch == current.stream_epoch, f"{where}: epoch {record.stream_epoch}")
    named = [segment.segment_id for segment in record.segments]
    hold(len(set(named)) == len(named), f"{where}: a segment twice")
    pinned = picture.participants.get(record.txn_id, {}).get(walk.stream)
    expected = pinned if pinned is not None else walk.scaled
    known = pinned is not None or record.txn_id == NO_TXN
    if known or picture.knows_part(record.txn_id, walk.stream):
        hold(
            current.reference_epoch == expected,
            f"{where}: E4, pinned {pinned}, merged into a copy of {current.reference_epoch}, "
            f"active: {walk.scaled}",
        )
    for at in record.segments:
        segment = walk.open.get(at.segment_id)
        if segment is None:
            raise Violation(f"{where}: E2, {at} is not open")
        hold(segment.partition == at.partition, f"{where}: {at} lies on {segment.partition}")
        begin = walk.ahead.pop(at.segment_id, None)
        if begin is None:
            hold(at.first >= walk.ends.get(at.partition, 0), f"{where}: E3, {at}")
            hold(at.first >= walk.data_ends[at.segment_id], f"{where}: E3, {at}")
        else:
            hold(at.first == begin, f"{where}: {at} was carried to {begin}")
        walk.ends[at.partition] = walk.data_ends[at.segment_id] = at.end
        for event in picture.events[walk.stream, at.partition]:
            by_key = event.record.key is not None and not is_state(walk.stream)
            if at.first <= event.offset < at.end and by_key:
                place = position_of(event.record.key or b"")
                hold(
                    segment.low <= place < segment.high,
                    f"{where}: {event.record.key!r} is not of {segment}",
                )
    hold(not walk.ahead, f"{where}: another one's carried data lies in its epoch: {walk.ahead}")


def _check_price(where: str, picture: Picture, walk: Walk, records: list[object]) -> None:
    """One duplicate for each reference epoch and each staged merge, and one more at the end."""
    copies = [
        record
        for record in records
        if isinstance(record, r.EpochRecord) and record.reference_epoch != record.stream_epoch
    ]
    if not copies:
        return
    current = copies[0]
    merges: dict[int, list[r.CommitRecord]] = {copy.stream_epoch: [] for copy in copies}
    for record in records:
        if isinstance(record, r.CommitRecord) and record.stream_epoch in merges:
            merges[record.stream_epoch].append(record)
    for current in copies[:-1]:
        hold(merges[current.stream_epoch], f"{where}: epoch {current.stream_epoch} is for nothing")
    # Decisions of other control partitions, and one-shots that they set free, come after the round's other merges.
    late = merges[copies[-1].stream_epoch] and not picture.spread
    hold(not late, f"{where}: merges after the last duplicate")
    inside = [commit for commits in merges.values() for commit in commits]
    counts = (len(picture.participants.get(commit.txn_id, {})) for commit in inside)
    if any(count != 1 for count in counts) or any(c.txn_id in picture.spread for c in inside):
        return  # those of several streams may need others in between
    seen: set[int] = set()
    for copy in copies[:-1]:
        commit = merges[copy.stream_epoch][0]
        carried = any(
            s.start_offset == at.first and commit.txn_id in picture.carried
            for s in copy.segments
            for at in commit.segments
        )
        hold(
            carried or copy.reference_epoch not in seen,
            f"{where}: {copy.reference_epoch} is duplicated twice",
        )
        seen.add(copy.reference_epoch)


def _check_row(picture: Picture, walk: Walk) -> None:
    """The status table says what the history says, and keeps no layout that nobody needs."""
    where, row, last = f"the row of {walk.stream}", picture.streams[walk.stream], walk.epoch
    if last is None:
        hold(row.state != "ACTIVE", f"{where}: active, and no EPOCH record")
        return
    told = tuple(
        r.SegmentRange(s.segment_id, s.low, s.high, s.partition)
        for s in sorted(last.segments, key=lambda s: s.low)
    )
    hold(tuple(sorted(row.segments, key=lambda s: s.low)) == told, f"{where}: {row.segments}")
    epochs = row.stream_epoch, row.reference_epoch
    hold(epochs == (last.stream_epoch, last.reference_epoch), f"{where}: epochs {epochs}")
    hold(row.next_number == walk.next_number, f"{where}: next number {row.next_number}")
    spoiled = walk.stream in picture.deleted  # a scaling may wait for ever
    hold(row.scaling is None or spoiled, f"{where}: a scaling is left: {row.scaling}")
    for topic in (stream_topic(walk.stream), journal_topic(walk.stream)):
        there = picture.topic_partitions[topic]
        counts = row.partitions, row.wanted_partitions
        hold(
            counts == (there, there) or spoiled,
            f"{where}: {counts} partitions, {topic} has {there}",
        )
    kept = picture.epoch_rows.get(walk.stream, set())
    needed = {row.reference_epoch} | {
        pinned[walk.stream]
        for txn in picture.unfinished
        if walk.stream in (pinned := picture.participants.get(txn.txn_id, {}))
    }
    hold(kept == needed, f"{where}: layouts of {kept} are kept, {needed} are needed")


# -- the order of keys ---------------------------------------------------------------------------------

# (partition, offset) -> (key, its how-manieth event)
Ranks = dict[tuple[int, int], tuple[bytes, int]]


def check_order(picture: Picture) -> None:
    """Each key of a stream comes in order; a state has an order of tasks instead (`check_tasks`).

    What real readers are given the checker judges.
    """
    for stream, found in picture.history.items():
        if is_state(stream):
            continue
        records = [record for _, record in found]
        epochs = [record for record in records if isinstance(record, r.EpochRecord)]
        ranks = ranks_of(picture, stream, records)
        check_by_epochs(picture, stream, epochs, ranks)


def ranks_of(picture: Picture, stream: str, records: list[object]) -> Ranks:
    """Each keyed event's place among those of its key, in the order of the commits."""
    counts: dict[bytes, int] = defaultdict(int)
    ranks: Ranks = {}
    for record in records:
        if not isinstance(record, r.CommitRecord):
            continue
        for at in record.segments:
            for event in picture.events[stream, at.partition]:
                if at.first <= event.offset < at.end and event.record.key is not None:
                    key = event.record.key
                    ranks[at.partition, event.offset] = (key, counts[key])
                    counts[key] += 1
    return ranks


def check_by_epochs(
    picture: Picture, stream: str, epochs: list[r.EpochRecord], ranks: Ranks
) -> None:
    """Segment by segment, in the order of the epochs that made them: all events, each key in order."""
    ends = {end.segment_id: end.end_offset for epoch in epochs for end in epoch.sealed}
    done: set[int] = set()
    got: dict[bytes, int] = defaultdict(int)
    count = 0
    for epoch in epochs:
        for segment in epoch.segments:
            if segment.segment_id in done:
                continue
            done.add(segment.segment_id)
            for event in picture.events[stream, segment.partition]:
                end = ends.get(segment.segment_id)
                if event.offset < segment.start_offset or (end is not None and event.offset >= end):
                    continue
                count += 1
                _follows(stream, event, ranks, got)
                key = event.record.key
                if key is not None:
                    inside = segment.low <= position_of(key) < segment.high
                    hold(inside, f"{stream}: {event} is not of {segment}")
    total = sum(len(events) for (name, _), events in picture.events.items() if name == stream)
    hold(count == total, f"{stream}: by epochs there are {count} events of {total}")


def _follows(stream: str, event: Placed, ranks: Ranks, got: dict[bytes, int]) -> None:
    """It is the next event of its key."""
    if event.record.key is None:
        return
    key, rank = ranks[event.partition, event.offset]
    where = f"{stream}[{event.partition}] offset {event.offset}"
    hold(rank == got[key], f"{where}: event {rank} of {key!r} is read after {got[key]} of them")
    got[key] = rank + 1
