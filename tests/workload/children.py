"""The parts that all forked clients share: how they end, their threads, and files for each other."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from anabranch.errors import RetryError
from tests.workload.zygote import say

log = logging.getLogger(__name__)
_PAUSE_S = 0.1  # after an unexpected error

T = TypeVar("T")


def wait_more(commits: Callable[[], int], seconds: float = 60.0) -> None:
    """Fail unless another commit is answered soon: those of a whole run don't show that work continues."""
    before, until = commits(), time.monotonic() + seconds
    while commits() == before:
        assert time.monotonic() < until, f"no commit is answered after the first {before}"
        time.sleep(0.1)


class Ending(threading.Event):
    """Set by SIGTERM, and by SIGUSR2, which says that nothing more will be written."""

    def __init__(self) -> None:
        super().__init__()
        self.at_end = False
        signal.signal(signal.SIGTERM, lambda *_: self.set())
        signal.signal(signal.SIGUSR2, lambda *_: self._last())

    def _last(self) -> None:
        self.at_end = True
        self.set()


def run_threads(number: int, bodies: Sequence[Callable[[], None]]) -> int:
    """Run each in a thread to its end, and say ``works`` when all have begun. Returns 1 if one failed."""
    failed: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test must fail
            failed.append(error)
            say_failed(number, error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    say(number, "works")
    for thread in threads:
        while thread.is_alive():  # signals are taken in between
            thread.join(0.05)
    return 1 if failed else 0


def repeat(
    number: int, ending: Ending, act: Callable[[], object], expected: tuple[type[Exception], ...]
) -> None:
    """Act until the end is due. Expected errors are said as ``trouble``, others as ``failed``."""
    while not ending.is_set():
        try:
            act()
        except expected as error:
            say(number, "trouble", kind=type(error).__name__, why=str(error)[:300])
        except Exception as error:  # noqa: BLE001 - the test fails at its end
            say_failed(number, error)
            ending.wait(_PAUSE_S)


def say_failed(number: int, error: BaseException) -> None:
    say(number, "failed", why=f"{type(error).__name__}: {error}"[:1000])


def read_on(reader: Iterable[T]) -> Iterator[T]:
    """Yield all that a reader gives: after a `RetryError` reading may continue."""
    while True:
        try:
            for each in reader:  # noqa: UP028 - `yield from` would close the reader
                yield each
        except RetryError as error:
            log.warning("a reader continues after: %s", error)
            time.sleep(0.1)
        else:
            return


def put(path: Path, text: str) -> None:
    """Write a whole file or none."""
    temporary = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
    temporary.write_text(text)
    temporary.replace(path)
