"""Planted bugs in the order in which rounds become durable, in leading, and in answering; see `catalogue`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from anabranch.batches.records import Record, encode_batch
from anabranch.controller import controller, durability, leadership
from anabranch.controller.durability import OffsetGuess
from anabranch.controller.lanes import Lanes
from anabranch.core import rows as k
from anabranch.core.decisions import decide, questions, transactions
from anabranch.core.decisions.turn import Turn
from anabranch.core.memory import Keepalives
from anabranch.core.round import ReplyTo
from anabranch.ports import LogUncertain, Producer, Steps, TopicPartition
from anabranch.protocol.schemas.codec import encode
from anabranch.protocol.schemas.records import Resolve, SafeTime, SafeTimeReply, TermRow
from anabranch.topics.names import carrier_ids, status_topic, transactional_ids
from tests.mutants.planting import Planted, instead_of, wrapping

# -- the order of durability --------------------------------------------------------------------------


class _Before:
    """A producer that does something just before it commits."""

    def __init__(self, producer: Producer, before_commit: Callable[[], None]) -> None:
        self._producer = producer
        self._before_commit = before_commit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def committing(self) -> Steps[None]:
        self._before_commit()
        return self._producer.committing()


def _before_commit(what: Callable[[Any, Any, Any], None]) -> Planted:
    """``what(to, round, state)`` runs in each round just before its commit."""
    real = durability.write_round

    def write_round(
        to: Any, producer: Any, round_: Any, state: Any, *rest: Any, **more: Any
    ) -> Steps[None]:
        early = _Before(producer, lambda: what(to, round_, state))
        return real(to, early, round_, state, *rest, **more)

    return patch.object(controller, "write_round", write_round)


def _answer(to: Any, round_: Any, state: Any) -> None:
    wall_ms = int(to.clock.wall() * 1000)
    to.send(durability.answers_of(to.prefix, round_.replies, state.round.hybrid_time, wall_ms))


def answer_early() -> Planted:
    """Answers leave before the round is committed."""
    return _before_commit(_answer)


@wrapping(controller, "write_round")
def answer_unsure(
    real: Any, to: Any, producer: Any, round_: Any, state: Any, *rest: Any, **more: Any
) -> Steps[None]:
    """Answers leave though it is uncertain whether their round was committed."""
    try:
        yield from real(to, producer, round_, state, *rest, **more)
    except LogUncertain:
        _answer(to, round_, state)
        raise


def table_early() -> Planted:
    """The table is written before the commit, and not set back."""
    return _before_commit(lambda to, _, state: to.table.write(state.take_changes()))


def position_ahead() -> Planted:
    """The position in the status log is written before the commit, the rows after it."""

    def ahead(to: Any, _: object, __: object) -> None:
        place = TopicPartition(status_topic(to.prefix), to.control_partition)
        cluster = getattr(to.log, "cluster", None)
        if cluster is not None:
            end = cluster.partition(place).end_offset
        else:
            end = to.log.end_offsets([place], committed=False)[place]
        to.table.write({leadership.STATUS_POSITION: end.to_bytes(8, "big")})

    return _before_commit(ahead)


def rows_later() -> Planted:
    """That a transaction is merged is logged with the next round: a successor merges it again."""
    real = durability.write_round
    owed: dict[int, dict[bytes, bytes | None]] = {}

    def write_round(to: Any, producer: Any, round_: Any, *rest: Any, **more: Any) -> Steps[None]:
        late = owed.pop(id(producer), {})
        owed[id(producer)] = {}
        for key, value in list(round_.rows.items()):
            if key[-1:] == bytes((k.Entry.PENDING_COMMIT,)) and value is None:
                owed[id(producer)][key] = round_.rows.pop(key)
                txn = key[:16] + bytes((k.Entry.TXN,))
                if txn in round_.rows:
                    owed[id(producer)][txn] = round_.rows.pop(txn)
        round_.rows.update(late)
        return real(to, producer, round_, *rest, **more)

    return patch.object(controller, "write_round", write_round)


class _NeverWrong(list[int]):
    """Equal to whatever the broker answers."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


@wrapping(OffsetGuess, "guess")
def unchecked_guess(real: Any, self: OffsetGuess, batches: Any) -> list[int] | None:
    """A history is committed with foreseen offsets though the data landed elsewhere."""
    found = real(self, batches)
    return None if found is None else _NeverWrong(found)


# -- leading ------------------------------------------------------------------------------------------


def _initialise(log: Any, given: Any) -> tuple[list[Producer], list[list[Producer]]]:
    """A, B, and those of the carriers."""
    partition, prefix = given["control_partition"], given["prefix"]
    pairs = [carrier_ids(partition, n, prefix) for n in range(leadership.CARRIERS)]
    main, *carriers = (
        [log.producer(id_, timeout=given["native_timeout"]) for id_ in ids]
        for ids in (transactional_ids(partition, prefix), *pairs)
    )
    return main, carriers


@instead_of(controller, "become_leader")
def no_term(log: Any, table: Any, state: Any, clock: Any, **given: Any) -> leadership.Lease:
    """No TERM record: a leader acts on a fold from before its rival's last rounds."""
    status = TopicPartition(status_topic(given["prefix"]), given["control_partition"])
    producers, carriers = _initialise(log, given)
    leadership.fold_to_end(log, table, state, clock, status)
    return leadership.Lease(producers, 1, carriers=carriers)


class _Late:
    """A producer that is initialised when it is first used."""

    def __init__(self, make: Callable[[], Producer]) -> None:
        self._make = make
        self._made: Producer | None = None

    def __getattr__(self, name: str) -> Any:
        if self._made is None:
            self._made = self._make()
        return getattr(self._made, name)

    def check(self, partitions: Iterable[TopicPartition]) -> None:
        """To look at what it left behind is no use yet."""

    def close(self) -> None:
        if self._made is not None:
            self._made.close()


@contextmanager
def _fenced_late(is_late: Callable[[str], bool]) -> Iterator[None]:
    """These transactional ids are initialised when they are first needed."""
    real = leadership.become_leader

    class _Log:
        def __init__(self, log: Any) -> None:
            self._log = log

        def __getattr__(self, name: str) -> Any:
            return getattr(self._log, name)

        def producer(self, id_: str, *, timeout: float) -> Any:
            make = partial(self._log.producer, id_, timeout=timeout)
            return _Late(make) if is_late(id_) else make()

    def become_leader(log: Any, *given: Any, **more: Any) -> leadership.Lease:
        return real(_Log(log), *given, **more)

    with patch.object(controller, "become_leader", become_leader):
        yield


def late_carriers() -> Planted:
    """The carriers' transactional ids are initialised when they are first needed."""
    return _fenced_late(lambda id_: ".carrier." in id_)


def late_b() -> Planted:
    """B is initialised when it is first used: a frozen leader's round through it can come in between."""
    return _fenced_late(lambda id_: id_.endswith(".b") and ".carrier." not in id_)


@contextmanager
def one_fenced() -> Iterator[None]:
    """Only A is initialised; B goes on with the epoch that the brokers know: nobody is fenced there."""
    from tests.sim.ports import SimLog, SimProducer

    real = SimLog.producer

    def producer(self: SimLog, transactional_id: str, *, timeout: float) -> Any:
        known = self.cluster._transactions.get(transactional_id)
        if known is None or not transactional_id.endswith(".b"):
            return real(self, transactional_id, timeout=timeout)
        return SimProducer(self, transactional_id, known.producer_id, known.epoch)

    with patch.object(SimLog, "producer", producer):
        yield


@instead_of(controller, "become_leader")
def fold_once(log: Any, table: Any, state: Any, clock: Any, **given: Any) -> leadership.Lease:
    """The log is folded before the fences, and not again behind them."""
    status = TopicPartition(status_topic(given["prefix"]), given["control_partition"])
    leadership.fold_to_end(log, table, state, clock, status)
    producers, carriers = _initialise(log, given)
    term = state.term.term + 1 if state.term else 1
    row = TermRow(term, given["leader"], 0, False)
    producers[0].append([(status, encode_batch([Record(0, 0, k.TERM_KEY, encode(row))]))])
    producers[0].commit()
    state.apply(k.TERM_KEY, row)
    return leadership.Lease(producers, term, carriers=carriers)


def act_before_term() -> Planted:
    """The leader acts at once; its TERM record is logged only after its first steps."""
    real_lead, real_step = leadership.become_leader, controller.Controller.step
    steps: dict[int, int] = {}

    def become_leader(
        log: Any, table: Any, state: Any, clock: Any, **given: Any
    ) -> leadership.Lease:
        status = TopicPartition(status_topic(given["prefix"]), given["control_partition"])
        leadership.fold_to_end(log, table, state, clock, status)
        if state.term is None:
            return real_lead(log, table, state, clock, **given)
        producers, carriers = _initialise(log, given)
        return leadership.Lease(producers, state.term.term + 1, carriers=carriers)

    def step(self: controller.Controller, max_wait: float) -> bool:
        wrote = real_step(self, max_wait)
        lease = self.lease
        if wrote and lease is not None and steps.get(id(lease)) is None:
            steps[id(lease)] = 1
            row = TermRow(lease.term, self.leader, int(self.clock.wall() * 1000), False)
            turn = self._turn()
            turn.put(k.TERM_KEY, row)
            self._write(turn)
        return wrote

    @contextmanager
    def planted() -> Iterator[None]:
        with (
            patch.object(controller, "become_leader", become_leader),
            patch.object(controller.Controller, "step", step),
        ):
            yield

    return planted()


def old_keepalives() -> Planted:
    """A new leader takes silence from before its time for silence."""
    return patch.object(controller, "Keepalives", lambda _: Keepalives(0))


@instead_of(Lanes, "judge")
def hasty_staleness(lanes: Lanes, batch: object) -> None:
    """Silence is judged before the commands are read to their end."""
    for lane in lanes.on.values():
        lane.read_ms = 1 << 62


# -- answers ------------------------------------------------------------------------------------------


def resolve_unlogged() -> Planted:
    """RESOLVE says ABORTED of an unknown id without logging it."""
    real = transactions.resolve

    def resolve(turn: Turn, command: Any, to: Any) -> None:
        key = k.txn_key(command.txn_id)
        unknown = turn.state.get(key) is None
        real(turn, command, to)
        if unknown and turn.round.rows.pop(key, None) is not None:
            turn.state.apply(key, None)

    return patch.dict(decide._DECISIONS, {Resolve: resolve})


def safe_unlogged() -> Planted:
    """A safe time is answered, and hybrid time is left where it was: later commits may lie below it."""
    real = questions.safe_time

    def forgetful(turn: Turn, command: SafeTime, to: ReplyTo | None) -> None:
        before = turn.hybrid_time
        real(turn, command, to)
        turn.hybrid_time = before

    return patch.dict(decide._DECISIONS, {SafeTime: forgetful})


def safe_ahead() -> Planted:
    """A time to come is answered at once as safe."""

    def hasty(turn: Turn, command: SafeTime, to: ReplyTo | None) -> None:
        turn.reply(to, SafeTimeReply(command.scope, command.at or turn.hybrid_time))

    return patch.dict(decide._DECISIONS, {SafeTime: hasty})


def safe_stale() -> Planted:
    """Now is answered with a time of half a second ago: commits that were told already lie above it."""

    def stale(turn: Turn, command: SafeTime, to: ReplyTo | None) -> None:
        if command.at is not None:
            questions.safe_time(turn, command, to)
            return
        turn.reply(to, SafeTimeReply(command.scope, turn.hybrid_time - (500_000 << 12)))

    return patch.dict(decide._DECISIONS, {SafeTime: stale})
