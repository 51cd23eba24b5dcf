"""Becomes leader of a control partition, by steps whose order makes every other process harmless:

1. Initialise all transactional ids: A and B, which rounds use in turn, the spare ids, then the ids of the carriers
   (which write staged merges). No former leader can append any more. No id is left for later: a former leader that
   was frozen just before it initialised that id would wake up and take the id back.

   Exception: an id is *passed over* if its last native transaction can't end because one of its partitions has no
   leader. The last leader's own process may pass over an id, and so may the successor of a leader that has logged
   its resignation. No other process may. This is safe: each leader logs its term, and the status log shows no
   term after the last leader's, so the last leader made that native transaction. The last leader has ended or
   resigned, so it does not use the id's producer any more.
2. Apply the status log to the state, up to its end. No other process can append to that log now.
3. Commit a TERM record through A. This fails if a rival has initialised A after step 1.
4. Apply the status log again up to its end. The last TERM record must be the record of step 3.
5. Act from now on, not before. Positions in lanes, the hybrid time, and the time before which ids may be forgotten
   come from the last ROUND record in the log.

Whenever an id is initialised again, all these steps are repeated.

A leader appends a round only after EndTxn of the round before was acknowledged (`durability`). So at most one
round is undecided at step 1, and the log has no round without the rounds before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain

from anabranch.batches.records import Record, decode_records, encode_batch
from anabranch.core import rows as k
from anabranch.core.state import State
from anabranch.errors import NotLeader
from anabranch.ports import Clock, Log, LogBusy, LogUnavailable, Producer, Table, TopicPartition
from anabranch.protocol.schemas.codec import decode, encode
from anabranch.protocol.schemas.records import TermRow
from anabranch.topics.names import carrier_ids, status_topic, transactional_ids

STATUS_POSITION = k.POSITION + b"status"
# If reading stalls for this long, a rival that came later may have died inside a round: begin again with step 1.
STALL_S = 5.0
CARRIERS = 2  # the same in every controller: a leader fences the carriers of the leader before it
_FETCH_BYTES = 8 << 20
# Rows that `last_term` reads at most: it only reports, so its cost must not grow with the log.
_TERM_OFFSETS = 20_000


@dataclass(slots=True)
class Lease:
    """The right to act: initialised producers, two of which are used in turn, and the term.

    ``carriers``: up to two more producers for each carrier. ``passed_over``: whether an id was busy when this
    leadership began.
    """

    producers: list[Producer]
    term: int
    turn: int = 0
    carriers: list[list[Producer]] = field(default_factory=list)
    passed_over: bool = False
    _aside: list[Producer] = field(default_factory=list)

    def next_producer(self) -> Producer:
        """A and B in turn, so that a round need not wait for the markers of the round before.

        `LogUnavailable`: all ids wait for markers.
        """
        if not self.producers:
            raise LogUnavailable("every transactional id waits for markers that can't be written")
        self.turn += 1
        return self.producers[self.turn % min(2, len(self.producers))]

    @property
    def lacks_ids(self) -> bool:
        """Whether a transactional id waits for markers, or did so when this leadership began."""
        return self.passed_over or bool(self._aside)

    def leave_out(self, producer: Producer) -> None:
        """Use this producer no more in this leadership, as its id waits for markers."""
        self.producers = [other for other in self.producers if other is not producer]
        self._aside.append(producer)

    def check(self, partitions: Sequence[TopicPartition]) -> None:
        """End native transactions that lack a marker in these partitions, because readers can't pass them.

        Spare ids are checked, too: a former leader may have used them. Carriers check their own ids.
        """
        for producer in [*self.producers, *self._aside]:
            producer.check(partitions)

    def close(self) -> None:
        for producer in chain(self.producers, self._aside, *self.carriers):
            producer.close()


def become_leader(
    log: Log,
    table: Table,
    state: State,
    clock: Clock,
    *,
    control_partition: int,
    prefix: str,
    leader: str,
    native_timeout: float,
    terms: list[TermRow],
    again: bool = False,
) -> Lease:
    """Take all steps of this module. `LogFenced`, `NotLeader`: a rival was quicker.

    ``terms``: the terms that this process may have logged last; their leases are closed. The new term is added.
    ``again``: become leader only if the last term on the log is one of ``terms``.
    """
    status = TopicPartition(status_topic(prefix), control_partition)
    # Read most of the log before the present leader is disturbed. This ends at the last stable offset, which the
    # open round of a dead leader holds back until its transactional id is initialised.
    fold_to_end(log, table, state, clock, status, stable_only=True)
    if again and state.term not in terms:
        raise NotLeader("another controller led since")
    ids = transactional_ids(control_partition, prefix)
    pairs = [carrier_ids(control_partition, n, prefix) for n in range(CARRIERS)]
    busy: list[LogBusy] = []
    with ExitStack() as failed:

        def initialised(transactional_ids: Iterable[str]) -> dict[str, Producer]:
            made = {}
            for transactional_id in transactional_ids:
                try:
                    made[transactional_id] = log.producer(transactional_id, timeout=native_timeout)
                except LogBusy as error:
                    busy.append(error)
                else:
                    failed.callback(made[transactional_id].close)
            return made

        made = initialised(ids)
        carriers = [list(initialised(pair).values()) for pair in pairs]
        if busy and made:
            # The wait was long, and a rival that can't pass the busy id may have fenced the first one meanwhile.
            first = next(iter(made))
            made[first].close()
            made |= initialised([first])
        producers = list(made.values())
        for producer in chain(producers, *carriers):
            producer.check([status])
        fold_to_end(log, table, state, clock, status)
        former = state.term
        own = former is not None and (former.resigned or former in terms)
        if busy and not (producers and own):
            raise busy[0]
        row = TermRow(
            term=(former.term if former else 0) + 1,
            leader=leader,
            since_ms=int(clock.wall() * 1000),
            resigned=False,
        )
        terms[:] = [*(term for term in terms if term == former), row]  # the commit may be uncertain
        record = Record(0, row.since_ms, k.TERM_KEY, encode(row))
        producers[0].append([(status, encode_batch([record]))])
        producers[0].commit()
        fold_to_end(log, table, state, clock, status)
        if state.term != row:
            raise NotLeader(f"term {row.term} was not the last one: another controller leads")
        failed.pop_all()
        return Lease(producers, row.term, carriers=carriers, passed_over=bool(busy))


def last_term(log: Log, status: TopicPartition, clock: Clock, deadline: float) -> TermRow | None:
    """The last TERM row among the newest rows, as far as the deadline (monotonic) allows. Changes nothing."""
    found: TermRow | None = None
    end = log.end_offsets([status], committed=True)[status]
    position = max(log.start_offsets([status])[status], end - _TERM_OFFSETS)
    while position < end and clock.monotonic() < deadline:
        fetched = log.fetch(
            {status: position}, max_wait=0.5, max_bytes=_FETCH_BYTES, committed=True
        ).get(status)
        for batch in fetched.batches if fetched else ():
            for record in decode_records(batch.data):
                if record.key == k.TERM_KEY:
                    found = None if record.value is None else decode(record.value)
        position = fetched.next_offset if fetched else position
    return found


def fold_to_end(
    log: Log,
    table: Table,
    state: State,
    clock: Clock,
    status: TopicPartition,
    *,
    stable_only: bool = False,
) -> None:
    """Apply the status log up to its present end. Each write of the status table has rows and the position after.

    The end is the high watermark, or the last stable offset if ``stable_only``.

    Raises: LogError; MalformedRecord (no controller wrote a row), UnsupportedVersion (a newer controller wrote it).
    """
    deadline = clock.monotonic() + STALL_S
    end = log.end_offsets([status], committed=stable_only)[status]
    stored = table.get(STATUS_POSITION)
    position = int.from_bytes(stored, "big") if stored else log.start_offsets([status])[status]
    while position < end:
        if clock.monotonic() > deadline:
            raise LogUnavailable(
                f"{status.topic}[{status.partition}] could not be read from {position} to {end} in "
                f"{STALL_S:.0f} s"
            )
        fetched = log.fetch(
            {status: position}, max_wait=0.5, max_bytes=_FETCH_BYTES, committed=True
        )
        if status not in fetched:
            continue
        for batch in fetched[status].batches:
            for record in decode_records(batch.data):
                if record.key is not None and record.offset >= position:
                    state.fold_row(record.key, record.value)
        if fetched[status].next_offset > position:
            deadline = clock.monotonic() + STALL_S
        position = fetched[status].next_offset
        if state.unreadable:
            continue  # a later record may replace it; else the table keeps the position before it
        changes = state.take_changes()
        changes[STATUS_POSITION] = position.to_bytes(8, "big")
        table.write(changes)
    state.rederive()
