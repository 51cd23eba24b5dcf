"""A faulty network between a log and its broker: it can lose requests and answers, by their kind."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.faults.proxy import HOST, Action, Cut, Swallow
from tests.faults.proxy import Proxy as TcpProxy
from tests.faults.proxy_frames import Request


@dataclass
class Faults:
    """Which calls are lost: (api key) -> what happens, once. ``frozen``: those that are, each time."""

    lose_request: set[int] = field(default_factory=set)
    lose_answer: set[int] = field(default_factory=set)
    close_before: set[int] = field(default_factory=set)
    other: dict[int, Action] = field(default_factory=dict)
    frozen: Sequence[int] = ()
    seen: list[int] = field(default_factory=list)

    def __call__(self, request: Request) -> Action | None:
        self.seen.append(request.api)
        if request.api in self.frozen:
            return Swallow()
        for keys, action in (
            (self.close_before, Cut()),
            (self.lose_request, Swallow()),
            (self.lose_answer, Cut(after=True)),
        ):
            if request.api in keys:
                keys.discard(request.api)
                return action
        return self.other.pop(request.api, None)


class Proxy:
    """Stands in for `socket.create_connection` of the log's connections: the broker knows of no proxy."""

    def __init__(self, connect: Callable[..., socket.socket]) -> None:
        self.faults = Faults()
        self._connect = connect
        self._proxies: dict[tuple[str, int], TcpProxy] = {}

    def create_connection(self, address: tuple[str, int], timeout: float | None) -> socket.socket:
        """A connection whose requests and answers pass through here."""
        if address not in self._proxies:
            self._proxies[address] = TcpProxy(address, self.faults)
        return self._connect((HOST, self._proxies[address].port), timeout)

    def cut_all(self) -> None:
        """Close every connection, as a broker does with idle ones."""
        for one in self._proxies.values():
            one.cut_all()

    def close(self) -> None:
        """Close the proxies, too."""
        for one in self._proxies.values():
            one.close()
