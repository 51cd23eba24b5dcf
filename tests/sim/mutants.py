"""Planted bugs: each breaks one rule that the design rests on, and a simulation must find it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from anabranch.core import (
    claims,
    decide,
    decide_commit,
    decide_merge,
    decide_txn,
    hybrid_time,
    journal_index,
)
from anabranch.core import rows as k
from anabranch.core.ids import NO_TXN
from anabranch.core.journal_index import JournalIndex, Weighed
from anabranch.core.journal_runs import StoredRun
from anabranch.core.tokens import key_id
from anabranch.core.turn import Hearing, Turn
from anabranch.ports import Producer, TopicPartition
from anabranch.processors import controller, durability, intake, journals, leadership
from anabranch.processors.foresight import Foresight
from anabranch.schemas.codec import encode
from anabranch.schemas.records import Reply, Resolve, SeriesRow, TermRow, YieldedRow
from anabranch.topics.memory import MemoryProducer
from anabranch.topics.names import replies_topic, status_topic, transactional_ids
from anabranch.topics.records import Record, encode_batch
from tests.sim.mutants_epochs import EPOCH_BUGS
from tests.sim.ports import SimLog, SimProducer
from tests.sim.simulation import Report, simulate


@dataclass(frozen=True, slots=True)
class Mutant:
    """``plant``: a context in which the bug is there. ``quick``: found within few seeds."""

    name: str
    plant: Callable[[], AbstractContextManager[object]]
    quick: bool = False


def hunt(mutant: Mutant, start: int, seeds: int) -> Report | None:
    """The first seed that finds the bug."""
    for seed in range(start, start + seeds):
        report = simulate(seed, bug=mutant.plant())
        if report.violation:
            return report
    return None


# -- the order of durability --------------------------------------------------------------------------


class _Before:
    """A producer that does something just before it commits."""

    def __init__(self, producer: Producer, before_commit: Callable[[], None]) -> None:
        self._producer = producer
        self._before_commit = before_commit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def commit(self) -> None:
        self._before_commit()
        self._producer.commit()


def _before_commit(what: Callable[[Any, Any, Any], None]) -> AbstractContextManager[object]:
    """``what(to, round, state)`` runs in each round just before its commit."""
    real = durability.write_round

    def write_round(
        to: Any, producer: Any, round_: Any, state: Any, *rest: Any, **more: Any
    ) -> None:
        early = _Before(producer, lambda: what(to, round_, state))
        real(to, early, round_, state, *rest, **more)

    return patch.object(controller, "write_round", write_round)


def _answer_early() -> AbstractContextManager[object]:
    """Answers leave before the round is committed."""
    real = durability.write_round

    def write_round(
        to: Any, producer: Any, round_: Any, state: Any, *rest: Any, **more: Any
    ) -> None:
        for waiting, result in round_.replies:
            reply = Reply(waiting.correlation_id, state.round.hybrid_time, result)
            record = Record(0, more["wall_ms"], waiting.correlation_id, encode(reply))
            place = TopicPartition(replies_topic(to.prefix), waiting.partition)
            to.log.cluster.produce(place, [record])
        round_.replies.clear()
        real(to, producer, round_, state, *rest, **more)

    return patch.object(controller, "write_round", write_round)


def _table_early() -> AbstractContextManager[object]:
    """The table is written before the commit, and not set back."""
    return _before_commit(lambda to, _, state: to.table.write(state.take_changes()))


def _position_ahead() -> AbstractContextManager[object]:
    """The position in the status log is written before the commit, the rows after it."""

    def ahead(to: Any, _: object, __: object) -> None:
        place = TopicPartition(status_topic(to.prefix), to.control_partition)
        end = to.log.cluster.partition(place).end_offset
        to.table.write({leadership.STATUS_POSITION: end.to_bytes(8, "big")})

    return _before_commit(ahead)


def _rows_later() -> AbstractContextManager[object]:
    """That a transaction is merged is logged with the next round: a successor merges it again."""
    real = durability.write_round
    owed: dict[int, dict[bytes, bytes | None]] = {}

    def write_round(to: Any, producer: Any, round_: Any, *rest: Any, **more: Any) -> None:
        late = owed.pop(id(producer), {})
        owed[id(producer)] = {}
        for key, value in list(round_.rows.items()):
            if key[-1:] == bytes((k.Entry.PENDING_COMMIT,)) and value is None:
                owed[id(producer)][key] = round_.rows.pop(key)
                txn = key[:16] + bytes((k.Entry.TXN,))
                if txn in round_.rows:
                    owed[id(producer)][txn] = round_.rows.pop(txn)
        round_.rows.update(late)
        real(to, producer, round_, *rest, **more)

    return patch.object(controller, "write_round", write_round)


class _NeverWrong(list[int]):
    """Equal to whatever the broker answers."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def _unchecked_foresight() -> AbstractContextManager[object]:
    """A history is committed with foreseen offsets though the data landed elsewhere."""
    real = Foresight.bases

    def bases(self: Foresight, batches: Any) -> list[int] | None:
        found = real(self, batches)
        return None if found is None else _NeverWrong(found)

    return patch.object(Foresight, "bases", bases)


# -- leading ------------------------------------------------------------------------------------------


def _no_term() -> AbstractContextManager[object]:
    """No TERM record: a leader acts on a fold from before its rival's last rounds."""

    def take_lead(log: Any, table: Any, state: Any, clock: Any, **given: Any) -> leadership.Lease:
        status = TopicPartition(status_topic(given["prefix"]), given["control_partition"])
        names = transactional_ids(given["control_partition"], given["prefix"])
        producers = [log.producer(name, timeout=given["native_timeout"]) for name in names]
        leadership.fold_to_end(log, table, state, clock, status)
        return leadership.Lease(producers, 1)

    return patch.object(controller, "take_lead", take_lead)


@contextmanager
def _one_fenced() -> Iterator[None]:
    """Only A is initialised; B goes on with the epoch that it has."""
    real = SimLog.producer

    def producer(self: SimLog, transactional_id: str, *, timeout: float) -> MemoryProducer:
        known = self.cluster._transactions.get(transactional_id)
        if known is None or not transactional_id.endswith(".b"):
            return real(self, transactional_id, timeout=timeout)
        return SimProducer(self, transactional_id, known.producer_id, known.epoch)

    with patch.object(SimLog, "producer", producer):
        yield


def _fold_once() -> AbstractContextManager[object]:
    """The log is folded before the fences, and not again behind them."""

    def take_lead(log: Any, table: Any, state: Any, clock: Any, **given: Any) -> leadership.Lease:
        status = TopicPartition(status_topic(given["prefix"]), given["control_partition"])
        leadership.fold_to_end(log, table, state, clock, status)
        names = transactional_ids(given["control_partition"], given["prefix"])
        producers = [log.producer(name, timeout=given["native_timeout"]) for name in names]
        term = state.term.term + 1 if state.term else 1
        row = TermRow(term, given["leader"], 0, key_id(given["token_key"]))
        producers[0].append([(status, encode_batch([Record(0, 0, k.TERM_KEY, encode(row))]))])
        producers[0].commit()
        state.apply(k.TERM_KEY, row)
        return leadership.Lease(producers, term)

    return patch.object(controller, "take_lead", take_lead)


# -- decisions ----------------------------------------------------------------------------------------


def _late_writes() -> AbstractContextManager[object]:
    """All of a taken writer's runs are merged, whatever its receipt says."""

    def taken_runs(runs: Any, extents: Mapping[int, object]) -> list[StoredRun]:
        return sorted((run for run in runs if run.writer in extents), key=lambda run: run.first)

    return patch.object(decide_merge, "taken_runs", taken_runs)


def _weighing(change: Callable[[Weighed], Weighed]) -> AbstractContextManager[object]:
    real = JournalIndex.weigh
    return patch.object(JournalIndex, "weigh", lambda *given: change(real(*given)))


def _no_checksum() -> AbstractContextManager[object]:
    """Sums of checksums are not compared."""
    return _weighing(lambda w: replace(w, wrong="") if "checksum" in w.wrong else w)


def _no_count() -> AbstractContextManager[object]:
    """Counts are not compared."""
    return _weighing(lambda w: replace(w, wrong="") if "count" in w.wrong else w)


def _drop_a_run() -> AbstractContextManager[object]:
    """Of several runs the last one is forgotten."""
    real = journal_index.taken_runs

    def taken_runs(runs: Any, extents: Any) -> list[StoredRun]:
        found = real(runs, extents)
        return found[:-1] if len(found) > 1 else found

    return patch.object(decide_merge, "taken_runs", taken_runs)


def _wall_clock_only() -> AbstractContextManager[object]:
    """Timestamps follow the wall clock, not the highest one logged."""

    def next_timestamp(turn: Turn) -> int:
        turn.hybrid_time = hybrid_time.from_us(turn.now_us)
        return turn.hybrid_time

    return patch.object(Turn, "next_timestamp", next_timestamp)


def _resolve_unlogged() -> AbstractContextManager[object]:
    """RESOLVE says ABORTED of an unknown id without logging it."""
    real = decide_txn.resolve

    def resolve(turn: Turn, command: Any, to: Any) -> None:
        key = k.txn_key(command.txn_id)
        unknown = turn.state.get(key) is None
        real(turn, command, to)
        if unknown and turn.round.rows.pop(key, None) is not None:
            turn.state.apply(key, None)

    return patch.dict(decide._DECISIONS, {Resolve: resolve})


def _hasty_staleness() -> AbstractContextManager[object]:
    """Silence is judged before the commands are read to their end."""
    real = decide.decide_due

    def decide_due(turn: Turn, *, read_to_end: bool) -> int | None:
        return real(turn, read_to_end=True)

    return patch.object(controller, "decide_due", decide_due)


def _zombie_index() -> AbstractContextManager[object]:
    """What is read of the journals is written at once, without proof that nobody else leads."""
    real = journals.index_fetched

    def index_fetched(changes: Any, *given: Any, **more: Any) -> None:
        real(changes, *given, **more)
        changes._rows.write(changes.take())

    return patch.object(intake, "index_fetched", index_fetched)


def _old_hearing() -> AbstractContextManager[object]:
    """A new leader takes silence from before its time for silence."""
    return patch.object(controller, "Hearing", lambda _: Hearing(0))


def _forget_names() -> AbstractContextManager[object]:
    """A committed name is not looked up."""
    return patch.object(decide_commit, "earlier_outcome", lambda *_: None)


def _forget_series() -> AbstractContextManager[object]:
    """A number is taken whatever the series has already."""

    def take_number(turn: Turn, scope: str, series: str, number: int, txn_id: bytes) -> None:
        turn.put(k.series_key(scope, series), SeriesRow(number, txn_id, -1, NO_TXN))

    return patch.multiple(claims, overtaken=lambda *_: None, take_number=take_number)


def _low_numbers() -> AbstractContextManager[object]:
    """A number below the highest is taken, if it is not the highest itself."""
    real = claims.overtaken

    def overtaken(turn: Turn, scope: str, series: str, number: int) -> YieldedRow | None:
        found = real(turn, scope, series, number)
        return found if found is not None and found.highest == number else None

    def take_number(turn: Turn, scope: str, series: str, number: int, txn_id: bytes) -> None:
        turn.put(k.series_key(scope, series), SeriesRow(number, txn_id, -1, NO_TXN))

    return patch.multiple(claims, overtaken=overtaken, take_number=take_number)


MUTANTS = (
    Mutant("answer before the commit", _answer_early, quick=True),
    Mutant("offsets are foreseen and not checked", _unchecked_foresight, quick=True),
    Mutant("table before the commit", _table_early, quick=True),
    Mutant("position ahead of the rows", _position_ahead, quick=True),
    Mutant("merged, but logged a round later", _rows_later, quick=True),
    Mutant("no TERM record", _no_term),
    Mutant("only A is fenced", _one_fenced),
    Mutant("folded before the fences only", _fold_once, quick=True),
    Mutant("late writes are taken", _late_writes),
    Mutant("checksums are not compared", _no_checksum),
    Mutant("counts are not compared", _no_count),
    Mutant("a run is dropped from a merge", _drop_a_run, quick=True),
    Mutant("timestamps by the wall clock alone", _wall_clock_only, quick=True),
    Mutant("RESOLVE does not log ABORTED", _resolve_unlogged, quick=True),
    Mutant("silence judged too early", _hasty_staleness),
    Mutant("a zombie writes its journal index", _zombie_index),
    Mutant("keepalives do not begin afresh at takeover", _old_hearing, quick=True),
    Mutant("committed names are not looked up", _forget_names, quick=True),
    Mutant("a series' highest number is not looked up", _forget_series, quick=True),
    Mutant("numbers below the highest are taken", _low_numbers),
    *(Mutant(name, plant, quick) for name, plant, quick in EPOCH_BUGS),
)
