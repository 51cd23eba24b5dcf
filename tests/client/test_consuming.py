"""`transact(consume=…)`: positions of tasks move with what the function writes, over the log in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from anabranch.client.calls.processors import Processors
from anabranch.client.client import Client
from anabranch.client.session import Session
from anabranch.client.transaction import Transaction
from anabranch.errors import (
    AnabranchError,
    IllegalState,
    InvalidArgument,
    MalformedRecord,
    NotReady,
    OutcomeUnknown,
    OwnershipLost,
    TransactionAborted,
    UnsupportedVersion,
)
from anabranch.protocol.schemas.records import TakeTasks
from anabranch.reading.task_reader import TaskReader
from anabranch.types import Event
from tests.client.world import World
from tests.tables.worlds import let_read, reader_ports

IN, OUT, NAME = "nyc/in", "nyc/out", "nyc/p"


class Copying(World):
    """A processor that copies its input."""

    def __init__(self) -> None:
        super().__init__()
        let_read(self.client, reader_ports(self))
        for stream in (IN, OUT):
            self.client.create_stream(stream)
        self.client.create_processor(NAME, IN, tasks=2)

    def write(self, *values: bytes) -> None:
        with self.client.begin("nyc") as txn:
            for value in values:
                txn.write(IN, value, key=value)
            txn.commit()

    def reader(self, client: Client | None = None) -> TaskReader:
        client = client or self.client
        return client.read(IN, timeout=1.0, ownership=client.take_tasks(NAME))

    def values(self, stream: str = OUT) -> list[bytes | None]:
        return sorted((event.value for event in self.events(stream)), key=str)

    def rest(self) -> list[bytes | None]:
        """What another worker gets from now on."""
        with self.reader() as reader:
            return [event.value for event in reader]


@pytest.fixture
def world() -> Iterator[Copying]:
    made = Copying()
    made.write(b"1", b"2", b"3")
    yield made
    made.client.close()


def copies(event: Event) -> Callable[[Transaction], bytes | None]:
    def copy(txn: Transaction) -> bytes | None:
        txn.write(OUT, event.value, key=event.key)
        return event.value

    return copy


def test_positions_move_with_what_is_written(world: Copying) -> None:
    with world.reader() as reader:
        for number, event in enumerate(reader, 1):
            done = world.client.transact(copies(event), consume=reader)
            assert (done.value, done.counts.committed) == (event.value, 1)
            assert len(world.values()) == number
            if number == 2:
                break
    assert len(world.rest()) == 1
    assert len(world.values()) == 2


def test_a_big_transaction_moves_positions_by_journals(world: Copying) -> None:
    def write(txn: Transaction) -> None:
        txn.write_many(OUT, [(b"x" * 100, b"k")] * 100)

    with world.reader() as reader:
        assert len(list(reader)) == 3
        assert world.client.transact(write, consume=reader).counts.committed == 100
    assert world.rest() == []


@pytest.mark.parametrize("opened", [False, True])
def test_a_function_that_raises_moves_nothing_and_can_be_called_again(
    world: Copying, opened: bool
) -> None:
    def fails(txn: Transaction) -> None:
        txn.write(OUT, b"never", key=b"k")
        if opened:
            txn.flush()
        raise ZeroDivisionError

    with world.reader() as reader:
        for event in reader:
            for _ in range(2):
                with pytest.raises(ZeroDivisionError):
                    world.client.transact(fails, consume=reader)
            world.client.transact(copies(event), consume=reader)
    assert world.values() == [b"1", b"2", b"3"]
    assert world.rest() == []


def test_an_event_that_is_given_up_is_passed_by_the_next_commit(world: Copying) -> None:
    with world.reader() as reader:
        given_up = next(reader)
        with pytest.raises(InvalidArgument):
            world.client.transact(lambda txn: txn.write(OUT, 1), consume=reader)  # type: ignore[call-overload]
        world.client.transact(copies(next(reader)), consume=reader)
    left = world.rest()
    assert (len(left), given_up.value in left) == (1, False)


def test_an_aborted_transaction_is_repeated_for_the_same_events(world: Copying) -> None:
    tries: list[Any] = []

    def copy(txn: Transaction) -> None:
        tries.append(txn)
        txn.write(OUT, event.value, key=event.key)
        if len(tries) < 3:
            world.client.abort(txn.token("abort"))

    with world.reader() as reader:
        event = next(reader)
        world.client.transact(copy, consume=reader)
        assert (len(tries), world.values()) == (3, [event.value])
        tries.clear()
        with pytest.raises(TransactionAborted):
            world.client.transact(copy, consume=reader, timeout=0)
        world.client.transact(copies(next(reader)), consume=reader)
    assert len(world.rest()) == 1


def test_lost_tasks_end_the_reader_and_move_nothing(world: Copying) -> None:
    tries = []

    def copy(txn: Transaction) -> None:
        tries.append(txn)
        txn.write(OUT, b"late", key=b"k")
        world.client.take_tasks(NAME)

    with world.reader() as reader:
        list(reader)
        with pytest.raises(OwnershipLost):
            world.client.transact(copy, consume=reader)
        with pytest.raises(IllegalState, match=r"ended by OwnershipLost: take the tasks again"):
            world.client.transact(copy, consume=reader)
    assert len(tries) == 1
    assert world.values() == []
    assert len(world.rest()) == 3


def test_an_unknown_outcome_ends_the_reader(world: Copying) -> None:
    def copy(txn: Transaction) -> None:
        txn.write(OUT, b"late", key=b"k")
        world.stop_controller()

    with world.reader() as reader:
        list(reader)
        with pytest.raises(OutcomeUnknown):
            world.client.transact(copy, consume=reader, timeout=2)
        with pytest.raises(IllegalState, match=r"ended by OutcomeUnknown"):
            world.client.transact(copy, consume=reader)
    world.start_controller()
    left = world.rest()
    assert len(left) + 3 * len(world.values()) == 3, "both, or neither"


def test_what_can_not_be_consumed_is_refused(world: Copying) -> None:
    def never(txn: Transaction) -> None:
        raise AssertionError

    world.client.create_stream("lax/a")
    with world.reader() as reader:
        for consume in (object(), 5, "nyc/in"):
            with pytest.raises(InvalidArgument, match="give a reader of tasks"):
                world.client.transact(never, consume=consume)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="is of its scope"):
            world.client.transact(never, scope="lax", consume=reader)
        world.client.transact(lambda txn: None, scope="nyc", consume=reader)
    assert len(world.rest()) == 3


def test_a_failure_after_other_positions_were_taken_ends_the_reader(world: Copying) -> None:
    """Otherwise the next commit would have the sequences, but not the events, of the one that failed."""

    def fails(txn: Transaction) -> None:
        next(reader)
        reader.consumed()
        raise ZeroDivisionError

    with world.reader() as reader:
        first = next(reader)
        with pytest.raises(ZeroDivisionError):
            world.client.transact(fails, consume=reader)
        with pytest.raises(IllegalState, match="take the tasks again"):
            world.client.transact(copies(first), consume=reader)
    assert world.values() == []
    assert len(world.rest()) == 3


def test_an_assigned_id_is_not_replaced(world: Copying) -> None:
    with (
        world.reader() as reader,
        world.client.begin("nyc", ownership=reader.ownership) as txn,
    ):
        list(reader)
        txn_id = txn.assign_id()
        consumed = reader.consumed()
        with pytest.raises(InvalidArgument, match="`assign_id`"):
            txn.commit(consumed=consumed)
        assert txn.txn_id == txn_id


def test_the_lag_is_found_by_name(world: Copying) -> None:
    """Also past events that wrote nothing, once an empty commit has moved the positions."""
    assert [lag.most.events for lag in world.client.lag(NAME)] == [3]
    assert world.client.lag(NAME) == world.client.lag(world.client.processor(NAME))
    with world.reader() as reader:
        list(reader)
        world.client.transact(lambda txn: None, consume=reader)
    assert [lag.most.events for lag in world.client.lag(NAME)] == [0]


@pytest.mark.parametrize("error", [MalformedRecord, UnsupportedVersion])
def test_an_unreadable_answer_ends_the_reader(
    world: Copying, error: type[AnabranchError], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Session.one_shot

    def unreadable(*given: Any, **more: Any) -> Any:
        real(*given, **more)
        raise error("the answer")

    with world.reader() as reader:
        event = next(reader)
        monkeypatch.setattr(Session, "one_shot", unreadable)
        with pytest.raises(error):
            world.client.transact(copies(event), consume=reader)
        with pytest.raises(IllegalState, match="take the tasks again"):
            world.client.transact(copies(event), consume=reader)
    assert world.values() == [event.value]


def test_tasks_that_were_taken_in_vain_are_given_back(
    world: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise their workers would wait for this holder for half a minute."""
    real = Processors.ask

    def ask(self: Processors, processor: str, command: object, deadline: float) -> Any:
        found = real(self, processor, command, deadline)
        if isinstance(command, TakeTasks):
            raise NotReady("a former commit of its tasks is being merged")
        return found

    monkeypatch.setattr(Processors, "ask", ask)
    with pytest.raises(NotReady, match="merged"):
        world.client.take_tasks(NAME)
    assert {(task.holder, task.term) for task in world.client.processor(NAME).tasks} == {("", 2)}
