"""Reservations: the first writer begins the transaction, and late ones get an error."""

from __future__ import annotations

import pickle

import pytest

from anabranch import errors
from anabranch.client.reservation import Reservation
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode
from tests.client.answers import STREAM
from tests.client.world import World


def states(world: World) -> list[str]:
    """Ids of all transactions that were ever begun."""
    return [info.state for info in world.client.transactions(finished=True)]


def values(world: World) -> list[bytes]:
    return sorted(event.value or b"" for event in world.events(STREAM))


def test_a_reservation_is_a_plain_value(world: World) -> None:
    reservation = world.client.reserve("nyc", name="daily", keepalive=2.5)
    assert (reservation.scope, reservation.name) == ("nyc", "daily")
    assert reservation.keepalive_ms == 2500
    for copy in (
        Reservation.from_bytes(reservation.to_bytes()),
        pickle.loads(pickle.dumps(reservation)),
    ):
        assert copy == reservation
    assert decode(reservation.to_bytes()) == r.Begin(
        reservation.txn_id, "nyc", "daily", 2500, reservation.secret
    )
    assert str(reservation) == reservation.txn_id.hex()
    assert states(world) == [], "nothing is begun"


@pytest.mark.parametrize(
    ("scope", "name", "keepalive", "error"),
    [
        ("sea", None, 30, errors.UnknownScope),
        ("no scope", None, 30, errors.InvalidArgument),
        ("nyc", "", 30, errors.InvalidArgument),
        ("nyc", "n" * 257, 30, errors.InvalidArgument),
        ("nyc", None, 0.5, errors.InvalidArgument),
    ],
)
def test_invalid_reservations_are_refused(
    world: World, scope: str, name: str | None, keepalive: float, error: type[Exception]
) -> None:
    with pytest.raises(error):
        world.client.reserve(scope, name, keepalive)


def test_the_first_write_begins_it_and_others_join(world: World) -> None:
    reservation = world.client.reserve("nyc")
    receipts = []
    for i in range(3):
        with world.new_client() as other, other.join(reservation) as writer:
            assert writer.txn_id == reservation.txn_id
            assert states(world) == (["OPEN"] if i else [])
            writer.write(STREAM, b"%d" % i, key=b"k%d" % i)
            assert states(world) == ["OPEN"]
        receipts.append(writer.finish().to_bytes())
    with world.client.join(reservation) as failed:
        failed.write(STREAM, b"failed", key=b"k")
    assert world.client.state(reservation).state == "OPEN"
    result = world.client.commit(reservation, receipts)
    assert result.txn_id == reservation.txn_id
    assert (result.counts.committed, result.counts.left_out) == (3, 1)
    assert values(world) == [b"0", b"1", b"2"]
    assert world.client.commit(reservation, receipts) == result
    assert world.client.resolve(reservation).state == "COMMITTED"


def test_a_writer_without_a_write_begins_nothing(world: World) -> None:
    reservation = world.client.reserve("nyc")
    with world.client.join(reservation, heartbeat=True) as writer:
        assert writer.flush().events == 0
    assert writer.finish().events == 0
    assert states(world) == []
    with pytest.raises(errors.UnknownTransaction):
        world.client.state(reservation)
    assert world.client.commit(reservation, [writer.finish()]).counts.committed == 0


def test_open_begins_it_without_a_write(world: World) -> None:
    reservation = world.client.reserve("nyc", keepalive=5)
    with world.client.join(reservation, heartbeat=True) as writer:
        writer.open()
        writer.open()
        for _ in range(8):
            world.clock.sleep(1.0)
            world.client.heart.step()
            world.step()
        assert states(world) == ["OPEN"]
    with pytest.raises(errors.IllegalState):
        writer.open()
    world.client.abort(reservation)
    for over in (reservation, world.client.reserve("nyc")):
        world.client.abort(over)
        with pytest.raises(errors.TransactionAborted):
            world.client.join(over).open()


def test_a_joined_writer_keeps_it_alive_if_asked(world: World) -> None:
    for heartbeat, state in ((True, "OPEN"), (False, "ABORTED")):
        reservation = world.client.reserve("nyc", keepalive=5)
        writer = world.client.join(reservation, heartbeat=heartbeat)
        assert world.client.heart.step() == float("inf"), "nothing to keep alive"
        writer.write(STREAM, b"v", key=b"k")
        for _ in range(8):
            world.clock.sleep(1.0)
            world.client.heart.step()
            world.step()
        assert world.client.state(reservation).state == state
        writer.discard()


# -- over ----------------------------------------------------------------------------------------------


def test_a_writer_that_joins_an_aborted_transaction_writes_nothing(world: World) -> None:
    reservation = world.client.reserve("nyc")
    world.part(reservation, b"v")
    world.client.abort(reservation, "changed my mind")
    world.client.abort(reservation)
    late = world.client.join(reservation)
    for call in (lambda: late.write(STREAM, b"late", key=b"k"), late.finish):
        with pytest.raises(errors.TransactionAborted, match="changed my mind"):
            call()
    with pytest.raises(errors.TransactionAborted, match="changed my mind"):
        world.client.commit(reservation)
    assert values(world) == []


def test_a_writer_that_joins_a_committed_transaction_writes_nothing(world: World) -> None:
    reservation = world.client.reserve("nyc")
    world.part(reservation, b"v")
    result = world.client.commit(reservation, name="claimed")
    late = world.client.join(reservation)
    for call in (lambda: late.write(STREAM, b"late", key=b"k"), late.finish):
        with pytest.raises(errors.AlreadyCommitted) as caught:
            call()
        assert caught.value.result == result
    with pytest.raises(errors.AlreadyCommitted) as caught:
        world.client.abort(reservation)
    assert caught.value.result == result
    assert values(world) == [b"v"]


def test_a_name_that_was_committed_before(world: World) -> None:
    with world.client.begin("nyc", name="daily") as txn:
        txn.write(STREAM, b"first", key=b"k")
        done = txn.commit()
    reservation = world.client.reserve("nyc", name="daily")
    late = world.client.join(reservation)
    with pytest.raises(errors.AlreadyCommitted, match=done.txn_id.hex()) as caught:
        late.write(STREAM, b"second", key=b"k")
    assert caught.value.result == done
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.result) == (str(caught.value), done)
    assert world.client.commit(reservation) == done
    assert values(world) == [b"first"]
    world.client.abort(reservation)
    assert states(world) == ["ABORTED", "COMMITTED"], "the newest first"


def test_abort_before_anybody_began_it(world: World) -> None:
    reservation = world.client.reserve("nyc")
    early = world.client.join(reservation)
    world.client.abort(reservation)
    with pytest.raises(errors.TransactionAborted):
        early.write(STREAM, b"v", key=b"k")
    with pytest.raises(errors.TransactionAborted):
        world.client.commit(reservation)
    world.client.abort(reservation)
    assert states(world) == ["ABORTED"]


def test_commit_before_anybody_began_it(world: World) -> None:
    reservation = world.client.reserve("nyc")
    result = world.client.commit(reservation)
    assert (result.txn_id, result.counts.committed) == (reservation.txn_id, 0)
    with pytest.raises(errors.AlreadyCommitted):
        world.client.join(reservation).write(STREAM, b"v", key=b"k")
    assert values(world) == []


def test_no_controller_then_one(world: World) -> None:
    """A begin without an answer is just repeated by the next write."""
    reservation = world.client.reserve("nyc")
    writer = world.client.join(reservation)
    world.stop_controller()
    with pytest.raises(errors.DeadlineExceeded):
        writer.write(STREAM, b"v", key=b"k")
    world.start_controller()
    writer.write(STREAM, b"v", key=b"k")
    assert world.client.commit(reservation, [writer.finish()]).counts.committed == 1
    assert values(world) == [b"v"]


# -- numbers -------------------------------------------------------------------------------------------


def test_a_transaction_commits_as_a_number(world: World) -> None:
    results = []
    for value in (b"1", b"2"):
        with world.client.begin("nyc") as txn:
            txn.write(STREAM, value, key=b"k")
            results.append(txn.commit(name="s", number=0))
    assert results[0] == results[1]
    with world.client.begin("nyc") as txn:
        txn.write(STREAM, b"3", key=b"k")
        txn.commit(name="s", number=5)
    with world.client.begin("nyc") as txn:
        txn.write(STREAM, b"4", key=b"k")
        for _ in range(2):
            with pytest.raises(errors.AlreadyCommitted, match="at number 5"):
                txn.commit(name="s", number=4)
        with pytest.raises(errors.AlreadyCommitted, match="at number 5"):
            txn.write(STREAM, b"5", key=b"k")
        assert world.client.heart.step() == float("inf"), "nothing to keep alive"
    assert world.client.begin("nyc", name="s").result is None, "names are not series"
    assert values(world) == [b"1", b"3"]


@pytest.mark.parametrize(
    ("name", "number"), [(None, 0), ("s", -1), ("s", 1 << 63)], ids=["no name", "low", "high"]
)
def test_invalid_numbers_are_refused(world: World, name: str | None, number: int) -> None:
    reservation = world.client.reserve("nyc")
    with pytest.raises(errors.InvalidArgument):
        world.client.commit(reservation, name=name, number=number)
    assert states(world) == [], "not even begun"
    with world.client.begin("nyc") as txn, pytest.raises(errors.InvalidArgument):
        txn.commit(name=name, number=number)
