"""Greenlets of an event loop: what they wait for, with threads on the other side, and how they are cancelled.

Each test runs in asyncio's own loop, and in uvloop's.
"""

from __future__ import annotations

import asyncio
import gc
import select
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextvars import ContextVar
from queue import Empty
from typing import Any

import pytest

from anabranch.aio.handles import Rows
from anabranch.aio.loop import LoopLock, LoopWaits
from anabranch.errors import IllegalState
from anabranch.waits import THREADS, here

SOON_S = 0.02
LONG_S = 5.0
Run = Callable[[Callable[[LoopWaits], Coroutine[Any, Any, None]]], None]
noted: ContextVar[str] = ContextVar("noted", default="nothing")


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a coroutine function in a loop, and close what it used."""
    new_loop = pytest.importorskip(request.param).new_event_loop

    def begin(main: Callable[[LoopWaits], Coroutine[Any, Any, None]]) -> None:
        async def in_loop() -> None:
            waits = LoopWaits(asyncio.get_running_loop())
            try:
                await asyncio.wait_for(main(waits), 20)
            finally:
                waits.close()

        with asyncio.Runner(debug=True, loop_factory=new_loop) as runner:
            runner.run(in_loop())

    return begin


def later(call: Callable[[], object], seconds: float = SOON_S) -> None:
    threading.Timer(seconds, call).start()


def test_calls_return_raise_and_see_their_loop(run: Run) -> None:
    async def main(waits: LoopWaits) -> None:
        assert await waits.call(lambda: here()) is waits
        assert here() is THREADS
        assert await waits.call(lambda: here().run(here)) is waits  # in a thread of it
        with pytest.raises(ZeroDivisionError):
            await waits.call(lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            await waits.call(lambda: here().run(lambda: 1 // 0))
        await waits.call(noted.set, "in the greenlet")
        assert noted.get() == "in the greenlet"

    run(main)


def test_waits_go_on_side_by_side(run: Run) -> None:
    async def main(waits: LoopWaits) -> None:
        began = time.monotonic()
        await asyncio.gather(*(waits.call(lambda: here().sleep(0.2)) for _ in range(100)))
        assert 0.2 <= time.monotonic() - began < 10, "one after the other they take 20 s"

    run(main)


def test_a_thread_wakes_a_greenlet(run: Run) -> None:
    async def main(waits: LoopWaits) -> None:
        signal, queue, condition = waits.signal(), waits.queue(), waits.condition()
        later(signal.set)
        assert await waits.call(signal.wait, LONG_S)
        assert not await waits.call(waits.signal().wait, SOON_S)
        later(lambda: queue.put("item"))
        assert await waits.call(queue.get, timeout=LONG_S) == "item"
        with pytest.raises(Empty):
            await waits.call(queue.get, timeout=SOON_S)

        def notify() -> None:
            with condition:
                condition.notify_all()

        def wait(seconds: float) -> bool:
            with condition:
                return condition.wait(seconds)

        later(notify)
        assert await waits.call(wait, LONG_S)
        assert not await waits.call(wait, SOON_S)

    run(main)


def test_a_batch_of_replies_is_one_call_of_the_loop(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(waits: LoopWaits) -> None:
        loop, calls = asyncio.get_running_loop(), []
        soon = loop.call_soon_threadsafe

        def counted(call: Callable[..., object], *args: Any) -> Any:
            calls.append(call)
            return soon(call, *args)

        queues = [waits.queue() for _ in range(100)]
        waiting = [asyncio.ensure_future(waits.call(q.get, timeout=LONG_S)) for q in queues]
        await asyncio.sleep(SOON_S)
        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)

        def reply() -> None:
            for number, queue in enumerate(queues):
                queue.put(number)

        replies = threading.Thread(target=reply)
        replies.start()
        replies.join()  # the loop can't run meanwhile
        assert await asyncio.gather(*waiting) == [*range(100)]
        assert len(calls) == 1

    run(main)


def test_greenlets_and_threads_share_a_lock(run: Run) -> None:
    async def main(waits: LoopWaits) -> None:
        lock, inside, most = waits.lock(), 0, 0

        def work() -> None:
            nonlocal inside, most
            for _ in range(5):
                with lock, lock:  # its holder may take it again
                    inside += 1
                    most = max(most, inside)
                    here().sleep(0.002)
                    inside -= 1

        await asyncio.gather(
            *(waits.call(work) for _ in range(5)), *(asyncio.to_thread(work) for _ in range(3))
        )
        assert (most, inside) == (1, 0)

    run(main)


def test_a_cancelled_waiter_passes_its_turn_on(run: Run) -> None:
    """The lock was released for it at the moment when it was cancelled."""

    async def main(waits: LoopWaits) -> None:
        lock = LoopLock(waits)
        got = []

        def take() -> None:
            with lock:
                got.append(1)

        lock.acquire()  # by the loop's thread
        first, second = (asyncio.ensure_future(waits.call(take)) for _ in range(2))
        await asyncio.sleep(SOON_S)
        lock.release()
        first.cancel()
        await asyncio.wait_for(second, 60)
        with pytest.raises(asyncio.CancelledError):
            await first
        assert got == [1]
        await waits.call(take)

    run(main)


def test_the_loop_s_thread_does_not_wait_for_a_greenlet(run: Run) -> None:
    """It would wait without end, as the greenlet waits for the loop."""

    async def main(waits: LoopWaits) -> None:
        lock = waits.lock()

        def hold() -> None:
            with lock:
                here().sleep(SOON_S)

        holder = asyncio.ensure_future(waits.call(hold))
        await asyncio.sleep(0)
        with pytest.raises(IllegalState, match="under way"):
            lock.acquire()
        await holder
        assert lock.acquire()

    run(main)


def test_a_lock_is_waited_for_until_a_time(run: Run) -> None:
    async def main(waits: LoopWaits) -> None:
        lock = waits.lock()
        lock.acquire()  # by the loop's thread
        assert not await waits.call(lock.acquire, timeout=SOON_S)
        assert not await waits.call(lock.acquire, blocking=False)
        lock.release()
        assert await waits.call(lock.acquire, timeout=SOON_S)

    run(main)


def test_a_cancellation_is_raised_where_it_waits(run: Run) -> None:
    async def main(waits: LoopWaits) -> None:
        seen: list[str] = []

        def work() -> None:
            try:
                here().sleep(LONG_S)
            except asyncio.CancelledError:
                here().sleep(SOON_S)  # cleaning up may wait
                seen.append("cleaned up")
                raise
            finally:
                seen.append("finally")

        task = asyncio.ensure_future(waits.call(work))
        await asyncio.sleep(SOON_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen == ["cleaned up", "finally"]

    run(main)


def test_a_call_in_a_library_ends_before_its_cancellation(run: Run) -> None:
    async def main(waits: LoopWaits) -> None:
        ended: list[str] = []

        def slow() -> str:
            time.sleep(0.1)
            ended.append("call")
            return "result"

        for drop, there in ((None, ["call"]), (ended.append, [])):
            ended.clear()
            task = asyncio.ensure_future(waits.call(lambda drop=drop: here().run(slow, drop=drop)))
            await asyncio.sleep(SOON_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert ended == there
        await asyncio.sleep(0.2)
        assert ended == ["call", "result"]  # it was dropped when it came

    run(main)


def test_a_dropped_task_ends_its_greenlet(run: Run) -> None:
    ended = []

    async def main(waits: LoopWaits) -> None:
        def work() -> None:
            try:
                here().sleep(LONG_S)
            finally:
                ended.append(1)

        call = waits.call(work)
        call.send(None)  # up to its wait
        call.close()
        assert ended == [1]

    run(main)
    gc.collect()


def test_iterating(run: Run) -> None:
    async def main(waits: LoopWaits) -> None:
        ended: list[str] = []

        def rows(name: str) -> Iterator[int]:
            try:
                for number in range(3):
                    here().sleep(0.001)
                    yield number
                if name == "fails":
                    raise ZeroDivisionError
                here().sleep(LONG_S if name == "long" else 0)
            finally:
                ended.append(name)

        assert [row async for row in Rows(waits, rows("all"))] == [0, 1, 2]
        with pytest.raises(ZeroDivisionError):
            _ = [row async for row in Rows(waits, rows("fails"))]
        async for _ in Rows(waits, rows("left")):
            break
        gc.collect()
        assert ended == ["all", "fails", "left"]

        long = aiter(Rows(waits, rows("long")))
        assert [await anext(long) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(long), SOON_S)
        assert ended[3:] == ["long"]
        with pytest.raises(StopAsyncIteration):
            await anext(long)

        single = Rows(waits, rows("single"))
        assert [await anext(single), await anext(single)] == [0, 1]

    run(main)


def test_sockets(run: Run) -> None:
    async def main(waits: LoopWaits) -> None:
        one, other = socket.socketpair()
        with one, other:
            later(lambda: other.send(b"x"))
            began = time.monotonic()
            assert await waits.call(waits.ready, (one.fileno(),), select.POLLIN, LONG_S) == 0
            assert time.monotonic() - began < LONG_S / 2
            assert one.recv(1) == b"x"
            assert await waits.call(waits.ready, (one.fileno(),), select.POLLIN, SOON_S) == 0
            assert await waits.call(waits.ready, (one.fileno(),), select.POLLOUT, LONG_S) == 0
            assert waits.ready((one.fileno(),), select.POLLIN, 1.5) == 1.5  # not in a greenlet

    run(main)


def test_jobs_and_other_loops(run: Run) -> None:
    async def main(waits: LoopWaits) -> None:
        done = threading.Event()

        def work() -> None:
            here().sleep(SOON_S)
            done.set()

        job = waits.start("job", work)
        assert job.is_alive()
        job.join(LONG_S)  # it would never end if the loop waited here
        assert not done.is_set()
        await waits.call(job.join, LONG_S)
        assert done.is_set()
        assert not job.is_alive()

        async def elsewhere() -> None:
            with pytest.raises(IllegalState, match="event loop"):
                await waits.call(work)

        await asyncio.to_thread(asyncio.run, elsewhere())

    run(main)
