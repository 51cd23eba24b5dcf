"""Truncating journals and histories (`docs/inside/epochs.md`): how far, and which runs have to be moved first.

The *low water* of a journal partition is the lowest offset that may still be needed. A round logs the low water
before the shell deletes anything, so the next leader starts to read there, with a status table or without. The same
round logs, for open transactions, the counts of rejected records below the low water, which can't be read again.

An old open transaction would prevent the deletion of all data after its own data. If a partition keeps much more
than is needed, runs of such transactions (consecutive records of one writer) are *moved*: copied to the end of the
partition. Then the low water can rise.

A history is truncated only after its events are gone: up to an EPOCH record before whose vector (the end offset of
each partition) the brokers have no events any more. Readers need nothing before such a record, so the active epoch
is logged again from time to time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from anabranch.core import rejections
from anabranch.core import rows as k
from anabranch.core.decisions.across import holding
from anabranch.core.decisions.turn import Turn
from anabranch.core.journal_index import Place, Use, uses
from anabranch.core.journal_runs import StoredRun, moved_run
from anabranch.core.round import NewEpoch
from anabranch.protocol.schemas.records import LowWaterRow, MovedRow, MovedRun

MAX_MOVED = 2_000  # runs moved in one round, so that the runs of a transaction fit into one row
LATER = 12  # pause after nothing could be moved, in multiples of `clean_ms`


def clean_up(turn: Turn) -> None:
    """Log the low waters that have risen enough, and note the partitions from which runs may have to move.

    Call it last in a turn, because transactions that end in this round need no data any more.
    """
    if turn.now_ms < turn.cleaning.next_ms:
        return
    if not rejections.log_new(turn):
        return  # they are counted before their journals are cut
    turn.cleaning.next_ms = turn.now_ms + turn.settings.clean_ms
    used = uses(turn.index.uncommitted, turn.state.open)
    crowded = []
    for place in _places(turn):
        low = low_water(turn, place, used.get(place))
        if _pays(turn, place, low):
            _cut(turn, place, low)
        use = used.get(place)
        if use is not None and _is_crowded(turn, place, use):
            crowded.append(place)
    turn.cleaning.crowded = tuple(crowded)
    for stream, offset in turn.cleaning.spare.as_dict().items():
        turn.cleaning.spare.put(stream, None)
        place = (stream, k.HISTORY)
        base = turn.state.bases.get(stream)
        needed = base is not None and offset > base.position  # new replicas read from there
        if turn.usable(stream) and not needed and offset > turn.state.low_water.get(place, 0):
            row = LowWaterRow(stream, k.HISTORY, offset)
            turn.put(k.low_water_key(stream, k.HISTORY), row)
            turn.cut[place] = offset


def log_epochs_again(turn: Turn) -> None:
    """Log the active epochs of streams again: after many commits, and with a leader's first commit to a stream.

    A new leader does not know how many commits there were. If it began to count at 0, the history of a stream with
    few commits a term would never be truncated. Call this when the round is complete.
    """
    since = turn.histories.since_epoch
    unknown = turn.settings.epoch_again
    counts = {stream: since.get(stream, unknown) for stream in turn.round.streams}
    for step in turn.round.history:
        counts[step.stream] = 0 if isinstance(step, NewEpoch) else counts[step.stream] + 1
    for stream, count in sorted(counts.items()):
        due = count >= turn.settings.epoch_again
        since.put(stream, 0 if due else count)
        if due:
            row = turn.state.streams[stream]
            at = holding.epoch_time(turn, stream, turn.next_timestamp())
            turn.round.history.append(
                NewEpoch(
                    stream, row.stream_epoch, row.reference_epoch, at, row.segments, again=True
                )
            )


def _places(turn: Turn) -> Iterator[Place]:
    for stream, row in turn.state.streams.items():
        if turn.usable(stream):
            yield from ((stream, partition) for partition in range(row.partitions))


def low_water(turn: Turn, place: Place, use: Use | None) -> int:
    """The offset up to which a journal partition is read and not needed any more: the start of a batch.

    ``use``: the data of open transactions there.
    """
    low = turn.index.positions.get(place, 0)
    if use is not None:
        low = min(low, use.low)
    plain = turn.index.plain_from(turn.state, *place)
    return low if plain is None else min(low, plain)


def _pays(turn: Turn, place: Place, low: int) -> bool:
    """Whether a truncation at this offset is worth a row and a request."""
    before = turn.state.low_water.get(place, 0)
    if low <= before:
        turn.cleaning.cuttable_ms.put(place, None)
        return False
    since_ms = turn.cleaning.cuttable_ms.get(place, turn.now_ms)
    turn.cleaning.cuttable_ms.put(place, since_ms)
    if turn.now_ms - since_ms >= turn.settings.clean_after_ms:
        return True  # so that aborted or merged data does not stay readable in an idle stream
    if low - before >= turn.settings.clean_records:
        return True
    read = turn.index.read.get(place)
    return read is not None and read.between(before, low) >= turn.settings.clean_bytes


def _cut(turn: Turn, place: Place, low: int) -> None:
    for txn_id in sorted(turn.index.uncommitted.refused):
        txn = turn.state.open.get(txn_id)
        found = turn.index.rejected_below(txn_id, *place, low) if txn is not None else []
        if txn is not None and found:
            # A leader without a status table does not read these records again.
            rejected = txn.row.rejected + sum(count for _, count in found)
            turn.put(k.txn_key(txn_id), txn.row._replace(rejected=rejected))
            for key, _ in found:
                turn.state.keep(key, None)
    turn.put(k.low_water_key(*place), LowWaterRow(*place, low))
    turn.cut[place] = low
    turn.cleaning.cuttable_ms.put(place, None)


def _is_crowded(turn: Turn, place: Place, use: Use) -> bool:
    """Whether a partition keeps so much unneeded data that it may be worth moving runs."""
    read = turn.index.read.get(place)
    if read is None or turn.now_ms < turn.cleaning.may_move_ms.get(place, 0):
        return False
    end = turn.index.positions.get(place, 0)
    return read.between(use.low, end) - use.size > turn.settings.move_bytes


# -- moving runs ---------------------------------------------------------------------------------------


class PlacedRun(NamedTuple):
    """A run, and its present place."""

    batch_base: int
    at: int
    txn_id: bytes
    run: StoredRun


class Copied(NamedTuple):
    """The place of a run's copy."""

    batch_base: int
    at: int
    pure: bool


def runs_to_move(turn: Turn, place: Place) -> list[PlacedRun]:
    """The next runs to copy to the end of a journal partition: about one chunk, in the order of their places.

    They are all runs before an offset at which a truncation frees more than `move_bytes` of unneeded data, and not
    less data than is copied. Runs of decided transactions move, too, because these may wait for hours for a
    stream in trouble; runs that are being staged do not. Receipts still name the old offsets.
    """
    read = turn.index.read.get(place)
    if read is None:
        return []
    placed = sorted(_placed(turn, place))
    end = low_water(turn, place, None)  # runs from there on prevent no deletion
    copied = 0
    for i, one in enumerate((*placed, None)):
        offset = min(one.batch_base, end) if one is not None else end
        freed = read.between(placed[0].batch_base, offset) - copied if placed else 0
        if freed > turn.settings.move_bytes and freed >= copied:
            return _chunk(turn, placed[:i])
        if one is None or offset == end or one.txn_id in turn.memory.staging:
            return []
        copied += one.run.batch_size
    return []


def _placed(turn: Turn, place: Place) -> Iterator[PlacedRun]:
    for txn_id, stays in turn.index.uncommitted.stays.items():
        if place in stays and txn_id in turn.state.open:
            for run in turn.index.runs(txn_id, *place):
                yield PlacedRun(run.batch_base, run.at, txn_id, run)


def _chunk(turn: Turn, placed: Sequence[PlacedRun]) -> list[PlacedRun]:
    taken: list[PlacedRun] = []
    size = 0
    for one in placed[:MAX_MOVED]:
        taken.append(one)
        size += one.run.batch_size
        if size >= turn.settings.chunk_bytes:
            break
    return taken


def moved(turn: Turn, place: Place, placed: Sequence[PlacedRun], copies: Sequence[Copied]) -> None:
    """Log the new places of these runs. Their copies are part of the same native transaction."""
    pairs = sorted(zip(placed, copies, strict=True), key=lambda pair: pair[0].txn_id)
    for txn_id, group in groupby(pairs, key=lambda pair: pair[0].txn_id):
        its = list(group)
        fresh = [_moved_run(one.run, copy) for one, copy in its]
        _forget_former(turn, txn_id, place, {(run.writer, run.first) for run in fresh})
        key = k.moved_key(txn_id, *place, min(run.at for run in fresh))
        row = MovedRow(*place, tuple(fresh), max(one.run.latest for one, _ in its))
        turn.put(key, row)
        for run in fresh:
            turn.state.keep(*moved_run(txn_id, row, run))
    turn.cleaning.crowded = _without(turn.cleaning.crowded, place)
    # Check again soon: the low water may rise, or there is more to move.
    turn.cleaning.next_ms = turn.now_ms


def _moved_run(run: StoredRun, copy: Copied) -> MovedRun:
    return MovedRun(
        run.writer, run.first, run.end, run.records, run.crc_sum,
        copy.at, copy.batch_base, run.batch_size, copy.pure,
    )  # fmt: skip


def _forget_former(turn: Turn, txn_id: bytes, place: Place, again: set[tuple[int, int]]) -> None:
    """Remove the runs (writer, first offset) in ``again`` from the rows that have their former places."""
    for (stream, partition, at), row in list(turn.open(txn_id).moved.items()):
        if (stream, partition) != place:
            continue
        rest = tuple(run for run in row.runs if (run.writer, run.first) not in again)
        if len(rest) < len(row.runs):
            left = replace(row, runs=rest) if rest else None
            turn.put(k.moved_key(txn_id, stream, partition, at), left)


def has_moved(
    turn: Turn, place: Place, placed: Sequence[PlacedRun], copies: Sequence[Copied]
) -> None:
    """Update memory after the round that moved these runs."""
    index = turn.index
    for txn_id in {one.txn_id for one in placed}:
        low = min(run.batch_base for run in index.runs(txn_id, *place))
        index.uncommitted.moved(txn_id, place, low)
    index.copies.update((*place, copy.batch_base) for copy in copies)


def not_now(turn: Turn, place: Place) -> None:
    """Skip a partition for a while, because nothing can be moved there. No draft is needed: no round is written."""
    kept = turn.memory.cleaning
    kept.may_move_ms.put(place, turn.now_ms + LATER * turn.settings.clean_ms)
    kept.crowded = _without(kept.crowded, place)


def _without(places: tuple[Place, ...], place: Place) -> tuple[Place, ...]:
    return tuple(other for other in places if other != place)
