"""A signal handler may raise an exception at any line: each call lets it out unchanged."""

from __future__ import annotations

import ast
import gc
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import anabranch
from anabranch.client.replica import Replica
from anabranch.kafka import calls
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode, encode
from tests.client.world import World
from tests.tables.worlds import let_read, reader_ports

PACKAGE = str(Path(anabranch.__file__).parent)
# The cluster in memory stands for other processes. If it were struck in `MemoryCluster.step`, no controller would
# answer from then on.
ELSEWHERE = str(Path(PACKAGE, "testing"))
TABLE = "bank/a"
KEPT: list[Any] = []  # clients, whose finalizers run later
# Of each call: at so many of its lines, drawn by a seed.
FEW, MANY = 100, 500


class Struck(Exception):
    """An `Exception`, as Celery's `SoftTimeLimitExceeded` is."""


@cache
def _headers(file: str) -> frozenset[int]:
    """The lines of `with`: an exception at its end leaves the lock held, which is a limit of Python itself."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(Path(file).read_text())):
        if isinstance(node, ast.With):
            found.update(range(node.lineno, node.body[0].lineno))
    return frozenset(found)


class Strike:
    """Raises at the n-th line of the product that runs on the caller's behalf; 0: it only counts them."""

    most = FEW

    def __init__(self, at: int, outside: Callable[[], bool]) -> None:
        self.error = Struck(f"at line {at}")
        self.lines = 0
        self.times: dict[tuple[str, int], list[int]] = {}  # a line of the product: when it ran
        self.where = ""
        self._at, self._outside = at, outside

    def __enter__(self) -> Strike:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, _: str, __: object) -> Any:
        file = frame.f_code.co_filename
        ours = file.startswith(PACKAGE) and not file.startswith(ELSEWHERE)
        return self._line if ours and not self._outside() else None

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and frame.f_lineno not in _headers(frame.f_code.co_filename):
            self.lines += 1
            line = frame.f_code.co_filename, frame.f_lineno
            self.times.setdefault(line, []).append(self.lines)
            if self.lines == self._at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise self.error  # which ends the tracing
        return self._line


def struck(call: Callable[[], object], outside: Callable[[], bool] = lambda: False) -> None:
    """Raise in a call, at lines drawn from all that run in it: exactly that exception comes out each time.

    A line that runs often, as in a loop, is no likelier than others.

    An exception in a finalizer can't come out, so garbage is kept until the end of the test.
    """
    with Strike(0, outside) as counted:
        call()
    chance, lines = random.Random(5), [*counted.times.values()]
    for times in chance.sample(lines, min(Strike.most, len(lines))):
        at = chance.choice(times)
        with Strike(at, outside) as strike:
            raised: BaseException | None = None
            try:
                call()
            except BaseException as error:  # noqa: BLE001 - judged below
                raised = error
        if strike.where and raised is not strike.error:
            raise AssertionError(f"{strike.where}: became {raised!r}") from raised
        if raised is not None and not strike.where:
            raise raised


@pytest.fixture(autouse=True, params=[FEW, pytest.param(MANY, marks=pytest.mark.soak)])
def most(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Strike, "most", request.param)


@pytest.fixture(autouse=True)
def garbage() -> Iterator[None]:
    """Keep finalizers from running during a strike."""
    gc.disable()
    yield
    gc.enable()
    KEPT.clear()


@pytest.fixture
def world() -> World:
    made = World()
    made.client.create_table(TABLE, 1)
    let_read(made.client, reader_ports(made))
    return made


def put(world: World, key: bytes, *, one_shot_bytes: int = 4096) -> None:
    client = world.new_client(one_shot_bytes=one_shot_bytes)
    KEPT.append(client)
    with client.begin("bank") as txn:
        txn.write(TABLE, b"1", key=key)
        txn.commit()


def first_letter(key: bytes, row: bytes) -> bytes:
    return key[:1]


@pytest.fixture
def rows(world: World) -> Iterator[Replica]:
    with world.client.replica(TABLE, threads=False, index={"first": first_letter}) as found:
        put(world, b"a")
        found.snapshot().close()
        yield found


@pytest.mark.parametrize("one_shot_bytes", [4096, 0])
def test_a_struck_commit_breaks_nothing(world: World, one_shot_bytes: int) -> None:
    """By one command, and by a journal."""
    struck(lambda: put(world, b"a", one_shot_bytes=one_shot_bytes), outside=lambda: world._in_step)
    put(world, b"b", one_shot_bytes=one_shot_bytes)


def read(rows: Replica) -> None:
    with rows.snapshot() as view:
        list(view.scan(TABLE))
        list(view.scan(TABLE, reverse=True))
        view.get(TABLE, b"a")
        list(view.lookup("first", b"a"))
        list(view.versions(TABLE, b"a"))


def test_reads_of_tables(world: World, rows: Replica) -> None:
    struck(lambda: read(rows), outside=lambda: world._in_step)
    with rows.snapshot() as view:
        assert list(view.scan(TABLE)) == [(b"a", b"1")]


def test_laying_rows_down(world: World, rows: Replica) -> None:
    """The function of an index, too."""

    def follow() -> None:
        put(world, b"a")
        rows.snapshot().close()

    struck(follow, outside=lambda: world._in_step)
    with rows.snapshot() as view:
        assert list(view.scan(TABLE)) == [(b"a", b"1")]
        assert list(view.lookup("first", b"a")) == [(b"a", b"1")]


def test_transactions_of_tables(world: World, rows: Replica) -> None:
    def transact() -> None:
        with suppress(anabranch.errors.LocksBroken), rows.begin() as txn:
            txn.put(TABLE, b"a", txn.get(TABLE, b"a") or b"")
            txn.commit()

    struck(transact, outside=lambda: world._in_step)
    transact()


def test_the_function_of_an_index(world: World) -> None:
    """The function's own error is unchanged, and a note says for which row it was."""

    def failing(key: bytes, row: bytes) -> bytes:
        raise Struck

    with world.client.replica(TABLE, threads=False, index={"fails": failing}) as found:
        put(world, b"a")
        with pytest.raises(Struck) as raised:
            found.snapshot()
    (note,) = raised.value.__notes__
    assert "index 'fails'" in note


@pytest.mark.parametrize(
    "record",
    [r.Reply(b"c" * 16, b"digest!!", 7, r.Begun(bytes(16), 1, 1)), r.FindScope("bank", True, None)],
)
def test_a_struck_decoding_breaks_nothing(record: Any) -> None:
    data = encode(record)
    struck(lambda: decode(data))


def test_answers_of_brokers() -> None:
    body = bytes(4) + b"\0\0" + bytes(12)
    struck(lambda: calls.answer(calls.INIT_PRODUCER_ID, 0, body[:16]))
