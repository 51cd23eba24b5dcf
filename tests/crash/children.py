"""Parts that processes of crash and fault tests share: how they end, their threads, and files for each other."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.crash.zygote import say


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


def put(path: Path, text: str) -> None:
    """A whole file or none."""
    temporary = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
    temporary.write_text(text)
    temporary.replace(path)
