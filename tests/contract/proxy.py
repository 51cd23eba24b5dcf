"""A faulty network between a log and its broker: it can lose requests and answers, by their kind."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Faults:
    """Which calls are lost: (api key) -> what happens, once."""

    lose_request: set[int] = field(default_factory=set)
    lose_answer: set[int] = field(default_factory=set)
    close_before: set[int] = field(default_factory=set)
    seen: list[int] = field(default_factory=list)


class Proxy:
    """Stands in for `socket.create_connection` of the log's connections."""

    def __init__(self, connect: Callable[..., socket.socket]) -> None:
        self.faults = Faults()
        self._connect = connect
        self._pairs: list[tuple[socket.socket, socket.socket]] = []

    def create_connection(self, address: tuple[str, int], timeout: float | None) -> socket.socket:
        """A connection whose requests and answers pass through here."""
        ours, theirs = socket.socketpair()
        broker = self._connect(address, timeout)
        broker.settimeout(None)
        self._pairs.append((theirs, broker))
        threading.Thread(target=self._requests, args=(theirs, broker), daemon=True).start()
        # Only TCP sockets know about delays.
        return _Quiet(ours)  # type: ignore[return-value]

    def cut_all(self) -> None:
        """Close every connection, as a broker does with idle ones."""
        for theirs, broker in self._pairs:
            _shut(theirs)
            _shut(broker)
        self._pairs.clear()

    def _requests(self, theirs: socket.socket, broker: socket.socket) -> None:
        """One request and its answer after the other, as the broker itself does."""
        faults = self.faults
        try:
            while True:
                request = _frame(theirs)
                key = int.from_bytes(request[4:6], "big")
                faults.seen.append(key)
                if key in faults.close_before:
                    faults.close_before.discard(key)
                    break
                if key in faults.lose_request:
                    faults.lose_request.discard(key)
                    continue
                broker.sendall(request)
                answer = _frame(broker)
                if key in faults.lose_answer:
                    faults.lose_answer.discard(key)
                    break
                theirs.sendall(answer)
        except OSError:
            pass
        finally:
            _shut(theirs)
            _shut(broker)


class _Quiet:
    """A socket that ignores TCP's options."""

    def __init__(self, inner: socket.socket) -> None:
        self._inner = inner

    def setsockopt(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def __del__(self) -> None:
        self._inner.close()


def _frame(source: socket.socket) -> bytes:
    head = _exactly(source, 4)
    return head + _exactly(source, int.from_bytes(head, "big"))


def _exactly(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = source.recv(size - len(data))
        if not more:
            raise ConnectionResetError
        data += more
    return data


def _shut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
