"""Parts that processes of crash and fault tests share: how they end, their threads, and files for each other."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from anabranch.errors import RetryError
from tests.crash.zygote import say

log = logging.getLogger(__name__)

T = TypeVar("T")


def wait_more(commits: Callable[[], int], seconds: float = 60.0) -> None:
    """Fail unless more commits are told soon: those of a whole run don't show that it goes on."""
    before, until = commits(), time.monotonic() + seconds
    while commits() == before:
        assert time.monotonic() < until, f"no commit is told after the first {before}"
        time.sleep(0.1)


def until_told() -> threading.Event:
    """Set by SIGTERM."""
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: ending.set())
    return ending


def run_threads(number: int, bodies: Iterable[Callable[[], None]]) -> None:
    """Each in a thread, to their ends; says ``works`` when all have begun."""
    threads = [threading.Thread(target=body) for body in bodies]
    for thread in threads:
        thread.start()
    say(number, "works")
    for thread in threads:
        while thread.is_alive():  # signals are taken in between
            thread.join(0.05)


def run_guarded(
    number: int, bodies: Iterable[Callable[[], None]], fails: Callable[[str], None]
) -> int:
    """The same; 1 if one of them failed. ``fails`` is told why, in the thread, as soon as one does."""
    failed: list[str] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test has to hear of it
            failed.append(f"{type(error).__name__}: {error}")
            fails(failed[-1])

    run_threads(number, [lambda body=body: guarded(body) for body in bodies])  # type: ignore[misc]
    return 1 if failed else 0


def read_on(reader: Iterable[T]) -> Iterator[T]:
    """All that a reader gives: after a `RetryError` going on is safe, it says."""
    while True:
        try:
            for each in reader:  # noqa: UP028 - `yield from` would close the reader
                yield each
        except RetryError as error:
            log.warning("a reader goes on after: %s", error)
            time.sleep(0.1)
        else:
            return


def put(path: Path, text: str) -> None:
    """A whole file or none."""
    temporary = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
    temporary.write_text(text)
    temporary.replace(path)
