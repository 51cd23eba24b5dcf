"""Sessions over the real controller and the log in memory: each row once, in order, whatever fails."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from anabranch import errors
from anabranch.client.write_session import Flush, WriteSession, _Sender
from anabranch.errors import AnabranchError
from anabranch.ports import LogError, LogUnavailable, LogUncertain
from anabranch.protocol import defaults, limits
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.codec import LEVEL
from anabranch.protocol.schemas.fast import encoded_event
from tests.client.answers import STREAM
from tests.client.world import World
from tests.mutants.planting import wrapping
from tests.mutants.tables import followed_unseen

TABLE = "nyc/rows"
SMALL = "nyc/small"  # it takes only small events


@pytest.fixture(autouse=True)
def small_requests(world: World) -> Iterator[None]:
    """Requests of a few rows."""
    world.client._shared.one_shot_bytes = 150
    with world.connect(lane=ADMIN_LANE) as operator:
        operator.feature_level(raise_to=LEVEL)
    world.client.create_table(TABLE)
    yield
    world.fault = None


def rows(world: World, stream: str = STREAM) -> list[tuple[bytes | None, bytes | None]]:
    """Key and value of all committed rows, in the order of their commits; in a commit by key."""
    found = world.client.snapshot(stream).read(stream)
    return [
        (event.key, event.value)
        for event in sorted(found, key=lambda e: (e.commit_timestamp, e.key or b"~"))
    ]


def numbers(world: World, stream: str = STREAM) -> list[int]:
    return [int(value or b"") for _, value in rows(world, stream)]


@pytest.mark.parametrize("flush", ["sync", "background", "manual"])
def test_rows_of_streams_and_tables(world: World, flush: Flush) -> None:
    typed = world.client.stream(STREAM, key=str, value=str)
    with world.client.session(flush) as session:
        for number in range(40):
            assert session.apply(STREAM, b"%d" % number, b"k") == number
        session.apply(typed, "40", "k")
        session.apply(STREAM, b"41", headers={"h": b"x"}, timestamp=77)
        session.put(TABLE, b"a", b"1")
        session.put(TABLE, b"b", b"2")
        session.delete(TABLE, b"a")
    assert numbers(world) == list(range(42))
    by_key = sorted(rows(world, TABLE), key=lambda row: row[0] or b"")
    assert by_key == [(b"a", b"1"), (b"a", None), (b"b", b"2")]
    last = next(event for event in world.client.snapshot(STREAM).read(STREAM) if event.key is None)
    assert (last.headers, last.timestamp) == ([("h", b"x")], 77)
    session.close()
    with pytest.raises(errors.IllegalState):
        session.apply(STREAM, b"")


REFUSED: tuple[tuple[Callable[[Any], int], type[Exception]], ...] = (
    (lambda s: s.apply("nyc/none", b""), errors.UnknownStream),
    (lambda s: s.apply("none/none", b""), errors.UnknownScope),
    (lambda s: s.apply(STREAM, "text"), errors.InvalidArgument),
    (lambda s: s.apply(STREAM, b"", 5), errors.InvalidArgument),
    (lambda s: s.apply(STREAM, b"", headers={"ab.txn": b""}), errors.InvalidArgument),
    (lambda s: s.apply(STREAM, b"", timestamp=-5), errors.InvalidArgument),
    (lambda s: s.apply(STREAM, bytes(limits.MESSAGE.value)), errors.EventTooLarge),
    (lambda s: s.apply(TABLE, b"row", None), errors.InvalidArgument),
    (lambda s: s.put(TABLE, b"", b""), errors.InvalidArgument),
    (lambda s: s.put(TABLE, b"k", None), errors.InvalidArgument),
    (lambda s: s.put(STREAM, b"k", b""), errors.InvalidArgument),
    (lambda s: s.delete(STREAM, b"k"), errors.InvalidArgument),
    (lambda s: s.apply([], b""), errors.InvalidArgument),
    (lambda s: s.delete([], b"k"), errors.InvalidArgument),
)


def test_bad_rows_are_refused_at_once(world: World) -> None:
    """`REFUSED`: calls that the session refuses, and their errors."""
    with world.client.session("manual") as session:
        session.apply(STREAM, b"0", b"k")
        for call, error in REFUSED:
            with pytest.raises(error):
                call(session)
        with world.client.begin("nyc") as txn:
            txn.write(STREAM, b"9")
            for act in (lambda: session.apply(STREAM, b"9"), session.flush, world.client.session):
                with pytest.raises(errors.NonTransactional):
                    act()
        assert session.apply(STREAM, b"1", b"k") == 1, "what is refused has no number"
    assert numbers(world) == [0, 1]
    with pytest.raises(errors.InvalidArgument, match="sync, background, manual"):
        world.client.session("later")  # type: ignore[arg-type]


def big(session: WriteSession, number: int) -> None:
    """Write a row of which only the controller notices that its stream takes none of this size."""
    session._places[SMALL] = session._learned(SMALL)._replace(most=1 << 30)
    session.apply(SMALL, (b"%d" % number).ljust(limits.LEAST_MESSAGE.value, b" "), b"k")


BAD = [3, 17, 18, 39]


def after_refusals(world: World) -> list[int]:
    """Write 40 rows, of which some are refused, in four requests."""
    most = str(limits.LEAST_MESSAGE.value)
    world.client.create_stream(SMALL, settings={"max.message.bytes": most})
    session = world.client.session("manual")
    session._sender._most_bytes = 100_000
    for number in range(40):
        if number in BAD:
            big(session, number)
        else:
            session.apply(SMALL, b"%d" % number, b"k")
        if number % 10 == 9:
            session._sender.seal()
    with pytest.raises(errors.RowsFailed, match="4 rows of the session failed") as caught:
        session.flush()
    found = [(e.number, e.stream, e.key, type(e.error)) for e in caught.value.errors]
    assert found == [(number, SMALL, b"k", errors.EventTooLarge) for number in BAD]
    session.flush()  # each error comes once
    session.close()
    return numbers(world, SMALL)


def test_refused_rows_are_found_and_the_order_is_kept(world: World) -> None:
    assert after_refusals(world) == [n for n in range(40) if n not in BAD]


def test_the_test_of_the_order_finds_its_bug(world: World) -> None:
    with followed_unseen():
        found = after_refusals(world)
    assert sorted(found) == [n for n in range(40) if n not in BAD]
    assert found != sorted(found)


@wrapping(_Sender, "_finish")
def new_ids_after_doubt(real: Any, sender: _Sender, request: Any, deadline: float) -> None:
    """A request without an answer is sent again as another transaction."""
    try:
        real(sender, request, deadline)
    except AnabranchError:
        request.txn_id = request.command = None
        raise


def through_faults(world: World, seed: int) -> None:
    chance = random.Random(seed)

    def fault(name: str) -> LogError | None:
        if chance.random() >= 0.2:
            return None
        if name in ("produce", "fetch"):
            return LogUnavailable("not reached")
        return LogUncertain("was it?") if name == "produce.after" else None

    with world.client.session(chance.choice(["background", "manual"])) as session:
        for number in range(120):
            session.apply(STREAM, b"%d" % number, b"k")
            if number % 30 == 20:
                world.fault = fault if chance.random() < 0.8 else None
            if number % 30 == 25 and chance.random() < 0.5:
                world.stop_controller()
                with pytest.raises(errors.DeadlineExceeded):
                    session.flush(timeout=chance.choice([0.5, 5, 20]))
                world.start_controller()
                with_retries(session)
        world.fault = None
        with_retries(session)
    for _ in range(20):
        world.clock.sleep(5)
        world.step()


def with_retries(session: WriteSession) -> None:
    for _ in range(50):
        try:
            session.flush()
        except errors.DeadlineExceeded:
            continue
        return


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 60))]
)
def test_each_row_once_and_in_order_whatever_is_lost(world: World, seed: int) -> None:
    through_faults(world, seed)
    assert numbers(world) == list(range(120))


def test_the_test_of_faults_finds_its_bug(world: World) -> None:
    with new_ids_after_doubt():
        for seed in range(3):
            through_faults(world, seed)
    assert len(numbers(world)) > 3 * 120


def test_without_the_feature_one_request_is_under_way() -> None:
    world = World()
    world.client.create_stream(STREAM)
    world.client._shared.one_shot_bytes = 150
    with world.client.session("manual") as session:
        for number in range(60):
            session.apply(STREAM, b"%d" % number)
    assert numbers(world) == list(range(60))


def test_a_full_session(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "SESSION_BYTES", 300)
    session = world.client.session("manual")
    while session._sender.held <= 300:
        session.apply(STREAM, b"0")
    with pytest.raises(errors.SessionFull, match="`flush` it"):
        session.apply(STREAM, b"0")
    session.flush()
    taken = session.apply(STREAM, b"0")
    session.close()
    assert len(numbers(world)) == taken + 1


class Text(str):
    """A text of a program's own type."""


class Blob(bytes):
    """Bytes of a program's own type."""


def test_subclasses_of_text_and_bytes(world: World) -> None:
    with world.client.session("manual") as session:
        session.apply(Text(STREAM), Blob(b"0"), Blob(b"k"))
        session.put(Text(TABLE), Blob(b"k"), Blob(b"1"))
    assert rows(world) == [(b"k", b"0")]
    assert rows(world, TABLE) == [(b"k", b"1")]


@pytest.mark.parametrize("step", ["new_txn_id", "post", "locked_shot"])
def test_an_interrupted_flush_continues_in_order(world: World, step: str) -> None:
    session = world.client.session("manual")
    for number in range(40):
        session.apply(STREAM, b"%d" % number, b"k")
    real, calls = getattr(session._session, step), []

    def interrupted(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session._session, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.flush()
        session.close()
    assert numbers(world) == list(range(40))


def test_a_copy_of_an_interrupted_call_comes_late(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = str(limits.LEAST_MESSAGE.value)
    world.client.create_stream(SMALL, settings={"max.message.bytes": most})
    session = world.client.session("manual")
    big(session, 0)
    late: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(session._session._bus, "send", lambda *copy: late.append(copy))
        patch.setattr(world.clock, "on_sleep", late[5:].pop)  # raises
        with pytest.raises(IndexError):
            session.flush()
    with pytest.raises(errors.RowsFailed):
        session.close()
    with world.connect(lane=ADMIN_LANE) as operator:
        operator.alter_stream(SMALL, {"max.message.bytes": "500000"})
    session._session._bus.send(*late[0])
    world.clock.sleep(1)
    assert numbers(world, SMALL) == [], "the caller knows that it failed"


def test_requests_of_other_control_partitions_wait(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = world.client.session("manual")
    session.apply(STREAM, b"0", b"k")
    place, sender, real = session._places[STREAM], session._sender, session._session.post
    under_way: list[int] = []

    def post(*arguments: Any) -> Any:
        under_way.append(len({request.partition for request in sender._under_way}))
        return real(*arguments)

    monkeypatch.setattr(session._session, "post", post)
    for number in range(1, 12):
        session._places[STREAM] = place._replace(partition=number % 2)  # as it would be there
        session.apply(STREAM, b"%d" % number, b"k")
    session.close()
    assert under_way == [1] * 12


def test_what_is_closed_meanwhile_is_not_sent(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = world.client.session("manual")
    for number in range(40):
        session.apply(STREAM, b"%d" % number, b"k")
    real, said = session._session.post, []

    def post(*arguments: Any) -> Any:
        said.append(session._end())
        return real(*arguments)

    monkeypatch.setattr(session._session, "post", post)
    with pytest.raises(errors.IllegalState):
        session.flush()
    world.clock.sleep(5)
    assert said == ["33 rows were not sent and 7 rows may be committed (from row 0 on)"]
    assert numbers(world) == list(range(7))


@pytest.mark.parametrize("trouble", ["flush", "full"])
def test_sync_raises_the_error_of_its_row(
    world: World, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread flushes before the call has its error, or many errors wait for a flush."""
    most = str(limits.LEAST_MESSAGE.value)
    world.client.create_stream(SMALL, settings={"max.message.bytes": most})
    session = world.client.session("sync")
    real = session._sender.take_error

    def late(number: int) -> Any:
        session.flush()
        return real(number)

    if trouble == "flush":
        monkeypatch.setattr(session._sender, "take_error", late)
    else:
        monkeypatch.setattr(defaults, "SESSION_ERRORS", 0)
    with pytest.raises(errors.EventTooLarge):
        big(session, 0)
    session.close()


def test_a_call_sends_no_longer_than_its_row_needs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = world.client.session("sync")
    add, real, calls = session._sender.add, session._session.locked_shot, []

    def shot(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) < 100:  # other threads write meanwhile
            place = session._places[STREAM]
            add(place, encoded_event(place.head, b"k", b"0", None, -1))
            session._sender.seal()
        return real(*arguments)

    monkeypatch.setattr(session._session, "locked_shot", shot)
    session.apply(STREAM, b"0", b"k")
    assert len(calls) == 1
    session.flush()
    assert len(calls) == 2, "the others send their rows"
    session.close()


def test_settings_are_learned_again(world: World) -> None:
    most = str(limits.LEAST_MESSAGE.value)
    world.client.create_stream(SMALL, settings={"max.message.bytes": most})
    session = world.client.session("manual")
    value = b"1".ljust(limits.LEAST_MESSAGE.value)
    with pytest.raises(errors.EventTooLarge):
        session.apply(SMALL, value, b"k")
    with world.connect(lane=ADMIN_LANE) as operator:
        operator.alter_stream(SMALL, {"max.message.bytes": "500000"})
    world.clock.sleep(31)
    session.apply(SMALL, value, b"k")
    session.flush()
    world.clock.sleep(31)
    world.stop_controller()
    before = world.clock.now
    session.apply(SMALL, b"2", b"k")
    session.apply(SMALL, b"3")
    assert world.clock.now < before + 1, "rows are taken while no controller answers"
    world.start_controller()
    session.close()
    assert sorted(numbers(world, SMALL)) == [1, 2, 3]


def test_a_close_that_is_cut_short_has_the_errors(world: World) -> None:
    most = str(limits.LEAST_MESSAGE.value)
    world.client.create_stream(SMALL, settings={"max.message.bytes": most})
    session = world.client.session("manual")
    big(session, 0)
    session._sender.pump_until(session._sender.seal(), world.clock.now + 20)
    session.apply(SMALL, b"1", b"k")
    world.stop_controller()
    with pytest.raises(errors.DeadlineExceeded, match=r"1 row may be .*; 1 row failed: ") as caught:
        session.close(timeout=1)
    assert isinstance(caught.value.__cause__, errors.RowsFailed)


def test_a_closed_session_leaves_no_answers_behind(world: World) -> None:
    bus: Any = world.client._session._bus
    session = world.client.session("manual")
    for number in range(40):
        session.apply(STREAM, b"%d" % number, b"k")
    world.stop_controller()
    with pytest.raises(errors.DeadlineExceeded):
        session.flush(timeout=1)
    assert bus._slots, "copies that may be answered"
    with pytest.raises(errors.DeadlineExceeded):
        session.close(timeout=0)
    assert not bus._slots


@pytest.mark.parametrize("how", ["exception", "dropped", "client", "late"])
def test_what_was_not_sent_is_said(
    world: World, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = world.new_client()
    session = client.session("manual")
    session.apply(STREAM, b"0")
    session.apply(STREAM, b"1")
    if how == "exception":
        with pytest.raises(ZeroDivisionError), session:
            raise ZeroDivisionError
    elif how == "dropped":
        del session
        gc.collect()
    elif how == "client":
        client.close()
    else:
        world.stop_controller()
        with pytest.raises(errors.DeadlineExceeded, match="2 rows may be committed"):
            session.close(timeout=1)
        return
    assert "2 rows were not sent (from row 0 on)" in caplog.text
    assert numbers(world) == []
