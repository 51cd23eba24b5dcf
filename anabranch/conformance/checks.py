"""After a scenario, the checks compare all that a client sent and wrote with the rules."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from anabranch.batches.format import read_header
from anabranch.batches.records import Record, decode_records
from anabranch.conformance.rules import Report
from anabranch.conformance.wire import REPLIES, Sent, Wire
from anabranch.errors import AnabranchError, MalformedRecord
from anabranch.kafka.log import KafkaLog
from anabranch.ports import TopicPartition
from anabranch.protocol.ids import (
    CORRELATION_ID_SIZE,
    OP_HEADER,
    REPLY_HEADER,
    TXN_HEADER,
    TXN_ID_SIZE,
    control_partition_of,
    made_ms_of,
    unpack_txn_header,
)
from anabranch.protocol.limits import MAX_WAIT_MS
from anabranch.protocol.partitioner import position_of, record_checksum
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import ALL_RIGHTS, id_named, is_genuine, peek
from anabranch.topics.names import journal_topic, stream_topic

_SUM = 1 << 63
_CLOCK_MS = 60_000  # by which an id's time may differ from the kit's clock
_FETCH_BYTES = 8 << 20
_REPEAT_S = (1.0, 12.0)  # of the first repetition


class Written(NamedTuple):
    """An event without its place. ``headers``: the user's, without ``ab.…``. ``timestamp``: None fits any."""

    stream: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp: int | None = None


class Stored(NamedTuple):
    """A record of a journal, with its batch's producer."""

    stream: str
    partition: int
    record: Record
    producer: int
    transactional: bool


@dataclass
class Pen:
    """All records of one writer of a transaction in a stream's journal."""

    stream: str
    txn_id: bytes
    writer: int
    epochs: set[int] = field(default_factory=set)
    records: list[Stored] = field(default_factory=list)


def read_topic(
    log: KafkaLog, topic: str, *, committed: bool
) -> list[tuple[int, Record, int, bool]]:
    """All records of a topic: (partition, record, producer id, whether in a native transaction)."""
    count = log.partition_counts([topic]).get(topic, 0)
    places = [TopicPartition(topic, n) for n in range(count)]
    at = log.start_offsets(places)
    ends = log.end_offsets(places, committed=False)
    found = []
    while left := {place: offset for place, offset in at.items() if offset < ends[place]}:
        fetched = log.fetch(left, max_wait=0.1, max_bytes=_FETCH_BYTES, committed=committed)
        for place, part in fetched.items():
            for batch in part.batches:
                header = read_header(batch.data)
                found += [
                    (place.partition, record, header.producer_id, header.is_transactional)
                    for record in decode_records(batch.data)
                    if record.offset >= at[place]
                ]
            at[place] = part.next_offset
    return found


def committed_events(log: KafkaLog, stream: str) -> list[Written]:
    """The committed events of a stream, by partition in their order."""
    found = read_topic(log, stream_topic(stream), committed=True)
    return [_written(stream, record) for _, record, _, _ in found]


def _written(stream: str, record: Record) -> Written:
    headers = tuple(pair for pair in record.headers if not pair[0].startswith("ab."))
    return Written(stream, record.key, record.value, headers, record.timestamp_ms)


def difference(expected: Iterable[Written], found: Iterable[Written]) -> str:
    """Which events are missing, and which are there too often, as text; empty if none. A time of None fits any."""
    expected = list(expected)
    timed = {w._replace(timestamp=None) for w in expected if w.timestamp is not None}
    known = [
        one if one._replace(timestamp=None) in timed else one._replace(timestamp=None)
        for one in found
    ]
    missing, more = Counter(expected) - Counter(known), Counter(known) - Counter(expected)
    parts = []
    for what, some in (("missing", missing), ("too much", more)):
        if some:
            shown = ", ".join(f"{_shown(one)} x {n}" for one, n in list(some.items())[:3])
            parts.append(f"{sum(some.values())} {what}: {shown}")
    return "; ".join(parts)


def _shown(one: Written) -> str:
    more = "".join(f" {name}={value!r}" for name, value in one.headers)
    time_text = f" at {one.timestamp}" if one.timestamp is not None else ""
    return f"{one.stream} {one.key!r:.40}={one.value!r:.40}{more}{time_text}"


# -- commands ---------------------------------------------------------------------------------------------


def check_wire(report: Report, wire: Wire, joined: Sequence[bytes] = ()) -> None:
    """All commands of a client. ``joined``: tokens that were given to it."""
    for sent in wire.sent:
        if not report.check("R2.1", not sent.fault, f"a command is malformed: {sent.fault}"):
            continue
        _check_place(report, sent)
        _check_time(report, wire, sent, joined)
    _check_ids(report, wire)
    _check_copies(report, wire)
    _check_begins(report, wire)
    _check_tokens(report, wire, joined)
    _check_seen(report, wire, joined)
    for sent in wire.of(r.Commit):
        wait = sent.command.wait_ms
        report.check("R10.2", 0 <= wait <= MAX_WAIT_MS, f"wait_ms is {wait}")


def _check_place(report: Report, sent: Sent) -> None:
    reply = sent.headers.get(REPLY_HEADER, b"")
    known = len(reply) == 4 and int.from_bytes(reply, "big") < REPLIES
    report.check("R3.2", known, f"{sent.kind} has ab.reply {reply.hex()!r}")
    report.check("R3.8", sent.producer >= 0, f"{sent.kind} is of a producer that is not idempotent")
    report.check("R3.8", not sent.transactional, f"{sent.kind} is inside a native transaction")
    command = sent.command
    if isinstance(command, r.Touch | r.ListRuns | r.LabelWriter):
        return  # they go where the stream is served, and a controller refuses others
    if isinstance(command, r.FindScope):
        at = 0
    elif hasattr(command, "txn_id"):
        at = control_partition_of(command.txn_id)
    elif token := getattr(command, "token", b""):
        try:
            at = control_partition_of(id_named(token))
        except AnabranchError:
            return  # `_check_tokens` reports it
    else:
        return
    report.check("R4.1", sent.partition == at, f"{sent.kind} went to {sent.partition}, not {at}")


def _check_time(report: Report, wire: Wire, sent: Sent, joined: Sequence[bytes]) -> None:
    if sent.copy > 1 or isinstance(sent.command, r.Heartbeat):
        return
    given = [peek(token).seen for token in joined]
    most = max([wire.highest, *given])
    now = sent.time
    report.check("R12.1", now >= sent.floor, f"{sent.kind} has ab.ht {now}, below {sent.floor}")
    report.check("R12.2", now <= most, f"{sent.kind} has ab.ht {now}, above all answers: {most}")


def _check_seen(report: Report, wire: Wire, joined: Sequence[bytes]) -> None:
    """The times in receipts that this client made: a commit also has those of others, as ``receipts``."""
    most = max([wire.highest, *(peek(token).seen for token in joined)])
    known: set[tuple[int, int]] = set()
    for sent in wire.first_copies():
        if isinstance(sent.command, r.Register):
            receipts: Sequence[r.Receipt] = (sent.command.receipt,)
        else:
            receipts = sent.command.own if isinstance(sent.command, r.Commit) else ()
        for receipt in receipts:
            name = receipt.writer, receipt.sequence
            least = 0 if name in known else sent.floor  # it may be sent again later
            known.add(name)
            text = f"seen is {receipt.seen}, not from {least} to {most}"
            report.check("R9.4", least <= receipt.seen <= most, text)


def _check_ids(report: Report, wire: Wire) -> None:
    first = wire.first_copies()
    for sent in first:
        size = len(sent.cid)
        report.check("R3.1", size == CORRELATION_ID_SIZE, f"{sent.kind} has ab.cid of {size} bytes")
    for part in (slice(0, 8), slice(8, 16)):
        halves = Counter(sent.cid[part] for sent in first)
        same = [half.hex() for half, count in halves.items() if count > 1]
        report.check("R3.1", not same, f"several correlation ids have {same[:1]} in common")
    if first:
        producers = {sent.producer for sent in wire.sent}
        report.check("R3.8", len(producers) == 1, f"commands of {len(producers)} producers")
        places = {sent.headers.get(REPLY_HEADER) for sent in wire.sent}
        report.check("R3.2", len(places) == 1, f"commands name {len(places)} reply partitions")


def _check_copies(report: Report, wire: Wire) -> None:
    by_cid: dict[bytes, list[Sent]] = defaultdict(list)
    for sent in wire.sent:
        if not isinstance(sent.command, r.Heartbeat):
            by_cid[sent.cid].append(sent)
    for copies in by_cid.values():
        first, kind = copies[0], copies[0].kind
        for other in copies[1:]:
            same = (other.payload, other.partition) == (first.payload, first.partition)
            report.check("R3.3", same, f"a copy of {kind} has other bytes, or another partition")
        gaps = [b.at - a.at for a, b in pairwise(copies)]
        if gaps:
            low, high = _REPEAT_S
            fits = low <= gaps[0] <= high
            report.check("R11.1", fits, f"{kind} was repeated after {gaps[0]:.1f} s")
        for a, b in pairwise(gaps):
            report.check("R11.1", b > a * 0.8, f"{kind} was repeated after {a:.1f} and {b:.1f} s")


def _check_begins(report: Report, wire: Wire) -> None:
    made: dict[bytes, Sent] = {}
    for sent in wire.first_copies():
        if isinstance(sent.command, r.Begin | r.OneShot):
            made.setdefault(sent.command.txn_id, sent)
    now_ms = time.time() * 1000
    for txn_id in made:
        near = abs(made_ms_of(txn_id) - now_ms) < _CLOCK_MS
        report.check("R5.1", near, f"the time in the id {txn_id.hex()} is not the present one")
    shots: dict[tuple[r.Event, ...], set[bytes]] = defaultdict(set)
    for sent in wire.of(r.OneShot):
        shots[tuple(sent.command.events)].add(sent.command.txn_id)
    for ids in shots.values():
        report.check("R11.4", len(ids) == 1, f"one call sent {len(ids)} transactions")
    ends = Counter(txn_id[8:] for txn_id in made)
    report.check("R5.1", all(n == 1 for n in ends.values()), "ids have the same random bytes")
    secrets = Counter(s.command.secret for s in made.values() if isinstance(s.command, r.Begin))
    report.check("R5.2", all(n == 1 for n in secrets.values()), "two transactions have one secret")
    weak = [secret for secret in secrets if len(set(secret)) < 8]
    report.check("R5.2", not weak, "a secret is not random")


def _check_tokens(report: Report, wire: Wire, joined: Sequence[bytes]) -> None:
    """Check the tokens in commands: the client made the transaction, or it sends the token that it was given."""
    secrets = {s.command.txn_id: s.command.secret for s in wire.of(r.Begin)}
    for sent in wire.first_copies():
        tokens = getattr(sent.command, "tokens", None) or [getattr(sent.command, "token", None)]
        for token in tokens:
            if (
                token and len(token) != TXN_ID_SIZE
            ):  # the decision on a prepared transaction has its id
                check_token(report, wire, token, secrets, joined)


def check_token(
    report: Report, wire: Wire, token: bytes, secrets: dict[bytes, bytes], joined: Sequence[bytes]
) -> None:
    """A token that the client made or used."""
    try:
        found = peek(token)
    except AnabranchError as error:
        report.check("R5.3", False, f"a token is malformed: {error}")
        return
    secret = secrets.get(found.txn_id)
    if secret is None:
        report.check("R5.4", token in joined, "a joined token was changed")
        return
    begun = wire.begun.get(found.txn_id)
    report.check("R5.3", is_genuine(found, secret), "a token's MAC is wrong")
    report.check("R5.3", found.rights == ALL_RIGHTS, f"a new token has rights {found.rights}")
    if begun is not None:
        stated = found.keepalive_ms, found.begun_ms
        answered = begun.keepalive_ms, begun.begun_ms
        report.check("R5.3", stated == answered, f"keepalive and begun: {stated}, not {answered}")


# -- journals ---------------------------------------------------------------------------------------------


def check_journals(
    report: Report, log: KafkaLog, streams: Iterable[str], wires: Sequence[Wire]
) -> None:
    """All records that clients wrote to the journals of these streams, and all receipts."""
    pens: dict[tuple[str, bytes, int], Pen] = {}
    for stream in streams:
        for one in read_topic(log, journal_topic(stream), committed=False):
            stored = Stored(stream, *one[:2], *one[2:])
            names = [name for name, _ in stored.record.headers]
            if OP_HEADER in names or (stored.transactional and TXN_HEADER not in names):
                continue  # a controller's
            _check_record(report, stored, names, pens)
    touches = {
        (sent.command.stream, id_named(sent.command.token), sent.command.writer)
        for wire in wires
        for sent in wire.of(r.Touch)
    }
    segments: dict[tuple[bytes, str], r.Touched] = {}
    for wire in wires:
        segments |= {(id_named(token), stream): t for (token, stream), t in wire.touched.items()}
    for key, pen in pens.items():
        report.check("R6.1", key in touches, f"writer {pen.writer} did not touch {pen.stream}")
        touched = segments.get((pen.txn_id, pen.stream))
        if touched is not None:
            _check_segments(report, pen, touched)
    for wire in wires:
        _check_own(report, pens, wire)
    _check_receipts(report, pens, wires)


def _check_record(
    report: Report, stored: Stored, names: list[str], pens: dict[tuple[str, bytes, int], Pen]
) -> None:
    reserved = [name for name in names if name.startswith("ab.")]
    report.check("R8.3", not stored.transactional, "a record is inside a native transaction")
    report.check("R8.3", stored.producer >= 0, "a record is of a producer that is not idempotent")
    if TXN_HEADER not in reserved:
        report.check("R8.7", not reserved, f"a plain record has the headers {reserved}")
        return
    report.check("R8.5", reserved == [TXN_HEADER], f"a record has the headers {reserved}")
    try:
        value = dict(stored.record.headers).get(TXN_HEADER) or b""
        txn_id, writer, epoch = unpack_txn_header(value)
    except MalformedRecord as error:
        report.check("R8.1", False, str(error))
        return
    one = reserved.count(TXN_HEADER) == 1
    report.check(
        "R8.1", one and writer != 0, f"{reserved.count(TXN_HEADER)} headers ab.txn, writer {writer}"
    )
    pen = pens.setdefault((stored.stream, txn_id, writer), Pen(stored.stream, txn_id, writer))
    pen.epochs.add(epoch)
    pen.records.append(stored)


def _check_segments(report: Report, pen: Pen, touched: r.Touched) -> None:
    wrong = pen.epochs - {touched.stream_epoch}
    report.check("R6.2", not wrong, f"written by epoch {wrong}, not {touched.stream_epoch}")
    allowed = {segment.partition for segment in touched.segments}
    for stored in pen.records:
        key = stored.record.key
        if key is None:
            fits = stored.partition in allowed
        else:
            at = position_of(key)
            fits = any(
                s.low <= at < s.high and s.partition == stored.partition for s in touched.segments
            )
        report.check("R7.1", fits, f"key {key!r:.40} is in partition {stored.partition}")


def _check_own(report: Report, pens: dict[tuple[str, bytes, int], Pen], wire: Wire) -> None:
    """Each commit takes all writers of its client."""
    touches, registers = wire.of(r.Touch), wire.of(r.Register)
    registered = {sent.command.receipt.writer for sent in registers}
    for sent in wire.first_copies():
        if isinstance(sent.command, r.Commit):
            txn_id = id_named(sent.command.token)
            mine = {t.command.writer for t in touches if id_named(t.command.token) == txn_id}
            wrote = {pen.writer for pen in pens.values() if pen.txn_id == txn_id} & mine
            listed = sent.command.receipts
            taken = {receipt.writer for receipt in (*sent.command.own, *(listed or ()))}
            missing = wrote - taken - (registered if listed is None else set())
            report.check("R10.1", not missing, f"a commit has no receipt of writer {missing}")


def _receipts(wires: Sequence[Wire]) -> list[r.Receipt]:
    found: list[r.Receipt] = []
    for wire in wires:
        for sent in wire.first_copies():
            if isinstance(sent.command, r.Register):
                receipts: Sequence[r.Receipt] = (sent.command.receipt,)
            elif isinstance(sent.command, r.Commit):
                receipts = (*sent.command.own, *(sent.command.receipts or ()))
            else:
                continue
            found += [receipt for receipt in receipts if receipt not in found]
    return found


def _check_receipts(
    report: Report, pens: dict[tuple[str, bytes, int], Pen], wires: Sequence[Wire]
) -> None:
    by_writer: dict[tuple[bytes, int], list[r.Receipt]] = defaultdict(list)
    for receipt in _receipts(wires):
        by_writer[receipt.txn_id, receipt.writer].append(receipt)
    for (txn_id, writer), receipts in by_writer.items():
        receipts.sort(key=lambda receipt: receipt.sequence)
        sequences = [receipt.sequence for receipt in receipts]
        rises = len(set(sequences)) == len(sequences) and sequences[:1] == [1]
        report.check("R9.3", rises, f"writer {writer}: sequences {sequences}")
        for a, b in pairwise(receipts):
            later = {(e.stream, e.partition): e for e in b.extents}
            covers = all(
                (e.stream, e.partition) in later
                and later[e.stream, e.partition].count >= e.count
                and later[e.stream, e.partition].first <= e.first
                for e in a.extents
            )
            report.check("R9.3", covers, f"receipt {b.sequence} does not cover {a.sequence}")
        stored = [
            one for pen in pens.values() if (pen.txn_id, pen.writer) == (txn_id, writer)
            for one in pen.records
        ]  # fmt: skip
        for receipt in receipts:
            _check_receipt(report, receipt, stored, last=receipt is receipts[-1])


def _check_receipt(report: Report, receipt: r.Receipt, stored: list[Stored], *, last: bool) -> None:
    for extent in receipt.extents:
        place = extent.stream, extent.partition
        mine = [one.record for one in stored if (one.stream, one.partition) == place]
        covered = [record for record in mine if extent.first <= record.offset < extent.end]
        total = sum(record_checksum(record.key, record.value) for record in covered) % _SUM
        text = (
            f"{extent.count} records and sum {extent.crc_sum}; there are {len(covered)} and {total}"
        )
        report.check("R9.1", (extent.count, extent.crc_sum) == (len(covered), total), text)
        if last and receipt.finished:
            report.check("R9.2", len(covered) == len(mine), f"{len(mine) - len(covered)} left out")
    counted = {(extent.stream, extent.partition) for extent in receipt.extents}
    if last and receipt.finished:
        missing = {(one.stream, one.partition) for one in stored} - counted
        report.check("R9.2", not missing, f"no extent of {sorted(missing)}")
