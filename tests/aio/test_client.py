"""The asyncio client on a real broker: threads, cancellation, and what must not block the loop.

`tests.behaviour.conftest.BOTH` names the tests that run over both clients.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from _thread import allocate_lock
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
from greenlet import getcurrent  # type: ignore[import-untyped]

import anabranch
import anabranch.aio
from anabranch import errors
from anabranch.aio import AsyncClient, AsyncTableTransaction, AsyncTransaction, loop
from tests.cluster import Cluster

pytestmark = pytest.mark.broker

MOST_THREADS = 4
COMMITS = 1000
SLOW_S = 0.1  # the longest that the loop may be kept by one step
Scenario = Callable[[AsyncClient, str, str], Coroutine[Any, Any, None]]


@pytest.fixture
def run(cluster: Cluster, unique: str) -> Callable[[Scenario], None]:
    """Run a scenario with a client, a new scope and its stream."""

    def begin(scenario: Scenario) -> None:
        async def main() -> None:
            async with anabranch.aio.connect(cluster.bootstrap) as client:
                await client.create_stream(f"s{unique}/events", segments=2)
                await scenario(client, f"s{unique}", f"s{unique}/events")

        asyncio.run(main())

    return begin


async def values(client: AsyncClient, stream: str) -> list[bytes | None]:
    """The values of all committed events."""
    return [event.value async for event in (await client.snapshot(stream)).read(stream)]


# -- a line through the calls -----------------------------------------------------------------------------


def test_written_committed_and_read(run: Callable[[Scenario], None]) -> None:
    async def scenario(client: AsyncClient, scope: str, stream: str) -> None:
        async with client.begin(scope) as txn:
            await txn.write(stream, b"one command", key=b"k")
            result = await txn.commit()
        assert result.counts.committed == 1
        async with client.begin(scope) as txn:
            await txn.write_many(stream, [(b"joined", b"k")] * 3000)
            async with client.join(await txn.token()) as writer:
                await writer.write(stream, b"by a writer", key=b"k")
            await txn.commit()
        async with client.begin(scope) as txn:
            await txn.write(stream, b"left", key=b"k")
        found = [event.value async for event in client.read(stream, timeout=1)]
        # Writers of one transaction have no order among them.
        assert found[0] == b"one command"
        assert Counter(found[1:]) == {b"joined": 3000, b"by a writer": 1}
        assert sorted(map(str, await values(client, stream))) == sorted(map(str, found))

    run(scenario)


def test_positions_of_tasks_move_with_what_is_written(run: Callable[[Scenario], None]) -> None:
    async def scenario(client: AsyncClient, scope: str, stream: str) -> None:
        out, processor = f"{scope}/out", f"{scope}/copy"
        await client.create_stream(out)
        await client.create_processor(processor, stream, tasks=2)

        async def write(txn: AsyncTransaction) -> None:
            for key in (b"a", b"b", b"c"):
                await txn.write(stream, key, key=key)

        await client.transact(write)

        async def copied(most: int) -> list[bytes | None]:
            found = []
            ownership = await client.take_tasks(processor)
            async with client.read(stream, timeout=1, ownership=ownership) as reader:
                async for event in reader:

                    async def copy(
                        txn: AsyncTransaction, value: bytes | None = event.value
                    ) -> None:
                        await txn.write(out, value)

                    await client.transact(copy, consume=reader)
                    found.append(event.value)
                    if len(found) == most:
                        break
            await client.release_tasks(ownership)
            return found

        assert len(await copied(2)) == 2
        assert len(await copied(9)) == 1
        assert Counter(await values(client, out)) == Counter([b"a", b"b", b"c"])

    run(scenario)


def test_tasks_are_inside_the_transaction_in_whose_block_they_begin(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(client: AsyncClient, scope: str, stream: str) -> None:
        async def write(txn: AsyncTransaction) -> None:
            await txn.write(stream, b"alone", key=b"k")

        begun, go = asyncio.Event(), asyncio.Event()

        async def elsewhere() -> None:
            begun.set()
            await go.wait()
            await client.transact(write)

        before = asyncio.create_task(elsewhere())
        await begun.wait()
        async with client.begin(scope) as txn:
            for call in (
                client.transact(write),
                client.scale(stream, 3),
                asyncio.create_task(client.transact(write)),
            ):
                with pytest.raises(errors.NonTransactional):
                    await call
            with client.outside():
                await client.transact(write)
            go.set()
            await before
            await txn.write(stream, b"inside", key=b"k")
            await txn.commit()
            await client.transact(write)
        assert Counter(await values(client, stream)) == {b"alone": 3, b"inside": 1}

    run(scenario)


@pytest.mark.long
def test_members_of_a_group(run: Callable[[Scenario], None]) -> None:
    async def scenario(client: AsyncClient, scope: str, stream: str) -> None:
        async with client.begin(scope) as txn:
            await txn.write_many(stream, [(b"%d" % n, b"%d" % n) for n in range(100)])
            await txn.commit()

        async def member() -> list[bytes | None]:
            async with client.read(stream, f"g{scope}", timeout=4) as reader:
                return [event.value async for event in reader]

        shares = await asyncio.gather(member(), member())
        assert {value for share in shares for value in share} == {b"%d" % n for n in range(100)}
        assert (await client.group(f"g{scope}")).most.events == 0

    run(scenario)


@pytest.mark.long
def test_tables(run: Callable[[Scenario], None]) -> None:
    async def scenario(client: AsyncClient, scope: str, _: str) -> None:
        table = f"{scope}/accounts"
        await client.create_table(table)
        async with client.replica(table) as replica:

            async def add(txn: AsyncTableTransaction) -> None:
                sum_now = int(await txn.get(table, b"sum") or b"0")
                await asyncio.sleep(0)  # the function is the loop's, not a greenlet's
                await txn.put(table, b"sum", b"%d" % (sum_now + 1))

            await client.create_stream(f"{scope}/added")

            async def add_and_tell(txn: AsyncTableTransaction) -> int:
                await add(txn)
                await txn.write(f"{scope}/added", b"one")
                return 7

            await asyncio.gather(*(replica.transact(add, timeout=30) for _ in range(19)))
            assert (await replica.transact(add_and_tell)).value == 7
            assert [e.value async for e in client.read(f"{scope}/added", timeout=1)] == [b"one"]
            async with replica.begin() as txn:
                assert await txn.get(table, b"sum") == b"20"
                assert [row async for row in txn.scan(table)] == [(b"sum", b"20")]
            async with replica.snapshot() as seen:
                assert [row async for row in seen.scan(table)] == [(b"sum", b"20")]

            async def send(txn: AsyncTransaction) -> str:
                await txn.write(f"{scope}/added", b"two")
                return "sent"

            assert (await client.transact(send)).value == "sent"
            with pytest.raises(errors.InvalidArgument, match="async"):
                await replica.transact(lambda txn: None)  # type: ignore[arg-type, return-value]

            async def fails(txn: AsyncTableTransaction) -> None:
                await txn.put(table, b"sum", b"0")
                raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                await replica.transact(fails)
        changes = [change.after async for change in client.changes(table, timeout=1)]
        assert changes == [b"%d" % n for n in range(1, 21)]

    run(scenario)


# -- threads and the loop ---------------------------------------------------------------------------------


def test_a_thousand_commits_need_four_threads(run: Callable[[Scenario], None]) -> None:
    before = set(threading.enumerate())
    seen: list[int] = []

    async def scenario(client: AsyncClient, scope: str, stream: str) -> None:
        under_way, all_wrote = 0, asyncio.Event()

        async def one(number: int) -> None:
            nonlocal under_way
            async with client.begin(scope) as txn:
                await txn.write(stream, b"%d" % number, key=b"%d" % number)
                under_way += 1
                if under_way == COMMITS:
                    seen.append(len(set(threading.enumerate()) - before) + 1)
                    all_wrote.set()
                await all_wrote.wait()
                await txn.commit(timeout=60)
                if number % 100 == 0:
                    seen.append(len(set(threading.enumerate()) - before) + 1)

        await asyncio.gather(*map(one, range(COMMITS)))
        assert len(await values(client, stream)) == COMMITS

    run(scenario)
    assert len(seen) == 11
    assert max(seen) <= MOST_THREADS, seen


def of_thread() -> tuple[float, float]:
    """Seconds that this thread has run, and seconds that it could have run or did (Linux)."""
    ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return int(ran) / 1e9, time.monotonic() - int(waited) / 1e9


@contextmanager
def slow_steps(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Steps of an event loop that took long, without the time for which the machine was busy with others."""
    found: list[str] = []
    run_step = asyncio.Handle._run

    def timed(self: asyncio.Handle) -> None:
        ran, passed = of_thread()
        run_step(self)
        ran_then, passed_then = of_thread()
        if passed_then - passed > SLOW_S:
            found.append(f"{self!r}: {passed_then - passed:.3f} s, {ran_then - ran:.3f} of CPU")

    with patch.context() as patched:
        patched.setattr(asyncio.Handle, "_run", timed)
        yield found


async def bit_of_everything(client: AsyncClient, scope: str, stream: str) -> None:
    """Commits in one command and by journals, both kinds of readers, a table."""

    async def one(number: int) -> None:
        async with client.begin(scope) as txn:
            await txn.write(stream, b"%d" % number, key=b"%d" % number)
            if number % 50 == 0:
                await txn.flush()
            await txn.commit()

    await asyncio.gather(*map(one, range(100)))
    assert len(set(await values(client, stream))) == 100
    group = f"g{time.monotonic_ns()}"
    assert len([1 async for _ in client.read(stream, group, timeout=2)]) >= 100
    await client.create_table(f"{scope}/table")
    async with client.replica(f"{scope}/table") as replica:
        await replica.transact(lambda txn: txn.put(f"{scope}/table", b"k", b"v"))


def test_nothing_blocks_the_loop(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What blocks does so each time; other threads that have the interpreter lock do it now and then."""
    with slow_steps(monkeypatch) as slow:
        for _ in range(3):
            slow.clear()
            run(bit_of_everything)
            if not slow:
                return
    pytest.fail("\n".join(slow))


class WatchedLock:
    """`threading.Lock`, with the greenlets that hold one."""

    holders: ClassVar[list[object]] = []

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._holder: object = None
        self.locked = self._lock.locked

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = self._lock.acquire(blocking, timeout)
        if taken:
            self._holder = getcurrent()
            self.holders.append(self._holder)
        return taken

    def release(self) -> None:
        self.holders.remove(self._holder)
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def test_no_lock_of_threads_is_held_across_a_wait(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second greenlet that wants it would stop the loop."""
    parked = 0
    park = loop.park
    make_lock = loop.LoopLock.__init__

    def unwatched(self: loop.LoopLock, waits: loop.LoopWaits) -> None:
        make_lock(self, waits)
        self._taken = allocate_lock()  # greenlets never block on it

    def watched(awaited: Any) -> Any:
        nonlocal parked
        parked += 1
        assert getcurrent() not in WatchedLock.holders
        return park(awaited)

    monkeypatch.setattr(threading, "Lock", WatchedLock)
    monkeypatch.setattr(loop.LoopLock, "__init__", unwatched)
    monkeypatch.setattr(loop, "park", watched)
    run(bit_of_everything)
    assert parked > 100


# -- cancellation -----------------------------------------------------------------------------------------


async def cancelled_at_random(
    client: AsyncClient, scope: str, stream: str, number: int
) -> tuple[bytes, bool]:
    """A transaction's only value, and whether it is committed, as its client says after a cancellation."""
    value, chance = b"%d" % number, random.Random(number)
    txn: AsyncTransaction | None = None

    async def write_and_commit() -> None:
        nonlocal txn
        if number % 2:
            async with client.begin(scope) as txn:
                await body(txn)
        else:
            txn = await client.begin(scope)
            await body(txn)

    async def body(txn: AsyncTransaction) -> None:
        await txn.write(stream, value, key=value)
        if number % 25 == 0:
            await txn.flush()
        await txn.commit()

    task = asyncio.create_task(write_and_commit())
    if chance.random() < 0.3:
        for _ in range(chance.randrange(8)):  # before the commit is on its way, or just after
            await asyncio.sleep(0)
    else:
        await asyncio.sleep(chance.random() ** 2 * 0.06)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    if txn is None or txn.txn_id is None:  # nothing can have been sent
        return value, False
    if txn.result is not None:
        return value, True
    if number % 4 == 0 and txn.state in ("sent", "doubted"):  # a commit may be repeated
        await txn.commit()
        return value, True
    found = await client.resolve(txn.txn_id)
    if found.state == "OPEN":
        await txn.abort()
        found = await client.resolve(txn.txn_id)
    while found.state not in ("COMMITTED", "ABORTED"):
        await asyncio.sleep(0.02)
        found = await client.resolve(txn.txn_id)
    return value, found.state == "COMMITTED"


def test_a_cancelled_commit_leaves_no_doubt(run: Callable[[Scenario], None]) -> None:
    took: list[float] = []

    async def scenario(client: AsyncClient, scope: str, stream: str) -> None:
        began = time.monotonic()
        reported: dict[bytes, bool] = {}
        left = iter(range(COMMITS))

        async def some() -> None:
            for number in left:
                value, committed = await cancelled_at_random(client, scope, stream, number)
                reported[value] = committed

        await asyncio.gather(*(some() for _ in range(40)))
        there = await values(client, stream)
        took.append(time.monotonic() - began)
        assert len(reported) == COMMITS
        assert len(there) == len(set(there))
        assert set(there) == {value for value, committed in reported.items() if committed}
        assert COMMITS * 0.1 < len(there) < COMMITS * 0.98  # moments on both sides

    run(scenario)
    assert took[0] < 60


@pytest.mark.long
def test_the_outcome_of_each_moment(run: Callable[[Scenario], None]) -> None:
    """A commit is cancelled at each of its waits in turn; the same handle then has the outcome."""

    async def scenario(client: AsyncClient, scope: str, stream: str) -> None:
        states = set()
        for steps in range(8):
            txn = await client.begin(scope)
            await txn.write(stream, b"%d" % steps, key=b"k")
            task = asyncio.create_task(txn.commit())
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            states.add(txn.state)
            result = await txn.commit()
            assert (await client.state(result.txn_id)).state == "COMMITTED"
            assert (await txn.commit()) == result
        assert states >= {"sent"}
        assert len(await values(client, stream)) == 8

    run(scenario)


# -- whose loop, whose lock -------------------------------------------------------------------------------


def test_a_client_is_of_one_loop(run: Callable[[Scenario], None], cluster: Cluster) -> None:
    async def scenario(client: AsyncClient, scope: str, stream: str) -> None:
        async def elsewhere() -> None:
            with pytest.raises(errors.IllegalState, match="event loop"):
                await client.describe(stream)

        await asyncio.to_thread(asyncio.run, elsewhere())

    run(scenario)


@pytest.mark.long
def test_tasks_share_a_transaction(run: Callable[[Scenario], None]) -> None:
    """Its calls come one after the other, as those of threads do."""

    async def scenario(client: AsyncClient, scope: str, stream: str) -> None:
        async with client.begin(scope) as txn:
            writes = [txn.write(stream, b"%d" % n, key=b"k") for n in range(50)]
            flushes = [txn.flush() for _ in range(3)]
            await asyncio.gather(*writes[:25], *flushes, *writes[25:])
            first, second = await asyncio.gather(txn.commit(), txn.commit())
            assert first == second
        found = await values(client, stream)
        assert len(found) == 50
        assert set(found) == {b"%d" % n for n in range(50)}

    run(scenario)


@pytest.mark.long
def test_blocking_code_beside_it(run: Callable[[Scenario], None], cluster: Cluster) -> None:
    """A blocking client in a thread of the same process."""

    async def scenario(client: AsyncClient, scope: str, stream: str) -> None:
        def blocking() -> None:
            with anabranch.connect(cluster.bootstrap) as other, other.begin(scope) as txn:
                txn.write(stream, b"blocking")
                txn.commit()

        async with client.begin(scope) as txn:
            await txn.write(stream, b"aio")
            await asyncio.gather(asyncio.to_thread(blocking), txn.commit())
        assert set(await values(client, stream)) == {b"blocking", b"aio"}

    run(scenario)


@pytest.mark.long
def test_a_dropped_client_closes_in_its_loop(cluster: Cluster, unique: str) -> None:
    before = set(threading.enumerate())

    async def main() -> None:
        client = await anabranch.aio.connect(cluster.bootstrap)
        await client.create_stream(f"s{unique}/events")
        with pytest.warns(ResourceWarning, match="not closed"):
            del client
        ended = time.monotonic() + 10
        while any(
            thread.name == "anabranch-replies" for thread in set(threading.enumerate()) - before
        ):
            assert time.monotonic() < ended
            await asyncio.sleep(0.02)

    asyncio.run(main())
