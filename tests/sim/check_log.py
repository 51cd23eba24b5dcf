"""What must hold of the log alone: streams, histories, the status log and the answers fit together exactly."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import groupby

from anabranch.core.history_records import DIRECTLY_BEFORE, NO_PREVIOUS, has_vector, vector_place
from anabranch.core.stream_states import LOST
from anabranch.protocol import hybrid_time
from anabranch.protocol.ids import NO_TXN, is_marked
from anabranch.protocol.legal_names import ADMIN_LANE, is_state
from anabranch.protocol.schemas import records as r
from tests.sim.ledger import LIFE, NOISE, Ledger
from tests.sim.picture import Picture, Placed, Seen
from tests.sim.world import Violation

Final = tuple[str, int, int, int, int, str | None, str]  # what never changes in an ended one


def hold(condition: object, message: str) -> None:
    """`Violation` unless it holds."""
    if not condition:
        raise Violation(message)


def check_log(picture: Picture) -> None:
    """All of it, but for the stream that had several lives under its name."""
    picture.history.pop(LIFE, None)
    for place in [place for place in picture.events if place[0] == LIFE]:
        del picture.events[place]
    for stream, found in picture.history.items():
        check_history(stream, found)
        if stream not in picture.deleted:
            check_cut(picture, stream, found)
    check_ranges(picture)
    check_rows(picture)
    check_changes(picture)
    check_answers(picture)


def check_lost(picture: Picture, ledger: Ledger) -> None:
    """Only what somebody spoiled is given up, and told to be; nothing is committed there after that."""
    for stream, row in picture.streams.items():
        is_lost = row.state == LOST
        if stream == LIFE:
            continue
        hold(not is_lost or stream in picture.deleted, f"{stream} is lost; nobody deleted anything")
        hold(is_lost or not ledger.lost[stream], f"{stream} was lost, and is {row.state} again")
        hold(not ledger.late[stream], f"{stream} was written to after it was given up")
    for seen, reply in picture.replies:
        result = reply.result
        if isinstance(result, r.Refusal) and result.code == "StreamLost":
            right = any(stream in result.message for stream in (*picture.deleted, LIFE))
            hold(right, f"refused at {seen.record.offset}: {result.message}")
    for txn_id, txn in picture.rows.items():
        if "is lost: " in txn.reason:
            spoiled = any(f"{stream} is lost: " in txn.reason for stream in picture.deleted)
            hold(spoiled, f"{txn_id.hex()}: {txn.reason}")


def check_cut(picture: Picture, stream: str, found: list[tuple[Seen, object]]) -> None:
    """What was cut of a history speaks of deleted events only, and the rest begins with an EPOCH record."""
    low = picture.history_low.get(stream, 0)
    for seen, record in found:
        at = seen.record.offset
        if at == low and low:
            hold(isinstance(record, r.EpochRecord), f"history of {stream} is cut at {at}")
        # A state's topic is read whole, without its history.
        if at < low and isinstance(record, r.CommitRecord) and not is_state(stream):
            for part in record.segments:
                start = picture.starts.get((stream, part.partition), 0)
                hold(part.end <= start, f"history of {stream} is cut above {at}: {part} is there")


def check_history(stream: str, found: list[tuple[Seen, object]]) -> None:
    """EPOCH first; timestamps rise; previous pointers, vectors and Kafka timestamps are exact.

    An EPOCH record may have the timestamp of the commit for which it was made, or that it waited for.
    """
    last_offset, last_time, last_base = NO_PREVIOUS, 0, -1
    last_commit = 0
    vector: dict[int, int] = {}
    vector_at = -1
    for i, (seen, record) in enumerate(found):
        where = f"history of {stream}, offset {seen.record.offset}"
        if isinstance(record, r.EpochRecord):
            for opened in record.segments:
                vector.setdefault(opened.partition, opened.start_offset)
        elif isinstance(record, r.CommitRecord):
            hold(i > 0, f"{where}: COMMIT before EPOCH")
            for segment in record.segments:
                hold(
                    segment.first >= vector[segment.partition],
                    f"{where}: range {segment} begins below {vector[segment.partition]}",
                )
                vector[segment.partition] = segment.end
        else:
            raise Violation(f"{where}: a {type(record).__name__}")
        rises = record.timestamp >= last_time
        if isinstance(record, r.CommitRecord):
            rises, last_commit = rises and record.timestamp > last_commit, record.timestamp
        hold(rises, f"{where}: {record.timestamp} after {last_time}")
        hold(
            seen.record.timestamp_ms == hybrid_time.to_ms(record.timestamp),
            f"{where}: the record's own time is not its timestamp's millisecond",
        )
        if has_vector(record):
            told = {p.partition: p.offset for p in record.vector}
            hold(told == vector, f"{where}: vector {told}, but the events end at {vector}")
            vector_at = seen.record.offset
        at = vector_place(seen.record.offset, record)
        hold(at == vector_at, f"{where}: a vector at {at}, but the last one is at {vector_at}")
        expected = DIRECTLY_BEFORE if seen.base_offset == last_base else last_offset
        hold(record.previous == expected, f"{where}: previous {record.previous}, not {expected}")
        last_offset, last_time, last_base = seen.record.offset, record.timestamp, seen.base_offset


def check_ranges(picture: Picture) -> None:
    """Each event stands in the range of exactly one COMMIT record, of its transaction and native transaction.

    What was staged was written in others, before.
    """
    owner: dict[tuple[str, int, int], bytes] = {}
    times: dict[bytes, int] = {}
    seen_in: set[tuple[str, bytes]] = set()
    for stream, seen, record in picture.commits():
        name = record.txn_id.hex()
        if record.txn_id != NO_TXN:
            hold((stream, record.txn_id) not in seen_in, f"{stream}: two COMMITs of {name}")
            seen_in.add((stream, record.txn_id))
            hold(
                times.setdefault(record.txn_id, record.timestamp) == record.timestamp,
                f"{name} has two commit timestamps",
            )
        for segment in record.segments:
            inside = [
                event
                for event in picture.events[stream, segment.partition]
                if segment.first <= event.offset < segment.end
            ]
            where = f"{stream}: COMMIT of {name}, {segment}"
            _check_range(where, record, segment, inside)
            natives = {event.native for event in inside}
            if {producer_id for producer_id, _ in natives} & picture.carriers:
                hold(
                    {n for n, _ in natives} <= picture.carriers,
                    f"{where}: carried, but not all of it",
                )
            else:
                hold(natives == {seen.native}, f"{where}: not in the round of its events")
            for event in inside:
                place = stream, segment.partition, event.offset
                hold(place not in owner, f"{where}: {place} is in the range of two COMMITs")
                owner[stream, segment.partition, event.offset] = record.txn_id
    for (stream, number), events in picture.events.items():
        for event in events:
            where = f"{stream}[{number}] offset {event.offset}, {event.record.value!r}"
            hold(event.record.value != NOISE, f"{where}: noise is visible")
            hold((stream, number, event.offset) in owner, f"{where}: in no COMMIT's range")


def _check_range(
    where: str,
    record: r.CommitRecord,
    segment: r.SegmentCommit,
    inside: list[Placed],
) -> None:
    hold(len(inside) == segment.count, f"{where}: {len(inside)} events")
    hold(inside and inside[0].offset == segment.first, f"{where}: does not begin with an event")
    hold(inside[-1].offset == segment.end - 1, f"{where}: does not end with an event")
    for event in inside:
        hold(event.txn_id == record.txn_id, f"{where}: {event.record.value!r} is of another one")


def check_rows(picture: Picture) -> None:
    """COMMITTED rows and COMMIT records say the same; no other transaction has one."""
    counts: dict[bytes, int] = defaultdict(int)
    times: dict[bytes, int] = {}
    natives: dict[bytes, tuple[int, int]] = {}
    for _, seen, record in picture.commits():
        if record.txn_id == NO_TXN:
            continue
        counts[record.txn_id] += sum(segment.count for segment in record.segments)
        times[record.txn_id] = record.timestamp
        natives[record.txn_id] = seen.native
    for txn_id, row in picture.rows.items():
        name = txn_id.hex()
        for part in picture.parts.get(txn_id, {}).values():
            told, found = (row.state, row.commit_timestamp), (part.state, part.commit_timestamp)
            hold(told == found, f"{name} is {told}, and {found} at a participant")
        if row.state != "COMMITTED":
            hold(txn_id not in times, f"{name} is {row.state} but has a COMMIT record")
            continue
        if row.owner == ADMIN_LANE:
            continue  # of `tests.sim.lives`, which judges them: their streams may be deleted
        hold(
            row.committed == counts[txn_id],
            f"{name}: {row.committed} events, {counts[txn_id]} seen",
        )
        if txn_id in times:
            hold(row.commit_timestamp == times[txn_id], f"{name}: another timestamp in its row")
            # With parts elsewhere, its last row is logged when these have ended.
            hold(
                picture.row_natives.get(txn_id) == natives[txn_id] or txn_id in picture.spread,
                f"{name}: its row was not logged in the round of its COMMIT",
            )
    for txn_id in times:
        hold(
            txn_id in picture.rows or picture.is_forgotten(txn_id),
            f"{txn_id.hex()} has a COMMIT record and no row",
        )


def check_changes(picture: Picture) -> None:
    """Each command changes a thing once: no copy of it undoes a later change."""
    for (_, thing), askers in picture.changes.items():
        made = [asker for asker, _ in groupby(askers) if asker]
        again = [asker.hex() for asker, count in Counter(made).items() if count > 1]
        hold(not again, f"{thing[17:]!r}: changed again by copies of {again}")


def check_answers(picture: Picture) -> None:
    """What was answered about an id never changes, and is what the rows say."""
    final: dict[bytes, Final] = {}
    for seen, reply in picture.replies:
        hold(seen.native[0] < 0, "an answer inside a native transaction")
        hold(reply.correlation_id == seen.record.key, "an answer under another's key")
        result = reply.result
        if isinstance(result, r.Refusal):
            hold(
                result.code != "InvariantViolation",
                f"refused: {result.code}: {result.message}",
            )
        outcomes = [result] if isinstance(result, r.Outcome) else []
        if isinstance(result, r.Ended):
            outcomes += result.not_open
        if isinstance(result, r.TransactionList):
            outcomes += result.transactions
        for outcome in outcomes:
            _check_outcome(picture, final, reply, outcome)


def _final(said: r.Outcome | r.TxnRow) -> Final:
    counts = said.committed, said.rejected, said.left_out
    return said.state, said.commit_timestamp, *counts, said.name, said.reason


def _check_outcome(
    picture: Picture,
    final: dict[bytes, Final],
    reply: r.Reply,
    outcome: r.Outcome,
) -> None:
    name = outcome.txn_id.hex()
    hold(outcome.commit_timestamp <= reply.hybrid_time, f"{name}: answered below its own time")
    if outcome.state not in ("COMMITTED", "ABORTED"):
        return
    told = _final(outcome)
    known = final.setdefault(outcome.txn_id, told)
    hold(known == told, f"{name}: answered {known}, and also {told}")
    row = picture.rows.get(outcome.txn_id)
    if row is None:
        if is_marked(outcome.txn_id) and not outcome.committed:
            return  # it moved positions, and wrote no event: only its tasks' rows know it
        hold(picture.is_forgotten(outcome.txn_id), f"{name}: answered {told}, and it has no row")
    else:
        found = _final(row)
        hold(found == told, f"{name}: answered {told}, its row says {found}")
